"""How numbers are printed: one helper for all of the record."""

from typing import Any

from ..errors import UserError

# unit of a Figure -> (factor, text after the number). A unit that stands in a table's head has no
# text; one that is not here is an error, since it would be printed as a bare number.
UNITS: dict[str, tuple[float, str]] = {
    "share": (100.0, " %"),
    "ratio": (1.0, ""),
    "s": (1.0, " s"),
    "MHz": (1.0, " MHz"),
    "W": (1.0, " W"),
    **dict.fromkeys(
        (
            "calls/token",
            "count",
            "experiments",
            "files",
            "launches/layer",
            "launches/token",
            "logits",
            "modules",
            "ms/expert",
            "ms/token",
            "operations/token",
            "paired rounds",
            "runs",
            "tensors",
            "tokens",
            "tokens/s",
        ),
        (1.0, ""),
    ),
}
SIZES = {"bytes": "B", "bytes/token": "B", "bytes/s": "B/s"}
COUNTS = ("operations/token", "launches/token", "launches/layer", "calls/token")
PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
ABSENT = "–"


def exponent(number: float) -> int:
    """The power of ten of a number's first digit; 0 for 0."""
    return int(f"{number:e}".partition("e")[2])


def decimals(value: float, low: float, high: float) -> int:
    """Decimals that show three digits of the value and one of its range, at most five digits."""
    largest = max(abs(value), abs(low), abs(high))
    top = exponent(largest)
    wanted = 2 - top
    if high > low:
        wanted = max(wanted, -exponent(high - low))
    return max(0, min(wanted, 4 - top, 9))


def show(figure: dict[str, Any] | None, spread: bool = True) -> str:
    """A Figure as "12.34 (12.31 to 12.40)"; without ``spread``, or without one, the median.

    A missing Figure is a dash. Shares become per cent; bytes and bytes/s get a decimal prefix.
    Raises UserError for a unit that is not known.
    """
    if figure is None:
        return ABSENT
    unit = figure["unit"]
    values = [figure["value"], figure["min"], figure["max"]]
    if unit in SIZES:
        factor, prefix = _prefix(max(abs(value) for value in values))
        text = f" {prefix}{SIZES[unit]}"
    elif unit in UNITS:
        factor, text = UNITS[unit]
    else:
        raise UserError(
            f"the unit {unit!r} of a figure of {', '.join(figure['files'])} is not known"
        )
    scaled = [value * factor for value in values]
    whole = all(value == int(value) for value in values)
    if whole and (unit in COUNTS or (factor == 1 and all(isinstance(v, int) for v in values))):
        places = 0
    else:
        places = decimals(*(scaled if spread else scaled[:1] * 3))
        if unit == "share":
            places = min(places, 1 if max(scaled) >= 0.995 else 2)
        if unit in SIZES and not prefix:
            places = 0
    if unit == "ratio":
        places = 3
    value, low, high = (_fixed(number, places) for number in scaled)
    if not spread or low == high:
        return f"{value}{text}"
    return f"{value}{text} ({low} to {high})"


def _prefix(largest: float) -> tuple[float, str]:
    for size, letter in PREFIXES:
        if largest >= size:
            return 1 / size, letter
    return 1.0, ""


def _fixed(number: float, places: int) -> str:
    text = f"{number:.{places}f}"
    return text.removeprefix("-") if float(text) == 0 else text


# Quantities that are printed in per cent.
SHARES = ("share", "lead", "saved", "fixed_share", "gpu_share", "gpu_lead", "busy", "gain")
SHARES += ("ceiling_share", "copy_share")


def bound(quantity: str, number: float) -> str:
    """A claim's bound in the unit in which its quantity is printed."""
    percent = quantity.partition(".")[0] in SHARES
    return f"{number * 100:g} %" if percent else f"{number:g}"
