"""A Mac seen from its own commands: chip, memory, heat, power mode, who else computes.

The parsers take a command's output and are pure; ``probe`` and ``health`` call the commands. None
of them needs root. What a command does not say is None, never a default.
"""

import os
import re
import subprocess
from collections.abc import Callable
from typing import Any, NamedTuple

# Four commands tell the health; the guard waits 20 s for all of them.
LIMIT_S = 4.0
SYSCTL = (
    "machdep.cpu.brand_string",
    "hw.model",
    "hw.memsize",
    "hw.physicalcpu",
    "hw.perflevel0.physicalcpu",
    "hw.perflevel1.physicalcpu",
    "hw.perflevel0.l2cachesize",
    "iogpu.wired_limit_mb",
    "kern.hv_vmm_present",
    "kern.osproductversion",
)
PROCESSES = ("ps", "-A", "-o", "pid=,ppid=,time=,comm=")
PRESSURE = "com.apple.system.thermalpressurelevel"
POWER_MODES = {0: "automatic", 1: "low", 2: "high"}
# OSThermalNotification.h; from "heavy" on the system slows the chip down.
PRESSURES = ("nominal", "moderate", "heavy", "trapping", "sleeping")
SLOWED = ("heavy", "trapping", "sleeping")

Ask = Callable[..., str]


class Process(NamedTuple):
    """One row of ``ps``: CPU seconds since its start."""

    pid: int
    parent: int
    used_s: float
    name: str


def ask(*command: str) -> str:
    """A command's output, empty if it is missing or takes too long.

    A failed one's too: sysctl says all that it knows and then fails for one unknown name.
    """
    env = os.environ | {"LC_ALL": "C"}
    try:
        done = subprocess.run(command, capture_output=True, timeout=LIMIT_S, env=env)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace")  # a process may have any bytes for a name


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


def parse_pressure(text: str) -> str | None:
    """``notifyutil -g com.apple.system.thermalpressurelevel``: one of PRESSURES."""
    match = re.search(rf"{re.escape(PRESSURE)}\s+(\d+)", text)
    level = int(match[1]) if match else len(PRESSURES)
    return PRESSURES[level] if level < len(PRESSURES) else None


def parse_processes(text: str) -> list[Process]:
    """``ps -A -o pid=,ppid=,time=,comm=``; names lose their folders. The time is minutes:seconds,
    with hours and days before them where there are any."""
    rows = []
    for line in text.splitlines():
        parts = line.split(None, 3)
        match = (
            re.fullmatch(r"(?:(\d+)-)?((?:\d+:)+\d+(?:[.,]\d+)?)", parts[2]) if parts[3:] else None
        )
        if match:
            used = 0.0
            for part in match[2].split(":"):
                used = used * 60 + float(part.replace(",", "."))
            used += int(match[1] or 0) * 86400
            rows.append(Process(int(parts[0]), int(parts[1]), used, parts[3].rsplit("/", 1)[-1]))
    return rows


def processes(run: Ask = ask) -> list[Process]:
    """All processes of this Mac, those of other users too."""
    return parse_processes(run(*PROCESSES))


def working_set(memory: int, wired_limit_mb: int | None) -> int:
    """Bytes that the GPU may use: the user's wired limit if one is set, else what Metal
    recommends, about three quarters of the memory (two thirds up to 36 GB)."""
    if wired_limit_mb:
        return wired_limit_mb << 20
    return memory * 2 // 3 if memory <= 36 << 30 else memory * 3 // 4


def probe(run: Ask = ask) -> dict[str, Any]:
    """What a record says of this Mac: nothing that names it or its user, nothing that changes by
    itself (heat is in the runs). Sizes in bytes; "gpu_memory" is the ceiling of ``working_set``."""
    values = parse_sysctl(run("sysctl", *SYSCTL))
    memory = _whole(values.get("hw.memsize"))
    wired = _whole(values.get("iogpu.wired_limit_mb"))
    version = values.get("kern.osproductversion") or run("sw_vers", "-productVersion").strip()
    power = parse_power(run("pmset", "-g"), run("pmset", "-g", "batt"))
    return {
        "version": version or None,
        "cpu": values.get("machdep.cpu.brand_string"),
        "model": values.get("hw.model"),
        "cores": _whole(values.get("hw.physicalcpu")),
        "performance_cores": _whole(values.get("hw.perflevel0.physicalcpu")),
        "efficiency_cores": _whole(values.get("hw.perflevel1.physicalcpu")),
        "cache": _whole(values.get("hw.perflevel0.l2cachesize")),
        "virtual": {"0": False, "1": True}.get(values.get("kern.hv_vmm_present", "")),
        "memory": memory,
        "gpu_cores": parse_gpu(gpu_registry(run))["cores"],
        "gpu_memory": None if memory is None else working_set(memory, wired),
        "wired_limit_set": bool(wired),
        "power_mode": power["mode"],
        "power_source": power["source"],
    }


def health(run: Ask = ask) -> dict[str, Any]:
    """What may slow the chip now: {"thermal": as parse_therm, with "pressure"; "power": as
    parse_power}."""
    pressure = parse_pressure(run("notifyutil", "-g", PRESSURE))
    return {
        "thermal": parse_therm(run("pmset", "-g", "therm")) | {"pressure": pressure},
        "power": parse_power(run("pmset", "-g"), run("pmset", "-g", "batt")),
    }


def objections(found: dict[str, Any]) -> list[str]:
    """Why a run must not start, or was disturbed, by ``health``; empty if it may."""
    reasons = []
    thermal, power = found["thermal"], found["power"]
    if thermal["throttled"] or thermal["pressure"] in SLOWED:
        by = [f"thermal pressure {thermal['pressure']}"] if thermal["pressure"] in SLOWED else []
        by += [f"speed limit {thermal['speed_limit']} %"] if thermal["speed_limit"] else []
        reasons.append("the chip is throttled" + (f" ({', '.join(by)})" if by else ""))
    if power["mode"] == "low":
        reasons.append("Low Power Mode is on; switch it off (sudo pmset -a lowpowermode 0)")
    if power["source"] == "battery":
        reasons.append("the Mac runs on its battery; connect it")
    return reasons


def gpu_busy(run: Ask = ask) -> float | None:
    """The share of time in which anybody used the GPU."""
    busy = parse_gpu(gpu_registry(run))["busy_percent"]
    return None if busy is None else busy / 100


def gpu_registry(run: Ask = ask) -> str:
    """The GPU in the registry of devices."""
    return run("ioreg", "-r", "-d", "1", "-w", "0", "-c", "IOAccelerator")


def _whole(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None
