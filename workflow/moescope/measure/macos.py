"""A Mac seen from its own commands: chip, memory, heat, power mode, who else computes.

The parsers take a command's output and are pure; ``probe`` and ``sample`` call the commands. None
of them needs root. What a command does not say is None, never a default.
"""

import re
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

LIMIT_S = 10.0
SYSCTL = (
    "machdep.cpu.brand_string",
    "hw.model",
    "hw.memsize",
    "hw.physicalcpu",
    "hw.perflevel0.physicalcpu",
    "hw.perflevel1.physicalcpu",
    "iogpu.wired_limit_mb",
    "kern.osproductversion",
)
POWER_MODES = {0: "automatic", 1: "low", 2: "high"}

Ask = Callable[..., str]


@dataclass(frozen=True)
class Load:
    """CPU use by others, in cores: all of them, and the busiest with its name."""

    total: float
    busiest: float
    name: str | None


def ask(*command: str) -> str:
    """A command's output, empty if it is missing, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def parse_sysctl(text: str) -> dict[str, str]:
    """``sysctl name ...``: name -> value."""
    pairs = (line.split(": ", 1) for line in text.splitlines() if ": " in line)
    return {name.strip(): value.strip() for name, value in pairs}


def parse_therm(text: str) -> dict[str, Any]:
    """``pmset -g therm``: {"throttled": True, False or None, "speed_limit": percent or None,
    "warning": text or None}.

    A cool Apple chip prints notes that nothing was recorded, and no limit at all.
    """
    limits = {
        name: int(value)
        for name, value in re.findall(r"CPU_(Scheduler_Limit|Speed_Limit)\s*=\s*(\d+)", text)
    }
    warning = None
    for line in text.splitlines():
        match = re.search(r"(thermal|performance) (warning )?level\b(.*)", line, re.IGNORECASE)
        if match and "no " not in line.lower() and re.search(r"[1-9]", match[3]):
            warning = line.strip()
    quiet = "no thermal warning level has been recorded" in text.lower()
    throttled: bool | None = None
    if limits or quiet or warning:
        throttled = warning is not None or any(value < 100 for value in limits.values())
    return {"throttled": throttled, "speed_limit": limits.get("Speed_Limit"), "warning": warning}


def parse_power(settings: str, source: str) -> dict[str, Any]:
    """``pmset -g`` and ``pmset -g batt``: {"mode": automatic, low, high or None,
    "source": "ac", "battery" or None}."""
    mode = None
    low = re.search(r"^\s*lowpowermode\s+(\d)", settings, re.MULTILINE)
    if low:
        mode = "low" if low[1] == "1" else "automatic"
    named = re.search(r"^\s*powermode\s+(\d)", settings, re.MULTILINE)
    if named:
        mode = POWER_MODES.get(int(named[1]))
    drawing = re.search(r"drawing from '([^']+)'", source)
    where = None
    if drawing:
        where = "ac" if drawing[1].startswith("AC") else "battery"
    return {"mode": mode, "source": where}


def parse_gpu(text: str) -> dict[str, int | None]:
    """``ioreg -r -d 1 -w 0 -c IOAccelerator``: {"cores", "busy_percent", "memory_in_use"}."""
    patterns = {
        "cores": r'"gpu-core-count"\s*=\s*(\d+)',
        "busy_percent": r'"Device Utilization %"\s*=\s*(\d+)',
        "memory_in_use": r'"In use system memory"\s*=\s*(\d+)',
    }
    found = {name: re.search(pattern, text) for name, pattern in patterns.items()}
    return {name: int(match[1]) if match else None for name, match in found.items()}


def parse_processes(text: str, own: Iterable[int]) -> Load:
    """``ps -A -o pid=,ppid=,%cpu=,comm=``: the load by processes that neither are ``own`` nor
    descend from them. Names lose their folders."""
    rows = []
    for line in text.splitlines():
        parts = line.split(None, 3)
        if len(parts) == 4:
            pid, parent, cpu, name = parts
            rows.append((int(pid), int(parent), float(cpu.replace(",", ".")) / 100, name))
    ours = set(own)
    grown = True
    while grown:
        more = {pid for pid, parent, _, _ in rows if parent in ours} - ours
        ours |= more
        grown = bool(more)
    others = [(cpu, name.rsplit("/", 1)[-1]) for pid, _, cpu, name in rows if pid not in ours]
    busiest = max(others, default=(0.0, None))
    return Load(round(sum(cpu for cpu, _ in others), 4), busiest[0], busiest[1])


def parse_free(text: str) -> float | None:
    """``memory_pressure -Q``: the share of memory that is free."""
    match = re.search(r"free percentage:\s*([\d.]+)%", text)
    return float(match[1]) / 100 if match else None


def working_set(memory: int, wired_limit_mb: int | None) -> int:
    """Bytes that the GPU may use: the user's wired limit if one is set, else what Metal
    recommends, about three quarters of the memory (two thirds up to 36 GB)."""
    if wired_limit_mb:
        return wired_limit_mb << 20
    return memory * 2 // 3 if memory <= 36 << 30 else memory * 3 // 4


def probe(run: Ask = ask) -> dict[str, Any]:
    """What a record says of this Mac; no host name, no user name."""
    values = parse_sysctl(run("sysctl", *SYSCTL))
    memory = _whole(values.get("hw.memsize"))
    wired = _whole(values.get("iogpu.wired_limit_mb"))
    return {
        "system": f"macOS {values.get('kern.osproductversion', '')}".strip(),
        "cpu": values.get("machdep.cpu.brand_string"),
        "model": values.get("hw.model"),
        "cores": _whole(values.get("hw.physicalcpu")),
        "performance_cores": _whole(values.get("hw.perflevel0.physicalcpu")),
        "memory": memory,
        "gpu_cores": parse_gpu(_gpu(run))["cores"],
        "gpu_memory": None if memory is None else working_set(memory, wired),
        "wired_limit_set": bool(wired),
        "power": parse_power(run("pmset", "-g"), run("pmset", "-g", "batt")),
        "thermal": parse_therm(run("pmset", "-g", "therm")),
    }


def sample(own: Iterable[int], run: Ask = ask) -> dict[str, Any]:
    """One look at the host, for the guard: foreign load in cores, GPU use, heat, power, memory."""
    load = parse_processes(run("ps", "-A", "-o", "pid=,ppid=,%cpu=,comm="), own)
    gpu = parse_gpu(_gpu(run))
    return {
        "foreign_cpu": load.total,
        "busiest": load.name,
        "busiest_cpu": load.busiest,
        "gpu_busy": None if gpu["busy_percent"] is None else gpu["busy_percent"] / 100,
        "free_memory": parse_free(run("memory_pressure", "-Q")),
        "thermal": parse_therm(run("pmset", "-g", "therm")),
        "power": parse_power(run("pmset", "-g"), run("pmset", "-g", "batt")),
    }


def objections(found: dict[str, Any], max_foreign_cpu: float) -> list[str]:
    """Why a run must not start, or was disturbed, by one sample; empty if it may."""
    reasons = []
    if found["foreign_cpu"] > max_foreign_cpu:
        reasons.append(
            f"{found['foreign_cpu']:.2f} cores are used by others (most by {found['busiest']})"
        )
    if found["thermal"]["throttled"]:
        limit = found["thermal"]["speed_limit"]
        reasons.append("the chip is throttled" + (f" to {limit} %" if limit else ""))
    if found["power"]["mode"] == "low":
        reasons.append("Low Power Mode is on; switch it off (sudo pmset -a lowpowermode 0)")
    if found["power"]["source"] == "battery":
        reasons.append("the Mac runs on its battery; connect it")
    return reasons


def _gpu(run: Ask) -> str:
    return run("ioreg", "-r", "-d", "1", "-w", "0", "-c", "IOAccelerator")


def _whole(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None
