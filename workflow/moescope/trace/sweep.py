"""Which kernel the expert gather runs for how many experts: MLX chooses by top_k.

Short passes with CUDA graphs off, so that each launch has its owner and each kernel its own time;
a short prompt does, since neither depends on what stands in the cache.
"""

from collections.abc import Callable
from typing import Any

from ..runtimes.client import WorkerDied, WorkerError
from . import align, kernels
from .align import Mismatch
from .events import Events, base_name

SWEEP = "moescope/sweep/1"
PROMPT = 16  # token ids
TOKENS, STEPS = 4, (3,)
MORE = 2  # experts beyond the model's own top_k
COLUMNS = ("top_k", "kernel", "launches_per_token", "per_layer", "ms_per_token",
           "gather_ms_per_token", "why")  # fmt: skip

Ask = Callable[[list[str]], Events]


def run(top_k: int, most: int, moe_layers: int, ask: Ask) -> dict[str, Any]:
    """{"schema", "top_k", "most", "rows"}; a row has COLUMNS.

    top_k: the model's own. most: the largest that its router and table of experts allow. ask: a
    pass with these patches further. Each kernel of the products is a row; a value that cannot be
    had is a row with the reason in "why" and no kernel.
    """
    rows = []
    for k in range(1, max(top_k, min(top_k + MORE, most)) + 1):
        try:
            rows += point(k, ask([] if k == top_k else [f"top_k={k}"]), moe_layers)
        except WorkerDied as died:
            rows.append(_none(k, died.message))
            break  # there is nobody left to ask
        except WorkerError as refused:
            rows.append(_none(k, f"{refused.kind.replace('_', ' ')}: {refused.message}"))
        except (Mismatch, ValueError) as mismatch:
            rows.append(_none(k, str(mismatch)))
    if top_k + MORE > most:
        rows.append(_none(most + 1, f"the model allows {most} at most"))
    return {"schema": SWEEP, "top_k": top_k, "most": most, "rows": rows}


def point(k: int, events: Events, moe_layers: int) -> list[dict[str, Any]]:
    """The kernels of the expert gather's products in one pass; raises Mismatch if launches have no
    owner."""
    try:
        steps = align.by_ranges(events)
    except Mismatch:
        steps = align.by_table(events)
    window = kernels.window(
        events,
        {one.step: one.launches for one in steps},
        {one.step: one.labels for one in steps},
    )
    gather = kernels.by_term(window).get("expert_gather", {"ms": 0.0})["ms"]
    rows = []
    for found in kernels.path(window, moe_layers)["experts"]:
        if found["helper"]:
            continue
        time = sum(
            ns
            for kernel, label, ns in window.kernels
            if label.term == "expert_gather"
            and label.primitive in kernels.GATHERS
            and base_name(kernel.name) == found["kernel"]
        )
        rows.append(
            {
                "top_k": k,
                "kernel": found["kernel"],
                "launches_per_token": found["launches_per_token"],
                "per_layer": found["per_layer"] if found["per_layer"] is not None else "",
                "ms_per_token": time / window.steps / 1e6,
                "gather_ms_per_token": gather,
                "why": "",
            }
        )
    return rows or [_none(k, "no kernel of a gathered product ran")]


def _none(k: int, why: str) -> dict[str, Any]:
    return dict.fromkeys(COLUMNS, "") | {"top_k": k, "why": " ".join(why.split())[:300]}
