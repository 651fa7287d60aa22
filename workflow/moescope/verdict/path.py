"""Did an arm's experts run the kernels that it claims, as often as it has layers and tokens?

The trace's own kernels tell it by their primitives. Where they have no owners, the kernels of the
pass that forces evaluation at module boundaries tell it by their names alone: that proves less, so
it voids an arm only where none of the claimed kernels ran and a known product did.
"""

from collections import defaultdict
from fnmatch import fnmatchcase
from typing import Any

from .quantities import FORCED

TERM = "expert_gather"
HELPERS = "copy_"  # copies of indices that a gathered product starts beside itself
# How products of routed experts are called, MLX's and moescope's own. Whatever else the forced pass
# finds in their term (indices, copies, what was left to evaluate there) proves and voids nothing.
PRODUCTS = ("gather_qmv*", "fp_gather_qmv*", "qmm_*", "custom_kernel_moescope_*")

Rows = list[dict[str, Any]]


def products(path: dict[str, Any]) -> Rows:
    """The kernels of the experts' products, of terms.json's path."""
    return [
        row
        for row in path.get("experts", [])
        if not row.get("helper", row["kernel"].startswith(HELPERS))
    ]


def by_forced(terms: dict[str, Any], table: Rows, claimed: list[str] | None) -> Rows:
    """Likewise of the forced pass, as rows of such a path; empty if the trace tells it itself.

    table: kernels.csv. A product is a kernel of the experts' term whose name is claimed or known.
    """
    path = terms.get("path") or {}
    if terms.get("method") != FORCED or products(path):
        return []
    per_token: dict[str, float] = defaultdict(float)
    for row in table:
        name = row["kernel"].partition("<")[0]
        known = _matches(name, [*(claimed or []), *PRODUCTS])
        if row["term"] == TERM and known and not name.startswith(HELPERS):
            per_token[name] += float(row["launches_per_token"])
    steps, layers = path.get("steps"), path.get("moe_layers")
    return [
        {
            "kernel": name,
            "launches_per_token": count,
            "per_layer": count / layers if layers else None,
            # The forced pass covers the steps of the others.
            **({"launches": round(count * steps)} if steps else {}),
        }
        for name, count in per_token.items()
    ]


def claimed_rows(claimed: list[str], table: Rows) -> Rows:
    """The rows of kernels.csv that hold claimed products, of whatever term."""
    return [
        row
        for row in table
        if _matches(row["kernel"].partition("<")[0], claimed)
        and not row["kernel"].startswith(HELPERS)
    ]


def proof(
    claimed: list[str] | None, terms: dict[str, Any] | None, table: Rows | None = None
) -> dict[str, Any]:
    """{"claimed": patterns or None, "proved": bool or None, "why": text or None}.

    terms: terms.json of the arm's trace, or None; table: its kernels.csv. proved is None where
    nothing was claimed, or where no trace tells whose the kernels are; False voids the arm. The
    products' launches have to be the same in each token and a whole multiple of the MoE layers,
    claimed or not; a single kernel's may be fewer where layers differ in their format.
    """
    path = (terms or {}).get("path") or {}
    found = products(path)
    if found:
        proved, why = _of_the_trace(claimed, found, path, terms.get("method"))
    elif claimed and (terms or {}).get("method") == FORCED:
        proved, why = _of_the_forced(claimed, by_forced(terms, table or [], claimed), path)
    else:
        proved, why = None, "no trace tells which kernels its experts ran" if claimed else None
    return {"claimed": claimed, "proved": proved, "why": why}


def _of_the_trace(
    claimed: list[str] | None, found: Rows, path: dict[str, Any], method: str | None
) -> tuple[bool | None, str | None]:
    wrong = [row["kernel"] for row in found if claimed and not _matches(row["kernel"], claimed)]
    if wrong:
        return False, f"its experts ran {', '.join(wrong)}, not {' or '.join(claimed)}"
    # By the table of kernels a launch may have several owners, and then counts for none.
    why = _uneven(found, path) if method == "ranges" else None
    if why:
        return False, why
    return True if claimed else None, None


def _of_the_forced(
    claimed: list[str], found: Rows, path: dict[str, Any]
) -> tuple[bool | None, str | None]:
    """A product beside the claimed ones, or launches that do not come out even, may come of where
    the pass draws its boundaries: they leave the claim open."""
    own = [row for row in found if _matches(row["kernel"], claimed)]
    others = ", ".join(row["kernel"] for row in found if row not in own)
    if others and not own:
        return False, f"in the forced pass its experts ran {others}, not {' or '.join(claimed)}"
    if not own:
        return None, "the forced pass shows no kernel of the experts that is known by its name"
    if others:
        return None, f"the forced pass shows {others} beside what is claimed"
    if not path.get("steps") or not path.get("moe_layers"):
        return None, "the trace does not say of how many tokens and MoE layers the forced pass is"
    why = _uneven(own, path)
    return (None, f"the forced pass shows {why}") if why else (True, None)


def _matches(kernel: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(kernel, pattern) for pattern in patterns)


def _uneven(found: Rows, path: dict[str, Any]) -> str | None:
    """Why launches do not come out even; known only where the trace counted them."""
    steps, layers = path.get("steps"), path.get("moe_layers")
    if not steps or not layers or any("launches" not in row for row in found):
        return None
    for row in found:
        if row["launches"] % steps:
            return f"{row['launches']} launches of {row['kernel']} in {steps} tokens"
    total = sum(row["launches"] for row in found)
    if total % (steps * layers):
        return f"{total} launches of its experts' kernels in {steps} tokens of {layers} MoE layers"
    return None
