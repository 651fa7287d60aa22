"""Charts as SVG, drawn by vl-convert from Vega-Lite specifications.

Colours are CSS variables (templates/record.html.j2 sets them for light and dark), the font is one
that vl-convert carries, so that the bytes are the same on every host.
"""

import html
import re
from typing import Any

from .numbers import exponent
from .tables import TERM_NAMES

VERSION = "5.21"  # of Vega-Lite, among those that vl-convert carries
FONT = "Liberation Sans"
WIDTH = 720
LABELS = 110  # width of the arms' names, so that all checkpoints' scales begin at one line
ROLES = ("reference", "null", "candidate", "intervention")

Spec = dict[str, Any]


def draw(record: dict[str, Any]) -> dict[str, str]:
    """Name -> SVG of each chart that the record has data for."""
    specs = {
        "rates": rates(record),
        "terms": terms(record),
        "sweep": sweep(record),
        "roofline": roofline(record),
    }
    return {name: svg(name, *spec) for name, spec in specs.items() if spec}


def svg(name: str, spec: Spec, description: str) -> str:
    """One specification as an SVG element for a page: scalable, described, without ids."""
    import vl_convert

    text = vl_convert.vegalite_to_svg(
        {**spec, "background": None, "config": CONFIG}, vl_version=VERSION, allowed_base_urls=[]
    )
    opening = re.match(r"<svg[^>]*>", text)
    size = re.search(r'width="([\d.]+)" height="([\d.]+)" viewBox="([^"]+)"', opening.group())
    width, _, box = size.groups()
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" role="img" '
        f'class="chart" style="width:{width}px" aria-label="{html.escape(description)}">'
    )
    # Marks repeat what the label and the table beside the chart say; to a screen reader they are
    # hundreds of stops without a heading.
    body = re.sub(r' (aria-[a-z]+|role)="[^"]*"', "", text[opening.end() :])
    # Clip paths are numbered per chart and would clash within the page.
    return head + re.sub(r'(id="|url\(#)(?=[a-z]+\d)', rf"\g<1>{name}-", body)


CONFIG: Spec = {
    "font": FONT,
    "view": {"stroke": None},
    "axis": {
        "labelColor": "var(--ink-2)",
        "titleColor": "var(--ink-2)",
        "gridColor": "var(--grid)",
        "domainColor": "var(--rule)",
        "tickColor": "var(--rule)",
        "labelFont": FONT,
        "titleFont": FONT,
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "labelLimit": 240,
    },
    "legend": {
        "labelColor": "var(--ink)",
        "titleColor": "var(--ink-2)",
        "labelFont": FONT,
        "titleFont": FONT,
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "orient": "bottom",
        "columns": 6,
        "symbolType": "square",
    },
    "header": {
        "labelColor": "var(--ink)",
        "labelFont": FONT,
        "labelFontSize": 13,
        "labelFontWeight": "bold",
        "titleFont": FONT,
    },
    "text": {"font": FONT, "fontSize": 12, "color": "var(--ink)"},
}


def _measured(record: dict[str, Any], checkpoint: str) -> dict[str, Any]:
    """The checkpoint's arms that have a speed."""
    arms = record["results"][checkpoint]["arms"]
    return {name: arm for name, arm in arms.items() if arm["decode_rate"] and not arm["absent"]}


def rates(record: dict[str, Any]) -> tuple[Spec, str] | None:
    """Decode rates: a point for the median, a line from minimum to maximum, a row an arm."""
    blocks = []
    shown = [name for name in record["results"] if _measured(record, name)]
    for checkpoint in shown:
        arms = _measured(record, checkpoint)
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
        y = {"field": "arm", "type": "nominal", "sort": None, "title": None}
        y["axis"] = {"ticks": False, "domain": False, "labelColor": "var(--ink)"}
        y["axis"] |= {"minExtent": LABELS, "maxExtent": LABELS}
        colour = {
            "field": "role",
            "type": "nominal",
            "sort": None,
            "scale": {
                "domain": [*ROLES, "void"],
                "range": [f"var(--role-{role})" for role in (*ROLES, "void")],
            },
            "legend": {"title": None, "columns": 5},
        }
        x = {"type": "quantitative", "scale": {"zero": True}}
        title = "decode tokens/s" if checkpoint == shown[-1] else None
        axis = {"axis": {"title": title, "grid": True, "tickCount": 6}}
        blocks.append(
            {
                "title": {
                    "text": checkpoint,
                    "anchor": "start",
                    "font": FONT,
                    "fontSize": 13,
                    "color": "var(--ink)",
                },
                "width": WIDTH,
                "height": {"step": 20},
                "data": {"values": rows},
                "encoding": {"y": y, "color": colour},
                "layer": [
                    {
                        "mark": {"type": "rule", "strokeWidth": 3, "strokeCap": "round"},
                        "encoding": {
                            "x": {"field": "low", **x, **axis},
                            "x2": {"field": "high"},
                        },
                    },
                    {
                        "mark": {"type": "point", "filled": True, "size": 70, "opacity": 1},
                        "encoding": {"x": {"field": "value", **x, **axis}},
                    },
                ],
            }
        )
    if not blocks:
        return None
    spec = {"vconcat": blocks, "spacing": 22, "resolve": {"scale": {"x": "independent"}}}
    return spec, "Decode rates of every arm, by checkpoint, with their ranges over the rounds"


def terms(record: dict[str, Any]) -> tuple[Spec, str] | None:
    """A token's time by term: one bar an arm of a checkpoint, from the instrumented pass."""
    rows, used = [], set()
    for checkpoint, result in record["results"].items():
        for arm, entry in result["arms"].items():
            for part, unit in (("scopes", ""), ("kernels", "GPU")):
                found = record["attribution"][part][checkpoint].get(arm)
                if found is None or found["refused"] or entry["void"]:
                    continue
                label = " · ".join(filter(None, (checkpoint, arm, unit)))
                for order, (term, name) in enumerate(TERM_NAMES.items()):
                    if term in found["terms"]:
                        used.add(term)
                        share = found["terms"][term]["share"]["value"]
                        rows.append(
                            {
                                "bar": label,
                                "term": name,
                                "order": order,
                                "share": share,
                                "text": f"{share * 100:.0f}" if share >= 0.06 else "",
                            }
                        )
    if not rows:
        return None
    kept = [term for term in TERM_NAMES if term in used]
    colour = {
        "field": "term",
        "type": "nominal",
        "sort": None,
        "scale": {
            "domain": [TERM_NAMES[term] for term in kept],
            "range": [f"var(--term-{term.replace('_', '-')})" for term in kept],
        },
        "legend": {"title": None},
    }
    y = {"field": "bar", "type": "nominal", "sort": None, "title": None}
    y["axis"] = {"ticks": False, "domain": False, "labelColor": "var(--ink)"}
    x = {"field": "share", "type": "quantitative", "stack": True}
    bar = {
        "mark": {"type": "bar", "stroke": "var(--page)", "strokeWidth": 1},
        "encoding": {
            "x": {
                **x,
                "axis": {"title": "share of the pass (median)", "format": ".0%", "tickCount": 6},
                "scale": {"domainMax": 1, "nice": False},
            },
            "color": colour,
        },
    }
    label = {
        "mark": {"type": "text", "color": "var(--on-term)", "fontSize": 11},
        "encoding": {"x": {**x, "bandPosition": 0.5}, "text": {"field": "text"}},
    }
    spec = {
        "width": WIDTH - 60,
        "height": {"step": 28},
        "data": {"values": rows},
        "encoding": {"y": y, "order": {"field": "order", "type": "quantitative"}},
        "layer": [bar, label],
    }
    return spec, "Shares of a token's time by term, one bar for each checkpoint and arm"


def sweep(record: dict[str, Any]) -> tuple[Spec, str] | None:
    """Time per token against experts per token, with the fitted line's intercept at zero."""
    rows, lines = [], []
    for checkpoint, found in record["sweep"].items():
        if found is None:
            continue
        for k, point in found["points"].items():
            ms = point["ms"]
            rows.append(
                {"checkpoint": checkpoint, "k": int(k), "ms": ms["value"], "low": ms["min"],
                 "high": ms["max"]}
            )  # fmt: skip
        slope, fixed = found["expert_cost"]["value"], found["fixed_ms"]["value"]
        last = max(int(k) for k in found["points"])
        lines += [{"checkpoint": checkpoint, "k": k, "ms": fixed + slope * k} for k in (0, last)]
    if not rows:
        return None
    names = [name for name, found in record["sweep"].items() if found]
    most = max(row["k"] for row in rows)
    colour = {
        "field": "checkpoint",
        "type": "nominal",
        "sort": None,
        "scale": {"domain": names, "range": [f"var(--line-{i % 6})" for i in range(len(names))]},
        "legend": {"title": None, "columns": 3, "symbolType": "circle"},
    }
    x = {"field": "k", "type": "quantitative"}
    x["axis"] = {
        "title": "experts per token (top_k)",
        "values": list(range(0, most + 1)),
        "grid": False,
    }
    y = {"type": "quantitative", "axis": {"title": "ms per token", "tickCount": 6}}
    y["scale"] = {"zero": True}
    spec = {
        "width": WIDTH,
        "height": 260,
        "encoding": {"x": x, "color": colour},
        "layer": [
            {
                "data": {"values": lines},
                "mark": {"type": "line", "strokeDash": [4, 3], "strokeWidth": 1.5},
                "encoding": {"y": {"field": "ms", **y}},
            },
            {
                "data": {"values": rows},
                "mark": {"type": "rule", "strokeWidth": 2},
                "encoding": {"y": {"field": "low", **y}, "y2": {"field": "high"}},
            },
            {
                "data": {"values": rows},
                "mark": {"type": "point", "filled": True, "size": 60, "opacity": 1},
                "encoding": {"y": {"field": "ms", **y}},
            },
        ],
    }
    return spec, "Time per token against experts per token, with the line fitted to it"


def roofline(record: dict[str, Any]) -> tuple[Spec, str] | None:
    """Time per token against bytes read per token, both logarithmic: a rate is a diagonal."""
    rows = []
    for checkpoint, found in record["ceilings"].items():
        arms = record["results"][checkpoint]["arms"]
        for arm, ceiling in found["arms"].items():
            if arms[arm]["role"] == "null":
                continue
            ms = arms[arm]["token_ms"]
            rows.append(
                {
                    "checkpoint": checkpoint,
                    "arm": arm,
                    "bytes": ceiling["whole"]["bytes"]["value"] / 1e6,
                    "ms": ms["value"],
                    "low": ms["min"],
                    "high": ms["max"],
                }
            )
    if not rows:
        return None
    measured = next((c["bandwidth"] for c in record["ceilings"].values() if c["bandwidth"]), None)
    lines, area = _diagonals(rows, measured["value"] / 1e9 if measured else None)
    log = {"type": "log", "nice": False}
    x = {"field": "bytes", "type": "quantitative", "scale": {**log, "domain": area[0]}}
    x["axis"] = {"title": "MB read per token", "tickCount": 5, "format": "~g"}
    y = {"type": "quantitative", "scale": {**log, "domain": area[1]}}
    y["axis"] = {"title": "ms per token", "tickCount": 5, "format": "~g"}
    names = list(dict.fromkeys(row["checkpoint"] for row in rows))
    colour = {
        "field": "checkpoint",
        "type": "nominal",
        "sort": None,
        "scale": {"domain": names, "range": [f"var(--line-{i % 6})" for i in range(len(names))]},
        "legend": {"title": None, "columns": 3, "symbolType": "circle"},
    }
    layers: list[Spec] = []
    for kind, stroke in (("guide", "var(--rule)"), ("ceiling", "var(--bad)")):
        chosen = [line for line in lines if line["kind"] == kind]
        text = "var(--ink-2)" if kind == "guide" else stroke
        ends = [line for i, line in enumerate(chosen) if i % 2]
        layers += [
            {
                "data": {"values": chosen},
                "mark": {"type": "line", "strokeWidth": 1.5, "color": stroke},
                "encoding": {"y": {"field": "ms", **y}, "detail": {"field": "rate"}},
            },
            {
                "data": {"values": ends},
                "mark": {"type": "text", "align": "left", "dx": 4, "fontSize": 11, "color": text},
                "encoding": {"y": {"field": "ms", **y}, "text": {"field": "rate"}},
            },
        ]
    layers += [
        {
            "data": {"values": rows},
            "mark": {"type": "rule", "strokeWidth": 2},
            "encoding": {"y": {"field": "low", **y}, "y2": {"field": "high"}, "color": colour},
        },
        {
            "data": {"values": rows},
            "mark": {"type": "point", "filled": True, "size": 70, "opacity": 1},
            "encoding": {"y": {"field": "ms", **y}, "color": colour},
        },
        {
            "data": {"values": rows},
            "mark": {"type": "text", "align": "left", "dx": 8, "fontSize": 11},
            "encoding": {"y": {"field": "ms", **y}, "text": {"field": "arm"}},
        },
    ]
    spec = {"width": WIDTH - 120, "height": 300, "encoding": {"x": x}, "layer": layers}
    return spec, "Time per token against bytes read per token; diagonals are constant rates"


def _diagonals(
    rows: list[dict[str, Any]], ceiling: float | None
) -> tuple[list[dict[str, Any]], tuple[list[float], list[float]]]:
    """Lines of constant rate (GB/s, which is MB per ms), two ends each, and the area drawn.

    Guides stand at powers of ten around the rates achieved; one that would lie on the measured
    ceiling is left out.
    """
    rates = [row["bytes"] / row["ms"] for row in rows]
    left, right = min(r["bytes"] for r in rows) / 1.6, max(r["bytes"] for r in rows) * 1.6
    power = 10.0 ** exponent(min(rates))
    found = []
    while power <= max(rates) * 10:
        if ceiling is None or not 0.5 < power / ceiling < 2:
            found.append((f"{power:g} GB/s", power, "guide"))
        power *= 10
    if ceiling is not None:
        found.append((f"ceiling {ceiling:.3g} GB/s", ceiling, "ceiling"))
    fastest = max(rate for _, rate, _ in found)
    bottom = min([left / fastest, *(row["low"] for row in rows)]) / 1.2
    top = max(row["high"] for row in rows) * 2
    lines = []
    for name, rate, kind in found:
        start, end = max(left, bottom * rate), min(right, top * rate)
        if start < end:
            lines += [
                {"rate": name, "kind": kind, "bytes": size, "ms": size / rate}
                for size in (start, end)
            ]
    return lines, ([left, right], [bottom, top])
