"""Files that are either whole or not there, and the canonical form of JSON.

Everything is written to a temporary name in the same folder, synced and renamed.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .errors import UserError


def canonical(value: Any) -> str:
    """JSON with sorted keys, tight separators and ASCII only: equal values, equal text."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )


def digest(value: Any) -> str:
    """sha256 (64 hex digits) of a value's canonical JSON."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def sha256_text(text: str) -> str:
    """sha256 of text, whatever line ends the checkout uses."""
    return hashlib.sha256(text.replace("\r\n", "\n").encode()).hexdigest()


def sha256_file(path: Path) -> str:
    """sha256 of a file's bytes, read in pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_bytes(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Readable JSON, keys in the order given, a newline at the end; NaN and Inf are refused."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def write_jsonl(path: Path, rows: Iterable[Any]) -> None:
    """One canonical JSON value a line."""
    write_text(path, "".join(canonical(row) + "\n" for row in rows))


def read_json(path: Path, schema: str | None = None) -> Any:
    """Read JSON; with ``schema`` ("moescope/runs/1"), refuse a file that does not carry it.

    Raises UserError, which names the file, if it is missing, malformed or of another schema.
    """
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError("the file does not exist", where=str(path)) from None
    except ValueError as error:
        raise UserError(f"not JSON: {error}", where=str(path)) from None
    check_schema(value, schema, str(path))
    return value


def read_jsonl(path: Path, schema: str | None = None) -> list[Any]:
    """Read JSON lines; with ``schema``, each line must carry it."""
    rows = []
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        raise UserError("the file does not exist", where=str(path)) from None
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"not JSON: {error}", where=f"{path}:{number}") from None
        check_schema(row, schema, f"{path}:{number}")
        rows.append(row)
    return rows


def check_schema(value: Any, schema: str | None, where: str) -> None:
    if schema is None:
        return
    found = value.get("schema") if isinstance(value, dict) else None
    if found != schema:
        raise UserError(f"schema is {found!r}, this version reads {schema!r}", where=where)


def inside(root: Path, path: Path | str) -> Path:
    """``path`` below ``root``, resolved; a path that leaves the root is a UserError."""
    resolved = (root / path).resolve()
    if not resolved.is_relative_to(root.resolve()):
        raise UserError(f"{str(path)!r} leaves its folder; give a path inside {root}")
    return resolved
