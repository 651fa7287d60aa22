"""Rounds that have finished, kept until all have: an interrupted measurement goes on after them."""

import shutil
from pathlib import Path
from typing import Any

from ..files import read_json, write_json

SCHEMA = "moescope/journal/1"


class Journal:
    """A folder with one file a round, and the facts of the host that they were measured on.

    folder: work/journal/measure/<key>; the key stands for all that the study says. host: what
    must not have changed meanwhile.
    """

    def __init__(self, folder: Path, host: dict[str, Any]):
        self.folder, self.host = folder, host
        self.starts = 0
        self.failed: dict[str, dict[str, str]] = {}  # arm -> {"kind", "why"}

    def open(self) -> dict[int, dict[str, list[Any]]]:
        """Round number -> {"runs": rows, "guard": lines} of what was finished before.

        Rounds from a host that differs in anything are thrown away. Counts the start.
        """
        head = self.folder / "journal.json"
        found = read_json(head, SCHEMA) if head.exists() else None
        if found is None or found["host"] != self.host:
            shutil.rmtree(self.folder, ignore_errors=True)
            found = {"schema": SCHEMA, "host": self.host, "starts": 0}
        self.starts, self.failed = found["starts"] + 1, found.get("failed", {})
        self._head()
        rounds = [read_json(path, SCHEMA) for path in sorted(self.folder.glob("round-*.json"))]
        return {
            entry["round"]: {"runs": entry["runs"], "guard": entry["guard"]} for entry in rounds
        }

    def keep(self, number: int, runs: list[dict[str, Any]], guard: list[dict[str, Any]]) -> None:
        """A round is finished."""
        entry = {"schema": SCHEMA, "round": number, "runs": runs, "guard": guard}
        write_json(self.folder / f"round-{number:03}.json", entry)

    def fail(self, arm: str, failure: dict[str, str]) -> None:
        """An arm has failed; a later start does not try it again."""
        self.failed[arm] = failure
        self._head()

    def clear(self) -> None:
        """The measurement is complete."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _head(self) -> None:
        found = {"host": self.host, "starts": self.starts, "failed": self.failed}
        write_json(self.folder / "journal.json", {"schema": SCHEMA, **found})
