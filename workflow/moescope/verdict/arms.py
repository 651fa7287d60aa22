"""An arm on a checkpoint: its rates, whether it is void, and its ratio to its base arm."""

import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from ..measure.schedule import parts
from . import rule
from .results import Found
from .statistics import Figure, figure, monotone

Run = dict[str, Any]

# name -> (unit, value of one run)
RATES: dict[str, tuple[str, Callable[[Run], float]]] = {
    "decode_rate": ("tokens/s", lambda run: run["forwards"] / run["decode_s"]),
    "token_ms": ("ms/token", lambda run: run["decode_s"] / run["forwards"] * 1e3),
    "prefill_rate": ("tokens/s", lambda run: run["prompt_tokens"] / run["prefill_s"]),
    "tool_rate": ("tokens/s", lambda run: run["tool_rate"]),
    "build_ms": ("ms/token", lambda run: run["build_s"] / run["forwards"] * 1e3),
    "cpu_ms": ("ms/token", lambda run: run["cpu_s"] / run["forwards"] * 1e3),
    "build_share": ("share", lambda run: run["build_s"] / run["decode_s"]),
    "peak_memory": ("bytes", lambda run: run["peak_memory"]),
}


def base_arm(arms: dict[str, Any], name: str) -> str:
    """The arm that another is compared with.

    It is the reference, except for an intervention into another runtime than the reference's:
    that is compared with the unchanged arm of its own runtime, if the study has one.
    """
    (reference,) = (key for key, arm in arms.items() if arm["role"] == "reference")
    arm = arms[name]
    if arm["role"] == "intervention" and arm["runtime"] != arms[reference]["runtime"]:
        for key, other in arms.items():
            if other["role"] == "candidate" and other["runtime"] == arm["runtime"]:
                return key
    return reference


def valid_runs(runs: Found, arm: str) -> list[Run]:
    """The arm's valid runs by round."""
    found = [run for run in runs.value if run["arm"] == arm and run["valid"]]
    return sorted(found, key=lambda run: run["round"])


def rates(runs: list[Run], file: str) -> dict[str, Figure | None]:
    """Each of RATES over an arm's runs; None where the runs do not carry it."""
    ids = [run["id"] for run in runs]
    found: dict[str, Figure | None] = {}
    for name, (unit, value) in RATES.items():
        try:
            found[name] = figure([value(run) for run in runs], unit, [file], ids)
        except (KeyError, TypeError):
            found[name] = None
    return found


def void(
    runs: list[Run],
    shape: dict[str, int],
    parity: dict[str, Any] | None,
    path: dict[str, Any] | None,
) -> str | None:
    """Why an arm's speed must not be used, or None.

    parity: the arm's entry of parity.json. path: the proof of the kernels that its experts ran, as
    verdict.path gives it.
    """
    if any(run["finite"] is False for run in runs):
        return "NaN or Inf in the logits"
    if any(run["generated_tokens"] != shape["generate"] for run in runs):
        return "a run generated another number of tokens than asked"
    if any(run["prompt_tokens"] != shape["prompt"] for run in runs):
        return "a run read another number of prompt tokens than asked"
    if parity is not None:
        if parity.get("void"):
            return str(parity["void"])
        if parity.get("finite") is False:
            return "NaN or Inf in the logits of the parity pass"
    if path and path["proved"] is False:
        return f"the experts did not take the path that the arm claims: {path['why']}"
    return None


def decode_ratio(run: Run, base: Run) -> float:
    """A run's decode rate / that of another one of its round.

    Where both took turns it is the median over the turns: a host that changes its speed between
    the two slices of one turn spoils that turn, and not the round.
    """
    ours, theirs = _slices_s(run), _slices_s(base)
    if ours is None or theirs is None or len(ours) != len(theirs):
        return _ratio_of(RATES["decode_rate"][1])(run, base)
    return statistics.median(b / a for a, b in zip(ours, theirs, strict=True))


def _ratio_of(value: Callable[[Run], float]) -> Callable[[Run, Run], float]:
    return lambda run, base: value(run) / value(base)


def _slices_s(run: Run) -> list[float] | None:
    """Seconds of each slice's timed forwards, all but its first; None of a whole run."""
    times, count = run.get("token_s"), run.get("slices", 1)
    if count < 2 or not times:
        return None
    ends = list(itertools.accumulate(size - 1 for size in parts(run["generated_tokens"], count)))
    if ends[-1] != len(times):
        return None
    return [sum(times[begin:end]) for begin, end in itertools.pairwise([0, *ends])]


class Pairs:
    """Runs of two arms in the same round."""

    def __init__(self, arm: list[Run], base: list[Run], file: str):
        by_round = {run["round"]: run for run in base}
        self.pairs = [(run, by_round[run["round"]]) for run in arm if run["round"] in by_round]
        self.file = file

    def ratios(self, rate: str) -> list[float]:
        """Rate of the arm / rate of the base, by round; empty if a run does not have it."""
        value = decode_ratio if rate == "decode_rate" else _ratio_of(RATES[rate][1])
        try:
            return [value(run, base) for run, base in self.pairs]
        except (KeyError, TypeError):
            return []

    def figure(self, values: Sequence[float], unit: str) -> Figure | None:
        ids = [run["id"] for pair in self.pairs for run in pair]
        return figure(values, unit, [self.file], ids) if values else None


def against(base: str, pairs: Pairs, null: Pairs | None) -> dict[str, Any]:
    """An arm's paired ratios to its base, with the decision of the rule for each."""
    found: dict[str, Any] = {"base": base}
    for name, rate in (("decode", "decode_rate"), ("prefill", "prefill_rate")):
        ratios = pairs.ratios(rate)
        found[name] = pairs.figure(ratios, "ratio")
        decision = rule.decide(ratios, null.ratios(rate) if null else [])
        found[f"{name}_decision"] = {"effect": decision.effect, "why": decision.why}
    ratios = pairs.ratios("decode_rate")
    found["saved"] = pairs.figure([1 - 1 / ratio for ratio in ratios], "share")
    found["drifts"] = drifts(ratios, null.ratios("decode_rate") if null else [])
    return found


def gain(pairs: Pairs, skipped: list[Run]) -> Figure | None:
    """What an arm saves of the time per token that skipping the whole MoE block saves, by rounds.

    skipped: the runs of the arm that skips it, over the same base. None where a round lacks one of
    the three, or where skipping the block saves nothing there.
    """
    without = {run["round"]: run for run in skipped}
    shares, ids = [], []
    for run, base in pairs.pairs:
        bound = without.get(run["round"])
        if bound is None or decode_ratio(bound, base) <= 1:
            return None
        shares.append((1 - 1 / decode_ratio(run, base)) / (1 - 1 / decode_ratio(bound, base)))
        ids += [run["id"], base["id"], bound["id"]]
    return figure(shares, "share", [pairs.file], ids) if shares else None


def outdoes(arm: list[Run], skipped: list[Run], null: Pairs | None, file: str) -> bool:
    """Is an arm faster than the one that skips the whole MoE block, by the rule?

    Then what skipping saves is no bound of what the arm can: more than the block's work differs.
    """
    ratios = Pairs(arm, skipped, file).ratios("decode_rate")
    decision = rule.decide(ratios, null.ratios("decode_rate") if null else [])
    return decision.effect == "effect" and min(ratios) > 1


def drifts(ratios: Sequence[float], null: Sequence[float]) -> bool:
    """Does a ratio move one way through all rounds, by more than the null arm's range?

    Then the rounds are no repetitions of one thing, and their median is not to be trusted.
    """
    if len(ratios) < 4 or not null or not monotone(ratios):
        return False
    return abs(ratios[-1] - ratios[0]) > max(null) - min(null)


def noise(null: Pairs) -> dict[str, Any]:
    """What the null arm says: its ratios to the reference, their largest distance from 1, and how
    large a slowdown must be, at least, for a range like this one to lie outside it."""
    found: dict[str, Any] = {}
    for name, rate in (("decode", "decode_rate"), ("prefill", "prefill_rate")):
        ratios = null.ratios(rate)
        found[name] = null.figure(ratios, "ratio")
        floor = null.figure([max(abs(ratio - 1) for ratio in ratios)] if ratios else [], "share")
        found[f"{name}_floor"] = floor and floor | {"n": len(ratios)}
        span = null.figure([1 - min(ratios) / max(ratios)] if ratios else [], "share")
        found[f"{name}_resolution"] = span and span | {"n": len(ratios)}
    return found


def session_drift(reference: list[Run], file: str) -> dict[str, Any] | None:
    """How far the reference's own rate moved over the rounds: fastest / slowest - 1.

    Ratios are paired by round and do not feel it; absolute rates do.
    """
    if not reference:
        return None
    values = [RATES["decode_rate"][1](run) for run in reference]
    ids = [run["id"] for run in reference]
    moved = figure([max(values) / min(values) - 1], "share", [file], ids)
    return {"moved": moved | {"n": len(values)}, "flag": max(values) / min(values) - 1 > 0.05}
