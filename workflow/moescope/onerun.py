"""One run at a time in a folder. Snakemake locks files too, but when any of its processes ends, a
tool beside the run among them, it takes away everyone's locks."""

from pathlib import Path

from .errors import UserError


def hold(root: Path) -> object:
    """A lock for as long as the result is kept, at most until the process ends.

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
    return lock
