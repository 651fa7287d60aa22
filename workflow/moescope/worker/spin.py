"""A kernel that keeps the GPU for a known time, to measure the instruments with.

``spin(x, us)`` gives x back and takes that long: what needs x waits for it.
"""

from functools import cache
from typing import Any

import mlx.core as mx

from .state import Refusal

# %globaltimer counts nanoseconds in steps that are coarse beside a microsecond: ask for tens.
_SOURCE = """
    unsigned long long begun, at;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begun));
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(at));
    } while (at - begun < NS);
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < N) y[i] = x[i];
"""


@cache
def _kernel() -> Any:
    try:
        return mx.fast.cuda_kernel(
            name="moescope_spin", input_names=["x"], output_names=["y"], source=_SOURCE
        )
    except (RuntimeError, ValueError) as error:
        raise Refusal("unsupported", f"spinning needs a CUDA GPU: {error}") from None


def spin(x: mx.array, microseconds: float) -> mx.array:
    """x, ``microseconds`` later on the GPU; raises Refusal where there is no CUDA."""
    threads = min(x.size, 256)
    (y,) = _kernel()(
        inputs=[x],
        template=[("NS", int(microseconds * 1000)), ("N", x.size)],
        grid=(-(-x.size // threads) * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[x.shape],
        output_dtypes=[x.dtype],
    )
    return y
