"""Where a token's time goes: the instrumented scopes, the kernel trace, the graph, the sweep."""

import statistics
from typing import Any

from .arms import RATES, Run
from .quantities import TERMS
from .results import Found
from .statistics import Figure, adopt, figure, fit_line


def scopes(found: Found, limit: float) -> dict[str, Any]:
    """The instrumented pass: per term ms per token, share of its wall and lead over the others.

    found: scopes.json with at least one pass; disturbed passes are left out where there are
    others. The terms of each pass must add up to its wall within ``limit`` (a
    share); otherwise "refused" says by how much, and the attribution is not used.
    """
    files, tokens, passes = [found.file], found.value["tokens"], quiet_passes(found)
    walls = [entry["wall_s"] for entry in passes]
    names = [term for term in TERMS if any(term in entry["terms_s"] for entry in passes)]
    seconds = {term: [entry["terms_s"].get(term, 0.0) for entry in passes] for term in names}
    shares = {
        term: [value / wall for value, wall in zip(values, walls, strict=True)]
        for term, values in seconds.items()
    }
    sums = [sum(shares[term][i] for term in names) for i in range(len(passes))]
    gap = max(abs(1 - total) for total in sums)
    terms = {}
    for term in names:
        others = [
            max((shares[other][i] for other in names if other != term), default=0.0)
            for i in range(len(passes))
        ]
        leads = [share - other for share, other in zip(shares[term], others, strict=True)]
        terms[term] = {
            "ms": figure([value / tokens * 1e3 for value in seconds[term]], "ms/token", files),
            "share": figure(shares[term], "share", files),
            "lead": figure(leads, "share", files),
        }
    wall = figure([wall / tokens * 1e3 for wall in walls], "ms/token", files)
    plain = found.value.get("plain_token_s")
    slowed = [wall / tokens / plain for wall in walls] if plain else []
    return {
        "wall_ms": wall,
        "plain_ms": figure([plain * 1e3], "ms/token", files) if plain else None,
        "slowed": figure(slowed, "ratio", files) if slowed else None,
        "sum": figure(sums, "share", files),
        "disturbed": any(_disturbed(entry) for entry in passes),
        "refused": None
        if gap <= limit
        else f"the terms add up to {min(sums):.3f} to {max(sums):.3f} of the pass's wall, "
        f"the limit is {limit:g} off 1",
        "largest": max(names, key=lambda term: statistics.median(shares[term])),
        "terms": terms,
    }


def quiet_passes(found: Found) -> list[dict[str, Any]]:
    """The passes that nothing disturbed or, if all were, all of them."""
    passes = found.value["passes"]
    return [entry for entry in passes if not _disturbed(entry)] or passes


def _disturbed(entry: dict[str, Any]) -> bool:
    return bool((entry.get("guard") or {}).get("rejected"))


# Patch of an intervention -> the terms that it takes out of the token.
REMOVES = {
    "skip_experts": ("expert_gather", "activation"),
    "skip_router": ("router",),
    "skip_moe": ("router", "expert_gather", "activation", "combine", "shared_expert"),
    "skip_attention": ("attention",),
}


def removed(patches: list[str], found: Found | None, traced: dict[str, Any] | None) -> Any:
    """What the other instruments give the terms that an intervention takes away, or None.

    found: scopes.json of the base arm. traced: kernels() of the base arm. Beside what the
    removal saves, these shares are the three instruments' answers to one question.
    """
    terms = [term for patch in patches for term in REMOVES.get(patch, ())]
    if not terms or len(patches) != 1:
        return None
    shares = []
    if found is not None:
        for entry in quiet_passes(found):
            shares.append(sum(entry["terms_s"].get(term, 0.0) for term in terms) / entry["wall_s"])
    parts = (
        [traced["terms"][term]["share"] for term in terms if term in traced["terms"]]
        if traced
        else []
    )
    return {
        "terms": terms,
        "scopes_share": figure(shares, "share", [found.file]) if found and shares else None,
        "gpu_share": figure([sum(part["value"] for part in parts)], "share", parts[0]["files"])
        if parts
        else None,
    }


def operations(table: Found, trace: Found | None) -> dict[str, Any]:
    """The decode graph of one token: primitives by term, and the counts that claims speak of.

    table: operations.csv (term, primitive, count). trace: trace.json with "operations".
    """
    rows = [(row["term"], row["primitive"], int(row["count"])) for row in table.value]
    files = [table.file]
    counts = {
        "total": figure([sum(count for *_, count in rows)], "operations/token", files),
        "astype": figure(
            [sum(count for _, primitive, count in rows if primitive == "AsType")],
            "operations/token",
            files,
        ),
    }
    by_term: dict[str, dict[str, Figure]] = {}
    for term in TERMS:
        found: dict[str, int] = {}
        for row_term, primitive, count in rows:
            if row_term == term:
                found[primitive] = found.get(primitive, 0) + count
        if found:
            order = sorted(found.items(), key=lambda item: (-item[1], item[0]))
            by_term[term] = {
                name: figure([count], "operations/token", files) for name, count in order
            }
    for name, value in ((trace.value.get("operations") or {}) if trace else {}).items():
        if name not in counts:
            kept = adopt(value, "operations/token", [trace.file])
            if kept is not None:
                counts[name] = kept
    return {"counts": counts, "by_term": by_term}


def kernels(table: Found, terms: Found | None, limits: dict[str, Any]) -> dict[str, Any]:
    """The kernel trace: terms by GPU time, launches, busy share, and the kernels themselves.

    table: kernels.csv (arm, kernel, term, launches_per_token, ms_per_token, bytes_per_token,
    share). terms: terms.json with "busy_share", "profiler_cost", "unclassified" and others;
    a profiler's cost or an unclassified share above the study's limits refuses the attribution.
    """
    files = [table.file]
    rows = table.value
    total = sum(float(row["ms_per_token"]) for row in rows)
    found: dict[str, Any] = {}
    by_term = {
        term: [row for row in rows if row["term"] == term]
        for term in TERMS
        if any(row["term"] == term for row in rows)
    }
    shares = {
        term: sum(float(row["ms_per_token"]) for row in members) / total
        for term, members in by_term.items()
    }
    for term, members in by_term.items():
        lead = shares[term] - max((s for other, s in shares.items() if other != term), default=0.0)
        found[term] = {
            "ms": figure([sum(float(r["ms_per_token"]) for r in members)], "ms/token", files),
            "launches": figure(
                [sum(float(r["launches_per_token"]) for r in members)], "launches/token", files
            ),
            "share": figure([shares[term]], "share", files),
            "lead": figure([lead], "share", files),
        }
    extra = terms.value if terms else {}
    source = [terms.file] if terms else files
    checks = {
        name: adopt(extra.get(name), unit, source)
        for name, unit in (
            ("profiler_cost", "share"),
            ("unclassified", "share"),
            ("window_disagreement", "share"),
            ("instruments_disagreement", "share"),
        )
    }
    refused = [
        f"{name.replace('_', ' ')} {checks[name]['max']:.3f} is above the limit {limits[name]:g}"
        for name in ("profiler_cost", "unclassified")
        if checks[name] is not None and checks[name]["max"] > limits[name]
    ]
    listed = [
        {
            "kernel": row["kernel"],
            "term": row["term"],
            "launches": figure([float(row["launches_per_token"])], "launches/token", files),
            "ms": figure([float(row["ms_per_token"])], "ms/token", files),
            "bytes": figure([float(row["bytes_per_token"])], "bytes/token", files)
            if row.get("bytes_per_token")
            else None,
            "share": figure([float(row["ms_per_token"]) / total], "share", files),
        }
        for row in sorted(rows, key=lambda row: (-float(row["ms_per_token"]), row["kernel"]))
    ]
    return {
        "refused": "; ".join(refused) or None,
        "terms": found,
        "largest": max(shares, key=shares.__getitem__) if shares else None,
        "total_ms": figure([total], "ms/token", files),
        "launches": figure(
            [sum(float(row["launches_per_token"]) for row in rows)], "launches/token", files
        ),
        "busy": adopt(extra.get("busy_share"), "share", source),
        "busy_ms": adopt(extra.get("busy_ms"), "ms/token", source),
        "host_gap_ms": adopt(extra.get("host_gap_ms"), "ms/token", source),
        "checks": checks,
        "kernels": listed,
    }


def sweep(
    points: dict[int, tuple[str, list[Run]]], base: list[Run], file: str
) -> dict[str, Any] | None:
    """Time per token against experts per token, a line by least squares in each round.

    points: top_k -> (arm, its valid runs). base: the runs of the arm whose token the fixed share
    refers to. A round counts if every point has a valid run in it. The slope is what one more
    expert costs (over all MoE layers), the intercept what a token costs whatever top_k is.
    """
    rounds = set.intersection(
        *({run["round"] for run in runs} for _, runs in points.values()),
        {run["round"] for run in base},
    )
    if len(points) < 3 or not rounds:
        return None
    milliseconds = RATES["token_ms"][1]
    ids, slopes, intercepts, fixed, misfits = [], [], [], [], []
    chosen = {k: {run["round"]: run for run in runs} for k, (_, runs) in sorted(points.items())}
    tokens = {run["round"]: run for run in base}
    for number in sorted(rounds):
        ks = list(chosen)
        ys = [milliseconds(chosen[k][number]) for k in ks]
        slope, intercept = fit_line(ks, ys)
        token = milliseconds(tokens[number])
        slopes.append(slope)
        intercepts.append(intercept)
        fixed.append(intercept / token)
        line = [abs(y - intercept - slope * k) / token for k, y in zip(ks, ys, strict=True)]
        misfits.append(max(line))
        ids += [chosen[k][number]["id"] for k in ks] + [tokens[number]["id"]]
    files = [file]
    return {
        "points": {
            str(k): {
                "arm": points[k][0],
                "ms": figure(
                    [milliseconds(by_round[n]) for n in sorted(rounds)],
                    "ms/token",
                    files,
                    [by_round[n]["id"] for n in sorted(rounds)],
                ),
            }
            for k, by_round in chosen.items()
        },
        "expert_cost": figure(slopes, "ms/expert", files, ids),
        "fixed_ms": figure(intercepts, "ms/token", files, ids),
        "fixed_share": figure(fixed, "share", files, ids),
        "misfit": figure(misfits, "share", files, ids),
    }
