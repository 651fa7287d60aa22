"""The instruments of a CUDA arm: its kernels, in their terms, and what the host does meanwhile.

Four kinds of pass over the same prompt, after a discarded one in each process:

    plain     no profiler: the wall time of a token, and what the profiler costs against it
    time      kernels and CUDA calls recorded, CUDA graphs on, in turns with the plain ones
    quiet     kernels alone recorded, in the same turns: what recording calls costs on the GPU
    order     graphs off, each step's graph exported: whose each launch is
    forced    evaluation forced at module boundaries: a second opinion

and one longer pass (two lengths, their difference).

What the profiler costs is told in two parts. On the GPU, each kernel's duration is taken by the GPU
itself; how long it is with no profiler at all cannot be seen, so kernels recorded alone are set
against kernels recorded with all calls: this is what limits an attribution of GPU time. The host
pays for every record, which the wall of a profiled token shows against a plain one: that cost is
reported, and wall times are taken from plain passes only.
"""

import csv
import gzip
import io
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import sha256_file, write_bytes, write_json, write_text
from ..measure.bench import ask_all
from ..runtimes.client import Worker, WorkerError
from . import align, kernels, timeline
from .align import Label, Mismatch, StepLabels
from .events import Events, Kernel, read_events

if TYPE_CHECKING:
    from .stage import Context

TERMS = "moescope/terms/1"
FIRST = 3  # the first step of the window: caches have grown before it
LONGER = 32  # tokens that the longer pass has more
FORCED = 8
LIMIT_S = 3600.0
CUPTI = {"MOESCOPE_BEFORE_MLX": "cupti"}
GRAPHS_OFF = {**CUPTI, "MLX_USE_CUDA_GRAPHS": "0"}


@dataclass
class Passes:
    """What was recorded. plain: a token's wall in ms, of each plain pass; timed: likewise of the
    profiled passes beside them. quiet: the kernels of a pass whose calls were not recorded, beside
    each of time. Passes that a study cannot do without are not None."""

    plain: list[float] = field(default_factory=list)
    timed: list[float] = field(default_factory=list)
    time: list[Events] = field(default_factory=list)
    quiet: list[Events] = field(default_factory=list)
    longer: Events | None = None
    forced: Events | None = None
    order: Events | None = None
    bandwidth: dict[str, Any] | None = None
    moe_layers: int = 0


def measure(context: "Context") -> dict[str, Any]:
    """Writes kernels.csv, terms.json (moescope/terms/1), calls.csv and timeline.csv; the step for
    Perfetto goes to work/timelines/<key>.json.gz. What it returns joins trace.json."""
    try:
        passes = record(context)
    except WorkerError as refused:
        if refused.kind != "unsupported":
            raise
        return {"not_measured": [f"kernels: {refused.message}"]}
    return write(context, passes)


def record(context: "Context") -> Passes:
    """Run all passes. Two processes at a time, so that plain and profiled ones alternate; the
    weights are then on the GPU twice, and where that is too much they follow one another."""
    tokens = FIRST + context.task.params["trace"]["tokens"]
    found = Passes()
    folder = context.task.work / "tmp" / f"events-{context.task.key}"
    folder.mkdir(parents=True, exist_ok=True)
    rounds = context.task.params["trace"]["passes"]

    def plain(worker: Worker) -> None:
        reply = context.guarded("plain", lambda: _decode(context, worker, tokens))
        found.plain.append(_per_token(reply["token_s"]))

    def timed(worker: Worker) -> None:
        reply, events = _kernels(context, worker, folder, tokens)
        found.time.append(events)
        found.timed.append(_per_token([(b - a) / 1e9 for a, b in pairwise(reply["token_ns"])]))
        found.quiet.append(_kernels(context, worker, folder, tokens, calls="none")[1])

    def more(worker: Worker) -> None:
        found.longer = _kernels(context, worker, folder, tokens + LONGER)[1]
        found.forced = _kernels(context, worker, folder, FORCED, forced=True)[1]

    def bandwidth(worker: Worker) -> None:
        found.bandwidth = worker.ask("bandwidth", LIMIT_S)

    try:
        with ExitStack() as stack:
            bare, watched = _started(context, stack, {}, CUPTI)
            found.moe_layers = _ready(context, bare, watched)
            for _ in range(rounds):
                plain(bare)
                timed(watched)
            more(watched)
            watched.close()
            bandwidth(bare)
    except WorkerError as error:
        if error.kind != "out_of_memory":
            raise
        context.task.say("the weights do not fit twice: plain and profiled passes one by one")
        found = _one_by_one(context, rounds, plain, timed, more, bandwidth, found)
    with context.worker(**GRAPHS_OFF) as worker:
        _ready(context, worker)
        found.order = _kernels(context, worker, folder, tokens, order=True)[1]
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    return found


def _one_by_one(
    context: "Context",
    rounds: int,
    plain: Callable[[Worker], None],
    timed: Callable[[Worker], None],
    more: Callable[[Worker], None],
    bandwidth: Callable[[Worker], None],
    found: Passes,
) -> Passes:
    for passes in (found.plain, found.timed, found.time, found.quiet):
        passes.clear()
    with context.worker() as bare:
        found.moe_layers = _ready(context, bare)
        for _ in range(rounds):
            plain(bare)
        bandwidth(bare)
    with context.worker(**CUPTI) as watched:
        _ready(context, watched)
        for _ in range(rounds):
            timed(watched)
        more(watched)
    return found


def _started(context: "Context", stack: ExitStack, *settings: dict[str, str]) -> list[Worker]:
    """Workers that started at the same time; closed with the stack."""
    workers = [context.worker(**one) for one in settings]
    for worker in workers:
        stack.callback(worker.close)
        worker.start()
    return [stack.enter_context(worker) for worker in workers]


def _ready(context: "Context", *workers: Worker) -> int:
    """Load in all at once, and decode once for what is compiled at first use; the number of MoE
    layers."""
    for worker in workers:
        context.guard.own(worker.pid)
    loaded = _all(workers, "load", context.bench.loading(context.arm))
    context.guard.settle()
    _all(workers, "decode", _given(context, FIRST + 1))
    return len(loaded["moe_layers"])


def _all(workers: tuple[Worker, ...], do: str, given: dict[str, Any]) -> dict[str, Any]:
    """The same request to all at the same time; the first one's reply."""
    named = {str(number): worker for number, worker in enumerate(workers)}
    replies = ask_all(named, do, LIMIT_S, dict.fromkeys(named, given))
    for reply in replies.values():
        if isinstance(reply, WorkerError):
            raise reply
    return replies["0"]


def _given(context: "Context", tokens: int) -> dict[str, Any]:
    return {"prompt": context.bench.prompt, "tokens": tokens, "patches": context.patches}


def _decode(context: "Context", worker: Worker, tokens: int) -> dict[str, Any]:
    return worker.ask("decode", LIMIT_S, **_given(context, tokens))


def _kernels(
    context: "Context", worker: Worker, folder: Path, tokens: int, **how: Any
) -> tuple[dict[str, Any], Events]:
    path = folder / "events.json.gz"
    reply = context.guarded(
        f"kernels {how or 'time'}",
        lambda: worker.ask(
            "kernels",
            LIMIT_S,
            save=str(path.resolve()),
            **_given(context, tokens),
            **how,
        ),
    )
    return reply, read_events(path)


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
    """Work everything out and write it; see measure."""
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
    forced = kernels.forced(passes.forced)
    # Without owners of its own, the time is told apart by the forced pass alone.
    told = windows if found.method else [forced or windows[-1]]
    summary = summarise(passes, windows, told, forced, found, ways)
    write_json(task.out / "terms.json", {"schema": TERMS, **summary})
    write_text(task.out / "kernels.csv", _kernel_table(context.arm["name"], told))
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
    return {
        "instruments": ["kernels", *(["forced kernels"] if forced else [])],
        "not_measured": not_measured,
        "timeline": {
            "file": path.relative_to(task.work).as_posix(),
            "sha256": sha256_file(path),
            "steps": [last - 1, last],
        },
        **more,
    }


def summarise(
    passes: Passes,
    windows: list[kernels.Window],
    told: list[kernels.Window],
    forced_window: kernels.Window | None,
    found: Attribution,
    ways: list[str],
) -> dict[str, Any]:
    """The content of terms.json. Lists hold a value for each profiled pass. told: the windows whose
    terms count, the profiled ones or the forced one."""
    steps = windows[0].steps
    last = FIRST + steps - 1
    tables = [kernels.by_term(window) for window in told]
    forced = kernels.by_term(forced_window) if forced_window else {}
    busy = [window.busy / steps / 1e6 for window in windows]
    wall = statistics.median(passes.plain)
    names = sorted({term for table in tables for term in table})
    by_difference = kernels.difference(passes.time[-1], passes.longer)
    extra = kernels.window(
        passes.longer, *_plain_steps(passes.longer, FIRST + steps, FIRST + steps + LONGER - 1)
    )
    by_window = {
        "ms": extra.busy / extra.steps / 1e6,
        "launches": len(extra.kernels) / extra.steps,
    }
    median = {
        term: {
            what: statistics.median(table.get(term, {what: 0.0})[what] for table in tables)
            for what in ("ms", "launches")
        }
        for term in names
    }
    unclassified = [
        table.get(kernels.UNCLASSIFIED, {"ms": 0.0})["ms"] / sum(e["ms"] for e in table.values())
        for table in tables
    ]
    events, window = passes.time[-1], windows[-1]
    return {
        "method": found.method or "forced",
        "carried_over": sorted(set(ways)),
        "steps": steps,
        "wall_ms": passes.plain,
        "profiled_wall_ms": passes.timed,
        "profiler_cost": kernels.recording_cost(passes.time, passes.quiet),
        "profiler_wall_cost": [
            profiled / plain - 1 for profiled, plain in zip(passes.timed, passes.plain, strict=True)
        ],
        "busy_ms": busy,
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
        "forced_terms": forced,
        "instruments_disagreement": kernels.disagreement(median, forced) if forced else None,
        "launches_disagreement": kernels.disagreement(median, forced, "launches")
        if forced
        else None,
        # Of the pass that slows the host least.
        "host": kernels.host(passes.quiet[-1], FIRST, last, passes.quiet[-1].kernels),
        "copies": len(events.copies),
        "overhead_ms": {name: ns / 1e6 for name, (_, ns) in sorted(events.overhead.items())},
        "path": kernels.path(window, passes.moe_layers),
        "dropped": sum(one.dropped for one in (*passes.time, *passes.quiet, passes.longer)),
    }


def _plain_steps(
    events: Events, first: int, last: int
) -> tuple[dict[int, list[Kernel]], dict[int, list[Label]]]:
    steps = align.launches_by_step(events)
    chosen = range(first, last + 1)
    return steps, {step: [align.UNKNOWN] * len(steps[step]) for step in chosen}


def _kernel_table(arm: str, windows: list[kernels.Window]) -> str:
    """Medians over the passes, a row for each kernel and term."""
    tables = [
        {(row["kernel"], row["term"]): row for row in kernels.by_kernel(window)}
        for window in windows
    ]
    rows = []
    for key in dict.fromkeys(key for table in tables for key in table):
        found = [table[key] for table in tables if key in table]
        middle = {
            what: statistics.median([row[what] for row in found])
            for what in ("launches_per_token", "ms_per_token", "share")
        }
        rows.append({"arm": arm, **found[0], **middle, "bytes_per_token": ""})
    names = ("arm", "kernel", "term", "primitives", "launches_per_token", "ms_per_token",
             "bytes_per_token", "share")  # fmt: skip
    return _csv(sorted(rows, key=lambda row: (-row["ms_per_token"], row["kernel"])), names)


def _csv(rows: list[dict[str, Any]], names: tuple[str, ...]) -> str:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(names)
    for row in rows:
        table.writerow(
            f"{row[name]:.6g}" if isinstance(row[name], float) else row[name] for name in names
        )
    return text.getvalue()
