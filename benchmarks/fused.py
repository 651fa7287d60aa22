"""The fused kernels measured on one CUDA device: correctness, kernel times, launches, whole model.

    PYTHONPATH=workflow python benchmarks/fused.py SECTION... [--out FOLDER] [--rounds 5] ...

Sections, each of which prints its figures and writes SECTION.json:
  correct   every weight format and block against a float32 reference; same bits again, and over
            geometries; experts that nearly cancel
  routers   chosen experts and weights against MLX's own operations, with ties
  kernels   kernel time per shape and geometry as a share of this session's copy ceiling (CUPTI)
  launches  kernels per token and per MoE layer of a short model: as shipped, fused, block skipped (CUPTI)
  model     a whole model's decode, interleaved: as shipped, again (noise floor), fused, block skipped

``kernels`` and ``launches`` want a process of their own: CUPTI's records cost host time. Everything
is random weights of a published shape; nothing is downloaded. Replaced by studies once they run.
"""

import argparse
import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TRACED = {"kernels", "launches"}
if TRACED & set(sys.argv):
    from moescope.worker import cupti

    cupti.prepare()

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402

from moescope.kernels import cuda, device, fuse, layout, reference, unfuse  # noqa: E402
from moescope.kernels.layout import Geometry  # noqa: E402
from moescope.kernels.router import route  # noqa: E402
from moescope.kernels.spec import Router, Shared, Spec, Tensors  # noqa: E402
from moescope.kernels.weights import Format, Projection  # noqa: E402

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


# --- random blocks -----------------------------------------------------------------------------


def bits(shape: tuple[int, ...]) -> Any:
    """Random 32-bit words."""
    return mx.random.randint(-(2**31), 2**31 - 1, shape, mx.int32).view(mx.uint32)


def projection(
    form: Format, experts: int, rows: int, columns: int, bias: bool = False, scaled: bool = False
) -> Projection:
    """Random weights of about unit gain in this format, stacked over experts (0: a plain linear)."""
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
            factor = mx.full((experts,), gain * 448 * 6) if scaled else None
        else:  # powers of two about the gain; mxfp8's bytes reach 448, so far smaller, and no NaN
            low = 127 - (11 if form.mode == "mxfp4" else 16)
            scales = mx.random.randint(low, low + 3, groups).astype(mx.uint8)
            if form.mode == "mxfp8":
                weight = weight & 0x7B7B7B7B | (bits(weight.shape) & 0x80808080)
    offset = mx.random.normal((experts, rows)).astype(kind) * 0.1 if bias else None
    mx.eval([a for a in (weight, scales, biases, factor, offset) if a is not None])
    return Projection(
        form, rows, columns, max(experts, 1), weight, scales, biases, offset, factor
    )


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
        {"expert_factor": mx.random.uniform(0.5, 1.5, (128,))},
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


def inputs_of(spec: Spec) -> tuple[Any, list[Any]]:
    """x, and what the kernels take after it."""
    kind = getattr(mx, spec.dtype)
    x = mx.random.normal((1, 1, spec.hidden)).astype(kind)
    dynamic = [(mx.random.normal((1, 1, spec.router.logits)) * 2).astype(kind)]
    if spec.shared and spec.shared.weight == "gate":
        dynamic.append(mx.random.normal((1, 1, 1)).astype(kind))
    mx.eval(x, dynamic)
    return x, dynamic


def distance(y: Any, exact: Any) -> dict[str, float]:
    """y against the float32 result rounded once to y's type: normalised RMS, elements that differ."""
    once = exact.reshape(-1).astype(y.dtype).astype(mx.float32)
    y = y.reshape(-1).astype(mx.float32)
    error = mx.sqrt(mx.mean((y - once) ** 2) / mx.mean(once**2))
    return {
        "nrms": error.item(),
        "differ": mx.sum(y != once).item() / y.size,
        "finite": bool(mx.all(mx.isfinite(y)).item()),
    }


def built(spec: Spec, tensors: Tensors, chosen: Geometry) -> Callable[..., Any]:
    """The kernels' run function on this device."""
    return cuda.build(spec, tensors, chosen, device.current().cores)


# --- sections ----------------------------------------------------------------------------------


def correct(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Parity, and the same bits again under churn of the allocator and over geometries."""
    rows = []
    for name, (spec, small) in cases().items():
        if args.cases and name not in args.cases:
            continue
        begun = time.perf_counter()
        tensors = tensors_of(spec, small)
        row: dict[str, Any] = {"case": name, "spec": spec.label}
        try:
            run = built(spec, tensors, Geometry())
            worst: dict[str, float] = {"nrms": 0.0, "differ": 0.0}
            for _ in range(3):
                x, dynamic = inputs_of(spec)
                started = time.perf_counter()
                y = run(x.shape, x, *dynamic)
                mx.eval(y)
                row.setdefault("first_call_s", time.perf_counter() - started)
                given = {"shared_logit": dynamic[1]} if len(dynamic) > 1 else {}
                exact = reference.block(spec, tensors, x, dynamic[0], **given)
                seen = distance(y, exact)
                worst = {k: max(v, worst.get(k, 0)) for k, v in seen.items() if k != "finite"}
                row["finite"] = row.get("finite", True) and seen["finite"]
            row |= worst
            same = True
            for i in range(20):
                mx.eval(mx.zeros((1000 * (i + 1),)) + 1)
                same = same and mx.array_equal(y, run(x.shape, x, *dynamic)).item()
            row["same_bits_again"] = same
            if name in ("affine4g64", "deepseek_v4", "gpt_oss"):
                for other in (Geometry(1, 8, 0), Geometry(2, 16, 8), Geometry(4, 32, 24)):
                    z = built(spec, tensors, other)(x.shape, x, *dynamic)
                    row.setdefault("same_bits_geometries", True)
                    row["same_bits_geometries"] &= mx.array_equal(y, z).item()
        except Exception as error:
            row["error"] = str(error)[:3000]
        row["seconds"] = time.perf_counter() - begun
        rows.append(row)
        show(row)
    rows.append(cancelling())
    show(rows[-1])
    return rows


def cancelling() -> dict[str, Any]:
    """Two experts whose weighted outputs nearly cancel: what is left is 2 % of either."""
    router = Router(2, 2, 0, select="given", rounded=False)
    spec = block(experts=2, top_k=2, router=router)
    one = projection(A4, 1, 768, 2048), projection(A4, 1, 768, 2048), projection(A4, 1, 2048, 768)

    def twice(p: Projection, factor: float) -> Projection:
        both = [mx.concatenate([a, a * factor]) for a in (p.scales, p.biases)]
        w = mx.concatenate([p.weight, p.weight])
        return Projection(p.format, p.rows, p.columns, 2, w, *both, None, None)

    tensors = Tensors(twice(one[0], 1.0), twice(one[1], 1.0), twice(one[2], -1.0))
    run = built(spec, tensors, Geometry())
    picks = mx.array([0, 1], mx.uint32), mx.array([0.5, 0.49], mx.float32)
    x = mx.random.normal((1, 1, 2048)).astype(mx.bfloat16)
    y = run(x.shape, x, *picks)
    exact = reference.block(spec, tensors, x, picks=picks)
    parts = reference.experts(spec, tensors, x, picks[0])
    ratio = mx.sqrt(mx.mean(exact**2) / mx.mean((picks[1][0] * parts[0]) ** 2)).item()
    return {"case": "nearly cancelling", "left_of_each": ratio, **distance(y, exact)}


def routers(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The router against MLX's own operations on this device: random, coarse (ties), all equal."""
    kinds = {
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
        "sigmoid (dots1)": sigmoid_router(128, 6, factor=2.5),
        "sqrt softplus (deepseek_v4)": sigmoid_router(
            256, 6, score="sqrt_softplus", epsilon=1e-20, factor=1.5
        ),
        "logsigmoid (inkling)": Router(
            64, 6, 66, score="sigmoid", bias=True, high=False, weight="logsigmoid",
            rounded=False, shared=2,
        ),
        "sparsemixer (phimoe)": Router(16, 2, 16, select="sparsemixer", jitter=0.01),
    }  # fmt: skip
    rows = []
    for name, router in kinds.items():
        small = {
            "choice_bias": (mx.random.randint(-2, 3, (router.experts,)) / 16),
            "expert_factor": mx.random.uniform(0.5, 1.5, (router.experts,)).astype(mx.bfloat16),
            "route_factor": mx.array([8.0]),
        }
        needed = {"choice_bias": router.bias, "expert_factor": router.expert_factor}
        needed["route_factor"] = router.weight == "logsigmoid"
        small = {k: v.astype(mx.float32) for k, v in small.items() if needed[k]}
        spec = block(FORMATS["affine4g32"], router.experts, router.top_k, 128, 32, router=router)
        run = built(spec, tensors_of(spec, small), Geometry(prefetch=0))
        x = mx.zeros((1, 1, 128), mx.bfloat16)
        sets = order = 0
        gap, trials = 0.0, 3 * args.trials
        for i in range(trials):
            logits = mx.random.normal((router.logits,)) * 2
            if i % 3 == 1:
                logits = mx.round(logits * 2) / 2
            if i % 3 == 2 and i < 9:
                logits = mx.zeros((router.logits,)) + i
            logits = logits.astype(mx.bfloat16)
            chosen, weights = cuda.choice(spec, run.first_half(x, logits)[0])
            want, exact = route(router, logits, small)
            k = router.top_k
            a, b = chosen.tolist(), want.tolist()
            sets += sorted(a) == sorted(b)
            order += a == b
            have = dict(zip(a, weights.tolist(), strict=True))
            need = dict(zip(b, exact.astype(mx.float32).tolist()[:k], strict=True))
            scale = max(need.values())
            gap = max([gap, *(abs(have[e] - need[e]) / scale for e in have if e in need)])
        row = {"router": name, "trials": trials, "same_set": sets, "same_order": order, "gap": gap}
        rows.append(row)
        show(row)
    return rows


SHAPES = {
    "6 of 256, 4096 x 2048": (256, 6, 4096, 2048, 3),
    "8 of 128, 2048 x 768": (128, 8, 2048, 768, 12),
    "2 of 8, 4096 x 14336": (8, 2, 4096, 14336, 3),
}


def _cuda_runtime() -> Any:
    places = [Path(p) for p in [*os.environ.get("LD_LIBRARY_PATH", "").split(":"), *sys.path] if p]
    found = [f for p in places for f in [*p.glob("libcudart.so*"), *p.glob("nvidia/*/lib/libcudart.so*")]]
    for name in ["libcudart.so.13", "libcudart.so", *map(str, found)]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise RuntimeError("libcudart is not on the library path")


def copy_ceiling() -> list[float]:
    """Bytes read plus written per second of a device-to-device copy of 4 GiB, seven times."""
    runtime = _cuda_runtime()
    size = 4 << 30
    a, b = ctypes.c_void_p(), ctypes.c_void_p()
    first, last = ctypes.c_void_p(), ctypes.c_void_p()
    codes = [runtime.cudaMalloc(ctypes.byref(p), ctypes.c_size_t(size)) for p in (a, b)]
    codes += [runtime.cudaEventCreate(ctypes.byref(e)) for e in (first, last)]
    rates = []
    for _ in range(8):
        codes.append(runtime.cudaEventRecord(first, None))
        codes.append(runtime.cudaMemcpyAsync(a, b, ctypes.c_size_t(size), 3, None))
        codes.append(runtime.cudaEventRecord(last, None))
        codes.append(runtime.cudaEventSynchronize(last))
        took = ctypes.c_float()
        codes.append(runtime.cudaEventElapsedTime(ctypes.byref(took), first, last))
        rates.append(2 * size / (took.value / 1e3))
    codes += [runtime.cudaFree(p) for p in (a, b)]
    if any(codes):
        raise RuntimeError(f"CUDA runtime errors in the copy: {codes}")
    return rates[1:]


def kernels(args: argparse.Namespace) -> dict[str, Any]:
    """Kernel times of chains over layers, so that weights come from memory; by CUPTI."""
    ceiling = copy_ceiling()
    found: dict[str, Any] = {"copy_bytes_per_s": ceiling, "shapes": {}}
    show({"copy ceiling, TB/s": spread([r / 1e12 for r in ceiling])})
    best_rate = statistics.median(ceiling)
    for name, (experts, top_k, hidden, width, layers) in SHAPES.items():
        spec = block(A4, experts, top_k, hidden, width)
        weights = [tensors_of(spec) for _ in range(layers)]
        floor = spec.expert_bytes() / best_rate
        found["shapes"][name] = {"bytes": spec.expert_bytes(), "floor_us": floor * 1e6, "rows": []}
        for text in args.geometries:
            target, _, rest = text.partition("/")
            layout.DOWN_WARPS = int(target)
            row: dict[str, Any] = {"shape": name, "down_warps": int(target), "geometry": rest}
            try:
                row |= chain_times(spec, weights, layout.geometry(rest), args.repeats)
                row["share"] = [floor / v for v in reversed(row["total_us_range"])]
                row["share"] = [s * 1e6 for s in row["share"]]
                row["share_median"] = floor * 1e6 / row["total_us"]
            except Exception as error:
                row["error"] = str(error)[:2000]
            found["shapes"][name]["rows"].append(row)
            show(row)
        layout.DOWN_WARPS = 24
        del weights
        mx.clear_cache()
    return found


def chain_times(
    spec: Spec, weights: list[Tensors], chosen: Geometry, repeats: int
) -> dict[str, Any]:
    """µs of both halves, their sum per call: median over calls, range over repeats' medians."""
    runs = [built(spec, t, chosen) for t in weights]
    x, _ = inputs_of(spec)
    count = spec.router.logits
    logits = [
        [(mx.random.normal((count,)) * 2).astype(mx.bfloat16) for _ in runs] for _ in range(8)
    ]
    mx.eval(logits)

    def chain() -> Any:
        y = x
        for row in logits:
            for run, l in zip(runs, row, strict=True):
                y = run(x.shape, y, l)
        return y

    mx.eval(chain())
    mx.synchronize()
    host = []
    for _ in range(3):
        started = time.perf_counter()
        y = chain()
        middle = time.perf_counter()
        mx.async_eval(y)
        end = time.perf_counter()
        mx.eval(y)
        calls = len(logits) * len(runs)
        host.append(((middle - started) / calls * 1e6, (end - middle) / calls * 1e6))
    totals, halves, gaps = [], {"gate_up": [], "down": []}, []
    for _ in range(repeats):
        with cupti.recording("none") as events:
            mx.eval(chain())
            mx.synchronize()
        each: dict[str, list[float]] = {"gate_up": [], "down": []}
        for row in events.kernels:
            for kind, times in each.items():
                if f"moescope_{kind}" in row[0]:
                    times.append((row[2] - row[1]) / 1e3)
        medians = {kind: statistics.median(times) for kind, times in each.items()}
        for kind, value in medians.items():
            halves[kind].append(value)
        totals.append(sum(medians.values()))
        starts = sorted((r[1], r[2]) for r in events.kernels)
        gaps.append(statistics.median(b[0] - a[1] for a, b in zip(starts, starts[1:], strict=False)) / 1e3)
    return {
        "gate_up_us": statistics.median(halves["gate_up"]),
        "down_us": statistics.median(halves["down"]),
        "total_us": statistics.median(totals),
        "total_us_range": [min(totals), max(totals)],
        "gap_us": statistics.median(gaps),
        "host_us": {"build": min(h[0] for h in host), "encode": min(h[1] for h in host)},
        "finite": bool(mx.all(mx.isfinite(chain())).item()),
    }


# --- whole model -------------------------------------------------------------------------------


QWEN3 = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "vocab_size": 151936, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "max_position_embeddings": 40960, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": 48, "intermediate_size": 6144,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False,
    "norm_topk_prob": True,
}  # fmt: skip


def qwen3(layers: int) -> Any:
    """Qwen3-30B-A3B's shape with random weights, affine 4-bit as mlx-lm quantises it."""
    from mlx_lm.models.qwen3_moe import Model, ModelArgs

    mx.random.seed(7)
    model = Model(ModelArgs.from_dict(QWEN3 | {"num_hidden_layers": layers}))
    predicate = getattr(model, "quant_predicate", None)

    def quantised(path: str, module: Any) -> Any:
        if not hasattr(module, "to_quantized"):
            return False
        return predicate(path, module) if predicate else True

    nn.quantize(model, 64, 4, class_predicate=quantised)
    model.set_dtype(mx.bfloat16)
    model.eval()
    for layer in model.layers:
        mx.eval(layer.parameters())
    mx.eval(model.parameters())
    return model


def skip(model: Any) -> Callable[[], None]:
    """Every MoE block gives zeros at once; returns what takes that back."""
    changed = []
    zeros = mx.zeros((1, 1, model.args.hidden_size), mx.bfloat16)
    mx.eval(zeros)

    def call(self: Any, x: Any) -> Any:
        return zeros if x.size == x.shape[-1] else mx.zeros_like(x)

    for layer in model.layers:
        before = type(layer.mlp)
        object.__setattr__(layer.mlp, "__class__", type(before.__name__, (before,), {"__call__": call}))
        changed.append((layer.mlp, before))

    def back() -> None:
        for module, kind in changed:
            object.__setattr__(module, "__class__", kind)

    return back


def decode(model: Any, prompt: list[int], tokens: int) -> tuple[list[float], list[int]]:
    """Seconds between tokens and the tokens, by mlx-lm's own generate_step."""
    from mlx_lm.generate import generate_step

    times, made = [], []
    mx.synchronize()
    for token, _ in generate_step(mx.array(prompt), model, max_tokens=tokens):
        times.append(time.perf_counter())
        made.append(int(token))
    mx.synchronize()
    return [b - a for a, b in zip(times, times[1:], strict=False)], made


class Arm:
    """A change of the model for the time of a run."""

    def __init__(self, name: str, apply: Callable[[Any], Callable[[], Any]]):
        self.name, self.apply = name, apply


def arms() -> list[Arm]:
    """As shipped, again, fused, block skipped."""

    def fused(model: Any) -> Callable[[], Any]:
        report = fuse(model)
        if report.left or not report.fused:
            raise RuntimeError(f"not every block is fused:\n{report}")
        return lambda: unfuse(model)

    same = Arm("shipped", lambda model: lambda: None)
    again = Arm("again", same.apply)
    return [same, again, Arm("fused", fused), Arm("skipped", skip)]


def launches(args: argparse.Namespace) -> dict[str, Any]:
    """Kernels per token of a model of few layers, by CUPTI; per layer by the difference."""
    found: dict[str, Any] = {}
    counts: dict[str, dict[int, float]] = {}
    for layers in (2, 4):
        model = qwen3(layers)
        for arm in arms():
            if arm.name == "again":
                continue
            back = arm.apply(model)
            decode(model, [1, 2, 3, 4], 4)
            with cupti.recording("none") as events:
                decode(model, [1, 2, 3, 4], 4)
            with cupti.recording("none") as longer:
                decode(model, [1, 2, 3, 4], 12)
            back()
            counts.setdefault(arm.name, {})[layers] = (
                len(longer.kernels) - len(events.kernels)
            ) / 8
            if layers == 4:
                found[f"{arm.name} kernels"] = by_name(longer.kernels)
        del model
        mx.clear_cache()
    per_layer = {name: (c[4] - c[2]) / 2 for name, c in counts.items()}
    found["kernels_per_token"] = counts
    found["kernels_per_layer"] = per_layer
    found["moe_block"] = {
        name: per_layer[name] - per_layer["skipped"] for name in ("shipped", "fused")
    }
    show({k: found[k] for k in ("kernels_per_token", "kernels_per_layer", "moe_block")})
    return found


def by_name(rows: list[tuple]) -> dict[str, list[float]]:
    """Kernel name -> [count, total µs]."""
    found: dict[str, list[float]] = {}
    for row in rows:
        entry = found.setdefault(row[0][:160], [0, 0.0])
        entry[0] += 1
        entry[1] += (row[2] - row[1]) / 1e3
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def model(args: argparse.Namespace) -> dict[str, Any]:
    """Interleaved rounds with a rotating start; per-round ratios with their ranges."""
    begun = time.perf_counter()
    subject = qwen3(args.layers)
    show({"model": f"{args.layers} layers", "seconds": time.perf_counter() - begun})
    found: dict[str, Any] = {"layers": args.layers, "tokens": args.tokens, "runs": []}
    prompt = [(i * 37 + 11) % 1000 for i in range(args.prompt)]
    todo = arms()
    tokens: dict[str, list[int]] = {}
    for arm in todo:  # warm-up: compiles what is to be compiled
        started = time.perf_counter()
        back = arm.apply(subject)
        applied = time.perf_counter()
        decode(subject, prompt, 4)
        first = time.perf_counter()
        _, tokens[arm.name] = decode(subject, prompt, args.tokens)
        back()
        row = {"arm": arm.name, "apply_s": applied - started, "first_s": first - applied}
        found.setdefault("warmup", []).append(row)
        show(row)
    for r in range(args.rounds):
        for arm in todo[r % len(todo) :] + todo[: r % len(todo)]:
            back = arm.apply(subject)
            decode(subject, prompt, 4)
            times, made = decode(subject, prompt, args.tokens)
            back()
            row = {"round": r, "arm": arm.name, "token_s": statistics.median(times)}
            row |= {"mean_s": sum(times) / len(times), "same_tokens": made == tokens[arm.name]}
            found["runs"].append(row)
            show(row)
    rates: dict[str, list[float]] = {}
    for run in found["runs"]:
        rates.setdefault(run["arm"], []).append(run["mean_s"])
    base = rates["shipped"]
    ratios = {
        name: [b / t for b, t in zip(base, times, strict=True)] for name, times in rates.items()
    }
    fused, skipped = ratios["fused"], ratios["skipped"]
    found["ms_per_token"] = {n: spread([t * 1e3 for t in v]) for n, v in rates.items()}
    found["speed_ratio"] = {n: spread(v) for n, v in ratios.items()}
    found["share_of_gain"] = {
        "in speed": spread([(f - 1) / (s - 1) for f, s in zip(fused, skipped, strict=True)]),
        "in time": spread(
            [(1 - 1 / f) / (1 - 1 / s) for f, s in zip(fused, skipped, strict=True)]
        ),
    }
    a, b = tokens["shipped"], tokens["fused"]
    found["greedy"] = {
        "tokens": len(a),
        "first_divergence": next((i for i, (p, q) in enumerate(zip(a, b, strict=True)) if p != q), None),
    }
    show({k: found[k] for k in ("ms_per_token", "speed_ratio", "share_of_gain", "greedy")})
    return found


def spread(values: list[float]) -> dict[str, float]:
    """Median, minimum, maximum, count."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "n": len(values),
    }


def show(row: dict[str, Any]) -> None:
    """One line of a table, numbers short."""

    def short(value: Any) -> Any:
        if isinstance(value, float):
            return float(f"{value:.4g}")
        if isinstance(value, dict):
            return {k: short(v) for k, v in value.items()}
        return [short(v) for v in value] if isinstance(value, list) else value

    print(json.dumps(short(row)), flush=True)


SECTIONS = {f.__name__: f for f in (correct, routers, kernels, launches, model)}
GEOMETRIES = ["24/", "24/warps=16", "24/warps=24", "24/tiles=2,warps=16", "24/prefetch=0", "32/"]


def main() -> None:
    """Run the sections asked for; a failure of one is recorded and the next one runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="+", choices=SECTIONS)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--prompt", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--cases", nargs="*")
    parser.add_argument("--geometries", nargs="*", default=GEOMETRIES)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    here = device.current()
    if here is None or here.language != "cuda":
        sys.exit("benchmarks/fused.py: no CUDA device")
    about = {"mlx": mx.__version__, "device": here.name, "multiprocessors": here.cores}
    show(about)
    failed = False
    for name in args.sections:
        started = time.perf_counter()
        try:
            result = SECTIONS[name](args)
        except Exception as error:
            import traceback

            traceback.print_exc()
            result, failed = {"error": str(error)[:4000]}, True
        took = time.perf_counter() - started
        content = {"schema": "moescope/fused-benchmark/1", "about": about, "seconds": took, name: result}
        (args.out / f"{name}.json").write_text(json.dumps(content, indent=1))
        show({"section": name, "seconds": took})
    sys.exit(failed)


if __name__ == "__main__":
    os.environ.setdefault("MLX_ENABLE_TF32", "0")
    main()
