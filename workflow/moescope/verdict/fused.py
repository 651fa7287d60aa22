"""A fused block in a trace: the time of its kernels alone, and whose weights they read.

A term is no yardstick for them. The router's projection counts to the experts' where it is no
module of its own, and of two launches the second counts to the combine.
"""

from dataclasses import dataclass
from typing import Any

from . import path
from .results import Found
from .statistics import Figure, figure, rounded

KERNELS = ["custom_kernel_moescope_*"]  # where an arm does not declare its own


@dataclass(frozen=True)
class Fused:
    """own: time of its kernels per token, or None for the reason in why. mixed: do others count to
    the experts' term beside them? elsewhere_ms: of its kernels under other terms. shared: do they
    read the shared expert's weights along?"""

    own: Figure | None
    why: str | None
    mixed: bool
    elsewhere_ms: float
    shared: bool


def fused(
    claimed: list[str] | None,
    terms: Found | None,
    table: Found | None,
    parts: dict[str, Any] | None,
) -> Fused:
    """claimed: the kernels that the arm declares. terms, table: terms.json and kernels.csv of its
    trace. parts: the terms of verdict.kernels.

    The time counts only where the path is proved: beside other products it is not known who read
    the experts' weights.
    """
    rows = table.value if table else []
    claimed = claimed or KERNELS
    own = path.claimed_rows(claimed, rows)
    elsewhere = sum(float(row["ms_per_token"]) for row in own if row["term"] != path.TERM)
    mixed = any(row["term"] == path.TERM and row not in own for row in rows)
    ms, why = None, None
    if not own:
        why = "no kernel trace shows the fused kernels"
    else:
        proof = path.proof(claimed, terms and terms.value, rows)
        ms = _own_ms(own, table.file, parts or {}) if proof["proved"] else None
        if ms is None:
            why = proof["why"] or "the terms that hold the fused kernels vary by more than these"
    layers = ((terms.value if terms else {}).get("path") or {}).get("moe_layers") or 0
    # Without a table of kernels nothing says what they read: a pass by scopes keeps its terms.
    return Fused(ms, why, mixed, elsewhere, bool(own) and reads_the_shared_expert(rows, layers))


def _own_ms(own: path.Rows, file: str, parts: dict[str, Any]) -> Figure | None:
    """The kernels' medians together. Their spread over the passes is not recorded: they are given
    all of that of the terms that hold them."""
    value = sum(float(row["ms_per_token"]) for row in own)
    holding = [parts[term]["ms"] for term in {row["term"]: None for row in own} if term in parts]
    low = value - sum(ms["value"] - ms["min"] for ms in holding)
    high = value + sum(ms["max"] - ms["value"] for ms in holding)
    if low <= 0:
        return None
    files = [file, *(name for ms in holding for name in ms["files"])]
    found = figure([value], "ms/token", files)
    n = min((ms["n"] for ms in holding), default=1)
    return found | {"min": rounded(low), "max": rounded(high), "n": n}


# Primitives that read weights.
PRODUCTS = ("GatherQMM", "GatherMM", "QuantizedMatmul", "Matmul", "CustomKernel")


def reads_the_shared_expert(rows: path.Rows, layers: int) -> bool:
    """Do the fused kernels of a table of kernels read the shared expert's weights too?

    They do where it launches no products of its own, up and down at least in each layer; one a
    layer is a gate that it has to itself. Where nothing says which launches are products (the
    forced pass), any launch counts as its own.
    """
    launches = 0.0
    for row in rows:
        if row["term"] != "shared_expert":
            continue
        known = set(row.get("primitives", "").split()) - {"-"}
        if not known:
            return False
        if known & set(PRODUCTS):
            launches += float(row["launches_per_token"])
    return launches == 0 or launches < 2 * layers
