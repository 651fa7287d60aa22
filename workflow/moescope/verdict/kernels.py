"""A GPU token by its kernels: terms, launches, the host beside it, and how far to trust it."""

import re
from typing import Any

from .quantities import TERMS
from .results import Found
from .statistics import Figure, adopt, figure

UNCLASSIFIED = "unclassified"

# terms.json's numbers that say how far the trace may be trusted, all of them shares.
CHECKS = (
    "profiler_cost",
    "profiler_wall_cost",
    "unclassified",
    "window_disagreement",
    "instruments_disagreement",
    "launches_disagreement",
)
# Those with a limit in the study; the median over the passes counts, since the host's speed varies
# more between two passes than a profiler costs.
LIMITED = ("profiler_cost", "unclassified")


def kernels(
    table: Found,
    terms: Found | None,
    limits: dict[str, float],
    calls: Found | None = None,
    timeline: Found | None = None,
) -> dict[str, Any]:
    """The kernel trace of one arm.

    table: kernels.csv (kernel, term, launches_per_token, ms_per_token, ...). terms: terms.json,
    whose lists hold a value for each profiled pass; without it the table alone is used. calls:
    calls.csv (call, thread, count, ms). timeline: timeline.csv, spans of one step. A profiler's
    cost or an unclassified share above the study's limits refuses the attribution; the counts
    stand.
    """
    extra = terms.value if terms else {}
    files = [terms.file] if terms else [table.file]
    parts = _terms(extra, files) if extra.get("terms") else _of_table(table)
    checks = {name: adopt(extra.get(name), "share", files) for name in CHECKS}
    refused = [
        f"{name.replace('_', ' ')} {checks[name]['value']:.3f} is above the limit {limits[name]:g}"
        for name in LIMITED
        if checks[name] is not None and checks[name]["value"] > limits[name]
    ]
    if extra.get("dropped"):
        refused.append(f"the profiler dropped {extra['dropped']} records")
    rows = table.value
    launches = adopt(extra.get("launches"), "launches/token", files)
    return {
        "refused": "; ".join(refused) or None,
        "method": extra.get("method"),
        "terms": parts,
        "largest": max(parts, key=lambda term: parts[term]["share"]["value"]),
        "launches": launches
        or figure(
            [sum(float(row["launches_per_token"]) for row in rows)],
            "launches/token",
            [table.file],
        ),
        **{
            name: adopt(extra.get(key), unit, files)
            for name, key, unit in (
                ("busy", "busy_share", "share"),
                ("busy_ms", "busy_ms", "ms/token"),
                ("host_gap_ms", "host_gap_ms", "ms/token"),
                ("wall_ms", "wall_ms", "ms/token"),
                ("overlapping_ms", "overlapping_ms", "ms/token"),
            )
        },
        "checks": checks,
        "window": {
            way: {
                what: figure([entry[what]], f"{unit}/token", files)
                for what, unit in (("ms", "ms"), ("launches", "launches"))
            }
            for way, entry in (extra.get("window") or {}).items()
        },
        "host": {
            what: {
                phase: figure([ms], "ms/token", files)
                for phase, ms in (extra.get("host") or {}).get(what, {}).items()
            }
            for what in ("ms", "idle_ms")
        },
        "path": _path(extra.get("path") or {}, files, table),
        "calls": [
            {
                "call": row["call"],
                "thread": row["thread"],
                "count": figure([float(row["count"])], "calls/token", [calls.file]),
                "ms": figure([float(row["ms"])], "ms/token", [calls.file]),
            }
            for row in (calls.value if calls else [])
        ],
        "kernels": [_kernel(row, [table.file]) for row in rows],
        # Text, since it is drawn and not read: one span is "start end term launches", in µs.
        "timeline": {
            "file": timeline.file,
            "spans": [
                f"{row['start_us']} {row['end_us']} {row['term']} {row['launches']}"
                for row in timeline.value
            ],
        }
        if timeline and timeline.value
        else None,
    }


def _terms(extra: dict[str, Any], files: list[str]) -> dict[str, dict[str, Figure | None]]:
    """Each term over the passes: ms, launches, share of the kernels' time, lead over the others."""
    names = [name for name in (*TERMS, UNCLASSIFIED) if name in extra["terms"]]
    ms = {name: extra["terms"][name]["ms"] for name in names}
    totals = [sum(values) for values in zip(*ms.values(), strict=True)]
    shares = {
        name: [value / total for value, total in zip(ms[name], totals, strict=True)]
        for name in names
    }
    forced = extra.get("forced_terms") or {}
    whole = sum(entry["ms"] for entry in forced.values())
    found = {}
    for name in names:
        leads = [
            share - max((shares[other][i] for other in names if other != name), default=0.0)
            for i, share in enumerate(shares[name])
        ]
        found[name] = {
            "ms": figure(ms[name], "ms/token", files),
            "launches": figure(extra["terms"][name]["launches"], "launches/token", files),
            "share": figure(shares[name], "share", files),
            "lead": figure(leads, "share", files),
            "forced_share": figure([forced.get(name, {"ms": 0.0})["ms"] / whole], "share", files)
            if whole
            else None,
        }
    return found


def _of_table(table: Found) -> dict[str, dict[str, Figure | None]]:
    """The same from kernels.csv alone: one pass, no second opinion."""
    named = {row["term"] for row in table.value}
    terms = {
        name: {
            "ms": [sum(float(row["ms_per_token"]) for row in table.value if row["term"] == name)],
            "launches": [
                sum(float(row["launches_per_token"]) for row in table.value if row["term"] == name)
            ],
        }
        for name in (*TERMS, UNCLASSIFIED)
        if name in named
    }
    return _terms({"terms": terms}, [table.file])


def _path(found: dict[str, Any], files: list[str], table: Found) -> dict[str, Any]:
    """Which kernels the routed experts' products ran, and which counts do not come out even.

    A kernel's time is that of its rows in the term (a template's instances are rows of their own).
    """

    def time(kernel: str) -> Figure | None:
        word = re.compile(rf"\b{re.escape(kernel)}\b")
        times = [
            float(row["ms_per_token"])
            for row in table.value
            if row["term"] == "expert_gather" and word.search(row["kernel"])
        ]
        return figure([sum(times)], "ms/token", [table.file]) if times else None

    return {
        "experts": [
            {
                "kernel": row["kernel"],
                "launches": figure([row["launches_per_token"]], "launches/token", files),
                "per_layer": adopt(row.get("per_layer"), "launches/layer", files),
                "ms": time(row["kernel"]),
            }
            for row in found.get("experts", [])
        ],
        "uneven": [
            {
                "kernel": row["kernel"],
                "term": row["term"],
                "launches": figure([row["launches_per_token"]], "launches/token", files),
            }
            for row in found.get("uneven", [])
        ],
    }


def _kernel(row: dict[str, str], files: list[str]) -> dict[str, Any]:
    size = row.get("bytes_per_token")
    return {
        "kernel": row["kernel"],
        "term": row["term"],
        "primitives": row.get("primitives", ""),
        "launches": figure([float(row["launches_per_token"])], "launches/token", files),
        "ms": figure([float(row["ms_per_token"])], "ms/token", files),
        "bytes": figure([float(size)], "bytes/token", files) if size else None,
        "share": figure([float(row["share"])], "share", files),
    }
