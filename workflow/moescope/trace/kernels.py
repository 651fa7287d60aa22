"""A token's GPU time: which kernels, how long, in which term, and what the host did meanwhile.

Pure functions over one window's records; times are nanoseconds unless a name says otherwise.
Kernels of a CUDA graph may run at the same time. Where n of them do, each gets 1/n of that time: so
the terms add up to the time in which the GPU was busy, not to more.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .align import Label
from .events import Call, Events, Kernel, base_name, demangle

UNCLASSIFIED = "unclassified"
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
        return sum(end - start for start, end in union((k.start, k.end) for k, *_ in self.kernels))

    @property
    def gap(self) -> int:
        """Time in which none ran."""
        return self.wall - self.busy


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
    """Each kernel's part of the time in which any ran: 1/n of it while n run. Sums to the union."""
    moments = sorted({moment for k in kernels for moment in (k.start, k.end)})
    place = {moment: i for i, moment in enumerate(moments)}
    running = [0] * (len(moments) + 1)
    for kernel in kernels:
        running[place[kernel.start]] += 1
        running[place[kernel.end]] -= 1
    total, count, before = [0.0], 0, None
    for i, moment in enumerate(moments):
        if before is not None:
            total.append(total[-1] + ((moment - before) / count if count else 0.0))
        count += running[i]
        before = moment
    return [total[place[k.end]] - total[place[k.start]] for k in kernels]


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
    together = list(zip(kernels, named, parts(kernels), strict=True))
    return Window(len(chosen), tokens[chosen[-1]] - tokens[chosen[0] - 1], together)


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
    time: dict[tuple[str, str], float] = defaultdict(float)
    count: Counter[tuple[str, str]] = Counter()
    primitives: dict[tuple[str, str], set[str]] = defaultdict(set)
    for kernel, label, ns in window.kernels:
        key = (demangle(kernel.name), label.term or UNCLASSIFIED)
        time[key] += ns
        count[key] += 1
        primitives[key].add(plain(label.primitive))
    busy = sum(time.values()) or 1.0
    return [
        {
            "kernel": name,
            "term": term,
            "primitives": " ".join(sorted(primitives[name, term])),
            "launches_per_token": count[name, term] / window.steps,
            "ms_per_token": ns / 1e6 / window.steps,
            "share": ns / busy,
        }
        for (name, term), ns in sorted(time.items(), key=lambda item: (-item[1], item[0]))
    ]


def plain(primitive: str | None) -> str:
    """A primitive's name for people: what mx.compile fused is "Compiled"."""
    if primitive is None:
        return "-"
    return "Compiled" if primitive.startswith("Compiled") else primitive


def path(window: Window, moe_layers: int) -> dict[str, Any]:
    """Which kernels the routed experts' products ran, and which launches do not come out even.

    {"experts": [{"kernel", "launches_per_token", "per_layer"}], "uneven": [...]}. A kernel of a
    MoE term is uneven if its launches are no whole multiple of MoE layers × tokens.
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
        "experts": [
            {
                "kernel": name,
                "launches_per_token": count / window.steps,
                "per_layer": count / each if each else None,
            }
            for name, count in experts.most_common()
        ],
        "uneven": [
            {"term": term, "kernel": name, "launches_per_token": count / window.steps}
            for (term, name), count in sorted(all_kernels.items())
            if each and count % each
        ],
    }


def difference(shorter: Events, longer: Events) -> dict[str, float]:
    """A token's kernels as what the longer run has more: {"ms", "launches"}; the rest cancels."""
    tokens = [len(events.times("token")) for events in (shorter, longer)]
    more = tokens[1] - tokens[0]
    if more <= 0:
        raise ValueError(f"the longer run has {tokens[1]} tokens, the shorter {tokens[0]}")
    busy, count = (
        [measure(events) for events in (shorter, longer)]
        for measure in (_busy, lambda events: len(events.kernels))
    )
    return {"ms": (busy[1] - busy[0]) / more / 1e6, "launches": (count[1] - count[0]) / more}


def recording_cost(loud: Sequence[Events], quiet: Sequence[Events]) -> list[float]:
    """What recording calls adds to the kernels' own time, a share for each pair of passes.

    loud: passes with their calls recorded. quiet: the same tokens without. Kernels of decode (from
    the first token on) are compared by name, each by its mean time, so that a launch more in one
    pass is no cost.
    """
    found = []
    for one, other in zip(loud, quiet, strict=True):
        times, alone = _times(one), _times(other)
        both = times.keys() & alone.keys()
        if not both:
            raise ValueError("two passes of the same tokens ran no kernel in common")
        spent = sum(sum(times[name]) for name in both)
        expected = sum(sum(alone[name]) / len(alone[name]) * len(times[name]) for name in both)
        found.append(spent / expected - 1)
    return found


def _times(events: Events) -> dict[str, list[int]]:
    first = min(events.times("token").values())
    found: dict[str, list[int]] = defaultdict(list)
    for kernel in events.kernels:
        if kernel.start >= first:
            found[kernel.name].append(kernel.ns)
    return found


def _busy(events: Events) -> int:
    return sum(end - start for start, end in union((k.start, k.end) for k in events.kernels))


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


def forced(events: Events) -> Window | None:
    """A pass that forces evaluation at module boundaries: a kernel belongs to the term of the
    boundary that follows it. None without boundaries. wall: from the first to the last."""
    times = [time for _, time in events.boundaries]
    if not times or not events.forced_tokens:
        return None
    found, at = [], 0
    for kernel in sorted(events.kernels, key=lambda k: k.start):
        while at < len(times) and times[at] <= kernel.start:
            at += 1
        if 0 < at < len(times):  # else before the window or after it
            found.append((kernel, Label(None, None, events.boundaries[at][0])))
    shares = parts([kernel for kernel, _ in found])
    together = [(*pair, share) for pair, share in zip(found, shares, strict=True)]
    return Window(events.forced_tokens, times[-1] - times[0], together)


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
