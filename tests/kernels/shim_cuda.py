"""The CUDA kernels on the CPU against the float32 reference: every format, every kind of block."""

import dataclasses

import mlx.core as mx

from kernels import on_cpu
from moescope.kernels import samples, shim
from moescope.kernels.layout import Geometry

CASES = {"check_block": list(samples.cases())}


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
