"""The machine class: what makes two hosts' figures comparable. No host name, no driver, no clock.

Found once, when the study is read, and passed on to the jobs, so that every job of a run and
every node of a cluster uses the same keys.
"""

import os
import platform
import re
import subprocess
from pathlib import Path

from .schema import Machine


def detect() -> Machine:
    """This host's class: the GPU if there is one, else the processor; count and memory."""
    memory = round(_memory_bytes() / 2**30)
    system = platform.system().lower()
    if system == "darwin":
        chip = _ask("sysctl", "-n", "machdep.cpu.brand_string")
        return Machine(name=f"{_slug(chip)}-{memory}g", backend="metal")
    names = _ask("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()
    gpus = [name.strip() for name in names if name.strip()]
    if gpus:
        return Machine(name=f"{_slug(gpus[0])}-x{len(gpus)}", backend="cuda", gpu=gpus[0])
    return Machine(name=f"{_slug(_cpu())}-{_cores()}c-{memory}g", backend="cpu")


def _slug(text: str) -> str:
    text = re.sub(r"\((r|tm)\)|\bcpu\b|@.*|processor", " ", text.lower())
    return re.sub(r"[^a-z0-9.]+", "-", text).strip("-.")[:48] or "unknown"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.lower().startswith(("model name", "cpu part")):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _ask(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
