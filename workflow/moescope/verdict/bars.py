"""How far a kernel trace may be trusted: each bar, what was measured, and what explains a miss.

A bar that is not met stands in the record with the measurement that explains it, if there is one.
"""

import statistics
from typing import Any

from ..trace.kernels import SYNCHRONISERS, disagreement, model
from .path import FORCED
from .quantities import BLOCK
from .results import Found
from .statistics import Figure, adopt, figure

TO_BUSY, TWO_LENGTHS, INSTRUMENTS = 0.01, 0.02, 0.05

APART = (
    "MLX's kernels of synchronisation compute nothing and wait, up to milliseconds, for memory "
    "shared with the host; on the model's kernels alone the bar is met"
)
NOT_APART = (
    "this trace did not take MLX's kernels of synchronisation apart, which wait for memory shared "
    "with the host, now long and now short, and are part of both"
)
OVERLAP = (
    "by themselves, with CUDA graphs off, the same kernels agree with the forced pass; what is "
    "left is what kernels do to each other when graphs run them at the same time"
)


SPLIT = (
    "of a fused block in two launches the trace calls the second the combine, and the forced pass "
    "the expert gather; with the block's terms as one "
)


def bars(
    extra: dict[str, Any],
    checks: dict[str, Figure | None],
    limits: dict[str, float],
    table: Found,
    files: list[str],
    split: bool = False,
) -> list[dict[str, Any]]:
    """[{"bar", "figure", "than", "met", "why", "by"}] of terms.json; empty where there is none.

    figure: what counts. why: the explanation of a miss, or of what the figure leaves out. by: the
    measurements that it rests on, {"name", "figure"}. split: do a fused block's kernels stand
    under several terms? By the forced pass alone each kernel has a term by construction: no bar.
    """
    if not extra.get("terms"):
        return []
    found = [
        _bar("profiler's cost on the kernels' time", checks["profiler_cost"],
             limits["profiler_cost"]),
        _bar("kernels without a term",
             None if extra.get("method") == FORCED else checks["unclassified"],
             limits["unclassified"]),
        _bar("terms against busy time", _to_busy(extra, files), TO_BUSY),
        _bar("window against two lengths", checks["window_disagreement"], TWO_LENGTHS),
        _bar("graphs' pass against the forced pass", checks["instruments_disagreement"],
             INSTRUMENTS),
        _bar("kernels alone against the forced pass", checks["alone_disagreement"], INSTRUMENTS),
    ]  # fmt: skip
    bars = [bar for bar in found if bar is not None]
    waits = _waits(extra, table, files)
    for name, key in (
        ("profiler's cost on the kernels' time", "all_profiler_cost"),
        ("window against two lengths", "all_window_disagreement"),
        ("graphs' pass against the forced pass", "all_instruments_disagreement"),
    ):
        bar = next((bar for bar in bars if bar["bar"] == name), None)
        if bar is None:
            continue
        whole = checks[key]
        if bar["met"] and whole is not None and not _within(whole, bar["than"]):
            bar |= {"why": APART, "by": [_by("with synchronisation", whole), *waits]}
        elif not bar["met"] and whole is None and waits:
            bar |= {"why": NOT_APART, "by": waits}
    _overlap(bars, checks)
    if split:
        _split(bars, extra, files)
    return bars


def _bar(name: str, found: Figure | None, limit: float) -> dict[str, Any] | None:
    if found is None:
        return None
    met = _within(found, limit)
    return {"bar": name, "figure": found, "than": limit, "met": met, "why": None, "by": []}


def _within(found: Figure, limit: float) -> bool:
    """The median counts: the host's speed varies more between two passes than what is asked."""
    return found["value"] <= limit


def _by(name: str, found: Figure) -> dict[str, Any]:
    return {"name": name, "figure": found}


def _to_busy(extra: dict[str, Any], files: list[str]) -> Figure | None:
    sums, busy = extra.get("sum_ms") or [], extra.get("busy_ms") or []
    if not sums or len(sums) != len(busy):
        return None
    return figure([abs(a / b - 1) for a, b in zip(sums, busy, strict=True)], "share", files)


def _waits(extra: dict[str, Any], table: Found, files: list[str]) -> list[dict[str, Any]]:
    """The time of synchronisation: of its own line or, in older traces, of its kernels' rows."""
    own = (extra["terms"].get("synchronisation") or {}).get("ms")
    if own:
        return [_by("synchronisation", adopt(own, "ms/token", files))]
    times = [
        float(row["ms_per_token"])
        for row in table.value
        if row["kernel"].partition("<")[0] in SYNCHRONISERS
    ]
    return [_by("their time", figure([sum(times)], "ms/token", [table.file]))] if times else []


def _overlap(bars: list[dict[str, Any]], checks: dict[str, Figure | None]) -> None:
    named = {bar["bar"]: bar for bar in bars}
    graphs = named.get("graphs' pass against the forced pass")
    alone = named.get("kernels alone against the forced pass")
    if not graphs or graphs["met"] or not alone or not alone["met"]:
        return
    by = [_by("alone against forced", alone["figure"])]
    if checks["overlap_disagreement"] is not None:
        by.append(_by("graphs against alone", checks["overlap_disagreement"]))
    graphs |= {"why": OVERLAP, "by": by}


def _split(bars: list[dict[str, Any]], extra: dict[str, Any], files: list[str]) -> None:
    """Missed comparisons of terms, made again with the block's terms as one."""
    passes = {name: extra.get(f"{name}_terms") or {} for name in ("forced", "alone")}
    passes["graphs"] = {
        term: {"ms": statistics.median(entry["ms"])} for term, entry in extra["terms"].items()
    }
    whole = {name: _joined(terms) for name, terms in passes.items()}
    if not all(whole.values()):
        return

    def apart(one: str, other: str) -> dict[str, Any]:
        found = figure([disagreement(whole[one], whole[other])], "share", files)
        return _by(f"{one} against {other}", found)

    named = {bar["bar"]: bar for bar in bars}
    graphs, alone = apart("graphs", "forced"), apart("alone", "forced")
    for name, by in (
        ("graphs' pass against the forced pass", graphs),
        ("kernels alone against the forced pass", alone),
    ):
        bar = named.get(name)
        if bar is None or bar["met"] or bar["why"]:
            continue
        if _within(by["figure"], bar["than"]):
            bar |= {"why": f"{SPLIT}it is met", "by": [by]}
        elif by is graphs and _within(alone["figure"], bar["than"]):
            why = f"{SPLIT}it is not, and the rest is another: {OVERLAP}"
            bar |= {"why": why, "by": [by, alone, apart("graphs", "alone")]}


def _joined(terms: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """The model's terms, the MoE block's as one."""
    found: dict[str, dict[str, float]] = {}
    for term, entry in model(terms).items():
        one = found.setdefault("block" if term in BLOCK else term, {"ms": 0.0})
        one["ms"] += entry["ms"]
    return found
