"""An NVIDIA GPU seen through NVML: who else uses it, its clocks, its heat.

Through nvidia-ml-py (``pynvml``) if it can be imported; else by asking ``nvidia-smi``, which costs
a process each time and is therefore asked rarely.
"""

import os
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..errors import UserError

QUERY_LIMIT_S = 20
IDLE_MEMORY = 1 << 30  # bytes that a driver may hold with nobody there
IDLE_UTILISATION = 0.05

# Bits of NVML's "clocks event reasons"; the last column: a run under it is no run.
REASONS = (
    (0x01, "idle", False),
    (0x02, "application clocks", False),
    (0x04, "software power cap", False),
    (0x08, "hardware slowdown", True),
    (0x10, "sync boost", False),
    (0x20, "software thermal slowdown", True),
    (0x40, "hardware thermal slowdown", True),
    (0x80, "hardware power brake", True),
    (0x100, "display clocks", False),
)


@dataclass(frozen=True)
class State:
    """A GPU at one moment: pids with contexts, bytes, a share, MHz, degrees Celsius, watts.

    None is what the GPU does not tell: one that shares the host's memory (GB10) has none of its
    own, and no clock for it.
    """

    pids: frozenset[int]
    memory_used: int | None
    utilisation: float | None
    sm_mhz: int | None
    memory_mhz: int | None
    temperature_c: int | None
    power_w: float | None
    reasons: int


class Driver(Protocol):
    """Two ways to ask; ``period_s`` is how often it may be asked during a run."""

    period_s: float

    def uuids(self) -> list[str]: ...

    def facts(self, uuid: str) -> dict[str, Any]: ...

    def state(self, uuid: str) -> State: ...


class Nvml:
    """NVML through nvidia-ml-py; raises ImportError or UserError where it is not to be had."""

    period_s = 0.2

    def __init__(self):
        import pynvml

        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise UserError(f"NVML does not start: {error}") from None

    def uuids(self) -> list[str]:
        nvml = self._nvml
        handles = map(nvml.nvmlDeviceGetHandleByIndex, range(self._asked(nvml.nvmlDeviceGetCount)))
        return [_text(self._asked(nvml.nvmlDeviceGetUUID, handle)) for handle in handles]

    def facts(self, uuid: str) -> dict[str, Any]:
        nvml, device = self._nvml, self._device(uuid)
        major, minor = self._asked(nvml.nvmlDeviceGetCudaComputeCapability, device)
        memory = self._asked(nvml.nvmlDeviceGetMemoryInfo, device)
        limit = self._asked(nvml.nvmlDeviceGetEnforcedPowerLimit, device)
        return {
            "name": _text(self._asked(nvml.nvmlDeviceGetName, device)),
            "driver": _text(self._asked(nvml.nvmlSystemGetDriverVersion)),
            "compute_capability": f"{major}.{minor}",
            "memory": memory and memory.total,
            "max_sm_mhz": self._asked(nvml.nvmlDeviceGetMaxClockInfo, device, nvml.NVML_CLOCK_SM),
            "max_memory_mhz": self._asked(
                nvml.nvmlDeviceGetMaxClockInfo, device, nvml.NVML_CLOCK_MEM
            ),
            "power_limit_w": limit and round(limit / 1e3, 1),
        }

    def state(self, uuid: str) -> State:
        nvml, device = self._nvml, self._device(uuid)
        memory = self._asked(nvml.nvmlDeviceGetMemoryInfo, device)
        processes = self._asked(nvml.nvmlDeviceGetComputeRunningProcesses, device)
        rates = self._asked(nvml.nvmlDeviceGetUtilizationRates, device)
        power = self._asked(nvml.nvmlDeviceGetPowerUsage, device)
        return State(
            frozenset(one.pid for one in processes or ()),
            memory and memory.used,
            rates and rates.gpu / 100,
            self._asked(nvml.nvmlDeviceGetClockInfo, device, nvml.NVML_CLOCK_SM),
            self._asked(nvml.nvmlDeviceGetClockInfo, device, nvml.NVML_CLOCK_MEM),
            self._asked(nvml.nvmlDeviceGetTemperature, device, nvml.NVML_TEMPERATURE_GPU),
            power and round(power / 1e3, 1),
            self._asked(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, device) or 0,
        )

    def _device(self, uuid: str) -> Any:
        by_uuid = self._nvml.nvmlDeviceGetHandleByUUID
        try:
            return self._asked(by_uuid, uuid)
        except TypeError:  # releases that want bytes
            return self._asked(by_uuid, uuid.encode())

    def _asked(self, question: Any, *of: Any) -> Any:
        """The answer; None for what this GPU does not have or does not tell us."""
        nvml = self._nvml
        try:
            return question(*of)
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_NoPermission):
            return None
        except nvml.NVMLError as error:
            raise UserError(f"NVML does not answer: {error}") from None


class Smi:
    """The same facts from nvidia-smi's CSV."""

    period_s = 2.0

    def __init__(self):
        if shutil.which("nvidia-smi") is None:
            raise UserError(
                "no NVIDIA driver answers: NVML does not start and nvidia-smi is not in PATH"
            )
        self._reasons = "clocks_event_reasons.active"

    def uuids(self) -> list[str]:
        return [row[0] for row in self._query("--query-gpu=uuid")]

    def facts(self, uuid: str) -> dict[str, Any]:
        names = "name,driver_version,compute_cap,memory.total,clocks.max.sm,clocks.max.mem"
        (row,) = self._query(f"--query-gpu={names},enforced.power.limit", uuid)
        return {
            "name": row[0],
            "driver": row[1],
            "compute_capability": row[2],
            "memory": _whole(row[3], 2**20),
            "max_sm_mhz": _whole(row[4]),
            "max_memory_mhz": _whole(row[5]),
            "power_limit_w": _number(row[6]),
        }

    def state(self, uuid: str) -> State:
        names = "memory.used,utilization.gpu,clocks.sm,clocks.mem,temperature.gpu,power.draw"
        try:
            (row,) = self._query(f"--query-gpu={names},{self._reasons}", uuid)
        except UserError:
            # Drivers before 535 call them throttle reasons.
            self._reasons = "clocks_throttle_reasons.active"
            (row,) = self._query(f"--query-gpu={names},{self._reasons}", uuid)
        pids = [row[0] for row in self._query("--query-compute-apps=pid", uuid)]
        return State(
            frozenset(int(pid) for pid in pids if pid.isdigit()),
            _whole(row[0], 2**20),
            None if _number(row[1]) is None else _number(row[1]) / 100,
            _whole(row[2]),
            _whole(row[3]),
            _whole(row[4]),
            _number(row[5]),
            int(row[6], 16) if row[6].startswith("0x") else 0,
        )

    def _query(self, question: str, uuid: str | None = None) -> list[list[str]]:
        command = ["nvidia-smi", question, "--format=csv,noheader,nounits"]
        command += ["-i", uuid] if uuid else []
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_LIMIT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UserError(f"nvidia-smi does not answer: {error}") from None
        if done.returncode:
            raise UserError(f"nvidia-smi: {(done.stdout + done.stderr).strip()[-300:]}")
        return [
            [cell.strip() for cell in line.split(",")]
            for line in done.stdout.splitlines()
            if line.strip()
        ]


def driver() -> Driver:
    """NVML if it can be had, else nvidia-smi. Raises UserError if neither answers."""
    try:
        return Nvml()
    except (ImportError, UserError):
        return Smi()


def in_use(asked: Driver | None = None) -> list[str]:
    """UUIDs of the GPU that a run uses: the first visible one (MLX's default device)."""
    uuids = (asked or driver()).uuids()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        first = visible.split(",")[0].strip()
        if first.startswith(("GPU-", "MIG-")):
            return [next((uuid for uuid in uuids if uuid.startswith(first)), first)]
        if not first.isdigit() or int(first) >= len(uuids):
            raise UserError(f"CUDA_VISIBLE_DEVICES is {visible!r}, which shows no GPU of this host")
        return [uuids[int(first)]]
    if not uuids:
        raise UserError("this host has no NVIDIA GPU; the study's machine says backend: cuda")
    return uuids[:1]


def describe() -> dict[str, Any]:
    """The GPU in use, for environment.json: no serial number, no UUID."""
    asked = driver()
    facts = asked.facts(in_use(asked)[0]) | {"asked_by": type(asked).__name__.lower()}
    return {name: value for name, value in facts.items() if value is not None}


@dataclass(frozen=True)
class GpuReading:
    """What the GPU showed; ``state`` is shared by readings within the driver's period."""

    state: State
    why: str | None
    who: str = ""


@dataclass
class GpuProbe:
    """Other processes on the GPU, and slowdowns by heat or power.

    Until ``settle``, while none of our processes is there yet, memory in use and utilisation
    count too. In a container the driver reports pids of the host, which are not those that we
    know; then the processes that appear before ``settle`` are taken for ours.
    """

    asked: Driver = field(default_factory=driver)
    name: str = "gpu"

    def __post_init__(self):
        (self.uuid,) = in_use(self.asked)
        self._state = self.asked.state(self.uuid)
        self._asked_at = time.monotonic()
        self._others = self._state.pids
        self._adopted: frozenset[int] = frozenset()
        self._settled = False
        self._ours_seen = False

    def settle(self, own: set[int]) -> None:
        """All our processes have loaded: whatever comes now is foreign."""
        self._state = self.asked.state(self.uuid)
        self._ours_seen = bool(self._state.pids & own)
        if not self._ours_seen:
            self._adopted = self._state.pids - self._others
        self._settled = True

    def read(self, own: set[int], thorough: bool) -> GpuReading:
        now = time.monotonic()
        if now - self._asked_at >= self.asked.period_s:
            self._state, self._asked_at = self.asked.state(self.uuid), now
        return GpuReading(self._state, self._disturbance(self._state, own))

    def _disturbance(self, state: State, own: set[int]) -> str | None:
        slowed = [name for bit, name, bad in REASONS if bad and state.reasons & bit]
        if slowed:
            return f"GPU slowed: {', '.join(slowed)}"
        foreign = state.pids - own - self._adopted
        if not self._settled:
            # What is ours cannot be told apart yet where pids are the host's.
            foreign &= self._others
        if foreign:
            return f"{len(foreign)} other processes on the GPU"
        if self._settled or state.pids:
            return None
        if (state.memory_used or 0) > IDLE_MEMORY:
            return "GPU memory held by no visible process"
        if (state.utilisation or 0) > IDLE_UTILISATION:
            return "GPU in use"
        return None

    @staticmethod
    def summary(readings: list[GpuReading]) -> dict[str, Any]:
        """Ranges over a run: {"gpu": {"sm_mhz": [min, max], ..., "reasons": [names]}}."""
        states = [reading.state for reading in readings]
        if not states:
            return {"gpu": None}
        bits = 0
        for state in states:
            bits |= state.reasons

        def seen(name: str) -> list[Any]:
            return [value for s in states if (value := getattr(s, name)) is not None]

        def ends(name: str) -> list[int] | None:
            return [min(seen(name)), max(seen(name))] if seen(name) else None

        used = seen("utilisation")
        return {
            "gpu": {
                "sm_mhz": ends("sm_mhz"),
                "memory_mhz": ends("memory_mhz"),
                "temperature_c": max(seen("temperature_c"), default=None),
                "power_w": max(seen("power_w"), default=None),
                "utilisation": round(sum(used) / len(used), 3) if used else None,
                "memory_used": max(seen("memory_used"), default=None),
                "reasons": [name for bit, name, _ in REASONS if bits & bit],
            }
        }


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # "[N/A]", "[Not Supported]"
        return None


def _whole(text: str, scale: int = 1) -> int | None:
    found = _number(text)
    return None if found is None else round(found * scale)
