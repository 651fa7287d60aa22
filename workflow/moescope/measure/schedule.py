"""Rounds of arms: who runs when, and in which process."""

from typing import Any


def order(arms: list[str], number: int) -> list[str]:
    """The arms of round ``number`` (from 0): each once, starting one arm later each round.

    Over any ``len(arms)`` rounds in a row, each arm stands once at each position.
    """
    start = number % len(arms)
    return arms[start:] + arms[:start]


def parts(tokens: int, slices: int) -> list[int]:
    """Sizes of the slices of a pass of ``tokens`` tokens, whose first belongs to the prefill; they
    differ by one at most, the larger ones first."""
    each, more = divmod(tokens - 1, slices)
    return [each + 1] * more + [each] * (slices - more)


def turns(arms: list[str], slices: int) -> list[list[str]]:
    """Who decodes when in a sliced round: one list of all arms for each slice.

    A Williams design: over ``len(arms)`` turns in a row each arm stands once at each position, and
    it follows each other arm once (twice over twice as many turns if the arms are odd in number).
    What an arm leaves behind, in caches and clocks, so falls on all others alike; in a mere
    rotation it would always fall on the same one.
    """
    count = len(arms)
    zigzag = [(i + 1) // 2 if i % 2 else (count - i // 2) % count for i in range(count)]
    found = []
    for turn in range(slices):
        row = [arms[(i + turn) % count] for i in zigzag]
        found.append(row[::-1] if count % 2 and (turn // count) % 2 else row)
    return found


def processes(arms: dict[str, dict[str, Any]], apart: bool = False) -> list[list[str]]:
    """The arms that share a worker process, in the order of their first arm.

    Arms of one runtime with the same variables share one: their patches are put in and taken out
    with each run. The null arm has its own, or its spread would not hold what differs between
    two processes. ``apart``: each arm has its own, as it must where a run can be paused, since its
    patches stay in the model meanwhile.
    """
    if apart:
        return [[name] for name in arms]
    groups: dict[tuple, list[str]] = {}
    for name, arm in arms.items():
        variables = tuple(sorted(arm.get("env", {}).items()))
        own = name if arm["role"] == "null" else ""
        groups.setdefault((arm["runtime"], variables, own), []).append(name)
    return list(groups.values())
