"""The bench's own kernel: the same bits as the kernels', on the CPU."""

import dataclasses
import sys
from pathlib import Path

import mlx.core as mx

from moescope.kernels import cuda, layout, samples, shim, source
from moescope.kernels.common import dynamic_names, static_inputs

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import resident

BLOCKS = 13


def check_resident():
    """Weights sent for at once give the bits of the kernels' ring, whenever they land, whenever the
    second half's are sent for; blocks have a tile more or less, one no rows of the output."""
    mx.random.seed(12)
    spec = samples.block(experts=16, top_k=8, hidden=1024, width=128)
    spec = dataclasses.replace(spec, out=16 * (BLOCKS - 1))
    tensors = samples.tensors_of(spec)
    x, dynamic = samples.inputs_of(spec)
    expected = shim.one_launch(spec, tensors, x, *dynamic, blocks=BLOCKS)
    plan = layout.cut(spec)
    pair = layout.block_launch(spec, plan, layout.Geometry(), BLOCKS, shim.MEMORY)
    text = cuda.whole_block(spec, plan, pair, cuda.MATH)
    first, second = static_inputs(spec, tensors, False)
    ones = mx.full((cuda.place_bytes(spec) // 2,), 0xFFFFFFFF, mx.uint32)
    scratch = mx.concatenate([mx.zeros((cuda.SCRATCH_HEAD // 4,), mx.uint32), ones])
    inputs = dict(zip(dynamic_names(spec), [x, *dynamic], strict=True))
    inputs |= {"scratch": scratch} | first | second
    assert source.each_chooses(spec.router)
    for when in resident.WHEN:
        header, body, size = resident.block(
            spec, plan, pair[0], text, when, resident.PIECES["SHIM"]
        )
        assert size <= shim.MEMORY
        run = shim.compile_text("cuda", header, body, inputs, f"out {spec.dtype}")
        for late, schedule in ((False, 0), (True, 5)):
            how = (BLOCKS, pair[0].warps * 32, late, schedule, True, 2)
            out = shim.array_of(shim.call(run, inputs, spec.out * 2, *how), mx.bfloat16)
            assert mx.array_equal(out, expected).item(), (when, late)
