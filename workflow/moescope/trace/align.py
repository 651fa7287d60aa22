"""Whose kernel is it: launches set against the derived order of execution.

With CUDA graphs off every launch is a CUDA call of its own, made while one primitive is being
evaluated. Where MLX's own ranges were heard (``by_ranges``), the calls' times say which one, and
the ranges' names prove the derived order of execution at every step. Where they were not, a table
of which kernels each primitive starts (``by_table``) leaves one possibility or a few; a launch
whose possible owners differ in their term stays unclassified. What graphs-off launches were
labelled is carried over to the kernels of CUDA graphs by ``transfer``.
"""

import json
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import repeat
from pathlib import Path

from .events import Events, Kernel, base_name

DATA = ("tables/mlx-0.32-cuda.json",)

EVALUATION = "::eval_gpu"
MOST = 8  # kernels that one primitive is believed to start at most
UNLIKE = 25  # of so many launches one may differ between a step with CUDA graphs and one without
# How MLX's ranges call primitives that its graph export calls otherwise.
SAME = {
    "Reduce": {"Sum", "Max", "Min", "Prod", "And", "Or"},
    "ArgReduce": {"ArgMax", "ArgMin", "ArgReduce"},
    "Scan": {"CumSum", "CumProd", "CumMax", "CumMin", "CumLogaddexp"},
    "BitwiseBinary": {"BitwiseAnd", "BitwiseOr", "BitwiseXor", "LeftShift", "RightShift"},
    "Sqrt": {"Sqrt", "Rsqrt"},
}

Primitive = tuple[str, str, str]  # name, module, term


@dataclass(frozen=True, slots=True)
class Label:
    """Whose a launch is. term None: not known; "other" with no primitive: MLX's own business."""

    primitive: str | None
    module: str | None
    term: str | None


OUTSIDE = Label(None, None, "other")
UNKNOWN = Label(None, None, None)


class Mismatch(Exception):
    """The launches and the order of execution do not fit; the message says where."""


@dataclass(frozen=True)
class StepLabels:
    """One step's launches in order, each with its label."""

    step: int
    launches: list[Kernel]
    labels: list[Label]


def launches_by_step(events: Events) -> dict[int, list[Kernel]]:
    """Each step's kernels, in the order of launch (of graphs: of their nodes).

    A step's launches are those whose CUDA call began between MLX having taken the step before and
    having taken this one. Raises Mismatch if a kernel has no recorded call.
    """
    taken = sorted((time, step) for step, time in events.times("taken").items())
    ends = [time for time, _ in taken]
    began = {call.launch: call.start for call in events.calls}
    found: dict[int, list[Kernel]] = {step: [] for _, step in taken}
    for kernel in sorted(events.kernels, key=lambda k: (k.launch, k.node)):
        if kernel.launch not in began:
            raise Mismatch(f"no CUDA call was recorded for the launch of {base_name(kernel.name)}")
        at = bisect_right(ends, began[kernel.launch])
        if at < len(taken):
            found[taken[at][1]].append(kernel)
    return found


def by_ranges(events: Events) -> list[StepLabels]:
    """Labels of every step with an exported graph, by MLX's own ranges.

    Raises Mismatch if the ranges of a step are not the primitives of its graph, in the derived
    order, or if they were not heard.
    """
    if events.ranges is None:
        raise Mismatch("MLX's ranges were not heard")
    taken = events.times("taken")
    ranges = [entry for entry in events.ranges if entry[0].endswith(EVALUATION)]
    starts = [start for _, start, _ in ranges]
    began = {call.launch: call.start for call in events.calls}
    steps = launches_by_step(events)
    found = []
    for step, sequence in sorted(events.steps.items()):
        first = bisect_right(starts, taken[step - 1])
        last = bisect_right(starts, taken[step])
        _same(step, sequence, [name for name, *_ in ranges[first:last]])
        labels = []
        for kernel in steps[step]:
            time = began[kernel.launch]
            at = bisect_right(starts, time) - 1
            inside = first <= at < last and time <= ranges[at][2]
            labels.append(Label(*sequence[at - first]) if inside else OUTSIDE)
        found.append(StepLabels(step, steps[step], labels))
    return found


def _same(step: int, sequence: Sequence[Primitive], ranges: Sequence[str]) -> None:
    heard = [name.removesuffix(EVALUATION) for name in ranges]
    for at, ((primitive, module, _), name) in enumerate(zip(sequence, heard, strict=False)):
        same = primitive == name or primitive in SAME.get(name, ())
        if not same and not (name == "Compiled" and primitive.startswith("Compiled")):
            raise Mismatch(
                f"step {step}: MLX evaluated {name} where {primitive} of {module or 'no module'} "
                f"was derived, after {at} primitives that agree"
            )
    if len(sequence) != len(heard):
        raise Mismatch(f"step {step}: {len(heard)} evaluations, {len(sequence)} derived")


def by_table(events: Events) -> list[StepLabels]:
    """Labels of every step with an exported graph, by the table of kernels.

    Raises Mismatch if a step's launches cannot be what its primitives start.
    """
    steps = launches_by_step(events)
    return [
        StepLabels(step, steps[step], labels_by_table(sequence, steps[step], f"step {step}"))
        for step, sequence in sorted(events.steps.items())
    ]


def labels_by_table(
    sequence: Sequence[Primitive], launches: Sequence[Kernel], where: str = "the step"
) -> list[Label]:
    """One label a launch. Where several primitives may have started it, what they agree on."""
    names = [base_name(kernel.name) for kernel in launches]
    outside = re.compile(_table()["outside"])
    inner = [at for at, name in enumerate(names) if not outside.fullmatch(name)]
    labels = [OUTSIDE] * len(launches)
    for at, owners in zip(
        inner, _owners(sequence, [names[at] for at in inner], where), strict=True
    ):
        labels[at] = _common([Label(*sequence[owner]) for owner in sorted(owners)])
    return labels


def _common(owners: list[Label]) -> Label:
    if len(owners) == 1:
        return owners[0]
    alike = [{getattr(owner, part) for owner in owners} for part in ("primitive", "module", "term")]
    return Label(*(values.pop() if len(values) == 1 else None for values in alike))


def _owners(sequence: Sequence[Primitive], names: Sequence[str], where: str) -> list[set[int]]:
    """For each launch the primitives that may have started it, over all ways in which the whole
    sequence starts exactly the launches, in order."""
    # after[i]: how many launches the first i primitives may have started.
    after: list[dict[int, list[int]]] = [{0: []}]
    for primitive, _, _ in sequence:
        reached: dict[int, list[int]] = defaultdict(list)
        for start in after[-1]:
            for count in _counts(primitive, tuple(names[start : start + MOST])):
                reached[start + count].append(start)
        if not reached:
            at = max(after[-1])
            raise Mismatch(
                f"{where}: after {at} of {len(names)} launches, {primitive} (the {len(after)}. of "
                f"{len(sequence)} primitives) cannot start {names[at : at + 3]}"
            )
        after.append(reached)
    if len(names) not in after[-1]:
        raise Mismatch(
            f"{where}: the graph's primitives start at most {max(after[-1])} of {len(names)} "
            f"launches; {names[max(after[-1])]} is left"
        )
    owners: list[set[int]] = [set() for _ in names]
    ends = {len(names)}
    for at in range(len(sequence), 0, -1):
        begins = set()
        for end in ends:
            for start in after[at][end]:
                begins.add(start)
                for launch in range(start, end):
                    owners[launch].add(at - 1)
        ends = begins
    return owners


@cache
def _table() -> dict:
    return json.loads((Path(__file__).parent / DATA[0]).read_text())


@cache
def _pattern(primitive: str) -> re.Pattern[str]:
    table = _table()
    key = "Compiled" if primitive.startswith("Compiled") else primitive
    text = table["primitives"].get(key, "{view}")
    while "{" in text:
        before = text
        for name, part in table["parts"].items():
            text = text.replace(f"{{{name}}}", part)
        if text == before:
            break  # braces of the pattern language itself
    return re.compile(text)


@cache
def _counts(primitive: str, names: tuple[str, ...]) -> tuple[int, ...]:
    """How many of the next launches the primitive may have started."""
    pattern = _pattern(primitive)
    return tuple(
        count
        for count in range(len(names) + 1)
        if pattern.fullmatch("".join(f"{name};" for name in names[:count]))
    )


def transfer(labelled: StepLabels, kernels: Sequence[Kernel]) -> tuple[list[Label], str]:
    """Labels for the kernels of the same step with CUDA graphs on, and how they were found.

    "order": the same kernels with the same grids in the same order. "occurrence": the same kernels,
    in another order; the n-th of a name and grid gets the label of the n-th there. "but for" names:
    a few were launched more or less often (MLX copies what it cannot take over in place, which
    depends on what is still in use); of a name and grid that was, each gets what all of them there
    agree on, and no term if they do not. Raises Mismatch if it is more than one in UNLIKE.
    """
    key = _name_and_shape
    if [key(k) for k in kernels] == [key(k) for k in labelled.launches]:
        return list(labelled.labels), "order"
    there, here = Counter(map(key, labelled.launches)), Counter(map(key, kernels))
    lacks, more = there - here, here - there
    if sum(lacks.values()) + sum(more.values()) > max(1, len(labelled.launches) // UNLIKE):
        raise Mismatch(
            f"with CUDA graphs, {sum(lacks.values())} launches are missing and "
            f"{sum(more.values())} are new: {_example(lacks)} against {_example(more)}"
        )
    known: dict[tuple, list[Label]] = defaultdict(list)
    for kernel, label in zip(labelled.launches, labelled.labels, strict=True):
        known[key(kernel)].append(label)
    waiting: dict[tuple, Iterator[Label]] = {
        name: iter(known[name])
        if there[name] == count
        else repeat(_common(known[name]) if known[name] else UNKNOWN)
        for name, count in here.items()
    }
    unlike = sorted({name for name, *_ in (lacks | more)})
    how = f"occurrence, but for {', '.join(unlike)}" if unlike else "occurrence"
    return [next(waiting[key(kernel)]) for kernel in kernels], how


def _name_and_shape(kernel: Kernel) -> tuple:
    return (base_name(kernel.name), kernel.grid, kernel.block)


def _example(kernels: Counter) -> str:
    return f"{next(iter(kernels))[0]}" if kernels else "none"
