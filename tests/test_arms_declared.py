"""What a study declares beyond patches: arms that change their environment alone, the kernels that
an arm's experts are to run, the questions that its record answers."""

import copy
import json

import pytest

import fixture_results
import stages
from fixture_results import Tree
from moescope.errors import UserError
from moescope.measure import stage as measure
from moescope.study.load import load, read_yaml
from moescope.study.plan import Plan
from moescope.study.schema import Machine
from moescope.verdict.results import read_runs

CUDA = Machine(name="a-gpu", backend="cuda")
OFF = {"MLX_USE_CUDA_GRAPHS": "0"}


@pytest.fixture
def study(root):
    return copy.deepcopy(read_yaml(root / "config.yaml"))


def plan(config, root, machine=CUDA):
    return Plan(load(config, "config.yaml", root), machine, root)


def reference(config):
    return next(arm for arm in config["arms"].values() if arm["role"] == "reference")


def with_off(config):
    arm = {"runtime": reference(config)["runtime"], "role": "intervention", "env": OFF}
    config["arms"]["graphs-off"] = arm
    config["claims"] = [
        {"name": "graphs-help", "says": "Without CUDA graphs the token is slower.", "of": "wall",
         "all": [{"quantity": "saved.graphs-off", "is": "<", "than": 0}]},
    ]  # fmt: skip
    return config


def test_an_arm_of_environment_alone_is_planned_and_a_claim_names_it(study, root):
    found = plan(with_off(study), root)
    name = next(iter(study["checkpoints"]))
    params = found.job("measure", name).params["arms"]["graphs-off"]
    assert params["env"] == OFF and params["patches"] == []
    names = {job.name for job in found}
    # Measured beside its arm: neither warmed up alone nor traced.
    assert f"trace/{name}.graphs-off" not in names and f"warmup/{name}.graphs-off" not in names
    assert "graphs-off" not in found.job("parity", name).params["arms"]


def test_an_arm_of_environment_alone_runs_in_a_process_of_its_own(tmp_path, monkeypatch):
    stages.stand_in(monkeypatch)
    monkeypatch.setenv("MOESCOPE_LOCK_DIR", str(tmp_path))
    arms = (
        stages.arm("ref", "reference"),
        stages.arm("again", "null"),
        stages.arm("harmless", "intervention", nothing="1"),
        stages.arm("skip", "intervention", ["skip_experts"]),
    )
    task = stages.make(tmp_path, "measure", "tiny", stages.measure_params(arms, 3))
    measure.run(task)
    runs = [run for run in read_runs(task.out / "runs.jsonl") if run["valid"]]
    process = {run["arm"]: run["process"]["index"] for run in runs}
    assert sum(run["arm"] == "harmless" for run in runs) == 3
    assert process["harmless"] not in (process["ref"], process["again"])
    assert process["skip"] == process["ref"], "a patch needs no process of its own"
    (env,) = {json.dumps(run["env"]) for run in runs if run["arm"] == "harmless"}
    assert json.loads(env) == {"FAKE_NOTHING": "1"}


def test_what_the_environment_alone_changes_is_analysed_and_shown(tmp_path, monkeypatch, root):
    arm = fixture_results.ARMS["skip-experts"] | {"name": "graphs-off", "patches": [], "env": OFF}
    monkeypatch.setitem(fixture_results.ARMS, "graphs-off", arm)
    tree = Tree(tmp_path, kernels=True, slow={"graphs-off": 1.5}).make()
    claim = {"name": "graphs-help", "says": "Graphs help.", "of": "wall",
             "all": [{"quantity": "saved.graphs-off", "is": "<", "than": 0.0}]}  # fmt: skip
    found = json.loads((tree.analyse([claim]) / "analysis.json").read_text())
    entry = found["checkpoints"]["qwen3-moe"]["arms"]["graphs-off"]
    assert entry["against"]["base"] == "vlm" and entry["removes"] is None
    assert entry["against"]["saved"]["value"] == pytest.approx(-0.5, rel=0.1)
    assert found["claims"][0]["verdict"] == "supported"
    text = (tree.record(root / "templates") / "record.md").read_text()
    row = next(
        line for line in text.splitlines() if line.startswith("| `qwen3-moe` | `graphs-off`")
    )
    assert "MLX_USE_CUDA_GRAPHS=0" in row and "**slower**" in row


def test_declared_kernels_are_judged_and_change_no_measurement(study, root):
    before = {job.name: job.key for job in plan(study, root)}
    reference(study)["experts"] = "gather_qmv*"
    found = plan(study, root)
    moved = {job.name for job in found if before[job.name] != job.key}
    assert {name.split("/")[0] for name in moved} == {"analyse", "record"}
    (arms,) = (job.params["arms"] for job in found.stage("analyse"))
    declared = [arm["experts"] for arm in arms.values() if "experts" in arm]
    assert declared == [{name: ["gather_qmv*"] for name in study["checkpoints"]}]
    first = next(iter(study["checkpoints"]))
    reference(study)["experts"] = {first: ["qmm*", "gather_qmv*"]}
    (arms,) = (job.params["arms"] for job in plan(study, root).stage("analyse"))
    declared = [arm["experts"] for arm in arms.values() if "experts" in arm]
    assert declared == [{first: ["qmm*", "gather_qmv*"]}]


def test_the_sweep_of_dispatch_can_be_left_out(study, root):
    name = next(job.subject for job in plan(study, root).stage("trace"))
    assert plan(study, root).job("trace", name).params["trace"]["sweep"] is True
    study["trace"] = {**study.get("trace", {}), "sweep": False}
    assert plan(study, root).job("trace", name).params["trace"]["sweep"] is False


ASKED = [
    {"asks": "Which kernel do the experts take?", "by": ["path", "gpu_ms.router"]},
    {"asks": "And on Metal?", "not_measured": "no Mac was at hand"},
]


def test_questions_join_the_analysis_and_nothing_else(study, root):
    before = {job.name: job.key for job in plan(study, root)}
    study["answers"] = ASKED
    found = plan(study, root)
    moved = {job.name.split("/")[0] for job in found if before[job.name] != job.key}
    assert moved == {"analyse", "record"}
    (job,) = found.stage("analyse")
    assert [entry["asks"] for entry in job.params["answers"]] == [a["asks"] for a in ASKED]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: s.update(answers=[{"asks": "x"}]), "must be answered by quantities or claims"),
        (lambda s: s.update(answers=[{"asks": "x", "by": ["speed"]}]), "'speed' is no quantity"),
        (lambda s: s.update(answers=[{"asks": "x", "claims": ["y"]}]), "'y' is no claim"),
        (
            lambda s: s.update(answers=[{"asks": "x", "by": ["path"], "checkpoints": ["z"]}]),
            "'z' is no checkpoint",
        ),
        (
            lambda s: next(a for a in s["arms"].values() if a["role"] == "intervention").update(
                experts="gather*"
            ),
            "with the role intervention is not traced",
        ),
        (lambda s: reference(s).update(experts={"z": "gather*"}), "'z' is no checkpoint"),
    ],
)
def test_a_declaration_that_means_nothing_is_refused(study, root, change, says):
    change(study)
    with pytest.raises(UserError, match=says):
        load(study, "config.yaml", root)


def test_a_record_answers_in_order_and_shows_proof_bars_and_cliff(tmp_path, root):
    tree = Tree(tmp_path, kernels=True).make()
    tree.analyse(
        answers=[*ASKED, {"asks": "Dominant?", "claims": ["gather-dominates-gpu"]}],
        experts={"vlm": {"qwen3-moe": ["kernel_expert*"]}, "lm": {"qwen3-moe": ["qmv*"]}},
    )
    folder = tree.record(root / "templates")
    text = (folder / "record.md").read_text()
    asked = [line for line in text.splitlines() if line.startswith(("| 1 |", "| 2 |", "| 3 |"))]
    assert len(asked) == 3 and "`kernel_expert_gather` 8 launches/token" in asked[0]
    assert "not measured: no Mac was at hand" in asked[1]
    assert "The expert gather is the largest part of the GPU's busy time. **" in asked[2]
    assert "between top_k 7 and 8 the kernel changes" in text
    assert "| 8 (the model's) | `qmm_sm80_kernel` |" in text
    assert "`vlm` on `qwen3-moe` is to run `kernel_expert*`: proved." in text
    assert "`lm` on `qwen3-moe` is to run `qmv*`: **not taken**" in text
    assert "~~" in text, "the speed of the arm that is void is struck out"
    assert "graphs' pass against the forced pass | 5 % | 11.2 % | **not met** |" in text
    assert "What the rule finds at this noise, in 40 experiments of 5 rounds" in text
    html = (folder / "record.html").read_text()
    assert "What was asked, in order" in html and "no Mac was at hand" in html
