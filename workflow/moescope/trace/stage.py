"""The trace stage: where an arm's token goes, by instruments of its runtime.

Two instruments run on every backend: the scopes (forced evaluation at module boundaries, time by
term) and the graph (the operations of one decoded token, by term). A backend's own instruments are
in a module of their own, which works beside these; see BACKENDS.
"""

import csv
import importlib
import importlib.util
import io
import json
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

from ..errors import UserError
from ..files import sha256_text, write_json, write_text
from ..measure import bench as benches
from ..measure import guard as guards
from ..measure.failed import told
from ..measure.failing import failure
from ..runtimes.client import Worker, WorkerDied, WorkerError
from ..runtimes.environments import Interpreter
from ..task import Task
from .team import PLAIN, Team

SCOPES = "moescope/scopes/1"
TRACE = "moescope/trace/1"

# Backend -> the module with its instruments. Either ``measure(context) -> {"instruments": [names],
# "not_measured": [sentences], ...}``, called afterwards, or a class ``Instrument(context)`` that
# shares the processes (team.py):
#   settings   name -> variables of the processes that it needs beside "plain"
#   more       tokens that its plain passes have more than the others'
#   chores()   name -> what to do there before anything is timed, all at the same time
#   turn(team) once after each pass of the scopes
#   finish(team, plain, loaded) -> as measure does; plain: the replies of the plain passes, loaded:
#              that of loading
#   close()    always, in the end
# It writes its own files; what it returns joins trace.json.
# Imported by name: the plan adds it to the code of the traces on that backend, and of no other.
BACKENDS = {"cuda": "moescope.trace.cuda", "metal": "moescope.trace.metal_worker"}
# The same for arms that are commands, on the backends that have a profiler for binaries.
COMMAND, COMMAND_BACKENDS = "moescope.trace.command", ("cuda", "metal")

GATHERS = ("GatherMM", "GatherQMM")
MOE_TERMS = ("router", "expert_gather", "activation", "combine", "shared_expert")
LOCK_LIMIT_S = 3600.0
MAX_WAIT_S = 30.0  # shares of one pass suffer less from a neighbour than times of two arms do


@dataclass(frozen=True)
class Context:
    """What an instrument works with: the task, the weights and prompt, the arm, the guard."""

    task: Task
    bench: benches.Bench
    arm: dict[str, Any]
    guard: guards.Guard

    @property
    def patches(self) -> list[str]:
        return self.arm.get("patches", [])

    def worker(self, **variables: str) -> Worker:
        """A process of the arm, with further environment variables; not started yet."""
        arm = self.arm | {"env": self.arm.get("env", {}) | variables}
        return self.bench.worker(arm)

    def guarded(self, name: str, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """A request on a quiet host, repeated while it is disturbed, as often as the guard allows.

        The result carries "guard": attempts, busy_fraction, rejected (it was disturbed each time).
        """
        for attempt in range(1, self.guard.settings["attempts"] + 1):
            self.guard.gate(name)
            with self.guard.watch(name, attempt) as watch:
                result = call()
            if watch.why is None:
                break
            self.task.say(f"{name}: {watch.why}")
        return result | {
            "guard": {
                "attempts": attempt,
                "busy_fraction": watch.busy_fraction,
                "rejected": watch.why is not None,
            }
        }


def run(task: Task) -> None:
    """Writes scopes.json (moescope/scopes/1), operations.csv (term, primitive, count), trace.json
    (moescope/trace/1), and what the backend's instruments write."""
    params = task.params
    arm, backend = params["arm"], params["machine"]["backend"]
    settings = guards.DEFAULTS | {"max_wait_s": MAX_WAIT_S} | params.get("guard", {})
    found = Found(params["trace"]["tokens"])
    try:
        bench = benches.open_bench(task, [arm["runtime"]], params["shape"]["prompt"])
    except benches.NotAdmitted as skipped:
        found.unsupported = str(skipped)
        found.write(task, params["limits"]["conservation"])
        return
    with guards.locked(f"trace {task.subject}", backend, LOCK_LIMIT_S, task.say):
        probes = guards.probes(settings, backend)
        with (
            guards.Guard(settings, probes, task.say) as guard,
            benches.explained(arm["name"], bench, task),
        ):
            context = Context(task, bench, arm, guard)
            guard.gate("start")
            found = _attempt(context, backend)
            if found.crash:  # under a profiler, processes die now and then
                task.say(f"{arm['name']}: once more")
                found = _attempt(context, backend, [found.crash])
    found.write(task, params["limits"]["conservation"])


def _attempt(context: Context, backend: str, crashes: Sequence[str] = ()) -> "Found":
    """All instruments. crashes: what an attempt before this one ended with."""
    found = Found(context.task.params["trace"]["tokens"])
    module = _of_the_backend(context, backend, found)
    try:
        _together(context, getattr(module, "Instrument", None), found)
    except Unsupported as refused:
        found.unsupported = str(refused)
        context.task.say(f"{context.arm['name']}: unsupported: {refused}")
    except (ArmFailed, WorkerDied) as error:
        found.fail(error)
        context.task.say(f"{context.arm['name']}: {found.not_measured[-1]}")
    else:
        if hasattr(module, "measure"):
            found.add(module.measure(context))
    if crashes:
        found.more["crashes"] = list(crashes)
    return found


class Unsupported(Exception):
    """The runtime does not know the model."""


class Unready(WorkerError):
    """Processes of an instrument that ended before they were ready: its library is missing."""

    def __init__(self, *errors: WorkerError):
        super().__init__("unsupported", "; ".join(dict.fromkeys(e.message for e in errors)))


class ArmFailed(WorkerError):
    """The arm itself failed. An instrument that does is an error, unless the process dies of it."""


class Found:
    """What the instruments found, and what they did not."""

    def __init__(self, tokens: int):
        self.tokens = tokens
        self.passes: list[dict[str, Any]] = []
        self.plain: list[dict[str, Any]] = []
        self.operations: list[dict[str, Any]] = []
        self.counts: dict[str, Any] | None = None
        self.moe_layers = 0
        self.instruments: list[str] = []
        self.not_measured: list[str] = []
        self.more: dict[str, Any] = {}
        self.unsupported: str | None = None
        self.crash: str | None = None  # what a process said that died of no reason known

    def add(self, more: dict[str, Any]) -> None:
        """What a backend's instruments return."""
        self.instruments += more.pop("instruments", [])
        self.not_measured += more.pop("not_measured", [])
        self.more |= more

    def forget(self) -> None:
        """What was found before anything was timed."""
        self.instruments, self.not_measured = [], []

    def fail(self, error: WorkerError) -> None:
        """The arm died or failed: nothing that it has shown counts, the other arms go on."""
        self.passes, self.plain, self.operations, self.counts = [], [], [], None
        self.instruments = []
        reason = failure(error)
        self.crash = reason["why"] if reason["kind"] == "crash" else None
        self.not_measured = [f"its instrumented passes: {told(reason)}"]

    def write(self, task: Task, limit: float) -> None:
        unsupported = {"unsupported": self.unsupported} if self.unsupported else {}
        intervals = [second for one in self.plain for second in one["token_s"] or ()]
        scopes = {
            "schema": SCOPES,
            "tokens": self.tokens,
            "passes": self.passes,
            "plain_token_s": statistics.median(intervals) if intervals else None,
            "plain": [{key: one[key] for key in ("decode_s", "guard")} for one in self.plain],
            **unsupported,
        }
        write_json(task.out / "scopes.json", scopes)
        write_text(task.out / "operations.csv", _table(self.operations))
        trace = {
            "schema": TRACE,
            "operations": self.counts,
            "instruments": self.instruments,
            "not_measured": self.not_measured,
            "moe_layers": self.moe_layers,
            "conservation": {"worst": _worst_gap(self.passes), "limit": limit},
            "same_tokens": self._same_tokens(),
            **self.more,
            **unsupported,
        }
        write_json(task.out / "trace.json", trace)

    def _same_tokens(self) -> bool | None:
        """Whether the forced passes generated the tokens of the plain ones; None without passes."""
        found = {one.get("tokens_sha256") for one in self.passes}
        for one in self.plain:
            ids = one.get("tokens") or []
            if len(ids) > self.tokens + 1:  # longer than a forced pass; the worker's digest
                text = json.dumps(ids[: self.tokens + 1], separators=(",", ":"))
                found.add(sha256_text(text))
            else:
                found.add(one.get("tokens_sha256"))
        return len(found) == 1 if self.passes else None


def _together(context: Context, kind: Any, found: Found) -> None:
    """The scopes, each pass beside a plain one of the same process, the decode graph, and what a
    backend's instrument does in between."""
    begun = time.monotonic()
    instrument, stack = kind(context) if kind else None, ExitStack()
    if instrument:
        stack.callback(instrument.close)
    plain = context.task.params["trace"]["tokens"] + 1 + (instrument.more if instrument else 0)
    given = {"prompt": context.bench.prompt, "patches": context.patches}
    settings = instrument.settings if instrument else {}
    with stack, Team(context, settings) as team:
        loaded = _load(team, found)
        # What is compiled at first use is compiled once and then found in MLX's cache, which
        # several processes that compile the same at the same time would write over one another.
        compiled = threading.Event()
        chores = {PLAIN: lambda worker: _first(context, worker, given, plain, found, compiled)}
        if team.failed:
            _not_measured("kernels", Unready(*team.failed.values()), found)
            instrument = None
            team.close(*(name for name in team.workers if name != PLAIN))
        for name, chore in (instrument.chores() if instrument else {}).items():
            chores[name] = partial(_after, compiled, chore)
        told = team.each({name: chores[name] for name in team.workers})
        if any(_is(error, "out_of_memory") for error in told.values()) and len(told) > 1:
            team.alone()
            found.forget()
            _load(team, found)
            told = team.each({PLAIN: chores[PLAIN]})
        if isinstance(told[PLAIN], WorkerError):
            raise told[PLAIN]
        for name, error in told.items():
            if isinstance(error, WorkerError):
                _not_measured("kernels", error, found)
                team.close(name)
                instrument = None
        context.task.say(f"{', '.join(team.workers)}: ready after {time.monotonic() - begun:.0f} s")
        context.guard.settle()
        for number in range(context.task.params["trace"]["passes"]):
            _one_pass(context, team.workers[PLAIN], number, given, plain, found)
            if instrument:
                instrument.turn(team)
        if instrument:
            found.add(instrument.finish(team, found.plain, loaded))
            context.task.say(f"kernels traced after {time.monotonic() - begun:.0f} s")


def _load(team: Team, found: Found) -> dict[str, Any]:
    try:
        loaded = team.load()
    except WorkerError as refused:
        if refused.kind == "unsupported":
            raise Unsupported(refused.message) from None
        raise _of_the_arm(refused) from None
    found.moe_layers = len(loaded["moe_layers"])
    return loaded


def _of_the_arm(error: WorkerError) -> WorkerError:
    return error if isinstance(error, WorkerDied) else ArmFailed(error.kind, error.message)


def _after(compiled: threading.Event, chore: Callable[[Worker], Any], worker: Worker) -> Any:
    compiled.wait(benches.FIRST_LIMIT_S)
    return chore(worker)


def _is(reply: Any, kind: str) -> bool:
    return isinstance(reply, WorkerError) and reply.kind == kind


def _first(
    context: Context,
    worker: Worker,
    given: dict[str, Any],
    plain: int,
    found: Found,
    compiled: threading.Event,
) -> None:
    """First passes, which are discarded, and the decode graph."""
    try:
        worker.ask("decode", benches.FIRST_LIMIT_S, **given, tokens=plain)
    except WorkerError as refused:
        raise _of_the_arm(refused) from None
    finally:
        compiled.set()
    try:
        # Forced evaluation meets pieces of graphs that were never compiled.
        tokens = context.task.params["trace"]["tokens"]
        worker.ask("scopes", benches.FIRST_LIMIT_S, **given, tokens=tokens, passes=1)
        found.instruments.append("scopes")
    except WorkerError as refused:
        _not_measured("time by term", refused, found)
    try:
        graph = worker.ask("graph", benches.FIRST_LIMIT_S, **given)
        found.operations = graph["operations"]
        found.counts = _counts(graph, found.moe_layers)
        found.instruments.append("graph")
    except WorkerError as refused:
        _not_measured("operations by term", refused, found)


def _one_pass(
    context: Context,
    worker: Worker,
    number: int,
    given: dict[str, Any],
    plain: int,
    found: Found,
) -> None:
    tokens, limit = found.tokens, benches.FIRST_LIMIT_S
    found.plain.append(
        context.guarded(
            f"plain {number}", lambda: worker.ask("decode", limit, **given, tokens=plain)
        )
    )
    if "scopes" not in found.instruments:
        return
    found.passes.append(
        context.guarded(
            f"scopes {number}",
            lambda: worker.ask("scopes", limit, **given, tokens=tokens, passes=1)["passes"][0],
        )
    )
    one = found.passes[-1]
    largest = max(one["terms_s"], key=one["terms_s"].__getitem__)
    context.task.say(
        f"pass {number}: {one['wall_s'] / tokens * 1e3:.2f} ms/token in parts, most in {largest} "
        f"({one['terms_s'][largest] / one['wall_s']:.0%})"
    )


def _not_measured(what: str, refused: WorkerError, found: Found) -> None:
    """An instrument that does not fit this model or this MLX; anything else is an error."""
    if refused.kind not in ("unsupported", "not_applicable"):
        raise refused
    found.not_measured.append(f"{what}: {refused.message}")


def _counts(graph: dict[str, Any], moe_layers: int) -> dict[str, Any]:
    """Operations a token: in all, conversions of type, gathered products, in a MoE block."""
    rows = graph["operations"]
    if sum(row["count"] for row in rows) != graph["total"]:
        raise UserError("the decode graph's operations by term do not add up to its total")
    counts = {
        "total": graph["total"],
        "astype": graph["astype"],
        "gather": sum(row["count"] for row in rows if row["primitive"] in GATHERS),
    }
    if moe_layers:
        inside = sum(row["count"] for row in rows if row["term"] in MOE_TERMS)
        counts["per_moe_layer"] = inside / moe_layers
    return counts


def _of_the_backend(context: Context, backend: str, found: Found) -> ModuleType | None:
    """The module with the backend's instruments, if there is one."""
    name = BACKENDS.get(backend)
    if not isinstance(context.bench.runtimes[context.arm["runtime"]], Interpreter):
        name = COMMAND if backend in COMMAND_BACKENDS else None
    if name is None:
        return None
    if importlib.util.find_spec(name) is None:
        found.not_measured.append(f"kernels: there are no instruments for {backend} yet")
        return None
    return importlib.import_module(name)


def _worst_gap(passes: list[dict[str, Any]]) -> float | None:
    """The largest |sum of the terms - wall| / wall."""
    gaps = [abs(sum(one["terms_s"].values()) / one["wall_s"] - 1) for one in passes]
    return max(gaps, default=None)


def _table(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(("term", "primitive", "count"))
    table.writerows((row["term"], row["primitive"], row["count"]) for row in rows)
    return text.getvalue()
