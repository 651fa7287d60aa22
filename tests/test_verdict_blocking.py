"""Calls of the decoding thread that wait for the GPU."""

import json
from pathlib import Path

import pytest

from fixture_results import Tree
from moescope.verdict.blocking import LEAST, WAITING, blocking
from moescope.verdict.results import Found

TEMPLATES = Path(__file__).parents[1] / "templates"
WALLS = Found({"profiled_wall_ms": [9.0, 1.0, 4.0]}, "terms.json")


def calls(*rows):
    """rows: (call, thread, count, ms)."""
    names = ("call", "thread", "count", "ms")
    return Found(
        [dict(zip(names, map(str, row), strict=True)) for row in rows], "calls.csv"
    )  # fmt: skip


def test_the_share_is_of_the_pass_that_recorded_the_calls():
    (found,) = blocking(calls(("cudaFree", "loop", 0.5, 1.0)), WALLS)
    assert found["call"] == "cudaFree"
    assert (found["count"]["value"], found["ms"]["value"]) == (0.5, 1.0)
    assert found["share"]["value"] == pytest.approx(0.25), "of the last pass, which took 4 ms"
    assert found["ms"]["files"] == ["calls.csv"]
    assert found["share"]["files"] == ["calls.csv", "terms.json"]


@pytest.mark.parametrize("name", WAITING)
def test_each_of_them_counts_by_its_whole_name(name):
    assert blocking(calls((name, "loop", 1, 1.0)), WALLS)
    for other in (f"{name}Async", f"{name}_v2", name[:-1]):
        assert blocking(calls((other, "loop", 1, 1.0)), WALLS) is None


def test_only_the_thread_that_decodes_is_held_up():
    assert blocking(calls(("cudaFree", "other", 1, 3.0)), WALLS) is None
    rows = ("cudaFree", "other", 1, 3.0), ("cudaFree", "loop", 1, 0.4)
    (found,) = blocking(calls(*rows), WALLS)
    assert found["ms"]["value"] == 0.4


def test_they_are_told_from_a_share_of_the_pass_on_together():
    enough, half = LEAST * 4.0, LEAST * 2.0
    assert blocking(calls(("cudaFree", "loop", 1, enough)), WALLS)
    assert blocking(calls(("cudaFree", "loop", 1, enough * 0.99)), WALLS) is None
    rows = ("cudaFree", "loop", 1, half * 0.9), ("cudaMemcpy", "loop", 1, half * 1.2)
    assert [row["call"] for row in blocking(calls(*rows), WALLS)] == ["cudaMemcpy", "cudaFree"]


def test_a_trace_without_calls_or_walls_tells_nothing():
    waits = calls(("cudaFree", "loop", 1, 3.0))
    assert blocking(None, WALLS) is None
    assert blocking(calls(), WALLS) is None
    assert blocking(waits, None) is None
    assert blocking(waits, Found({"wall_ms": [3.0]}, "terms.json")) is None


def test_the_line_of_what_bounds_a_token_names_them(tmp_path):
    tree = Tree(tmp_path, kernels=True).make()
    folder = tree.folder("trace/qwen3-moe.vlm")
    with (folder / "calls.csv").open("a") as file:
        file.write("cudaFree,loop,1,0.7\ncudaFreeAsync,loop,9,2.0\n")
    terms = json.loads((folder / "terms.json").read_text())
    (folder / "terms.json").write_text(json.dumps(terms | {"profiled_wall_ms": [9.0, 2.8]}))
    tree.analyse()
    folder = tree.record(TEMPLATES)
    text = (folder / "record.md").read_text().partition("## What bounds a token")[2]
    text = text.partition("\n## ")[0]
    (line,) = (line for line in text.splitlines() if "`cudaFree`" in line)
    assert line.startswith("- `vlm` on `qwen3-moe`: bounded by **host**")
    assert line.endswith(
        " The thread that decodes spends 0.700 ms/token in `cudaFree`, 25.0 % of the profiled pass."
    )
    assert "cudaFreeAsync" not in text
    assert "take 5 % of the pass or more" in text and "by itself it is no saving" in text
    record = json.loads((folder / "record.json").read_text())
    (found,) = record["attribution"]["kernels"]["qwen3-moe"]["vlm"]["blocking"]
    assert [Path(file).name for file in found["share"]["files"]] == ["calls.csv", "terms.json"]
    assert record["attribution"]["kernels"]["qwen3-moe"]["lm"]["blocking"] is None


def test_where_none_waits_the_section_has_no_word_of_it(tmp_path):
    tree = Tree(tmp_path, kernels=True).make()
    tree.analyse()
    text = (tree.record(TEMPLATES) / "record.md").read_text()
    assert "bounded by **host**" in text
    assert "no saving" not in text and "The thread that decodes spends" not in text
