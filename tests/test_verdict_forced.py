"""What a trace by the forced pass alone cannot tell, and a fused block that two passes call
differently."""

import csv
import json

import pytest

from fixture_results import ARMS, MOE_SHARES, Tree
from moescope.verdict.quantities import NotMeasuredError, evaluate

UP, DOWN = "custom_kernel_moescope_gate_up_db07", "custom_kernel_moescope_down_0967"


def changed(tree, arm="vlm", **changes):
    path = tree.folder(f"trace/qwen3-moe.{arm}") / "terms.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def analysed(tree):
    return json.loads((tree.analyse() / "analysis.json").read_text())


def why(found, quantity, arm="vlm"):
    with pytest.raises(NotMeasuredError) as raised:
        evaluate(found, "qwen3-moe", quantity, arm)
    return str(raised.value)


def test_what_the_forced_pass_cannot_tell_is_not_called_absent(tmp_path):
    tree = Tree(tmp_path, kernels=True).make()
    terms = {name: {"ms": [share], "launches": [1]} for name, share in MOE_SHARES.items()}
    del terms["router"]
    changed(tree, method="forced", terms=terms)
    found = analysed(tree)
    assert (
        why(found, "synchronisation_ms") == "synchronisation of vlm is not known by the forced pass"
    )
    assert why(found, "gpu_ms.router") == "the term router does not occur in the forced pass of vlm"
    bars = found["checkpoints"]["qwen3-moe"]["arms"]["vlm"]["kernels"]["bars"]
    names = {bar["bar"] for bar in bars}
    assert "kernels without a term" not in names, "there each has one by construction"


def test_a_term_inside_fused_kernels_is_not_called_absent(tmp_path, monkeypatch):
    tree = Tree(tmp_path, kernels=True).make()
    monkeypatch.setitem(ARMS, "lm", ARMS["lm"] | {"patches": ["fused"]})
    terms = json.loads((tree.folder("trace/qwen3-moe.lm") / "terms.json").read_text())["terms"]
    del terms["router"], terms["norm"], terms["synchronisation"]
    changed(tree, "lm", terms=terms)
    found = analysed(tree)
    assert "is inside its fused kernels" in why(found, "gpu_ms.router", "lm")
    assert why(found, "gpu_ms.norm", "lm") == "the term norm does not occur in lm"
    assert "does not take synchronisation apart" in why(found, "synchronisation_ms", "lm")


def test_synchronisation_has_no_share_in_a_forced_pass_that_does_not_name_it(tmp_path):
    terms = analysed(Tree(tmp_path, kernels=True).make())
    terms = terms["checkpoints"]["qwen3-moe"]["arms"]["vlm"]["kernels"]["terms"]
    assert terms["synchronisation"]["forced_share"] is None
    assert terms["norm"]["forced_share"]["value"] > 0


def test_a_question_s_kernels_that_the_forced_pass_does_not_name(tmp_path):
    tree = Tree(tmp_path, kernels=True).make()
    terms = json.loads((tree.folder("trace/qwen3-moe.vlm") / "terms.json").read_text())
    changed(tree, method="forced", path=terms["path"] | {"experts": []})
    asked = [{"asks": "which?", "by": ["path"], "checkpoints": ["qwen3-moe"]}]
    found = json.loads((tree.analyse(answers=asked) / "analysis.json").read_text())
    assert (
        "the forced pass, which alone could tell"
        in (found["answers"][0]["paths"]["qwen3-moe"]["why"])
    )


def test_an_answer_by_the_forced_pass_says_so(tmp_path, root):
    tree = Tree(tmp_path, kernels=True).make()
    changed(tree, method="forced")
    tree.analyse(answers=[{"asks": "how much?", "by": ["gpu_ms.router", "busy"]}])
    text = (tree.record(root / "templates") / "record.md").read_text()
    (line,) = (line for line in text.splitlines() if "| how much? |" in line)
    one, other = line.split("`busy`:")
    assert "(forced pass)" in one.partition("`qwen3-moe` ")[2] and "(forced pass)" not in other


def test_checkpoints_that_a_question_names_are_told_though_unknown(tmp_path, root):
    tree = Tree(tmp_path, kernels=True).make()
    by = {"asks": "how much?", "by": ["gpu_ms.router", "path"]}
    named = by | {"checkpoints": ["qwen3-moe", "qwen3-dense"]}
    tree.analyse(answers=[named, by])
    text = (tree.record(root / "templates") / "record.md").read_text()
    one, other = (line for line in text.splitlines() if "| how much? |" in line)
    assert "`qwen3-dense` not measured (the term router does not occur in vlm)" in one
    assert "`qwen3-dense`: no kernel trace that names them" in one and "not measured" not in other


# A fused block in two launches: the second is the combine in the trace, and not in the forced pass.


def in_two(tmp_path, forced, alone=None):
    tree = Tree(tmp_path, kernels=True).make()
    folder = tree.folder("trace/qwen3-moe.lm")
    with open(folder / "kernels.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row["kernel"] = {"expert_gather": UP, "combine": DOWN}.get(row["term"], row["kernel"])
    with open(folder / "kernels.csv", "w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)

    def entries(terms):
        return {name: {"ms": ms, "launches": 1} for name, ms in terms.items()}

    apart = MOE_SHARES | (alone or {})
    one = apart | {"expert_gather": apart["expert_gather"] + apart["combine"]}
    del one["combine"]
    changed(tree, "lm", alone_terms=entries(apart), forced_terms=entries(one | forced),
            alone_disagreement=0.06, instruments_disagreement=0.06)  # fmt: skip
    arm = analysed(tree)["checkpoints"]["qwen3-moe"]["arms"]["lm"]
    return arm["kernels"], {bar["bar"]: bar for bar in arm["kernels"]["bars"]}


def test_a_block_in_two_launches_explains_its_bars(tmp_path):
    kernels, bars = in_two(tmp_path, {})
    for name in ("graphs' pass against the forced pass", "kernels alone against the forced pass"):
        bar = bars[name]
        assert not bar["met"] and "in two launches" in bar["why"] and "it is met" in bar["why"]
        assert bar["by"][0]["figure"]["value"] < 0.001
    under = {row["kernel"]: row["under"] for row in kernels["path"]["experts"]}
    assert under[DOWN] == "combine", "the path shows the kernel that the trace calls the combine"


def test_what_is_left_of_it_is_what_graphs_do(tmp_path):
    slow = {"attention": 0.4}
    _, bars = in_two(tmp_path, slow, slow)
    bar = bars["graphs' pass against the forced pass"]
    assert "it is not, and the rest is another: by themselves" in bar["why"]
    assert [one["name"] for one in bar["by"]] == [
        "graphs against forced", "alone against forced", "graphs against alone",
    ]  # fmt: skip


def test_what_it_does_not_explain_stays_open(tmp_path):
    _, bars = in_two(tmp_path, {"attention": 0.6})
    assert all(bar["why"] is None for bar in bars.values() if not bar["met"])
