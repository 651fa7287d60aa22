"""One run at a time in a folder. Snakemake's own locks are off: they outlive a run that was killed,
and when any of its processes ends, a tool beside the run among them, it takes away everyone's."""

from pathlib import Path
from typing import TYPE_CHECKING

from .errors import UserError

if TYPE_CHECKING:
    from filelock import FileLock

HELD: list["FileLock"] = []  # a lock that nothing refers to is let go


def hold(root: Path) -> "FileLock":
    """Lock the folder until the process ends, or until the lock is released.

    Raises UserError where another run has it.
    """
    from filelock import FileLock, Timeout

    path = root / "work" / "run.lock"
    path.parent.mkdir(exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise UserError(
            "another run is under way in this folder; run again when it has ended", str(path)
        ) from None
    HELD.append(lock)
    return lock
