"""The trace stage: where an arm's token goes, by instruments of its runtime.

Two instruments run on every backend: the scopes (forced evaluation at module boundaries, time by
term) and the graph (the operations of one decoded token, by term). A backend's own instruments are
in a module of their own, which is called afterwards; see BACKENDS.
"""

import csv
import importlib
import importlib.util
import io
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import UserError
from ..files import write_json, write_text
from ..measure import bench as benches
from ..measure import guard as guards
from ..runtimes.client import Worker, WorkerError
from ..runtimes.environments import Interpreter
from ..task import Task

SCOPES = "moescope/scopes/1"
TRACE = "moescope/trace/1"

# Backend -> the module with its instruments: ``measure(context) -> {"instruments": [names],
# "not_measured": [sentences], ...}``. It writes its own files; what it returns joins trace.json.
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
            try:
                _common(context, found)
            except Unsupported as refused:
                found.unsupported = str(refused)
                task.say(f"{arm['name']}: unsupported: {refused}")
            else:
                _of_the_backend(context, backend, found)
    found.write(task, params["limits"]["conservation"])


class Unsupported(Exception):
    """The runtime does not know the model."""


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

    def write(self, task: Task, limit: float) -> None:
        unsupported = {"unsupported": self.unsupported} if self.unsupported else {}
        intervals = [second for one in self.plain for second in one["token_s"]]
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
        found = {one.get("tokens_sha256") for one in (*self.plain, *self.passes)}
        return len(found) == 1 if self.passes else None


def _common(context: Context, found: Found) -> None:
    """The scopes, each pass beside a plain one of the same process, and the decode graph."""
    trace, bench = context.task.params["trace"], context.bench
    with context.worker() as worker:
        context.guard.own(worker.pid)
        arguments = bench.loading(context.arm)
        try:
            loaded = worker.ask("load", benches.LOAD_LIMIT_S, **arguments)
        except WorkerError as refused:
            if refused.kind == "unsupported":
                raise Unsupported(refused.message) from None
            raise
        context.guard.settle()
        found.moe_layers = len(loaded["moe_layers"])
        given = {"prompt": bench.prompt, "patches": context.patches}
        plain = {**given, "tokens": trace["tokens"] + 1}
        worker.ask("decode", benches.FIRST_LIMIT_S, **plain)
        try:
            # Discarded: forced evaluation meets pieces of graphs that were never compiled.
            worker.ask("scopes", benches.FIRST_LIMIT_S, **given, tokens=trace["tokens"], passes=1)
            for number in range(trace["passes"]):
                _one_pass(context, worker, number, given, plain, found)
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
    plain: dict[str, Any],
    found: Found,
) -> None:
    tokens, limit = found.tokens, benches.FIRST_LIMIT_S
    found.plain.append(
        context.guarded(f"plain {number}", lambda: worker.ask("decode", limit, **plain))
    )
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


def _of_the_backend(context: Context, backend: str, found: Found) -> None:
    name = BACKENDS.get(backend)
    if not isinstance(context.bench.runtimes[context.arm["runtime"]], Interpreter):
        name = COMMAND if backend in COMMAND_BACKENDS else None
    if name is None:
        return
    if importlib.util.find_spec(name) is None:
        found.not_measured.append(f"kernels: there are no instruments for {backend} yet")
        return
    more = importlib.import_module(name).measure(context)
    found.instruments += more.pop("instruments", [])
    found.not_measured += more.pop("not_measured", [])
    found.more = more


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
