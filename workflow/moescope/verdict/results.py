"""Reading the upstream results, each file by its path in the repository."""

import csv
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import check_schema, read_json
from ..task import Task

RUN = "moescope/run/1"
TRAILER = "moescope/run-trailer/1"


@dataclass(frozen=True)
class Found:
    """A file's content and its path in the repository."""

    value: Any
    file: str


class Results:
    """The results that a task may read, by stage and subject."""

    def __init__(self, task: Task):
        self.upstream, self.root = task.upstream, task.root

    def path(self, stage: str, subject: str, name: str) -> Path | None:
        """A file of a result, or None if the result or the file is not there."""
        folder = self.upstream.get(f"{stage}/{subject}")
        return folder / name if folder is not None and (folder / name).is_file() else None

    def named(self, path: Path) -> str:
        """A path as the records name it: relative to the repository, with forward slashes."""
        return path.relative_to(self.root).as_posix()

    def json(self, stage: str, subject: str, name: str, schema: str) -> Found | None:
        path = self.path(stage, subject, name)
        return None if path is None else Found(read_json(path, schema), self.named(path))

    def table(self, stage: str, subject: str, name: str) -> Found | None:
        """Rows of a CSV file with a header, as dicts of text."""
        path = self.path(stage, subject, name)
        if path is None:
            return None
        with open(path, newline="") as file:
            return Found(list(csv.DictReader(file)), self.named(path))

    def runs(self, checkpoint: str) -> Found | None:
        """The runs of a checkpoint, in the file's order, without the trailer."""
        path = self.path("measure", checkpoint, "runs.jsonl")
        return None if path is None else Found(read_runs(path), self.named(path))


def read_runs(path: Path) -> list[dict[str, Any]]:
    """All runs of a runs.jsonl, valid or not.

    Raises UserError if the trailer is missing or does not match what stands before it, or if an
    id or a valid (arm, round) stands there twice.
    """
    where = str(path)
    lines = path.read_bytes().splitlines(keepends=True)
    try:
        rows = [json.loads(line) for line in lines]
    except ValueError as error:
        raise UserError(f"not JSON lines: {error}", where) from None
    trailer = rows.pop() if rows else None
    if not isinstance(trailer, dict) or trailer.get("schema") != TRAILER:
        raise UserError("the trailer is missing: the file is not whole; measure again", where)
    for row in rows:
        check_schema(row, RUN, where)
    valid = [row for row in rows if row["valid"]]
    found = {
        "runs": len(rows),
        "valid": len(valid),
        "sha256": hashlib.sha256(b"".join(lines[:-1])).hexdigest(),
    }
    for key, value in found.items():
        if trailer.get(key) != value:
            raise UserError(
                f"the trailer says {key} {trailer.get(key)!r}, the lines before it {value!r}: "
                "the file was altered; restore it from git",
                where,
            )
    _once([row["id"] for row in rows], "the run id", where)
    _once([f"{row['arm']} in round {row['round']}" for row in valid], "a valid run of", where)
    return rows


def _once(names: list[str], what: str, where: str) -> None:
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{what} {name} stands there more than once", where)
