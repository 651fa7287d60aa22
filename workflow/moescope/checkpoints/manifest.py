"""A checkpoint's manifest: each file's size and sha256, by which it is checked ever after."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import read_json, sha256_file, write_json

SCHEMA = "moescope/manifest/1"
SEAL = "moescope/seal/1"
THREADS = 8  # that hash files at the same time


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
    paths = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not any(p.startswith(".") for p in path.relative_to(folder).parts)
    ]
    return [
        {
            "path": path.relative_to(folder).as_posix(),
            "bytes": path.stat().st_size,
            "sha256": found,
        }
        for path, found in zip(paths, _hashes(paths), strict=True)
    ]


def check(folder: Path, manifest: dict[str, Any], seal: Path) -> None:
    """Every file is there, with its size and hash. Hashes are taken once: then ``seal`` keeps the
    files' sizes and times, and while these stay the same the hashes are not taken again.

    Raises UserError for the first file that differs.
    """
    state = _state(folder, manifest)
    if seal.is_file() and read_json(seal) == state:
        return
    paths = [folder / entry["path"] for entry in manifest["files"]]
    for entry, path, found in zip(manifest["files"], paths, _hashes(paths), strict=True):
        if found != entry["sha256"]:
            raise UserError("its sha256 is not the manifest's; it has changed", where=str(path))
    write_json(seal, state)


def put_seal(folder: Path, manifest: dict[str, Any], seal: Path) -> None:
    """The seal of files whose hashes were just taken for the manifest."""
    write_json(seal, _state(folder, manifest))


def _state(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
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
    return {"schema": SEAL, "files": state}


def _hashes(paths: Iterable[Path]) -> list[str]:
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(sha256_file, paths))
