"""Arms that remove work and bound nothing by it: the token is longer, or a candidate is faster."""

import json
from pathlib import Path

import pytest

from fixture_results import Tree
from moescope.verdict.lengthening import removes_work

TEMPLATES = Path(__file__).parents[1] / "templates"
SAVED = {
    "name": "saves",
    "says": "Without the experts half of the token is saved.",
    "of": "wall",
    "all": [{"quantity": "saved.skip-experts", "is": ">", "than": 0.5}],
}
GAIN = {
    "name": "gains",
    "says": "The candidate saves most of what can be saved.",
    "of": "wall",
    "checkpoints": ["qwen3-moe"],
    "all": [{"quantity": "gain.lm", "is": ">", "than": 0.7}],
}


def made(tmp_path, slow, claims=(), by=()):
    """(arms of qwen3-moe by analysis.json, claims, text of the record)."""
    tree = Tree(tmp_path, slow=slow).make()
    asked = [{"asks": "how much?", "by": list(by), "checkpoints": ["qwen3-moe"]}] if by else None
    found = json.loads((tree.analyse(list(claims), asked) / "analysis.json").read_text())
    text = (tree.record(TEMPLATES) / "record.md").read_text()
    return found["checkpoints"]["qwen3-moe"]["arms"], found["claims"], text


@pytest.mark.parametrize(
    ("patches", "top_k", "removes"),
    [
        (["skip_experts"], 8, True),
        (["skip_attention"], None, True),
        (["fused", "skip_moe"], 8, True),
        (["top_k=7"], 8, True),
        (["top_k=8"], 8, False),
        (["top_k=9"], 8, False),
        (["top_k=1"], None, False),
        (["split_gather=4"], 8, False),
        ([], 8, False),
    ],
)
def test_what_removes_work(patches, top_k, removes):
    assert removes_work(patches, top_k) is removes


def test_a_token_that_is_longer_without_the_work_is_told(tmp_path):
    """Of 4 ms: twice that less 38 % of it."""
    slow = {"skip-experts": 2.0, "top-k-1": 0.9, "lm": 1.3}
    arms, (claim,), text = made(tmp_path, slow, [SAVED], ["saved.skip-experts"])
    longer, saved = arms["skip-experts"]["longer"], arms["skip-experts"]["against"]["saved"]
    assert longer["value"] == pytest.approx(0.24, abs=0.02)
    assert (longer["min"], longer["max"]) == (-saved["max"], -saved["min"])
    assert longer["files"] == saved["files"] and longer["runs"] == saved["runs"]
    assert arms["top-k-1"]["longer"] is None, "it saves"
    assert arms["lm"]["longer"] is None, "it removes nothing, and is no intervention"
    told = [line for line in text.splitlines() if "**longer** than that of" in line]
    assert [line.split(" removes work")[0] for line in told] == [
        f"- `skip-experts` on `{name}`" for name in ("inkling-affine", "inkling-nvfp4", "qwen3-moe")
    ], "once for each arm and checkpoint"
    assert all("bounds nothing from above" in line for line in told)
    assert all("what expert gather and activation cost" in line for line in told)
    answer = text.partition("## What was asked")[0]
    assert answer.count("`skip-experts` makes the token 2") == 3
    assert "`skip-experts` saves" not in answer
    (condition,) = claim["checkpoints"]["inkling-affine"]["conditions"]
    assert (condition["no_bound"], condition["state"]) == ("longer", "fails")
    assert answer.count("no bound since the token is longer") == 2
    assert text.count("no bound since the token is longer") == 3, "and in the answer"


def test_a_token_as_long_as_before_is_no_effect_and_not_called_longer(tmp_path):
    arms, (claim,), text = made(tmp_path, {"skip-experts": 1.001 / 0.62}, [SAVED])
    assert arms["skip-experts"]["against"]["decode_decision"]["effect"] == "no effect"
    assert arms["skip-experts"]["longer"] is None
    (condition,) = claim["checkpoints"]["inkling-affine"]["conditions"]
    assert condition["no_bound"] is None
    assert "**longer**" not in text and "no bound" not in text
    assert "`skip-experts` saves" in text


def test_fewer_experts_may_lengthen_it_too(tmp_path):
    arms, _, text = made(tmp_path, {"top-k-2": 2.0})
    assert arms["top-k-2"]["longer"]["value"] > 0.3
    (line,) = (x for x in text.splitlines() if x.startswith("- `top-k-2` on `qwen3-moe`"))
    assert "what the removed work cost" in line


def test_without_the_block_longer_there_is_no_gain_and_that_is_said(tmp_path):
    """4 ms with the block, 4.8 ms without."""
    arms, (claim,), text = made(tmp_path, {"skip-moe": 2.4, "lm": 0.75}, [GAIN])
    assert arms["lm"]["against"]["gain"] is None and not arms["lm"]["against"]["outdoes"]
    (line,) = (x for x in text.splitlines() if x.startswith("- `skip-moe` on `qwen3-moe`"))
    assert line.endswith("So it gives `lm` no bound of what can be saved.")
    (condition,) = claim["checkpoints"]["qwen3-moe"]["conditions"]
    assert condition["why"] == "not measured: not every round has skip-moe saving time"


def test_a_candidate_faster_than_without_the_block_is_told(tmp_path):
    """4 ms, 2 ms without the block, 1.6 ms of the candidate."""
    arms, (claim,), text = made(tmp_path, {"lm": 0.4}, [GAIN], ["gain.lm"])
    assert arms["lm"]["against"]["gain"]["value"] == pytest.approx(1.2, abs=0.02)
    assert arms["lm"]["against"]["outdoes"] and arms["lm"]["against"]["gain_of"] == "skip-moe"
    (line,) = (x for x in text.splitlines() if "is the faster one, by the rule" in x)
    assert line.startswith("- `lm` on `qwen3-moe` saves 120 % (")
    assert "skipping the block is no bound there" in line
    (condition,) = claim["checkpoints"]["qwen3-moe"]["conditions"]
    assert (condition["no_bound"], condition["state"]) == ("outdone", "holds")
    assert text.count("no bound since the candidate is faster than without the block") == 2


@pytest.mark.parametrize("slow", [0.75, 0.4995])
def test_a_gain_below_or_about_one_stays_a_gain(tmp_path, slow):
    arms, _, text = made(tmp_path, {"lm": slow}, [GAIN])
    assert arms["lm"]["against"]["gain"]["value"] == pytest.approx((1 - slow) * 2, abs=0.02)
    assert arms["lm"]["against"]["outdoes"] is False
    assert "is the faster one, by the rule" not in text and "no bound" not in text
