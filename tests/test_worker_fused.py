"""The patch ``fused`` in the worker. Without a GPU the float32 reference stands in for the kernels;
that they are right is tests/kernels' matter."""

import pytest

import tiny
from moescope.runtimes.client import WorkerError
from moescope.study.plan import PATCH_CODE
from moescope.worker.modules import FUSED
from tiny import LIMIT_S, PROMPT

FUSABLE = [
    ("mlx-lm", "qwen3_moe"),
    ("mlx-lm", "dots1"),
    ("mlx-lm", "nemotron_h"),
    ("mlx-vlm", "gemma4_text"),
    ("mlx-vlm", "deepseek_v4"),
    ("mlx-vlm", "inkling"),
]
DENSE = ("mlx-lm", "qwen3")
REFERENCE = ["fused_reference"]


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    with tiny.worker(tmp_path_factory.mktemp("log") / "worker.log") as process:
        yield process


@pytest.fixture(scope="module")
def checkpoints(worker, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    models = [*FUSABLE, DENSE]
    return {model: tiny.checkpoint(worker, folder / "-".join(model), *model) for model in models}


@pytest.fixture
def load(worker, checkpoints):
    def call(model):
        return worker.ask("load", LIMIT_S, package=model[0], path=str(checkpoints[model]))

    return call


def ask(worker, do, patches=(), **arguments):
    return worker.ask(do, LIMIT_S, prompt=PROMPT, patches=list(patches), **arguments)


@pytest.mark.parametrize("model", FUSABLE, ids="-".join)
def test_an_arm_is_fused_and_taken_back(worker, load, model):
    load(model)
    plain = ask(worker, "decode", tokens=6)
    fused = ask(worker, "decode", REFERENCE, tokens=6)
    assert fused["generated_tokens"] == 6 and fused["finite"]
    whole, parts = ask(worker, "graph"), ask(worker, "graph", REFERENCE)
    gathers = lambda graph: sum(  # noqa: E731
        row["count"] for row in graph["operations"] if row["primitive"] == "GatherQMM"
    )
    assert gathers(whole) and not gathers(parts)
    assert ask(worker, "decode", tokens=6)["tokens"] == plain["tokens"]
    assert ask(worker, "graph")["operations"] == whole["operations"]


@pytest.mark.parametrize("model", FUSABLE, ids="-".join)
def test_what_is_fused_is_the_expert_gather(worker, load, model):
    """Router and combine are in the same kernel: only what keeps its own module keeps its term."""
    blocks = load(model)["moe_layers"]
    found = ask(worker, "graph", REFERENCE)["sequence"]
    own = {term for _, path, term in found if path in blocks}
    assert own <= {"expert_gather", "combine"} and "expert_gather" in own
    passes = ask(worker, "scopes", REFERENCE, tokens=3, passes=2)["passes"]
    terms = passes[0]["terms_s"]
    assert -1e-6 < min(1 - sum(p["terms_s"].values()) / p["wall_s"] for p in passes) < 0.02
    assert terms["expert_gather"] > 0 and terms["activation"] == 0


@pytest.mark.parametrize("patch", PATCH_CODE)
def test_a_model_without_experts_is_not_fused(worker, load, patch):
    load(DENSE)
    with pytest.raises(WorkerError) as refused:
        ask(worker, "decode", [patch], tokens=3)
    assert refused.value.kind == "not_applicable"


def test_a_model_that_the_kernels_cannot_take_is_refused_with_the_reason(worker, load):
    load(FUSABLE[0])
    with pytest.raises(WorkerError) as refused:
        ask(worker, "decode", ["fused"], tokens=3)
    assert refused.value.kind == "not_applicable"
    assert refused.value.message == "nothing is fused: activations are neither bfloat16 nor float16"


def test_the_mark_is_the_kernels_own():
    source = (tiny.ROOT / "workflow/moescope/kernels/patch.py").read_text()
    assert f'MARK = "{FUSED}"' in source
