"""Figures that are made of two with a range each: theirs holds every pair's."""

import json

import pytest

from fixture_results import Tree
from moescope.verdict.bound import bound
from moescope.verdict.statistics import figure, less, quotient

CLAIM = {
    "name": "half-idle",
    "says": "The GPU is busy for less than half of a decode step.",
    "of": "wall",
    "checkpoints": ["qwen3-moe"],
    "all": [{"quantity": "busy", "is": "<", "than": 0.5}],
}


def ranged(low, value, high, unit="ms/token"):
    return figure([low, value, high], unit, ["one.json"])


def test_the_range_is_that_of_all_pairs():
    one, two = ranged(2.0, 3.0, 4.0), ranged(5.0, 6.0, 8.0)
    share = quotient(one, two, "share")
    assert (share["min"], share["value"], share["max"]) == (0.25, 0.5, 0.8)
    assert (share["unit"], share["n"], share["files"]) == ("share", 3, ["one.json"])
    gap = less(two, one)
    assert (gap["min"], gap["value"], gap["max"], gap["unit"]) == (1.0, 3.0, 6.0, "ms/token")


def traced(tmp_path, **changes):
    """The arm vlm on qwen3-moe with another trace, and the claim's verdict."""
    tree = Tree(tmp_path, kernels=True).make()
    path = tree.folder("trace/qwen3-moe.vlm") / "terms.json"
    terms = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in terms.items() if value is not None}))
    found = json.loads((tree.analyse([CLAIM]) / "analysis.json").read_text())
    return found["checkpoints"]["qwen3-moe"]["arms"]["vlm"], found["claims"][0]["verdict"]


def test_the_busy_share_has_the_wall_s_range_too(tmp_path):
    arm, verdict = traced(tmp_path, busy_ms=[1.3, 1.2, 1.4], wall_ms=[3.2, 2.6, 3.0],
                          busy_share=[0.43, 0.4, 0.47], host_gap_ms=[1.7, 1.8, 1.6])  # fmt: skip
    busy, gap = arm["kernels"]["busy"], arm["kernels"]["host_gap_ms"]
    assert busy["value"] == pytest.approx(1.3 / 3.0)
    assert (busy["min"], busy["max"]) == pytest.approx((1.2 / 3.2, 1.4 / 2.6))
    assert (gap["min"], gap["value"], gap["max"]) == pytest.approx((1.2, 1.7, 2.0))
    assert verdict == "unresolved"  # by the median of the wall alone it held


def test_a_trace_without_its_walls_keeps_the_share_that_it_wrote(tmp_path):
    arm, verdict = traced(tmp_path, busy_ms=None, busy_share=[0.41, 0.42, 0.43])
    assert (arm["kernels"]["busy"]["value"], verdict) == (0.42, "supported")


def test_how_much_an_instrument_slows_a_token_has_both_ranges(tmp_path):
    arm, _ = traced(tmp_path, wall_ms=[3.2, 2.6, 3.0])
    found = arm["scopes"]
    assert found["plain_ms"]["n"] == 3
    assert found["slowed"] == quotient(found["wall_ms"], found["plain_ms"], "ratio")


@pytest.mark.parametrize(
    ("low", "value", "high", "told"),
    [(0.3, 0.4, 0.5, None), (0.5, 0.55, 0.7, "60 %"), (0.5, 0.8, 0.95, "60 % and that of 90 %")],
)
def test_a_bound_that_the_range_holds_is_told(low, value, high, told):
    host = {"ms": {"build": {"value": 1.0}, "encode": {"value": 2.0}, "wait": {"value": 0.1}}}
    why = bound({"busy": ranged(low, value, high, "share"), "host": host}, None)["why"]
    assert ("by the median alone" in why) == bool(told)
    assert (told or "") in why and "in the last traced pass" in why
