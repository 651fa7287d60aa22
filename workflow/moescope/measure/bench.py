"""What arms stand on: the weights, an interpreter for each runtime, the prompt, the log."""

import importlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import read_json
from ..runtimes.client import Worker, WorkerDied, WorkerError
from ..runtimes.environments import Interpreter
from ..task import Task, ingredients
from . import admission, host
from .prompt import prompt_ids, vocabulary

MANIFEST = "moescope/manifest/1"
LOAD_LIMIT_S = 3600.0
FIRST_LIMIT_S = 3600.0  # the first pass compiles: minutes on a GPU


# Commands are imported by name: the plan adds them to the code of the stages whose study has one,
# so that studies without any do not depend on how commands are run.
BINARY, COMMAND = "moescope.runtimes.binary", "moescope.runtimes.command"


class NotAdmitted(Exception):
    """The checkpoint does not fit here; the text says so with the numbers."""

    def __init__(self, decision: admission.Admission):
        super().__init__(decision.why)
        self.facts = {"unsupported": decision.why, "admission": decision.as_dict()}


@dataclass(frozen=True)
class Bench:
    """weights: the checkpoint's folder. runtimes: by name, an Interpreter or a command's Tool.
    packages: by runtime, None for a command. prompt: token ids."""

    weights: Path
    runtimes: dict[str, Any]
    packages: dict[str, str | None]
    prompt: list[int]
    root: Path
    log: Path

    def worker(self, arm: dict[str, Any]) -> Worker:
        """A worker for an arm and all that share its process; not started yet."""
        runtime, settings = self.runtimes[arm["runtime"]], arm.get("env", {})
        if isinstance(runtime, Interpreter):
            return Worker(runtime.python, runtime.env, self.root, self.log, settings)
        return importlib.import_module(COMMAND).CommandWorker(runtime, self.log, settings)

    def variables(self, arm: dict[str, Any]) -> dict[str, str]:
        """The environment that an arm's runtime is given, before what a worker sets itself."""
        return self.runtimes[arm["runtime"]].env | arm.get("env", {})

    def loading(self, arm: dict[str, Any]) -> dict[str, Any]:
        """Arguments of the request ``load`` for an arm."""
        return {"package": self.packages[arm["runtime"]], "path": str(self.weights)}


def open_bench(task: Task, runtimes: list[str], prompt: int, processes: int = 1) -> Bench:
    """Weights and environments are made again here if they are missing. prompt: its length.
    processes: how many hold the weights at once, where more do than the memory is asked for anyway.

    Raises NotAdmitted, before anything is made, if the checkpoint does not fit into the memory.
    """
    # Both are imported here: checking a study needs neither.
    from ..checkpoints import materialise
    from ..runtimes import environments

    fetch = task.one("fetch")
    vocab = vocabulary(read_json(fetch / "config.json"), str(fetch / "config.json"))
    made_of = ingredients(fetch)
    manifest = read_json(fetch / "manifest.json", MANIFEST)
    _admit(task, manifest["bytes"], read_json(fetch / "config.json"), processes)
    weights = materialise.ensure(
        manifest,
        made_of["params"]["source"],
        task.work / "checkpoints" / made_of["key"],
        task.work,
        task.root,
    )
    ready: dict[str, Any] = {}
    packages: dict[str, str | None] = {}
    for name in dict.fromkeys(runtimes):
        path = task.upstream[f"build/{name}"]
        runtime = ingredients(path)["params"]["runtime"]
        command = runtime["kind"] == "command"
        maker = importlib.import_module(BINARY) if command else environments
        ready[name] = maker.ensure(path, task.work, task.root)
        packages[name] = runtime.get("package")
    return Bench(
        Path(weights).resolve(),
        ready,
        packages,
        prompt_ids(prompt, vocab),
        task.root,
        task.work / "logs" / f"{task.stage}.{task.subject}.{task.key}.log",
    )


def _admit(task: Task, weights: int, config: dict[str, Any], processes: int) -> None:
    import psutil

    shape, backend = task.params["shape"], task.params["machine"]["backend"]
    decision = admission.admit(
        processes * admission.predict_from(weights, config, shape["prompt"], shape["generate"]),
        psutil.virtual_memory().total,
        host.device_memory(backend),
        cap=task.params.get("memory"),
        apart=backend == "cuda",
    )
    if not decision.admitted:
        if processes > 1:
            more = f"; rounds.slices above 1 keeps {processes} processes loaded, 1 needs fewer"
            decision = replace(decision, why=decision.why + more)
        task.say(f"{task.subject}: {decision.why}")
        raise NotAdmitted(decision)


@contextmanager
def explained(arm: str, bench: Bench, task: Task) -> Iterator[None]:
    """Turn what a worker does wrong into a line that names the arm and says what to do."""
    try:
        yield
    except WorkerDied as died:
        todo = {
            "out_of_memory": "the memory is not enough for this checkpoint: close what else uses "
            "it, or take a smaller checkpoint or a larger machine",
            "timeout": "it hung; the log may say where",
        }.get(died.kind, "the log says more")
        log = bench.log.relative_to(task.root) if bench.log.is_relative_to(task.root) else bench.log
        raise UserError(f"{died.message}; {todo} ({log})", where=f"arm {arm}") from died
    except WorkerError as refused:
        raise UserError(f"{refused.kind}: {refused.message}", where=f"arm {arm}") from refused


def ask_all(
    workers: dict[str, Worker], do: str, limit_s: float, arguments: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any] | WorkerError]:
    """One request to each of some workers, answered at the same time: by name, the result or why
    there is none."""
    deadline = time.monotonic() + limit_s
    found: dict[str, dict[str, Any] | WorkerError] = {}
    for name, worker in workers.items():
        try:
            worker.send(do, deadline=deadline, **arguments[name])
        except WorkerError as error:
            found[name] = error
    for name, worker in workers.items():
        if name not in found:
            try:
                found[name] = worker.receive(do, deadline=deadline)
            except WorkerError as error:
                found[name] = error
    return found


def decode_limit_s(first_s: float) -> float:
    """Seconds that a pass may take, from how long the first one took."""
    return 60.0 + 20.0 * first_s
