"""The order in which MLX evaluates a graph, derived from the graph's text.

``mx.export_to_dot`` lists a graph's primitives depth first. ``mx.eval`` and ``mx.async_eval`` run
them in another order: ``eval_impl`` (MLX 0.32, mlx/transforms.cpp) counts how often each array is
asked for, walks from the outputs towards the inputs breadth first, takes an array when its last
consumer has been seen, and runs that tape from its end. Once MLX_BFS_MAX_WIDTH (20) arrays wait
to be walked, it puts the array at hand aside with the inputs it has left, and goes on with the
tape; what was put aside is taken up again, last first, when the tape is exhausted.

Text, one node a "label" line (mlx/graph_utils.cpp, python/src/export.cpp):

    { 94001 [label ="Add", shape=rectangle]; }
    "A" -> 94001
    "B" -> 94001
    { "C"; }
    94001 -> "C"

A primitive made by ``mx.compile`` is one object shared by all its calls, so the number of a node
repeats: nodes are told apart by their position in the text, never by number.
"""

import re
from dataclasses import dataclass, field

WIDTH = 20  # MLX_BFS_MAX_WIDTH's default

_LABEL = re.compile(r'\{ (\d+) \[label ="([^"]*)"')
_INPUT = re.compile(r'"([^"]+)" -> (\d+)$')
_OUTPUT = re.compile(r'(\d+) -> "([^"]+)"$')


@dataclass
class Node:
    """One call of a primitive: its name as MLX prints it, the arrays it reads and makes."""

    primitive: str
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)


@dataclass
class Graph:
    """nodes: as listed, inputs before consumers. maker: array -> position of its node.

    An array without a maker is evaluated already: a weight, a cache, a token.
    """

    nodes: list[Node]
    maker: dict[str, int]


def parse(text: str) -> Graph:
    """The graph of an ``export_to_dot`` text.

    Raises ValueError at a line that belongs to no node or makes an array twice.
    """
    nodes: list[Node] = []
    maker: dict[str, int] = {}
    number = ""
    for line in text.splitlines():
        if found := _LABEL.match(line):
            number = found[1]
            nodes.append(Node(found[2]))
        elif found := _INPUT.match(line):
            if found[2] != number:
                raise ValueError(f"an input of another node than the last: {line!r}")
            nodes[-1].inputs.append(found[1])
        elif found := _OUTPUT.match(line):
            if found[1] != number or found[2] in maker:
                raise ValueError(f"an output that is not the last node's alone: {line!r}")
            nodes[-1].outputs.append(found[2])
            maker[found[2]] = len(nodes) - 1
    return Graph(nodes, maker)


def evaluation(graph: Graph, outputs: list[str], width: int = WIDTH) -> list[int]:
    """Positions of the nodes that evaluating ``outputs`` runs, in the order they are run.

    outputs: array names in the order given to ``mx.async_eval``; evaluated ones are ignored.
    width: MLX_BFS_MAX_WIDTH of the process.
    """
    asked = _asked(graph, outputs)
    tape: list[int | None] = [None]  # None is the synchroniser, whose inputs are the outputs
    aside: list[tuple[int | None, int]] = []
    at = 0
    while asked and (at < len(tape) or aside):
        if at < len(tape):
            node, first = tape[at], 0
            at += 1
        else:
            node, first = aside.pop()
        inputs = outputs if node is None else graph.nodes[node].inputs
        for i in range(first, len(inputs)):
            source = graph.maker.get(inputs[i])
            if source is None:
                continue
            if len(tape) - at >= width:
                aside.append((node, i))
                break
            asked[source] -= 1
            if asked[source] == 0:
                del asked[source]
                tape.append(source)
    return [node for node in reversed(tape) if node is not None]


def _asked(graph: Graph, outputs: list[str]) -> dict[int, int]:
    """How often each node below the outputs is asked for, counting every mention of an input."""
    asked: dict[int, int] = {}
    left = [outputs]
    while left:
        for name in left.pop():
            source = graph.maker.get(name)
            if source is None:
                continue
            if source not in asked:
                asked[source] = 0
                left.append(graph.nodes[source].inputs)
            asked[source] += 1
    return asked
