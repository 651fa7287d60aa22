"""Scopes and patches in every family of both packages.

What cannot be seen through the worker's replies is looked at from inside by tiny_probe.py.
"""

from functools import cache

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
TIED = ("lfm2_moe", "gemma4_text")
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
    """Of each model, made when it is first asked for."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return cache(lambda model: tiny.checkpoint(worker, folder / "-".join(model), *model))


@pytest.fixture(scope="module")
def findings(checkpoints):
    found = tiny.probe([(model[0], checkpoints(model)) for model in MODELS])
    return dict(zip(MODELS, found, strict=True))


@pytest.fixture
def load(worker, checkpoints):
    def call(model):
        return worker.ask("load", LIMIT_S, package=model[0], path=str(checkpoints(model)))

    return call


def decode(worker, patches=(), tokens=TOKENS + 1):
    return worker.ask("decode", LIMIT_S, prompt=PROMPT, tokens=tokens, patches=list(patches))


def scopes(worker, patches=(), passes=2, tokens=TOKENS):
    return worker.ask(
        "scopes", LIMIT_S, prompt=PROMPT, tokens=tokens, passes=passes, patches=list(patches)
    )["passes"]


def lost(one):
    """The share of a pass's time that no term has."""
    return 1 - sum(one["terms_s"].values()) / one["wall_s"]


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
    passes = scopes(worker)
    # The best: whoever gets in between the two clocks' first looks adds to one of them only.
    assert min(lost(one) for one in passes) < 0.02
    for one in passes:
        assert tuple(one["terms_s"]) == TERMS
        assert one["tokens"] == TOKENS
        assert lost(one) > -1e-6
        assert {term for term, seconds in one["terms_s"].items() if seconds} == expected_terms(
            model
        )
        assert one["tokens_sha256"] == plain["tokens_sha256"]
        assert sum(one["modules_s"].values()) <= one["wall_s"] * 1.001
    after = decode(worker)
    assert after["tokens"] == plain["tokens"]


@each_model
def test_delays_are_found_where_they_are(findings, model):
    """In a time in which nothing but sleeping takes any: the term of a delayed part grows by as
    many delays as the part has calls, and no other term grows."""
    layers = {"qwen3": 0, "dots1": 1, "deepseek_v4": 4}.get(model[1], 2)
    attention = {"lfm2_moe": 3, "deepseek_v4": 4}.get(model[1], 2)
    expected = {"attention": {"attention": attention}}
    if layers:
        expected |= {"router": {"router": layers}, "expert_gather": {"expert_gather": layers}}
    assert findings[model]["delays"] == expected


@pytest.mark.alone
@pytest.mark.parametrize("model", [MODELS[1], ("mlx-vlm", "inkling")], ids="-".join)
def test_a_real_delay_is_found_within_a_tenth(worker, load, model):
    """More passes are taken while other programs get in between; they only add time."""
    layers = len(load(model)["moe_layers"])
    delay, plain = 0.05, []
    for term in ("router", "expert_gather", "attention"):
        slow = []
        for _ in range(30):
            plain += scopes(worker, tokens=1, passes=1)
            slow += scopes(worker, [f"delay_{term}={delay * 1000:g}ms"], tokens=1, passes=1)
            growth = least(slow, term) - least(plain, term)
            if growth == pytest.approx(delay * layers, rel=0.1):
                break
        assert growth == pytest.approx(delay * layers, rel=0.1)


@each_moe
def test_modules_are_named_by_their_paths(worker, load, model):
    layers = load(model)["moe_layers"]
    seconds = scopes(worker, passes=1)[0]["modules_s"]
    assert any(path.startswith(layers[0]) for path in seconds)
    assert all(value > 0 for value in seconds.values())


@each_model
def test_nothing_is_left_to_be_computed_at_a_boundary(findings, model):
    """The router's arrays at the experts' entry (weights that the call does not take, too), what
    attention has put into its cache when it returns, every part's output, every cache at last."""
    leaks = findings[model]["leaks"]
    assert leaks["in_cache"] == leaks["outputs"] == leaks["after_step"] == 0
    assert leaks["caches"] > 0
    if model in MOE:
        assert leaks["at_experts"] == 0
        assert leaks["calls"] == {"dots1": 1, "deepseek_v4": 4}.get(model[1], 2)


@each_model
def test_the_clock_is_on_the_right_term(findings, model):
    """Just before and after each kind of call; the same for every family."""
    expected = {"before attention": ["other"], "after attention": ["other"]}
    if model[1] not in TIED:
        expected |= {"before head": ["other"], "after head": ["head"]}
    if model in MOE:
        expected |= {
            "before block": ["other"],
            "before switch": ["router"],
            "before first projection": ["expert_gather"],
            "after first projection": ["expert_gather"],
            "before last projection": ["expert_gather"],
            "after last projection": ["combine"],
            "after switch": ["combine"],
            "after block": ["other"],
        }
    assert findings[model]["in_force"] == expected


# Of every family, what some parts of its layers are.
PARTS = {
    "qwen3": {"self_attn": "attention", "self_attn.q_norm": "attention", "mlp": "other"},
    "qwen3_moe": {"mlp.gate": "router", "mlp.switch_mlp.up_proj": "expert_gather"},
    "olmoe": {"mlp.gate": "router", "mlp.switch_mlp.down_proj": "expert_gather"},
    "mixtral": {"block_sparse_moe": "combine", "block_sparse_moe.gate": "router"},
    "phimoe": {"block_sparse_moe": "combine", "post_attention_layernorm": "norm"},
    "lfm2_moe": {"conv": "attention", "self_attn": "attention", "operator_norm": "norm"},
    "dots1": {"mlp.experts.gate_proj": "expert_gather", "mlp.shared_experts": "shared_expert"},
    "gpt_oss": {"mlp.router": "router", "mlp.experts.activation": "activation"},
    "qwen3_next": {"linear_attn": "attention", "mlp.shared_expert_gate": "shared_expert"},
    "qwen3_5_moe": {"self_attn": "attention", "mlp.shared_expert.up_proj": "shared_expert"},
    "nemotron_h": {
        "mixer.in_proj": "attention",
        "mixer.q_proj": "attention",
        "mixer.switch_mlp.fc1": "expert_gather",
        "norm": "norm",
    },
    "gemma4_text": {
        "router": "router",
        "router.proj": "router",
        "experts": "combine",
        "mlp": "shared_expert",
        "pre_feedforward_layernorm_2": "norm",
    },
    "deepseek_v4": {
        "attn.compressor.norm": "attention",
        "attn.indexer": "attention",
        "ffn_norm": "norm",
        "ffn_hc": "other",
        "ffn.gate": "router",
        "ffn.shared_experts.down_proj": "shared_expert",
    },
    "inkling": {
        "attn_sconv": "attention",
        "mlp_sconv": "other",
        "mlp": "combine",
        "mlp.switch_mlp": "combine",
        "mlp.switch_mlp.gate_proj": "expert_gather",
    },
}


@each_model
def test_the_term_of_each_part(findings, model):
    found = {}
    for path, term in findings[model]["terms"].items():
        inside = path.partition("layers.")[2].partition(".")[2]
        found.setdefault(inside or path.rpartition(".")[2], set()).add(term)
    for part, term in PARTS[model[1]].items():
        assert found[part] == {term}, part
    final = {"lfm2_moe": "embedding_norm", "nemotron_h": "norm_f"}.get(model[1], "norm")
    assert found[final] == {"norm"}
    assert found.get("embed_tokens", found.get("embeddings")) == {"other"}
    assert found.get("lm_head", {"head"}) == {"head"}


@each_moe
def test_the_term_before_a_boundary(findings, model):
    assert findings[model]["inputs"] == {
        "block": "other",
        "switch": "router",
        "projection": "expert_gather",
        "root": "sampler",
        "root's output": "head",
    }


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


@each_model
def test_what_comes_before_a_skipped_part_is_still_computed(findings, model):
    """MLX computes only what something needs: the norm before a skipped block would go with it,
    and the block would seem to cost more than any kernel for it could save."""
    stays = findings[model]["inputs_stay"]
    assert len(stays) == (4 if model in MOE else 1)
    assert all(stays.values()), stays


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
