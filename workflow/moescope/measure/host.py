"""The host that figures come from: what bears on speed, nothing that names it or its user."""

import platform
import re
import subprocess
from pathlib import Path
from typing import Any

from ..runtimes.client import usable_cores

SCHEMA = "moescope/host/1"
ASK_LIMIT_S = 20
SYS_CPU = Path("/sys/devices/system/cpu")


def describe(backend: str) -> dict[str, Any]:
    """environment.json's part about the host. Sizes in bytes; what is not known is left out."""
    import psutil

    system = platform.system().lower()
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "system": system,
        "kernel": ".".join(platform.release().split(".")[:2]),
        "distribution": _distribution(),
        "machine": platform.machine(),
        "cpu": _cpu(system),
        "cores": usable_cores(),
        "cores_physical": psutil.cpu_count(logical=False),
        "memory": psutil.virtual_memory().total,
        "last_level_cache": _cache(),
        "backend": backend,
        "virtualisation": _virtualisation(),
        "governor": _read(SYS_CPU / "cpu0/cpufreq/scaling_governor"),
        "turbo": _turbo(),
        "power_source": _power(),
        "python": platform.python_version(),
    }
    if system == "darwin":
        found |= _mac(backend)
    if backend == "cuda":
        from . import gpu

        found["gpu"] = gpu.describe()
    return {name: value for name, value in found.items() if value not in (None, "")}


def device_memory(backend: str) -> int | None:
    """Bytes that a GPU has of its own (CUDA), or may use of the host's (Metal); None where it
    shares the host's without a limit."""
    if backend == "cuda":
        from . import gpu

        return gpu.describe().get("memory")
    if backend != "metal":
        return None
    from . import macos

    return macos.probe(macos.ask)["gpu_memory"]


def _mac(backend: str) -> dict[str, Any]:
    """What a Mac's own commands say of it. Heat is with the runs: it changes by itself."""
    from . import macos

    facts = macos.probe(macos.ask)
    names = ("cpu", "model", "performance_cores", "efficiency_cores", "memory", "power_mode")
    found = {name: facts[name] for name in names if facts[name] is not None}
    found["last_level_cache"] = facts["cache"]
    found["virtualisation"] = "vm" if facts["virtual"] else "none"
    found["power_source"] = {"ac": "mains"}.get(facts["power_source"], facts["power_source"])
    if facts["version"]:
        found["distribution"] = f"macos {facts['version']}"
    if backend == "metal":
        gpu = {"name": facts["cpu"], "cores": facts["gpu_cores"], "memory": facts["gpu_memory"],
               "wired_limit_set": facts["wired_limit_set"]}  # fmt: skip
        found["gpu"] = {name: value for name, value in gpu.items() if value is not None}
    return found


def _cpu(system: str) -> str:
    if system == "darwin":
        return platform.machine()
    for line in (_read(Path("/proc/cpuinfo")) or "").splitlines():
        if line.lower().startswith("model name"):
            return line.split(":", 1)[1].strip()
    # Arm has no model name there; lscpu knows the parts by number.
    found = re.search(r"^Model name:\s*(.+)$", _ask("lscpu"), re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def _distribution() -> str | None:
    """Name and version, for example "debian 12" or "macos 15.1"."""
    if version := platform.mac_ver()[0]:
        return f"macos {version}"
    try:
        found = platform.freedesktop_os_release()
    except OSError:
        return None
    return " ".join(part for part in (found.get("ID"), found.get("VERSION_ID")) if part)


def _cache() -> int | None:
    """Bytes of the last level that the first core sees."""
    sizes = [_read(path) for path in sorted(SYS_CPU.glob("cpu0/cache/index*/size"))]
    units = {"K": 1 << 10, "M": 1 << 20}
    known = [int(size[:-1]) * units[size[-1]] for size in sizes if size and size[-1] in units]
    return max(known, default=None)


def _virtualisation() -> str:
    """One of: vm; container; "vm, container"; none."""
    found = []
    flags = re.search(r"^flags\s*:(.*)$", _read(Path("/proc/cpuinfo")) or "", re.MULTILINE)
    if flags and " hypervisor" in flags[1]:
        found.append("vm")
    if any(Path(mark).exists() for mark in ("/.dockerenv", "/run/.containerenv")):
        found.append("container")
    return ", ".join(found) or "none"


def _turbo() -> bool | None:
    no_turbo = _read(SYS_CPU / "intel_pstate/no_turbo")
    if no_turbo in ("0", "1"):
        return no_turbo == "0"
    boost = _read(SYS_CPU / "cpufreq/boost")
    return boost == "1" if boost in ("0", "1") else None


def _power() -> str | None:
    """Mains or battery."""
    import psutil

    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    if battery is None:
        return None
    return "mains" if battery.power_plugged else "battery"


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _ask(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
