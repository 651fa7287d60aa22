"""How fast a token's bytes are read, and how near that comes to what the host's memory can do."""

from typing import Any

from .fused import Fused
from .path import TERM as EXPERTS
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
    fused: Fused | None = None,
) -> dict[str, Any] | None:
    """Achieved bytes per second of the whole token and of each term that reads weights.

    architecture: architecture.json with "bytes.per_token". token_ms: the arm's time per token.
    parts: terms of its kernel trace or, without one, of its scopes. measured: ``bandwidths``, of
    which the read is the ceiling ("share") and the copy, which writes as much as it reads, a lower
    one ("copy_share"). fused: of an arm whose block runs in kernels of its own.

    The experts' rate of such an arm is what these kernels read ÷ their own time; "by_term", where
    others count to the term beside them, is the same by the term's time, as it was first defined.
    "unknown" holds the reason where there is no such time. On the gather path the rate is that of
    the whole term: products, copies of indices and what else it launches.
    """
    if architecture is None or token_ms is None:
        return None
    per_token = dict(architecture.value["bytes"]["per_token"])
    parts = dict(parts or {})
    if fused and fused.shared:
        per_token[EXPERTS] += per_token.get("shared_expert", 0)
        parts.pop("shared_expert", None)  # what is left of it reads none of its weights
    file, unknown = architecture.file, {}

    def rate(term: str, ms: Figure) -> dict[str, Any]:
        return _rate(per_token[term], ms, file, measured)

    terms = {
        term: rate(term, part["ms"])
        for term, part in parts.items()
        if per_token.get(term) and part["ms"]["min"] > 0
    }
    if fused and EXPERTS in terms:
        by_term = rate(EXPERTS, _later(parts[EXPERTS]["ms"], fused.elsewhere_ms))
        if fused.own is None:
            unknown[EXPERTS] = fused.why
            del terms[EXPERTS]
        else:
            own = {"of": "kernels", "by_term": by_term if fused.mixed else None}
            terms[EXPERTS] = rate(EXPERTS, fused.own) | own  # in its place
    whole = rate("total", token_ms)
    return {
        "bandwidth": measured.get("read"),
        "bandwidths": measured,
        "whole": whole,
        "terms": terms,
        "unknown": unknown,
    }


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
