"""Both languages' kernels on the CPU (moescope.kernels.shim): what the checks of each share."""

import dataclasses

import mlx.core as mx

from moescope.kernels import reference, samples, shim
from moescope.kernels.router import route

WIDE = ("affine4g64", "deepseek_v4")
# Of the studies' blocks those whose kind is of its own, and those that keep more experts than every
# warp chooses from for itself.
STUDIED = [name for name in samples.shapes() if not name.startswith("crossover")]
MANY = ("deepseek-v4-3l", "inkling-affine-2l", "inkling-nvfp4-2l")


def small(spec, wide=False, experts=24):
    """The same kind of block at a shape that a CPU runs lane by lane, with odd remainders.

    wide: enough columns that several warps share a row.
    """
    experts = min(spec.router.experts, experts)
    group = max(spec.up.group, spec.shared.up.group if spec.shared else 0)
    hidden, width = (160, 96) if group <= 32 else (192, 192) if group == 64 else (256, 128)
    hidden = 1088 if wide else hidden
    router = dataclasses.replace(
        spec.router,
        experts=experts,
        top_k=min(spec.router.top_k, 3),
        logits=experts + spec.router.logits - spec.router.experts,
    )
    shared = dataclasses.replace(spec.shared, width=128) if spec.shared else None
    return dataclasses.replace(
        spec, hidden=hidden, out=hidden, width=width, router=router, shared=shared
    )


def block(language, name):
    """Against the reference with the kernel's own choice: what differs is at most a rounding."""
    mx.random.seed(3)
    spec, arrays = (samples.cases() | samples.shapes())[name]
    spec = small(spec, language == "cuda" and name in WIDE, 140 if name in MANY else 24)
    arrays = {k: v[: spec.router.experts] if v.size > 1 else v for k, v in arrays.items()}
    if spec.router.select == "table":
        arrays |= samples.small_of(spec.router)
    tensors = samples.tensors_of(spec, arrays)
    x, dynamic = samples.inputs_of(spec)
    once = None
    if language == "cuda":  # of the studies' kinds a block has two sixteens of rows, as on a GPU
        blocks = -(-spec.out // 32) if name in STUDIED else 3
        once = shim.one_launch_later(spec, tensors, x, *dynamic, blocks=blocks)
    result = shim.block(language, spec, tensors, x, *dynamic)
    token = dynamic[1] if spec.router.select == "table" else None
    chosen, weights = route(spec.router, dynamic[0], arrays, token)
    assert sorted(result["chosen"].tolist()) == sorted(chosen.tolist())
    own = result["weights"]
    if spec.shared and spec.shared.weight == "router":
        own = mx.concatenate([own, weights[-spec.router.shared :].astype(mx.float32)])
    gated = spec.shared and spec.shared.weight == "gate"
    given = {"shared_logit": dynamic[-1]} if gated else {}
    exact = reference.block(spec, tensors, x, picks=(result["chosen"], own), **given)
    found = samples.distance(result["y"], exact)
    assert found["finite"]
    assert found["nrms"] <= 5e-4, found
    # Copies that land as late as they may, and threads in other orders: the same bits.
    ways = ((True, 11),) if language == "cuda" else ((False, 7),)
    for late, schedule in ways:
        again = shim.block(language, spec, tensors, x, *dynamic, late=late, schedule=schedule)
        assert again["middle"] == result["middle"], (late, schedule)
        assert mx.array_equal(again["y"], result["y"]).item(), (late, schedule)
    if once:  # both halves in one launch, its blocks waiting for each other
        assert mx.array_equal(once(True, 5, 2), result["y"]).item()
    return found


def router(language, name, kind=None):
    """Kernel against MLX's operations: random logits, coarse ones with ties, all equal.

    kind: in place of the family's of that name.
    """
    mx.random.seed(6)
    kind = kind or samples.routers()[name]
    arrays = samples.small_of(kind)
    spec = samples.block(
        samples.FORMATS["affine4g32"], kind.experts, kind.top_k, 32, 32, router=kind
    )
    spec = dataclasses.replace(spec, down=samples.FORMATS["affine4g32"])
    tensors = samples.tensors_of(spec, arrays)
    x = mx.zeros((1, 1, 32), mx.bfloat16)
    gap = 0.0
    for trial in range(4 + 4 * (kind.score == "softmax")):
        logits = mx.random.normal((kind.logits,)) * (2, 2, 2, 2, 0.05, 0.3, 1, 60)[trial]
        if trial == 1:
            logits = mx.round(logits)
        if trial == 2:
            logits = mx.zeros((kind.logits,)) + 1
        logits = logits.astype(mx.bfloat16)
        dynamic = [logits, mx.array([1], mx.int32)] if kind.select == "table" else [logits]
        result = shim.block(language, spec, tensors, x, *dynamic, whole=False)
        chosen, weights = route(kind, logits, arrays, mx.array([1]))
        assert sorted(result["chosen"].tolist()) == sorted(chosen.tolist()), trial
        have = dict(zip(result["chosen"].tolist(), result["weights"].tolist(), strict=True))
        want = dict(
            zip(chosen.tolist(), weights.astype(mx.float32).tolist()[: kind.top_k], strict=True)
        )
        # Equal experts may stand in another order, and sums be made in another: a few last bits.
        largest = max(want.values())
        gap = max(gap, *(abs(have[e] - want[e]) / largest for e in want))
    assert gap <= 2.0**-6, gap
    return {"gap": gap}


def near_cancelling(language):
    """Two experts that leave 2 % of either: the error stays that of one rounding."""
    mx.random.seed(8)
    spec, tensors, picks = samples.cancelling(hidden=192, width=192)
    x, _ = samples.inputs_of(spec)
    result = shim.block(language, spec, tensors, x, *picks)
    exact = reference.block(spec, tensors, x, picks=picks)
    parts = reference.experts(spec, tensors, x, picks[0]) * picks[1][:, None]
    left = mx.sqrt(mx.mean(exact**2) / mx.mean(parts[0] ** 2)).item()
    assert 0.01 < left < 0.03
    found = samples.distance(result["y"], exact)
    assert found["nrms"] <= 5e-4, found
    # What rounding each expert's part to the activations' type would have done:
    early = parts.astype(mx.bfloat16).astype(mx.float32).sum(axis=0)
    assert samples.distance(early.astype(mx.bfloat16), exact)["nrms"] > 0.02
    if language == "cuda":  # chosen and weighed before, in one launch
        once = shim.one_launch(spec, tensors, x, *picks, schedule=5)
        assert mx.array_equal(once, result["y"]).item()
    return found


def table(language):
    """Experts by token id."""
    kind = samples.routers()["by token (deepseek_v4)"]
    arrays = samples.small_of(kind)
    spec = samples.block(samples.FORMATS["affine4g32"], kind.experts, 6, 32, 32, router=kind)
    tensors = samples.tensors_of(spec, arrays)
    x, (logits, _) = samples.inputs_of(spec)
    for token in (0, 3):
        result = shim.block(
            language, spec, tensors, x, logits, mx.array([token], mx.int32), whole=False
        )
        assert result["chosen"].tolist() == arrays["table"][token].tolist()
