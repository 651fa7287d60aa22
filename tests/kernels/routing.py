"""The router's reference against the families' own blocks, ties above all."""

import dataclasses

import mlx.core as mx
import mlx.nn as nn

from moescope.kernels.classes import class_of
from moescope.kernels.families import BLOCKS
from moescope.kernels.router import route
from moescope.kernels.samples import routers, small_of
from moescope.kernels.spec import Router

E, K, HIDDEN = 16, 4, 64


def _args(**more):
    class Args:
        def __getattr__(self, name):
            return DEFAULTS[name]

    args = Args()
    vars(args).update(more)
    return args


DEFAULTS = {
    "hidden_size": HIDDEN, "num_experts": E, "num_local_experts": E, "n_routed_experts": E,
    "num_experts_per_tok": K, "moe_intermediate_size": 32, "intermediate_size": 32,
    "norm_topk_prob": True, "mlp_bias": False, "use_expert_bias": True,
    "routed_scaling_factor": 1.5, "router_jitter_noise": 0.01, "n_shared_experts": 1,
    "shared_expert_intermediate_size": 32, "n_group": 1, "topk_group": 1,
    "moe_latent_size": None, "moe_shared_expert_intermediate_size": 32,
}  # fmt: skip


def _block(name):
    from mlx_lm.models import (
        dots1,
        gpt_oss,
        lfm2_moe,
        mixtral,
        nemotron_h,
        olmoe,
        phimoe,
        qwen3_moe,
        qwen3_next,
    )

    kinds = {
        "qwen3_moe": qwen3_moe.Qwen3MoeSparseMoeBlock,
        "olmoe": olmoe.OlmoeSparseMoeBlock,
        "mixtral": mixtral.MixtralSparseMoeBlock,
        "phimoe": phimoe.PhiMoESparseMoeBlock,
        "lfm2_moe": lfm2_moe.Lfm2MoeSparseMoeBlock,
        "dots1": dots1.Dots1MoE,
        "gpt_oss": gpt_oss.MLPBlock,
        "qwen3_next": qwen3_next.Qwen3NextSparseMoeBlock,
        "nemotron_h": nemotron_h.NemotronHMoE,
    }
    args = _args(norm_topk_prob=False) if name == "olmoe" else _args()
    return kinds[name](args)


CASES = {
    "check_family": [
        "qwen3_moe", "olmoe", "mixtral", "phimoe", "lfm2_moe", "dots1", "gpt_oss", "qwen3_next",
        "nemotron_h",
    ],
}  # fmt: skip


def _with_logits(gate, logits, dtype):
    """The gate with a first column that gives these logits for the first unit vector."""
    gate.weight = mx.concatenate([logits[:, None], mx.zeros((E, HIDDEN - 1))], axis=1).astype(dtype)
    if "bias" in gate:
        gate.bias = mx.zeros((E,), dtype)


def _observed(block, dtype, logits):
    """Indices and weights that the block itself arrives at for these logits."""
    seen = {}
    gate = block.gate if "gate" in block else block.router
    _with_logits(gate, logits, dtype)

    class Experts:
        """Gives unit vectors, so that the combined output is the weights by slot."""

        def __call__(self, x, indices):
            seen["chosen"] = indices
            eye = mx.eye(indices.shape[-1], HIDDEN, dtype=mx.float32)
            return mx.broadcast_to(eye, (*indices.shape, HIDDEN))

    for name in ("switch_mlp", "experts"):
        if name in block:
            block.pop(name)
            object.__setattr__(block, name, Experts())
    for name in ("shared_experts", "shared_expert", "shared_expert_gate"):
        if name in block:
            block.pop(name)
            object.__setattr__(block, name, lambda x: mx.zeros(x.shape))
    y = block(mx.eye(1, HIDDEN, dtype=dtype)[None])
    return seen["chosen"].reshape(-1).tolist(), y.reshape(-1)[:K].astype(mx.float32).tolist()


def check_family(name):
    """Same set, same weights to the type's last bit, over random, coarse and all-equal logits."""
    mx.random.seed(5)
    ties = 0
    for trial in range(24):
        logits = mx.random.normal((E,)) * 2
        if trial % 3 == 1:
            logits = mx.round(logits)
        if trial % 3 == 2 and trial < 9:
            logits = mx.zeros((E,)) + trial / 4
        for dtype in (mx.bfloat16, mx.float32):
            values = logits.astype(dtype)
            block = _block(name)
            block.set_dtype(dtype)
            bias = mx.round(mx.random.normal((E,)) * 4) / 16
            if name == "lfm2_moe":
                block.expert_bias = bias
            if name in ("dots1", "nemotron_h"):
                block.gate.e_score_correction_bias = bias
            recognise = BLOCKS[class_of(block)]
            site = recognise("block", _packed(block, dtype), dtype)
            mine, weights = route(site.spec.router, values, site.tensors.small)
            chosen, given = _observed(block, dtype, values)
            assert sorted(mine.tolist()) == sorted(chosen), (trial, mine.tolist(), chosen)
            _same(mine, weights, chosen, given, dtype)
            kept, left = values[mx.array(chosen)], [i for i in range(E) if i not in chosen]
            ties += mx.min(kept).item() == mx.max(values[mx.array(left)]).item()
    assert ties >= 6, "too few ties to prove anything"
    return {"ties at the edge": ties}


def _same(mine, weights, chosen, given, dtype):
    """Equal sets; weights to the type's last bit (sums may be made in another order)."""
    assert sorted(mine.tolist()) == sorted(chosen), (mine.tolist(), chosen)
    have = dict(zip(mine.tolist(), weights.astype(mx.float32).tolist(), strict=False))
    step = 2.0**-8 if dtype == mx.bfloat16 else 2.0**-21
    for expert, value in zip(chosen, given, strict=False):
        assert abs(have[expert] - value) <= step * abs(value) + 1e-9, (have, chosen, given)


def _draws():
    """Random, coarse and all-equal logits."""
    mx.random.seed(9)
    for trial in range(12):
        logits = mx.random.normal((E,)) * 2
        if trial % 3 == 1:
            logits = mx.round(logits)
        yield mx.zeros((E,)) + trial / 4 if trial % 3 == 2 and trial < 9 else logits


def check_gemma4():
    """Its router norms its input and weighs by expert: compared from the projected logits on."""
    from mlx_lm.models.gemma4_text import Router as Gemma

    for logits in _draws():
        for dtype in (mx.bfloat16, mx.float32):
            args = _args(rms_norm_eps=1e-6, top_k_experts=K)
            gate = Gemma(args)
            gate.per_expert_scale = mx.random.uniform(0.5, 1.5, (E,))
            _with_logits(gate.proj, logits, mx.float32)
            gate.set_dtype(dtype)
            x = mx.eye(1, HIDDEN, dtype=dtype)[None]
            given = gate.proj(mx.fast.rms_norm(x, gate.scale * gate._root_size, gate.eps))
            chosen, want = gate(x)
            router = routers()["loose softmax (gemma4)"]
            router = dataclasses.replace(router, experts=E, top_k=K, logits=E)
            small = {"expert_factor": gate.per_expert_scale.astype(mx.float32)}
            mine, weights = route(router, given, small)
            want = want.reshape(-1).astype(mx.float32).tolist()
            _same(mine, weights, chosen.reshape(-1).tolist(), want, dtype)


def check_deepseek_v4():
    """Three score functions, and experts by token id."""
    from mlx_vlm.models.deepseek_v4.language import MoEGate

    scores = {"sqrtsoftplus": "sqrt_softplus", "sigmoid": "sigmoid", "softmax": "softmax"}
    for logits in _draws():
        for name, score in scores.items():
            for layer in (0, 1):
                args = _args(num_hash_layers=1, scoring_func=name, vocab_size=8, vision_n_layers=0)
                gate = MoEGate(args, layer)
                _with_logits(gate, logits, mx.bfloat16)
                small = {}
                if layer:
                    bias = mx.round(mx.random.normal((E,)) * 4) / 16
                    gate.e_score_correction_bias = small["choice_bias"] = bias
                else:
                    rows = [mx.random.permutation(E)[:K] for _ in range(8)]
                    gate.tid2eid = small["table"] = mx.stack(rows).astype(mx.int32)
                token = mx.array([[5]])
                chosen, want = gate(mx.eye(1, HIDDEN, dtype=mx.bfloat16)[None], token)
                router = Router(
                    E, K, E, select="top_k" if layer else "table", score=score, bias=bool(layer),
                    high=False, weight="score" if name == "softmax" else "sum", epsilon=1e-20,
                    factor=1.5, rounded=False,
                )  # fmt: skip
                mine, weights = route(router, logits.astype(mx.bfloat16), small, token)
                chosen = chosen.reshape(-1).tolist()
                _same(mine, weights, chosen, want.reshape(-1).tolist(), mx.float32)


def check_inkling():
    """Chosen and shared experts weighed together."""
    from mlx_vlm.models.inkling.language import InklingSparseMoE

    shared = 2
    for logits in _draws():
        args = _args(n_shared_experts=shared, route_scale=8.0)
        block = InklingSparseMoE(args)
        block.e_score_correction_bias = bias = mx.round(mx.random.normal((E,)) * 4) / 16
        values = mx.concatenate([logits, mx.random.normal((shared,))]).astype(mx.bfloat16)
        chosen, want, gamma = block._route(values[None])
        router = dataclasses.replace(
            routers()["logsigmoid (inkling)"], experts=E, top_k=K, logits=E + shared, shared=shared
        )
        small = {"choice_bias": bias, "route_factor": mx.array([8.0])}
        mine, weights = route(router, values, small)
        want = want.reshape(-1).astype(mx.float32).tolist()
        _same(mine, weights, chosen.reshape(-1).tolist(), want, mx.bfloat16)
        parts = gamma.reshape(shared, -1)[:, 0].astype(mx.float32).tolist()
        assert weights[-shared:].astype(mx.float32).tolist() == parts


def _packed(block, dtype):
    """The block with its experts quantised, as the recognisers expect it."""
    nn.quantize(block, 32, 4, class_predicate=lambda path, m: hasattr(m, "num_experts"))
    block.set_dtype(dtype)
    return block


def check_every_kind_is_covered():
    """The sample routers go through every way to select, to score and to weigh."""
    found = routers().values()
    assert {r.select for r in found} == {"top_k", "table", "sparsemixer"}
    assert {r.score for r in found} == {"logit", "softmax", "sigmoid", "sqrt_softplus"}
    assert {r.weight for r in found} == {
        "score", "sum", "softmax", "softmax_loose", "logsigmoid",
    }  # fmt: skip
    for router in found:
        chosen, weights = route(
            router,
            mx.random.normal((router.logits,)).astype(mx.bfloat16),
            small_of(router),
            mx.array([[2]]),
        )
        assert len(set(chosen.tolist())) == router.top_k
        assert weights.size == router.top_k + router.shared
