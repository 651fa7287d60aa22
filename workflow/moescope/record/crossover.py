"""The record's crossover: in a table, in sentences, and as crossover.csv."""

import csv
import io
from typing import Any

from .numbers import ABSENT, show
from .tables import Record, code, columns
from .writers import Table, plain

OF = {"wall": "the token's time", "gpu": "the GPU's time of the MoE block"}


def table(record: Record) -> Table:
    """A line for each arm and checkpoint: the ratio by rounds, and of the block by kernels."""
    found, rows = record["crossover"], []
    for arm, entry in found["arms"].items():
        for wall, gpu in zip(entry["wall"]["points"], entry["gpu"]["points"], strict=True):
            blocks = [gpu[key] for key in ("base_ms", "ms")]
            rows.append(
                [
                    code(arm),
                    code(wall["checkpoint"]),
                    show(wall["at"]),
                    show(wall["ratio"]),
                    _effect(wall),
                    " → ".join(show(one, spread=False) for one in blocks)
                    if all(blocks)
                    else ABSENT,
                    show(gpu["ratio"]),
                    _effect(gpu),
                ]
            )
    head = ["arm", "checkpoint", found["over"].replace("_", " ")]
    head += [f"decode ÷ {code(record['reference'])}", "effect", "GPU ms/token of the block"]
    head += ["its GPU time: base ÷ arm", "range"]
    made = columns(rows, head, 2)
    made.numbers -= {4, 7}
    return made


def _effect(point: dict[str, Any]) -> str:
    if point["why"]:
        return plain(point["why"])
    marks = [
        mark
        for mark, key in (("drifts", "drifts"), ("one forced pass each, no range", "forced"))
        if point[key]
    ]
    return point["effect"] + (f" ({', '.join(marks)})" if marks else "")


def sentences(record: Record) -> list[str]:
    """Where each arm's two series cross 1, or on which side they stay."""
    found = record["crossover"]
    if found["refused"]:
        return [f"No crossover is given: {plain(found['refused'])}."]
    return [
        f"{code(arm)}, by {OF[of]}: {_says(entry[of])}."
        for arm, entry in found["arms"].items()
        for of in OF
    ]


def _says(series: dict[str, Any]) -> str:
    known = [point for point in series["points"] if point["ratio"]]
    if len(known) < 2:
        return "not known, since fewer than two checkpoints have a ratio"
    weak = [code(point["checkpoint"]) for point in known if point["effect"] == "no effect"]
    weak_text = f"; no effect at {', '.join(weak)}" if weak else ""
    if not series["crossings"]:
        first, last = (show(known[i]["at"]) for i in (0, -1))
        side = {"never slower": "not slower", "never faster": "not faster"}
        word = side.get(series["side"], series["side"])
        return f"**none between {first} and {last}**: {word} at every one by the medians{weak_text}"
    parts = [
        f"**{place(one, known)}**, from there on {one['becomes']} (interpolated between "
        f"{' and '.join(code(name) for name in one['between'])})"
        for one in series["crossings"]
    ]
    return "; ".join(parts) + weak_text


def place(crossing: dict[str, Any], known: list[dict[str, Any]]) -> str:
    """A crossing with its range; an end that the series does not reach is said to be beyond it."""
    figure = crossing["at"]
    value, *ends = (
        show(figure | dict.fromkeys(("value", "min", "max"), figure[key]))
        for key in ("value", "min", "max")
    )
    if "below" in crossing["open"]:
        ends[0] = f"below {show(known[0]['at'])}"
    if "above" in crossing["open"]:
        ends[1] = f"above {show(known[-1]['at'])}"
    return f"{value} ({ends[0]} to {ends[1]})"


def csv_text(record: Record) -> str:
    """Lines of both series and of what is interpolated from them; times in ms per token.

    ratio is the time of the base ÷ the time of the arm; an empty field is not known.
    """
    found = record["crossover"]
    over = found["over"]
    head = ["arm", "base", "of", "kind", "checkpoint", over, f"{over}_min", f"{over}_max"]
    head += ["ratio", "ratio_min", "ratio_max", "n", "effect", "base_ms", "arm_ms", "why"]
    text = io.StringIO()
    rows = csv.DictWriter(text, head, lineterminator="\n")
    rows.writeheader()
    for arm, entry in found["arms"].items():
        for of in OF:
            always = {"arm": arm, "base": entry["base"], "of": of}
            for point in entry[of]["points"]:
                row = {"kind": "measured", over: point["at"]["value"]}
                row |= {key: point[key] for key in ("checkpoint", "effect", "why")}
                row |= {"base_ms": _value(point["base_ms"]), "arm_ms": _value(point["ms"])}
                if point["ratio"]:
                    row |= _range(point["ratio"], "ratio")
                rows.writerow(always | row)
            for one in entry[of]["crossings"]:
                row = {"kind": "interpolated", "ratio": 1, "effect": f"{one['becomes']} above"}
                row |= _range(one["at"], over)
                for end, key in (("below", f"{over}_min"), ("above", f"{over}_max")):
                    if end in one["open"]:
                        row[key] = None
                rows.writerow(always | row)
    return text.getvalue()


def _value(figure: dict[str, Any] | None) -> float | None:
    return figure and figure["value"]


def _range(figure: dict[str, Any], name: str) -> dict[str, Any]:
    ends = {f"{name}_{key}": figure[key] for key in ("min", "max")}
    return {name: figure["value"], "n": figure["n"], **ends}
