"""Where each family of mlx-lm and mlx-vlm keeps its experts, and how it routes.

One recogniser per class of block. It says what the block computes (a ``Spec``), with which arrays,
and how the block's own call maps to the kernels' inputs; or raises Unsupported with a reason.
Written against mlx-lm 0.32.2 and mlx-vlm 0.7.10.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from .classes import Unsupported
from .router import route
from .spec import Router, Shared, Spec, Tensors
from .weights import Projection, describe

Run = Callable[..., Any]


@dataclass
class Site:
    """One block: the module whose call is replaced, what it computes, how it is entered.

    enter(run): from the kernels' ``run(shape, x, *dynamic)`` the function that stands in for the
    module's call for one token. plain: the module's own path from the same arguments, where that
    is not simply its call. companions: modules that change with it, each with what makes its call
    for one token. left: what of the block keeps its own path, and why.
    """

    path: str
    module: Any
    spec: Spec
    tensors: Tensors
    enter: Callable[[Run], Callable[..., Any]]
    plain: Callable[..., Any] | None = None
    companions: list[tuple[Any, Callable[[], Callable[..., Any]]]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Experts:
    """Routed experts: projections and activation."""

    gate: Projection | None
    up: Projection
    down: Projection
    activation: str
    limit: float = 0.0
    alpha: float = 0.0


def activation_of(module: Any) -> tuple[str, float, float]:
    """An activation module's kind, limit and alpha, by its class. Raises Unsupported."""
    name, home = type(module).__name__, type(module).__module__
    if name == "SwiGLU" and home.endswith("switch_layers"):
        return "swiglu", 0.0, 0.0
    if name == "SwigluOAI":
        return "swiglu_oai", float(module._limit), float(module._alpha)
    if name == "SwiGLU" and "gpt_oss" in home:
        return "swiglu_oai", 7.0, 1.702
    if name == "GeGLU" and "gemma4" in home:
        return "geglu", 0.0, 0.0
    if name == "LimitedSwiGLU":
        limit = float(module.limit or 0.0)
        return ("swiglu_clamped" if limit > 0 else "swiglu"), limit, 0.0
    if name == "ReLU2":
        return "relu2", 0.0, 0.0
    raise Unsupported(f"activation {name}")


def experts_of(switch: Any, dtype: Any) -> Experts:
    """A SwitchGLU's or SwitchMLP's experts. Raises Unsupported."""
    kind, limit, alpha = activation_of(switch.activation)
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
        dtype=str(dtype).rpartition(".")[2],
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
    spec: Spec, tensors: Tensors, mlp: Any, dtype: Any, weight: str, activation: str
) -> tuple[Spec, Tensors]:
    """The same with the shared expert in it. Raises Unsupported where it has to stay apart."""
    if activation != spec.activation:
        raise Unsupported(f"a shared expert with {activation}")
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
    if up.rows % 32:
        raise Unsupported(f"shared width {up.rows} is no multiple of 32")
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


def _router(block: Any, switch: Any, **how: Any) -> Router:
    experts = switch["fc1" if "fc1" in switch else "gate_proj"].num_experts
    return Router(experts=experts, logits=how.pop("logits", experts), **how)


def _inline(path: str, block: Any, dtype: Any, router: Router, small: dict[str, Any]) -> Site:
    """A block with ``gate`` (or ``router``) and its experts, called with x alone."""
    _alone(block)
    switch = block.switch_mlp if "switch_mlp" in block else block.experts
    spec, tensors = spec_of(experts_of(switch, dtype), router, dtype, small)
    logits = block.gate if "gate" in block else block.router

    def enter(run: Run) -> Callable[..., Any]:
        def call(x: Any) -> Any:
            return run(x.shape, x, logits(x))

        return call

    return Site(path, block, spec, tensors, enter)


def qwen3_moe(path: str, block: Any, dtype: Any) -> Site:
    """Softmax, top-k, divided by their sum if the config says so."""
    router = _router(
        block,
        block.switch_mlp,
        top_k=block.top_k,
        score="softmax",
        weight="sum" if block.norm_topk_prob else "score",
    )
    return _inline(path, block, dtype, router, {})


def olmoe(path: str, block: Any, dtype: Any) -> Site:
    """As qwen3_moe, chosen from the negated scores: among equals the lower index."""
    router = _router(
        block,
        block.switch_mlp,
        top_k=block.top_k,
        score="softmax",
        high=False,
        weight="sum" if block.norm_topk_prob else "score",
    )
    return _inline(path, block, dtype, router, {})


def mixtral(path: str, block: Any, dtype: Any) -> Site:
    """Top-k of the logits, softmax over those."""
    router = _router(
        block, block.switch_mlp, top_k=block.num_experts_per_tok, high=False, weight="softmax"
    )
    return _inline(path, block, dtype, router, {})


def phimoe(path: str, block: Any, dtype: Any) -> Site:
    """sparsemixer."""
    router = _router(
        block,
        block.switch_mlp,
        top_k=block.top_k,
        select="sparsemixer",
        high=False,
        jitter=float(block.jitter_eps),
    )
    return _inline(path, block, dtype, router, {})


def lfm2_moe(path: str, block: Any, dtype: Any) -> Site:
    """Sigmoid, chosen with a bias, divided by their sum, scaled; in mlx-vlm a softmax in float32,
    with the bias in the weights too."""
    small = {"choice_bias": _float32(block.expert_bias)} if block.use_expert_bias else {}
    if type(block).__module__.startswith("mlx_vlm"):
        router = _router(
            block,
            block.switch_mlp,
            top_k=block.top_k,
            score="softmax",
            bias=bool(block.use_expert_bias),
            weigh_choice=True,
            weight="sum" if block.norm_topk_prob else "score",
            epsilon=1e-20,
            rounded=False,
        )
        return _inline(path, block, dtype, router, small)
    router = _router(
        block,
        block.switch_mlp,
        top_k=block.top_k,
        score="sigmoid",
        bias=bool(block.use_expert_bias),
        weight="sum" if block.norm_topk_prob else "score",
        epsilon=1e-6,
        factor=float(block.routed_scaling_factor),
    )
    return _inline(path, block, dtype, router, small)


def gpt_oss(path: str, block: Any, dtype: Any) -> Site:
    """Top-k of the logits, softmax over those; biases on every projection."""
    router = _router(block, block.experts, top_k=block.num_experts_per_tok, weight="softmax")
    return _inline(path, block, dtype, router, {})


def qwen3_next(path: str, block: Any, dtype: Any) -> Site:
    """As qwen3_moe, and a shared expert behind a gate of its own."""
    site = qwen3_moe(path, block, dtype)
    logits, shared, shared_gate = block.gate, block.shared_expert, block.shared_expert_gate
    try:
        site.spec, site.tensors = with_shared(
            site.spec, site.tensors, shared, dtype, "gate", "swiglu"
        )
    except Unsupported as reason:
        site.left.append(f"shared expert: {reason}")

        def enter(run: Run) -> Callable[..., Any]:
            def call(x: Any) -> Any:
                return run(x.shape, x, logits(x)) + mx.sigmoid(shared_gate(x)) * shared(x)

            return call

    else:

        def enter(run: Run) -> Callable[..., Any]:
            def call(x: Any) -> Any:
                return run(x.shape, x, logits(x), shared_gate(x))

            return call

    site.enter = enter
    return site


def _grouped(gate: Any) -> bool:
    groups = getattr(gate, "n_group", 1) or 1
    return groups > 1 and groups != getattr(gate, "topk_group", groups)


def _sigmoid_router(block: Any, switch: Any, epsilon: float) -> tuple[Router, dict[str, Any]]:
    gate = block.gate
    if _grouped(gate):
        return _router(block, switch, top_k=gate.top_k, select="given", logits=0), {}
    router = _router(
        block,
        switch,
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


def _routed(spec: Spec, gate: Any) -> Callable[[Any], tuple]:
    """What the kernels take of a gate with a raw ``weight``: its logits, or its own choice."""
    if spec.router.select == "given":
        return lambda x: tuple(part.reshape(-1) for part in gate(x))
    weight = gate.weight.T
    return lambda x: (x @ weight,)


def dots1(path: str, block: Any, dtype: Any) -> Site:
    """Sigmoid in float32, chosen with a bias; a shared expert."""
    router, small = _sigmoid_router(block, block.experts, 0.0)
    spec, tensors = spec_of(experts_of(block.experts, dtype), router, dtype, small)
    return _beside_shared(path, block, dtype, spec, tensors, block.get("shared_experts"), "swiglu")


def nemotron_h(path: str, block: Any, dtype: Any) -> Site:
    """As dots1 with squared ReLU and no gate; perhaps a narrower space for the routed experts."""
    router, small = _sigmoid_router(block, block.switch_mlp, 1e-20)
    spec, tensors = spec_of(experts_of(block.switch_mlp, dtype), router, dtype, small)
    shared = block.get("shared_experts")
    if block.moe_latent_size is None:
        return _beside_shared(path, block, dtype, spec, tensors, shared, "relu2")
    routed, into, out = _routed(spec, block.gate), block.fc1_latent_proj, block.fc2_latent_proj
    left = ["latent projections" + (", shared expert: outside the latent space" if shared else "")]

    def enter(run: Run) -> Callable[..., Any]:
        def call(x: Any) -> Any:
            narrow = into(x)
            y = out(run(narrow.shape, narrow, *routed(x)))
            return y if shared is None else y + shared(x)

        return call

    return Site(path, block, spec, tensors, enter, left=left)


def _beside_shared(
    path: str, block: Any, dtype: Any, spec: Spec, tensors: Tensors, shared: Any, activation: str
) -> Site:
    _alone(block)
    left = []
    apart = None
    if shared is not None:
        try:
            spec, tensors = with_shared(spec, tensors, shared, dtype, "one", activation)
        except Unsupported as reason:
            left.append(f"shared expert: {reason}")
            apart = shared
    routed = _routed(spec, block.gate)

    def enter(run: Run) -> Callable[..., Any]:
        def call(x: Any) -> Any:
            y = run(x.shape, x, *routed(x))
            return y if apart is None else y + apart(x)

        return call

    return Site(path, block, spec, tensors, enter, left=left)


def gemma4(path: str, layer: Any, dtype: Any) -> Site:
    """Router and experts stand beside each other in the layer: both calls change together."""
    router, holder = layer.router, layer.experts
    switch = holder.switch_glu
    how = _router(
        holder,
        switch,
        top_k=router.config.top_k_experts,
        weight="softmax_loose",
        expert_factor=True,
    )
    small = {"expert_factor": _float32(router.per_expert_scale)}
    spec, tensors = spec_of(experts_of(switch, dtype), how, dtype, small)
    scale = router.scale * router._root_size
    mx.eval(scale)
    project, epsilon = router.proj, router.eps
    original = type(holder).__call__

    def logits_only() -> Callable[..., Any]:
        # What the layer passes on as indices are the logits, as weights nothing.
        def call(x: Any) -> Any:
            return project(mx.fast.rms_norm(x, scale, epsilon)), None

        return call

    def plain(x: Any, chosen: Any, weights: Any) -> Any:
        if weights is None:
            picked = route(how, chosen, small)
            chosen, weights = (p.reshape(*x.shape[:-1], -1) for p in picked)
        return original(holder, x, chosen, weights)

    def enter(run: Run) -> Callable[..., Any]:
        def call(x: Any, chosen: Any, weights: Any) -> Any:
            return plain(x, chosen, weights) if weights is not None else run(x.shape, x, chosen)

        return call

    companions = [(router, logits_only)]
    return Site(f"{path}.experts", holder, spec, tensors, enter, plain, companions)


def deepseek_v4(path: str, block: Any, dtype: Any) -> Site:
    """Square root of softplus (or sigmoid, softmax) in float32; first layers look experts up by
    token id; a shared expert; perhaps a residual that is expanded at the end."""
    _alone(block)
    gate = block.gate
    scores = {"sqrtsoftplus": "sqrt_softplus", "sigmoid": "sigmoid", "softmax": "softmax"}
    small: dict[str, Any] = {}
    if gate.vision or gate.scoring_func not in scores:
        router = _router(block, block.switch_mlp, top_k=gate.top_k, select="given", logits=0)
    else:
        total = gate.scoring_func != "softmax" and gate.norm_topk_prob
        router = _router(
            block,
            block.switch_mlp,
            top_k=gate.top_k,
            select="table" if gate.hash else "top_k",
            score=scores[gate.scoring_func],
            bias=not gate.hash,
            high=False,
            weight="sum" if total else "score",
            epsilon=1e-20,
            factor=float(gate.routed_scaling_factor),
            rounded=False,
        )
        if gate.hash:
            small["table"] = gate.tid2eid.astype(mx.int32)
        else:
            small["choice_bias"] = _float32(gate.e_score_correction_bias)
    spec, tensors = spec_of(experts_of(block.switch_mlp, dtype), router, dtype, small)
    left, apart = [], block.shared_experts
    limit = float(block.shared_experts.swiglu_limit or 0.0)
    try:
        if limit != spec.limit:
            raise Unsupported(f"a shared expert with limit {limit}")
        spec, tensors = with_shared(
            spec, tensors, block.shared_experts, dtype, "one", spec.activation
        )
        apart = None
    except Unsupported as reason:
        left.append(f"shared expert: {reason}")
    weight = gate.weight.T
    select = router.select

    def enter(run: Run) -> Callable[..., Any]:
        def call(x: Any, *args: Any, residual: Any = None, **kwargs: Any) -> Any:
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
            return y if residual is None else expand(y, *residual)

        return call

    def expand(y: Any, *residual: Any) -> Any:
        return type(block.switch_mlp)._combine(y, None, None, residual)

    return Site(path, block, spec, tensors, enter, left=left)


def inkling(path: str, block: Any, dtype: Any) -> Site:
    """Sigmoid with a bias chooses; a softmax over log-sigmoids weighs chosen and shared experts."""
    switch = block.switch_mlp
    small = {
        "choice_bias": _float32(block.e_score_correction_bias),
        "route_factor": block.route_scale * _float32(block.global_scale),
    }
    if not switch.scales_trivial():
        small["gate_factor"] = _float32(switch.gate_scale)
        small["down_factor"] = _float32(switch.out_scale)
    router = _router(
        block,
        switch,
        top_k=block.top_k,
        logits=block.n_routed + block.n_shared,
        score="sigmoid",
        bias=True,
        high=False,
        weight="logsigmoid",
        rounded=False,
        shared=block.n_shared,
    )
    spec, tensors = spec_of(experts_of(switch, dtype), router, dtype, small)
    spec, tensors = with_shared(spec, tensors, block.shared_experts, dtype, "router", "swiglu")
    weight = block.gate_weight
    weight = (weight if weight.dtype == dtype else weight.astype(dtype)).T

    def enter(run: Run) -> Callable[..., Any]:
        def call(x: Any) -> Any:
            return run(x.shape, x, x @ weight)

        return call

    return Site(path, block, spec, tensors, enter)


BLOCKS: dict[str, Callable[[str, Any, Any], Site]] = {
    "Qwen3MoeSparseMoeBlock": qwen3_moe,
    "OlmoeSparseMoeBlock": olmoe,
    "MixtralSparseMoeBlock": mixtral,
    "PhiMoESparseMoeBlock": phimoe,
    "Lfm2MoeSparseMoeBlock": lfm2_moe,
    "Dots1MoE": dots1,
    "MLPBlock": gpt_oss,
    "Qwen3NextSparseMoeBlock": qwen3_next,
    "Qwen3_5MoeSparseMoeBlock": qwen3_next,
    "NemotronHMoE": nemotron_h,
    "DeepseekV4MoE": deepseek_v4,
    "InklingSparseMoE": inkling,
}
SWITCHES = ("SwitchGLU", "SwitchMLP", "InklingSwitchGLU")


def sites(model: Any, dtype: Any) -> tuple[list[Site], list[tuple[str, str]]]:
    """Every block that kernels exist for, and what is left with its reason, in layer order."""
    found: list[Site] = []
    left: list[tuple[str, str]] = []
    owned: set[str] = set()
    for path, module in sorted(model.named_modules(), key=lambda item: _natural(item[0])):
        name = type(module).__name__
        gemma = name == "DecoderLayer" and "gemma4" in type(module).__module__
        recognise = BLOCKS.get(name)
        if gemma and "router" in module and "experts" in module:
            recognise = gemma4
        if recognise is None:
            if name in SWITCHES and not any(path.startswith(p + ".") for p in owned):
                parent = path.rpartition(".")[0] or path
                left.append((parent, "no recogniser for this kind of block"))
            continue
        owned.add(path)
        try:
            if dtype is None:
                raise Unsupported("activations are neither bfloat16 nor float16")
            found.append(recognise(path, module, dtype))
        except Unsupported as reason:
            left.append((path, str(reason)))
        except (AttributeError, KeyError) as missing:
            left.append((path, f"not the block of mlx-lm 0.32.2 or mlx-vlm 0.7.10: {missing}"))
    return found, left


def _natural(path: str) -> list[tuple[int, int, str]]:
    return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in path.split(".")]


def activations(model: Any) -> Any:
    """The activations' type: what most norm weights are in; None if there are none."""
    count: dict[Any, int] = {}
    for _, module in model.named_modules():
        if "norm" in type(module).__name__.lower() and "weight" in module:
            kind = module["weight"].dtype
            count[kind] = count.get(kind, 0) + 1
    return max(count, key=count.__getitem__, default=None)
