"""What the host refuses: a full disk, a folder that may not be written. No fault of the code, so
it ends in one line like any other complaint."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import UserError

ADVICE = {
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room",
    errno.EROFS: "make it writable",
    errno.EACCES: "make it accessible to this user",
    errno.EPERM: "make it accessible to this user",
    errno.EIO: "check the disk",
}


@contextmanager
def told() -> Iterator[None]:
    """Turns an OSError of the host's into a UserError that says what to do; others pass."""
    try:
        yield
    except OSError as error:
        if error.errno not in ADVICE:
            raise
        where = error.filename2 or error.filename
        raise UserError(
            f"{error.strerror}; {ADVICE[error.errno]} and run it again, what was finished is kept",
            where=None if where is None else str(where),
        ) from error
