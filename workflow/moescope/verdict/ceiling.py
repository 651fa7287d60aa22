"""How fast a token's bytes are read, and how near that comes to what the host's memory can do."""

from typing import Any

from .results import Found
from .statistics import Figure, adopt, figure, quotient, rounded

PATTERNS = ("read", "copy", "gather")


def bandwidths(*sources: Found | None) -> dict[str, Figure]:
    """Bytes per second measured on this host, by pattern; empty if none was.

    They come from {"bandwidth": {"read": ..., "copy": ..., "gather": ...}} of the first source
    (environment.json, trace.json) that has the read.
    """
    for source in sources:
        if source is not None:
            measured = source.value.get("bandwidth") or {}
            found = {name: adopt(measured.get(name), "bytes/s", [source.file]) for name in PATTERNS}
            if found["read"] is not None:
                return {name: figure for name, figure in found.items() if figure is not None}
    return {}


def ceiling(
    architecture: Found | None,
    token_ms: Figure | None,
    parts: dict[str, Any] | None,
    measured: dict[str, Figure],
    fused: bool = False,
    elsewhere_ms: float = 0.0,
) -> dict[str, Any] | None:
    """Achieved bytes per second of the whole token and of each term that reads weights.

    architecture: architecture.json with "bytes.per_token". token_ms: the arm's time per token.
    parts: terms of its kernel trace or, without one, of its scopes. measured: ``bandwidths``, of
    which the read is the ceiling ("share") and the copy, which writes as much as it reads, a lower
    one ("copy_share"). fused: the block runs in kernels of its own, which read the shared expert's
    weights along with the others' where it has no kernels of its own; elsewhere_ms: of these
    kernels, per token, under other terms (verdict.path), added to the experts' time.
    """
    if architecture is None or token_ms is None:
        return None
    per_token = dict(architecture.value["bytes"]["per_token"])
    if fused and parts and "shared_expert" not in parts:
        per_token["expert_gather"] += per_token.get("shared_expert", 0)
    whole = _rate(per_token["total"], token_ms, architecture.file, measured)
    terms = {
        term: _rate(
            per_token[term],
            _later(part["ms"], elsewhere_ms if term == "expert_gather" else 0.0),
            architecture.file,
            measured,
        )
        for term, part in (parts or {}).items()
        if per_token.get(term) and part["ms"]["min"] > 0
    }
    return {"bandwidth": measured.get("read"), "whole": whole, "terms": terms}


def _later(ms: Figure, more: float) -> Figure:
    return (
        ms | {bound: rounded(ms[bound] + more) for bound in ("value", "min", "max")} if more else ms
    )


def _rate(size: int, ms: Figure, file: str, measured: dict[str, Figure]) -> dict[str, Any]:
    bytes_ = figure([size], "bytes/token", [file])
    second = {end: rounded(ms[end] / 1e3) for end in ("value", "min", "max")}
    achieved = quotient(bytes_, ms | second, "bytes/s") | {"n": ms["n"]}
    return {"bytes": bytes_, "achieved": achieved} | {
        key: quotient(achieved, measured[way], "share") | {"n": ms["n"]}
        if way in measured
        else None
        for key, way in (("share", "read"), ("copy_share", "copy"))
    }
