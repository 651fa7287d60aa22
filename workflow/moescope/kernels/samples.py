"""Random blocks of the families' shapes, and how far a result is from the exact one.

For the kernels' tests and benchmark: nothing here is needed to fuse a model.
"""

from typing import Any

import mlx.core as mx

from .spec import Router, Shared, Spec, Tensors
from .weights import Format, Projection

BF16 = "bfloat16"
A4 = Format("affine", 4, 64, BF16)
FORMATS = {
    "affine4g32": Format("affine", 4, 32, BF16),
    "affine4g64": A4,
    "affine4g128": Format("affine", 4, 128, BF16),
    "affine6g64": Format("affine", 6, 64, BF16),
    "affine8g64": Format("affine", 8, 64, BF16),
    "mxfp4": Format("mxfp4", 4, 32, "uint8"),
    "mxfp8": Format("mxfp8", 8, 32, "uint8"),
    "nvfp4": Format("nvfp4", 4, 16, "uint8"),
    "dense": Format("dense", 16, 32, ""),
}


def bits(shape: tuple[int, ...]) -> Any:
    """Random 32-bit words."""
    return mx.random.randint(-(2**31), 2**31 - 1, shape, mx.int32).view(mx.uint32)


def projection(
    form: Format, experts: int, rows: int, columns: int, bias: bool = False, scaled: bool = False
) -> Projection:
    """Random weights of about unit gain in this format, stacked (experts 0: a plain linear)."""
    lead = (experts,) if experts else ()
    kind = getattr(mx, form.scale if form.scale not in ("", "uint8") else BF16)
    gain = columns**-0.5
    scales = biases = factor = None
    if form.mode == "dense":
        weight = (mx.random.normal((*lead, rows, columns)) * gain).astype(mx.bfloat16)
    else:
        words = columns * form.bits // 32
        weight = bits((*lead, rows, words))
        groups = (*lead, rows, columns // form.group)
        if form.mode == "affine":
            levels = 2**form.bits
            scales = mx.random.uniform(0.5, 1.5, groups) * (gain * 3.4 / levels)
            biases = (-scales * (levels - 1) / 2).astype(kind)
            scales = scales.astype(kind)
        elif form.mode == "nvfp4":
            scales = mx.random.randint(0x20, 0x30, groups).astype(mx.uint8)  # about 0.06 to 1
            factor = mx.full((experts,), gain) if scaled else None
        else:  # powers of two about the gain; mxfp8's bytes reach 448, so far smaller, and no NaN
            low = 127 - (11 if form.mode == "mxfp4" else 16)
            scales = mx.random.randint(low, low + 3, groups).astype(mx.uint8)
            if form.mode == "mxfp8":
                weight = weight & 0x7B7B7B7B | (bits(weight.shape) & 0x80808080)
    offset = mx.random.normal((experts, rows)).astype(kind) * 0.1 if bias else None
    mx.eval([a for a in (weight, scales, biases, factor, offset) if a is not None])
    return Projection(form, rows, columns, max(experts, 1), weight, scales, biases, offset, factor)


def tensors_of(spec: Spec, small: dict[str, Any] | None = None) -> Tensors:
    """Random tensors for a spec."""
    e, how = spec.router.experts, {"bias": spec.biased, "scaled": spec.scaled}
    shared = spec.shared

    def plain(form: Format | None, rows: int, columns: int) -> Projection | None:
        return projection(form, 0, rows, columns) if form else None

    return Tensors(
        projection(spec.gate, e, spec.width, spec.hidden, **how) if spec.gate else None,
        projection(spec.up, e, spec.width, spec.hidden, **how),
        projection(spec.down, e, spec.out, spec.width, **how),
        plain(shared.gate, shared.width, spec.hidden) if shared else None,
        plain(shared.up, shared.width, spec.hidden) if shared else None,
        plain(shared.down, spec.out, shared.width) if shared else None,
        small or {},
    )


def block(
    form: Format = A4,
    experts: int = 128,
    top_k: int = 8,
    hidden: int = 2048,
    width: int = 768,
    down: Format | None = None,
    gated: bool = True,
    router: Router | None = None,
    **more: Any,
) -> Spec:
    """A spec with qwen3-30b-a3b's shape unless said otherwise."""
    router = router or Router(experts, top_k, experts, score="softmax", weight="sum")
    more.setdefault("activation", "swiglu" if gated else "relu2")
    more.setdefault("dtype", form.scale if form.scale == "float16" else BF16)
    return Spec(
        hidden=hidden,
        width=width,
        out=hidden,
        gate=form if gated else None,
        up=form,
        down=down or form,
        router=router,
        **more,
    )


def sigmoid_router(experts: int, top_k: int, **more: Any) -> Router:
    """dots1's and its kin's."""
    values = {"score": "sigmoid", "bias": True, "high": False, "weight": "sum", "rounded": False}
    return Router(experts, top_k, experts, **(values | more))


def cases() -> dict[str, tuple[Spec, dict[str, Any]]]:
    """Every format at one shape, then every kind of block at its family's shape."""
    found: dict[str, tuple[Spec, dict[str, Any]]] = {
        name: (block(form, scaled=name == "nvfp4"), {}) for name, form in FORMATS.items()
    }
    half = Format("affine", 4, 64, "float16")
    found["float16"] = (block(half), {})
    found["mixed 4/6"] = (block(down=FORMATS["affine6g64"]), {})
    found["gpt_oss"] = (
        block(
            FORMATS["mxfp4"], 32, 4, 2880, 2880, router=Router(32, 4, 32, weight="softmax"),
            activation="swiglu_oai", limit=7.0, alpha=1.702, biased=True,
        ),
        {},
    )  # fmt: skip
    found["mixtral"] = (
        block(experts=8, top_k=2, hidden=4096, width=14336,
              router=Router(8, 2, 8, high=False, weight="softmax")),
        {},
    )  # fmt: skip
    found["gemma4"] = (
        block(
            width=704, hidden=2816, activation="geglu",
            router=Router(128, 8, 128, weight="softmax_loose", expert_factor=True),
            form=FORMATS["affine4g32"],
        ),
        {"expert_factor": mx.random.randint(64, 192, (128,)).astype(mx.float32) / 128},
    )  # fmt: skip
    found["nemotron_h"] = (
        block(
            hidden=2688, width=1856, top_k=6, gated=False, activation="relu2",
            router=sigmoid_router(128, 6, epsilon=1e-20, factor=2.5),
            shared=Shared(3712, None, A4, A4),
        ),
        {"choice_bias": mx.random.normal((128,)) * 0.1},
    )  # fmt: skip
    found["qwen3_next"] = (
        block(experts=512, top_k=10, width=512, shared=Shared(512, A4, A4, A4, "gate")), {}
    )  # fmt: skip
    found["deepseek_v4"] = (
        block(
            experts=256, top_k=6, hidden=4096, width=2048,
            activation="swiglu_clamped", limit=1.5,
            router=sigmoid_router(256, 6, score="sqrt_softplus", epsilon=1e-20, factor=1.5),
            shared=Shared(2048, A4, A4, FORMATS["affine8g64"]),
        ),
        {"choice_bias": mx.random.normal((256,)) * 0.1},
    )  # fmt: skip
    found["inkling"] = (
        block(
            experts=64, top_k=6, width=1024, scaled=True,
            router=Router(64, 6, 66, score="sigmoid", bias=True, high=False,
                          weight="logsigmoid", rounded=False, shared=2),
            shared=Shared(2048, A4, A4, A4, "router"),
        ),
        {
            "choice_bias": mx.random.normal((64,)) * 0.1,
            "route_factor": mx.array([8.0]),
            "gate_factor": mx.random.uniform(0.5, 1.5, (64,)),
            "down_factor": mx.random.uniform(0.5, 1.5, (64,)),
        },
    )  # fmt: skip
    return found


SERIES = (768, 1792, 2880, 4096, 8192, 14336)  # of studies/fused-crossover-h200.yaml


def shapes() -> dict[str, tuple[Spec, dict[str, Any]]]:
    """Blocks of the checkpoints in studies/ that are of none of the shapes in ``cases``."""
    by_bias = {"score": "softmax", "weigh_choice": True, "epsilon": 1e-20, "rounded": False}
    lfm2 = {"experts": 32, "top_k": 4, "width": 1792}
    six = FORMATS["affine6g64"]
    deepseek = {
        "form": FORMATS["mxfp4"], "experts": 256, "top_k": 6, "hidden": 4096, "width": 2048,
        "activation": "swiglu_clamped", "limit": 10.0, "shared": Shared(2048, A4, A4, A4),
    }  # fmt: skip
    scores = {"score": "sqrt_softplus", "epsilon": 1e-20, "factor": 1.5}
    table = mx.stack([mx.random.permutation(256)[:6] for _ in range(4)]).astype(mx.int32)
    inkling = {
        "experts": 256, "top_k": 6, "hidden": 4096, "width": 2048, "scaled": True,
        "router": Router(256, 6, 258, score="sigmoid", bias=True, high=False,
                         weight="logsigmoid", rounded=False, shared=2),
    }  # fmt: skip
    dense, fp4 = FORMATS["dense"], FORMATS["nvfp4"]

    def bias(count: int) -> dict[str, Any]:
        return {"choice_bias": mx.random.normal((count,)) * 0.1}

    scales = bias(256) | {"route_factor": mx.array([8.0])}
    return {
        "lfm2-moe-6l": (
            block(**lfm2, router=Router(32, 4, 32, bias=True, weight="sum", **by_bias)), bias(32)
        ),
        "lfm2-moe-6l, mlx-lm": (
            block(**lfm2, router=Router(32, 4, 32, score="sigmoid", bias=True, weight="sum",
                                        epsilon=1e-6)),
            bias(32),
        ),
        "dots1-3l": (
            block(A4, 128, 6, 4096, 1408, six, router=sigmoid_router(128, 6, factor=2.5),
                  shared=Shared(2816, A4, A4, six)),
            bias(128),
        ),
        "deepseek-v4-3l": (block(router=sigmoid_router(256, 6, **scores), **deepseek), bias(256)),
        "deepseek-v4-3l, by token": (
            block(router=sigmoid_router(256, 6, select="table", bias=False, **scores), **deepseek),
            {"table": table},
        ),
        "gemma4-6l": (
            block(width=704, hidden=2816, activation="geglu",
                  router=Router(128, 8, 128, weight="softmax_loose", expert_factor=True)),
            {"expert_factor": mx.random.randint(64, 192, (128,)).astype(mx.float32) / 128},
        ),
        "inkling-affine-2l": (
            block(**inkling, shared=Shared(4096, dense, dense, dense, "router")),
            scales | {"gate_factor": mx.random.uniform(0.5, 1.5, (256,))},
        ),
        "inkling-nvfp4-2l": (
            block(fp4, **inkling, shared=Shared(4096, fp4, fp4, fp4, "router")), scales
        ),
        "olmoe-8l": (
            block(experts=64, width=1024,
                  router=Router(64, 8, 64, score="softmax", high=False)),
            {},
        ),
    } | {
        f"crossover-w{width}": (block(experts=8, top_k=4, width=width), {}) for width in SERIES
    }  # fmt: skip


def inputs_of(spec: Spec) -> tuple[Any, list[Any]]:
    """x, and what the kernels take after it."""
    kind = getattr(mx, spec.dtype)
    x = mx.random.normal((1, 1, spec.hidden)).astype(kind)
    dynamic = [(mx.random.normal((1, 1, spec.router.logits)) * 2).astype(kind)]
    if spec.router.select == "table":
        dynamic.append(mx.array([1], mx.int32))
    if spec.shared and spec.shared.weight == "gate":
        dynamic.append(mx.random.normal((1, 1, 1)).astype(kind))
    mx.eval(x, dynamic)
    return x, dynamic


def distance(y: Any, exact: Any) -> dict[str, float]:
    """y against the float32 result rounded once: normalised RMS, share of elements that differ."""
    once = exact.reshape(-1).astype(y.dtype).astype(mx.float32)
    y = y.reshape(-1).astype(mx.float32)
    error = mx.sqrt(mx.mean((y - once) ** 2) / mx.mean(once**2))
    return {
        "nrms": error.item(),
        "differ": mx.sum(y != once).item() / y.size,
        "finite": bool(mx.all(mx.isfinite(y)).item()),
    }


def routers() -> dict[str, Router]:
    """Every kind of router, at its family's size."""
    return {
        "softmax, sum (qwen3_moe)": Router(128, 8, 128, score="softmax", weight="sum"),
        "softmax, low (olmoe)": Router(64, 8, 64, score="softmax", high=False),
        "softmax of 512 (qwen3_next)": Router(512, 10, 512, score="softmax", weight="sum"),
        "logits, softmax (gpt_oss)": Router(32, 4, 32, weight="softmax"),
        "logits, low, softmax (mixtral)": Router(8, 2, 8, high=False, weight="softmax"),
        "loose softmax (gemma4)": Router(
            128, 8, 128, weight="softmax_loose", expert_factor=True
        ),
        "sigmoid in type, bias (lfm2)": Router(
            32, 4, 32, score="sigmoid", bias=True, weight="sum", epsilon=1e-6
        ),
        "softmax in float32, bias (lfm2, mlx-vlm)": Router(
            32, 4, 32, score="softmax", bias=True, weigh_choice=True, weight="sum", epsilon=1e-20,
            rounded=False,
        ),
        "sigmoid (dots1)": sigmoid_router(128, 6, factor=2.5),
        "sqrt softplus (deepseek_v4)": sigmoid_router(
            256, 6, score="sqrt_softplus", epsilon=1e-20, factor=1.5
        ),
        "logsigmoid (inkling)": Router(
            64, 6, 66, score="sigmoid", bias=True, high=False, weight="logsigmoid",
            rounded=False, shared=2,
        ),
        "softmax in float32, bias in the choice (deepseek_v4)": sigmoid_router(
            256, 6, score="softmax", weight="score"
        ),
        "by token (deepseek_v4)": sigmoid_router(
            256, 6, select="table", score="sqrt_softplus", bias=False, epsilon=1e-20, factor=1.5
        ),
        "sparsemixer (phimoe)": Router(
            16, 2, 16, select="sparsemixer", high=False, jitter=0.01
        ),
    }  # fmt: skip


def small_of(router: Router) -> dict[str, Any]:
    """Small arrays for a router: biases in sixteenths, so that they make ties too."""
    found: dict[str, Any] = {}
    if router.bias:
        found["choice_bias"] = mx.random.randint(-2, 3, (router.experts,)).astype(mx.float32) / 16
    if router.expert_factor:
        factor = mx.random.uniform(0.5, 1.5, (router.experts,)).astype(mx.bfloat16)
        found["expert_factor"] = factor.astype(mx.float32)
    if router.weight == "logsigmoid":
        found["route_factor"] = mx.array([8.0])
    if router.select == "table":
        rows = [mx.random.permutation(router.experts)[: router.top_k] for _ in range(4)]
        found["table"] = mx.stack(rows).astype(mx.int32)
    return found


def cancelling(hidden: int = 2048, width: int = 768) -> tuple[Spec, Tensors, tuple[Any, Any]]:
    """Two experts, one the other's negative, weighed 0.5 and 0.49: what is left is 2 % of either.

    Returns spec, tensors and the picks (experts, weights).
    """
    router = Router(2, 2, 0, select="given", rounded=False)
    spec = block(experts=2, top_k=2, hidden=hidden, width=width, router=router)

    def twice(rows: int, columns: int, factor: float) -> Projection:
        p = projection(A4, 1, rows, columns)
        both = [mx.concatenate([a, a * factor]) for a in (p.scales, p.biases)]
        w = mx.concatenate([p.weight, p.weight])
        return Projection(p.format, rows, columns, 2, w, *both, None, None)

    tensors = Tensors(
        twice(width, hidden, 1.0), twice(width, hidden, 1.0), twice(hidden, width, -1.0)
    )
    return spec, tensors, (mx.array([0, 1], mx.uint32), mx.array([0.5, 0.49], mx.float32))
