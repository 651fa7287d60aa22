"""One process of a tool: started in its own group, watched, and always ended with the group."""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    status: as a shell shows it (137 for SIGKILL), None if it did not start. timed_out: it was
    killed by us. seconds: wall time. peak_memory: bytes, the largest resident size of the process
    itself, None where the system does not say. text: stdout, then stderr.
    """

    status: int | None
    timed_out: bool
    seconds: float
    peak_memory: int | None
    stdout: str
    stderr: str

    @property
    def text(self) -> str:
        return f"{self.stdout}\n{self.stderr}"

    @property
    def good(self) -> bool:
        return self.status == 0 and not self.timed_out


class Process:
    """A context manager; leaving it kills what is left of the group.

    argv, env (the whole environment, nothing is inherited), cwd. log: both outputs go there
    instead of into memory. Raises FileNotFoundError or PermissionError if it cannot be started.
    """

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: Path | None = None,
        log: Path | None = None,
    ):
        # Closed with the process, not with this block.
        if log is None:
            self._out: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
            self._err: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        else:
            self._out = open(log, "a+b")  # noqa: SIM115
            self._err = self._out
        self._start = time.perf_counter()
        self._popen: subprocess.Popen[bytes] | None = None
        try:
            self._popen = subprocess.Popen(
                list(argv),
                env=dict(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=self._out,
                stderr=self._err,
                start_new_session=True,
                preexec_fn=_dies_with_parent,
            )
        finally:
            if self._popen is None:
                self._close()

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def alive(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    def wait(self, limit: float) -> Ended:
        """Wait for the end, ``limit`` seconds at most; then the group is killed."""
        popen, deadline = self._popen, time.monotonic() + limit
        usage, timed_out = None, False
        if popen.returncode is None:
            # The same as popen.wait(limit), with the memory that the process used.
            with contextlib.suppress(ChildProcessError):
                code, usage = _ended(popen, deadline)
                timed_out = usage is None
                if timed_out:
                    self.kill()
                    _, code, usage = os.wait4(popen.pid, 0)
                popen.returncode = os.waitstatus_to_exitcode(code)
        seconds = time.perf_counter() - self._start
        self.kill()
        status = popen.returncode
        peak = None
        if usage is not None:
            peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return Ended(
            status=None if status is None else (128 - status if status < 0 else status),
            timed_out=timed_out,
            seconds=seconds,
            peak_memory=peak,
            stdout=_read(self._out),
            stderr="" if self._err is self._out else _read(self._err),
        )

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        with contextlib.suppress(ChildProcessError):
            self._popen.wait()
        self._close()

    def _close(self) -> None:
        self._out.close()
        self._err.close()


def run(
    argv: Sequence[str],
    env: Mapping[str, str],
    limit: float,
    cwd: Path | None = None,
    log: Path | None = None,
) -> Ended:
    """Run a command to its end. A command that cannot be started has the status None."""
    try:
        with Process(argv, env, cwd, log) as process:
            return process.wait(limit)
    except (FileNotFoundError, PermissionError, NotADirectoryError) as error:
        return Ended(None, False, 0.0, None, "", f"{argv[0]}: {error.strerror}")


def _ended(popen: subprocess.Popen[bytes], deadline: float) -> tuple[int, Any]:
    """The wait status and resource usage of a process that ended before the deadline, else
    (0, None)."""
    opener: Callable[[int], int] | None = getattr(os, "pidfd_open", None)
    handle = None
    with contextlib.suppress(OSError):
        handle = opener(popen.pid) if opener else None
    if handle is not None:
        try:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([handle], [], [], left)[0]:
                return 0, None
            _, code, usage = os.wait4(popen.pid, 0)
            return code, usage
        finally:
            os.close(handle)
    # No such handle on macOS (nor os.waitid before Python 3.13).
    while True:
        pid, code, usage = os.wait4(popen.pid, os.WNOHANG)
        if pid:
            return code, usage
        if time.monotonic() > deadline:
            return 0, None
        time.sleep(0.01)


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


def _dies_with_parent() -> None:
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
