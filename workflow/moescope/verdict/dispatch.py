"""Where the kernel of the expert gather changes with the number of experts a token goes to."""

from itertools import pairwise
from typing import Any

from .results import Found
from .statistics import figure


def dispatch(table: Found | None, trace: Found | None) -> dict[str, Any] | None:
    """{"points": {top_k: {"kernels": [...], "gather_ms", "why"}}, "own": top_k, "changes": [...]}
    of sweep.csv, or None without one.

    own: the model's own top_k. changes: {"from", "to", "before", "after"} where two neighbouring
    values run other kernels; values that could not be had are passed over.
    """
    facts = (trace.value if trace else {}).get("sweep")
    if table is None or not table.value or not facts:
        return None
    files = [table.file]
    points: dict[str, Any] = {}
    for row in table.value:
        point = points.setdefault(
            row["top_k"], {"kernels": [], "gather_ms": None, "why": row["why"] or None}
        )
        if row["why"]:
            continue
        per_layer = row["per_layer"]
        point["gather_ms"] = figure([float(row["gather_ms_per_token"])], "ms/token", files)
        point["kernels"].append(
            {
                "kernel": row["kernel"],
                "launches": figure([float(row["launches_per_token"])], "launches/token", files),
                "per_layer": figure([float(per_layer)], "launches/layer", files)
                if per_layer
                else None,
                "ms": figure([float(row["ms_per_token"])], "ms/token", files),
            }
        )
    named = [(k, sorted({r["kernel"] for r in p["kernels"]})) for k, p in points.items()]
    named = [(k, names) for k, names in named if names]
    changes = [
        {"from": one, "to": two, "before": before, "after": after}
        for (one, before), (two, after) in pairwise(named)
        if before != after
    ]
    return {"points": points, "own": str(facts["top_k"]), "changes": changes}
