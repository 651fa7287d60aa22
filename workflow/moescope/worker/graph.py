"""The graph of one decoded token: every primitive with its module, its term and its place in the
order of execution.

The graph is the runtime's own: built by its generate_step, exported unevaluated at the moment it
is handed to MLX. Modules come from the boundaries that the step's arrays passed (boundaries.py),
terms from the table of modules (assign.py), the order of execution from MLX's rule (order.py).
"""

import hashlib
import io
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .assign import Table, table, terms
from .boundaries import Recorder, makers, recorded, results
from .modules import TERMS, survey
from .order import WIDTH, Graph, evaluation, parse
from .patches import applied
from .runtime import steps as generate
from .state import State, check_ids
from .steps import watched

STEP = 2  # the second decoded token's forward: caches are filled, nothing is left of the prompt


@dataclass(frozen=True)
class Step:
    """One step's graph. order: positions of the nodes that run, as they run. calls: how many
    module calls were seen."""

    graph: Graph
    order: list[int]
    modules: list[str]
    terms: list[str]
    calls: int
    text_sha256: str

    def sequence(self) -> list[tuple[str, str, str]]:
        """(primitive, module, term) of each node that runs, as they run."""
        nodes = self.graph.nodes
        return [(nodes[i].primitive, self.modules[i], self.terms[i]) for i in self.order]


# Arrays named in one export: MLX's binding takes 1024 keyword arguments at most.
NAMED = 1000
_NAME = re.compile(r'"([^"]+)"')


def _text(outputs: list[mx.array], named: dict[str, mx.array]) -> str:
    """The graph's text with every array of ``named`` called by its name. Where they are too many
    for one export, several with some of the names each are put together: they list the same graph
    in the same order, so that an array stands in the same places of each."""
    names = list(named)
    texts = []
    for start in range(0, max(len(names), 1), NAMED):
        file = io.StringIO()
        some = {name: named[name] for name in names[start : start + NAMED]}
        mx.export_to_dot(file, *outputs, **some)
        texts.append(file.getvalue())
    first, *others = texts
    known: dict[str, str] = {}
    for text in others:
        for line, other in zip(first.splitlines(), text.splitlines(), strict=True):
            if "->" not in line:
                continue
            if _NAME.sub("", line) != _NAME.sub("", other):
                raise ValueError(f"two exports of one graph differ: {line!r} and {other!r}")
            (ours,), (theirs,) = _NAME.findall(line), _NAME.findall(other)
            if theirs in named:
                known[ours] = theirs
    if not known:
        return first
    return "".join(
        line
        if "[label" in line
        else _NAME.sub(lambda match: f'"{known.get(match[1], match[1])}"', line)
        for line in first.splitlines(keepends=True)
    )


def export(outputs: list[mx.array], recorder: Recorder, parts: Table) -> Step:
    """The graph below ``outputs``, which must not be evaluated yet; evaluates nothing."""
    arrays = recorder.arrays | {hash(array): array for array in outputs}
    names = {identity: f"#{i}" for i, identity in enumerate(arrays)}
    named = {names[identity]: array for identity, array in arrays.items()}
    text = _text(outputs, named)
    graph = parse(text)
    width = int(os.environ.get("MLX_BFS_MAX_WIDTH", WIDTH))
    made = makers(graph, recorder.events, names)
    calls = recorder.calls
    return Step(
        graph,
        evaluation(graph, [names[hash(array)] for array in outputs], width),
        [calls[call].path if call is not None and call >= 0 else "" for call in made],
        terms(graph, made, calls, parts, results(recorder.events, names)),
        len(calls),
        hashlib.sha256(text.encode()).hexdigest(),
    )


def capture(
    state: State,
    decode: Callable[[], Iterator[Any]],
    wanted: set[int],
    after: Callable[[int], None] = lambda step: None,
) -> dict[int, Step]:
    """Run ``decode()``, the runtime's generate_step, to its end; the graphs of the wanted steps.

    after: called with each step's number once MLX has taken the step.
    """
    found: dict[int, Step] = {}
    parts = table(survey(state).known())
    with recorded(state.loaded()) as recorder:

        def take(step: int, outputs: list[mx.array]) -> None:
            if step in wanted:
                recorder.see(-1, outputs)
                found[step] = export(outputs, recorder, parts)
            recorder.forget()

        def go_on(step: int) -> None:
            after(step)
            recorder.on = step + 1 in wanted

        with watched(take, go_on):
            for _ in decode():
                pass
    return found


def run(
    state: State, prompt: list[int], patches: list[str] | tuple[str, ...] = ()
) -> dict[str, Any]:
    """The decode graph of one token.

    operations: how often each (term, primitive) runs, in the order of the terms; total, astype:
    of all and of conversions of type; sequence: (primitive, module, term) as they run; dot_sha256:
    of the exported text, which names primitives by address and so differs between processes.
    """
    check_ids("prompt", prompt)
    with applied(state, patches):
        step = capture(state, lambda: generate(state, prompt, STEP), {STEP})[STEP]
    sequence = step.sequence()
    counts = Counter((term, primitive) for primitive, _, term in sequence)
    rows = sorted(counts.items(), key=lambda row: (TERMS.index(row[0][0]), -row[1], row[0][1]))
    return {
        "operations": [
            {"primitive": primitive, "term": term, "count": count}
            for (term, primitive), count in rows
        ],
        "total": len(sequence),
        "astype": sum(primitive == "AsType" for primitive, _, _ in sequence),
        "sequence": sequence,
        "module_calls": step.calls,
        "dot_sha256": step.text_sha256,
    }
