"""Where each family of mlx-lm and mlx-vlm keeps its experts, and how it routes.

One recogniser per kind of block. It says what the block computes (a ``Spec``), with which arrays,
and how the block's own call maps to the kernels' inputs; or raises Unsupported with a reason.
Written against mlx-lm 0.32.2 and mlx-vlm 0.7.10: whatever is read in place of being called is of
one of their classes exactly, which the tables here name.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from .classes import Unsupported, class_of, known
from .router import route
from .spec import Router, Shared, Spec, Tensors
from .weights import Projection, describe, type_name

Run = Callable[..., Any]
LM, VLM = "mlx_lm.models.", "mlx_vlm.models."


@dataclass
class Site:
    """One block: the module whose call is replaced, what it computes, how it is entered.

    enter(run): from the kernels' ``run(shape, x, *dynamic)`` the function that stands in for the
    module's call for one token. plain: the module's own path from the same arguments, where that
    is not simply its call. companion: a module that changes with it, and its call for one token,
    whose results follow x in the module's call. Each of these functions is called with its module
    first, and holds no reference to it: a model that is dropped is freed at once. held: arrays of
    their own that they hold. left: what of the block keeps its own path, and why.

    For looking at types (sites.py): hidden, the size of x where it is not the experts'; rest(x),
    what follows x in the module's own call; rounds, that this ends by rounding to x's type.
    """

    path: str
    module: Any
    spec: Spec
    tensors: Tensors
    enter: Callable[[Run], Callable[..., Any]]
    plain: Callable[..., Any] | None = None
    companion: tuple[Any, Callable[..., Any]] | None = None
    held: list[Any] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    hidden: int = 0
    rest: Callable[[Any], tuple] = lambda x: ()
    rounds: bool = False


@dataclass(frozen=True)
class Experts:
    """Routed experts: projections and activation."""

    gate: Projection | None
    up: Projection
    down: Projection
    activation: str
    limit: float = 0.0
    alpha: float = 0.0


def _limited(limit: float | None) -> tuple[str, float, float]:
    limit = float(limit or 0.0)
    return ("swiglu_clamped" if limit > 0 else "swiglu"), limit, 0.0


# Activation modules: kind, limit and alpha.
ACTIVATIONS: dict[str, Callable[[Any], tuple[str, float, float]]] = {
    LM + "switch_layers.SwiGLU": lambda _: ("swiglu", 0.0, 0.0),
    VLM + "switch_layers.SwiGLU": lambda _: ("swiglu", 0.0, 0.0),
    LM + "activations.SwigluOAI": lambda m: ("swiglu_oai", float(m._limit), float(m._alpha)),
    VLM + "gpt_oss.language.SwiGLU": lambda _: ("swiglu_oai", 7.0, 1.702),
    LM + "gemma4_text.GeGLU": lambda _: ("geglu", 0.0, 0.0),
    VLM + "gemma4.language.GeGLU": lambda _: ("geglu", 0.0, 0.0),
    VLM + "gemma4_text.language.GeGLU": lambda _: ("geglu", 0.0, 0.0),
    VLM + "deepseek_v4.language.LimitedSwiGLU": lambda m: _limited(m.limit),
    "mlx.nn.layers.activations.ReLU2": lambda _: ("relu2", 0.0, 0.0),
}
SWITCHES = {
    LM + "switch_layers.SwitchGLU",
    LM + "switch_layers.SwitchMLP",
    VLM + "switch_layers.SwitchGLU",
    VLM + "switch_layers.SwitchMLP",
}
INKLING_SWITCH = VLM + "inkling.language.InklingSwitchGLU"
# Shared experts: kind and limit of their activation.
SHARED: dict[str, Callable[[Any], tuple[str, float, float]]] = {
    LM + "dots1.Dots1MLP": lambda _: ("swiglu", 0.0, 0.0),
    LM + "qwen3_next.Qwen3NextMLP": lambda _: ("swiglu", 0.0, 0.0),
    LM + "nemotron_h.NemotronHMLP": lambda _: ("relu2", 0.0, 0.0),
    VLM + "mlp.SwiGLUMLP": lambda _: ("swiglu", 0.0, 0.0),
    VLM + "qwen3_5.language.Qwen3_5MLP": lambda _: ("swiglu", 0.0, 0.0),
    VLM + "nemotron_h.language.NemotronHMLP": lambda _: ("relu2", 0.0, 0.0),
    VLM + "deepseek_v4.language.DeepseekV4MLP": lambda m: _limited(m.swiglu_limit),
    VLM + "inkling.language.InklingSharedExpertsDense": lambda _: ("swiglu", 0.0, 0.0),
}
# Routers with a weight of their own that score by sigmoid: what they add to the sum of the chosen.
SIGMOID_GATES = {
    LM + "dots1.Dots1TopkRouter": 0.0,
    VLM + "dots1.language.Dots1TopkRouter": 0.0,
    LM + "nemotron_h.MoEGate": 1e-20,
    VLM + "nemotron_h.language.MoEGate": 1e-20,
}
DEEPSEEK_GATE = VLM + "deepseek_v4.language.MoEGate"
GEMMA_ROUTERS = {
    LM + "gemma4_text.Router",
    VLM + "gemma4.language.Router",
    VLM + "gemma4_text.language.Router",
}
GEMMA_EXPERTS = {
    LM + "gemma4_text.Experts",
    VLM + "gemma4.language.Experts",
    VLM + "gemma4_text.language.Experts",
}


def experts_of(switch: Any, dtype: Any, classes: Collection[str] = SWITCHES) -> Experts:
    """A SwitchGLU's or SwitchMLP's experts. Raises Unsupported."""
    known(switch, classes, "experts")
    kind, limit, alpha = ACTIVATIONS[known(switch.activation, ACTIVATIONS, "an activation")](
        switch.activation
    )
    if "fc1" in switch:
        gate, up, down = None, describe(switch.fc1, dtype), describe(switch.fc2, dtype)
    else:
        gate = describe(switch.gate_proj, dtype)
        up, down = describe(switch.up_proj, dtype), describe(switch.down_proj, dtype)
    if (kind == "relu2") != (gate is None):
        raise Unsupported(f"activation {kind} {'without' if gate is None else 'with'} a gate")
    found = [p for p in (gate, up, down) if p is not None]
    if len({p.bias is None for p in found}) > 1:
        raise Unsupported("biases on some of the projections only")
    return Experts(gate, up, down, kind, limit, alpha)


def spec_of(
    found: Experts, router: Router, dtype: Any, small: dict[str, Any]
) -> tuple[Spec, Tensors]:
    """Spec and tensors of the routed experts alone."""
    each = [p for p in (found.gate, found.up, found.down) if p is not None]
    scaled = any(p.factor is not None for p in each)
    spec = Spec(
        dtype=type_name(dtype),
        hidden=found.up.columns,
        width=found.up.rows,
        out=found.down.rows,
        gate=found.gate.format if found.gate else None,
        up=found.up.format,
        down=found.down.format,
        activation=found.activation,
        router=router,
        limit=found.limit,
        alpha=found.alpha,
        scaled=scaled or any(name.endswith("_factor") and name in _OUTPUT for name in small),
        biased=found.up.bias is not None,
    )
    return spec, Tensors(found.gate, found.up, found.down, small=small)


_OUTPUT = ("gate_factor", "up_factor", "down_factor")


def with_shared(
    spec: Spec, tensors: Tensors, mlp: Any, dtype: Any, weight: str
) -> tuple[Spec, Tensors]:
    """The same with the shared expert in it. Raises Unsupported where it has to stay apart."""
    activation, limit, _ = SHARED[known(mlp, SHARED, "a shared expert")](mlp)
    if activation != spec.activation:
        raise Unsupported(f"a shared expert with {activation}")
    if limit != spec.limit:
        raise Unsupported(f"a shared expert with limit {limit}")
    gate = describe(mlp.gate_proj, dtype) if "gate_proj" in mlp else None
    up, down = describe(mlp.up_proj, dtype), describe(mlp.down_proj, dtype)
    if any(p is not None and p.bias is not None for p in (gate, up, down)):
        raise Unsupported("a shared expert with biases")
    if any(p is not None and p.factor is not None for p in (gate, up, down)):
        raise Unsupported("a shared expert with a global scale")
    if (gate is None) != (spec.gate is None):
        raise Unsupported("a shared expert with another kind of gate")
    if up.columns != spec.hidden or down.rows != spec.out:
        raise Unsupported("a shared expert of another hidden size")
    if weight == "router" and up.rows // spec.router.shared % 8:
        raise Unsupported(f"shared experts of width {up.rows // spec.router.shared}")
    shared = Shared(up.rows, gate.format if gate else None, up.format, down.format, weight)
    values = {f: getattr(spec, f) for f in spec.__dataclass_fields__} | {"shared": shared}
    return Spec(**values), Tensors(
        tensors.gate, tensors.up, tensors.down, gate, up, down, tensors.small
    )


def _float32(array: Any) -> Any:
    return array.astype(mx.float32).reshape(-1)


def _alone(block: Any) -> None:
    if getattr(block, "sharding_group", None) is not None:
        raise Unsupported("experts spread over several devices")


def _router(found: Experts, **how: Any) -> Router:
    experts = found.up.experts
    return Router(experts=experts, logits=how.pop("logits", experts), **how)


def _inline(path: str, block: Any, dtype: Any, small: dict[str, Any], **how: Any) -> Site:
    """A block with ``gate`` (or ``router``) and its experts, called with x alone."""
    _alone(block)
    found = experts_of(block.switch_mlp if "switch_mlp" in block else block.experts, dtype)
    spec, tensors = spec_of(found, _router(found, **how), dtype, small)
    logits = block.gate if "gate" in block else block.router

    def enter(run: Run) -> Callable[..., Any]:
        def call(_: Any, x: Any) -> Any:
            return run(x.shape, x, logits(x))

        return call

    return Site(path, block, spec, tensors, enter)


def qwen3_moe(path: str, block: Any, dtype: Any) -> Site:
    """Softmax, top-k, divided by their sum if the config says so."""
    weight = "sum" if block.norm_topk_prob else "score"
    return _inline(path, block, dtype, {}, top_k=block.top_k, score="softmax", weight=weight)


def olmoe(path: str, block: Any, dtype: Any) -> Site:
    """As qwen3_moe, chosen from the negated scores: among equals the lower index."""
    how = {"score": "softmax", "high": False, "weight": "sum" if block.norm_topk_prob else "score"}
    return _inline(path, block, dtype, {}, top_k=block.top_k, **how)


def mixtral(path: str, block: Any, dtype: Any) -> Site:
    """Top-k of the logits, softmax over those."""
    how = {"high": False, "weight": "softmax"}
    return _inline(path, block, dtype, {}, top_k=block.num_experts_per_tok, **how)


def phimoe(path: str, block: Any, dtype: Any) -> Site:
    """sparsemixer."""
    how = {"select": "sparsemixer", "high": False, "jitter": float(block.jitter_eps)}
    return _inline(path, block, dtype, {}, top_k=block.top_k, **how)


def lfm2_moe(path: str, block: Any, dtype: Any) -> Site:
    """Sigmoid, chosen with a bias, divided by their sum, scaled; in mlx-vlm a softmax in float32,
    with the bias in the weights too."""
    small = {"choice_bias": _float32(block.expert_bias)} if block.use_expert_bias else {}
    how = {
        "top_k": block.top_k,
        "bias": bool(block.use_expert_bias),
        "weight": "sum" if block.norm_topk_prob else "score",
    }
    if class_of(block).startswith(VLM):
        how |= {"score": "softmax", "weigh_choice": True, "epsilon": 1e-20, "rounded": False}
    else:
        factor = float(block.routed_scaling_factor)
        how |= {"score": "sigmoid", "epsilon": 1e-6, "factor": factor}
    return _inline(path, block, dtype, small, **how)


def gpt_oss(path: str, block: Any, dtype: Any) -> Site:
    """Top-k of the logits, softmax over those; biases on every projection."""
    return _inline(path, block, dtype, {}, top_k=block.num_experts_per_tok, weight="softmax")


def qwen3_next(path: str, block: Any, dtype: Any) -> Site:
    """As qwen3_moe, and a shared expert behind a gate of its own."""
    site = qwen3_moe(path, block, dtype)
    logits, shared, shared_gate = block.gate, block.shared_expert, block.shared_expert_gate
    try:
        site.spec, site.tensors = with_shared(site.spec, site.tensors, shared, dtype, "gate")
    except Unsupported as reason:
        site.left.append(f"shared expert: {reason}")

        def enter(run: Run) -> Callable[..., Any]:
            def call(_: Any, x: Any) -> Any:
                return run(x.shape, x, logits(x)) + mx.sigmoid(shared_gate(x)) * shared(x)

            return call

    else:

        def enter(run: Run) -> Callable[..., Any]:
            def call(_: Any, x: Any) -> Any:
                return run(x.shape, x, logits(x), shared_gate(x))

            return call

    site.enter = enter
    return site


def _by_module(found: Experts, gate: Any) -> Router:
    """The router's own module chooses and weighs."""
    return _router(found, top_k=gate.top_k, select="given", logits=0)


def _promotes(gate: Any, dtype: Any) -> bool:
    """Whether a gate's logits are of another type than the activations, as with a float32 weight:
    rounded, they would choose other experts."""
    return mx.result_type(gate.weight.dtype, dtype) != dtype


def _sigmoid_router(gate: Any, found: Experts, dtype: Any) -> tuple[Router, dict[str, Any]]:
    epsilon = SIGMOID_GATES[known(gate, SIGMOID_GATES, "a router")]
    if gate.n_group != gate.topk_group or _promotes(gate, dtype):
        return _by_module(found, gate), {}
    router = _router(
        found,
        top_k=gate.top_k,
        score="sigmoid",
        bias=True,
        high=False,
        weight="sum" if gate.top_k > 1 and gate.norm_topk_prob else "score",
        epsilon=epsilon,
        factor=float(gate.routed_scaling_factor),
        rounded=False,
    )
    return router, {"choice_bias": _float32(gate.e_score_correction_bias)}


def _routed(spec: Spec, gate: Any) -> tuple[Callable[[Any], tuple], list[Any]]:
    """What the kernels take of a gate with a raw ``weight``: its logits, or its own choice; and the
    arrays that this holds."""
    if spec.router.select == "given":
        return lambda x: tuple(part.reshape(-1) for part in gate(x)), []
    weight = gate.weight.T
    return lambda x: (x @ weight,), [weight]


def dots1(path: str, block: Any, dtype: Any) -> Site:
    """Sigmoid in float32, chosen with a bias; a shared expert."""
    found = experts_of(block.experts, dtype)
    router, small = _sigmoid_router(block.gate, found, dtype)
    spec, tensors = spec_of(found, router, dtype, small)
    shared = block.shared_experts if block.n_shared_experts is not None else None
    return _beside_shared(path, block, dtype, spec, tensors, shared)


def nemotron_h(path: str, block: Any, dtype: Any) -> Site:
    """As dots1 with squared ReLU and no gate; perhaps a narrower space for the routed experts."""
    found = experts_of(block.switch_mlp, dtype)
    router, small = _sigmoid_router(block.gate, found, dtype)
    spec, tensors = spec_of(found, router, dtype, small)
    shared = block.shared_experts if block.config.n_shared_experts is not None else None
    if block.moe_latent_size is None:
        return _beside_shared(path, block, dtype, spec, tensors, shared)
    routed, held = _routed(spec, block.gate)
    into, out = block.fc1_latent_proj, block.fc2_latent_proj
    left = ["latent projections" + (", shared expert: outside the latent space" if shared else "")]

    def enter(run: Run) -> Callable[..., Any]:
        def call(_: Any, x: Any) -> Any:
            narrow = into(x)
            y = out(run(narrow.shape, narrow, *routed(x)))
            return y if shared is None else y + shared(x)

        return call

    hidden = block.gate.weight.shape[-1]
    return Site(path, block, spec, tensors, enter, held=held, left=left, hidden=hidden)


def _beside_shared(
    path: str, block: Any, dtype: Any, spec: Spec, tensors: Tensors, shared: Any
) -> Site:
    _alone(block)
    left = []
    apart = None
    if shared is not None:
        try:
            spec, tensors = with_shared(spec, tensors, shared, dtype, "one")
        except Unsupported as reason:
            left.append(f"shared expert: {reason}")
            apart = shared
    routed, held = _routed(spec, block.gate)

    def enter(run: Run) -> Callable[..., Any]:
        def call(_: Any, x: Any) -> Any:
            y = run(x.shape, x, *routed(x))
            return y if apart is None else y + apart(x)

        return call

    return Site(path, block, spec, tensors, enter, held=held, left=left)


def gemma4(path: str, layer: Any, dtype: Any) -> Site:
    """Router and experts stand beside each other in the layer: both calls change together."""
    router, holder = layer.router, layer.experts
    known(router, GEMMA_ROUTERS, "a router")
    known(holder, GEMMA_EXPERTS, "experts")
    found = experts_of(holder.switch_glu, dtype)
    top_k = router.config.top_k_experts
    how = _router(found, top_k=top_k, weight="softmax_loose", expert_factor=True)
    small = {"expert_factor": _float32(router.per_expert_scale)}
    spec, tensors = spec_of(found, how, dtype, small)
    scale = router.scale * router._root_size
    project, epsilon = router.proj, router.eps
    original = type(holder).__call__

    def logits_only(_: Any, x: Any) -> Any:
        # What the layer passes on as indices are the logits, as weights nothing.
        return project(mx.fast.rms_norm(x, scale, epsilon)), None

    def plain(holder: Any, x: Any, chosen: Any, weights: Any) -> Any:
        if weights is None:
            picked = route(how, chosen, small)
            chosen, weights = (p.reshape(*x.shape[:-1], -1) for p in picked)
        return original(holder, x, chosen, weights)

    def enter(run: Run) -> Callable[..., Any]:
        def call(holder: Any, x: Any, chosen: Any, weights: Any) -> Any:
            if weights is not None:
                return plain(holder, x, chosen, weights)
            return run(x.shape, x, chosen)

        return call

    return Site(
        f"{path}.experts",
        holder,
        spec,
        tensors,
        enter,
        plain,
        (router, logits_only),
        held=[scale],
        rest=router,
    )


def deepseek_v4(path: str, block: Any, dtype: Any) -> Site:
    """Square root of softplus (or sigmoid, softmax) in float32; first layers look experts up by
    token id; a shared expert; perhaps a residual that is expanded at the end."""
    _alone(block)
    gate = block.gate
    known(gate, {DEEPSEEK_GATE}, "a router")
    found = experts_of(block.switch_mlp, dtype)
    scores = {"sqrtsoftplus": "sqrt_softplus", "sigmoid": "sigmoid", "softmax": "softmax"}
    score = scores.get(gate.scoring_func)
    small: dict[str, Any] = {}
    # By the table the kernels score the chosen alone, and a softmax is over all.
    if gate.vision or score is None or _promotes(gate, dtype) or (gate.hash and score == "softmax"):
        router = _by_module(found, gate)
    else:
        router = _router(
            found,
            top_k=gate.top_k,
            select="table" if gate.hash else "top_k",
            score=score,
            bias=not gate.hash,
            high=False,
            weight="sum" if score != "softmax" and gate.norm_topk_prob else "score",
            epsilon=1e-20,
            factor=float(gate.routed_scaling_factor),
            rounded=False,
        )
        if gate.hash:
            small["table"] = gate.tid2eid.astype(mx.int32)
        else:
            small["choice_bias"] = _float32(gate.e_score_correction_bias)
    spec, tensors = spec_of(found, router, dtype, small)
    left, apart = [], block.shared_experts
    try:
        spec, tensors = with_shared(spec, tensors, block.shared_experts, dtype, "one")
        apart = None
    except Unsupported as reason:
        left.append(f"shared expert: {reason}")
    weight = gate.weight.T
    select, combine = router.select, type(block.switch_mlp)._combine

    def enter(run: Run) -> Callable[..., Any]:
        def call(_: Any, x: Any, *args: Any, residual: Any = None, **kwargs: Any) -> Any:
            if select == "given":
                dynamic = tuple(part.reshape(-1) for part in gate(x, *args, **kwargs))
            elif select == "table":
                token = args[0] if args else kwargs["input_ids"]
                dynamic = (x @ weight, token.reshape(-1))
            else:
                dynamic = (x @ weight,)
            y = run(x.shape, x, *dynamic)
            if apart is not None:
                y = y + apart(x)
            return y if residual is None else combine(y, None, None, residual)

        return call

    def token(x: Any) -> tuple:
        return (mx.zeros(x.shape[:-1], mx.int32),)

    return Site(path, block, spec, tensors, enter, held=[weight], left=left, rest=token)


def inkling(path: str, block: Any, dtype: Any) -> Site:
    """Sigmoid with a bias chooses; a softmax over log-sigmoids weighs chosen and shared experts."""
    switch = block.switch_mlp
    found = experts_of(switch, dtype, {INKLING_SWITCH})
    if found.up.bias is not None:
        raise Unsupported("biases before a factor for each expert")
    if block.n_shared < 1:
        raise Unsupported("no shared experts among the router's")
    small = {
        "choice_bias": _float32(block.e_score_correction_bias),
        "route_factor": block.route_scale * _float32(block.global_scale),
    }
    if not switch.scales_trivial():
        small["gate_factor"] = _float32(switch.gate_scale)
        small["down_factor"] = _float32(switch.out_scale)
    router = _router(
        found,
        top_k=block.top_k,
        logits=block.n_routed + block.n_shared,
        score="sigmoid",
        bias=True,
        high=False,
        weight="logsigmoid",
        rounded=False,
        shared=block.n_shared,
    )
    spec, tensors = spec_of(found, router, dtype, small)
    spec, tensors = with_shared(spec, tensors, block.shared_experts, dtype, "router")
    weight = block.gate_weight
    weight = (weight if weight.dtype == dtype else weight.astype(dtype)).T

    def enter(run: Run) -> Callable[..., Any]:
        def call(_: Any, x: Any) -> Any:
            return run(x.shape, x, x @ weight)

        return call

    return Site(path, block, spec, tensors, enter, held=[weight], rounds=True)


BLOCKS: dict[str, Callable[[str, Any, Any], Site]] = {
    LM + "qwen3_moe.Qwen3MoeSparseMoeBlock": qwen3_moe,
    LM + "olmoe.OlmoeSparseMoeBlock": olmoe,
    LM + "mixtral.MixtralSparseMoeBlock": mixtral,
    LM + "phimoe.PhiMoESparseMoeBlock": phimoe,
    LM + "lfm2_moe.Lfm2MoeSparseMoeBlock": lfm2_moe,
    LM + "dots1.Dots1MoE": dots1,
    LM + "gpt_oss.MLPBlock": gpt_oss,
    LM + "qwen3_next.Qwen3NextSparseMoeBlock": qwen3_next,
    LM + "nemotron_h.NemotronHMoE": nemotron_h,
    LM + "gemma4_text.DecoderLayer": gemma4,
    VLM + "qwen3_moe.language.Qwen3MoeSparseMoeBlock": qwen3_moe,
    VLM + "olmoe.language.OlmoeSparseMoeBlock": olmoe,
    VLM + "mixtral.language.MixtralSparseMoeBlock": mixtral,
    VLM + "phimoe.language.PhiMoESparseMoeBlock": phimoe,
    VLM + "lfm2.language.Lfm2MoeSparseMoeBlock": lfm2_moe,
    VLM + "dots1.language.Dots1MoE": dots1,
    VLM + "gpt_oss.language.MLPBlock": gpt_oss,
    VLM + "qwen3_next.language.Qwen3NextSparseMoeBlock": qwen3_next,
    VLM + "qwen3_5_moe.language.Qwen3_5MoeSparseMoeBlock": qwen3_next,
    VLM + "nemotron_h.language.NemotronHMoE": nemotron_h,
    VLM + "gemma4.language.DecoderLayer": gemma4,
    VLM + "gemma4_text.language.DecoderLayer": gemma4,
    VLM + "deepseek_v4.language.DeepseekV4MoE": deepseek_v4,
    VLM + "inkling.language.InklingSparseMoE": inkling,
}
