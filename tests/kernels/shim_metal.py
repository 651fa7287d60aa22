"""The Metal kernels on the CPU against the float32 reference: every format, every kind of block."""

from kernels import on_cpu
from moescope.kernels import samples

CASES = {"check_block": list(samples.cases())}


def check_block(name):
    """One format or kind at a small shape with odd remainders."""
    return on_cpu.block("metal", name)


def check_near_cancelling():
    """Two experts that leave 2 % of either."""
    return on_cpu.near_cancelling("metal")
