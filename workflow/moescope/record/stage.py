"""The record stage: record.json, record.md and record.html, and crossover.csv where the study asks
for a crossover. Needs no GPU and no clock."""

from ..files import write_text
from ..task import Task
from ..verdict import compact
from .assemble import assemble
from .crossover import csv_text
from .render import render


def run(task: Task) -> None:
    """Write the record's files; raises UserError if the analysis or a template is missing."""
    record = assemble(task)
    compact.write(task.out / "record.json", record)
    for name, text in render(record, task.root / "templates").items():
        write_text(task.out / name, text)
    if record["crossover"]:
        write_text(task.out / "crossover.csv", csv_text(record))
