"""The parity stage: are an arm's tokens right? Each arm against the reference.

Twice: greedily, as it is measured, up to the first token that differs; and teacher-forced, both
on the reference's tokens, where one early difference does not hide all that follows.
"""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from ..files import write_json
from ..measure import bench as benches
from ..measure import guard as guards
from ..measure.failed import told
from ..measure.failing import failure
from ..runtimes.client import Worker, WorkerError, close_all
from ..task import Task, ingredients
from .judge import Judge, Seen, sound

SCHEMA = "moescope/parity/1"
LOCK_LIMIT_S = 3600.0
# What stands for a reference that failed.
NOTHING = Seen(None, None, None, None, 0, "the reference failed")


def run(task: Task) -> None:
    """Writes parity.json (moescope/parity/1). All arms run at the same time: nothing is timed."""
    params = task.params
    arms, shape = params["arms"], params["shape"]
    (reference,) = (name for name, arm in arms.items() if arm["role"] == "reference")
    runtimes = [arm["runtime"] for arm in arms.values()]
    try:
        bench = benches.open_bench(task, runtimes, shape["prompt"])
    except benches.NotAdmitted as skipped:
        empty = {"schema": SCHEMA, "reference": reference, "repetition_excused": False, "arms": {}}
        write_json(task.out / "parity.json", empty | {"skipped": str(skipped)})
        return
    synthetic = ingredients(task.one("fetch"))["params"]["source"]["kind"] == "synthetic"
    backend = params["machine"]["backend"]
    scratch = task.work / "tmp"
    scratch.mkdir(parents=True, exist_ok=True)
    with (
        guards.locked(f"parity {task.subject}", backend, LOCK_LIMIT_S, task.say, shared=True),
        tempfile.TemporaryDirectory(dir=scratch, prefix="parity.") as folder,
    ):
        seen, gone = _decode(bench, task, reference, Path(folder))
        judge = Judge(seen.get(reference, NOTHING), params["limits"], shape["generate"], synthetic)
        # Nobody is left to show that random weights repeat themselves.
        judge.excused |= synthetic and reference not in seen
        found = {name: judge.compare(one) for name, one in seen.items()}
    found |= {name: {"void": why} for name, why in gone.items()}
    for name in arms:
        task.say(f"{name}: {_told(found[name], name == reference)}")
    parity = {
        "schema": SCHEMA,
        "reference": reference,
        "repetition_excused": judge.excused,
        "arms": {name: found[name] for name in arms},
    }
    write_json(task.out / "parity.json", parity)


def _decode(
    bench: benches.Bench, task: Task, reference: str, folder: Path
) -> tuple[dict[str, Seen], dict[str, str]]:
    """What each arm did, and the arms that left (arm -> why): their runtime does not know the
    model, or they failed or died. Without the reference the others are judged by themselves."""
    arms: dict[str, dict[str, Any]] = dict(task.params["arms"])
    generate = task.params["shape"]["generate"]
    gone: dict[str, str] = {}

    def leave(name: str, error: WorkerError) -> None:
        unsupported = error.kind == "unsupported"
        gone[name] = f"unsupported: {error.message}" if unsupported else told(failure(error))
        workers.pop(name).close(patient=False)

    @contextmanager
    def leaving(name: str) -> Iterator[None]:
        try:
            yield
        except WorkerError as error:
            leave(name, error)

    workers: dict[str, Worker] = {}
    with ExitStack() as stack:
        started: list[Worker] = []
        stack.callback(lambda: close_all(started))
        for name, arm in arms.items():
            workers[name] = worker = bench.worker(arm)
            started.append(worker)
            with leaving(name):
                worker.start()
        for name, worker in list(workers.items()):
            with leaving(name):
                worker.wait_ready()

        def ask(do: str, limit_s: float, more: dict[str, Any]) -> dict[str, dict[str, Any]]:
            """A request to some arms, with arguments by arm: the replies of those that are left."""
            replies = benches.ask_all({name: workers[name] for name in more}, do, limit_s, more)
            for name, reply in replies.items():
                if isinstance(reply, WorkerError):
                    if do == "forced" and reply.kind == "not_applicable":
                        continue
                    leave(name, reply)
            return {n: reply for n, reply in replies.items() if not isinstance(reply, WorkerError)}

        ask("load", benches.LOAD_LIMIT_S, {name: bench.loading(arms[name]) for name in workers})
        given = {
            name: {"prompt": bench.prompt, "patches": arms[name].get("patches", [])}
            for name in workers
        }
        # The reference first: what MLX compiles, it writes to its cache in place, and others that
        # need the same kernels at the same time would read half of them.
        greedy: dict[str, Any] = {}
        for together in (
            [n for n in given if n == reference],
            [n for n in given if n != reference],
        ):
            wanted = {name: given[name] | {"tokens": generate} for name in together}
            greedy |= ask("decode", benches.FIRST_LIMIT_S, wanted)
        continuation = greedy[reference]["tokens"] if reference in workers else None
        forced: dict[str, Any] = {}
        if continuation is not None:
            forced = ask(
                "forced",
                benches.FIRST_LIMIT_S,
                {
                    name: one | {"continuation": continuation, "save": str(folder / f"{name}.npy")}
                    for name, one in given.items()
                    if name in workers
                },
            )
    seen = {name: _seen(name, greedy[name], forced.get(name), folder) for name in workers}
    return seen, gone


def _seen(name: str, greedy: dict[str, Any], forced: dict[str, Any] | None, folder: Path) -> Seen:
    """forced: None for an arm that cannot be led along given tokens."""
    tokens, why_not = greedy["tokens"], None
    if greedy.get("same_prompt") is False:
        tokens, why_not = None, "the command chooses its own prompt"
    elif tokens is None:
        why_not = "the command prints no token ids"
    finite, logits = greedy["finite"], None
    if forced is not None:
        logits = np.load(folder / f"{name}.npy", mmap_mode="r")
        if logits.ndim != 2 or logits.shape[1] != forced["vocab"]:
            raise UserError(f"the forced pass wrote logits of shape {logits.shape}", f"arm {name}")
        finite = bool(finite and forced["finite"] and sound(logits))
    generated = greedy["generated_tokens"]
    return Seen(tokens, greedy["tokens_sha256"], finite, logits, generated, why_not)


def _told(entry: dict[str, Any], reference: bool) -> str:
    if entry["void"]:
        return f"void: {entry['void']}"
    if entry.get("not_compared"):
        return f"not compared: {entry['not_compared']}"
    if reference:
        return "finite"
    greedy, forced = entry["greedy"], entry["forced"]
    if greedy is None:
        return "not compared: the reference gave nothing to compare with"
    where = greedy["first_divergence"]
    same = "identical" if where is None else f"differs from token {where} on"
    return f"{same}; top-1 agreement {forced['top1_agreement']:.3f}" if forced else same
