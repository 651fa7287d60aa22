"""The router in the kernels of both languages against MLX's operations, ties above all."""

from kernels import on_cpu
from moescope.kernels import samples

CASES = {"check_cuda": list(samples.routers()), "check_metal": list(samples.routers())}


def check_cuda(name):
    """One family's router, CUDA."""
    return on_cpu.router("cuda", name)


def check_metal(name):
    """One family's router, Metal."""
    return on_cpu.router("metal", name)


def check_tables():
    """Experts by token id, both languages."""
    on_cpu.table("cuda")
    on_cpu.table("metal")
