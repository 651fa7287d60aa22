"""A checkpoint in a folder of the user's: used in place, pinned by a digest of its files."""

from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import digest
from .manifest import entries


def folder_of(source: dict[str, Any], root: Path) -> Path:
    """The folder; ``~`` is the user's home, a relative path starts at the repository."""
    return (root / Path(source["path"]).expanduser()).resolve()


def check(source: dict[str, Any], root: Path) -> Path:
    """The folder, if its files are those that the digest pins; a UserError names the digest."""
    folder = folder_of(source, root)
    if not folder.is_dir():
        raise UserError("the folder does not exist; mend source.path", where=source["path"])
    found = digest(entries(folder))
    if found != source["digest"]:
        raise UserError(
            f"the files have the digest {found}, the study pins {source['digest']}; "
            "put the first into source.digest if these are the files you mean",
            where=source["path"],
        )
    return folder
