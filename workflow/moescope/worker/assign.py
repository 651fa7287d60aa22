"""Which term each node of a step's graph belongs to.

A node made inside a module that modules.json lists has that module's term. What a MoE block works
out itself is told apart by what it depends on: the experts' output (combine), else the shared
expert's (shared expert), else neither (router). Likewise within the experts: the last projection
(combine), another one (activation), none (expert gather). What the whole model works out itself
after its parts is the head; what is outside the model and depends on it is the sampler. What
a fused block does up to its kernels, which hold router, experts and combine in one, is the expert
gather.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .boundaries import Call
from .modules import Survey
from .order import Graph

# What a node depends on, within its MoE block (or, outside every block, within the step).
EXPERTS, SHARED, PROJECTION, LAST, MODEL = 1, 2, 4, 8, 16
NOWHERE = -1
ELSEWHERE = "*"  # the part of modules that the table does not list


@dataclass(frozen=True)
class Table:
    """The parts of a model that assignment asks for, by path. root: what is called once a step."""

    root: str
    terms: dict[str, str]
    blocks: frozenset[str]
    switches: frozenset[str]
    projections: frozenset[str]
    last: frozenset[str]
    fused: frozenset[str] = frozenset()

    def owner(self, path: str) -> str:
        """The innermost listed part that a module is in, or ELSEWHERE. The root is the part of what
        it works out itself only, not of the modules in it that nothing else owns."""
        if path == self.root:
            return path
        while path and (path not in self.terms or path == self.root):
            path = path.rpartition(".")[0]
        return path or ELSEWHERE


@dataclass(frozen=True)
class Place:
    """A call: the part it is in, and the call of the MoE block around it (NOWHERE: none)."""

    part: str
    block: int = NOWHERE
    inside: frozenset[str] = field(default_factory=frozenset)


def table(survey: Survey) -> Table:
    """The table of a loaded model."""
    blocks = survey.blocks
    terms = survey.outputs | {ELSEWHERE: "other"}
    if survey.tied:
        terms[f"{survey.head.path}.as_linear"] = "head"
    return Table(
        survey.root,
        terms,
        frozenset(block.path for block in blocks),
        frozenset(block.switch.path for block in blocks),
        frozenset(part.path for block in blocks for part in block.projections),
        frozenset(block.projections[-1].path for block in blocks),
        frozenset(path for b in blocks if b.fused for path in (b.path, b.switch.path)),
    )


def terms(
    graph: Graph,
    made: Sequence[int | None],
    calls: Sequence[Call],
    parts: Table,
    returned: Mapping[str, Sequence[int]],
) -> list[str]:
    """The term of each node.

    made: for each node the call that made it (boundaries.makers). returned: array -> the calls
    that returned it (boundaries.results); where an intervention put a constant in a part's place,
    that is how the part's output is known.
    """
    places = _places(calls, parts)
    found: list[str] = []
    behind: list[tuple[int, int]] = []  # the node's block, and what of it the node depends on
    for node, call in enumerate(made):
        place = places[call] if call is not None and call >= 0 else None
        block = place.block if place else NOWHERE
        flags = 0
        for name in graph.nodes[node].inputs:
            source = graph.maker.get(name)
            if source is None:
                for constant in (places[of] for of in returned.get(name, ())):
                    flags |= _flags(constant, parts) if constant.block == block else 0
            elif behind[source][0] == block:
                flags |= behind[source][1]
            elif block == NOWHERE:
                flags |= MODEL
        if place and place.part in parts.fused and not flags & (EXPERTS | SHARED):
            term = "expert_gather"
            flags |= EXPERTS if graph.nodes[node].primitive == "CustomKernel" else 0
        else:
            term = _term(place, flags, parts)
        if place and (block != NOWHERE or place.part != parts.root or flags):
            flags |= _flags(place, parts) | (SHARED if term == "shared_expert" else 0)
        found.append(term)
        behind.append((block, flags))
    return found


def _flags(place: Place, parts: Table) -> int:
    """What depends on something made here depends on."""
    if place.block == NOWHERE:
        return MODEL
    if place.part in parts.projections:
        return EXPERTS | PROJECTION | (LAST if place.part in parts.last else 0)
    if place.inside & parts.switches:
        return EXPERTS
    return SHARED if parts.terms.get(place.part) == "shared_expert" else 0


def _term(place: Place | None, flags: int, parts: Table) -> str:
    if place is None:
        return "sampler" if flags & MODEL else "other"
    if place.part == parts.root:
        return "head" if flags & MODEL else "other"
    if place.part in parts.switches:
        if flags & LAST:
            return "combine"
        return "activation" if flags & PROJECTION else "expert_gather"
    if place.part in parts.blocks:
        if flags & EXPERTS:
            return "combine"
        return "shared_expert" if flags & SHARED else "router"
    return parts.terms[place.part]


def _places(calls: Sequence[Call], parts: Table) -> list[Place]:
    places: list[Place] = []
    for position, call in enumerate(calls):
        above = places[call.parent] if call.parent >= 0 else Place(ELSEWHERE)
        part = parts.owner(call.path)
        block = position if call.path in parts.blocks else above.block
        places.append(Place(part, block, above.inside | {part}))
    return places
