"""The CUDA kernels on the CPU against the float32 reference: every format, every kind of block."""

import dataclasses

import mlx.core as mx

from kernels import on_cpu
from moescope.kernels import cuda, layout, reference, samples, shim
from moescope.kernels.layout import Geometry

SMALL_FLOATS = ("mxfp4", "nvfp4", "mxfp8")
JOINT = {  # format: parts, width, experts a token
    "affine4g64": (9, 768, 6),
    "affine4g32": (10, 640, 8),
    "affine4g128": (9, 768, 6),
    "mxfp4": (12, 768, 8),
    "nvfp4": (10, 640, 8),
}
CASES = {
    "check_parts_over_two_experts": list(JOINT),
    "check_block": [*samples.cases(), *on_cpu.STUDIED],
    "check_large_and_small_activations": SMALL_FLOATS,
}


def check_block(name):
    """One format or kind at a small shape with odd remainders."""
    return on_cpu.block("cuda", name)


def check_near_cancelling():
    """Two experts that leave 2 % of either."""
    return on_cpu.near_cancelling("cuda")


def check_geometry_does_not_matter():
    """The same bits with other blocks, warps, stages and steps a stage (CUDA)."""
    mx.random.seed(4)
    spec = on_cpu.small(samples.block(hidden=2048))
    spec = dataclasses.replace(spec, hidden=704, out=704)
    tensors = samples.tensors_of(spec)
    x, dynamic = samples.inputs_of(spec)
    seen, ahead = set(), []
    for chosen, blocks in (
        (Geometry(prefetch=0), 3),
        (Geometry(warps=3, stages=2, prefetch=1), 5),
        (Geometry(warps=12, steps=1, stages=3, prefetch=0), 2),
        (Geometry(warps=16, steps=2, stages=5, prefetch=1), 7),
    ):
        how = {"chosen": chosen, "blocks": blocks}
        ahead.append((how, shim.one_launch_later(spec, tensors, x, *dynamic, **how)))
    for how, once in ahead:
        result = shim.block("cuda", spec, tensors, x, *dynamic, **how)
        seen.add((result["middle"], tuple(result["y"].astype(mx.float32).tolist())))
        assert mx.array_equal(once(False, 0, 1), result["y"]).item(), how
    assert len(seen) == 1


def check_parts_over_two_experts(name):
    """The second half's parts of all experts' columns together: near the reference, and the same
    bits by one launch and two, with fewer warps or steps, late copies, two sixteens of rows."""
    mx.random.seed(6)
    spec = on_cpu.small(samples.block(samples.FORMATS[name], experts=8, top_k=2))
    parts, width, top_k = JOINT[name]
    router = dataclasses.replace(spec.router, top_k=top_k)
    spec = dataclasses.replace(spec, router=router, width=width)
    assert layout.cut(spec).joint == parts, layout.cut(spec)
    tensors = samples.tensors_of(spec)
    x, dynamic = samples.inputs_of(spec)
    chosen = Geometry(warps=4, steps=1), Geometry(warps=16, steps=2, stages=3), Geometry()
    ways = [{"chosen": c, "blocks": b} for c, b in zip(chosen, (3, 20, 7), strict=True)]
    ahead = [(how, shim.one_launch_later(spec, tensors, x, *dynamic, **how)) for how in ways]
    result = shim.block("cuda", spec, tensors, x, *dynamic)
    exact = reference.block(spec, tensors, x, picks=(result["chosen"], result["weights"]))
    assert samples.distance(result["y"], exact)["nrms"] <= 5e-4
    for how, once in ahead:
        two = shim.block("cuda", spec, tensors, x, *dynamic, late=True, schedule=3, **how)
        assert mx.array_equal(two["y"], result["y"]).item(), how
        for late, schedule, calls in ((False, 0, 1), (True, 7, 2)):
            assert mx.array_equal(once(late, schedule, calls), result["y"]).item(), how


def _short_run(**changes):
    """A block whose first half multiplies whole numbers."""
    router = dataclasses.replace(samples.block().router, experts=8, logits=8, **changes)
    spec = samples.block(experts=8, top_k=8, hidden=640, width=768, router=router)
    assert layout.whole_numbers(spec, layout.cut(spec))
    return spec, samples.tensors_of(spec)


def check_whole_numbers():
    """Activations of all sizes side by side, tiny ones and none stay near the reference; what is no
    number or infinite stays so."""
    mx.random.seed(12)
    spec, tensors = _short_run()
    x, dynamic = samples.inputs_of(spec)
    size = mx.arange(x.size).reshape(x.shape)
    for name, factor in {
        "alike": mx.array(1.0),
        "outliers": mx.where(size % 97 == 0, 1e4, 1.0),
        "sizes": mx.power(2.0, size % 61 - 30.0),
        "tiny": mx.array(1e-30),
        "none in a group": mx.where(size // 64 == 1, 0.0, 1.0),
        "nothing": mx.array(0.0),
    }.items():
        given = (x * factor).astype(x.dtype)
        result = shim.block("cuda", spec, tensors, given, *dynamic)
        picks = (result["chosen"], result["weights"])
        exact = reference.block(spec, tensors, given, picks=picks)
        found = samples.distance(result["y"], exact)
        assert found["finite"] and (found["nrms"] <= 5e-4 or not mx.any(exact)), (name, found)
    for value in (float("nan"), float("inf")):
        given = mx.where(size == 70, value, x).astype(x.dtype)
        result = shim.block("cuda", spec, tensors, given, *dynamic)
        assert not mx.any(mx.isfinite(result["y"])).item(), value


def check_whole_numbers_near_cancelling():
    """Experts in pairs that leave 2 % of either: the error stays that of one rounding."""
    mx.random.seed(8)
    spec, tensors = _short_run(select="given")
    at = mx.arange(8)

    def pairs(p, factor):
        sign = mx.where(at % 2 == 1, factor, 1).astype(p.scales.dtype).reshape(-1, 1, 1)
        parts = {n: getattr(p, n)[at // 2 * 2] for n in ("weight", "scales", "biases")}
        return dataclasses.replace(p, **parts | {n: parts[n] * sign for n in ("scales", "biases")})

    halves = {"gate": pairs(tensors.gate, 1), "up": pairs(tensors.up, 1)}
    tensors = dataclasses.replace(tensors, **halves, down=pairs(tensors.down, -1))
    x, _ = samples.inputs_of(spec)
    picks = (at.astype(mx.uint32), mx.where(at % 2 == 1, 0.98 / 8, 1 / 8).astype(mx.float32))
    result = shim.block("cuda", spec, tensors, x, *picks)
    exact = reference.block(spec, tensors, x, picks=picks)
    assert samples.distance(result["y"], exact)["nrms"] <= 5e-4


def check_blocks_with_no_tile_of_a_run():
    """Runs dealt apart, of fewer tiles than blocks: some blocks have two tiles, others none."""
    mx.random.seed(13)
    spec = samples.block(experts=8, top_k=2, hidden=2048, width=64)
    tensors = samples.tensors_of(spec)
    x, dynamic = samples.inputs_of(spec)
    plan = layout.cut(spec)
    values = cuda.first_values(
        spec, plan, layout.block_launch(spec, plan, Geometry(), 16, shim.MEMORY)[0], 0
    )
    assert not values["JOINT_RUNS"] and values["SOON_TILES"] < 16
    two = shim.block("cuda", spec, tensors, x, *dynamic)["y"]
    once = shim.one_launch(spec, tensors, x, *dynamic, blocks=16)
    assert mx.array_equal(once, two).item()


def check_more_blocks_than_rows():
    """Blocks that have nothing in the second half go, and the others do not wait for more."""
    mx.random.seed(5)
    spec = dataclasses.replace(on_cpu.small(samples.block(hidden=2048)), out=32)
    tensors = samples.tensors_of(spec)
    x, dynamic = samples.inputs_of(spec)
    two = shim.block("cuda", spec, tensors, x, *dynamic)
    for calls in (1, 3):
        once = shim.one_launch(spec, tensors, x, *dynamic, blocks=6, schedule=9, calls=calls)
        assert mx.array_equal(once, two["y"]).item()


def check_runs_shorter_than_the_blocks():
    """Every tile is somebody's, and nobody's twice, where some blocks have none of a run."""
    mx.random.seed(7)
    spec = on_cpu.small(samples.block(samples.FORMATS["affine4g32"], shared=samples.Shared(
        128, samples.FORMATS["affine4g32"], samples.FORMATS["affine4g32"],
        samples.FORMATS["affine4g32"])))  # fmt: skip
    spec = dataclasses.replace(spec, hidden=64, out=64, width=32)
    spec = dataclasses.replace(spec, router=dataclasses.replace(spec.router, top_k=1))
    assert layout.tiles(spec) == (4, 16)
    tensors = samples.tensors_of(spec)
    x, dynamic = samples.inputs_of(spec)
    result = shim.block("cuda", spec, tensors, x, *dynamic, blocks=13)
    exact = reference.block(spec, tensors, x, picks=(result["chosen"], result["weights"]))
    assert samples.distance(result["y"], exact)["nrms"] <= 5e-4
    once = shim.one_launch(spec, tensors, x, *dynamic, blocks=13, schedule=4)
    assert mx.array_equal(once, result["y"]).item()


def check_runs_of_tiles():
    """Where runs are dealt together, no block's share of more is less than of fewer."""
    together = 0
    for blocks in (1, 5, 13, 84, 132):
        for shared in (0, 1, 2, 16, 80, 232, 512):
            for soon in (1, 4, 64, 132, 348, 1536):
                for late in (0, 1, 60, 132, 720):
                    if not cuda.joint_runs(shared, soon, late, blocks):
                        continue
                    together += 1
                    ends = (shared, shared + soon, shared + soon + late)
                    for b in range(blocks):
                        mine = [t * (b + 1) // blocks - t * b // blocks for t in ends]
                        assert mine == sorted(mine), (blocks, ends, b)
    assert together > 100


def check_large_and_small_activations(name):
    """Small floats' operands are lifted by 2^80, a shared expert's in another format with them: far
    from one, the results are as near as ever."""
    mx.random.seed(9)
    form, shared = samples.FORMATS[name], samples.Shared(128, samples.A4, samples.A4, samples.A4)
    spec = on_cpu.small(samples.block(form, shared=shared))
    spec = dataclasses.replace(spec, hidden=192, out=192, width=128)
    tensors = samples.tensors_of(spec)
    x, dynamic = samples.inputs_of(spec)
    for power in (-20, 12):
        far = x * 2.0**power
        y = shim.one_launch(spec, tensors, far, *dynamic)
        result = shim.block("cuda", spec, tensors, far, *dynamic)
        assert mx.array_equal(y, result["y"]).item(), power
        picks = (result["chosen"], result["weights"])
        found = samples.distance(y, reference.block(spec, tensors, far, picks=picks))
        assert found["finite"], power
        assert found["nrms"] <= 5e-4, (power, found)


def check_operand_whole_or_by_stages():
    """The same bits whether a block keeps all of the second half's operand, asks for it at once or
    after its sums, in one set of warps or two, or takes it stage by stage."""
    mx.random.seed(10)
    spec = on_cpu.small(samples.block(samples.FORMATS["mxfp4"]))
    spec = dataclasses.replace(spec, width=1184, out=288)
    tensors = samples.tensors_of(spec)
    x, dynamic = samples.inputs_of(spec)
    plan, blocks, seen = layout.cut(spec), 4, {}
    little, most = layout.LITTLE_GIVEN, layout.SETS_MOST
    two = shim.block("cuda", spec, tensors, x, *dynamic)
    staged = _too_little_for_a_half(spec, plan, blocks)
    again = shim.block("cuda", spec, tensors, x, *dynamic, memory=staged)
    assert mx.array_equal(again["y"], two["y"]).item()
    try:
        for layout.LITTLE_GIVEN in (0, little):
            for layout.SETS_MOST in (1, 2):
                for memory in (shim.MEMORY, 0):
                    memory = memory or _too_little_for_all(spec, plan, blocks)
                    pair = layout.block_launch(spec, plan, Geometry(), blocks, memory)
                    how = (pair[0].whole, pair[0].sets, layout.little_given(spec, plan))
                    once = shim.one_launch_later(
                        spec, tensors, x, *dynamic, blocks=blocks, memory=memory
                    )
                    seen[how] = once(True, 3, 2)
    finally:
        layout.LITTLE_GIVEN, layout.SETS_MOST = little, most
    assert {how[:2] for how in seen} >= {(True, 1), (True, 2), (False, 1), (False, 2)}, seen.keys()
    assert {how[2] for how in seen if how[0]} == {True, False}, seen.keys()
    for how, y in seen.items():
        assert mx.array_equal(y, two["y"]).item(), how


def _too_little_for_a_half(spec, plan, blocks):
    for memory in range(shim.MEMORY, 0, -512):
        half = layout.down_launch(spec, plan, Geometry(prefetch=0), blocks, memory)
        if half and not half.whole:
            return memory
    raise AssertionError("all of the operand always fits")


def _too_little_for_all(spec, plan, blocks):
    for memory in range(shim.MEMORY, 0, -512):
        pair = layout.block_launch(spec, plan, Geometry(), blocks, memory)
        if pair and not pair[0].whole and pair[0].sets == min(2, layout.SETS_MOST):
            return memory
    raise AssertionError("all of the operand always fits")
