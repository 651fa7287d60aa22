"""Analyse and render every committed measurement again, of whatever host, with the present code.

What was measured stays as it is: the new analysis and record read the same results by the same
keys, and take the place of the old ones.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

from ..files import read_json
from ..run import run_job
from ..study.fingerprint import fingerprints
from ..study.plan import CODE, Job, folder, record_params
from ..task import INGREDIENTS


def rerender(root: Path) -> Iterator[str]:
    """Yields a line for each committed record: what became of it."""
    for path in sorted((root / "results" / "records").glob("*/*/ingredients.json")):
        old = read_json(path, INGREDIENTS)
        analyse, record = present_jobs(root, old)
        if record.key == old["key"] and record.done(root):
            yield f"{record.subject} {record.key}: as it is"
            continue
        for job in (analyse, record):
            if not job.done(root):
                run_job(job, root)
        for name, key, job in (
            ("analyse", old["upstream"][f"analyse/{analyse.subject}"], analyse),
            ("record", old["key"], record),
        ):
            if key != job.key:
                shutil.rmtree(root / folder(name, job.subject, key), ignore_errors=True)
        yield f"{record.subject} {old['key']}: now {record.key}"


def present_jobs(root: Path, record: dict) -> tuple[Job, Job]:
    """The analysis and the record that the present code makes from a record's measurements."""
    (name,) = (name for name in record["upstream"] if name.startswith("analyse/"))
    old = read_json(
        root / folder(*name.split("/", 1), record["upstream"][name]) / "ingredients.json",
        INGREDIENTS,
    )
    analyse = Job(
        "analyse", old["subject"], old["params"], old["upstream"], fingerprints(*CODE["analyse"])
    )
    upstream = {**old["upstream"], analyse.name: analyse.key}
    code = fingerprints(*CODE["record"])
    return analyse, Job("record", record["subject"], record_params(root), upstream, code)
