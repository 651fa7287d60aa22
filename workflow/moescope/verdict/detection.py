"""How often would the rule find what is there, and nothing where nothing is, at this noise?

Experiments are drawn from the recorded runs of the reference and of the null arm, which is the
reference again: what they differ by within a round is the noise of a run. Every draw is taken from
a hash, so that the counts are the same everywhere.
"""

import hashlib
import math
from typing import Any

from . import rule
from .arms import Pairs
from .statistics import figure

EXPERIMENTS, ROUNDS, SLOWDOWN = 40, 5, 0.03
LEAST = 3  # paired rounds


def detection(null: Pairs | None) -> dict[str, Any] | None:
    """{"no_effect", "detected": Figures of EXPERIMENTS, "of", "rounds", "slowdown", "drawn_from"}.

    no_effect: A/A experiments that the rule calls so. detected: experiments with an arm slower by
    SLOWDOWN that it calls slower. Each has ROUNDS rounds of reference, null arm and arm, each run's
    noise drawn on its own. The texts say what was declared here and is no measurement. None with
    fewer than LEAST paired rounds.

    Two runs of a round lie half their difference from their mean, on either side; two draws from
    a spread s do so by s / sqrt(2) on average in square, hence the sqrt(2) below.
    """
    ratios = null.ratios("decode_rate") if null else []
    if len(ratios) < LEAST:
        return None
    half = [math.log(ratio) / 2 * math.sqrt(2) for ratio in ratios]
    noise = half + [-value for value in half]
    kinds = {"no_effect": 0.0, "detected": math.log1p(-SLOWDOWN)}
    found = {}
    for kind, shift in kinds.items():
        effects = [_experiment(noise, shift, f"{kind} {i}") for i in range(EXPERIMENTS)]
        wanted = "no effect" if kind == "no_effect" else "slower"
        ids = [run["id"] for pair in null.pairs for run in pair]
        found[kind] = figure([effects.count(wanted)], "experiments", [null.file], ids)
    return found | {
        "of": str(EXPERIMENTS),
        "rounds": str(ROUNDS),
        "slowdown": f"{SLOWDOWN * 100:g} %",
        "drawn_from": figure([len(ratios)], "paired rounds", [null.file]),
    }


def _experiment(noise: list[float], shift: float, name: str) -> str:
    runs = [
        {who: noise[_draw(f"{name} {who} {number}", len(noise))] for who in ("arm", "ref", "null")}
        for number in range(ROUNDS)
    ]
    ratios = [math.exp(run["arm"] + shift - run["ref"]) for run in runs]
    null = [math.exp(run["null"] - run["ref"]) for run in runs]
    effect = rule.decide(ratios, null).effect
    return "slower" if effect == "effect" and max(ratios) < 1 else effect


def _draw(name: str, size: int) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % size
