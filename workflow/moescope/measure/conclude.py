"""A measurement that was interrupted for good: the rounds that had finished are its result.

The measure stage goes on after the rounds in its journal. Where that cannot be, since the host was
lent and is gone, the finished rounds are still interleaved rounds on a quiet host, and count if
they are at least as many as the stage itself asks for. environment.json then says how many of how
many there are, and the record repeats it.
"""

import shutil
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import read_json, write_json, write_jsonl
from ..task import Task
from .journal import SCHEMA
from .runs import write_runs
from .validity import flag_changed_tokens

LEAST_ROUNDS = 3  # as in the stage


def run(task: Task) -> None:
    """Writes what the measure stage writes, from the journal of the task's key; the journal goes.

    Raises UserError without a journal or with too few rounds in it.
    """
    folder = task.work / "journal" / "measure" / task.key
    if not (folder / "journal.json").is_file():
        raise UserError(
            "there is no journal of this measurement: nothing was interrupted", task.key
        )
    head = read_json(folder / "journal.json", SCHEMA)
    rounds = [read_json(path, SCHEMA) for path in sorted(folder.glob("round-*.json"))]
    wanted = task.params["rounds"]["count"]
    if len(rounds) < LEAST_ROUNDS:
        raise UserError(
            f"only {len(rounds)} rounds had finished, {LEAST_ROUNDS} are the least; measure again",
            str(folder),
        )
    rows = [row for entry in rounds for row in entry["runs"]]
    flag_changed_tokens(rows)
    write_runs(task.out / "runs.jsonl", rows)
    write_jsonl(task.out / "guard.jsonl", [line for entry in rounds for line in entry["guard"]])
    environment = {
        **head["host"],
        "processes": _processes(rows),
        "starts": head["starts"],
        "not_applicable": {},
        "unsupported": {},
        "failed": head.get("failed", {}),
        "interrupted": f"after {len(rounds)} of {wanted} rounds",
    }
    write_json(task.out / "environment.json", environment)
    task.say(f"{task.subject}: {environment['interrupted']}")
    shutil.rmtree(folder)


def _processes(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The processes as far as their runs tell: which arms, which versions."""
    found: dict[int, dict[str, Any]] = {}
    for row in rows:
        process = row["process"]
        entry = found.setdefault(
            process["index"],
            {"index": process["index"], "arms": [], "versions": process["versions"]},
        )
        if row["arm"] not in entry["arms"]:
            entry["arms"].append(row["arm"])
    return [found[index] for index in sorted(found)]


def conclude(subject: str, study: Path | None, root: Path) -> None:
    """The result of a checkpoint's interrupted measurement, in its place."""
    from .. import run as jobs
    from ..study.session import current_plan

    plan = current_plan(root, study)
    try:
        job = plan.job("measure", subject)
    except KeyError:
        raise UserError(f"the study measures no {subject}") from None
    jobs.run_job(job, root, run)
