"""Calls of the decoding thread that wait for the GPU: while one does, no next step is encoded."""

from typing import Any

from .results import Found
from .statistics import figure

# Whole names as calls.csv has them: cudaMemcpyAsync and cudaFreeAsync wait for nothing.
WAITING = (
    "cudaFree",
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "cuCtxSynchronize",
    "cuStreamSynchronize",
    "cuEventSynchronize",
)
LEAST = 0.05  # of the profiled pass's wall, all such calls together: below it nothing is told


def blocking(calls: Found | None, terms: Found | None) -> list[dict[str, Any]] | None:
    """[{"call", "count", "ms", "share"}], the longest first, where together they have LEAST or more
    of the token; None where they have less, or where a trace does not tell.

    calls: calls.csv (call, thread "loop" | "other", count and ms a token), which is of the last
    profiled pass. terms: terms.json; the share is of that pass's own wall, the last of
    profiled_wall_ms, since a plain token is another one, without the profiler.
    """
    walls = terms.value.get("profiled_wall_ms") if terms else None
    if calls is None or not walls:
        return None
    rows = [row for row in calls.value if row["thread"] == "loop" and row["call"] in WAITING]
    if sum(float(row["ms"]) for row in rows) < LEAST * walls[-1]:
        return None
    return [
        {
            "call": row["call"],
            "count": figure([float(row["count"])], "calls/token", [calls.file]),
            "ms": figure([float(row["ms"])], "ms/token", [calls.file]),
            "share": figure([float(row["ms"]) / walls[-1]], "share", [calls.file, terms.file]),
        }
        for row in sorted(rows, key=lambda row: -float(row["ms"]))
    ]
