"""Where a ratio crosses 1 along a series of checkpoints, and how far that is known."""

import json
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fixture_crossover import ARM, ASKED, series
from fixture_results import Tree
from moescope.files import read_json, write_json
from moescope.verdict import crossover as module
from moescope.verdict.crossover import _series, crossings, zone
from moescope.verdict.statistics import figure

WIDTHS = (768, 1792, 2880, 4096, 8192, 14336)


def test_a_crossing_lies_on_the_line_between_its_neighbours():
    ((x, way),) = crossings([1000, 4000], [2.0, 0.5])
    assert way == -1 and x == pytest.approx(2000)
    ((x, way),) = crossings([1000, 4000], [0.5, 4.0])
    assert way == 1 and x == pytest.approx(1000 * 4 ** (1 / 3))


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([1.2, 1.0, 0.8], [(2000, -1)]),
        ([1.2, 1.0, 1.0, 0.8], [(math.sqrt(2000 * 4000), -1)]),
        ([1.2, 1.0, 1.3], []),
        ([1.2, 1.1, 1.0], []),
        ([1.0, 1.1, 1.2], []),
        ([1.0, 1.0, 1.0], []),
    ],
)
def test_a_ratio_of_exactly_one(ratios, expected):
    assert crossings([1000, 2000, 4000, 8000][: len(ratios)], ratios) == expected


def test_every_crossing_is_listed_in_order():
    found = crossings([1, 2, 4, 8], [0.5, 2, 0.5, 2])
    assert [way for _, way in found] == [1, -1, 1]
    assert [x for x, _ in found] == pytest.approx([math.sqrt(2), math.sqrt(8), math.sqrt(32)])


places = st.lists(st.integers(32, 20000), min_size=2, max_size=8, unique=True).map(sorted)
ratio = st.floats(0.2, 5)


@st.composite
def ranges(draw):
    """(xs, low, middle, high), low <= middle <= high at each x."""
    xs = draw(places)
    rows = [sorted(draw(st.tuples(ratio, ratio, ratio))) for _ in xs]
    return xs, *([row[i] for row in rows] for i in range(3))


@given(places, st.data())
def test_a_falling_series_crosses_once_where_it_must(xs, data):
    drops = sorted(data.draw(st.lists(ratio, min_size=len(xs), max_size=len(xs))), reverse=True)
    assume(drops[0] > 1 > drops[-1])
    ((x, way),) = crossings(xs, drops)
    assert way == -1 and xs[0] <= x <= xs[-1]
    assert all(r >= 1 for at, r in zip(xs, drops, strict=True) if at < x)
    assert all(r <= 1 for at, r in zip(xs, drops, strict=True) if at > x)


@given(places, st.data())
def test_one_side_never_crosses(xs, data):
    above = data.draw(st.lists(st.floats(1.001, 5), min_size=len(xs), max_size=len(xs)))
    assert crossings(xs, above) == [] == crossings(xs, [1 / r for r in above])


@given(ranges())
def test_a_ratio_turned_over_crosses_at_the_same_places(made):
    xs, _, middle, _ = made
    one, two = crossings(xs, middle), crossings(xs, [1 / r for r in middle])
    assert [way for _, way in one] == [-way for _, way in two]
    assert [x for x, _ in one] == pytest.approx([x for x, _ in two])


def at(x, xs, ratios):
    """A series at any x, on straight lines with both axes logarithmic."""
    i = max(i for i in range(len(xs) - 1) if xs[i] <= x)
    part = math.log(x / xs[i]) / math.log(xs[i + 1] / xs[i])
    return math.exp((1 - part) * math.log(ratios[i]) + part * math.log(ratios[i + 1]))


@given(ranges())
def test_around_a_crossing_the_range_contains_one_and_beyond_it_does_not(made):
    xs, low, middle, high = made
    for x, _ in crossings(xs, middle):
        left, right = zone(x, xs, low, high)
        assert (left or xs[0]) <= x <= (right or xs[-1])
        for inside in (left or xs[0], x, right or xs[-1]):
            assert at(inside, xs, low) <= 1 + 1e-9 and at(inside, xs, high) >= 1 - 1e-9


def test_the_range_comes_from_the_two_ends_of_the_ratios():
    xs = [1000, 4000]
    left, right = zone(2000, xs, [2.0, 0.25], [2.0, 0.8])
    assert left == pytest.approx(1000 * 4 ** (1 / 3)) and 2000 < right < 4000
    assert zone(2000, xs, [2.0, 0.25], [2.0, 1.2])[1] is None, "it may be beyond the series"


def point(width, low=None, middle=None, high=None):
    file = f"results/measure/w{width}/k/runs.jsonl"
    common = {"unit": "", "n": 5, "files": [file], "runs": ["r00-lm"]}
    return {
        "checkpoint": f"w{width}",
        "at": {"value": width, "min": width, "max": width, **common},
        "ratio": None
        if middle is None
        else {"value": middle, "min": low, "max": high, **common, "unit": "ratio"},
    }


def test_points_without_a_ratio_are_stepped_over():
    found = _series([point(1000, 1.9, 2.0, 2.1), point(2000), point(4000, 0.4, 0.5, 0.6)], True)
    (crossing,) = found["crossings"]
    assert crossing["between"] == ["w1000", "w4000"] and crossing["becomes"] == "slower"
    assert crossing["at"]["value"] == pytest.approx(2000)
    assert crossing["at"]["min"] < 2000 < crossing["at"]["max"] and not crossing["open"]
    assert len(crossing["at"]["files"]) == 2


def test_fewer_than_two_ratios_say_nothing():
    found = _series([point(1000, 1.9, 2.0, 2.1), point(2000)], True)
    assert (found["crossings"], found["side"]) == ([], None)


@pytest.mark.parametrize(
    ("ratios", "side"),
    [
        ((1.2, 1.1), "faster"),
        ((0.8, 0.9), "slower"),
        ((1.2, 1.0), "never slower"),
        ((0.8, 1.0), "never faster"),
        ((1.0, 1.0), "the same"),
    ],
)
def test_what_does_not_cross_is_on_one_side(ratios, side):
    found = _series([point(w, r, r, r) for w, r in zip((1, 2), ratios, strict=True)], True)
    assert found["side"] == side


def analysed(tree, asked=ASKED) -> dict:
    return json.loads((tree.analyse([], crossover=asked) / "analysis.json").read_text())


def test_both_series_of_a_study(tmp_path):
    wall = dict(zip(WIDTHS, (1.7, 1.5, 1.3, 1.2, 1.1, 1.05), strict=True))
    gpu = dict(zip(WIDTHS, (3.0, 2.0, 1.5, 1.25, 0.8, 0.5), strict=True))
    # As a study may list them, in no order.
    mixed = {w: (wall[w], gpu[w]) for w in (2880, 14336, 768, 8192, 1792, 4096)}
    with series(tmp_path, mixed) as tree:
        found = analysed(tree)
    assert found["crossover"]["refused"] is None
    arm = found["crossover"]["arms"][ARM]
    for of, truth in (("wall", wall), ("gpu", gpu)):
        assert [one["at"]["value"] for one in arm[of]["points"]] == list(WIDTHS)
        for one in arm[of]["points"]:
            assert one["ratio"]["value"] == pytest.approx(truth[one["at"]["value"]], rel=0.03)
    assert arm["wall"]["side"] == "faster" and not arm["wall"]["crossings"]
    assert {one["effect"] for one in arm["wall"]["points"]} == {"faster"}
    (crossing,) = arm["gpu"]["crossings"]
    assert crossing["between"] == ["w4096", "w8192"] and crossing["becomes"] == "slower"
    assert crossing["at"]["value"] == pytest.approx(5793, rel=0.01), "halfway of 1.25 and 0.8"
    first = arm["gpu"]["points"][0]
    assert first["base_ms"]["value"] / first["ms"]["value"] == pytest.approx(3)
    assert not any("crossover" in line for line in found["not_measured"])


def test_a_study_that_asks_for_none_has_none(tmp_path):
    tree = Tree(tmp_path).make()
    assert json.loads((tree.analyse() / "analysis.json").read_text())["crossover"] is None


def test_a_missing_trace_is_told_and_the_others_stand(tmp_path):
    with series(tmp_path, {768: (1.5, 2.0), 4096: (1.2, None), 8192: (0.9, 0.5)}) as tree:
        found = analysed(tree)
    gpu = found["crossover"]["arms"][ARM]["gpu"]
    assert [one["ratio"] is None for one in gpu["points"]] == [False, True, False]
    assert gpu["points"][1]["why"] == f"{ARM} has no kernel trace"
    assert gpu["crossings"][0]["between"] == ["w768", "w8192"]
    (line,) = (line for line in found["not_measured"] if "crossover" in line)
    assert "w4096" in line and "no kernel trace" in line


def test_a_void_arm_has_no_point(tmp_path):
    with series(
        tmp_path,
        {768: (1.5, 2.0), 4096: (1.2, 1.5), 8192: (0.9, 0.5)},
        parity_void={("w8192", ARM): "NaN in the logits"},
    ) as tree:
        arm = analysed(tree)["crossover"]["arms"][ARM]
    for of in ("wall", "gpu"):
        assert "void: NaN" in arm[of]["points"][2]["why"]
        assert arm[of]["side"] == "faster"


def test_a_trace_that_fell_back_is_marked(tmp_path):
    with series(tmp_path, {768: (1.5, 2.0), 4096: (1.2, 1.5)}) as tree:
        path = tree.folder(f"trace/w4096.{ARM}") / "terms.json"
        write_json(path, read_json(path) | {"method": "forced"})
        arm = analysed(tree)["crossover"]["arms"][ARM]
    assert [one["forced"] for one in arm["gpu"]["points"]] == [False, True]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"hidden": 4096}, "they differ in hidden too"),
        ({"expert_width": 768}, "more than one checkpoint has the expert width 768"),
        ({"expert_width": None}, "w4096 has no expert width in its inspection"),
    ],
)
def test_checkpoints_that_make_no_series_are_refused(tmp_path, change, why):
    with series(tmp_path, {768: (1.5, 2.0), 4096: (0.8, 0.5)}) as tree:
        path = tree.folder("inspect/w4096") / "architecture.json"
        write_json(path, read_json(path) | change)
        found = analysed(tree)
    assert found["crossover"]["refused"] == why
    arm = found["crossover"]["arms"][ARM]
    assert not arm["wall"]["crossings"] and arm["wall"]["side"] is None
    assert f"The crossover over expert width: {why}." in found["not_measured"]


def test_without_arms_every_candidate_and_without_checkpoints_every_moe_subject(tmp_path):
    with series(tmp_path, {768: (1.5, 2.0), 4096: (0.8, 0.5)}) as tree:
        assert list(analysed(tree, {"over": "expert_width"})["crossover"]["arms"]) == [ARM]


def test_two_blocks_by_two_instruments_are_compared_by_the_forced_pass():
    def block(*ms):
        return {"ms": figure(ms, "ms/token", ["terms.json"])}

    def arm(method, block, forced):
        traced = {"method": method, "refused": None, "block": block, "forced_block": forced}
        return {"absent": None, "void": None, "kernels": traced}

    base = arm("ranges", block(0.4, 0.5, 0.6), block(0.8))
    arms = {"vlm": base, "fused": arm("forced", block(0.2), block(0.2))}
    found = module._gpu(arms, "fused", "vlm")
    assert found["forced"] and found["base_ms"]["value"] == 0.8
    assert found["ratio"]["value"] == pytest.approx(4.0) and found["ratio"]["n"] == 1
    base["kernels"]["forced_block"] = None
    found = module._gpu(arms, "fused", "vlm")
    assert (
        found["ratio"] is None and found["why"] == "vlm has no forced pass that shows a MoE block"
    )
