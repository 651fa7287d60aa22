"""Where one arm stops being the faster one: its ratio over a property in which checkpoints differ.

Between two neighbouring checkpoints the ratio is taken to be a straight line on logarithmic axes,
so that the crossing is the same whichever way the ratio is written. Two series stand beside each
other, since they may cross at different places: the token's time by rounds, and the GPU's time of
the MoE block by kernel traces.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from .blocks import alike
from .results import Results
from .statistics import Figure, figure, quotient

# What must be the same on every checkpoint of a series, but for the property it goes over.
FACTS = ("layers", "moe_layers", "experts", "top_k", "shared_experts", "hidden", "expert_width")
FACTS += ("shared_width", "vocab", "attention")
ENTRY = ("model_type", "recipe")

Point = dict[str, Any]


def crossover(
    asked: dict[str, Any] | None, analysis: dict[str, Any], results: Results
) -> dict[str, Any] | None:
    """The study's ``crossover``, or None if it asks for none.

    asked: {"over", "arms", "checkpoints"}; without arms every candidate, without checkpoints every
    MoE subject. Returns {"over", "refused", "arms": {name: {"base", "wall", "gpu"}}}; wall and gpu
    are series of ``points``, ``crossings`` and ``side`` (see _series). ``refused`` says why the
    checkpoints make no series: then nothing is interpolated.
    """
    if asked is None:
        return None
    over, entries = asked["over"], analysis["checkpoints"]
    names = asked.get("checkpoints") or [
        name for name, entry in entries.items() if entry["role"] == "subject" and not entry["dense"]
    ]
    facts, at = {}, {}
    for name in names:
        found = results.json("inspect", name, "architecture.json", "moescope/architecture/1")
        if found is not None and found.value.get(over):
            facts[name] = found.value
            at[name] = figure([found.value[over]], "count", [found.file])
    refused = _refused(over, names, facts, entries)
    order = sorted(at, key=lambda name: (at[name]["value"], name))
    arms = asked.get("arms") or [
        arm
        for arm in next(iter(entries.values()))["arms"]
        if any(entry["arms"][arm]["role"] == "candidate" for entry in entries.values())
    ]
    base = analysis["reference"]
    found = {}
    for arm in arms:
        found[arm] = {"base": base}
        for of, read in (("wall", _wall), ("gpu", _gpu)):
            points = [{"checkpoint": name, "at": at[name]} for name in order]
            for point in points:
                point |= read(entries[point["checkpoint"]]["arms"], arm, base)
            found[arm][of] = _series(points, interpolate=not refused)
    return {"over": over, "refused": refused, "arms": found}


def _refused(
    over: str, names: list[str], facts: dict[str, Any], entries: dict[str, Any]
) -> str | None:
    """Why these checkpoints do not differ in one property alone, or None."""
    word = over.replace("_", " ")
    without = [name for name in names if name not in facts]
    if without:
        return f"{', '.join(without)} has no {word} in its inspection"
    values = [facts[name][over] for name in names]
    for name in names:
        if values.count(facts[name][over]) > 1:
            return f"more than one checkpoint has the {word} {facts[name][over]}"
    differs = [
        fact
        for fact in FACTS
        if fact != over
        and any(facts[name].get(fact) != facts[names[0]].get(fact) for name in names)
    ]
    differs += [
        key
        for key in ENTRY
        if any(entries[name].get(key) != entries[names[0]].get(key) for name in names)
    ]
    if differs:
        return f"they differ in {', '.join(differs).replace('_', ' ')} too"
    return None


def _wall(arms: dict[str, Any], arm: str, base: str) -> Point:
    """Decode rate of the arm / of its base by rounds, and both tokens."""
    own, against = arms[arm], arms[arm]["against"]
    found = {"ratio": None, "effect": None, "why": None, "forced": False, "drifts": False}
    found |= {"base_ms": arms[base]["token_ms"], "ms": own["token_ms"]}
    if not against or not against["decode"]:
        return found | {"why": _unusable(arms, arm, base) or "no paired rounds"}
    decision, ratio = against["decode_decision"], against["decode"]
    effect = decision["effect"]
    if effect == "effect":
        effect = "faster" if ratio["min"] > 1 else "slower"
    return found | {"ratio": ratio, "effect": effect, "drifts": against["drifts"]}


def _gpu(arms: dict[str, Any], arm: str, base: str) -> Point:
    """GPU time of the MoE block: of the base / of the arm, by the same instrument. Two traces are
    not paired, so the range goes from the least to the largest that their passes allow."""
    found = {"ratio": None, "effect": None, "why": None, "forced": False, "drifts": False}
    found |= {"base_ms": None, "ms": None}
    why = _unusable(arms, arm, base)
    traces = {name: arms[name]["kernels"] for name in (base, arm)}
    for name, traced in traces.items():
        if why is None and traced is None:
            why = f"{name} has no kernel trace"
        if why is None and traced["refused"]:
            why = f"attribution of {name} refused: {traced['refused']}"
    if why is not None:
        return found | {"why": why}
    *pair, forced = alike(*traces.values())
    for name, block in zip(traces, pair, strict=True):
        if why is None and not (block and block["ms"]["min"] > 0):
            why = f"the trace of {name} shows no MoE block"
            if forced:
                why = f"{name} has no forced pass that shows a MoE block"
    if why is not None:
        return found | {"why": why}
    blocks = {"base_ms": pair[0]["ms"], "ms": pair[1]["ms"], "forced": forced}
    ratio = quotient(blocks["base_ms"], blocks["ms"], "ratio")
    effect = "faster" if ratio["min"] > 1 else "slower" if ratio["max"] < 1 else "no effect"
    return found | blocks | {"ratio": ratio, "effect": effect}


def _unusable(arms: dict[str, Any], arm: str, base: str) -> str | None:
    for name in (arm, base):
        if arms[name]["absent"]:
            return f"{name}: {arms[name]['absent']}"
        if arms[name]["void"]:
            return f"{name} is void: {arms[name]['void']}"
    return None


def _series(points: list[Point], interpolate: bool) -> dict[str, Any]:
    """Points in the property's order, and where their ratio crosses 1.

    Returns {"points", "crossings": [{"at": Figure, "becomes": "faster" or "slower", "between": two
    checkpoints, "open": which ends of its range are the series' own, "below" and "above"}],
    "side": what the medians say where nothing crosses, None with fewer than two points}.
    """
    known = [point for point in points if point["ratio"]]
    found: dict[str, Any] = {"points": points, "crossings": [], "side": None}
    if not interpolate or len(known) < 2:
        return found
    xs = [point["at"]["value"] for point in known]
    low, middle, high = (
        [point["ratio"][key] for point in known] for key in ("min", "value", "max")
    )
    figures = [one for point in known for one in (point["at"], point["ratio"])]
    files = [name for one in figures for name in one["files"]]
    runs = [run for one in figures for run in one["runs"]]
    for x, way in crossings(xs, middle):
        left, right = zone(x, xs, low, high)
        ends = [xs[0] if left is None else left, x, xs[-1] if right is None else right]
        at: Figure = figure(ends, known[0]["at"]["unit"], files, runs) | {"n": len(known)}
        before = max(i for i in range(len(xs) - 1) if xs[i] <= x)
        found["crossings"].append(
            {
                "at": at,
                "becomes": "faster" if way > 0 else "slower",
                "between": [known[before]["checkpoint"], known[before + 1]["checkpoint"]],
                "open": [e for e, end in (("below", left), ("above", right)) if end is None],
            }
        )
    if not found["crossings"]:
        found["side"] = _side(middle)
    return found


def _side(ratios: Sequence[float]) -> str:
    """What ratios that do not cross 1 have in common."""
    for word, holds in (
        ("faster", all(ratio > 1 for ratio in ratios)),
        ("slower", all(ratio < 1 for ratio in ratios)),
        ("the same", all(ratio == 1 for ratio in ratios)),
        ("never slower", all(ratio >= 1 for ratio in ratios)),
    ):
        if holds:
            return word
    return "never faster"


def crossings(xs: Sequence[float], ratios: Sequence[float]) -> list[tuple[float, int]]:
    """(x, 1 upwards or -1 downwards) of each place where the ratio goes through 1, in order.

    xs: ascending, above 0; ratios above 0. Where the ratio is 1 over several points, the middle of
    them (geometric) is the place; one that touches 1 and turns back does not cross.
    """
    logs = [math.log(ratio) for ratio in ratios]
    found = []
    for i, j in pairwise(i for i, value in enumerate(logs) if value):
        if (logs[i] > 0) == (logs[j] > 0):
            continue
        if j == i + 1:
            part = logs[i] / (logs[i] - logs[j])
            x = math.exp(math.log(xs[i]) + part * (math.log(xs[j]) - math.log(xs[i])))
            x = min(max(x, xs[i]), xs[j])
        else:
            x = xs[i + 1] if j == i + 2 else math.sqrt(xs[i + 1] * xs[j - 1])
        found.append((x, 1 if logs[j] > 0 else -1))
    return found


def zone(
    x: float, xs: Sequence[float], low: Sequence[float], high: Sequence[float]
) -> tuple[float | None, float | None]:
    """From where to where around a crossing the ratio's range contains 1.

    low, high: the range's ends at xs, interpolated as the ratio is. None for an end that is not
    reached within xs.
    """
    lows, highs = crossings(xs, low), crossings(xs, high)
    begins = [at for at, way in lows if way < 0] + [at for at, way in highs if way > 0]
    ends = [at for at, way in lows if way > 0] + [at for at, way in highs if way < 0]
    left = max((at for at in begins if at <= x), default=None)
    right = min((at for at in ends if at >= x), default=None)
    return left, right
