"""The fused kernels measured on one CUDA device: kernel times, launches, a whole model.

    PYTHONPATH=workflow python benchmarks/fused.py SECTION... [--out FOLDER] [--rounds 5] ...

Sections, each of which prints its figures and writes SECTION.json:
  kernels   kernel time per shape and geometry as a share of this session's copy ceiling (CUPTI)
  launches  kernels per token and per MoE block of a short model: as shipped, fused, skipped (CUPTI)
  model     a whole model's decode, interleaved: as shipped, again (the noise floor), fused, skipped

``kernels`` and ``launches`` want a process of their own: CUPTI's records cost host time. Everything
is random weights of a published shape; nothing is downloaded. Whether results are right is the
tests' matter (tests/kernels/on_gpu.py).
"""

import argparse
import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

TRACED = {"kernels", "launches"}
if TRACED & set(sys.argv):
    from moescope.worker import cupti

    cupti.prepare()

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402

from moescope.kernels import cuda, device, fuse, layout, unfuse  # noqa: E402
from moescope.kernels.samples import A4, block, inputs_of, tensors_of  # noqa: E402
from moescope.kernels.spec import Spec, Tensors  # noqa: E402


def built(spec: Spec, tensors: Tensors, text: str) -> Callable[..., Any]:
    """The kernels' run function on this device; text: a geometry, perhaps with launches=2."""
    items = [i for i in text.split(",") if i]
    os.environ[cuda.LAUNCHES] = "2" if "launches=2" in items else "1"
    chosen = layout.geometry(",".join(i for i in items if not i.startswith("launches=")))
    return cuda.build(spec, tensors, chosen, device.current())


SHAPES = {
    "6 of 256, 4096 x 2048": (256, 6, 4096, 2048, 3),
    "8 of 128, 2048 x 768": (128, 8, 2048, 768, 12),
    "2 of 8, 4096 x 14336": (8, 2, 4096, 14336, 3),
}


def _cuda_runtime() -> Any:
    places = [Path(p) for p in [*os.environ.get("LD_LIBRARY_PATH", "").split(":"), *sys.path] if p]
    found = [
        f for p in places for f in [*p.glob("libcudart.so*"), *p.glob("nvidia/*/lib/libcudart.so*")]
    ]
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
            row: dict[str, Any] = {"shape": name, "geometry": text}
            try:
                row |= chain_times(spec, weights, text, args.repeats)
                low, high = row["total_us_range"]
                row["share"] = [floor * 1e6 / high, floor * 1e6 / low]
                row["share_median"] = floor * 1e6 / row["total_us"]
            except Exception as error:
                row["error"] = str(error)[:2000]
            found["shapes"][name]["rows"].append(row)
            show(row)
        del weights
        mx.clear_cache()
    return found


def chain_times(spec: Spec, weights: list[Tensors], text: str, repeats: int) -> dict[str, Any]:
    """µs of each kernel, their sum per call: median over calls, range over repeats' medians."""
    runs = [built(spec, t, text) for t in weights]
    x, _ = inputs_of(spec)
    count = spec.router.logits
    logits = [
        [(mx.random.normal((count,)) * 2).astype(mx.bfloat16) for _ in runs] for _ in range(8)
    ]
    mx.eval(logits)

    def chain() -> Any:
        y = x
        for row in logits:
            for run, given in zip(runs, row, strict=True):
                y = run(x.shape, y, given)
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
    kinds = ("moe", "gate_up", "down")
    totals, each_kind, gaps = [], {kind: [] for kind in kinds}, []
    for _ in range(repeats):
        with cupti.recording("none") as events:
            mx.eval(chain())
            mx.synchronize()
        each: dict[str, list[float]] = {kind: [] for kind in kinds}
        for row in events.kernels:
            for kind, times in each.items():
                if f"moescope_{kind}" in row[0]:
                    times.append((row[2] - row[1]) / 1e3)
        medians = {kind: statistics.median(times) for kind, times in each.items() if times}
        for kind, value in medians.items():
            each_kind[kind].append(value)
        totals.append(sum(medians.values()))
        starts = sorted((r[1], r[2]) for r in events.kernels)
        gaps.append(statistics.median(b[0] - a[1] for a, b in pairwise(starts)) / 1e3)
    return {
        "kernels_us": {kind: statistics.median(v) for kind, v in each_kind.items() if v},
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
        object.__setattr__(
            layer.mlp, "__class__", type(before.__name__, (before,), {"__call__": call})
        )
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
    return [b - a for a, b in pairwise(times)], made


class Arm:
    """A change of the model's classes: applied once, then put in place and taken back at once."""

    def __init__(self, name: str, apply: Callable[[Any], Callable[[], Any]], model: Any):
        started = time.perf_counter()
        back = apply(model)
        modules = [module for _, module in model.named_modules()]
        self.name, self.kinds = name, [(module, type(module)) for module in modules]
        self.apply_s = time.perf_counter() - started
        back()

    def put(self) -> None:
        """Every module gets the class that it has under this arm."""
        for module, kind in self.kinds:
            if type(module) is not kind:
                object.__setattr__(module, "__class__", kind)


def arms(model: Any) -> list[Arm]:
    """As shipped, again, fused, block skipped."""

    def fused(model: Any) -> Callable[[], Any]:
        report = fuse(model)
        if report.left or not report.fused:
            raise RuntimeError(f"not every block is fused:\n{report}")
        return lambda: unfuse(model)

    def same(model: Any) -> Callable[[], Any]:
        return lambda: None

    ways = {"shipped": same, "again": same, "fused": fused, "skipped": skip}
    return [Arm(name, way, model) for name, way in ways.items()]


def launches(args: argparse.Namespace) -> dict[str, Any]:
    """Kernels per token of a model of four layers, by CUPTI; of a block by the difference from the
    model whose blocks give zeros (where the norm before the block is not run either)."""
    os.environ[cuda.LAUNCHES] = "1"
    found: dict[str, Any] = {}
    counts: dict[str, float] = {}
    layers = 4
    subject = qwen3(layers)
    for arm in arms(subject):
        if arm.name == "again":
            continue
        arm.put()
        decode(subject, [1, 2, 3, 4], 4)
        with cupti.recording("none") as events:
            decode(subject, [1, 2, 3, 4], 4)
        with cupti.recording("none") as longer:
            decode(subject, [1, 2, 3, 4], 12)
        counts[arm.name] = (len(longer.kernels) - len(events.kernels)) / 8
        found[f"{arm.name} kernels of 12 tokens"] = by_name(longer.kernels)
    found["kernels_per_token"] = counts
    found["kernels_of_a_moe_block"] = {
        name: (counts[name] - counts["skipped"]) / layers for name in ("shipped", "fused")
    }
    show({k: found[k] for k in ("kernels_per_token", "kernels_of_a_moe_block")})
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
    """Slices of each arm's decode in turn, with a rotating start: the host's speed changes within
    seconds. Per-round ratios with their ranges; greedy tokens, shipped against fused."""
    from mlx_lm.generate import generate_step

    begun = time.perf_counter()
    subject = qwen3(args.layers)
    show({"model": f"{args.layers} layers", "seconds": time.perf_counter() - begun})
    found: dict[str, Any] = {"layers": args.layers, "slice": args.tokens, "warmup": [], "runs": []}
    prompt = [(i * 37 + 11) % 1000 for i in range(args.prompt)]
    todo = arms(subject)
    for arm in todo:  # compiles what is to be compiled
        arm.put()
        started = time.perf_counter()
        decode(subject, prompt, 3)
        first = time.perf_counter()
        decode(subject, prompt, 3)
        again = time.perf_counter() - first
        found["warmup"].append(
            {"arm": arm.name, "apply_s": arm.apply_s, "first_use_s": first - started - again}
        )
        show(found["warmup"][-1])
    steps = {}
    for arm in todo:
        arm.put()
        steps[arm.name] = generate_step(mx.array(prompt), subject, max_tokens=10**6)
        next(steps[arm.name])
    rates: dict[str, list[float]] = {arm.name: [] for arm in todo}
    for r in range(args.rounds):
        for arm in todo[r % len(todo) :] + todo[: r % len(todo)]:
            arm.put()
            times = []
            for _ in range(args.tokens + 3):  # the first steps are the last arm's, in part
                next(steps[arm.name])
                times.append(time.perf_counter())
            mean = (times[-1] - times[2]) / (len(times) - 3)
            rates[arm.name].append(mean)
            found["runs"].append({"round": r, "arm": arm.name, "mean_s": mean})
    base = rates["shipped"]
    ratios = {
        name: [b / t for b, t in zip(base, times, strict=True)] for name, times in rates.items()
    }
    fused, skipped = ratios["fused"], ratios["skipped"]
    found["ms_per_token"] = {n: spread([t * 1e3 for t in v]) for n, v in rates.items()}
    found["speed_ratio"] = {n: spread(v) for n, v in ratios.items()}
    found["share_of_gain"] = {
        "in speed": spread([(f - 1) / (s - 1) for f, s in zip(fused, skipped, strict=True)]),
        "in time": spread([(1 - 1 / f) / (1 - 1 / s) for f, s in zip(fused, skipped, strict=True)]),
    }
    show({k: found[k] for k in ("ms_per_token", "speed_ratio", "share_of_gain")})
    if args.greedy:
        found["greedy"] = greedy(subject, todo[0], todo[2], prompt, args.greedy)
        show(found["greedy"])
    todo[0].put()
    return found


def greedy(model: Any, one: Arm, other: Arm, prompt: list[int], count: int) -> dict[str, Any]:
    """Both arms' greedy tokens side by side, to the first difference and its gap in logits."""
    from mlx_lm.generate import generate_step

    steps = []
    for _ in range(2):
        steps.append(generate_step(mx.array(prompt), model, max_tokens=count + 1))
    for i in range(count):
        made = []
        for arm, step in zip((one, other), steps, strict=True):
            arm.put()
            token, scores = next(step)
            made.append((int(token), scores))
        (a, p), (b, q) = made
        if a != b:
            gaps = {one.name: (p[a] - p[b]).item(), other.name: (q[b] - q[a]).item()}
            return {"same_tokens": i, "gap": gaps}
    return {"same_tokens": count}


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


SECTIONS = {f.__name__: f for f in (kernels, launches, model)}
GEOMETRIES = ["", "launches=2"]


def main() -> None:
    """Run the sections asked for; a failure of one is recorded and the next one runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="+", choices=SECTIONS)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=12, help="of a slice")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--greedy", type=int, default=512, help="tokens to compare, 0: none")
    parser.add_argument("--repeats", type=int, default=5)
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
        content = {
            "schema": "moescope/fused-benchmark/1",
            "about": about,
            "seconds": took,
            name: result,
        }
        (args.out / f"{name}.json").write_text(json.dumps(content, indent=1))
        show({"section": name, "seconds": took})
    sys.exit(failed)


if __name__ == "__main__":
    main()
