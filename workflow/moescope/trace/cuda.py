"""The instruments of a CUDA arm: its kernels, in their terms, and what the host does meanwhile.

Three processes of the arm, loaded at the same time where the weights fit three times: "plain" with
no profiler, "watched" under CUPTI, "alone" under CUPTI with CUDA graphs off. Passes over the same
prompt, each process after a discarded one:

    plain     no profiler: the wall time of a token, and what the profiler costs against it
    time      kernels and CUDA calls recorded, CUDA graphs on, in turns with the plain ones
    quiet     kernels alone recorded, in the same turns: what recording calls costs on the GPU
    longer    as "time", in the same turns, but LONGER tokens more: two lengths, their difference
    order     graphs off, each step's graph exported: whose each launch is
    alone     graphs off, nothing exported: each kernel's time when it runs by itself
    forced    graphs off, evaluation forced at module boundaries: a second opinion on "alone"
    sweep     graphs off, short: the kernel of the expert gather for each top_k

What the profiler costs is told in two parts. On the GPU, each kernel's duration is taken by the GPU
itself; how long it is with no profiler at all cannot be seen, so kernels recorded alone are set
against kernels recorded with all calls: this is what limits an attribution of GPU time. The host
pays for every record, which the wall of a profiled token shows against a plain one: that cost is
reported, and wall times are taken from plain passes only.
"""

import csv
import gzip
import io
import shutil
import statistics
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..files import sha256_file, write_bytes, write_json, write_text
from ..runtimes.client import Worker, WorkerError
from . import align, kernels, sweep, timeline
from .align import Label, Mismatch, StepLabels
from .events import Events, Kernel, read_events
from .team import PLAIN, Team

if TYPE_CHECKING:
    from .stage import Context

TERMS = "moescope/terms/1"
FIRST = 3  # the first step of the window: caches have grown before it
LONGER = 20  # tokens that the longer passes have more
SHORT = 4  # steps of the short pairs that tell the profiler's cost, beside the turns
PAIRS = 5  # of those and the turns, together, at least
LIMIT_S = 3600.0
CUPTI = {"MOESCOPE_BEFORE_MLX": "cupti"}
GRAPHS_OFF = {**CUPTI, "MLX_USE_CUDA_GRAPHS": "0"}
WATCHED, ALONE = "watched", "alone"
# Of a memory, what the weights of all processes may take together; beyond the GPU's, MLX's would be
# paged to the host.
SHARE = 0.7


@dataclass
class Passes:
    """What was recorded. plain: a token's wall in ms, of each plain pass; plain_cpu: likewise the
    processor's; timed: a token's wall in the profiled passes beside them. quiet: the kernels of a
    pass whose calls were not recorded, beside each of time; pairs: further such pairs, short.
    Passes that a study cannot do without are not None."""

    plain: list[float] = field(default_factory=list)
    plain_cpu: list[float] = field(default_factory=list)
    timed: list[float] = field(default_factory=list)
    time: list[Events] = field(default_factory=list)
    quiet: list[Events] = field(default_factory=list)
    pairs: list[tuple[Events, Events]] = field(default_factory=list)
    longer: list[Events] = field(default_factory=list)
    forced: Events | None = None
    order: Events | None = None
    alone: Events | None = None
    bandwidth: dict[str, Any] | None = None
    sweep: dict[str, Any] | None = None
    moe_layers: int = 0


class Instrument:
    """See trace.stage.BACKENDS."""

    more = FIRST - 1

    def __init__(self, context: "Context"):
        self.context, task = context, context.task
        self.settings = {WATCHED: CUPTI, ALONE: GRAPHS_OFF} if _fits(context, 3) else {}
        self.window = task.params["trace"]["tokens"]
        self.tokens = FIRST + self.window
        self.last = self.tokens - 1
        self.folder = task.work / "tmp" / f"events-{task.key}"
        self.folder.mkdir(parents=True, exist_ok=True)
        # Records are read while the next pass runs: the process that measures is another one.
        self.reader = ThreadPoolExecutor(1)
        self.number, self.keep = 0, False
        self.timed: list[float] = []
        self.time: list[Future[Events]] = []
        self.quiet: list[Future[Events]] = []
        self.longer: list[Future[Events]] = []
        self.pairs: list[tuple[Future[Events], Future[Events]]] = []
        self.found: dict[str, Future[Events]] = {}

    def chores(self) -> dict[str, Callable[[Worker], None]]:
        """First uses, and the order of launches, in which nothing is timed."""
        return {WATCHED: self._warm, ALONE: self._order}

    def turn(self, team: Team) -> None:
        """Profiled passes beside the plain one that came before."""
        if WATCHED in team.workers:
            self._pair(team.workers[WATCHED])

    def finish(
        self, team: Team, plain: list[dict[str, Any]], loaded: dict[str, Any]
    ) -> dict[str, Any]:
        """Writes kernels.csv, modules.csv (if kernels have owners), terms.json (moescope/terms/1),
        calls.csv, timeline.csv and sweep.csv; the step for Perfetto goes to
        work/timelines/<key>.json.gz. What it returns joins trace.json."""
        self.loaded = loaded
        try:
            passes = self._rest(team)
        except WorkerError as refused:
            if refused.kind != "unsupported":
                raise
            return {"not_measured": [f"kernels: {refused.message}"]}
        passes.plain = [_per_token(reply["token_s"]) for reply in plain]
        passes.plain_cpu = [
            reply["cpu_s"] / reply["forwards"] * 1e3 for reply in plain if "cpu_s" in reply
        ]
        passes.moe_layers = len(loaded["moe_layers"])
        try:
            return write(self.context, passes)
        except Exception:
            self.keep = True
            self.context.task.say(f"the records stay in {self.folder}")
            raise

    def close(self) -> None:
        """Leave no records behind, unless they could not be worked out."""
        self.reader.shutdown(cancel_futures=True)
        if not self.keep:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _rest(self, team: Team) -> Passes:
        bandwidth = team.workers[PLAIN].ask("bandwidth", LIMIT_S)
        if WATCHED in team.workers:
            self._short_pairs(team.workers[WATCHED])
            swept = self._graphs_off(team.workers[ALONE])
        else:
            team.close(PLAIN)
            with self.context.worker(**CUPTI) as worker:
                self._load(worker)
                self._warm(worker)
                for _ in range(self.context.task.params["trace"]["passes"]):
                    self._pair(worker)
                self._short_pairs(worker)
            with self.context.worker(**GRAPHS_OFF) as worker:
                self._load(worker)
                self._order(worker)
                swept = self._graphs_off(worker)
        return Passes(
            timed=self.timed,
            time=[found.result() for found in self.time],
            quiet=[found.result() for found in self.quiet],
            longer=[found.result() for found in self.longer],
            pairs=[(loud.result(), quiet.result()) for loud, quiet in self.pairs],
            bandwidth=bandwidth,
            sweep=swept,
            **{name: found.result() for name, found in self.found.items()},
        )

    def _load(self, worker: Worker) -> None:
        self.context.guard.own(worker.pid)
        worker.ask("load", LIMIT_S, **self.context.bench.loading(self.context.arm))
        self.context.guard.settle()

    def _warm(self, worker: Worker) -> None:
        worker.ask("decode", LIMIT_S, **self._given(FIRST + 1))

    def _order(self, worker: Worker) -> None:
        self._warm(worker)
        steps = list(range(FIRST, self.last + 1))
        _, self.found["order"] = self._kernels(worker, self.tokens, order=True, steps=steps)

    def _pair(self, worker: Worker) -> None:
        """Loud first and quiet first in turns, so that a drift of the clocks is no cost; a longer
        one after both."""

        def loud() -> dict[str, Any]:
            reply, found = self._kernels(worker, self.tokens)
            self.time.append(found)
            return reply

        def quiet() -> None:
            self.quiet.append(self._kernels(worker, self.tokens, calls="none")[1])

        def passes() -> dict[str, Any]:
            del self.time[kept:], self.quiet[kept:], self.longer[kept:]
            if kept % 2:
                quiet()
                reply = loud()
            else:
                reply = loud()
                quiet()
            self.longer.append(self._kernels(worker, self.tokens + LONGER)[1])
            return reply

        kept = len(self.time)
        times = self.context.guarded("kernels", passes)["token_ns"]
        self.timed.append(_per_token([(b - a) / 1e9 for a, b in pairwise(times)]))

    def _short_pairs(self, worker: Worker) -> None:
        def record() -> dict[str, Any]:
            self.pairs.clear()
            reply: dict[str, Any] = {}
            for number in range(len(self.time), PAIRS):
                found = {}
                for calls in ("all", "none") if number % 2 else ("none", "all"):
                    reply, found[calls] = self._kernels(worker, FIRST + SHORT, calls=calls)
                self.pairs.append((found["all"], found["none"]))
            return reply

        if len(self.time) < PAIRS:
            self.context.guarded("kernels, short", record)

    def _graphs_off(self, worker: Worker) -> dict[str, Any] | None:
        def record() -> dict[str, Any]:
            reply, self.found["alone"] = self._kernels(worker, self.tokens)
            # Its pass begins with step 2.
            _, self.found["forced"] = self._kernels(worker, self.last - 1, forced=True)
            return reply

        self.context.guarded("kernels, graphs off", record)
        return self._sweep(worker)

    def _sweep(self, worker: Worker) -> dict[str, Any] | None:
        """The sweep over top_k, for the reference alone: it is about the model, not about arms."""
        task = self.context.task
        if not task.params["trace"].get("sweep", True) or self.context.patches:
            return None
        if self.context.arm.get("role") != "reference":
            return None
        routing = self.loaded.get("routing")
        if routing is None:
            return None
        path = self.folder / "sweep.json.gz"

        def ask(patches: list[str]) -> Events:
            worker.ask(
                "kernels",
                LIMIT_S,
                prompt=self.context.bench.prompt[: sweep.PROMPT],
                tokens=sweep.TOKENS,
                patches=patches,
                save=str(path.resolve()),
                order=True,
                steps=list(sweep.STEPS),
            )
            return read_events(path)

        layers = len(self.loaded["moe_layers"])
        return self.context.guarded(
            "sweep of top_k",
            lambda: sweep.run(routing["top_k"], routing["most"], layers, ask),
        )

    def _given(self, tokens: int) -> dict[str, Any]:
        return {
            "prompt": self.context.bench.prompt,
            "tokens": tokens,
            "patches": self.context.patches,
        }

    def _kernels(
        self, worker: Worker, tokens: int, **how: Any
    ) -> tuple[dict[str, Any], Future[Events]]:
        self.number += 1
        kind = "-".join(sorted(str(key) for key in how if key != "steps")) or "time"
        path = self.folder / f"{self.number:02}-{kind}-{tokens}.json.gz"
        reply = worker.ask(
            "kernels", LIMIT_S, save=str(path.resolve()), **self._given(tokens), **how
        )
        return reply, self.reader.submit(read_events, path)


def _fits(context: "Context", times: int) -> bool:
    """Whether the weights may be on the GPU several times at once, and in the host's memory, which
    they pass through."""
    import psutil

    from ..measure import gpu

    weights = sum(path.stat().st_size for path in context.bench.weights.glob("*.safetensors"))
    try:
        device = gpu.describe().get("memory")
    except UserError:
        device = None
    host = psutil.virtual_memory().total
    memory = min(device, host) if isinstance(device, int | float) else min(host, 64 << 30)
    return weights * times <= memory * SHARE


def _per_token(seconds: list[float]) -> float:
    """ms a token over the window's steps."""
    inside = seconds[FIRST - 1 :]
    return sum(inside) / len(inside) * 1e3


@dataclass(frozen=True)
class Attribution:
    """Labels of the window's steps with graphs off, and how they were found. method: "ranges" or
    "table"; why: what the better method said, if it was not to be had."""

    method: str | None
    steps: dict[int, StepLabels]
    why: str | None


def attribute(order: Events) -> Attribution:
    """Whose each launch is, by the best method that fits; none if neither does."""
    why = []
    for method, find in (("ranges", align.by_ranges), ("table", align.by_table)):
        try:
            return Attribution(method, {s.step: s for s in find(order)}, "; ".join(why) or None)
        except Mismatch as mismatch:
            why.append(f"by {method}: {mismatch}")
    return Attribution(None, {}, "; ".join(why))


def labelled(
    events: Events, found: Attribution, first: int, last: int
) -> tuple[dict[int, list[Kernel]], dict[int, list[Label]], list[str]]:
    """A profiled pass's kernels by step, with labels, and how they were carried over."""
    steps = align.launches_by_step(events)
    labels, how = {}, []
    for step in range(first, last + 1):
        if found.method is None:
            labels[step] = [align.UNKNOWN] * len(steps[step])
            continue
        if step not in found.steps:
            raise Mismatch(f"step {step} was not traced with graphs off")
        labels[step], way = align.transfer(found.steps[step], steps[step])
        how.append(way)
    return steps, labels, how


def write(context: "Context", passes: Passes) -> dict[str, Any]:
    """Work everything out and write it; see Instrument.finish."""
    task = context.task
    last = FIRST + task.params["trace"]["tokens"] - 1
    not_measured = []
    found = attribute(passes.order)
    if found.why:
        not_measured.append(f"the exact owner of each kernel: {found.why}")
    ways: list[str] = []
    try:
        together = [labelled(events, found, FIRST, last) for events in passes.time]
    except Mismatch as mismatch:
        not_measured.append(f"kernels of CUDA graphs by their order: {mismatch}")
        found = Attribution(None, {}, found.why)
        together = [labelled(events, found, FIRST, last) for events in passes.time]
    for *_, how in together:
        ways += how
    windows = [
        kernels.window(events, steps, labels)
        for events, (steps, labels, _) in zip(passes.time, together, strict=True)
    ]
    forced = kernels.forced(passes.forced, FIRST)
    alone, why = _alone(passes, found, last)
    if why:
        not_measured.append(f"kernels by themselves: {why}")
    # Without owners of its own, the time is told apart by the forced pass alone.
    told = windows if found.method else [forced or windows[-1]]
    summary = summarise(passes, windows, told, forced, alone, found, ways)
    write_json(task.out / "terms.json", {"schema": TERMS, **summary})
    write_text(task.out / "kernels.csv", _kernel_table(context.arm["name"], told))
    if found.method:
        write_text(task.out / "modules.csv", _module_table(context.arm["name"], told))
    calls = kernels.calls(passes.time[-1], FIRST, last)
    write_text(task.out / "calls.csv", _csv(calls, ("call", "thread", "count", "ms")))
    steps, labels, _ = together[-1]
    spans = timeline.spans(steps[last], labels[last])
    names = ("start_us", "end_us", "term", "launches")
    write_text(task.out / "timeline.csv", _csv(spans, names))
    drawn = timeline.perfetto(passes.time[-1], [last - 1, last], steps, labels)
    path = task.work / "timelines" / f"{task.key}.json.gz"
    write_bytes(path, gzip.compress(drawn.encode(), mtime=0))
    more = {"bandwidth": passes.bandwidth} if passes.bandwidth else {}
    if passes.sweep:
        write_text(task.out / "sweep.csv", _csv(passes.sweep["rows"], sweep.COLUMNS))
        facts = {key: value for key, value in passes.sweep.items() if key != "rows"}
        more["sweep"] = facts | {"file": "sweep.csv"}
    return {
        "instruments": [
            "kernels",
            *(["forced kernels"] if forced else []),
            *(["kernels alone"] if alone else []),
            *(["sweep of top_k"] if passes.sweep else []),
        ],
        "not_measured": not_measured,
        "timeline": {
            "file": path.relative_to(task.work).as_posix(),
            "sha256": sha256_file(path),
            "steps": [last - 1, last],
        },
        **more,
    }


def _alone(
    passes: Passes, found: Attribution, last: int
) -> tuple[kernels.Window | None, str | None]:
    """The window with CUDA graphs off, where no two kernels overlap, or why there is none."""
    if passes.alone is None or found.method is None:
        return None, None
    try:
        steps, labels, _ = labelled(passes.alone, found, FIRST, last)
        return kernels.window(passes.alone, steps, labels), None
    except (Mismatch, ValueError) as mismatch:
        return None, str(mismatch)


def summarise(
    passes: Passes,
    windows: list[kernels.Window],
    told: list[kernels.Window],
    forced_window: kernels.Window | None,
    alone_window: kernels.Window | None,
    found: Attribution,
    ways: list[str],
) -> dict[str, Any]:
    """The content of terms.json. Lists hold a value for each profiled pass. told: the windows whose
    terms count, the profiled ones or the forced one. What is compared between instruments are the
    model's kernels; the same with MLX's synchronisation stands beside it (all_)."""
    steps = windows[0].steps
    last = FIRST + steps - 1
    tables = [kernels.by_term(window) for window in told]
    forced = kernels.by_term(forced_window) if forced_window else {}
    alone = kernels.by_term(alone_window) if alone_window else {}
    busy = [window.busy / steps / 1e6 for window in windows]
    model = [window.model_busy / steps / 1e6 for window in windows]
    wall = statistics.median(passes.plain)
    names = sorted({term for table in tables for term in table})
    by_difference = kernels.difference(passes.time, passes.longer)
    extra = [
        kernels.window(one, *_plain_steps(one, FIRST + steps, FIRST + steps + LONGER - 1))
        for one in passes.longer
    ]
    works = [
        sum(not kernels.synchronises(kernel) for kernel, *_ in window.kernels) for window in extra
    ]
    by_window = {
        "ms": statistics.median(window.model_busy / LONGER / 1e6 for window in extra),
        "launches": statistics.median(count / LONGER for count in works),
        "all_ms": statistics.median(window.busy / LONGER / 1e6 for window in extra),
        "all_launches": statistics.median(len(window.kernels) / LONGER for window in extra),
    }
    median = {
        term: {
            what: statistics.median(table.get(term, {what: 0.0})[what] for table in tables)
            for what in ("ms", "launches")
        }
        for term in names
    }
    if not all(busy) or not by_window["ms"]:
        raise UserError("no kernel ran in the window of decode; the profiler saw another process")
    unclassified = [
        table.get(kernels.UNCLASSIFIED, {"ms": 0.0})["ms"] / sum(e["ms"] for e in table.values())
        for table in tables
    ]
    pairs = [*zip(passes.time, passes.quiet, strict=True), *passes.pairs]
    loud, quiet = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    events, window = passes.time[-1], windows[-1]
    return {
        "method": found.method or "forced",
        "carried_over": sorted(set(ways)),
        "steps": steps,
        "wall_ms": passes.plain,
        "profiled_wall_ms": passes.timed,
        "profiler_cost": kernels.recording_cost(loud, quiet),
        "all_profiler_cost": kernels.recording_cost(loud, quiet, everything=True),
        # Turns were taken if the weights fit several times; else all plain passes came first.
        "profiler_wall_cost": [
            profiled / plain - 1
            for profiled, plain in zip(passes.timed, passes.plain, strict=False)
        ],
        "busy_ms": busy,
        "model_busy_ms": model,
        "busy_share": [ms / wall for ms in busy],
        "host_gap_ms": [wall - ms for ms in busy],
        "overlapping_ms": [
            sum(k.ns for k, *_ in window.kernels) / steps / 1e6 - ms
            for window, ms in zip(windows, busy, strict=True)
        ],
        "launches": [len(window.kernels) / steps for window in windows],
        "terms": {
            term: {
                what: [table.get(term, {what: 0.0})[what] for table in tables]
                for what in ("ms", "launches")
            }
            for term in names
        },
        "sum_ms": [sum(entry["ms"] for entry in table.values()) for table in tables],
        "unclassified": unclassified,
        "window": {"difference": by_difference, "window": by_window},
        "window_disagreement": abs(by_difference["ms"] / by_window["ms"] - 1),
        "all_window_disagreement": abs(by_difference["all_ms"] / by_window["all_ms"] - 1),
        "forced_terms": forced,
        "alone_terms": alone,
        **_agreement(median, forced, alone),
        # Of the pass that slows the host least.
        "host": kernels.host(passes.quiet[-1], FIRST, last, passes.quiet[-1].kernels),
        "cpu_ms": {
            "plain": passes.plain_cpu,
            "watched": kernels.processor(passes.quiet[-1], FIRST, last),
        },
        "copies": len(events.copies),
        "overhead_ms": {name: ns / 1e6 for name, (_, ns) in sorted(events.overhead.items())},
        "path": kernels.path(window, passes.moe_layers),
        "dropped": sum(one.dropped for one in (*loud, *quiet, *passes.longer)),
    }


def _agreement(
    graphs: dict[str, Any], forced: dict[str, Any], alone: dict[str, Any]
) -> dict[str, float | None]:
    """What the instruments assign to different terms: the graphs' pass and the forced one, on the
    model's kernels and on all; the forced one and the kernels by themselves, which see the same
    kernels in the same way; and the graphs' pass and the kernels by themselves, which differ by
    what running at the same time does."""

    def between(one: dict[str, Any], other: dict[str, Any], what: str = "ms") -> float | None:
        if not one or not other:
            return None
        return kernels.disagreement(kernels.model(one), kernels.model(other), what)

    return {
        "instruments_disagreement": between(graphs, forced),
        "all_instruments_disagreement": kernels.disagreement(
            kernels.folded(graphs), kernels.folded(forced)
        )
        if forced
        else None,
        "launches_disagreement": between(graphs, forced, "launches"),
        "alone_disagreement": between(alone, forced),
        "overlap_disagreement": between(graphs, alone),
    }


def _plain_steps(
    events: Events, first: int, last: int
) -> tuple[dict[int, list[Kernel]], dict[int, list[Label]]]:
    steps = align.launches_by_step(events)
    chosen = range(first, last + 1)
    return steps, {step: [align.UNKNOWN] * len(steps[step]) for step in chosen}


def _kernel_table(arm: str, windows: list[kernels.Window]) -> str:
    """Medians over the passes, a row for each kernel and term."""
    rows = _medians([kernels.by_kernel(window) for window in windows], "kernel")
    names = ("arm", "kernel", "term", "primitives", "launches_per_token", "ms_per_token",
             "bytes_per_token", "share")  # fmt: skip
    return _csv([{"arm": arm, **row, "bytes_per_token": ""} for row in rows], names)


def _module_table(arm: str, windows: list[kernels.Window]) -> str:
    """Medians over the passes, a row for each module and term."""
    rows = _medians([kernels.by_module(window) for window in windows], "module")
    names = ("arm", "module", "term", "launches_per_token", "ms_per_token", "share")
    return _csv([{"arm": arm, **row} for row in rows], names)


def _medians(passes: list[list[dict[str, Any]]], what: str) -> list[dict[str, Any]]:
    """The passes' rows as one, by ``what`` and term; the largest first."""
    tables = [{(row[what], row["term"]): row for row in rows} for rows in passes]
    found = []
    for key in dict.fromkeys(key for table in tables for key in table):
        same = [table[key] for table in tables if key in table]
        middle = {
            name: statistics.median([row[name] for row in same])
            for name in ("launches_per_token", "ms_per_token", "share")
        }
        found.append({**same[0], **middle})
    return sorted(found, key=lambda row: (-row["ms_per_token"], row[what]))


def _csv(rows: list[dict[str, Any]], names: tuple[str, ...]) -> str:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(names)
    for row in rows:
        table.writerow(
            f"{row[name]:.6g}" if isinstance(row[name], float) else row[name] for name in names
        )
    return text.getvalue()
