"""A checkpoint's manifest: each file's size and sha256, by which it is checked ever after."""

from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import read_json, sha256_file, write_json

SCHEMA = "moescope/manifest/1"
SEAL = ".checked.json"


def describe(folder: Path, source: dict[str, Any]) -> dict[str, Any]:
    """The manifest of what stands in a folder."""
    files = entries(folder)
    return {
        "schema": SCHEMA,
        "kind": source["kind"],
        "files": files,
        "bytes": sum(entry["bytes"] for entry in files),
    }


def entries(folder: Path) -> list[dict[str, Any]]:
    """[{"path", "bytes", "sha256"}] of all files, sorted by path; hidden ones do not count."""
    return [
        {
            "path": path.relative_to(folder).as_posix(),
            "bytes": path.stat().st_size,
            "sha256": sha256_file(path),
        }
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not any(p.startswith(".") for p in path.relative_to(folder).parts)
    ]


def check(folder: Path, manifest: dict[str, Any], seal: Path) -> None:
    """Every file is there, with its size and hash. Hashes are taken once: then ``seal`` keeps the
    files' sizes and times, and while these stay the same the hashes are not taken again.

    Raises UserError for the first file that differs.
    """
    state = {}
    for entry in manifest["files"]:
        path = folder / entry["path"]
        if not path.is_file():
            raise UserError("the file is missing", where=str(path))
        status = path.stat()
        if status.st_size != entry["bytes"]:
            raise UserError(
                f"{status.st_size} bytes, the manifest says {entry['bytes']}", where=str(path)
            )
        state[entry["path"]] = [status.st_size, status.st_mtime_ns, entry["sha256"]]
    value = {"schema": "moescope/seal/1", "files": state}
    if seal.is_file() and read_json(seal) == value:
        return
    for entry in manifest["files"]:
        path = folder / entry["path"]
        if sha256_file(path) != entry["sha256"]:
            raise UserError("its sha256 is not the manifest's; it has changed", where=str(path))
    write_json(seal, value)
