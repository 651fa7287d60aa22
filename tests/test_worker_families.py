"""Scopes and patches in every family of both packages.

What cannot be seen through the worker's replies is looked at from inside by tiny_probe.py.
"""

import pytest

import tiny
from moescope.runtimes.client import WorkerError
from moescope.worker.modules import TERMS
from tiny import LIMIT_S, MODELS, PROMPT

MOE = [model for model in MODELS if model[1] != "qwen3"]
DENSE = [model for model in MODELS if model[1] == "qwen3"]
SHARED = (
    "dots1",
    "qwen3_next",
    "qwen3_5_moe",
    "nemotron_h",
    "gemma4_text",
    "deepseek_v4",
    "inkling",
)
TOKENS = 4
each_model = pytest.mark.parametrize("model", MODELS, ids="-".join)
each_moe = pytest.mark.parametrize("model", MOE, ids="-".join)
each_dense = pytest.mark.parametrize("model", DENSE, ids="-".join)


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    with tiny.worker(tmp_path_factory.mktemp("log") / "worker.log") as process:
        yield process


@pytest.fixture(scope="module")
def checkpoints(worker, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    return {model: tiny.checkpoint(worker, folder / "-".join(model), *model) for model in MODELS}


@pytest.fixture(scope="module")
def findings(checkpoints):
    found = tiny.probe([(model[0], checkpoints[model]) for model in MODELS])
    return dict(zip(MODELS, found, strict=True))


@pytest.fixture
def load(worker, checkpoints):
    def call(model):
        return worker.ask("load", LIMIT_S, package=model[0], path=str(checkpoints[model]))

    return call


def decode(worker, patches=(), tokens=TOKENS + 1):
    return worker.ask("decode", LIMIT_S, prompt=PROMPT, tokens=tokens, patches=list(patches))


def scopes(worker, patches=(), passes=2, tokens=TOKENS):
    return worker.ask(
        "scopes", LIMIT_S, prompt=PROMPT, tokens=tokens, passes=passes, patches=list(patches)
    )["passes"]


def least(passes, term):
    """Seconds a token; the smallest of the passes, as other programs only add to them."""
    return min(one["terms_s"][term] / one["tokens"] for one in passes)


# What a family is made of


def expected_terms(model):
    terms = {"attention", "norm", "head", "sampler", "other"}
    if model in MOE:
        terms |= {"router", "expert_gather", "activation", "combine"}
    if model[1] in SHARED:
        terms.add("shared_expert")
    return terms


@each_model
def test_scopes_sum_to_the_wall_and_change_nothing(worker, load, model):
    load(model)
    plain = decode(worker)
    for one in scopes(worker):
        assert tuple(one["terms_s"]) == TERMS
        assert one["tokens"] == TOKENS
        assert sum(one["terms_s"].values()) == pytest.approx(one["wall_s"], rel=0.02)
        assert {term for term, seconds in one["terms_s"].items() if seconds} == expected_terms(
            model
        )
        assert one["tokens_sha256"] == plain["tokens_sha256"]
        assert sum(one["modules_s"].values()) <= one["wall_s"] * 1.001
    after = decode(worker)
    assert after["tokens"] == plain["tokens"]


@each_model
def test_delays_are_found_where_they_are(worker, load, model):
    """At each call of a part: its term grows by that, within a tenth, and no other does."""
    layers = len(load(model)["moe_layers"])
    delay = 0.015
    attention = {"nemotron_h": 2, "lfm2_moe": 3, "deepseek_v4": 4}.get(model[1], 2)
    calls = {"router": layers, "expert_gather": layers, "attention": attention}
    plain = scopes(worker, tokens=1)
    for term, count in calls.items():
        if not count:
            continue
        slow = scopes(worker, [f"delay_{term}={delay * 1000:g}ms"], tokens=1)
        added = delay * count
        for other in TERMS:
            expected = added if other == term else 0
            growth = least(slow, other) - least(plain, other)
            assert growth == pytest.approx(expected, abs=0.1 * added), other


@each_moe
def test_modules_are_named_by_their_paths(worker, load, model):
    layers = load(model)["moe_layers"]
    seconds = scopes(worker, passes=1)[0]["modules_s"]
    assert any(path.startswith(layers[0]) for path in seconds)
    assert all(value > 0 for value in seconds.values())


@each_model
def test_nothing_is_left_to_be_computed_at_a_boundary(findings, model):
    """The router's arrays at the experts' entry (weights that the call does not take, too), and
    what attention has put into its cache when it returns."""
    leaks = findings[model]["leaks"]
    assert leaks["in_cache"] == 0
    assert leaks["caches"] > 0
    if model in MOE:
        assert leaks["at_experts"] == 0
        assert leaks["calls"] == {"dots1": 1, "deepseek_v4": 4}.get(model[1], 2)


@each_moe
def test_terms_of_paths(findings, model):
    assert findings[model]["block_terms"] == {
        "block": "combine",
        "block in": "other",
        "switch": "combine",
        "switch in": "router",
        "projection": "expert_gather",
        "activation": "activation",
        "shared": "shared_expert",
        "inside attention": "attention",
        "root": "head",
    }


@each_model
def test_norms_and_heads_are_found(findings, model):
    terms = findings[model]["terms"]
    assert set(terms.values()) >= {"attention", "norm"}
    assert all(term == "norm" for path, term in terms.items() if path.endswith("layernorm"))
    tied = model[1] in ("lfm2_moe", "gemma4_text")
    assert ("head" in terms.values()) == (not tied)
    layers = len({path.partition("layers.")[2].partition(".")[0] for path in terms} - {""})
    assert layers >= 2


# What patches do


@each_moe
def test_skipped_experts_do_not_matter_and_their_router_does(findings, model):
    """With NaN for weights: in the experts only the patch makes the logits finite, and in the
    router the patch does not: routing and combining stay."""
    assert findings[model]["experts"] == [False, True]
    assert findings[model]["router_without_experts"] is False
    assert findings[model]["gathers_skip_experts"] == 0


@each_moe
def test_a_skipped_router_does_not_matter_and_its_experts_do(findings, model):
    found = findings[model]
    assert found["router"] == [False, True]
    assert found["experts_without_router"] is False
    assert all(experts == [0, 1] for experts in found["experts_fixed"])
    assert len(found["experts_fixed"]) == len(found["gathers"])
    # Nothing chooses any more: as many such primitives as without the block at all.
    assert found["choosing"] > found["choosing skip_router"] == found["choosing skip_moe"]


@each_moe
def test_a_skipped_block_does_not_matter(findings, model):
    assert findings[model]["moe"] == [False, True]


@each_model
def test_skipped_attention_does_not_matter(findings, model):
    assert findings[model]["attention"] == [False, True]


@each_moe
def test_top_k_is_the_number_of_experts_gathered(findings, model):
    found = findings[model]
    assert set(found["gathers"]) == {2}
    assert found["gathers_top_k_1"] == [1] * len(found["gathers"])
    assert found["top_k_differs"] is True


@each_moe
def test_a_split_gather_is_more_calls_and_the_same_result(findings, model):
    found = findings[model]
    assert found["gathers_split"] == [1] * (2 * len(found["gathers"]))
    assert found["split_is_same"] is True


@each_model
def test_everything_is_taken_back(findings, model):
    """Classes and attributes of every module, the same arrays: after use, and after an error."""
    restored = findings[model]["restored"]
    assert len(restored) == (7 if model in MOE else 2)
    assert all(restored.values()), restored
    assert findings[model].get("half_refused", True)


@each_moe
def test_what_is_not_applicable(worker, load, model):
    load(model)
    limit = 2 if model[1] == "deepseek_v4" else 8  # its table of the first layers has two columns
    for patch in ("top_k=0", "top_k=2", f"top_k={limit + 1}", "split_gather=2", "split_gather=0"):
        with pytest.raises(WorkerError) as error:
            decode(worker, [patch])
        assert error.value.kind == "not_applicable", patch


@each_dense
def test_a_dense_model_has_no_experts(worker, load, model):
    load(model)
    names = ["skip_experts", "skip_router", "skip_moe", "top_k=1", "split_gather=4"]
    for patch in (*names, "delay_router=1ms", "delay_expert_gather=1ms"):
        with pytest.raises(WorkerError) as error:
            decode(worker, [patch])
        assert error.value.kind == "not_applicable", patch
        with pytest.raises(WorkerError):
            scopes(worker, [patch])


@pytest.mark.parametrize("patch", ["warp", "top_k", "top_k=two", "delay_step=5", "skip_moe=1", ""])
def test_unknown_patches_and_values(worker, load, patch):
    load(MOE[0])
    with pytest.raises(WorkerError) as error:
        decode(worker, [patch])
    assert error.value.kind == "unsupported"


def test_patches_stand_together_and_go_one_by_one(worker, load):
    load(MOE[0])
    plain = decode(worker)
    both = decode(worker, ["top_k=4", "split_gather=3"])
    assert both["tokens"] == decode(worker, ["top_k=4"])["tokens"] != plain["tokens"]
    with pytest.raises(WorkerError):  # top_k is 4 by then, so that splitting by 4 changes nothing
        decode(worker, ["top_k=4", "split_gather=4"])
    assert decode(worker)["tokens"] == plain["tokens"]


@pytest.mark.parametrize("model", [MODELS[1], ("mlx-vlm", "inkling")], ids="-".join)
def test_a_step_can_be_delayed(worker, load, model):
    load(model)
    plain, slow = decode(worker), decode(worker, ["delay_step=20ms"])
    assert slow["tokens"] == plain["tokens"]
    assert all(seconds >= 0.02 for seconds in slow["token_s"])


@pytest.mark.parametrize("arguments", [{"tokens": 0}, {"passes": 0}, {"prompt": []}])
def test_what_scopes_refuse(worker, load, arguments):
    load(MOE[0])
    with pytest.raises(WorkerError) as error:
        worker.ask("scopes", LIMIT_S, **({"prompt": PROMPT, "tokens": 2, "passes": 1} | arguments))
    assert error.value.kind == "failed"


def test_an_undescribed_family_is_not_taken_for_dense(worker, checkpoints, tmp_path):
    """qwen2_moe has experts and no entry: it decodes, its MoE layers are listed, and neither scopes
    nor patches touch it."""
    settings = tiny.config("qwen3_moe") | {
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": 64,
    }
    layout = worker.ask("layout", LIMIT_S, package="mlx-lm", config=settings, quantization=None)
    path = tiny.write(tmp_path / "c", layout)
    loaded = worker.ask("load", LIMIT_S, package="mlx-lm", path=str(path))
    assert loaded["moe_layers"] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert len(decode(worker)["tokens"]) == TOKENS + 1
    for ask in (scopes, lambda worker: decode(worker, ["skip_moe"])):
        with pytest.raises(WorkerError, match="does not describe") as error:
            ask(worker)
        assert error.value.kind == "unsupported"
