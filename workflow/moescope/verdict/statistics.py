"""Figures and the arithmetic behind them, in plain Python so that every host gets the same bytes.

A Figure is a number with its range and its source, as a dict:
{"value", "min", "max", "n", "unit", "files": [path in the repository], "runs": [run ids]}.
"""

import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Figure = dict[str, Any]

# Digits kept of a computed number: far more than a timer has, and no noise of the last bits.
DIGITS = 8


def rounded(number: float) -> float | int:
    """A number to DIGITS significant digits; integers stay as they are."""
    return number if isinstance(number, int) else float(f"{number:.{DIGITS}g}")


def figure(
    values: Iterable[float], unit: str, files: Sequence[str], runs: Sequence[str] = ()
) -> Figure:
    """The median of one or more values, with minimum, maximum and count.

    Raises ValueError without a value or without a file: a number without a source is no figure.
    """
    values = list(values)
    if not values or not files:
        raise ValueError(f"a figure needs values and files, got {values!r} and {files!r}")
    low, high = rounded(min(values)), rounded(max(values))
    # Integers stay whole while the mean of two is rounded: that must not carry it out of its range.
    return {
        "value": min(max(rounded(statistics.median(values)), low), high),
        "min": low,
        "max": high,
        "n": len(values),
        "unit": unit,
        "files": list(dict.fromkeys(files)),
        "runs": list(dict.fromkeys(runs)),
    }


def adopt(found: Any, unit: str, files: Sequence[str]) -> Figure | None:
    """A Figure of what a stage wrote: a number, a list of numbers, or {"value", "min", ...}."""
    if isinstance(found, dict):
        value = found["value"]
        low, high = found.get("min", value), found.get("max", value)
        figures = figure([value], found.get("unit", unit), files)
        return figures | {"min": rounded(low), "max": rounded(high), "n": found.get("n", 1)}
    if isinstance(found, list) and found:
        return figure(found, unit, files)
    if isinstance(found, int | float) and not isinstance(found, bool):
        return figure([found], unit, files)
    return None


def quotient(one: Figure, other: Figure, unit: str) -> Figure:
    """One figure / another, both above 0 and not paired: the range is that of all their pairs."""
    return _unpaired(one, other, unit, lambda a, b: a / b)


def less(one: Figure, other: Figure) -> Figure:
    """One figure - another of its unit, likewise."""
    return _unpaired(one, other, one["unit"], lambda a, b: a - b)


def _unpaired(one: Figure, other: Figure, unit: str, of: Callable[[float, float], float]) -> Figure:
    # Both fall with their second argument, so that the ends are those of opposite ends.
    files, runs = ([*one[key], *other[key]] for key in ("files", "runs"))
    found = figure([of(one["value"], other["value"])], unit, files, runs)
    ends = {"min": of(one["min"], other["max"]), "max": of(one["max"], other["min"])}
    n = min(one["n"], other["n"])
    return found | {end: rounded(value) for end, value in ends.items()} | {"n": n}


def is_figure(value: Any) -> bool:
    return isinstance(value, dict) and {"value", "min", "max", "n", "files"} <= value.keys()


def fit_line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """(slope, intercept) by least squares.

    Raises ValueError for fewer than two different x.
    """
    x_mean, y_mean = statistics.fmean(xs), statistics.fmean(ys)
    spread = sum((x - x_mean) ** 2 for x in xs)
    if not spread:
        raise ValueError("a line needs two different x")
    slope = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / spread
    return slope, y_mean - slope * x_mean


def monotone(values: Sequence[float]) -> bool:
    """Does each value exceed the one before it, or each fall below it?"""
    steps = [after - before for before, after in itertools.pairwise(values)]
    return bool(steps) and (all(step > 0 for step in steps) or all(step < 0 for step in steps))
