"""The decode graph of one token, for real model code: what is in it, and in which term."""

import subprocess
from collections import Counter

import pytest

import tiny
from moescope.runtimes.client import Worker

# Families by what their MoE blocks look like: routing in the block, in a module, in a method;
# shared experts, a dense layer first, experts beside a dense MLP, no experts at all.
FAMILIES = [
    ("mlx-lm", "qwen3"),
    ("mlx-lm", "qwen3_moe"),
    ("mlx-lm", "gpt_oss"),
    ("mlx-lm", "gemma4_text"),
    ("mlx-lm", "qwen3_next"),
    ("mlx-vlm", "dots1"),
    ("mlx-vlm", "deepseek_v4"),
    ("mlx-vlm", "inkling"),
]


@pytest.fixture(scope="module")
def graphs(root, tmp_path_factory):
    found = {}
    with Worker(tiny.arm_python(), {"PATH": "/usr/bin:/bin"}, root) as worker:
        for package, family in FAMILIES:
            folder = tmp_path_factory.mktemp("graphs") / family
            layout = worker.ask(
                "layout", 30, package=package, config=tiny.config(family), quantization=None
            )
            tiny.write(folder, layout)
            loaded = worker.ask("load", 60, package=package, path=str(folder))
            found[family] = worker.ask("graph", 60, prompt=tiny.PROMPT)
            found[family]["moe_layers"] = loaded["moe_layers"]
            found[family]["layers"] = loaded["layers"]
    return found


def of(graph, term):
    return Counter(primitive for primitive, _, found in graph["sequence"] if found == term)


@pytest.mark.parametrize("family", [family for _, family in FAMILIES])
def test_every_primitive_has_a_term_and_counts_add_up(graphs, family):
    graph = graphs[family]
    assert graph["total"] == len(graph["sequence"]) > 100
    assert sum(row["count"] for row in graph["operations"]) == graph["total"]
    assert graph["astype"] == sum(row[0] == "AsType" for row in graph["sequence"])
    assert sum(of(graph, "head").values()) >= 1
    assert of(graph, "sampler")["ArgReduce"] == 1
    assert of(graph, "norm")["Rsqrt"] >= 2 * graph["layers"]
    # No module that the runtime calls once a layer is missing.
    paths = {path for _, path, _ in graph["sequence"]}
    assert {f"layers.{i}" for i in range(graph["layers"])} <= {
        ".".join(path.split(".")[at : at + 2])
        for path in paths
        for at, part in enumerate(path.split("."))
        if part == "layers"
    }


@pytest.mark.parametrize("family", [f for _, f in FAMILIES if f != "qwen3"])
def test_routing_is_the_routers_and_the_gathers_are_the_experts(graphs, family):
    graph, moe = graphs[family], len(graphs[family]["moe_layers"])
    gathers = of(graph, "expert_gather")
    assert gathers["GatherMM"] + gathers["GatherQMM"] == 3 * moe
    for primitive in ("GatherMM", "GatherQMM"):
        assert sum(row[0] == primitive for row in graph["sequence"]) == gathers[primitive]
    tables = 1 if family == "deepseek_v4" else 0  # its first layer routes by token id
    assert of(graph, "router")["ArgPartition"] == moe - tables
    assert sum(row[0] == "ArgPartition" for row in graph["sequence"]) == moe - tables
    assert not gathers["Softmax"] and not gathers["GatherAxis"]
    # One weighted sum over the experts a layer; nothing of it in the router.
    assert of(graph, "combine")["Sum"] == moe
    assert of(graph, "combine")["Multiply"] >= moe
    assert sum(of(graph, "activation").values()) >= moe


def test_the_shared_expert_is_apart(graphs):
    assert of(graphs["qwen3_moe"], "shared_expert") == Counter()
    # A gate beside the shared expert, and its sigmoid, are the shared expert's own.
    shared = of(graphs["qwen3_next"], "shared_expert")
    assert shared["Matmul"] == 4 * len(graphs["qwen3_next"]["moe_layers"])
    assert shared["Sigmoid"] + shared["Multiply"] >= 2 * len(graphs["qwen3_next"]["moe_layers"])
    assert of(graphs["dots1"], "combine")["Add"] == len(graphs["dots1"]["moe_layers"])


def test_a_dense_model_has_no_terms_of_experts(graphs):
    terms = {row["term"] for row in graphs["qwen3"]["operations"]}
    assert terms == {"attention", "norm", "head", "sampler", "other"}


def test_the_activation_that_all_layers_share_keeps_its_layer(graphs):
    paths = [p for _, p, term in graphs["qwen3_moe"]["sequence"] if term == "activation"]
    assert len(set(paths)) == 2 and all(path.endswith("switch_mlp.activation") for path in paths)


def test_an_intervention_changes_the_graph_and_is_taken_back(root, tmp_path):
    with Worker(tiny.arm_python(), {"PATH": "/usr/bin:/bin"}, root) as worker:
        layout = worker.ask(
            "layout", 30, package="mlx-lm", config=tiny.config("qwen3_moe"), quantization=None
        )
        tiny.write(tmp_path / "model", layout)
        worker.ask("load", 60, package="mlx-lm", path=str(tmp_path / "model"))
        plain = worker.ask("graph", 60, prompt=tiny.PROMPT)
        without = worker.ask("graph", 60, prompt=tiny.PROMPT, patches=["skip_experts"])
        again = worker.ask("graph", 60, prompt=tiny.PROMPT)
    assert not any(row[0] == "GatherMM" for row in without["sequence"])
    assert of(without, "router") == of(plain, "router")
    assert again["sequence"] == plain["sequence"]


def test_more_names_than_one_export_takes_give_the_same_graph(tmp_path):
    """MLX's binding takes 1024 names; deep models have more arrays at their modules' boundaries."""
    code = """
import mlx.core as mx
from moescope.worker import graph
from moescope.worker.order import parse
a, b = mx.ones((3,)), mx.ones((3,))
named, x = {}, a
for i in range(40):
    x = mx.exp(x) + b if i % 3 else mx.split(x, 3)[1] * b
    named[f"#{i}"] = x
def nodes(text):
    seen = {}  # arrays without a name are called by letters in any way: number them
    name = lambda array: array if array in named else seen.setdefault(array, len(seen))
    return [
        (n.primitive, *(tuple(map(name, part)) for part in (n.inputs, n.outputs)))
        for n in parse(text).nodes
    ]
text = graph._text([x, named["#7"]], named)
assert all(f'"{name}"' in text for name in named)
for graph.NAMED in (1, 7, 39, 40):
    assert nodes(graph._text([x, named["#7"]], named)) == nodes(text), graph.NAMED
graph.NAMED = 1000
many = {f"#{i}": a + i for i in range(1500)}
text = graph._text(list(many.values()), many)
assert all(f'-> "{name}"' in text for name in many)
print("ok")
"""
    done = subprocess.run(
        [tiny.arm_python(), "-c", code],
        env={"PYTHONPATH": str(tiny.ROOT / "workflow"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    assert done.stdout == "ok\n", done.stderr
