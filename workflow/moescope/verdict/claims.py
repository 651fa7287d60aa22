"""Claims to verdicts: each condition on each checkpoint, and the measurement that settles it."""

from typing import Any

from . import rule
from .kernels import FORCED
from .quantities import PATTERNS, NotMeasuredError, evaluate


def judge(claims: list[dict[str, Any]], analysis: dict[str, Any]) -> list[dict[str, Any]]:
    """The study's claims with their verdicts.

    A claim without ``checkpoints`` speaks of every MoE subject. On a checkpoint it is supported
    if all its conditions hold, refuted if all fail, else unresolved; over several checkpoints it
    has the verdict on which they agree, else it is unresolved.
    """
    return [_judge(claim, analysis) for claim in claims]


def _judge(claim: dict[str, Any], analysis: dict[str, Any]) -> dict[str, Any]:
    names = claim.get("checkpoints") or [
        name
        for name, checkpoint in analysis["checkpoints"].items()
        if checkpoint["role"] == "subject" and not checkpoint["dense"]
    ]
    arm = claim.get("arm") or analysis["reference"]
    found = {name: _on(claim, analysis, name, arm) for name in names}
    return {
        "name": claim["name"],
        "says": claim["says"],
        "of": claim["of"],
        "arm": arm,
        "verdict": rule.combine([entry["verdict"] for entry in found.values()]),
        "checkpoints": found,
    }


def _on(
    claim: dict[str, Any], analysis: dict[str, Any], checkpoint: str, arm: str
) -> dict[str, Any]:
    conditions = [
        _condition(entry, analysis, checkpoint, arm, claim["of"]) for entry in claim["all"]
    ]
    verdict = rule.settle([entry["state"] for entry in conditions])
    wanted = {"supported": "holds", "refuted": "fails"}.get(verdict)
    return {
        "verdict": verdict,
        "conditions": conditions,
        # A verdict is settled by the conditions that agree with it; an unresolved one by none.
        "settled_by": [entry["quantity"] for entry in conditions if entry["state"] == wanted],
    }


def _condition(
    entry: dict[str, Any], analysis: dict[str, Any], checkpoint: str, arm: str, of: str
) -> dict[str, Any]:
    found = {"quantity": entry["quantity"], "means": meaning(entry["quantity"])}
    found |= {"is": entry["is"], "than": entry["than"]}
    arms = analysis["checkpoints"][checkpoint]["arms"]
    found |= footing(entry["quantity"], arms.get(arm))
    found |= _by_term(entry, arms.get(arm))
    found["unproved"] = unproved(entry["quantity"], arm, arms)
    found["drifts"] = _drifts(entry["quantity"], arms)
    found["no_bound"] = no_bound(entry["quantity"], arms)
    try:
        figure = evaluate(analysis, checkpoint, entry["quantity"], arm)
        if (
            of == "gpu"
            and entry["quantity"].partition(".")[0] in RATES
            and not arms[arm]["kernels"]
        ):
            raise NotMeasuredError(
                f"the arm {arm} has no kernel trace, and its clock is the host's"
            )
    except NotMeasuredError as error:
        return {**found, "figure": None, "state": "unclear", "why": f"not measured: {error}"}
    state = rule.condition(figure["min"], figure["max"], entry["is"], entry["than"])
    why = {
        "holds": "the whole range satisfies it",
        "fails": "the whole range violates it",
        "unclear": "the range contains the bound",
    }[state]
    return {**found, "figure": figure, "state": state, "why": why}


# Of a term's time by its kernels or, without a kernel trace, by the host's clock.
RATES = ("ceiling_share", "copy_share")
BY_TERMS = ("gpu_share", "gpu_lead", "gpu_ms", "gpu_launches", *RATES)


def footing(quantity: str, arm: dict[str, Any] | None) -> dict[str, Any]:
    """What a figure of the GPU's terms stands on: ``forced``, whether the trace fell back to the
    forced pass; ``of_work``, a share of the GPU's time less what waits for the host (or None)."""
    head, _, term = quantity.partition(".")
    traced = (arm or {}).get("kernels")
    if head not in BY_TERMS or not traced:
        return {"forced": False, "of_work": None}
    own = traced["terms"].get(term) or {}
    return {
        "forced": traced["method"] == FORCED,
        "of_work": own.get("share_of_work") if head == "gpu_share" else None,
    }


def _by_term(entry: dict[str, Any], arm: dict[str, Any] | None) -> dict[str, Any]:
    """A rate of fused kernels by the whole term's time, as it was first defined, if it differs, and
    how the condition stands by it."""
    head, _, term = entry["quantity"].partition(".")
    rates = (((arm or {}).get("ceiling") or {}).get("terms") or {}) if head in RATES else {}
    by_term = (rates.get(term) or {}).get("by_term") or {}
    figure = by_term.get({"ceiling_share": "share"}.get(head, head))
    state = figure and rule.condition(figure["min"], figure["max"], entry["is"], entry["than"])
    return {"by_term": figure, "by_term_state": state}


def unproved(quantity: str, arm: str, arms: dict[str, Any]) -> bool:
    """Is it of an arm that claims kernels which no trace shows that it ran?"""
    head, _, name = quantity.partition(".")
    named = any(f"{head}.<{kind}>" in PATTERNS for kind in ("arm", "candidate", "intervention"))
    return bool((arms.get(name if named else arm) or {}).get("unproved"))


def _drifts(quantity: str, arms: dict[str, Any]) -> bool:
    """Is it a quantity of paired rounds whose arm moves one way through all of them?"""
    head, _, name = quantity.partition(".")
    against = (arms.get(name) or {}).get("against") if head in ("ratio", "saved", "gain") else None
    return bool(against and against["drifts"])


def no_bound(quantity: str, arms: dict[str, Any]) -> str | None:
    """Why a figure of what removing work saves bounds nothing, or None: "longer" where the token is
    longer without it, "outdone" where a candidate is faster than the arm without the block."""
    head, _, name = quantity.partition(".")
    arm = arms.get(name) or {}
    if head == "saved" and arm.get("longer"):
        return "longer"
    return "outdone" if head == "gain" and (arm.get("against") or {}).get("outdoes") else None


def meaning(quantity: str) -> str:
    """What a quantity is, in words."""
    head, _, name = quantity.partition(".")
    for pattern, text in PATTERNS.items():
        if pattern == quantity:
            return text
        if name and pattern.startswith(f"{head}.<"):
            return f"{name}: {text}"
    return quantity
