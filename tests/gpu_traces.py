"""Windows of decode recorded on an H200 (MLX 0.32.4), and others made of them.

qwen3-moe: four of Qwen3-30B-A3B's layers (128 experts, top 8, hidden 2048), affine 4-bit; inkling
(two layers) and deepseek-v4 (four): reduced width, 32 experts, top 6. CUDA graphs off, MLX's ranges
heard, the graph of every step exported. Of qwen3-moe also the same steps with CUDA graphs on.
"""

import gzip
import json
from dataclasses import fields, replace
from operator import attrgetter
from pathlib import Path

from moescope.trace.align import StepLabels
from moescope.trace.events import SCHEMA, Call, Events, Kernel, Mark, read_events

DATA = Path(__file__).parent / "data"
FAMILIES = {"qwen3-moe": 4, "inkling": 2, "deepseek-v4": 4}  # -> its MoE layers
LAYERS = 4
CALL, MARK = (attrgetter(*(field.name for field in fields(kind))) for kind in (Call, Mark))


def recorded(family: str) -> Events:
    return read_events(DATA / f"h200-{family}-order.json.gz")


def graphs_on() -> Events:
    """Of qwen3-moe: the steps of its other recording, their kernels inside CUDA graphs."""
    return read_events(DATA / "h200-qwen3-moe-graphs.json.gz")


def launches(events: Events, step: int) -> list[Kernel]:
    """A step's kernels by launch, worked out apart from what is tested."""
    taken = events.times("taken")
    began = {call.launch: call.start for call in events.calls}
    inside = [k for k in events.kernels if taken[step - 1] < began[k.launch] <= taken[step]]
    return sorted(inside, key=lambda kernel: kernel.launch)


def with_graphs(
    kernels: list[Kernel], steps: int, nodes: int = 40, gap: int = 300, host: int = 50_000
) -> Events:
    """``steps`` steps of these kernels as CUDA graphs of ``nodes`` kernels run them.

    Each step's graphs are launched while it is encoded, its kernels run one after another, ``gap``
    ns apart, from the step's first launch on. The host takes ``host`` ns to build a step, as long
    to encode it, and then waits. Step 0 is the prompt's: it has a token, and no kernels.
    """
    marks, calls, ran = [Mark("begin", 0, 0)], [], []
    time, launch = 1000, 0
    for what in ("built", "taken"):
        marks.append(Mark(what, 0, time))
    done = {0: time}
    for step in range(1, steps + 1):
        time += host
        marks.append(Mark("built", step, time))
        at = max(time, done[step - 1])
        for first in range(0, len(kernels), nodes):
            launch += 1
            calls.append(Call("cudaGraphLaunch", time + launch % 7, time + 900, 1, launch))
            for node, kernel in enumerate(kernels[first : first + nodes]):
                at += gap
                ran.append(
                    replace(
                        kernel,
                        start=at,
                        end=at + kernel.ns,
                        graph=1 + first,
                        node=first + node + 1,
                        launch=launch,
                    )
                )
                at += kernel.ns
        done[step] = at
        time += host
        marks.append(Mark("taken", step, time))
        time = max(time, done[step - 1])
        marks.append(Mark("token", step - 1, time))
    marks.append(Mark("end", steps, max(done.values()) + 1))
    return Events(marks, ran, calls, [], {}, None, {}, [])


def in_order(events: Events, step: int, steps: int) -> Events:
    """``steps`` steps with graphs off, each as the recorded one was; step 0 before them."""
    taken = events.times("taken")
    start, length = taken[step - 1], taken[step] - taken[step - 1]
    inside = [call for call in events.calls if start < call.start <= taken[step]]
    launched = {call.launch for call in inside}
    kernels = [kernel for kernel in events.kernels if kernel.launch in launched]
    ranges = [entry for entry in events.ranges if start < entry[1] <= taken[step]]
    most = max(launched) + 1
    marks, again = [Mark("begin", 0, 0), Mark("taken", 0, 1)], ([], [], [])
    for n in range(steps):
        by, more = n * length - start + 1, n * most

        def moved(entry, by=by, more=more):
            return replace(
                entry, start=entry.start + by, end=entry.end + by, launch=entry.launch + more
            )

        again[0].extend(map(moved, inside))
        again[1].extend(map(moved, kernels))
        again[2].extend((name, a + by, b + by) for name, a, b in ranges)
        marks.append(Mark("taken", n + 1, (n + 1) * length + 1))
        marks.append(Mark("token", n, (n + 1) * length + 2))
    graphs = {n + 1: events.steps[step] for n in range(steps)}
    calls, ran, heard = again
    return Events(marks, ran, calls, [], {}, heard, graphs, [])


def forced(step: StepLabels, tokens: int) -> Events:
    """A forced pass: the step's kernels one by one, a boundary wherever the term changes."""
    ran, boundaries, time = [], [("", 1)], 10
    for _ in range(tokens):
        for at, kernel in enumerate(step.launches):
            ran.append(replace(kernel, start=time, end=time + kernel.ns))
            time += kernel.ns + 10
            term = step.labels[at].term
            if at + 1 == len(step.labels) or step.labels[at + 1].term != term:
                boundaries.append((term, time))
                time += 10
    boundaries.append(("sampler", time))
    return Events([], ran, [], [], {}, None, {}, boundaries, tokens)


def save(events: Events, path: Path) -> None:
    """Write events as the worker does."""

    def table(rows):
        names = {name: at for at, name in enumerate(sorted({row[0] for row in rows}))}
        return {"names": list(names), "rows": [(names[row[0]], *row[1:]) for row in rows]}

    heard = None
    if events.ranges is not None:
        begins = [(start, 1, name) for name, start, _ in events.ranges]
        ends = [(end, 0, None) for *_, end in events.ranges]
        heard = [[name, time] for time, _, name in sorted(begins + ends, key=lambda e: e[:2])]
    sequences = []
    for sequence in events.steps.values():
        if sequence not in sequences:
            sequences.append(sequence)
    content = {
        "schema": SCHEMA,
        "marks": [MARK(mark) for mark in events.marks],
        "kernels": table(
            [
                (k.name, k.start, k.end, *k.grid, *k.block, k.stream, k.graph, k.node, k.launch)
                for k in events.kernels
            ]
        ),
        "copies": table([]),
        "calls": table([CALL(call) for call in events.calls]),
        "overhead": table([]),
        "dropped": events.dropped,
        "ranges": heard,
        "boundaries": events.boundaries,
        "forced_tokens": events.forced_tokens,
        "sequences": sequences,
        "steps": {step: sequences.index(of) for step, of in events.steps.items()},
    }
    path.write_bytes(gzip.compress(json.dumps(content).encode(), compresslevel=1))
