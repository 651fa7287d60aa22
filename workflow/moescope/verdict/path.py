"""Did an arm's experts run the kernels that it claims, as often as it has layers and tokens?"""

from fnmatch import fnmatchcase
from typing import Any

HELPERS = "copy_"  # copies of indices that a gathered product starts beside itself


def products(path: dict[str, Any]) -> list[dict[str, Any]]:
    """The kernels of the experts' products, of terms.json's path."""
    return [
        row
        for row in path.get("experts", [])
        if not row.get("helper", row["kernel"].startswith(HELPERS))
    ]


def proof(claimed: list[str] | None, terms: dict[str, Any] | None) -> dict[str, Any]:
    """{"claimed": patterns or None, "proved": bool or None, "why": text or None}.

    terms: terms.json of the arm's trace, or None. proved is None where nothing was claimed, or
    where no trace tells whose the kernels are; False voids the arm. The products' launches have to
    be the same in each token and a whole multiple of the MoE layers, claimed or not; a single
    kernel's may be fewer where layers differ in their format.
    """
    path = (terms or {}).get("path") or {}
    found = products(path)
    if not found:
        why = "no trace tells which kernels its experts ran" if claimed else None
        return {"claimed": claimed, "proved": None, "why": why}
    wrong = [
        row["kernel"]
        for row in found
        if claimed and not any(fnmatchcase(row["kernel"], pattern) for pattern in claimed)
    ]
    if wrong:
        why = f"its experts ran {', '.join(wrong)}, not {' or '.join(claimed)}"
        return {"claimed": claimed, "proved": False, "why": why}
    # By the table of kernels a launch may have several owners, and then counts for none.
    why = _uneven(found, path) if terms.get("method") == "ranges" else None
    if why:
        return {"claimed": claimed, "proved": False, "why": why}
    return {"claimed": claimed, "proved": True if claimed else None, "why": None}


def _uneven(found: list[dict[str, Any]], path: dict[str, Any]) -> str | None:
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
