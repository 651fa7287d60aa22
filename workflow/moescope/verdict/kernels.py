"""A GPU token by its kernels: terms, launches, the host beside it, and how far to trust it."""

import re
from typing import Any

from . import bars, path
from .blocking import blocking
from .fused import KERNELS, PRODUCTS, reads_the_shared_expert
from .modules import modules as of_modules
from .path import FORCED
from .quantities import BLOCK, SYNCHRONISATION, TERMS
from .results import Found
from .statistics import Figure, adopt, figure, less, quotient

UNCLASSIFIED = "unclassified"

# terms.json's numbers that say how far the trace may be trusted, all of them shares.
CHECKS = (
    "profiler_cost",
    "profiler_wall_cost",
    "unclassified",
    "window_disagreement",
    "instruments_disagreement",
    "launches_disagreement",
    "alone_disagreement",
    "overlap_disagreement",
    "all_profiler_cost",
    "all_window_disagreement",
    "all_instruments_disagreement",
)
# Comparisons with the forced pass: void where the terms themselves come from it.
SECOND_OPINIONS = (
    "instruments_disagreement",
    "launches_disagreement",
    "alone_disagreement",
    "overlap_disagreement",
    "all_instruments_disagreement",
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
    architecture: Found | None = None,
    proof: dict[str, Any] | None = None,
    modules: Found | None = None,
) -> dict[str, Any]:
    """The kernel trace of one arm. Fields that older traces do not have are None.

    table: kernels.csv (kernel, term, launches_per_token, ms_per_token, ...). terms: terms.json,
    whose lists hold a value for each profiled pass; without it the table alone is used. calls:
    calls.csv (call, thread, count, ms). timeline: timeline.csv, spans of one step. architecture:
    architecture.json, whose bytes per token are a kernel's where it alone reads a term's weights.
    proof: of the arm's path (verdict.path). modules: modules.csv (module, term,
    launches_per_token, ms_per_token, share). A profiler's cost or an unclassified share above the
    study's limits refuses the attribution; the counts stand.
    """
    extra = terms.value if terms else {}
    files = [terms.file] if terms else [table.file]
    parts = _terms(extra, files) if extra.get("terms") else _of_table(table)
    checks = {name: adopt(extra.get(name), "share", files) for name in CHECKS}
    if extra.get("method") == FORCED:
        checks |= dict.fromkeys(SECOND_OPINIONS)
    refused = [
        f"{name.replace('_', ' ')} {checks[name]['value']:.3f} is above the limit {limits[name]:g}"
        for name in LIMITED
        if checks[name] is not None and checks[name]["value"] > limits[name]
    ]
    if extra.get("dropped"):
        refused.append(f"the profiler dropped {extra['dropped']} records")
    rows = table.value
    owners = readers(rows, architecture)
    launches = adopt(extra.get("launches"), "launches/token", files)
    return {
        "refused": "; ".join(refused) or None,
        "method": extra.get("method"),
        "terms": parts,
        "block": _block(extra.get("terms") or {}, files),
        "forced_block": _block(_forced_terms(extra), files),
        "largest": max(
            (term for term in parts if term != SYNCHRONISATION),
            key=lambda term: parts[term]["share"]["value"],
        ),
        "launches": launches
        or figure(
            [sum(float(row["launches_per_token"]) for row in rows)],
            "launches/token",
            [table.file],
        ),
        **{
            name: adopt(extra.get(key), unit, files)
            for name, key, unit in (
                ("busy_ms", "busy_ms", "ms/token"),
                ("wall_ms", "wall_ms", "ms/token"),
                ("overlapping_ms", "overlapping_ms", "ms/token"),
                ("model_busy_ms", "model_busy_ms", "ms/token"),
            )
        },
        **_beside_the_wall(extra, files),
        "checks": checks,
        "bars": bars.bars(extra, checks, limits, table, files, bool(_elsewhere(rows))),
        "window": {
            way: {
                what: adopt(entry.get(what), f"{unit}/token", files)
                for what, unit in (("ms", "ms"), ("launches", "launches"), ("all_ms", "ms"))
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
        "cpu": _cpu(extra.get("cpu_ms") or {}, files),
        "graphs": _graphs(calls),
        "path": _path(extra, files, table, proof or {}),
        "calls": [
            {
                "call": row["call"],
                "thread": row["thread"],
                "count": figure([float(row["count"])], "calls/token", [calls.file]),
                "ms": figure([float(row["ms"])], "ms/token", [calls.file]),
            }
            for row in (calls.value if calls else [])
        ],
        "blocking": blocking(calls, terms),
        "kernels": [
            _kernel(row, [table.file], owners.get((row["kernel"], row["term"]))) for row in rows
        ],
        "modules": of_modules(modules, parts.get("other")) if modules and modules.value else None,
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


def _beside_the_wall(extra: dict[str, Any], files: list[str]) -> dict[str, Figure | None]:
    """The GPU's busy share of the token, and the rest of it. Busy time is of profiled passes, the
    wall of passes without a profiler: no two of them are one pass, so both ranges count."""
    busy, wall = (adopt(extra.get(name), "ms/token", files) for name in ("busy_ms", "wall_ms"))
    if busy is None or wall is None:
        return {
            "busy": adopt(extra.get("busy_share"), "share", files),
            "host_gap_ms": adopt(extra.get("host_gap_ms"), "ms/token", files),
        }
    return {"busy": quotient(busy, wall, "share"), "host_gap_ms": less(wall, busy)}


def _terms(extra: dict[str, Any], files: list[str]) -> dict[str, dict[str, Figure | None]]:
    """Each term over the passes: ms, launches, share of the kernels' time, lead over the others;
    by the forced pass its share, and with CUDA graphs off, kernel by kernel, its ms."""
    names = [name for name in (*TERMS, SYNCHRONISATION, UNCLASSIFIED) if name in extra["terms"]]
    ms = {name: extra["terms"][name]["ms"] for name in names}
    totals = [sum(values) for values in zip(*ms.values(), strict=True)]
    shares = {
        name: [value / total for value, total in zip(ms[name], totals, strict=True)]
        for name in names
    }
    waits = ms.get(SYNCHRONISATION)
    forced = (extra.get("forced_terms") or {}) if extra.get("method") != FORCED else {}
    whole = sum(entry["ms"] for entry in forced.values())
    alone = extra.get("alone_terms") or {}
    found = {}
    for name in names:
        leads = [
            share
            - max(
                (shares[other][i] for other in names if other not in (name, SYNCHRONISATION)),
                default=0.0,
            )
            for i, share in enumerate(shares[name])
        ]
        found[name] = {
            "ms": figure(ms[name], "ms/token", files),
            "launches": figure(extra["terms"][name]["launches"], "launches/token", files),
            "share": figure(shares[name], "share", files),
            "lead": figure(leads, "share", files),
            # What waits for the host is no work: the share of the rest, where the trace has both.
            "share_of_work": figure(
                [
                    value / (total - wait)
                    for value, total, wait in zip(ms[name], totals, waits, strict=True)
                ],
                "share",
                files,
            )
            if waits and name != SYNCHRONISATION
            else None,
            # Of synchronisation the forced pass tells nothing unless it has the term.
            "forced_share": figure([forced.get(name, {"ms": 0.0})["ms"] / whole], "share", files)
            if whole and (name in forced or name != SYNCHRONISATION)
            else None,
            "alone_ms": adopt(alone.get(name, {}).get("ms"), "ms/token", files),
        }
    return found


def _forced_terms(extra: dict[str, Any]) -> dict[str, Any]:
    """The one forced pass as "terms" has its passes, where a trace has it."""
    if extra.get("method") == FORCED:
        return extra.get("terms") or {}
    return {
        name: {what: [value] for what, value in entry.items()}
        for name, entry in (extra.get("forced_terms") or {}).items()
    }


def _block(terms: dict[str, Any], files: list[str]) -> dict[str, Figure] | None:
    """The whole MoE block over the passes, router to combine with the shared expert; None if the
    arm has none."""
    own = [terms[name] for name in BLOCK if name in terms]
    if not own:
        return None

    def total(what: str) -> list[float]:
        return [sum(values) for values in zip(*(entry[what] for entry in own), strict=True)]

    units = (("ms", "ms/token"), ("launches", "launches/token"))
    return {what: figure(total(what), unit, files) for what, unit in units}


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
        for name in (*TERMS, SYNCHRONISATION, UNCLASSIFIED)
        if name in named
    }
    return _terms({"terms": terms}, [table.file])


def _elsewhere(rows: path.Rows) -> path.Rows:
    """A fused block's kernels that the trace counts to another term than the experts'."""
    return [row for row in path.claimed_rows(KERNELS, rows) if row["term"] != path.TERM]


def _path(
    extra: dict[str, Any], files: list[str], table: Found, proof: dict[str, Any]
) -> dict[str, Any]:
    """Which kernels the routed experts' products ran, and which counts do not come out even; what
    the arm claims of them, and whether it is proved.

    A kernel's time is that of its rows in the term (a template's instances are rows of their own).
    Where the forced pass alone tells them ("by_forced"), its table does.
    """
    found, claimed = extra.get("path") or {}, proof.get("claimed")
    forced = path.by_forced(extra, table.value, claimed)
    counted = [table.file] if forced else files

    def time(kernel: str) -> Figure | None:
        word = re.compile(rf"\b{re.escape(kernel)}\b")
        times = [
            float(row["ms_per_token"])
            for row in table.value
            if row["term"] == path.TERM and word.search(row["kernel"])
        ]
        return figure([sum(times)], "ms/token", [table.file]) if times else None

    return {
        "experts": [
            {
                "kernel": row["kernel"],
                "launches": figure([row["launches_per_token"]], "launches/token", counted),
                "per_layer": adopt(row.get("per_layer"), "launches/layer", counted + files),
                "ms": time(row["kernel"]),
                "under": path.TERM,
            }
            for row in forced or found.get("experts", [])
        ]
        + [
            _apart(row, table.file, files, found.get("moe_layers"))
            for row in _elsewhere(table.value)
        ],
        "uneven": [
            {
                "kernel": row["kernel"],
                "term": row["term"],
                "launches": figure([row["launches_per_token"]], "launches/token", files),
            }
            for row in found.get("uneven", [])
        ],
        "by_forced": bool(forced),
        "claimed": claimed,
        "proved": proof.get("proved"),
    }


def _apart(row: dict[str, str], table: str, files: list[str], layers: int | None) -> dict[str, Any]:
    """A kernel of the experts that stands under another term, by the table of kernels."""
    launches = float(row["launches_per_token"])
    return {
        "kernel": row["kernel"],
        "launches": figure([launches], "launches/token", [table]),
        "per_layer": figure([launches / layers], "launches/layer", [table, *files])
        if layers
        else None,
        "ms": figure([float(row["ms_per_token"])], "ms/token", [table]),
        "under": row["term"],
    }


# Terms whose weights are read by products alone, so that one kernel of them may read all of it.
READ_WHOLE = ("expert_gather", "shared_expert", "head")


def readers(
    rows: list[dict[str, str]], architecture: Found | None
) -> dict[tuple[str, str], Figure]:
    """(kernel, term) -> bytes of the term's weights per token, where that kernel alone reads them:
    with two kernels of products in a term it is not known which reads what."""
    if architecture is None:
        return {}
    sizes = dict(architecture.value["bytes"]["per_token"])
    own = path.claimed_rows(KERNELS, rows)
    if own and reads_the_shared_expert(rows, architecture.value.get("moe_layers") or 0):
        sizes["expert_gather"] += sizes.pop("shared_expert", 0)
    found = {}
    for term in READ_WHOLE:
        if any(row["term"] != term for row in own) and term == path.TERM:
            continue  # the second of two launches reads a part of them
        products = [
            row["kernel"]
            for row in rows
            if row["term"] == term
            and set(row.get("primitives", "").split()) & set(PRODUCTS)
            and not row["kernel"].startswith(path.HELPERS)
        ]
        if len(products) == 1 and sizes.get(term):
            found[products[0], term] = figure([sizes[term]], "bytes/token", [architecture.file])
    return found


def _cpu(found: dict[str, Any], files: list[str]) -> dict[str, Figure | None]:
    """Processor time of the host, ms a token: of the plain passes and, in the watched one that
    records least, of all threads and of the thread of the loop."""
    watched = found.get("watched") or {}
    return {
        "plain": adopt(found.get("plain"), "ms/token", files),
        "watched": adopt(watched.get("process"), "ms/token", files),
        "loop": adopt(watched.get("loop"), "ms/token", files),
    }


# What CUDA calls these, in its runtime and in its driver.
GRAPHS = {
    "launches": ("cudaGraphLaunch", "cuGraphLaunch"),
    "updates": ("cudaGraphExecUpdate", "cuGraphExecUpdate"),
    "instantiations": ("cudaGraphInstantiate", "cuGraphInstantiate"),
}


def _graphs(calls: Found | None) -> dict[str, Figure]:
    """CUDA graphs launched, updated and instantiated per token; empty without a list of calls."""
    if calls is None or not calls.value:
        return {}
    found = {}
    for what, names in GRAPHS.items():
        # A runtime's call may make the driver's of the same name: the larger count is the number.
        counts = [
            sum(float(row["count"]) for row in calls.value if row["call"].startswith(name))
            for name in names
        ]
        found[what] = figure([max(counts)], "calls/token", [calls.file])
    return found


def _kernel(row: dict[str, str], files: list[str], reads: Figure | None = None) -> dict[str, Any]:
    size = row.get("bytes_per_token")
    return {
        "kernel": row["kernel"],
        "term": row["term"],
        "primitives": row.get("primitives", ""),
        "launches": figure([float(row["launches_per_token"])], "launches/token", files),
        "ms": figure([float(row["ms_per_token"])], "ms/token", files),
        "bytes": figure([float(size)], "bytes/token", files) if size else reads,
        "share": figure([float(row["share"])], "share", files),
    }
