"""The GPU: driver, users, who may profile it."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..errors import UserError
from ..measure import gpu as driver
from .finding import Finding, ask, gib

PARAMS = Path("/proc/driver/nvidia/params")


def nvidia() -> Iterator[Finding]:
    """The GPU that runs would use."""
    try:
        asked = driver.driver()
        (uuid,) = driver.in_use(asked)
        facts, state = asked.facts(uuid), asked.state(uuid)
    except UserError as error:
        yield Finding(
            False,
            "gpu",
            str(error),
            "measure on a host with the GPU; records of committed results can be "
            "rendered and audited here",
        )
        return
    size = gib(facts["memory"]) if facts["memory"] else "the host's memory"
    yield Finding(True, "gpu", f"{facts['name']}, {size}, driver {facts['driver']}")
    used = state.memory_used or 0
    if state.pids or used > driver.IDLE_MEMORY:
        yield Finding(
            True,
            "gpu's users",
            f"{len(state.pids)} processes, {gib(used)} in use",
            "a measurement waits until they are gone",
        )
    if isinstance(asked, driver.Smi):
        yield Finding(
            True,
            "gpu's watch",
            "nvidia-smi, asked every 2 s during a run",
            "nvidia-ml-py, which requirements.txt locks, watches more closely at less cost",
        )


def profiler(params: Path = PARAMS) -> Iterator[Finding]:
    """Kernel traces need no privilege; hardware counters do, where the driver keeps them."""
    text = params.read_text() if params.is_file() else ""
    found = re.search(r"^RmProfilingAdminOnly:\s*(\d)", text, re.MULTILINE)
    if found is None:
        yield Finding(
            True,
            "profiler",
            "the driver does not say who may profile",
            "if the trace stage reports INSUFFICIENT_PRIVILEGES, ask for the driver's "
            "option NVreg_RestrictProfilingToAdminUsers=0",
        )
    elif found[1] == "1" and os.geteuid() != 0:
        yield Finding(
            True,
            "profiler",
            "kernel traces: yes; hardware counters: administrators",
            "moescope needs no counters; for Nsight Compute set the driver's option "
            "NVreg_RestrictProfilingToAdminUsers=0 and reboot",
        )
    else:
        yield Finding(True, "profiler", "kernel traces and hardware counters are permitted")
    nsys = shutil.which("nsys")
    yield Finding(
        True,
        "nsys",
        ask(nsys, "--version") if nsys else "not found",
        "" if nsys else "only runtimes that are binaries need it",
    )


def xcode() -> Iterator[Finding]:
    """Metal's profiler comes with Xcode."""
    found = ask("xcrun", "xctrace", "version")
    yield Finding(
        True,
        "xctrace",
        found or "not found",
        ""
        if found
        else "times and scopes work without it; kernel traces of Metal need "
        "Xcode (not only its command line tools)",
    )
