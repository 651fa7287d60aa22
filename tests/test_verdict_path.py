"""The proof of an arm's path where only the forced pass names its kernels."""

import csv
import json

import pytest

from fixture_results import Tree
from moescope.verdict import path

STEPS, LAYERS = 12, 2
GATHER = "gather_qmv_kernel<8, 16, 64, true, false, cutlass::bfloat16_t>"
FUSED = "custom_kernel_moescope_moe_b333f556f0"
# What the forced pass of MLX's own gather holds beside the products.
INDICES = [("copy_g_nd<unsigned int, int, 1, 4>", 4), ("arange<unsigned int, int, 4>", 6)]


def proof(claimed, kernels, term="expert_gather", **more):
    """kernels: (name, launches per token) in the forced pass, beside the indices' helpers."""
    known = {"steps": STEPS, "moe_layers": LAYERS, "experts": [], "uneven": []} | more
    rows = [
        {"kernel": name, "term": of, "launches_per_token": f"{count:.6g}"}
        for of, table in (("expert_gather", INDICES), (term, kernels))
        for name, count in table
    ]
    return path.proof(claimed, {"method": "forced", "path": known}, rows)


@pytest.mark.parametrize(
    ("claimed", "kernels"),
    [
        (["gather_qmv*"], [(GATHER, 6)]),
        (["custom_kernel_moescope_moe*"], [(FUSED, 2)]),
        # Two instances of a template, each of some of the layers.
        (["gather_qmv*"], [(GATHER, 3), (GATHER.replace("64", "32"), 3)]),
        (["*_gate_up*", "*_down*"], [("custom_kernel_moescope_gate_up_1", 2),
                                     ("custom_kernel_moescope_down_2", 2)]),
        # A claim may name a product that is not known otherwise.
        (["gemv_gather*"], [("gemv_gather<float, 4>", 2)]),
    ],
)  # fmt: skip
def test_the_forced_pass_proves_a_claim(claimed, kernels):
    assert proof(claimed, kernels) == {"claimed": claimed, "proved": True, "why": None}


def test_another_product_in_place_of_the_claimed_one_voids():
    found = proof(["custom_kernel_moescope_moe*"], [(GATHER, 6)])
    assert found["proved"] is False
    assert found["why"] == (
        "in the forced pass its experts ran gather_qmv_kernel, not custom_kernel_moescope_moe*"
    )


@pytest.mark.parametrize(
    ("kernels", "more", "why"),
    [
        ([], {}, "no kernel of the experts that is known"),
        ([("gemv_single<float>", 2), ("nvjet_sm90_tst", 2)], {}, "no kernel of the experts"),
        ([(FUSED, 1)], {}, "12 launches of its experts' kernels in 12 tokens of 2 MoE layers"),
        ([(FUSED, 25 / 12)], {}, "25 launches of custom_kernel_moescope_moe_b333f556f0"),
        ([(FUSED, 2), (GATHER, 6)], {}, "gather_qmv_kernel beside what is claimed"),
        ([(FUSED, 2)], {"moe_layers": 0}, "does not say of how many tokens and MoE layers"),
        ([(FUSED, 2)], {"steps": None}, "does not say of how many tokens and MoE layers"),
    ],
)
def test_what_leaves_a_claim_open(kernels, more, why):
    found = proof(["custom_kernel_moescope_moe*"], kernels, **more)
    assert found["proved"] is None and why in found["why"]


def test_helpers_and_other_terms_neither_prove_nor_void():
    claim = ["custom_kernel_moescope_moe*"]
    assert proof(claim, [(GATHER, 6)], term="attention")["proved"] is None
    assert proof(claim, [(FUSED, 2)], term="attention")["proved"] is None
    assert proof(["copy_*"], [])["proved"] is None, "a copy of indices is no product"


def test_without_a_claim_the_forced_pass_voids_nothing():
    nothing = {"claimed": None, "proved": None, "why": None}
    assert proof(None, [(FUSED, 1.5)]) == nothing
    assert path.proof(None, None) == nothing


def test_a_trace_that_names_its_own_kernels_is_not_asked_twice():
    own = {"kernel": "gather_qmv_kernel", "launches": 72, "helper": False}
    assert proof(["gather_qmv*"], [(FUSED, 2)], experts=[own])["proved"] is True
    terms = {"method": "ranges", "path": {"steps": STEPS, "moe_layers": LAYERS, "experts": []}}
    rows = [{"kernel": GATHER, "term": "expert_gather", "launches_per_token": "6"}]
    assert path.proof(["gather_qmv*"], terms, rows)["proved"] is None
    assert path.by_forced(terms, rows, None) == []


# The whole way: from the trace's files to the arm and to the answers.


def fallen_back(tree, kernel, per_token, arm="lm", checkpoint="qwen3-moe"):
    """The arm's trace as it is where owners could not be carried over."""
    folder = tree.folder(f"trace/{checkpoint}.{arm}")
    terms = json.loads((folder / "terms.json").read_text())
    terms["method"] = "forced"
    terms["path"] |= {"experts": [], "uneven": []}
    (folder / "terms.json").write_text(json.dumps(terms))
    (folder / "modules.csv").unlink()
    with open(folder / "kernels.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row["primitives"] = "-"
        if row["term"] == "expert_gather":
            row |= {"kernel": kernel, "launches_per_token": per_token}
    with open(folder / "kernels.csv", "w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def analysed(tree, claimed, **more):
    folder = tree.analyse(experts={"lm": {"qwen3-moe": claimed}}, **more)
    return json.loads((folder / "analysis.json").read_text())


def test_an_arm_is_proved_by_its_forced_pass_and_the_question_answered(tmp_path):
    tree = Tree(tmp_path, kernels=True).make()
    fallen_back(tree, GATHER, 8)
    asked = [{"asks": "which?", "by": ["path"], "arm": "lm", "checkpoints": ["qwen3-moe"]}]
    found = analysed(tree, ["gather_qmv*"], answers=asked)
    arm = found["checkpoints"]["qwen3-moe"]["arms"]["lm"]
    taken = arm["kernels"]["path"]
    assert arm["void"] is None and taken["proved"] is True and taken["by_forced"] is True
    (expert,) = taken["experts"]
    assert expert["kernel"] == "gather_qmv_kernel"
    assert (expert["launches"]["value"], expert["per_layer"]["value"]) == (8, 2)
    assert expert["ms"]["value"] == pytest.approx(0.38)
    assert {file.rpartition("/")[2] for file in expert["launches"]["files"]} == {"kernels.csv"}
    answer = found["answers"][0]["paths"]["qwen3-moe"]
    assert answer["by_forced"] is True and answer["kernels"] == [expert]
    assert not any("the arm claims" in line for line in found["not_measured"])
    other = found["checkpoints"]["qwen3-moe"]["arms"]["vlm"]["kernels"]["path"]
    assert other["by_forced"] is False and len(other["experts"]) == 2


def test_an_arm_is_void_by_its_forced_pass(tmp_path):
    tree = Tree(tmp_path, kernels=True).make()
    fallen_back(tree, GATHER, 8)
    arm = analysed(tree, ["custom_kernel_moescope_moe*"])["checkpoints"]["qwen3-moe"]["arms"]["lm"]
    assert "in the forced pass its experts ran gather_qmv_kernel" in arm["void"]
    assert arm["against"] is None


def test_a_claim_over_an_arm_whose_path_is_open_says_so(tmp_path):
    tree = Tree(tmp_path, kernels=True).make()
    fallen_back(tree, FUSED, 6)
    claim = {"name": "faster", "says": "It is.", "of": "wall", "checkpoints": ["qwen3-moe"],
             "all": [{"quantity": "ratio.lm", "is": ">", "than": 1.0},
                     {"quantity": "ratio.vlm-null", "is": ">", "than": 1.0},
                     {"quantity": "busy", "is": "<", "than": 0.5}]}  # fmt: skip
    of_it = claim | {"name": "of-it", "arm": "lm"}
    of_it["all"] = [{"quantity": name, "is": "<", "than": 0.9}
                    for name in ("busy", "saved.skip-experts")]  # fmt: skip
    found = analysed(tree, ["custom_kernel_moescope_moe*"], claims=[claim, of_it])
    one, other = (
        [entry["unproved"] for entry in told["checkpoints"]["qwen3-moe"]["conditions"]]
        for told in found["claims"]
    )
    assert one == [True, False, False]
    assert other == [True, False], "an intervention's saving is not of the claim's arm"


def test_an_open_claim_is_told_with_its_reason(tmp_path):
    tree = Tree(tmp_path, kernels=True).make()
    fallen_back(tree, FUSED, 6)  # of four layers
    found = analysed(tree, ["custom_kernel_moescope_moe*"])
    assert found["checkpoints"]["qwen3-moe"]["arms"]["lm"]["void"] is None
    (line,) = [line for line in found["not_measured"] if "the arm claims" in line]
    assert "the forced pass shows 48 launches" in line and "lm on qwen3-moe" in line
