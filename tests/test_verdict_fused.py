"""The rate of a fused block's kernels: in their own time, with the bytes that they read."""

import csv
import json

import pytest

from fixture_results import ARMS, Tree
from moescope.verdict.ceiling import ceiling
from moescope.verdict.fused import fused, reads_the_shared_expert
from moescope.verdict.kernels import readers
from moescope.verdict.results import Found
from moescope.verdict.statistics import figure

KERNEL, GEMV = "custom_kernel_moescope_moe_b333f556f0", "gemv_single<__nv_bfloat16, 8, 4>"
CLAIMED = ["custom_kernel_moescope_moe*"]
BYTES = {"total": 900, "expert_gather": 600, "shared_expert": 200, "router": 10}


def row(kernel, ms, term="expert_gather", launches=2, primitives="CustomKernel"):
    return {"kernel": kernel, "term": term, "launches_per_token": str(launches),
            "ms_per_token": str(ms), "primitives": primitives}  # fmt: skip


def found(rows, claimed=CLAIMED, terms=None, experts=None):
    experts = experts or [{"kernel": KERNEL, "launches": 24}]
    path = {"steps": 12, "moe_layers": 2, "experts": experts}
    content = {"method": "ranges", "path": path}
    parts = {
        term: {"ms": figure(values, "ms/token", ["terms.json"])}
        for term, values in (terms or {"expert_gather": [2.9, 3.0, 3.2]}).items()
    }
    return fused(claimed, Found(content, "terms.json"), Found(rows, "kernels.csv"), parts), parts


def rate(block, parts):
    made = Found({"bytes": {"per_token": BYTES}}, "a.json")
    measured = {way: figure([400e3], "bytes/s", ["t.json"]) for way in ("read", "copy")}
    return ceiling(made, figure([4.0], "ms/token", ["r"]), parts, measured, block)


def test_the_routers_projection_is_in_the_term_and_not_in_the_rate():
    block, parts = found([row(KERNEL, 2.5), row(GEMV, 0.5, primitives="Matmul")])
    own = block.own
    assert (own["min"], own["value"], own["max"], own["n"]) == (2.4, 2.5, 2.7, 3)
    got = rate(block, parts)["terms"]["expert_gather"]
    assert got["bytes"]["value"] == 800, "the shared expert rides along"
    assert got["achieved"]["value"] == pytest.approx(800 / 2.5 * 1e3)
    assert got["copy_share"]["value"] == pytest.approx(0.8)
    assert got["copy_share"]["max"] == pytest.approx(800 / 2.4 / 400)
    assert got["by_term"]["copy_share"]["value"] == pytest.approx(800 / 3.0 / 400)


def test_where_nothing_else_counts_to_the_term_there_is_one_rate():
    block, parts = found([row(KERNEL, 3.0)])
    assert rate(block, parts)["terms"]["expert_gather"]["by_term"] is None


def test_of_two_launches_both_count_and_bring_their_terms_spread():
    rows = [
        row("custom_kernel_moescope_gate_up_db07", 2.0),
        row("custom_kernel_moescope_down_0967", 1.0, term="combine"),
        row("copy_v<float>", 7.0, term="combine"),
    ]
    claimed = ["custom_kernel_moescope_gate_up*", "custom_kernel_moescope_down*"]
    terms = {"expert_gather": [1.9, 2.0, 2.1], "combine": [7.8, 8.0, 8.1]}
    experts = [{"kernel": "custom_kernel_moescope_gate_up_db07", "launches": 24}]
    block, parts = found(rows, claimed, terms, experts)
    assert block.elsewhere_ms == 1.0 and not block.mixed
    assert [block.own[end] for end in ("min", "value", "max")] == pytest.approx([2.7, 3.0, 3.2])
    assert rate(block, parts)["terms"]["expert_gather"]["by_term"] is None
    made = Found({"bytes": {"per_token": BYTES}, "moe_layers": 2}, "a.json")
    assert readers(rows, made) == {}, "the first reads a part of the weights alone"


def test_without_the_kernels_own_time_there_is_no_rate_but_a_reason():
    block, parts = found([row(KERNEL, 2.0), row("gather_qmv_kernel<8>", 1.0)],
                         experts=[{"kernel": "gather_qmv_kernel", "launches": 24}])  # fmt: skip
    assert block.own is None and "its experts ran gather_qmv_kernel" in block.why
    got = rate(block, parts)
    assert "expert_gather" not in got["terms"] and got["unknown"]["expert_gather"] == block.why
    block, _ = found([])
    assert block.own is None and block.why == "no kernel trace shows the fused kernels"
    block, _ = found([row(KERNEL, 0.05)], terms={"expert_gather": [2.9, 3.0, 3.2]})
    assert block.own is None and "vary by more" in block.why


def test_on_the_gather_path_the_rate_is_the_terms():
    parts = {"expert_gather": {"ms": figure([3.0], "ms/token", ["terms.json"])}}
    got = rate(None, parts)["terms"]["expert_gather"]
    assert got["achieved"]["value"] == pytest.approx(600 / 3.0 * 1e3) and "of" not in got


@pytest.mark.parametrize(
    ("rows", "along"),
    [
        ([], True),
        ([row("gemv", 1, "shared_expert", 2, "Matmul")], True),  # a gate of its own, 2 layers
        ([row("qmv", 1, "shared_expert", 4, "QuantizedMatmul")], False),
        ([row("multiply", 1, "shared_expert", 6, "Multiply")], True),
        ([row("qmv", 1, "shared_expert", 2, "-")], False),  # the forced pass names no primitives
    ],
)
def test_when_the_shared_experts_weights_ride_along(rows, along):
    assert reads_the_shared_expert([row(KERNEL, 1), *rows], 2) is along


def test_what_is_left_of_a_shared_expert_reads_none_of_its_weights():
    gate = row("gemv", 0.1, "shared_expert", 2, "Matmul")
    block, parts = found([row(KERNEL, 2.5), gate],
                         terms={"expert_gather": [2.5], "shared_expert": [0.1]})  # fmt: skip
    assert "shared_expert" not in rate(block, parts)["terms"]


def test_without_a_kernel_trace_a_shared_expert_keeps_its_rate():
    """By scopes alone, as on Metal: what the fused kernels read is not known."""
    ms = {term: figure([2.0], "ms/token", ["scopes.json"]) for term in BYTES if term != "total"}
    parts = {term: {"ms": time} for term, time in ms.items()}
    got = rate(fused(CLAIMED, None, None, None), parts)
    assert got["terms"]["shared_expert"]["bytes"]["value"] == 200
    assert set(got["unknown"]) == {"expert_gather"}


def test_a_lone_fused_kernel_reads_the_shared_experts_weights_too():
    made = Found({"bytes": {"per_token": BYTES}, "moe_layers": 2}, "a.json")
    (read,) = readers([row(KERNEL, 2.5)], made).values()
    assert read["value"] == 800


# The whole way, to the claim and the record.

CLAIM = {
    "name": "near-the-copy",
    "says": "The fused kernels read at seven tenths of a copy's rate.",
    "of": "gpu",
    "arm": "lm",
    "checkpoints": ["qwen3-moe"],
    "all": [{"quantity": "ceiling_share.expert_gather", "is": ">=", "than": 0.7}],
}


def analysed(tree, monkeypatch, **experts):
    monkeypatch.setitem(ARMS, "lm", ARMS["lm"] | {"patches": ["fused"]})
    folder = tree.analyse([CLAIM], experts=experts or None)
    return json.loads((folder / "analysis.json").read_text())


@pytest.mark.parametrize(
    ("than", "by_term", "told"),
    [(0.7, "holds", "the whole term's, claimed"), (0.9, "fails", "by which it fails, claimed")],
)
def test_a_claim_tells_both_definitions(tmp_path, monkeypatch, root, than, by_term, told):
    monkeypatch.setitem(CLAIM["all"][0], "than", than)
    tree = Tree(tmp_path, kernels=True, bandwidth=20e9).make()
    folder = tree.folder("trace/qwen3-moe.lm")
    with open(folder / "kernels.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for one in rows:
        if one["term"] == "expert_gather":
            one |= {"kernel": KERNEL, "launches_per_token": "4", "ms_per_token": "0.3"}
    rows.append(rows[0] | {"kernel": GEMV, "term": "expert_gather", "ms_per_token": "0.08"})
    with open(folder / "kernels.csv", "w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    terms = json.loads((folder / "terms.json").read_text())
    kernel = {"kernel": KERNEL, "launches": 32, "launches_per_token": 4.0, "per_layer": 1.0}
    terms["path"]["experts"] = [kernel | {"helper": False}]
    (folder / "terms.json").write_text(json.dumps(terms))
    found = analysed(tree, monkeypatch, lm={"qwen3-moe": CLAIMED})
    entry = found["claims"][0]["checkpoints"]["qwen3-moe"]["conditions"][0]
    assert entry["figure"]["value"] == pytest.approx(6_193_152 / 0.3e-3 / 20e9, rel=0.01)
    assert entry["by_term"]["value"] == pytest.approx(6_193_152 / 0.38e-3 / 20e9, rel=0.02)
    assert (entry["state"], entry["by_term_state"]) == ("holds", by_term)
    text = (tree.record(root / "templates") / "record.md").read_text()
    assert "in its kernels' own time, " in text and told in text
    assert "| expert gather, the fused kernels alone |" in text
    assert "| expert gather, the whole term |" in text
    assert "This definition came after the first measurements." in text


def test_a_rate_that_is_not_known_says_why(tmp_path, monkeypatch):
    tree = Tree(tmp_path, kernels=True, bandwidth=20e9).make()
    found = analysed(tree, monkeypatch)
    entry = found["claims"][0]["checkpoints"]["qwen3-moe"]["conditions"][0]
    assert entry["figure"] is None
    assert entry["why"] == "not measured: no kernel trace shows the fused kernels"
