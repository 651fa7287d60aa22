"""GPU time by module: what is inside a trace's terms."""

from typing import Any

from .results import Found
from .statistics import Figure, figure

LEAST = 0.03  # of the busy time: smaller modules are one line together
LARGE = 0.15  # of the busy time: from here on it is told what the term "other" consists of
NAMED = 3  # modules of it, at most

NUMBERS = {
    "launches_per_token": ("launches", "launches/token"),
    "ms_per_token": ("ms", "ms/token"),
    "share": ("share", "share"),
}


def modules(table: Found, other: dict[str, Figure | None] | None) -> dict[str, Any]:
    """{"rows": modules of LEAST or more, the longest first, "rest": the others together or None,
    "other": {"share", "largest": rows} where that term has LARGE or more, or None}.

    table: modules.csv with at least one row (module, "-" for none; term; launches_per_token;
    ms_per_token; share of the busy time); a module that stands in two terms is two rows. other: the
    term's entry among the trace's terms.
    """
    files = [table.file]
    found = sorted(table.value, key=lambda row: -float(row["ms_per_token"]))
    rest = [row for row in found if float(row["share"]) < LEAST]
    return {
        "rows": [_row(row, files) for row in found if float(row["share"]) >= LEAST],
        "rest": {"modules": figure([len(rest)], "modules", files), **_sums(rest, files)}
        if rest
        else None,
        "other": _other([row for row in found if row["term"] == "other"], other, files),
    }


def _other(
    rows: list[dict[str, str]], term: dict[str, Figure | None] | None, files: list[str]
) -> dict[str, Any] | None:
    """Its largest modules: those of LEAST or more, or the largest alone."""
    if not rows or term is None or term["share"]["value"] < LARGE:
        return None
    large = [row for row in rows if float(row["share"]) >= LEAST][:NAMED]
    return {"share": term["share"], "largest": [_row(row, files) for row in large or rows[:1]]}


def _row(row: dict[str, str], files: list[str]) -> dict[str, Any]:
    return {"module": row["module"], "term": row["term"], **_sums([row], files)}


def _sums(rows: list[dict[str, str]], files: list[str]) -> dict[str, Figure]:
    return {
        name: figure([sum(float(row[key]) for row in rows)], unit, files)
        for key, (name, unit) in NUMBERS.items()
    }
