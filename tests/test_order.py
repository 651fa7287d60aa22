"""The derived order of execution: against graphs by hand, against its properties, against MLX."""

import json
import os
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moescope.worker.order import WIDTH, Graph, Node, evaluation, parse

SHARED = """digraph {
{ rank=source; "A"; }
{ 7 [label ="CompiledExp", shape=rectangle]; }
"A" -> 7
{ "B"; }
7 -> "B"
{ 7 [label ="CompiledExp", shape=rectangle]; }
"B" -> 7
{ "C"; }
7 -> "C"
{ 9 [label ="Split", shape=rectangle]; }
"C" -> 9
{ "D"; }
9 -> "D"
{ rank=sink; "x:1"; }
9 -> "x:1"
}"""


def test_a_primitive_shared_by_two_calls_is_two_nodes():
    graph = parse(SHARED)
    assert [node.primitive for node in graph.nodes] == ["CompiledExp", "CompiledExp", "Split"]
    assert graph.nodes[2].outputs == ["D", "x:1"]
    assert graph.maker == {"B": 0, "C": 1, "D": 2, "x:1": 2}
    assert evaluation(graph, ["x:1"]) == [0, 1, 2]


@pytest.mark.parametrize("line", ['"A" -> 8', '8 -> "Z"', '9 -> "B"'])
def test_text_that_does_not_hold_together_is_refused(line):
    with pytest.raises(ValueError, match=line.split(" ")[0]):
        parse(SHARED.removesuffix("}") + line + "\n}")


def graph_of(*nodes: tuple[str, str]) -> Graph:
    """("maker of x", "names of its inputs") by letters."""
    made = [Node(name, list(inputs), [name]) for name, inputs in nodes]
    return Graph(made, {node.outputs[0]: i for i, node in enumerate(made)})


def order(graph: Graph, outputs: str, width: int = WIDTH) -> str:
    return "".join(graph.nodes[i].primitive for i in evaluation(graph, list(outputs), width))


def test_breadth_first_from_the_outputs_run_backwards():
    # d needs b and c; tape: d, b, c, a; run from its end.
    graph = graph_of(("a", "x"), ("b", "a"), ("c", "a"), ("d", "bc"))
    assert order(graph, "d") == "acbd"


def test_an_array_is_taken_when_its_last_consumer_is_seen():
    # a is asked for by d (first) and by b (last): it comes after b on the tape, before it in time.
    graph = graph_of(("a", "x"), ("b", "a"), ("d", "ab"))
    assert order(graph, "d") == "abd"


def test_a_full_width_puts_the_rest_aside():
    graph = graph_of(("a", "x"), ("b", "x"), ("c", "x"), ("p", "a"), ("q", "b"), ("z", "pqc"))
    assert order(graph, "z") == "bacqpz"
    assert order(graph, "z", width=1) == "cbqapz"


def test_only_what_the_outputs_need_runs():
    graph = graph_of(("a", "x"), ("b", "a"), ("c", "a"))
    assert order(graph, "b") == "ab"
    assert order(graph, "x") == ""


@st.composite
def graphs(draw):
    nodes, names = [], ["x"]
    for i in range(draw(st.integers(1, 40))):
        inputs = draw(st.lists(st.sampled_from(names), max_size=4))
        outputs = [f"{i}.{j}" for j in range(draw(st.integers(1, 3)))]
        nodes.append(Node("P", inputs, outputs))
        names += outputs
    asked = draw(st.lists(st.sampled_from(names), min_size=1, max_size=4))
    maker = {name: i for i, node in enumerate(nodes) for name in node.outputs}
    return Graph(nodes, maker), asked


@settings(max_examples=200)
@given(graphs(), st.integers(1, 25))
def test_every_needed_node_runs_once_after_what_it_needs(case, width):
    graph, asked = case
    run = evaluation(graph, asked, width)
    needed, left = set(), list(asked)
    while left:
        node = graph.maker.get(left.pop())
        if node is not None and node not in needed:
            needed.add(node)
            left += graph.nodes[node].inputs
    assert sorted(run) == sorted(needed)
    when = {node: i for i, node in enumerate(run)}
    for node in run:
        for name in graph.nodes[node].inputs:
            source = graph.maker.get(name)
            assert source is None or when[source] < when[node]


def named(nodes):
    return {name for node in nodes for name in node.outputs if name.startswith("#")}


@pytest.mark.parametrize("width", [20, 3])
def test_mlx_stops_where_the_derived_order_says(root, width):
    from tiny import arm_python

    lines = subprocess.run(
        [arm_python(), root / "tests" / "order_bomb.py", str(width), "60"],
        env={**os.environ, "MLX_BFS_MAX_WIDTH": str(width)},
        capture_output=True,
        check=True,
        timeout=60,
        text=True,
    ).stdout.splitlines()
    assert len(lines) == 60
    partial = 0
    for line in lines:
        case = json.loads(line)
        graph = parse(case["before"])
        run = evaluation(graph, case["outputs"], width)
        bomb = run.index(graph.maker[case["bomb"]])
        left = parse(case["after"])
        rest = [left.nodes[i] for i in evaluation(left, case["outputs"], width)]
        # Addresses may be used again and names that MLX makes up may change: what is left is
        # compared by primitive, and by the arrays that have a name of ours.
        wanted = [graph.nodes[i] for i in run[bomb:]]
        assert sorted(n.primitive for n in rest) == sorted(n.primitive for n in wanted)
        assert named(rest) == named(wanted)
        partial += 0 < bomb < len(run) - 1
    assert partial > 30
