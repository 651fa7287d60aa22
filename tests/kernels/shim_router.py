"""The router in the kernels of both languages against MLX's operations, ties above all."""

from kernels import on_cpu
from moescope.kernels import samples
from moescope.kernels.spec import Router

# Experts in no multiple of 32, the last of them fewer than are chosen; more of them than threads.
ODD = {
    "70, softmax": Router(70, 10, 70, score="softmax", weight="sum"),
    "70, low": Router(70, 10, 70, score="softmax", high=False),
    "70, bias": samples.sigmoid_router(70, 10),
    "45, bias, high": samples.sigmoid_router(45, 24, high=True),
    "33, logits": Router(33, 7, 33, weight="softmax"),
    "1000, bias": samples.sigmoid_router(1000, 5),
}
CASES = {
    "check_cuda": list(samples.routers()),
    "check_metal": list(samples.routers()),
    "check_odd_classes": list(ODD),
}


def check_cuda(name):
    """One family's router, CUDA."""
    return on_cpu.router("cuda", name)


def check_metal(name):
    """One family's router, Metal."""
    return on_cpu.router("metal", name)


def check_odd_classes(name):
    """Numbers of experts that no family has: classes of 32 that are not full, and many of them."""
    return on_cpu.router("cuda", name, ODD[name])


def check_tables():
    """Experts by token id, both languages."""
    on_cpu.table("cuda")
    on_cpu.table("metal")
