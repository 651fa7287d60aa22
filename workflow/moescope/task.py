"""What a stage is given: exactly what its key is made of, and where to put the result.

A stage is a function ``run(task)``. It reads ``task.params`` and the upstream results, nothing
else of the study: what is not in the key cannot change a result.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .files import read_json

INGREDIENTS = "moescope/ingredients/1"


def ingredients(folder: Path) -> dict[str, Any]:
    """What a result's key is made of: {"stage", "subject", "key", "params", "upstream", "code"}."""
    return read_json(folder / "ingredients.json", INGREDIENTS)


@dataclass(frozen=True)
class Task:
    """One job of one stage.

    params: the stage's own ingredients (JSON values), as hashed into the key.
    upstream: "stage/subject" -> folder of that result, e.g. "fetch/qwen3-moe".
    out: an empty folder; what the stage writes there becomes its result as a whole.
    work: the root of what is not committed (weights, environments, journals).
    root: the repository.
    notes: facts about the job for ``explain`` (seconds, bytes), written to cost.json.
    """

    stage: str
    subject: str
    key: str
    params: dict[str, Any]
    upstream: dict[str, Path]
    out: Path
    work: Path
    root: Path
    notes: dict[str, Any] = field(default_factory=dict)

    def one(self, stage: str) -> Path:
        """The only upstream result of a stage."""
        (path,) = (path for name, path in self.upstream.items() if name.startswith(f"{stage}/"))
        return path

    def say(self, message: str) -> None:
        """One line of progress, to standard error (the job's log)."""
        import sys

        print(message, file=sys.stderr, flush=True)
