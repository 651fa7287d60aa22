"""What a trace says of processes that died under its instruments."""

import json

import pytest

from fixture_results import Tree
from moescope.verdict.attempts import told

CRASH = "kernels: the worker ended with 139: a: last line"
DIED = "the process died in «kernels» (139, SIGSEGV); the last line that it wrote is «a: last line»"
FAILED = "its instrumented passes: failed (crash): "


@pytest.mark.parametrize(
    ("not_measured", "crashes", "lines"),
    [
        (["x"], None, ["x"]),
        (["x"], [CRASH], ["x", f"a first attempt at its trace: {DIED}; all figures are of the "
                               "second"]),
        ([FAILED + CRASH], [CRASH], [f"its instrumented passes: in both attempts {DIED}"]),
        (["its instrumented passes: failed (timeout): slow"], [CRASH],
         [f"its instrumented passes: failed (timeout): slow; in the attempt before, {DIED}"]),
        ([FAILED + CRASH, "the path"], [CRASH],
         [f"its instrumented passes: in both attempts {DIED}", "the path"]),
    ],
)  # fmt: skip
def test_attempts_in_words(not_measured, crashes, lines):
    trace = {"not_measured": not_measured} | ({"crashes": crashes} if crashes else {})
    assert told(trace) == lines


@pytest.mark.parametrize(
    ("crash", "words"),
    [
        ("load: the worker ended with 1: nothing on stderr",
         "the process died in «load» (1), without a word"),
        ("something else", "the process died (something else)"),
    ],
)  # fmt: skip
def test_a_death_in_words(crash, words):
    (line,) = told({"not_measured": [FAILED + crash], "crashes": [crash]})
    assert line == f"its instrumented passes: in both attempts {words}"


def test_a_trace_without_a_word_of_it_has_no_line():
    assert told({}) == []


def test_the_record_names_the_arm(tmp_path):
    tree = Tree(tmp_path, kernels=True).make()
    path = tree.folder("trace/qwen3-moe.lm") / "trace.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"crashes": [CRASH]}))
    found = json.loads((tree.analyse() / "analysis.json").read_text())
    lines = [line for line in found["not_measured"] if "a first attempt at its trace" in line]
    assert len(lines) == 1 and DIED in lines[0] and lines[0].endswith("(lm on qwen3-moe).")
