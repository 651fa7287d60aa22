"""Rounds of arms: who runs when, and in which process."""

from typing import Any


def order(arms: list[str], number: int) -> list[str]:
    """The arms of round ``number`` (from 0): each once, starting one arm later each round.

    Over any ``len(arms)`` rounds in a row, each arm stands once at each position.
    """
    start = number % len(arms)
    return arms[start:] + arms[:start]


def processes(arms: dict[str, dict[str, Any]]) -> list[list[str]]:
    """The arms that share a worker process, in the order of their first arm.

    Arms of one runtime with the same variables share one: their patches are put in and taken out
    with each run. The null arm has its own, or its spread would not hold what differs between
    two processes.
    """
    groups: dict[tuple, list[str]] = {}
    for name, arm in arms.items():
        variables = tuple(sorted(arm.get("env", {}).items()))
        own = name if arm["role"] == "null" else ""
        groups.setdefault((arm["runtime"], variables, own), []).append(name)
    return list(groups.values())
