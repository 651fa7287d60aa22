"""How fast this device's memory is read and written, measured the way decode uses it.

Three patterns over data several times larger than the last cache: a read of everything, a copy,
and a gather-like read: whole rows (an expert's matrix) at indices in no order, each read once. On
a CUDA GPU they are kernels of our own, since MLX's reductions do not reach the memory's rate.
"""

import statistics
import time
from typing import Any

import mlx.core as mx

from .state import State

GPU_BYTES, CPU_BYTES = 2 << 30, 256 << 20
ROW = 1 << 20  # bytes of a gathered row
REPEATS = 7
TOGETHER = 8  # on a GPU so many in one evaluation, to make the host's part of it small
BLOCKS, THREADS = 2048, 512

# Each thread keeps four 16-byte loads in flight; the sum is only there to need them.
_READ = """
    const uint4* from = (const uint4*) x;
    unsigned long long at = (unsigned long long) blockIdx.x * blockDim.x + threadIdx.x;
    unsigned long long step = (unsigned long long) gridDim.x * blockDim.x;
    unsigned int sum = 0;
    for (; at + 3 * step < N; at += 4 * step) {
        uint4 a = from[at], b = from[at + step], c = from[at + 2 * step], d = from[at + 3 * step];
        sum += a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w;
        sum += c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
    }
    y[blockIdx.x * blockDim.x + threadIdx.x] = sum;
"""
_COPY = """
    const uint4* from = (const uint4*) x;
    uint4* to = (uint4*) y;
    unsigned long long at = (unsigned long long) blockIdx.x * blockDim.x + threadIdx.x;
    unsigned long long step = (unsigned long long) gridDim.x * blockDim.x;
    for (; at + 3 * step < N; at += 4 * step) {
        uint4 a = from[at], b = from[at + step], c = from[at + 2 * step], d = from[at + 3 * step];
        to[at] = a; to[at + step] = b; to[at + 2 * step] = c; to[at + 3 * step] = d;
    }
"""
_GATHER = """
    const uint4* from = (const uint4*) x + (unsigned long long) rows[blockIdx.x] * N;
    unsigned int sum = 0;
    for (unsigned int at = threadIdx.x; at + 3 * blockDim.x < N; at += 4 * blockDim.x) {
        uint4 a = from[at], b = from[at + blockDim.x];
        uint4 c = from[at + 2 * blockDim.x], d = from[at + 3 * blockDim.x];
        sum += a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w;
        sum += c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
    }
    y[blockIdx.x * blockDim.x + threadIdx.x] = sum;
"""


def run(state: State, size: int | None = None, repeats: int = REPEATS) -> dict[str, Any]:
    """{"read", "copy", "gather": {"value", "min", "max", "n"}} in bytes per second, and "size".

    A copy counts the bytes read and the bytes written. size: bytes of the data, rounded down to
    what the patterns divide (default 2 GiB on a GPU, 256 MiB on a CPU). Each figure is over
    ``repeats`` passes after a discarded one, host clock, the device idle before and after.
    """
    gpu = mx.default_device().type == mx.DeviceType.gpu
    cuda = gpu and not mx.metal.is_available()
    step = 4 * BLOCKS * THREADS * 16 if cuda else ROW
    size = max((size or (GPU_BYTES if gpu else CPU_BYTES)) // step, 1) * step
    # Random bits: a memory or a cache that compresses would flatter zeros.
    mx.random.seed(0)
    data = mx.random.randint(0, 1 << 31, (size // ROW, ROW // 4), dtype=mx.uint32)
    order = mx.random.permutation(size // ROW).astype(mx.uint32)
    mx.eval(data, order)
    passes = _cuda(data, order) if cuda else _plain(data, order)
    together = TOGETHER if gpu else 1
    moved = {"read": size, "copy": 2 * size, "gather": size}
    return {
        "size": size,
        **{what: _rate(moved[what], work, together, repeats) for what, work in passes.items()},
    }


def _rate(moved: int, work: Any, together: int, repeats: int) -> dict[str, float]:
    rates = []
    for _ in range(repeats + 1):
        mx.synchronize()
        start = time.perf_counter()
        mx.eval([work() for _ in range(together)])
        mx.synchronize()
        rates.append(together * moved / (time.perf_counter() - start))
    rates = rates[1:]
    return {
        "value": statistics.median(rates),
        "min": min(rates),
        "max": max(rates),
        "n": len(rates),
    }


def _plain(data: mx.array, order: mx.array) -> dict[str, Any]:
    return {
        "read": lambda: mx.max(data),
        "copy": lambda: data + 1,
        "gather": lambda: mx.max(data[order], axis=1),
    }


def _cuda(data: mx.array, order: mx.array) -> dict[str, Any]:
    threads, vectors = BLOCKS * THREADS, data.nbytes // 16

    def kernel(name: str, inputs: list[str], source: str) -> Any:
        return mx.fast.cuda_kernel(
            name=f"moescope_{name}", input_names=inputs, output_names=["y"], source=source
        )

    read = kernel("read", ["x"], _READ)
    copy = kernel("copy", ["x"], _COPY)
    gather = kernel("gather", ["x", "rows"], _GATHER)
    rows = order.size

    def start(which: Any, inputs: list[mx.array], blocks: int, vectors: int, shape: tuple) -> Any:
        (output,) = which(
            inputs=inputs,
            template=[("N", vectors)],
            grid=(blocks * THREADS, 1, 1),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[shape],
            output_dtypes=[mx.uint32],
        )
        return output

    return {
        "read": lambda: start(read, [data], BLOCKS, vectors, (threads,)),
        "copy": lambda: start(copy, [data], BLOCKS, vectors, data.shape),
        "gather": lambda: start(gather, [data, order], rows, ROW // 16, (rows * THREADS,)),
    }
