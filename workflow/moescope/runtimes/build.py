"""The build stage: a runtime's pin is made ready, and what it consists of is written down."""

import importlib

from ..files import write_json
from ..task import Task
from . import environments


def run(task: Task) -> None:
    """Writes manifest.json (schema moescope/environment/1; moescope/binary/1 for a command)."""
    runtime = task.params["runtime"]
    if runtime["kind"] == "command":
        # By name: the plan adds it to the code of the builds of commands, and of no other.
        importlib.import_module("moescope.runtimes.binary").build(task)
        return
    interpreter = environments.provide(runtime, task.work, task.root)
    manifest = environments.describe(runtime, interpreter)
    write_json(task.out / "manifest.json", manifest)
    versions = ", ".join(f"{p} {manifest['packages'][p]}" for p in ("mlx", runtime["package"]))
    task.say(f"{runtime['name']}: {versions}, Python {manifest['python']}")
