"""A measured pass in slices: it pauses between them, while other arms' processes have their turn.

Where a host changes its speed within seconds, arms that take turns every few tokens see the same
speeds; arms that are measured one after the other do not. Three steps make a pass: ``start``, once
``more`` for each slice, ``end``. A process holds one pass; another ``start`` gives it up.
"""

from typing import Any

from .decode import Pass
from .state import Refusal, State

# The pass that is held, with the sizes of the slices that are left, and how many there were.
_held: list[tuple[Pass, list[int], int]] = []


def run(
    state: State,
    step: str,
    prompt: list[int] | None = None,
    tokens: int = 0,
    slices: list[int] | None = None,
    patches: list[str] | tuple[str, ...] = (),
) -> dict[str, Any]:
    """One step of a pass.

    start: the prefill of ``prompt``; ``slices`` are their numbers of tokens, two at least, all
    together ``tokens`` - 1. more: the next slice. end: what ``decode`` returns, and "slices".
    drop: gives the pass up, if there is one. The first interval of a slice is not timed, since the
    step in flight ends in the pause: forwards are tokens - 1 less the number of slices, and
    token_s, decode_s, build_s and cpu_s are of those. tool_rate is scaled up to all intervals.
    """
    if step == "start":
        drop()
        return _start(state, prompt, tokens, slices or [], patches)
    if step == "drop":
        drop()
        return {}
    if not _held:
        raise Refusal("failed", f"{step}: no pass is held; send the step start first")
    one, left, count = _held[0]
    if step == "more":
        if not left:
            raise Refusal("failed", "more: all slices are done")
        return _more(one, left)
    if step != "end" or left:
        raise Refusal("failed", f"{step!r} with {len(left)} slices left; more, end and drop exist")
    try:
        return one.end() | {"slices": count}
    finally:
        drop()


def drop() -> None:
    """Give the held pass up; the model is as before it."""
    while _held:
        _held.pop()[0].__exit__(None, None, None)


def _start(
    state: State, prompt: Any, tokens: int, slices: list[int], patches: Any
) -> dict[str, Any]:
    if not slices or min(slices) < 2 or sum(slices) != tokens - 1:
        raise Refusal(
            "failed", f"slices are {slices}, not {tokens} - 1 tokens in parts of 2 or more"
        )
    one = Pass(state, prompt, tokens, patches).__enter__()
    _held.append((one, list(slices), len(slices)))
    try:
        one.begin()
        one.pause()
    except BaseException:
        drop()
        raise
    return {"tokens": len(one.ids)}


def _more(one: Pass, left: list[int]) -> dict[str, Any]:
    try:
        one.advance(left.pop(0), paused=True)
        one.pause()
    except BaseException:
        drop()
        raise
    return {"tokens": len(one.ids)}
