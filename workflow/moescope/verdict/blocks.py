"""The MoE block of two arms by kernel traces, both by the same instrument."""

from typing import Any

from .path import FORCED

Block = dict[str, Any]


def alike(one: dict[str, Any], other: dict[str, Any]) -> tuple[Block | None, Block | None, bool]:
    """The blocks of two kernel traces (verdict.kernels) and whether both are of the forced pass.

    Where one of the traces stands on the forced pass alone, so does the other's block: graphs run
    kernels at the same time, and the forced pass does not. None where a trace has no such pass.
    """
    if FORCED not in (one["method"], other["method"]):
        return one["block"], other["block"], False
    return one["forced_block"], other["forced_block"], True
