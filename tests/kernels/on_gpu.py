"""The CUDA kernels on their device: against the reference, MLX's router, and themselves again."""

import dataclasses
import os

import mlx.core as mx

from kernels import Skip
from moescope.kernels import cuda, device, reference, samples, source
from moescope.kernels.common import dynamic_names
from moescope.kernels.layout import Geometry
from moescope.kernels.router import route

CASES = {
    "check_block": [*samples.shapes(), *samples.cases()],
    "check_geometries": ["lfm2-moe-6l", "affine4g64", "gpt_oss", "deepseek_v4"],
    "check_router": [n for n, r in samples.routers().items() if r.select != "table"],
}


def _case(name):
    return (samples.shapes() | samples.cases())[name]


def _built(spec, tensors, chosen=None, launches=1):
    here = device.current()
    if here is None or here.language != "cuda":
        raise Skip("no CUDA device")
    os.environ[cuda.LAUNCHES] = str(launches)
    return cuda.build(spec, tensors, chosen or Geometry(), here)


def check_block(name):
    """Parity, router included, at the family's own shape; the same bits under churn, and by two
    launches."""
    mx.random.seed(21)
    spec, arrays = _case(name)
    if device.current() is None:
        raise Skip("no CUDA device")
    tensors = samples.tensors_of(spec, arrays)
    run = _built(spec, tensors)
    worst = {"nrms": 0.0, "differ": 0.0}
    for _ in range(3):
        x, dynamic = samples.inputs_of(spec)
        y = run(x.shape, x, *dynamic)
        names = ("logits", *dynamic_names(spec)[2:])
        exact = reference.block(spec, tensors, x, **dict(zip(names, dynamic, strict=True)))
        found = samples.distance(y, exact)
        assert found["finite"]
        worst = {k: max(worst[k], found[k]) for k in worst}
    assert worst["nrms"] <= 5e-4, worst
    for i in range(20):
        mx.eval(mx.zeros((1000 * (i + 1),)) + 1)
        assert mx.array_equal(y, run(x.shape, x, *dynamic)).item()
    two = _built(spec, tensors, launches=2)
    assert mx.array_equal(y, two(x.shape, x, *dynamic)).item()
    return worst


def check_views():
    """Weights and inputs that begin at an element of a larger buffer: the same bits."""
    mx.random.seed(25)
    if device.current() is None:
        raise Skip("no CUDA device")

    def view(array):
        flat = array.reshape(-1)
        return mx.concatenate([flat[:1], flat])[1:].reshape(array.shape)

    spec = samples.block(experts=16, width=1792, top_k=4)
    tensors = samples.tensors_of(spec)
    moved = {
        part: dataclasses.replace(
            old, **{n: view(getattr(old, n)) for n in ("weight", "scales", "biases")}
        )
        for part in ("gate", "up", "down")
        if (old := getattr(tensors, part))
    }
    x, dynamic = samples.inputs_of(spec)
    views = [view(x), *map(view, dynamic)]
    mx.eval(views, [p.weight for p in moved.values()])
    for launches in (1, 2):
        y = _built(spec, tensors, launches=launches)(x.shape, x, *dynamic)
        other = _built(spec, dataclasses.replace(tensors, **moved), launches=launches)
        assert mx.array_equal(y, other(x.shape, *views)).item(), launches


def check_geometries(name):
    """The same bits over the range of the geometry."""
    mx.random.seed(22)
    spec, arrays = _case(name)
    if device.current() is None:
        raise Skip("no CUDA device")
    tensors = samples.tensors_of(spec, arrays)
    x, dynamic = samples.inputs_of(spec)
    y = _built(spec, tensors)(x.shape, x, *dynamic)
    for other in (
        Geometry(warps=4, stages=2, prefetch=0),
        Geometry(warps=16, steps=1, stages=4, cores=67),
        Geometry(warps=32, stages=2, prefetch=64),
    ):
        assert mx.array_equal(y, _built(spec, tensors, other)(x.shape, x, *dynamic)).item(), other


def check_router(name):
    """Experts, in their order unless the logits choose, and weights as MLX's operations on this
    device give them, ties included."""
    mx.random.seed(23)
    router = samples.routers()[name]
    if device.current() is None:
        raise Skip("no CUDA device")
    arrays = samples.small_of(router)
    spec = samples.block(
        samples.FORMATS["affine4g32"], router.experts, router.top_k, 128, 32, router=router
    )
    run = _built(spec, samples.tensors_of(spec, arrays), launches=2)
    x = mx.zeros((1, 1, 128), mx.bfloat16)
    gap, exact = 0.0, 0
    trials = 60
    for trial in range(trials):
        scale = (2, 0.3, 0.05, 60)[trial % 4] if router.score == "softmax" else 2
        logits = mx.random.normal((router.logits,)) * scale
        if trial % 3 == 1:
            logits = mx.round(logits * 2) / 2
        if trial % 3 == 2 and trial < 9:
            logits = mx.zeros((router.logits,)) + trial
        logits = logits.astype(mx.bfloat16)
        chosen, weights = cuda.choice(spec, run.first_half(x, logits)[0])
        want, given = route(router, logits.reshape(1, 1, -1), arrays)
        if not source.by_logits(router):
            assert chosen.tolist() == want.tolist(), trial
        assert sorted(chosen.tolist()) == sorted(want.tolist()), trial
        order, given_order = mx.argsort(chosen), mx.argsort(want)
        weights = weights[order]
        given = given.astype(mx.float32)[: router.top_k][given_order]
        gap = max(gap, (mx.max(mx.abs(weights - given)) / mx.max(given)).item())
        exact += mx.array_equal(weights, given).item()
    assert gap <= 2.0**-8, gap
    return {"trials": trials, "weights equal to the bit": exact, "gap": gap}


def check_near_cancelling():
    """Two experts that leave 2 % of either."""
    mx.random.seed(24)
    if device.current() is None:
        raise Skip("no CUDA device")
    spec, tensors, picks = samples.cancelling()
    x, _ = samples.inputs_of(spec)
    y = _built(spec, tensors)(x.shape, x, *picks)
    found = samples.distance(y, reference.block(spec, tensors, x, picks=picks))
    assert found["nrms"] <= 5e-4, found
    return found
