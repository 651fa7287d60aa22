"""The host: interpreter, uv, system, compiler, and how quiet it is now."""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from ..errors import UserError
from .finding import ASK_LIMIT_S, Finding, ask, numbers

# MLX's wheels: the oldest C library on Linux, the oldest macOS.
GLIBC, MACOS = (2, 35), (14, 0)


def interpreter(root: Path) -> Iterator[Finding]:
    version = platform.python_version()
    if sys.version_info < (3, 11):  # noqa: UP036 (this may run outside the project's environment)
        yield Finding(
            False, "python", version, "use Python 3.11 or newer: `make PYTHON=python3.12 record`"
        )
        return
    wrong = []
    requirements = root / "requirements.txt"
    lines = requirements.read_text().splitlines() if requirements.is_file() else []
    for line in lines:
        pin = re.match(r"([A-Za-z0-9._-]+)==([^\s;\\]+)([^\\]*)", line)
        if pin and _applies(pin[3]):
            try:
                found = importlib.metadata.version(pin[1])
            except importlib.metadata.PackageNotFoundError:
                found = "missing"
            if found != pin[2]:
                wrong.append(f"{pin[1]} {found} (locked: {pin[2]})")
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        yield Finding(
            "missing" not in " ".join(wrong),
            "python",
            f"{version}; {', '.join(wrong[:3])}{more}",
            "start it from .venv, which `make record` sets up with the locked versions",
        )
    else:
        yield Finding(True, "python", f"{version}, packages as locked")


def uv() -> Iterator[Finding]:
    try:
        from uv import find_uv_bin

        version = ask(find_uv_bin(), "--version")
    except (ImportError, FileNotFoundError):
        version = ""
    if version:
        yield Finding(True, "uv", version)
    else:
        yield Finding(
            False,
            "uv",
            "not found",
            "start it from .venv, which `make record` sets up; uv makes the environments",
        )


def system(wanted: str) -> Iterator[Finding]:
    """Whether MLX has wheels for this system, and which."""
    kind, arch = platform.system(), platform.machine()
    if kind == "Darwin":
        version = platform.mac_ver()[0]
        fits = arch == "arm64" and numbers(version) >= MACOS
        found = f"macOS {version}, {arch}"
        todo = "" if fits else "MLX needs an Apple chip and macOS 14 or newer"
        yield Finding(fits, "system", f"{found}: MLX for Metal" if fits else found, todo)
        return
    if kind != "Linux":
        yield Finding(False, "system", kind, "MLX runs on Linux and macOS; use WSL on Windows")
        return
    name, version = platform.libc_ver()
    fits = name == "glibc" and numbers(version) >= GLIBC and arch in ("x86_64", "aarch64")
    found = f"Linux, {arch}, {name or 'another C library'} {version}".rstrip()
    needs = f"MLX's wheels need glibc {GLIBC[0]}.{GLIBC[1]} or newer on x86_64 or aarch64"
    yield Finding(
        fits,
        "system",
        f"{found}: MLX for {wanted.upper()}" if fits else found,
        "" if fits else f"{needs} (Debian 12, Ubuntu 22.04)",
    )


def compiler() -> Iterator[Finding]:
    """MLX's CPU backend compiles fused operations with the system's g++ (macOS: clang)."""
    program = "clang++" if platform.system() == "Darwin" else "g++"
    install = (
        "xcode-select --install"
        if program == "clang++"
        else "apt install g++, or your distribution's package"
    )
    if shutil.which(program) is None:
        yield Finding(False, "compiler", f"no {program}; MLX compiles with it on CPU", install)
        return
    version = (ask(program, "--version").splitlines() or ["?"])[0]
    command = [program, "-std=c++17", "-x", "c++", "-fsyntax-only", "-"]
    try:
        done = subprocess.run(
            command, input="#include <cmath>\n", capture_output=True, text=True, timeout=ASK_LIMIT_S
        )
        works, why = done.returncode == 0, done.stderr.strip().splitlines()[:1]
    except (OSError, subprocess.TimeoutExpired) as error:
        works, why = False, [str(error)]
    if works:
        yield Finding(True, "compiler", version)
    else:
        yield Finding(False, "compiler", f"{version} does not compile: {' '.join(why)}", install)


def quiet() -> Iterator[Finding]:
    """The host now: others' use of its cores, other measurements, what slows the processor."""
    from ..measure import host
    from ..measure.cpu import CpuProbe
    from ..measure.lock import HostLock

    facts = host.describe("cpu")
    probe = CpuProbe(0.0)
    time.sleep(0.5)
    reading = probe.read({os.getpid()}, True)
    used = f"others use {reading.foreign_cpu:.2f} of {facts['cores']} cores"
    by = f", most by {reading.who}" if reading.who and reading.foreign_cpu > 0.1 else ""
    yield Finding(
        True,
        "quiet",
        used + by,
        ""
        if reading.foreign_cpu < 0.25
        else "close what else runs: a run that is disturbed is rejected",
    )
    if reading.steal > 0.02:
        yield Finding(
            True,
            "steal",
            f"the hypervisor gives {reading.steal:.2f} cores to others",
            "timings will scatter; the runs record it",
        )
    if facts.get("governor") not in (None, "performance"):
        yield Finding(
            True,
            "governor",
            facts["governor"],
            "`cpupower frequency-set -g performance` steadies the clock",
        )
    if platform.system() == "Darwin":
        yield from _mac()
    elif facts.get("power_source") == "battery":
        yield Finding(True, "power", "battery", "plug in: on its battery the chip is slowed")
    lock = HostLock("host", "doctor")
    try:
        lock.acquire(0, lambda _: None)
    except UserError as error:
        yield Finding(True, "lock", str(error), "a measurement started now waits for it")
    finally:
        lock.release()


def _mac() -> Iterator[Finding]:
    """What the guard objects to on a Mac; it rejects each run until that is mended."""
    from ..measure import macos

    found = macos.health(macos.ask)
    reasons = macos.objections(found)
    thermal, power = found["thermal"], found["power"]
    state = (
        f"thermal pressure {thermal['pressure'] or 'unknown'}, power mode "
        f"{power['mode'] or 'unknown'}, on {power['source'] or 'an unknown source'}"
    )
    yield Finding(True, "mac", state, f"{'; '.join(reasons)}: runs are rejected" if reasons else "")


def backend() -> str:
    """The backend that this host would be measured on."""
    if platform.system() == "Darwin":
        return "metal"
    return "cuda" if ask("nvidia-smi", "--list-gpus") else "cpu"


def _applies(marker: str) -> bool:
    """Whether an environment marker (after the ``;``) holds here; one we cannot read does not."""
    text = marker.strip().lstrip(";").strip()
    if not text:
        return True
    try:
        from packaging.markers import Marker

        return Marker(text).evaluate()
    except Exception:
        return False
