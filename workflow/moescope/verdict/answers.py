"""The questions that were put to the study, each with the figures and claims that answer it."""

from typing import Any

from .claims import footing, meaning, no_bound, unproved
from .quantities import FORCED, PATH, NotMeasuredError, evaluate


def answer(questions: list[dict[str, Any]], analysis: dict[str, Any]) -> list[dict[str, Any]]:
    """The study's ``answers`` in their order.

    Each: {"asks", "arm", "by": [{"quantity", "means", "checkpoints": {name: {"figure", "why", and
    with a figure "forced", "unproved" and "no_bound", as claims have them}}}],
    "paths": {name: {"kernels", "by_forced", "why"}}, "claims": [{"name", "says", "verdict"}],
    "not_measured", "named"}.
    Without ``checkpoints`` a question is about every checkpoint that the quantity is known of; of
    those that it names ("named") the record tells the unknown ones too.
    """
    return [_answer(entry, analysis) for entry in questions]


def _answer(entry: dict[str, Any], analysis: dict[str, Any]) -> dict[str, Any]:
    arm = entry.get("arm") or analysis["reference"]
    names = entry.get("checkpoints") or list(analysis["checkpoints"])
    quantities = [name for name in entry.get("by", []) if name != PATH]
    verdicts = {claim["name"]: claim for claim in analysis["claims"]}
    return {
        "asks": entry["asks"],
        "arm": arm,
        "by": [_figures(quantity, names, analysis, arm) for quantity in quantities],
        "paths": {name: _path(name, analysis, arm) for name in names}
        if PATH in entry.get("by", [])
        else {},
        "claims": [
            {key: verdicts[name][key] for key in ("name", "says", "verdict")}
            for name in entry.get("claims", [])
        ],
        "not_measured": entry.get("not_measured"),
        "named": bool(entry.get("checkpoints")),
    }


def _figures(quantity: str, names: list[str], analysis: dict[str, Any], arm: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        arms = analysis["checkpoints"][name]["arms"]
        try:
            found[name] = {
                "figure": evaluate(analysis, name, quantity, arm),
                "forced": footing(quantity, arms.get(arm))["forced"],
                "unproved": unproved(quantity, arm, arms),
                "no_bound": no_bound(quantity, arms),
                "why": None,
            }
        except NotMeasuredError as error:
            found[name] = {"figure": None, "why": str(error)}
    return {"quantity": quantity, "means": meaning(quantity), "checkpoints": found}


def _path(name: str, analysis: dict[str, Any], arm: str) -> dict[str, Any]:
    entry = analysis["checkpoints"][name]["arms"].get(arm) or {}
    traced = entry.get("kernels")
    if not traced or not traced["path"]["experts"]:
        why = "no kernel trace that names them"
        if traced and traced["method"] == FORCED:
            why = "the forced pass, which alone could tell, shows none that is known by its name"
        return {"kernels": [], "by_forced": False, "why": why}
    found = traced["path"]
    return {
        "kernels": found["experts"],
        "by_forced": found["by_forced"],
        "why": entry["void"],
    }
