"""Which resource bounds a token, before anything is said about terms.

A kernel can be the largest on the GPU and its removal change nothing, because the GPU waits for the
host anyway. So the host's loop and the GPU's busy share come first.
"""

from typing import Any

from .statistics import Figure

# Where the GPU is busy less than IDLE of the token, the host bounds it; from BUSY on the GPU does.
IDLE, BUSY = 0.6, 0.9
# From this share of the measured bandwidth on, a busy GPU is bound by memory.
MEMORY = 0.6

LAST = "in the last traced pass"  # the phases are of one pass, the busy share is over passes
PHASES = {
    "build": "building the graph in Python",
    "encode": "MLX's encoding and launching",
    "wait": "waiting for the token",
}


def bound(kernels: dict[str, Any] | None, ceiling: dict[str, Any] | None) -> dict[str, str] | None:
    """{"resource": "host" | "memory" | "kernels" | "both", "why"}; None without a kernel trace.

    kernels: an arm's kernel trace. ceiling: its achieved rates. Medians decide; where the busy
    share's range holds a bound between two resources, the text says so.
    """
    busy: Figure | None = kernels["busy"] if kernels else None
    if busy is None:
        return None
    found = _by_median(busy, kernels, ceiling)
    crossed = [f"{limit * 100:g} %" for limit in (IDLE, BUSY) if busy["min"] < limit <= busy["max"]]
    if crossed:
        found["why"] += (
            f"; by the median alone, since the range of the GPU's busy share holds the bound of "
            f"{' and that of '.join(crossed)} between two resources"
        )
    return found


def _by_median(
    busy: Figure, kernels: dict[str, Any], ceiling: dict[str, Any] | None
) -> dict[str, str]:
    if busy["value"] < IDLE:
        return {"resource": "host", "why": _host(kernels)}
    if busy["value"] < BUSY:
        return {"resource": "both", "why": f"neither is idle: {_host(kernels)}"}
    share = ceiling["whole"]["share"] if ceiling else None
    if share is not None and share["value"] >= MEMORY:
        return {"resource": "memory", "why": "the GPU is busy, reading near the measured rate"}
    why = "the GPU is busy, far below the rate at which its memory can be read"
    if share is None:
        why = "the GPU is busy; no bandwidth was measured to tell memory from the rest"
    return {"resource": "kernels", "why": why}


def _host(kernels: dict[str, Any]) -> str:
    """What the host does most of the time, of the phases that are its own work."""
    phases = {name: figure["value"] for name, figure in kernels["host"]["ms"].items()}
    work = {name: ms for name, ms in phases.items() if name != "wait"}
    if not work:
        return "the GPU waits for the host"
    most = max(work, key=work.__getitem__)
    if phases.get("wait", 0.0) > sum(work.values()):
        return f"{LAST} most of the loop is {PHASES['wait']}, then {PHASES.get(most, most)}"
    return f"{LAST} most of the loop is {PHASES.get(most, most)}, while the GPU runs dry"
