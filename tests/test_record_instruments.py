"""Figures side by side are of one instrument, and what is of one pass says so."""

import json
from pathlib import Path

import pytest

from fixture_results import MOE_SHARES, Tree
from moescope.verdict.blocks import alike
from moescope.verdict.quantities import BLOCK

TEMPLATES = Path(__file__).parents[1] / "templates"
WHOLE = sum(MOE_SHARES[term] for term in BLOCK)


def made(tmp_path, method="forced", **changes):
    """A record whose candidate on qwen3-moe was traced otherwise than its base."""
    tree = Tree(tmp_path, kernels=True, slow={"lm": 0.75}).make()
    path = tree.folder("trace/qwen3-moe.lm") / "terms.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"method": method} | changes))
    found = json.loads((tree.analyse() / "analysis.json").read_text())
    return found, (tree.record(TEMPLATES) / "record.md").read_text()


def cells(text, caption, arm="lm"):
    table = text.partition(f"**{caption}")[2].partition("\n\n|")[2].partition("\n\n")[0]
    head, _, *rows = ("|" + table).splitlines()
    (row,) = (row for row in rows if f"`{arm}`" in row and "`qwen3-moe`" in row)
    return dict(zip(*([cell.strip() for cell in line.split("|")] for line in (head, row)),
                    strict=True))  # fmt: skip


def test_two_blocks_are_compared_by_the_same_instrument(tmp_path):
    found, text = made(tmp_path)
    arms = found["checkpoints"]["qwen3-moe"]["arms"]
    one, other, forced = alike(*(arms[name]["kernels"] for name in ("vlm", "lm")))
    assert forced and one == arms["vlm"]["kernels"]["forced_block"]
    assert one["ms"]["value"] == pytest.approx(WHOLE * 1.01) and one["ms"]["n"] == 1
    assert other == arms["lm"]["kernels"]["block"]
    row = cells(text, "Candidates beside their base")
    assert row["its ms/token"].startswith("0.616 → ") and "(forced pass)" in row["its ms/token"]
    assert row["launches of the block"].endswith("(forced pass)")
    assert "they make the candidate's saving look larger" in text, "and which way that leans"


def test_two_traces_of_graphs_are_compared_as_they_are(tmp_path):
    found, text = made(tmp_path, method="ranges")
    arms = found["checkpoints"]["qwen3-moe"]["arms"]
    one, _, forced = alike(*(arms[name]["kernels"] for name in ("vlm", "lm")))
    assert not forced and one == arms["vlm"]["kernels"]["block"] and one["ms"]["n"] == 3
    assert "(forced pass)" not in cells(text, "Candidates beside their base")["its ms/token"]


def test_a_refused_trace_has_launches_and_no_block(tmp_path):
    found, text = made(tmp_path, method="ranges", unclassified=[0.5, 0.5, 0.5])
    assert found["checkpoints"]["qwen3-moe"]["arms"]["lm"]["kernels"]["refused"]
    row = cells(text, "Candidates beside their base")
    assert row["launches/token"] != "–"
    assert row["launches of the block"] == row["its ms/token"] == "–"


def test_a_candidate_s_rate_is_of_a_kernel_trace(tmp_path):
    """Beside kernel traces the instrumented pass's rate would be read as one of theirs."""
    tree = Tree(tmp_path, bandwidth=20e9, slow={"lm": 0.75}).make()
    found = json.loads((tree.analyse() / "analysis.json").read_text())
    rates = found["checkpoints"]["qwen3-moe"]["arms"]["lm"]["ceiling"]["terms"]
    assert rates["expert_gather"]["share"]
    row = cells((tree.record(TEMPLATES) / "record.md").read_text(), "Candidates beside their base")
    assert row["its experts' rate, of the read ceiling"] == "–"


def test_the_share_of_a_forced_pass_s_kernels_is_of_that_pass(tmp_path):
    _, text = made(tmp_path)
    heads = {arm: text.partition(f"**Kernels of `{arm}` on `qwen3-moe`")[2].split("\n")[2]
             for arm in ("lm", "vlm")}  # fmt: skip
    assert "| share of the pass |" in heads["lm"] and "| share of busy |" in heads["vlm"]


def test_what_is_of_one_pass_says_so(tmp_path):
    _, text = made(tmp_path)
    assert "| GPU ms/token, one forced pass | launches/token, one forced pass |" in text
    assert "share in one forced pass | by themselves in one pass, ms/token |" in text
    assert "**Kernels of `lm` on `qwen3-moe`, of one forced pass**" in text
    assert "**Kernels of `vlm` on `qwen3-moe`, medians over the passes that have each**" in text
    assert "**CUDA calls of `vlm` on `qwen3-moe`, in the last profiled pass**" in text
    row = cells(text, "The host's processor time", "vlm")
    assert row["the same, in one traced pass"] == "5.00"
    assert row["graph launches/token, in one pass"] == "16"


def test_phases_of_one_pass_do_not_stand_beside_medians(tmp_path):
    _, text = made(tmp_path)
    assert set(cells(text, "The GPU's time of a token", "vlm")) == {
        "", "checkpoint", "arm", "wall ms/token", "GPU busy", "GPU idle", "busy ÷ wall",
    }  # fmt: skip
    loop = cells(text, "The host's loop beside the GPU, in one pass", "vlm")
    assert loop["encoding, ms/token"] == "1.90" and "wall ms/token" not in loop
