"""A token's GPU time: which kernels, how long, in which term, and what the host did meanwhile.

Pure functions over one window's records; times are nanoseconds unless a name says otherwise.
Kernels of a CUDA graph may run at the same time. Where n of them do, each gets 1/n of that time: so
the terms add up to the time in which the GPU was busy, not to more.

MLX's kernels that signal and await events compute nothing. They stall on memory shared with the
host, up to milliseconds, and with them whatever runs beside: all time in which one of them runs is
their own (SYNCHRONISATION), and the model's kernels share the rest.
"""

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .align import Label
from .events import Call, Events, Kernel, base_name, demangle

UNCLASSIFIED = "unclassified"
SYNCHRONISATION = "synchronisation"
SYNCHRONISERS = ("event_signal_kernel", "event_wait_kernel")
# What a gathered product starts besides itself: copies of its indices.
HELPERS = "copy_"
GATHERS = ("GatherQMM", "GatherMM", "CustomKernel")
MOE_TERMS = ("router", "expert_gather", "activation", "combine", "shared_expert")

Interval = tuple[int, int]


@dataclass(frozen=True)
class Window:
    """Some steps in a row. kernels: with their labels and their part of the busy time.

    wall: from the token before the first step to the last step's token.
    """

    steps: int
    wall: int
    kernels: list[tuple[Kernel, Label, float]]

    @property
    def busy(self) -> int:
        """Time in which at least one kernel ran."""
        return _union([kernel for kernel, *_ in self.kernels])

    @property
    def gap(self) -> int:
        """Time in which none ran."""
        return self.wall - self.busy

    @property
    def model_busy(self) -> float:
        """Busy time without MLX's synchronisation."""
        return sum(ns for _, label, ns in self.kernels if label.term != SYNCHRONISATION)


def synchronises(kernel: Kernel) -> bool:
    """Is it a kernel that signals or awaits an event?"""
    return base_name(kernel.name) in SYNCHRONISERS


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time without overlaps, in order."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            if end > found[-1][1]:
                found[-1] = (found[-1][0], end)
        elif end > start:
            found.append((start, end))
    return found


def overlap(left: Sequence[Interval], right: Sequence[Interval]) -> int:
    """Time that lies in both; each without overlaps and in order."""
    total = i = j = 0
    while i < len(left) and j < len(right):
        start = max(left[i][0], right[j][0])
        end = min(left[i][1], right[j][1])
        total += max(0, end - start)
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total


def complement(inside: Sequence[Interval], start: int, end: int) -> list[Interval]:
    """What ``inside`` (without overlaps, in order) leaves free between start and end."""
    found, at = [], start
    for begin, stop in inside:
        if begin > at:
            found.append((at, min(begin, end)))
        at = max(at, stop)
        if at >= end:
            break
    if at < end:
        found.append((at, end))
    return [(a, b) for a, b in found if b > a]


def parts(kernels: Sequence[Kernel]) -> list[float]:
    """Each kernel's part of the time in which any ran: 1/n of it while n run, all of it to those
    that synchronise while one of them does. Sums to the union."""
    waits = [synchronises(kernel) for kernel in kernels]
    moments = sorted({moment for k in kernels for moment in (k.start, k.end)})
    place = {moment: i for i, moment in enumerate(moments)}
    running = {kind: [0] * (len(moments) + 1) for kind in (True, False)}
    for kernel, wait in zip(kernels, waits, strict=True):
        running[wait][place[kernel.start]] += 1
        running[wait][place[kernel.end]] -= 1
    total, count, before = {True: [0.0], False: [0.0]}, {True: 0, False: 0}, None
    for i, moment in enumerate(moments):
        if before is not None:
            for wait in (True, False):
                alone = count[wait] if wait or not count[True] else 0
                total[wait].append(total[wait][-1] + ((moment - before) / alone if alone else 0.0))
        for wait in (True, False):
            count[wait] += running[wait][i]
        before = moment
    return [
        total[wait][place[k.end]] - total[wait][place[k.start]]
        for k, wait in zip(kernels, waits, strict=True)
    ]


def window(
    events: Events, steps: dict[int, Sequence[Kernel]], labels: dict[int, Sequence[Label]]
) -> Window:
    """The steps that have labels, as one window; they must follow one another.

    Raises ValueError if they do not, or if a step's token was not marked.
    """
    chosen = sorted(labels)
    tokens = events.times("token")
    if not chosen or chosen != list(range(chosen[0], chosen[-1] + 1)):
        raise ValueError(f"not steps in a row: {chosen}")
    if chosen[0] - 1 not in tokens or chosen[-1] not in tokens:
        raise ValueError(f"no tokens were marked around steps {chosen[0]} to {chosen[-1]}")
    kernels = [kernel for step in chosen for kernel in steps[step]]
    named = [label for step in chosen for label in labels[step]]
    wall = tokens[chosen[-1]] - tokens[chosen[0] - 1]
    return Window(len(chosen), wall, _together(kernels, named))


def _together(
    kernels: Sequence[Kernel], labels: Sequence[Label]
) -> list[tuple[Kernel, Label, float]]:
    return [
        (kernel, Label(None, None, SYNCHRONISATION) if synchronises(kernel) else label, part)
        for kernel, label, part in zip(kernels, labels, parts(kernels), strict=True)
    ]


def by_term(window: Window) -> dict[str, dict[str, float]]:
    """term -> {"ms", "launches"} a token; what has no term is UNCLASSIFIED."""
    found: dict[str, dict[str, float]] = {}
    for _, label, ns in window.kernels:
        entry = found.setdefault(label.term or UNCLASSIFIED, {"ms": 0.0, "launches": 0.0})
        entry["ms"] += ns / 1e6 / window.steps
        entry["launches"] += 1 / window.steps
    return found


def by_kernel(window: Window) -> list[dict[str, Any]]:
    """Rows {"kernel", "term", "primitives", "launches_per_token", "ms_per_token", "share"}, the
    largest first. share: of the busy time."""
    primitives: dict[tuple[str, str], set[str]] = defaultdict(set)

    def key(kernel: Kernel, label: Label) -> tuple[str, str]:
        found = (demangle(kernel.name), label.term or UNCLASSIFIED)
        primitives[found].add(plain(label.primitive))
        return found

    return [
        {
            "kernel": name,
            "term": term,
            "primitives": " ".join(sorted(primitives[name, term])),
            **entry,
        }
        for (name, term), entry in _summed(window, key)
    ]


def by_module(window: Window) -> list[dict[str, Any]]:
    """Rows {"module", "term", "launches_per_token", "ms_per_token", "share"}, the largest first.
    module: the same of all layers as one, their numbers as "*"; "-" where there is none."""

    def key(_: Kernel, label: Label) -> tuple[str, str]:
        module = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", label.module or "-")
        return module, label.term or UNCLASSIFIED

    return [
        {"module": module, "term": term, **entry} for (module, term), entry in _summed(window, key)
    ]


def _summed(
    window: Window, key: Callable[[Kernel, Label], tuple[str, str]]
) -> list[tuple[tuple[str, str], dict[str, float]]]:
    time: dict[tuple[str, str], float] = defaultdict(float)
    count: Counter[tuple[str, str]] = Counter()
    for kernel, label, ns in window.kernels:
        of = key(kernel, label)
        time[of] += ns
        count[of] += 1
    busy = sum(time.values()) or 1.0
    return [
        (
            of,
            {
                "launches_per_token": count[of] / window.steps,
                "ms_per_token": ns / 1e6 / window.steps,
                "share": ns / busy,
            },
        )
        for of, ns in sorted(time.items(), key=lambda item: (-item[1], item[0]))
    ]


def plain(primitive: str | None) -> str:
    """A primitive's name for people: what mx.compile fused is "Compiled"."""
    if primitive is None:
        return "-"
    return "Compiled" if primitive.startswith("Compiled") else primitive


def path(window: Window, moe_layers: int) -> dict[str, Any]:
    """Which kernels the routed experts' products ran, and which launches do not come out even.

    {"steps", "moe_layers", "experts": [{"kernel", "launches", "launches_per_token", "per_layer",
    "helper"}], "uneven": [...]}. launches: of all steps. helper: it copies indices for a product,
    and is none. A kernel of a MoE term is uneven if its launches are no whole multiple of MoE
    layers × tokens.
    """
    experts: Counter[str] = Counter()
    all_kernels: Counter[tuple[str, str]] = Counter()
    for kernel, label, _ in window.kernels:
        name = base_name(kernel.name)
        if label.term == "expert_gather" and label.primitive in GATHERS:
            experts[name] += 1
        if label.term in MOE_TERMS:
            all_kernels[label.term, name] += 1
    each = window.steps * moe_layers
    return {
        "steps": window.steps,
        "moe_layers": moe_layers,
        "experts": [
            {
                "kernel": name,
                "launches": count,
                "launches_per_token": count / window.steps,
                "per_layer": count / each if each else None,
                "helper": name.startswith(HELPERS),
            }
            for name, count in experts.most_common()
        ],
        "uneven": [
            {"term": term, "kernel": name, "launches_per_token": count / window.steps}
            for (term, name), count in sorted(all_kernels.items())
            if each and count % each
        ],
    }


def difference(shorter: Sequence[Events], longer: Sequence[Events]) -> dict[str, float]:
    """A token's kernels as what the longer runs have more than the shorter ones, by medians:
    {"ms", "launches"} of the model's kernels, "all_ms" and "all_launches" with synchronisation;
    the rest cancels."""
    lengths = [{len(events.times("token")) for events in runs} for runs in (shorter, longer)]
    more = max(lengths[1]) - max(lengths[0])
    if more <= 0 or any(len(kinds) != 1 for kinds in lengths):
        raise ValueError(
            f"the longer runs have {sorted(lengths[1])} tokens, the shorter {sorted(lengths[0])}"
        )

    def per_token(measure: Callable[[Events], float]) -> float:
        middle = [statistics.median(map(measure, runs)) for runs in (shorter, longer)]
        return (middle[1] - middle[0]) / more

    return {
        "ms": per_token(lambda events: busy(events.kernels)) / 1e6,
        "launches": per_token(lambda events: sum(not synchronises(k) for k in events.kernels)),
        "all_ms": per_token(lambda events: _union(events.kernels)) / 1e6,
        "all_launches": per_token(lambda events: len(events.kernels)),
    }


def busy(kernels: Sequence[Kernel]) -> int:
    """Time in which the model's kernels ran and none synchronised."""
    waits = union((k.start, k.end) for k in kernels if synchronises(k))
    works = union((k.start, k.end) for k in kernels if not synchronises(k))
    return sum(end - start for start, end in works) - overlap(waits, works)


def _union(kernels: Sequence[Kernel]) -> int:
    return sum(end - start for start, end in union((k.start, k.end) for k in kernels))


def recording_cost(
    loud: Sequence[Events], quiet: Sequence[Events], everything: bool = False
) -> list[float]:
    """What recording calls adds to the model's kernels' own time, a share for each pair of passes.

    loud: passes with their calls recorded. quiet: the same tokens without. Kernels of decode (from
    the first token on) are compared by name and grid, each by its median time, so that neither a
    launch more in one pass nor one that was held up is a cost. everything: with synchronisation,
    by mean times: what is seen if nothing is taken apart.
    """
    middle = statistics.fmean if everything else statistics.median
    found = []
    for one, other in zip(loud, quiet, strict=True):
        times, alone = _times(one, everything), _times(other, everything)
        both = times.keys() & alone.keys()
        if not both:
            raise ValueError("two passes of the same tokens ran no kernel in common")
        spent = sum(middle(times[key]) * len(times[key]) for key in both)
        expected = sum(middle(alone[key]) * len(times[key]) for key in both)
        found.append(spent / expected - 1)
    return found


def _times(events: Events, everything: bool) -> dict[tuple, list[int]]:
    first = min(events.times("token").values())
    waits = union((k.start, k.end) for k in events.kernels if synchronises(k))
    found: dict[tuple, list[int]] = defaultdict(list)
    for kernel in events.kernels:
        if kernel.start < first:
            continue
        # One that ran while another synchronised was held up by it.
        if everything or not overlap([(kernel.start, kernel.end)], waits):
            found[kernel.name, kernel.grid].append(kernel.ns)
    return found


def phases(events: Events, first: int, last: int) -> dict[str, list[Interval]]:
    """What the host's loop did from step first-1's token to step last's: building a graph (Python),
    having MLX encode it, waiting for a token."""
    built, taken, token = (events.times(what) for what in ("built", "taken", "token"))
    # While token n is awaited, step n + 1 is built and encoded.
    return {
        "build": [(token[n - 1], built[n + 1]) for n in range(first, last + 1)],
        "encode": [(built[n + 1], taken[n + 1]) for n in range(first, last + 1)],
        "wait": [(taken[n + 1], token[n]) for n in range(first, last + 1)],
    }


def host(events: Events, first: int, last: int, kernels: Iterable[Kernel]) -> dict[str, Any]:
    """{"ms": phase -> ms a token, "idle_ms": phase -> ms a token in which the GPU did nothing}."""
    loop = phases(events, first, last)
    start, end = loop["build"][0][0], loop["wait"][-1][1]
    idle = complement(union((k.start, k.end) for k in kernels), start, end)
    steps = last - first + 1
    return {
        "ms": {phase: sum(b - a for a, b in spans) / steps / 1e6 for phase, spans in loop.items()},
        "idle_ms": {phase: overlap(spans, idle) / steps / 1e6 for phase, spans in loop.items()},
    }


def calls(events: Events, first: int, last: int) -> list[dict[str, Any]]:
    """CUDA's calls from step first-1's token to step last's, a token, by name and thread: {"call",
    "thread" ("loop" is the one that launches, else "other"), "count", "ms"}, the longest first."""
    token = events.times("token")
    start, end = token[first - 1], token[last]
    inside = [call for call in events.calls if start <= call.start < end]
    loop = _launching_thread(events.calls)
    count: Counter[tuple[str, str]] = Counter()
    time: Counter[tuple[str, str]] = Counter()
    for call in inside:
        key = (call.name, "loop" if call.thread == loop else "other")
        count[key] += 1
        time[key] += call.end - call.start
    steps = last - first + 1
    return [
        {
            "call": name,
            "thread": thread,
            "count": count[name, thread] / steps,
            "ms": ns / steps / 1e6,
        }
        for (name, thread), ns in time.most_common()
    ]


def _launching_thread(calls: Sequence[Call]) -> int | None:
    threads = Counter(call.thread for call in calls if "Launch" in call.name)
    return threads.most_common(1)[0][0] if threads else None


def forced(events: Events, first: int | None = None) -> Window | None:
    """A pass that forces evaluation at module boundaries: a kernel belongs to the term of the
    boundary that follows it. None without boundaries. first: the step to begin with; the pass
    itself begins with step 2. wall: from the first boundary of these to the last."""
    boundaries, tokens = list(events.boundaries), events.forced_tokens
    taken = events.times("taken")
    if first is not None and first - 1 in taken:
        before = [b for b in boundaries if b[1] <= taken[first - 1]]
        boundaries = boundaries[max(len(before) - 1, 0) :]
        tokens -= first - 2
    times = [time for _, time in boundaries]
    if not times or tokens < 1:
        return None
    found, at = [], 0
    for kernel in sorted(events.kernels, key=lambda k: k.start):
        while at < len(times) and times[at] <= kernel.start:
            at += 1
        if 0 < at < len(times):  # else before the window or after it
            found.append((kernel, Label(None, None, boundaries[at][0])))
    together = _together([kernel for kernel, _ in found], [label for _, label in found])
    return Window(tokens, times[-1] - times[0], together)


def model(terms: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Terms without MLX's synchronisation."""
    return {term: entry for term, entry in terms.items() if term != SYNCHRONISATION}


def folded(terms: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Terms with MLX's synchronisation counted as other, as an instrument that does not take it
    apart sees them."""
    found = {term: dict(entry) for term, entry in model(terms).items()}
    if SYNCHRONISATION in terms:
        other = found.setdefault("other", {"ms": 0.0, "launches": 0.0})
        for what, value in terms[SYNCHRONISATION].items():
            other[what] = other.get(what, 0.0) + value
    return found


def processor(events: Events, first: int, last: int) -> dict[str, float] | None:
    """Processor seconds of the host from step first-1's token to step last's, in ms a token:
    {"process": of all threads, "loop": of the thread that decodes}; None if they were not taken."""
    at = {step: (process, thread) for step, process, thread in events.cpu}
    if first - 1 not in at or last not in at:
        return None
    (process, thread), (process_end, thread_end) = at[first - 1], at[last]
    steps = last - first + 1
    return {
        "process": (process_end - process) / steps / 1e6,
        "loop": (thread_end - thread) / steps / 1e6,
    }


def disagreement(
    one: dict[str, dict[str, float]], other: dict[str, dict[str, float]], what: str = "ms"
) -> float:
    """The share that two instruments assign to different terms: half the sum of the differences of
    their shares; 0 is agreement, 1 is none."""
    totals = [sum(entry[what] for entry in terms.values()) for terms in (one, other)]
    if not all(totals):
        return 1.0
    names = one.keys() | other.keys()
    shares = [
        {name: terms.get(name, {what: 0.0})[what] / total for name in names}
        for terms, total in zip((one, other), totals, strict=True)
    ]
    return sum(abs(shares[0][name] - shares[1][name]) for name in names) / 2
