"""Charts as SVG, drawn by vl-convert from Vega-Lite specifications.

The bytes must be the same on every host, whatever fonts it has. So nothing is laid out by the
width of a text: sizes, margins and axes' extents are given, legends are HTML. Colours are CSS
variables, which templates/record.html.j2 sets for light and dark.
"""

import html
import re
from dataclasses import dataclass, field
from typing import Any

from ..verdict.path import FORCED
from .numbers import exponent
from .tables import TERM_NAMES

VERSION = "5.21"  # of Vega-Lite, among those that vl-convert carries
FONT = "Liberation Sans, Arial, Helvetica, sans-serif"
LETTER = 6.4  # about the width of a letter at 12 px, generously
ROLES = ("reference", "null", "candidate", "intervention", "void")
RIGHT, TOP, BOTTOM = 24, 8, 44  # margins, in px

Spec = dict[str, Any]


@dataclass
class Chart:
    """Drawings that belong together, each with a title or none, and what their colours mean."""

    drawings: list[tuple[str, str]]
    legend: list[tuple[str, str]] = field(default_factory=list)  # (CSS variable, label)


def draw(record: dict[str, Any]) -> dict[str, Chart]:
    """Name -> chart, of those that the record has data for."""
    charts = {
        "rates": rates(record),
        "terms": terms(record),
        "sweep": sweep(record),
        "crossover": crossover(record),
        "timeline": timeline(record),
        "roofline": roofline(record),
    }
    return {name: chart for name, chart in charts.items() if chart}


def svg(spec: Spec, description: str, left: int, right: int = RIGHT) -> str:
    """One specification as an SVG element for a page: scalable, described, without ids.

    spec: one view with width and height; margins come from here.
    """
    import vl_convert

    size = {"autosize": "none", "padding": 0, "background": None}
    width, height = spec["width"] + left + right, spec["height"] + TOP + BOTTOM
    text = vl_convert.vegalite_to_svg(
        {**spec, **size, "config": CONFIG}, vl_version=VERSION, allowed_base_urls=[]
    )
    opening = re.match(r"<svg[^>]*>", text)
    # Marks repeat what the label and the table beside the chart say; to a screen reader they are
    # hundreds of stops without a heading.
    body = re.sub(r' (aria-[a-z]+|role)="[^"]*"', "", text[opening.end() :])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{-left} {-TOP} {width} {height}" '
        f'role="img" class="chart" style="width:{width}px" '
        f'aria-label="{html.escape(description)}">{body}'
    )


def _axis(**more: Any) -> Spec:
    """An axis whose labels and title stand where they are told to."""
    return {"labelOverlap": False, "labelFlush": False, "labelLimit": 0, **more}


def _names(left: int) -> Spec:
    """A vertical axis of names."""
    extent = {"minExtent": left - 8, "maxExtent": left - 8}
    return _axis(ticks=False, domain=False, labelColor="var(--ink)", title=None, **extent)


BELOW = {"minExtent": 18, "maxExtent": 18, "titlePadding": 6}
BESIDE = {"minExtent": 34, "maxExtent": 34, "titlePadding": 6}

CONFIG: Spec = {
    "font": FONT,
    "view": {"stroke": None, "clip": False},
    "axis": {
        "labelColor": "var(--ink-2)",
        "titleColor": "var(--ink-2)",
        "gridColor": "var(--grid)",
        "domainColor": "var(--rule)",
        "tickColor": "var(--rule)",
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
    },
    "text": {"fontSize": 12, "color": "var(--ink)"},
}


def _margin(labels: list[str]) -> int:
    return 14 + int(LETTER * max(len(label) for label in labels))


def _colours(names: list[str], variables: list[str], name: str) -> Spec:
    scale = {"domain": names, "range": [f"var({variable})" for variable in variables]}
    return {"field": name, "type": "nominal", "sort": None, "scale": scale, "legend": None}


def _lines(names: list[str]) -> list[str]:
    return [f"--line-{i % 6}" for i in range(len(names))]


def rates(record: dict[str, Any]) -> Chart | None:
    """Decode rates: a point for the median, a line from minimum to maximum, a row an arm."""
    shown = {}
    for checkpoint, result in record["results"].items():
        arms = {
            name: arm
            for name, arm in result["arms"].items()
            if arm["decode_rate"] and not arm["absent"]
        }
        if arms:
            shown[checkpoint] = arms
    if not shown:
        return None
    left = _margin([name for arms in shown.values() for name in arms])
    drawings, used = [], set()
    for checkpoint, arms in shown.items():
        rows = [
            {
                "arm": name,
                "role": "void" if arm["void"] else arm["role"],
                "value": arm["decode_rate"]["value"],
                "low": arm["decode_rate"]["min"],
                "high": arm["decode_rate"]["max"],
            }
            for name, arm in arms.items()
        ]
        used |= {row["role"] for row in rows}
        scale = {"zero": True, "nice": False}
        scale["domain"] = [0, max(row["high"] for row in rows) * 1.05]
        x = {"type": "quantitative", "scale": scale}
        x["axis"] = _axis(title="decode tokens/s", tickCount=6, **BELOW)
        roles = [f"--role-{role}" for role in ROLES]
        spec = {
            "width": 600,
            "height": 20 * len(rows),
            "data": {"values": rows},
            "encoding": {
                "y": {"field": "arm", "type": "nominal", "sort": None, "axis": _names(left)},
                "color": _colours(list(ROLES), roles, "role"),
            },
            "layer": [
                {
                    "mark": {"type": "rule", "strokeWidth": 3, "strokeCap": "round"},
                    "encoding": {"x": {"field": "low", **x}, "x2": {"field": "high"}},
                },
                {
                    "mark": {"type": "point", "filled": True, "size": 70, "opacity": 1},
                    "encoding": {"x": {"field": "value", **x}},
                },
            ],
        }
        text = f"Decode rates of the arms on {checkpoint}, with their ranges over the rounds"
        drawings.append((checkpoint, svg(spec, text, left)))
    return Chart(drawings, [(f"--role-{role}", role) for role in ROLES if role in used])


def terms(record: dict[str, Any]) -> Chart | None:
    """Shares of a token's time by term: one bar an arm, from its scopes and from its kernels."""
    rows, used = [], set()
    for checkpoint, result in record["results"].items():
        for arm, entry in result["arms"].items():
            for part, unit in (("scopes", ""), ("kernels", "GPU")):
                found = record["attribution"][part][checkpoint].get(arm)
                if found is None or found["refused"] or entry["void"]:
                    continue
                if unit and found["method"] == FORCED:
                    unit = "GPU, forced pass"
                label = " · ".join(filter(None, (checkpoint, arm, unit)))
                for order, (term, name) in enumerate(TERM_NAMES.items()):
                    if term in found["terms"]:
                        used.add(term)
                        share = found["terms"][term]["share"]["value"]
                        text = f"{share * 100:.0f}" if share >= 0.06 else ""
                        rows.append(
                            {
                                "bar": label,
                                "term": name,
                                "order": order,
                                "share": share,
                                "text": text,
                            }
                        )
    if not rows:
        return None
    kept = [term for term in TERM_NAMES if term in used]
    variables = [f"--term-{term.replace('_', '-')}" for term in kept]
    labels = list(dict.fromkeys(row["bar"] for row in rows))
    left = _margin(labels)
    x = {"field": "share", "type": "quantitative", "stack": True}
    scale = {"domain": [0, 1], "nice": False}
    axis = _axis(title="share of the pass (median)", format=".0%", tickCount=6, **BELOW)
    spec = {
        "width": 640,
        "height": 28 * len(labels),
        "data": {"values": rows},
        "encoding": {
            "y": {"field": "bar", "type": "nominal", "sort": None, "axis": _names(left)},
            "order": {"field": "order", "type": "quantitative"},
        },
        "layer": [
            {
                "mark": {"type": "bar", "stroke": "var(--page)", "strokeWidth": 1},
                "encoding": {
                    "x": {**x, "axis": axis, "scale": scale},
                    "color": _colours([TERM_NAMES[term] for term in kept], variables, "term"),
                },
            },
            {
                "mark": {"type": "text", "color": "var(--on-term)", "fontSize": 11},
                "encoding": {"x": {**x, "bandPosition": 0.5}, "text": {"field": "text"}},
            },
        ],
    }
    text = "Shares of a token's time by term, one bar for each checkpoint and arm"
    legend = [(variable, TERM_NAMES[term]) for variable, term in zip(variables, kept, strict=True)]
    return Chart([("", svg(spec, text, left))], legend)


def timeline(record: dict[str, Any]) -> Chart | None:
    """One decoded token on the GPU of each traced arm: when which term ran."""
    drawings, used = [], set()
    for checkpoint, arms in record["attribution"]["kernels"].items():
        for arm, found in arms.items():
            if found["timeline"] is None or record["results"][checkpoint]["arms"][arm]["void"]:
                continue
            rows = []
            for span in found["timeline"]["spans"]:
                start, end, term, launches = span.split(" ")
                used.add(term)
                rows.append(
                    {
                        "start": float(start) / 1e3,
                        "end": float(end) / 1e3,
                        "term": TERM_NAMES.get(term, term),
                        "launches": int(launches),
                    }
                )
            names = list(TERM_NAMES.values())
            variables = [f"--term-{term.replace('_', '-')}" for term in TERM_NAMES]
            scale = {"domain": [0, max(row["end"] for row in rows)], "nice": False}
            axis = _axis(title="ms from the first kernel", tickCount=8, **BELOW)
            spec = {
                "width": 900,
                "height": 36,
                "data": {"values": rows},
                "mark": {"type": "bar"},
                "encoding": {
                    "x": {"field": "start", "type": "quantitative", "axis": axis, "scale": scale},
                    "x2": {"field": "end"},
                    "color": _colours(names, variables, "term"),
                },
            }
            text = f"The terms of one decoded token of {arm} on {checkpoint}, in time"
            drawings.append((f"{checkpoint} · {arm}", svg(spec, text, 16)))
    if not drawings:
        return None
    legend = [
        (f"--term-{term.replace('_', '-')}", name)
        for term, name in TERM_NAMES.items()
        if term in used
    ]
    return Chart(drawings, legend)


def sweep(record: dict[str, Any]) -> Chart | None:
    """Time per token against experts per token, with the fitted line's intercept at zero."""
    rows, lines = [], []
    for checkpoint, found in record["sweep"].items():
        if found is None:
            continue
        ks = [int(k) for k in found["points"]]
        for k, point in zip(ks, found["points"].values(), strict=True):
            ms = {name: point["ms"][name] for name in ("value", "min", "max")}
            rows.append({"checkpoint": checkpoint, "k": k, **ms})
        slope, fixed = found["expert_cost"]["value"], found["fixed_ms"]["value"]
        lines += [
            {"checkpoint": checkpoint, "k": k, "value": fixed + slope * k} for k in (0, max(ks))
        ]
    if not rows:
        return None
    names = [name for name, found in record["sweep"].items() if found]
    most = max(row["k"] for row in rows)
    x = {"field": "k", "type": "quantitative"}
    ticks = list(range(0, most + 1, 1 + most // 16))
    x["axis"] = _axis(title="experts per token (top_k)", values=ticks, grid=False, **BELOW)
    y = {"type": "quantitative", "scale": {"zero": True}}
    y["axis"] = _axis(title="ms per token", tickCount=6, **BESIDE)
    spec = {
        "width": 640,
        "height": 260,
        "encoding": {"x": x, "color": _colours(names, _lines(names), "checkpoint")},
        "layer": [
            {
                "data": {"values": lines},
                "mark": {"type": "line", "strokeDash": [4, 3], "strokeWidth": 1.5},
                "encoding": {"y": {"field": "value", **y}},
            },
            {
                "data": {"values": rows},
                "mark": {"type": "rule", "strokeWidth": 2},
                "encoding": {"y": {"field": "min", **y}, "y2": {"field": "max"}},
            },
            {
                "data": {"values": rows},
                "mark": {"type": "point", "filled": True, "size": 60, "opacity": 1},
                "encoding": {"y": {"field": "value", **y}},
            },
        ],
    }
    text = "Time per token against experts per token, with the line fitted to it"
    legend = list(zip(_lines(names), names, strict=True))
    return Chart([("", svg(spec, text, 64))], legend)


def crossover(record: dict[str, Any]) -> Chart | None:
    """Ratios over the property in which checkpoints differ; both axes logarithmic, so that what is
    interpolated lies on the lines."""
    if record["crossover"] is None:
        return None
    rows = []
    for arm, entry in record["crossover"]["arms"].items():
        for of, what in (("wall", "token's time"), ("gpu", "GPU's time of the block")):
            rows += [
                {
                    "series": f"{arm}: {what}",
                    "x": point["at"]["value"],
                    **{key: point["ratio"][key] for key in ("value", "min", "max")},
                }
                for point in entry[of]["points"]
                if point["ratio"]
            ]
    if not rows:
        return None
    names = list(dict.fromkeys(row["series"] for row in rows))
    places = sorted({row["x"] for row in rows})
    low, high = min(1, *(row["min"] for row in rows)), max(1, *(row["max"] for row in rows))
    left, right = places[0] / 1.15, places[-1] * 1.15
    bottom, top = low / 1.05, high * 1.05
    x = {"type": "quantitative", "scale": {"type": "log", "nice": False, "domain": [left, right]}}
    title = record["crossover"]["over"].replace("_", " ")
    x["axis"] = _axis(title=title, values=places, format="d", grid=False, **BELOW)
    y = {"type": "quantitative", "scale": {"type": "log", "nice": False, "domain": [bottom, top]}}
    y["axis"] = _axis(title="base ÷ arm", values=_ratios(bottom, top), format="~g", **BESIDE)
    over = {"field": "x", **x}
    colour = _colours(names, _lines(names), "series")
    spec = {
        "width": 640,
        "height": 260,
        "layer": [
            {
                "data": {"values": [{"x": left, "value": 1}, {"x": right, "value": 1}]},
                "mark": {"type": "line", "strokeWidth": 1.5, "color": "var(--ink-2)"},
                "encoding": {"x": over, "y": {"field": "value", **y}},
            },
            {
                "data": {"values": rows},
                "mark": {"type": "line", "strokeDash": [4, 3], "strokeWidth": 1.5},
                "encoding": {"x": over, "y": {"field": "value", **y}, "color": colour},
            },
            {
                "data": {"values": rows},
                "mark": {"type": "rule", "strokeWidth": 2},
                "encoding": {
                    "x": over,
                    "y": {"field": "min", **y},
                    "y2": {"field": "max"},
                    "color": colour,
                },
            },
            {
                "data": {"values": rows},
                "mark": {"type": "point", "filled": True, "size": 60, "opacity": 1},
                "encoding": {"x": over, "y": {"field": "value", **y}, "color": colour},
            },
        ],
    }
    text = f"Ratio of times, base to arm, over the {title}; above 1 the arm is the faster one"
    return Chart([("", svg(spec, text, 64))], list(zip(_lines(names), names, strict=True)))


def _ratios(low: float, high: float) -> list[float]:
    """Round ratios between two numbers, closer together where these are close to each other."""
    step = 0.1 if high / low < 2 else 0.25 if high / low < 4 else 0.5
    return [n * step for n in range(1, 1 + int(high / step)) if n * step >= low]


def roofline(record: dict[str, Any]) -> Chart | None:
    """Time per token against bytes read per token, both logarithmic: a rate is a diagonal."""
    rows = []
    for checkpoint, found in record["ceilings"].items():
        arms = record["results"][checkpoint]["arms"]
        for arm, ceiling in found["arms"].items():
            if arms[arm]["role"] != "null":
                ms = {name: arms[arm]["token_ms"][name] for name in ("value", "min", "max")}
                size = ceiling["whole"]["bytes"]["value"] / 1e6
                rows.append({"checkpoint": checkpoint, "arm": arm, "bytes": size, **ms})
    if not rows:
        return None
    known = [c["bandwidths"]["read"] for c in record["ceilings"].values() if c["bandwidths"]]
    measured = known[0] if known else None
    lines, area = _diagonals(rows, measured["value"] / 1e9 if measured else None)
    x = {"field": "bytes", "type": "quantitative"}
    x["scale"] = {"type": "log", "nice": False, "domain": area[0]}
    x["axis"] = _axis(title="MB read per token", values=_decades(*area[0]), format="~g", **BELOW)
    y = {"type": "quantitative", "scale": {"type": "log", "nice": False, "domain": area[1]}}
    y["axis"] = _axis(title="ms per token", values=_decades(*area[1]), format="~g", **BESIDE)
    names = list(dict.fromkeys(row["checkpoint"] for row in rows))
    colour = _colours(names, _lines(names), "checkpoint")
    layers: list[Spec] = []
    for kind, stroke in (("guide", "var(--rule)"), ("ceiling", "var(--bad)")):
        chosen = [line for line in lines if line["kind"] == kind]
        ink = "var(--ink-2)" if kind == "guide" else stroke
        layers += [
            {
                "data": {"values": chosen},
                "mark": {"type": "line", "strokeWidth": 1.5, "color": stroke},
                "encoding": {"y": {"field": "ms", **y}, "detail": {"field": "rate"}},
            },
            {
                "data": {"values": chosen[1::2]},
                "mark": {"type": "text", "align": "left", "dx": 4, "fontSize": 11, "color": ink},
                "encoding": {"y": {"field": "ms", **y}, "text": {"field": "rate"}},
            },
        ]
    layers += [
        {
            "data": {"values": rows},
            "mark": {"type": "rule", "strokeWidth": 2},
            "encoding": {"y": {"field": "min", **y}, "y2": {"field": "max"}, "color": colour},
        },
        {
            "data": {"values": rows},
            "mark": {"type": "point", "filled": True, "size": 70, "opacity": 1},
            "encoding": {"y": {"field": "value", **y}, "color": colour},
        },
        {
            "data": {"values": rows},
            "mark": {"type": "text", "align": "left", "dx": 8, "fontSize": 11},
            "encoding": {"y": {"field": "value", **y}, "text": {"field": "arm"}},
        },
    ]
    spec = {"width": 560, "height": 300, "encoding": {"x": x}, "layer": layers}
    text = "Time per token against bytes read per token; diagonals are constant rates"
    legend = list(zip(_lines(names), names, strict=True))
    return Chart([("", svg(spec, text, 64, 120))], legend)


def _decades(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten between two numbers."""
    found = [
        digit * 10.0**power
        for power in range(exponent(low) - 1, exponent(high) + 1)
        for digit in (1, 2, 5)
    ]
    return [value for value in found if low <= value <= high]


def _diagonals(
    rows: list[dict[str, Any]], ceiling: float | None
) -> tuple[list[dict[str, Any]], tuple[list[float], list[float]]]:
    """Lines of constant rate (GB/s, which is MB per ms), two ends each, and the area drawn.

    Guides stand at powers of ten around the rates achieved; one that would lie on the measured
    ceiling is left out.
    """
    rates = [row["bytes"] / row["value"] for row in rows]
    left, right = min(r["bytes"] for r in rows) / 1.6, max(r["bytes"] for r in rows) * 1.6
    power = exponent(min(rates))
    found = []
    while 10.0**power <= max(rates) * 10:
        if ceiling is None or not 0.5 < 10.0**power / ceiling < 2:
            found.append((f"{10.0**power:g} GB/s", 10.0**power, "guide"))
        power += 1
    if ceiling is not None:
        found.append((f"ceiling {ceiling:.3g} GB/s", ceiling, "ceiling"))
    fastest = max(rate for _, rate, _ in found)
    bottom = min([left / fastest, *(row["min"] for row in rows)]) / 1.2
    top = max(row["max"] for row in rows) * 2
    lines = []
    for name, rate, kind in found:
        start, end = max(left, bottom * rate), min(right, top * rate)
        if start < end:
            lines += [
                {"rate": name, "kind": kind, "bytes": size, "ms": size / rate}
                for size in (start, end)
            ]
    return lines, ([left, right], [bottom, top])
