"""The measuring stages over the real worker: a tiny mixture of experts, and a dense model."""

import os
from pathlib import Path

import pytest

import stages
import tiny
from moescope.checkpoints import materialise
from moescope.files import read_json
from moescope.measure import stage as measure
from moescope.runtimes import environments
from moescope.runtimes.client import Worker
from moescope.runtimes.environments import Interpreter
from moescope.trace import stage as trace
from moescope.verdict import parity
from moescope.verdict.results import read_runs

LIMITS = {"decided_gap": 2.0, "loop_period": 8, "loop_tokens": 24}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    with Worker(tiny.arm_python(), dict(os.environ), tiny.ROOT) as worker:
        for family in ("qwen3", "qwen3_moe"):
            layout = worker.ask(
                "layout", 60, package="mlx-lm", config=tiny.config(family), quantization=None
            )
            tiny.write(folder / family, layout)
    return folder


def prepared(patch, folder, model, stage, params):
    """A task below a folder over the real worker and one of the models."""
    stages.stand_in(patch)
    patch.setenv("MOESCOPE_LOCK_DIR", str(folder))
    (folder / "root").mkdir()
    (folder / "root" / "workflow").symlink_to(tiny.ROOT / "workflow")
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    patch.setattr(environments, "ensure", lambda *_: Interpreter(Path(tiny.arm_python()), env))
    patch.setattr(materialise, "ensure", lambda *_: model)
    return stages.make(folder, stage, "tiny", params, kind="synthetic")


@pytest.fixture
def make(models, tmp_path, monkeypatch):
    stages.little_bandwidth(monkeypatch)

    def call(family, stage, params):
        folder = tmp_path / stage
        folder.mkdir()
        return prepared(monkeypatch, folder, models / family, stage, params)

    return call


ARMS = (
    stages.arm("ref", "reference"),
    stages.arm("again", "null"),
    stages.arm("skip", "intervention", ["skip_experts"]),
    stages.arm("slow", "intervention", ["delay_step=20ms"]),
)


@pytest.fixture(scope="module")
def whole(models, tmp_path_factory):
    """The folder of a mixture of experts' measurement in whole rounds."""
    with pytest.MonkeyPatch.context() as patch:
        params = stages.measure_params(ARMS, count=3)
        folder = tmp_path_factory.mktemp("whole")
        task = prepared(patch, folder, models / "qwen3_moe", "measure", params)
        measure.run(task)
    return task.out


def test_a_mixture_of_experts_is_measured(whole):
    rows = read_runs(whole / "runs.jsonl")
    assert len(rows) == 12
    assert all(row["valid"] for row in rows), [row["why"] for row in rows]
    tokens = {row["arm"]: row["tokens_sha256"] for row in rows}
    assert tokens["ref"] == tokens["again"] == tokens["slow"] != tokens["skip"]
    assert not any(row.get("flags") for row in rows)
    per_token = {arm: [r["decode_s"] / 5 for r in rows if r["arm"] == arm] for arm in tokens}
    assert min(per_token["slow"]) > 0.02 > min(per_token["ref"])
    environment = read_json(whole / "environment.json")
    assert environment["bandwidth"]["read"]["value"] > 1e8
    (process, _) = environment["processes"]
    assert process["versions"]["mlx"] and len(process["library_sha256"]) == 64


def test_sliced_rounds_give_the_same_tokens(make, whole):
    params = stages.measure_params(ARMS, count=3)
    params["rounds"]["slices"] = 2
    task = make("qwen3_moe", "measure", params)
    measure.run(task)
    rows = read_runs(task.out / "runs.jsonl")
    assert len(rows) == 12 and all(row["valid"] for row in rows), [row["why"] for row in rows]
    assert all(row["slices"] == 2 and row["forwards"] == 3 for row in rows)
    tokens = {row["arm"]: row["tokens_sha256"] for row in read_runs(whole / "runs.jsonl")}
    assert {row["arm"]: row["tokens_sha256"] for row in rows} == tokens
    assert not any(row.get("flags") for row in rows)
    slow = [row["decode_s"] / row["forwards"] for row in rows if row["arm"] == "slow"]
    assert min(slow) > 0.02
    assert len({row["process"]["index"] for row in rows}) == len(ARMS)


def test_a_dense_model_has_no_experts_to_skip(make):
    task = make("qwen3", "measure", stages.measure_params(ARMS[:3], count=3))
    measure.run(task)
    assert {row["arm"] for row in read_runs(task.out / "runs.jsonl")} == {"ref", "again"}
    assert list(read_json(task.out / "environment.json")["not_applicable"]) == ["skip"]


def test_its_token_is_traced_and_its_tokens_are_right(make):
    params = {
        "checkpoint": "tiny",
        "arm": ARMS[0],
        "shape": stages.SHAPE,
        "trace": {"passes": 2, "tokens": 4},
        "limits": {"conservation": 0.02},
        "guard": stages.GUARD,
        "machine": stages.MACHINE,
    }
    task = make("qwen3_moe", "trace", params)
    trace.run(task)
    found = read_json(task.out / "trace.json", "moescope/trace/1")
    assert found["instruments"] == ["scopes", "graph"]
    assert found["same_tokens"] is True
    assert found["operations"]["gather"] == 3 * found["moe_layers"] == 6
    scopes = read_json(task.out / "scopes.json")
    lost = [abs(1 - sum(p["terms_s"].values()) / p["wall_s"]) for p in scopes["passes"]]
    assert min(lost) < 0.02 and found["conservation"]["worst"] == pytest.approx(max(lost))
    assert scopes["passes"][0]["terms_s"]["expert_gather"] > 0
    assert scopes["plain_token_s"] > 0

    arms = {arm["name"]: arm for arm in ARMS[:2]}
    params = {"arms": arms, "shape": stages.SHAPE, "limits": LIMITS, "machine": stages.MACHINE}
    task = make("qwen3_moe", "parity", params)
    parity.run(task)
    again = read_json(task.out / "parity.json")["arms"]["again"]
    assert again["greedy"]["identical"] and again["forced"]["max_abs_logit"] == 0
    assert again["forced"]["perplexity_ratio"] == 1 and again["void"] is None
