"""The fetch stage: a checkpoint's files at their pin, and what they are."""

from ..errors import UserError
from ..files import write_json, write_text
from ..task import Task
from . import local, manifest, materialise
from .form import FORM
from .headers import read_headers, write_tensors


def run(task: Task) -> None:
    """Writes manifest.json, config.json (a copy) and tensors.csv; the weights stay in work/."""
    source = task.params["source"]
    place = task.work / "checkpoints" / task.key
    if source["kind"] == "local":
        local.check(source, task.root)
    folder = materialise.provide(source, place, task.work, task.root)
    config = folder / "config.json"
    if not config.is_file():
        raise UserError("there is no config.json; a folder with a model is wanted", str(folder))
    tensors = read_headers(folder)
    described = manifest.describe(folder, source)
    if source["kind"] == "synthetic":
        described["form"] = FORM
    write_json(task.out / "manifest.json", described)
    write_text(task.out / "config.json", config.read_text())
    write_tensors(task.out / "tensors.csv", tensors)
    manifest.put_seal(folder, described, materialise.seal_of(place))
    task.notes["bytes"] = described["bytes"]
    task.say(f"{task.subject}: {len(tensors)} tensors, {described['bytes'] / 1e9:.2f} GB")
