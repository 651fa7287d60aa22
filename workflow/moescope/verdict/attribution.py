"""Where a token's time goes: the instrumented scopes, interventions, the graph, the sweep."""

import statistics
from typing import Any

from .arms import RATES, Run
from .quantities import TERMS
from .results import Found
from .statistics import Figure, adopt, figure, fit_line, quotient


def scopes(found: Found, limit: float, plain: Figure | None = None) -> dict[str, Any]:
    """The instrumented pass: per term ms per token, share of its wall and lead over the others.

    found: scopes.json with at least one pass; disturbed passes are left out where there are
    others. plain: the token without the instrument over passes, where a trace has them; without it
    the file's own, which is a median and has no range. The terms of each pass must add up to its
    wall within ``limit`` (a share); otherwise "refused" says by how much, and the attribution is
    not used.
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
    token = found.value.get("plain_token_s")
    if plain is None and token:
        plain = figure([token * 1e3], "ms/token", files)
    return {
        "wall_ms": wall,
        "plain_ms": plain,
        "slowed": quotient(wall, plain, "ratio") if plain else None,
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


def removed(
    patches: list[str],
    found: Found | None,
    traced: dict[str, Any] | None,
    kernels: Found | None = None,
) -> Any:
    """What the other instruments give the terms that an intervention takes away, or None.

    found: scopes.json of the base arm. traced: kernels() of the base arm; kernels: its terms.json,
    whose passes give the share of GPU time its range. Beside what the removal saves, these shares
    are the three instruments' answers to one question.
    """
    terms = [term for patch in patches for term in REMOVES.get(patch, ())]
    if not terms or len(patches) != 1:
        return None
    shares = []
    if found is not None:
        for entry in quiet_passes(found):
            shares.append(sum(entry["terms_s"].get(term, 0.0) for term in terms) / entry["wall_s"])
    return {
        "terms": terms,
        "scopes_share": figure(shares, "share", [found.file]) if found and shares else None,
        "gpu_share": _gpu_share(terms, traced, kernels),
    }


def _gpu_share(
    terms: list[str], traced: dict[str, Any] | None, kernels: Found | None
) -> Figure | None:
    """The share of some terms together in each profiled pass; without passes, of the medians."""
    parts = [traced["terms"][term] for term in terms if term in traced["terms"]] if traced else []
    if not parts:
        return None
    passes = (kernels.value.get("terms") or {}) if kernels else {}
    lists = [passes[term]["ms"] for term in terms if term in passes]
    if lists:
        wholes = [sum(values) for values in zip(*(t["ms"] for t in passes.values()), strict=True)]
        sums = [sum(values) for values in zip(*lists, strict=True)]
        shares = [part / whole for part, whole in zip(sums, wholes, strict=True)]
        return figure(shares, "share", [kernels.file])
    return figure([sum(p["share"]["value"] for p in parts)], "share", parts[0]["share"]["files"])


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
                # What mx.compile fused has a name as long as its parts; the table keeps it.
                name = "Compiled" if primitive.startswith("Compiled") else primitive
                found[name] = found.get(name, 0) + count
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
