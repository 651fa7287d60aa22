"""GPU time by module, and what the term other consists of."""

import json

import pytest

from fixture_results import DENSE_SHARES, MOE_SHARES, Tree
from moescope.verdict.modules import LARGE, LEAST, NAMED, modules
from moescope.verdict.results import Found
from moescope.verdict.statistics import figure

OTHER = {"share": figure([0.5], "share", ["terms.json"])}


def table(*rows):
    """rows: (module, term, share)."""
    return Found(
        [
            {"module": module, "term": term, "launches_per_token": "3",
             "ms_per_token": f"{share * 2:g}", "share": f"{share:g}"}
            for module, term, share in rows
        ],
        "modules.csv",
    )  # fmt: skip


def shares(rows):
    return {row["module"]: row["share"]["value"] for row in rows}


def test_small_modules_are_one_line_and_none_is_lost():
    small = LEAST / 2
    found = modules(
        table(("b", "norm", LEAST), ("a", "head", 0.4), ("c", "norm", small), ("d", "norm", small)),
        None,
    )
    assert list(shares(found["rows"])) == ["a", "b"], "in the order of their time"
    rest = found["rest"]
    assert (rest["modules"]["value"], rest["launches"]["value"]) == (2, 6)
    assert rest["share"]["value"] == pytest.approx(LEAST)
    assert rest["ms"]["value"] == pytest.approx(2 * LEAST)
    assert rest["ms"]["files"] == ["modules.csv"]
    assert modules(table(("a", "head", 0.4)), None)["rest"] is None


def test_a_large_other_is_told_by_its_largest_modules():
    rows = [(f"m{i}", "other", share) for i, share in enumerate((0.2, 0.1, 0.05, 0.04, 0.01))]
    found = modules(table(("head", "head", 0.3), *rows), OTHER)["other"]
    assert list(shares(found["largest"])) == ["m0", "m1", "m2"] and len(found["largest"]) == NAMED
    assert found["share"] == OTHER["share"]


def test_of_many_small_modules_the_largest_is_named():
    rows = [(f"m{i}", "other", 0.02 - i / 1000) for i in range(10)]
    found = modules(table(*rows), OTHER)["other"]
    assert list(shares(found["largest"])) == ["m0"]
    found = modules(table(("a", "other", LEAST), *rows), OTHER)["other"]
    assert list(shares(found["largest"])) == ["a"]


@pytest.mark.parametrize(("share", "told"), [(LARGE, True), (LARGE - 0.001, False)])
def test_from_which_share_on(share, told):
    term = {"share": figure([share], "share", ["terms.json"])}
    found = modules(table(("a", "other", 0.14)), term)["other"]
    assert (found is not None) is told
    assert modules(table(("a", "other", 0.14)), None)["other"] is None


def test_an_analysis_has_them_where_the_trace_does(tmp_path):
    tree = Tree(tmp_path, kernels=True).make()
    (tree.folder("trace/qwen3-moe.lm") / "modules.csv").unlink()
    checkpoints = json.loads((tree.analyse() / "analysis.json").read_text())["checkpoints"]
    assert checkpoints["qwen3-moe"]["arms"]["lm"]["kernels"]["modules"] is None
    found = checkpoints["qwen3-moe"]["arms"]["vlm"]["kernels"]["modules"]
    assert found["other"] is None
    largest = found["rows"][0]
    assert largest["module"] == "model.layers.*.expert_gather.big"
    gather = MOE_SHARES["expert_gather"] * 2 / 3
    assert largest["ms"]["value"] == pytest.approx(gather, rel=1e-4)
    (file,) = largest["ms"]["files"]
    assert file.endswith("/modules.csv") and "trace/qwen3-moe.vlm/" in file
    whole = sum(row["share"]["value"] for row in (*found["rows"], found["rest"]))
    assert whole == pytest.approx(1, rel=1e-4)
    dense = checkpoints["qwen3-dense"]["arms"]["vlm"]["kernels"]["modules"]["other"]
    assert dense["share"]["value"] == pytest.approx(DENSE_SHARES["other"] / 1.05)
    assert [row["module"] for row in dense["largest"]] == [
        "model.layers.*.other.big",
        "model.layers.*.other.small",
    ]
