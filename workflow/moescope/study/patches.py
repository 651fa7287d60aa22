"""The patches that the worker knows, read from its source: it runs in another interpreter, with
packages that this one need not have.
"""

import ast
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "worker" / "patches.py"
# How a value is spelt, for the patterns that the worker's table uses.
SPELT = {"": "", r"(\d+)": "=N", r"(\d+(?:\.\d+)?)ms": "=Nms", r"(\d+(?:\.\d+)?)us": "=Nus"}

# What the fused kernels do in the place of modules, so that a later change of these is passed over.
INSIDE = ("skip_experts", "skip_router", "top_k", "split_gather")
INSIDE += tuple(
    f"{how}_{term}" for how in ("delay", "spin") for term in ("router", "expert_gather")
)


@cache
def known() -> dict[str, str]:
    """Patch -> the pattern that its value has to match; no value is the empty one."""
    constants: dict[str, str] = {}
    for node in ast.parse(SOURCE.read_text()).body:
        if isinstance(node, ast.Assign):
            constants |= _strings(node)
        elif isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "PATCHES":
            return {
                ast.literal_eval(name): constants[entry.elts[0].id]
                for name, entry in zip(node.value.keys, node.value.values, strict=True)
            }
    raise LookupError(f"{SOURCE}: no PATCHES")


def spelt(patches: Mapping[str, str]) -> Iterable[str]:
    """Each patch as a study writes it: "top_k=N"."""
    return [name + SPELT.get(pattern, f"={pattern}") for name, pattern in patches.items()]


def passed_over(patches: list[str]) -> list[tuple[str, str]]:
    """Pairs of a patch that fuses and a later one of an arm that changes the inside of a block."""
    return [
        (fused, patch)
        for at, fused in enumerate(patches)
        if fused.startswith("fused")
        for patch in patches[at + 1 :]
        if patch.partition("=")[0] in INSIDE
    ]


def _strings(node: ast.Assign) -> dict[str, str]:
    """Names -> texts of an assignment of text constants, one or several; else nothing."""
    (target,) = node.targets[:1]
    names = target.elts if isinstance(target, ast.Tuple) else [target]
    values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
    pairs = zip(names, values, strict=False)
    return {
        name.id: value.value
        for name, value in pairs
        if isinstance(name, ast.Name)
        and isinstance(value, ast.Constant)
        and isinstance(value.value, str)
    }
