"""The analyse stage on made-up results: figures, void and drifting arms, refusals, claims."""

import json
from pathlib import Path

import pytest

from fixture_results import CLAIMS, MOE_SHARES, Tree, read_rows, write_runs
from moescope.errors import UserError
from moescope.verdict import missing
from moescope.verdict.bound import bound
from moescope.verdict.claims import judge
from moescope.verdict.quantities import BLOCK, PATTERNS, TERMS, NotMeasuredError, evaluate, refused


def analysis(tree: Tree, claims=None) -> dict:
    return json.loads((tree.analyse(claims) / "analysis.json").read_text())


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> dict:
    return analysis(Tree(tmp_path_factory.mktemp("plain")).make())


def arm(found: dict, checkpoint: str, name: str) -> dict:
    return found["checkpoints"][checkpoint]["arms"][name]


def test_rates_are_over_the_forwards_that_were_timed(tmp_path):
    tree = Tree(tmp_path).make()
    found = arm(analysis(tree), "qwen3-moe", "lm")
    rows = [
        row
        for row in read_rows(tree.folder("measure/qwen3-moe") / "runs.jsonl")
        if row["arm"] == "lm" and row["valid"]
    ]
    rates = sorted(row["forwards"] / row["decode_s"] for row in rows)
    assert found["decode_rate"]["value"] == pytest.approx(rates[2], rel=1e-6)
    assert found["decode_rate"]["min"] == pytest.approx(rates[0], rel=1e-6)
    assert found["decode_rate"]["runs"] == [row["id"] for row in rows]
    assert found["decode_rate"]["n"] == 5
    assert found["tool_rate"]["value"] > found["decode_rate"]["value"]
    assert found["build_share"]["value"] == pytest.approx(0.31)


def test_ratios_are_paired_and_decided(plain):
    against = arm(plain, "qwen3-moe", "lm")["against"]
    assert against["decode"]["value"] == pytest.approx(1 / 1.12, rel=0.02)
    assert against["decode_decision"]["effect"] == "effect"
    assert against["decode_decision"]["why"].startswith("slower")
    assert arm(plain, "qwen3-moe", "vlm")["against"] is None
    # Rates overlap, since the host drifts by 40 %; the paired ratio does not care.
    rates = [arm(plain, "qwen3-moe", name)["decode_rate"] for name in ("lm", "vlm")]
    assert rates[0]["max"] > rates[1]["min"]
    assert plain["checkpoints"]["qwen3-moe"]["drift"]["flag"]


def test_an_equal_candidate_has_no_effect(tmp_path):
    found = arm(analysis(Tree(tmp_path, slow={}).make()), "qwen3-moe", "lm")["against"]
    assert found["decode_decision"]["effect"] == "no effect"


def test_a_round_without_its_reference_is_no_pair(tmp_path):
    def lose_one(run):
        if run["arm"] == "vlm" and run["round"] == 3:
            run |= {"valid": False, "why": "disturbed"}

    found = analysis(Tree(tmp_path, edit_run=lose_one).make())
    assert arm(found, "qwen3-moe", "lm")["decode_rate"]["n"] == 5
    assert arm(found, "qwen3-moe", "lm")["against"]["decode"]["n"] == 4
    assert found["checkpoints"]["qwen3-moe"]["noise"]["decode"]["n"] == 4


def test_an_arm_that_slows_down_over_the_rounds_is_flagged(tmp_path):
    def fade(run):
        if run["arm"] == "lm" and run["valid"]:
            run["decode_s"] *= 1 + 0.03 * run["round"]

    claim = {"name": "c", "says": "c", "of": "wall", "checkpoints": ["qwen3-moe"]}
    quantities = ("ratio.lm", "saved.skip-experts")
    claim["all"] = [{"quantity": name, "is": ">", "than": 0} for name in quantities]
    found = analysis(Tree(tmp_path, edit_run=fade).make(), [claim])
    assert arm(found, "qwen3-moe", "lm")["against"]["drifts"]
    assert not arm(found, "qwen3-moe", "skip-experts")["against"]["drifts"]
    conditions = found["claims"][0]["checkpoints"]["qwen3-moe"]["conditions"]
    assert [entry["drifts"] for entry in conditions] == [True, False]


def test_a_void_arm_yields_no_ratio(plain):
    found = arm(plain, "qwen3-dense", "lm")
    assert "repetition" in found["void"]
    assert found["decode_rate"] and found["against"] is None and found["ceiling"] is None
    with pytest.raises(NotMeasuredError, match="void"):
        evaluate(plain, "qwen3-dense", "ratio.lm", "vlm")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"finite": False}, "NaN or Inf"),
        ({"generated_tokens": 20}, "another number of tokens"),
        ({"prompt_tokens": 31}, "prompt tokens"),
    ],
)
def test_what_voids_an_arm(tmp_path, change, why):
    def spoil(run):
        if run["arm"] == "lm" and run["round"] == 1 and run["valid"]:
            run |= change

    found = arm(analysis(Tree(tmp_path, edit_run=spoil).make()), "qwen3-moe", "lm")
    assert why in found["void"] and found["against"] is None


def declared(tree, patterns, **answers):
    folder = tree.analyse(experts={"lm": {"qwen3-moe": patterns}}, **answers)
    return json.loads((folder / "analysis.json").read_text())


def edited(tree, name, change, arm="lm"):
    path = tree.folder(f"trace/qwen3-moe.{arm}") / name
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_a_path_that_the_trace_shows_is_proved(tmp_path):
    found = declared(Tree(tmp_path, kernels=True).make(), ["qmv*", "kernel_expert*"])
    entry = arm(found, "qwen3-moe", "lm")
    assert entry["void"] is None and entry["kernels"]["path"]["proved"] is True
    assert not any("claims" in line for line in found["not_measured"])
    other = arm(found, "qwen3-dense", "lm")["kernels"]["path"]
    assert (other["claimed"], other["proved"]) == (None, None)


def test_a_path_not_taken_voids_an_arm(tmp_path):
    entry = arm(declared(Tree(tmp_path, kernels=True).make(), ["gather_qmv*"]), "qwen3-moe", "lm")
    assert "its experts ran kernel_expert_gather, not gather_qmv*" in entry["void"]
    assert entry["against"] is None


@pytest.mark.parametrize(
    ("launches", "void"),
    [(64, None), (96, None), (72, "72 launches of its experts"), (70, "70 launches of kernel_")],
)
def test_launches_that_are_no_whole_multiple_void_an_arm(tmp_path, launches, void):
    tree = Tree(tmp_path, kernels=True).make()

    def change(terms):
        terms["path"]["experts"][0]["launches"] = launches

    edited(tree, "terms.json", change)
    found = arm(analysis(tree), "qwen3-moe", "lm")["void"]
    assert (void in found) if void else found is None


def test_launches_that_may_have_several_owners_void_nothing(tmp_path):
    tree = Tree(tmp_path, kernels=True).make()

    def change(terms):
        terms["method"] = "table"
        terms["path"]["experts"][0]["launches"] = 70

    edited(tree, "terms.json", change)
    assert arm(analysis(tree), "qwen3-moe", "lm")["void"] is None


def test_two_kernels_may_share_the_layers_but_not_leave_one_out(tmp_path):
    tree = Tree(tmp_path, kernels=True).make()

    def split(terms):
        first, helper = terms["path"]["experts"]
        terms["path"]["experts"] = [
            first | {"launches": 48}, first | {"kernel": "qmm_naive_kernel", "launches": 48}, helper
        ]  # fmt: skip

    edited(tree, "terms.json", split)
    assert arm(analysis(tree), "qwen3-moe", "lm")["void"] is None
    edited(tree, "terms.json", lambda terms: terms["path"]["experts"].pop(1))
    assert "48 launches" in arm(analysis(tree), "qwen3-moe", "lm")["void"]


def test_a_path_that_no_trace_can_prove_is_not_measured(tmp_path):
    found = declared(Tree(tmp_path).make(), ["gather_qmv*"])
    assert arm(found, "qwen3-moe", "lm")["void"] is None
    (line,) = [line for line in found["not_measured"] if "the arm claims" in line]
    assert "gather_qmv*: no trace tells which kernels" in line and "lm on qwen3-moe" in line


def bar(found, name, checkpoint="qwen3-moe"):
    bars = arm(found, checkpoint, "vlm")["kernels"]["bars"]
    return next(entry for entry in bars if entry["bar"].startswith(name))


def test_bars_are_met_or_explained_by_a_measurement(tmp_path):
    tree = Tree(tmp_path, kernels=True).make()
    found = analysis(tree)
    met = {e["bar"]: e["met"] for e in arm(found, "qwen3-moe", "vlm")["kernels"]["bars"]}
    head = arm(found, "qwen3-moe", "vlm")["kernels"]["terms"]["head"]
    assert head["alone_ms"]["value"] == pytest.approx(0.07 * 1.2)
    assert met.pop("graphs' pass against the forced pass") is False
    assert set(met.values()) == {True} and len(met) == 5
    window = bar(found, "window")
    assert window["figure"]["value"] == 0.01 and "synchronisation" in window["why"]
    assert window["by"][0]["figure"]["value"] == 0.095
    graphs = bar(found, "graphs")
    assert "at the same time" in graphs["why"]
    assert [one["figure"]["value"] for one in graphs["by"]] == [0.013, 0.108]
    edited(tree, "terms.json", lambda t: t.update(alone_disagreement=0.2), "vlm")
    found = analysis(tree)
    assert bar(found, "graphs")["why"] is None and not bar(found, "kernels alone")["met"]


NEW = ("all_", "alone_", "overlap_", "cpu_ms", "model_busy_ms", "sum_ms")


def older(tree):
    """The trace of an earlier version: synchronisation is in other, nothing was told apart."""

    def change(terms):
        for key in [key for key in terms if key.startswith(NEW)]:
            del terms[key]
        del terms["terms"]["synchronisation"]
        for way in terms["window"].values():
            way.pop("all_ms")
        terms["window_disagreement"] = 0.09
        for key in ("steps", "moe_layers"):
            del terms["path"][key]
        for row in terms["path"]["experts"]:
            del row["launches"], row["helper"]

    edited(tree, "terms.json", change, "vlm")
    folder = tree.folder("trace/qwen3-moe.vlm")
    table = (folder / "kernels.csv").read_text()
    (folder / "kernels.csv").write_text(table.replace(",synchronisation,", ",other,"))
    (folder / "sweep.csv").unlink()


def test_older_traces_are_read_and_their_missed_bars_explained(tmp_path):
    tree = Tree(tmp_path, kernels=True).make()
    older(tree)
    found = analysis(tree)
    traced = arm(found, "qwen3-moe", "vlm")["kernels"]
    assert traced["cpu"] == {"plain": None, "watched": None, "loop": None}
    assert found["checkpoints"]["qwen3-moe"]["dispatch"] is None
    window = bar(found, "window")
    assert not window["met"] and "did not take" in window["why"]
    assert window["by"][0]["figure"]["value"] == 0.05
    assert arm(found, "qwen3-moe", "vlm")["void"] is None


def test_graphs_and_processor_time_stand_beside_the_wall(tmp_path):
    tree = Tree(tmp_path, kernels=True).make()
    traced = arm(analysis(tree), "qwen3-moe", "vlm")["kernels"]
    counts = {what: figure["value"] for what, figure in traced["graphs"].items()}
    assert counts == {"launches": 16, "updates": 0, "instantiations": 0}
    assert traced["cpu"]["plain"]["value"] == 3.3 and traced["cpu"]["loop"]["value"] == 2.9


def test_a_kernel_that_alone_reads_a_term_s_weights_has_their_bytes(tmp_path):
    tree = Tree(tmp_path, kernels=True).make()
    size = json.loads((tree.folder("inspect/qwen3-moe") / "architecture.json").read_text())
    size = size["bytes"]["per_token"]["expert_gather"]

    def sizes():
        rows = arm(analysis(tree), "qwen3-moe", "vlm")["kernels"]["kernels"]
        return {row["kernel"]: row["bytes"]["value"] for row in rows if row["bytes"]}

    (kernel, found), = sizes().items()  # fmt: skip
    assert "kernel_expert_gather" in kernel and found == size
    path = tree.folder("trace/qwen3-moe.vlm") / "kernels.csv"
    path.write_text(path.read_text() + "vlm,other_product,expert_gather,GatherQMM,4,0.1,,0.1\n")
    assert sizes() == {}, "it is not known which of two reads what"


def test_the_share_of_removed_terms_has_the_range_of_the_passes(tmp_path):
    share = arm(analysis(Tree(tmp_path, kernels=True).make()), "qwen3-moe", "skip-experts")
    share = share["removes"]["gpu_share"]
    assert share["n"] == 3 and share["min"] <= share["value"] <= share["max"]


def test_the_sweep_says_between_which_values_the_kernel_changes(tmp_path):
    found = analysis(Tree(tmp_path, kernels=True).make())["checkpoints"]
    dispatch = found["qwen3-moe"]["dispatch"]
    assert dispatch["changes"] == [
        {"from": "7", "to": "8", "before": ["gather_qmv_kernel"], "after": ["qmm_sm80_kernel"]}
    ]
    assert dispatch["own"] == "8" and dispatch["points"]["10"]["why"].startswith("not applicable")
    assert dispatch["points"]["3"]["kernels"][0]["ms"]["value"] == pytest.approx(0.09)
    assert found["qwen3-dense"]["dispatch"] is None


def test_questions_are_answered_in_their_order(tmp_path):
    asked = [
        {"asks": "which kernel?", "by": ["path", "gpu_ms.router"]},
        {"asks": "dominant?", "claims": ["gather-dominates-gpu"], "checkpoints": ["qwen3-moe"]},
        {"asks": "on Metal?", "not_measured": "no Mac was at hand"},
    ]
    folder = Tree(tmp_path, kernels=True).make().analyse(answers=asked)
    found = json.loads((folder / "analysis.json").read_text())["answers"]
    assert [entry["asks"] for entry in found] == ["which kernel?", "dominant?", "on Metal?"]
    assert found[0]["paths"]["qwen3-moe"]["kernels"][0]["kernel"] == "kernel_expert_gather"
    at = found[0]["by"][0]["checkpoints"]
    assert at["qwen3-moe"]["figure"]["n"] == 3
    assert at["qwen3-dense"] == {"figure": None, "why": "the term router does not occur in vlm"}
    assert found[1]["claims"][0]["verdict"] in ("supported", "refuted", "unresolved")
    assert found[2]["not_measured"] == "no Mac was at hand"


def test_a_void_reference_leaves_no_ratio_at_all(tmp_path):
    found = analysis(Tree(tmp_path, parity_void={("qwen3-moe", "vlm"): "NaN"}).make())
    checkpoint = found["checkpoints"]["qwen3-moe"]
    assert all(entry["against"] is None for entry in checkpoint["arms"].values())
    assert checkpoint["noise"] is None and checkpoint["sweep"] is None


def test_a_void_null_arm_leaves_differences_undecided(tmp_path):
    found = analysis(Tree(tmp_path, parity_void={("qwen3-moe", "vlm-null"): "NaN"}).make())
    decision = arm(found, "qwen3-moe", "lm")["against"]["decode_decision"]
    assert decision["effect"] == "undecided" and "null" in decision["why"]


def test_terms_and_their_conservation(plain, tmp_path):
    scopes = arm(plain, "inkling-affine", "vlm")["scopes"]
    assert scopes["refused"] is None and scopes["largest"] == "expert_gather"
    shares = {term: part["share"]["value"] for term, part in scopes["terms"].items()}
    assert shares == pytest.approx({t: s * 0.998 for t, s in MOE_SHARES.items()}, rel=1e-6)
    assert list(shares) == [term for term in TERMS if term in shares]
    assert scopes["terms"]["expert_gather"]["lead"]["value"] == pytest.approx(0.14 * 0.998)

    lossy = analysis(Tree(tmp_path, scopes_sum=0.97).make())
    refused = arm(lossy, "inkling-affine", "vlm")["scopes"]["refused"]
    assert "0.970" in refused and "0.02" in refused
    with pytest.raises(NotMeasuredError, match="refused"):
        evaluate(lossy, "inkling-affine", "share.router", "vlm")
    assert arm(lossy, "qwen3-moe", "lm")["against"]["decode"], "the timing stands"
    assert any("refused" in line for line in lossy["not_measured"])
    (claim,) = (claim for claim in lossy["claims"] if claim["name"] == "router-is-cheap")
    assert claim["verdict"] == "unresolved"


def test_the_sweep_finds_the_cost_of_an_expert(plain):
    sweep = plain["checkpoints"]["qwen3-moe"]["sweep"]
    assert list(sweep["points"]) == ["1", "2", "4", "8"]
    assert sweep["fixed_share"]["value"] == pytest.approx(0.62, abs=0.02)
    token = arm(plain, "qwen3-moe", "vlm")["token_ms"]["value"]
    assert sweep["expert_cost"]["value"] == pytest.approx(0.38 * token / 8, rel=0.1)
    assert plain["checkpoints"]["qwen3-dense"]["sweep"] is None


def test_interventions_beside_the_other_instruments(plain):
    found = arm(plain, "inkling-affine", "skip-experts")
    assert found["against"]["saved"]["value"] == pytest.approx(0.38, abs=0.02)
    assert found["removes"]["terms"] == ["expert_gather", "activation"]
    assert found["removes"]["scopes_share"]["value"] == pytest.approx(0.43 * 0.998)
    assert arm(plain, "inkling-affine", "top-k-1")["removes"] is None


def test_what_an_arm_saves_of_what_skipping_the_block_saves(tmp_path):
    """qwen3-moe: a token of 4 ms, half of it the blocks; the candidate takes 3 ms."""
    found = analysis(Tree(tmp_path, slow={"lm": 0.75}).make())
    gain = arm(found, "qwen3-moe", "lm")["against"]["gain"]
    assert gain["value"] == pytest.approx(0.5, rel=0.05) and gain["n"] == 5
    assert {"r00-lm", "r00-vlm", "r00-skip-moe"} <= set(gain["runs"])
    assert arm(found, "qwen3-moe", "skip-experts")["against"]["gain"] is None


def test_without_the_skipping_arm_in_a_round_there_is_no_gain(tmp_path):
    def lose(run):
        if run["arm"] == "skip-moe" and run["round"] == 1:
            run |= {"valid": False, "why": "disturbed"}

    found = analysis(Tree(tmp_path, edit_run=lose).make())
    assert arm(found, "qwen3-moe", "lm")["against"]["gain"] is None


def test_a_first_use_says_what_was_compiled_before(plain):
    cold = arm(plain, "qwen3-moe", "vlm")["cold"]
    assert (cold["kept"]["value"], cold["kept"]["unit"]) == (0, "files")
    assert cold["first_use"]["value"] == 1.6


def test_claims(plain):
    verdicts = {claim["name"]: claim["verdict"] for claim in plain["claims"]}
    assert verdicts == {
        "gather-dominates": "unresolved",
        "bound-by-experts": "refuted",
        "router-is-cheap": "supported",
        "gather-dominates-gpu": "unresolved",
    }
    (refuted,) = (claim for claim in plain["claims"] if claim["name"] == "bound-by-experts")
    assert list(refuted["checkpoints"]) == ["inkling-affine", "inkling-nvfp4"], "MoE subjects"
    assert refuted["checkpoints"]["inkling-affine"]["settled_by"] == ["fixed_share"]
    (mixed,) = (claim for claim in plain["claims"] if claim["name"] == "gather-dominates")
    states = [c["state"] for c in mixed["checkpoints"]["inkling-affine"]["conditions"]]
    assert states == ["holds", "fails"]
    assert mixed["checkpoints"]["inkling-affine"]["settled_by"] == []


def test_two_recipes_of_one_model_are_refused_by_name(plain):
    (refused,) = plain["comparability"]["refused"]
    assert refused["pair"] == ["inkling-affine", "inkling-nvfp4"]
    assert "experts-only affine" in refused["why"] and "nvfp4" in refused["why"]
    same = {"model_type": "a", "compare": "x", "recipe": "r"}
    found = missing.comparability(
        {"one": same, "two": dict(same), "three": same | {"compare": "y"}}
    )
    assert found["allowed"] == [["one", "two"]]
    assert [entry["pair"] for entry in found["refused"]] == [["one", "three"], ["two", "three"]]
    unknown = {"model_type": None, "compare": None, "recipe": None}
    assert missing.comparability({"a": unknown, "b": unknown}) == {"allowed": [], "refused": []}


def test_what_was_not_measured_is_said(plain):
    text = "\n".join(plain["not_measured"])
    assert "mlx-lm has no family for it" in text
    assert "not applicable: the model has no routed experts" in text
    assert "void, repetition loop" in text
    assert "not of cuda and metal" in text
    assert "synthetic" in text and "bandwidth" in text
    rejected = plain["checkpoints"]["qwen3-moe"]["rejected"]
    assert rejected == [
        {"run": "r02-vlm", "arm": "vlm", "why": "another process used 1.4 cores during the run"}
    ]


def test_ceilings_need_a_measured_bandwidth(plain, tmp_path):
    whole = arm(plain, "qwen3-moe", "vlm")["ceiling"]["whole"]
    token = arm(plain, "qwen3-moe", "vlm")["token_ms"]["value"]
    assert whole["achieved"]["value"] == pytest.approx(whole["bytes"]["value"] / token * 1e3)
    assert whole["share"] is None
    with pytest.raises(NotMeasuredError, match="bandwidth"):
        evaluate(plain, "qwen3-moe", "ceiling_share.expert_gather", "vlm")
    measured = analysis(Tree(tmp_path, bandwidth=12e9).make())
    found = arm(measured, "qwen3-moe", "vlm")["ceiling"]["whole"]
    for share, rate in ((found["share"], 12e9), (found["copy_share"], 10.8e9)):
        assert share["value"] == pytest.approx(whole["achieved"]["value"] / rate, rel=1e-6)
        assert share["min"] < share["value"] < share["max"]
    assert not any("bandwidth" in line for line in measured["not_measured"])


def test_every_quantity_is_in_the_docs(root):
    text = (root / "docs/traces.md").read_text()
    assert all(f"| `{name}` | {meaning} |" in text for name, meaning in PATTERNS.items())


def test_a_rate_by_the_hosts_clock_settles_no_claim_about_the_gpu(tmp_path):
    """Without a kernel trace a term's rate is of a pass that the host's clock timed."""
    condition = {"quantity": "copy_share.expert_gather", "is": ">", "than": 0.0}
    claim = {"name": "near", "says": "It is near.", "all": [condition]}
    for of, verdict in (("wall", "supported"), ("gpu", "unresolved")):
        tree = Tree(tmp_path / of, bandwidth=12e9).make()
        (found,) = judge([claim | {"of": of, "checkpoints": ["qwen3-moe"]}], analysis(tree))
        assert found["verdict"] == verdict
    (state,) = found["checkpoints"]["qwen3-moe"]["conditions"]
    assert state["figure"] is None and "no kernel trace" in state["why"]


def test_the_block_is_the_sum_of_its_terms_pass_by_pass(tmp_path):
    found = arm(analysis(Tree(tmp_path, kernels=True).make()), "qwen3-moe", "vlm")["kernels"]
    parts = [found["terms"][t] for t in BLOCK if t in found["terms"]]
    assert len(parts) == len(BLOCK)
    total = sum(part["ms"]["value"] for part in parts)
    assert found["block"]["ms"]["value"] == pytest.approx(total, rel=0.02)
    assert found["block"]["launches"]["unit"] == "launches/token"


def test_a_kernel_trace_is_used_where_there_is_one(tmp_path):
    tree = Tree(tmp_path, kernels=True).make()
    found = analysis(tree)
    traced = arm(found, "qwen3-moe", "vlm")
    kernels = traced["kernels"]
    assert kernels["largest"] == "expert_gather"
    assert kernels["terms"]["head"]["ms"]["n"] == 3 and kernels["refused"] is None
    assert kernels["terms"]["head"]["forced_share"]["value"] == pytest.approx(0.07)
    share = pytest.approx(0.07 / 1.05)  # MLX's synchronisation is a part of the busy time
    assert evaluate(found, "qwen3-moe", "gpu_share.head", "vlm")["value"] == share
    lead = evaluate(found, "qwen3-moe", "gpu_lead.expert_gather", "lm")
    assert lead["value"] == pytest.approx(0.14 / 1.05)
    assert evaluate(found, "qwen3-moe", "busy", "vlm")["value"] == pytest.approx(0.35, rel=0.02)
    assert evaluate(found, "qwen3-moe", "launches", "vlm")["value"] == 60
    expert, _ = kernels["path"]["experts"]
    assert expert["ms"]["value"] == pytest.approx(0.38) and expert["per_layer"]["value"] == 2
    assert traced["bound"]["resource"] == "host" and "encoding" in traced["bound"]["why"]
    assert arm(found, "qwen3-moe", "skip-experts")["removes"]["gpu_share"]["value"] > 0.4


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("profiler_cost", [0.2, 0.01, 0.2], "profiler cost 0.200 is above the limit 0.03"),
        ("unclassified", [0.05, 0.05, 0.05], "unclassified 0.050 is above the limit 0.01"),
        ("dropped", 7, "dropped 7 records"),
    ],
)
def test_what_refuses_a_kernel_trace(tmp_path, key, value, why):
    tree = Tree(tmp_path, kernels=True).make()
    path = tree.folder("trace/qwen3-moe.vlm") / "terms.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    found = analysis(tree)
    assert why in arm(found, "qwen3-moe", "vlm")["kernels"]["refused"]
    with pytest.raises(NotMeasuredError, match="refused"):
        evaluate(found, "qwen3-moe", "gpu_share.head", "vlm")
    assert evaluate(found, "qwen3-moe", "launches", "vlm")["value"] == 60, "the counts stand"


def test_one_slow_pass_does_not_refuse_a_trace(tmp_path):
    tree = Tree(tmp_path, kernels=True).make()
    path = tree.folder("trace/qwen3-moe.vlm") / "terms.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"profiler_cost": [0.01, 0.9, 0.01]}))
    assert arm(analysis(tree), "qwen3-moe", "vlm")["kernels"]["refused"] is None


def test_what_the_profiler_costs_the_host_is_shown_and_refuses_nothing(tmp_path):
    tree = Tree(tmp_path, kernels=True).make()
    path = tree.folder("trace/qwen3-moe.vlm") / "terms.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"profiler_wall_cost": [0.5, 0.4]}))
    kernels = arm(analysis(tree), "qwen3-moe", "vlm")["kernels"]
    assert kernels["checks"]["profiler_wall_cost"]["max"] == 0.5 and kernels["refused"] is None


def test_rounds_that_were_never_run_are_named(tmp_path):
    tree = Tree(tmp_path).make()
    path = tree.folder("measure/qwen3-moe") / "environment.json"
    told = {"interrupted": "after 4 of 5 rounds"}
    path.write_text(json.dumps(json.loads(path.read_text()) | told))
    wanted = "All rounds on qwen3-moe: its measurement was interrupted after 4 of 5 rounds."
    assert wanted in analysis(tree)["not_measured"]


def test_a_table_of_kernels_alone_is_enough(tmp_path):
    tree = Tree(tmp_path, kernels=True).make()
    for name in ("terms.json", "calls.csv", "timeline.csv"):
        (tree.folder("trace/qwen3-moe.vlm") / name).unlink()
    kernels = arm(analysis(tree), "qwen3-moe", "vlm")["kernels"]
    assert kernels["terms"]["head"]["share"]["value"] == pytest.approx(0.07 / 1.05)
    assert kernels["busy"] is None and kernels["timeline"] is None


def test_a_command_shows_less(tmp_path):
    """A binary's run: no intervals, no graph building, no tokens, unknown whether finite."""

    def command(run):
        if run["arm"] == "lm" and run["valid"]:
            run |= dict.fromkeys(("token_s", "build_s", "tokens_sha256", "finite", "peak_memory"))

    found = arm(analysis(Tree(tmp_path, edit_run=command).make()), "qwen3-moe", "lm")
    assert found["void"] is None and found["build_ms"] is None and found["peak_memory"] is None
    assert found["same_tokens_every_round"] is None
    assert found["against"]["decode_decision"]["effect"] == "effect"


@pytest.mark.parametrize(
    ("busy", "share", "resource"),
    [(0.35, None, "host"), (0.8, None, "both"), (0.95, 0.7, "memory"), (0.95, 0.2, "kernels")],
)
def test_the_resource_that_bounds(busy, share, resource):
    host = {"ms": {"build": {"value": 1.0}, "encode": {"value": 2.0}, "wait": {"value": 0.1}}}
    ceiling = {"whole": {"share": share and {"value": share}}}
    shares = dict.fromkeys(("value", "min", "max"), busy)
    found = bound({"busy": shares, "host": host}, ceiling)
    assert found["resource"] == resource
    assert bound(None, ceiling) is None


def test_no_valid_run_is_an_error(tmp_path):
    def spoil(run):
        run |= {"valid": False, "why": "disturbed"}

    with pytest.raises(UserError, match="no checkpoint has a valid run"):
        Tree(tmp_path, edit_run=spoil).make().analyse()


def test_altered_runs_are_an_error(tmp_path):
    tree = Tree(tmp_path).make()
    path = tree.folder("measure/qwen3-moe") / "runs.jsonl"
    whole = path.read_text()
    path.write_text(whole.replace('"load1":0.8', '"load1":0.1', 1))
    with pytest.raises(UserError, match="altered"):
        tree.analyse()
    path.write_text("".join(whole.splitlines(keepends=True)[:-1]))
    with pytest.raises(UserError, match="trailer is missing"):
        tree.analyse()
    rows = read_rows(path.with_name("runs.jsonl")) if path.write_text(whole) else []
    write_runs(path, [*rows, rows[0]])
    with pytest.raises(UserError, match="more than once"):
        tree.analyse()


def test_the_same_data_give_the_same_bytes(tmp_path):
    one = Tree(tmp_path / "one").make().analyse() / "analysis.json"
    two = Tree(tmp_path / "two").make().analyse() / "analysis.json"
    assert one.read_bytes() == two.read_bytes()
    assert str(tmp_path) not in one.read_text()


def fail(tree: Tree, checkpoint: str, arm: str) -> None:
    """As if the arm had died in the last round but one."""
    path = tree.folder(f"measure/{checkpoint}") / "environment.json"
    failed = {arm: {"kind": "out_of_memory", "why": "decode: the worker ended with 137"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"failed": failed}))


FAILED = "failed (out of memory): decode: the worker ended with 137"


def test_an_arm_that_failed_is_absent_and_the_others_stand(tmp_path):
    tree = Tree(tmp_path).make()
    fail(tree, "qwen3-moe", "lm")
    found = analysis(tree)
    gone = arm(found, "qwen3-moe", "lm")
    assert gone["absent"] == FAILED and gone["decode_rate"] is None and gone["against"] is None
    assert arm(found, "qwen3-moe", "skip-experts")["against"]["decode"]["n"] == 5
    assert any(FAILED in line and "lm on qwen3-moe" in line for line in found["not_measured"])


def test_without_its_reference_a_checkpoint_has_rates_and_no_ratios(tmp_path):
    tree = Tree(tmp_path).make()
    fail(tree, "qwen3-moe", "vlm")
    found = analysis(tree)
    subject = found["checkpoints"]["qwen3-moe"]
    assert subject["arms"]["vlm"]["absent"] == FAILED
    assert subject["noise"] is None and subject["sweep"] is None and subject["drift"] is None
    for name in ("lm", "vlm-null"):
        assert subject["arms"][name]["decode_rate"]["n"] == 5
        assert subject["arms"][name]["against"] is None
    verdicts = {claim["name"]: claim["verdict"] for claim in found["claims"]}
    assert set(verdicts.values()) <= {"supported", "refuted", "unresolved"}


def test_processor_seconds_are_a_figure_where_runs_have_them(tmp_path):
    def spend(run):
        if run["arm"] == "lm":
            run["cpu_s"] = run["forwards"] * 0.004

    found = analysis(Tree(tmp_path, edit_run=spend).make())
    assert arm(found, "qwen3-moe", "lm")["cpu_ms"]["value"] == pytest.approx(4.0)
    assert arm(found, "qwen3-moe", "lm")["cpu_ms"]["unit"] == "ms/token"
    assert arm(found, "qwen3-moe", "vlm")["cpu_ms"] is None


def test_every_pattern_exists_and_can_be_evaluated(tmp_path):
    def timed(run):
        run["cpu_s"] = run["decode_s"] if run["valid"] else None

    found = analysis(Tree(tmp_path, kernels=True, bandwidth=12e9, edit_run=timed).make())
    names = {"<term>": "attention", "<arm>": "lm", "<intervention>": "skip-experts"}
    names["<candidate>"] = "lm"
    for pattern in PATTERNS:
        name = pattern
        for placeholder, value in names.items():
            name = name.replace(placeholder, value)
        assert refused(name, ROLES) is None, name
        assert evaluate(found, "qwen3-moe", name, "vlm")["files"], name


ROLES = {"vlm": "reference", "lm": "candidate", "skip-experts": "intervention"}


@pytest.mark.parametrize(
    "name",
    [
        "share.",
        "share.gather",
        "lead",
        "saved.lm",
        "ratio.none",
        "operations",
        "speed",
        "share.<term>",
    ],
)
def test_quantities_that_do_not_exist(name):
    assert refused(name, ROLES)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gain.vlm", "'gain.vlm' is no quantity of this study; allowed after 'gain.': lm"),
        ("gain.skip-experts", "allowed after 'gain.': lm"),
        ("saved.lm", "allowed after 'saved.': skip-experts"),
        ("ratio.none", "allowed after 'ratio.': vlm, lm, skip-experts"),
        ("share.gather", "allowed after 'share.': router, expert_gather, "),
        ("operations", "allowed: operations.total, operations.astype"),
        ("speed", "'speed' is no quantity; allowed: share.<term>, "),
    ],
)
def test_what_is_allowed_in_place_of_a_quantity(name, says):
    assert says in refused(name, ROLES)
    assert "it has no candidate" in refused("gain.lm", {"lm": "reference"})


def test_quantities_stay_light():
    """The validator imports them before every command."""
    source = Path(__file__).parents[1] / "workflow/moescope/verdict/quantities.py"
    imports = [
        line for line in source.read_text().splitlines() if line.startswith(("import", "from"))
    ]
    assert all(line.split()[1] in ("collections.abc", "typing") for line in imports)


def test_claims_of_the_fixture_use_quantities_that_exist():
    names = [condition["quantity"] for claim in CLAIMS for condition in claim["all"]]
    assert not any(refused(name, ROLES) for name in names)


def test_the_worker_and_the_verdict_name_the_same_terms():
    """The worker imports nothing of the controller, so both carry the list."""
    from moescope.worker import modules

    assert (*modules.TERMS, "host_gap") == TERMS


def test_terms_of_the_forced_pass_have_no_second_opinion(tmp_path):
    tree = Tree(tmp_path, kernels=True).make()
    fell_back = {"method": "forced", "instruments_disagreement": 0.0, "alone_disagreement": None}
    edited(tree, "terms.json", lambda terms: terms.update(fell_back), "vlm")
    found = analysis(tree)
    kernels = arm(found, "qwen3-moe", "vlm")["kernels"]
    assert not any("forced pass" in entry["bar"] for entry in kernels["bars"])
    assert kernels["checks"]["instruments_disagreement"] is None
    assert kernels["terms"]["head"]["forced_share"] is None
    claim = {"name": "g", "says": "g", "of": "gpu", "checkpoints": ["qwen3-moe"]}
    claim["all"] = [{"quantity": "gpu_lead.expert_gather", "is": ">", "than": 0}]
    (judged,) = analysis(tree, [claim])["claims"]
    (condition,) = judged["checkpoints"]["qwen3-moe"]["conditions"]
    assert condition["forced"] is True and condition["figure"] is not None
    assert any(
        line.startswith("The GPU's terms of vlm on qwen3-moe as they run in CUDA graphs")
        for line in found["not_measured"]
    )


def test_a_share_of_the_gpu_s_time_is_told_without_synchronisation_too(tmp_path):
    claim = {
        "name": "head",
        "says": "The head is small.",
        "of": "gpu",
        "checkpoints": ["qwen3-moe"],
        "all": [{"quantity": "gpu_share.head", "is": "<", "than": 0.5}],
    }
    found = analysis(Tree(tmp_path, kernels=True).make(), [claim])
    (condition,) = found["claims"][0]["checkpoints"]["qwen3-moe"]["conditions"]
    assert condition["figure"]["value"] == pytest.approx(0.07 / 1.05)
    assert condition["of_work"]["value"] == pytest.approx(0.07)


@pytest.mark.parametrize(
    ("changes", "holds"),
    [
        ({}, None),  # a term more than the busy time says: it was not told apart
        ({"model_busy_ms": None}, None),
        ({"method": "forced"}, None),
        ({"model_busy_ms": "busy"}, True),
        ({"model_busy_ms": "busy", "profiler_cost": [0.5]}, None),  # the attribution is refused
    ],
)
def test_a_trace_that_found_no_synchronisation_says_zero(tmp_path, changes, holds):
    def none(terms):
        del terms["terms"]["synchronisation"]
        terms.update(changes)
        if changes.get("model_busy_ms") == "busy":
            terms["model_busy_ms"] = terms["busy_ms"]

    claim = {
        "name": "one-stream",
        "says": "Nothing is synchronised.",
        "of": "gpu",
        "checkpoints": ["qwen3-moe"],
        "all": [{"quantity": "synchronisation_ms", "is": "<", "than": 0.001}],
    }
    tree = Tree(tmp_path, kernels=True).make()
    edited(tree, "terms.json", none, "vlm")
    (condition,) = analysis(tree, [claim])["claims"][0]["checkpoints"]["qwen3-moe"]["conditions"]
    assert (condition["figure"] or {}).get("value") == (0.0 if holds else None)


def test_a_missed_bar_without_explanation_and_a_filled_cache_are_named(tmp_path):
    tree = Tree(tmp_path, kernels=True).make()
    edited(tree, "terms.json", lambda terms: terms.update(alone_disagreement=0.2), "vlm")
    warm = tree.folder("warmup/qwen3-moe.vlm") / "warmup.json"
    content = json.loads(warm.read_text())
    warm.write_text(json.dumps(content | {"cache_before": {"files": 144, "bytes": 1}}))
    lines = analysis(tree)["not_measured"]
    assert any("Why vlm on qwen3-moe misses the bar «kernels alone" in line for line in lines)
    assert any("nothing compiled before (vlm on qwen3-moe)" in line for line in lines)
