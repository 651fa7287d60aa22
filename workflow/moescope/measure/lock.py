"""One measurement at a time on a host, or on a GPU: a lock that dies with its process."""

import contextlib
import fcntl
import json
import os
import re
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import UserError

RETRY_S = 0.2
FOLDER_VARIABLE = "MOESCOPE_LOCK_DIR"


def lock_folder() -> Path:
    """A folder that all users of the host share; MOESCOPE_LOCK_DIR names another."""
    if named := os.environ.get(FOLDER_VARIABLE):
        return Path(named)
    shared = Path("/tmp")
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


class HostLock:
    """flock on a file in ``lock_folder``; nobody needs to clean up after a crash.

    The file says who holds it, for the others' messages. A process whose ancestor (or itself)
    holds the lock is let through: it is part of the same measurement. shared: held beside others
    that share it, of which the file names one; nobody holds it alone meanwhile.
    """

    def __init__(self, name: str, what: str, shared: bool = False):
        self.path = lock_folder() / f"moescope-{re.sub(r'[^A-Za-z0-9.-]+', '-', name)}.lock"
        self.what, self.shared = what, shared
        self._handle: int | None = None

    def acquire(self, limit_s: float, say: Callable[[str], None]) -> dict[str, Any]:
        """Take the lock, waiting at most ``limit_s``; returns {"waited_s", "nested"}.

        Raises UserError, which names the holder, when the time is over.
        """
        handle = self._open()
        begin = time.monotonic()
        told = False
        try:
            while not _try(handle, self.shared):
                holder = _holder(handle)
                if _is_ours(holder):
                    os.close(handle)
                    return {"waited_s": 0.0, "nested": True}
                if time.monotonic() - begin >= limit_s:
                    raise UserError(
                        f"another measurement is running on this host: {_described(holder)}; "
                        f"waited {limit_s:g} s. Run again when it has ended",
                        where=str(self.path),
                    )
                if not told:
                    say(f"waiting for another measurement to end: {_described(holder)}")
                    told = True
                time.sleep(RETRY_S)
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(handle)
            raise
        self._handle = handle
        os.ftruncate(handle, 0)
        said = _identity() | {"what": self.what, "shared": self.shared}
        os.pwrite(handle, json.dumps(said).encode(), 0)
        return {"waited_s": round(time.monotonic() - begin, 3), "nested": False}

    def release(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            if not self.shared:
                os.ftruncate(handle, 0)
            os.close(handle)

    def _open(self) -> int:
        """The file, usable by everyone. It is created apart from being opened: Linux refuses to
        open another user's file in a shared folder with O_CREAT. Not inherited by children."""
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        for _ in range(10):
            with contextlib.suppress(FileNotFoundError):
                return os.open(self.path, flags)
            with contextlib.suppress(FileExistsError):
                handle = os.open(self.path, flags | os.O_CREAT | os.O_EXCL, 0o666)
                os.fchmod(handle, 0o666)
                return handle
        raise UserError("the lock file comes and goes; is something cleaning up?", str(self.path))


def _try(handle: int, shared: bool) -> bool:
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _identity() -> dict[str, Any]:
    import psutil

    process = psutil.Process()
    since = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"pid": process.pid, "created": process.create_time(), "since": since}


def _holder(handle: int) -> dict[str, Any]:
    try:
        found = json.loads(os.pread(handle, 4096, 0))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _is_ours(holder: dict[str, Any]) -> bool:
    import psutil

    if "pid" not in holder or holder.get("shared"):  # who is named may have gone, others not
        return False
    process = psutil.Process()
    return any(
        one.pid == holder["pid"] and abs(one.create_time() - holder.get("created", 0)) < 1
        for one in (process, *process.parents())
    )


def _described(holder: dict[str, Any]) -> str:
    if "pid" not in holder:
        return "its holder has not said who it is"
    return f"{holder.get('what')} (process {holder['pid']}, since {holder.get('since')})"
