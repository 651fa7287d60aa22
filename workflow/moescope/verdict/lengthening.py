"""Arms that remove work and make the token longer: what they cannot bound."""

from typing import Any

from .statistics import Figure, rounded


def removes_work(patches: list[str], top_k: int | None) -> bool:
    """Does an arm leave out what its base computes: a part (skip_...), or experts of a token?

    top_k: the model's own; None if it has none.
    """
    for patch in patches:
        name, _, number = patch.partition("=")
        if name.startswith("skip_") or (name == "top_k" and top_k and int(number) < top_k):
            return True
    return False


def longer(against: dict[str, Any] | None) -> Figure | None:
    """How much longer than its base's an arm's token is, as a share of the base's, where the rule
    calls that an effect; else None. against: the arm's paired ratios to its base (verdict.arms)."""
    if not against or against["decode_decision"]["effect"] != "effect":
        return None
    saved = against["saved"]
    if saved["value"] >= 0:
        return None
    ends = {"value": -saved["value"], "min": -saved["max"], "max": -saved["min"]}
    return saved | {end: rounded(value) for end, value in ends.items()}
