"""What must not be compared, and what was not measured: generated, so that nothing is silent."""

from itertools import combinations
from typing import Any

from .kernels import FORCED

BACKENDS = ("cpu", "cuda", "metal")


def comparability(checkpoints: dict[str, Any]) -> dict[str, Any]:
    """Which checkpoints may stand in one ratio, and which pairs of one model must not.

    checkpoints: name -> {"model_type", "compare", "recipe"}. Two checkpoints are comparable only
    if their inspection gave the same ``compare`` fingerprint.
    """
    refused, allowed = [], []
    for one, two in combinations(checkpoints, 2):
        a, b = checkpoints[one], checkpoints[two]
        if a["compare"] is not None and a["compare"] == b["compare"]:
            allowed.append([one, two])
        elif a["model_type"] is not None and a["model_type"] == b["model_type"]:
            why = (
                f"{one} is {a['recipe']}, {two} is {b['recipe']}"
                if a["recipe"] != b["recipe"]
                else "their tensors differ in shape, width or quantisation"
            )
            refused.append({"pair": [one, two], "why": why})
    return {"allowed": allowed, "refused": refused}


def not_measured(analysis: dict[str, Any], params: dict[str, Any]) -> list[str]:
    """Sentences: each thing that a reader could expect in the record and will not find."""
    backend = params["machine"]["backend"]
    others = " and ".join(name for name in BACKENDS if name != backend)
    lines = [f"Other machines and backends: this record is of {backend} only, not of {others}."]
    checkpoints = analysis["checkpoints"]
    synthetic = [name for name, entry in checkpoints.items() if entry["synthetic"]]
    if synthetic:
        lines.append(
            f"Trained weights: {', '.join(synthetic)} are synthetic, so a trained router's choice "
            "of experts and the quality of the text are outside this record."
        )
    lines.append(
        "Other shapes: only batch 1, greedy, with the prompt and generation length stated; no "
        "long context, no batched or speculative decode, no server."
    )
    lines += [
        f"All rounds on {name}: its measurement was interrupted {entry['interrupted']}."
        for name, entry in checkpoints.items()
        if entry["interrupted"]
    ]
    lines += _arms(checkpoints) + _crossover(analysis["crossover"])
    lines += _attribution(checkpoints, backend)
    lines += _fallen_back(checkpoints) + _unexplained(checkpoints) + _first_use(checkpoints)
    lines += _instruments(checkpoints)
    return list(dict.fromkeys(lines))


def _arms(checkpoints: dict[str, Any]) -> list[str]:
    """Arms that have no speed on a checkpoint, gathered by the reason."""
    reasons: dict[str, dict[str, list[str]]] = {}
    for name, checkpoint in checkpoints.items():
        for arm, entry in checkpoint["arms"].items():
            reason = entry["absent"] or (entry["void"] and f"void, {entry['void']}")
            if reason:
                reasons.setdefault(reason, {}).setdefault(name, []).append(arm)
    return [
        "The speed of "
        + "; of ".join(f"{', '.join(arms)} on {name}" for name, arms in places.items())
        + f": {reason}."
        for reason, places in reasons.items()
    ]


def _crossover(found: dict[str, Any] | None) -> list[str]:
    """A crossover that the study asks for and its results do not give."""
    if found is None:
        return []
    word = found["over"].replace("_", " ")
    if found["refused"]:
        return [f"The crossover over {word}: {found['refused']}."]
    lines = []
    for arm, entry in found["arms"].items():
        for of, what in (("wall", "the token's time"), ("gpu", "the GPU's time of the MoE block")):
            reasons: dict[str, list[str]] = {}
            for point in entry[of]["points"]:
                if point["why"]:
                    reasons.setdefault(point["why"], []).append(point["checkpoint"])
            lines += [
                f"In the crossover of {arm} over {word}, by {what}: {', '.join(names)}: {why}."
                for why, names in reasons.items()
            ]
    return lines


def _attribution(checkpoints: dict[str, Any], backend: str) -> list[str]:
    lines = []
    for name, checkpoint in checkpoints.items():
        for arm, entry in checkpoint["arms"].items():
            if entry["absent"] or entry["role"] in ("null", "intervention"):
                continue
            if entry["scopes"] is None:
                lines.append(f"Terms of {arm} on {name}: it has no instrumented pass.")
            for part in ("scopes", "kernels"):
                if entry[part] is not None and entry[part]["refused"]:
                    lines.append(
                        f"Terms of {arm} on {name} by {part}: refused, {entry[part]['refused']}."
                    )
        if checkpoint["sweep"] is None and not checkpoint["dense"]:
            lines.append(f"Cost per expert on {name}: there are not three valid arms of top_k.")
    traced = [entry["kernels"] for c in checkpoints.values() for entry in c["arms"].values()]
    if not any(traced):
        lines.append(
            f"Kernel names, launches and GPU times: no kernel trace on the backend {backend}."
        )
    if not any(checkpoint["bandwidths"] for checkpoint in checkpoints.values()):
        lines.append(
            "Memory bandwidth of this host: not measured, so achieved rates have no ceiling "
            "beside them."
        )
    return lines


def _traced(checkpoints: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [
        (f"{arm} on {name}", entry["kernels"])
        for name, checkpoint in checkpoints.items()
        for arm, entry in checkpoint["arms"].items()
        if entry["kernels"]
    ]


def _fallen_back(checkpoints: dict[str, Any]) -> list[str]:
    """Traces whose terms come from the forced pass alone."""
    places = [place for place, found in _traced(checkpoints) if found["method"] == FORCED]
    if not places:
        return []
    return [
        f"The GPU's terms of {', '.join(places)} as they run in CUDA graphs, and a second opinion "
        "on them: the trace could not be aligned, so they stand on one forced pass, without a "
        "range, without synchronisation and without modules; busy time and launches are of the "
        "trace itself."
    ]


def _unexplained(checkpoints: dict[str, Any]) -> list[str]:
    """Bars that a trace misses and no measurement explains."""
    return [
        f"Why {place} misses the bar «{bar['bar']}»: nothing that was measured explains it."
        for place, found in _traced(checkpoints)
        for bar in found["bars"]
        if not bar["met"] and not bar["why"]
    ]


def _first_use(checkpoints: dict[str, Any]) -> list[str]:
    """First uses that began with kernels which MLX had compiled and kept before."""
    filled: dict[str, list[str]] = {}
    for name, checkpoint in checkpoints.items():
        for arm, entry in checkpoint["arms"].items():
            kept = (entry.get("cold") or {}).get("kept")
            if kept and kept["value"]:
                filled.setdefault(name, []).append(arm)
    if not filled:
        return []
    places = "; ".join(f"{', '.join(arms)} on {name}" for name, arms in filled.items())
    return [
        f"First use with nothing compiled before ({places}): MLX had kept kernels of earlier "
        "processes, so a first use here compiles only what was new and is a lower bound."
    ]


def _instruments(checkpoints: dict[str, Any]) -> list[str]:
    """What the trace stage itself says it could not measure."""
    where: dict[str, list[str]] = {}
    for name, checkpoint in checkpoints.items():
        for arm, entry in checkpoint["arms"].items():
            for text in entry["trace_not_measured"]:
                where.setdefault(text, []).append(f"{arm} on {name}")
    return [f"{text} ({', '.join(places)})." for text, places in where.items()]
