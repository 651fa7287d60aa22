"""The fetch stage: a checkpoint's files at their pin, and what they are."""

from ..files import write_json, write_text
from ..task import Task
from . import local, manifest, materialise
from .headers import read_headers, write_tensors


def run(task: Task) -> None:
    """Writes manifest.json, config.json (a copy) and tensors.csv; the weights stay in work/."""
    source = task.params["source"]
    if source["kind"] == "local":
        local.check(source, task.root)
    folder = materialise.provide(source, task.work / "checkpoints" / task.key, task.work, task.root)
    tensors = read_headers(folder)
    described = manifest.describe(folder, source)
    write_json(task.out / "manifest.json", described)
    write_text(task.out / "config.json", (folder / "config.json").read_text())
    write_tensors(task.out / "tensors.csv", tensors)
    task.notes["bytes"] = described["bytes"]
    task.say(f"{task.subject}: {len(tensors)} tensors, {described['bytes'] / 1e9:.2f} GB")
