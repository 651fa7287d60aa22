"""The decision rule: when two arms differ, and when a claim's condition holds.

It stands here before any number does. Rates are paired by round, so that what slows the whole
host for a while (a virtual machine's neighbours, heat) cancels; the null arm, which is the
reference a second time, says what pairing leaves over.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

MINIMUM_ROUNDS = 3

# The rule in words, printed in every record.
IN_WORDS = (
    "Per round, r is the arm's rate divided by the reference's and q the null arm's rate divided "
    "by the reference's; where the arms take turns, the median over the turns. An arm has an "
    "effect only if the range of r over the rounds excludes 1 and does not overlap the range of q; "
    "anything else is «no effect»."
)

Effect = Literal["effect", "no effect", "undecided"]
State = Literal["holds", "fails", "unclear"]
Verdict = Literal["supported", "refuted", "unresolved"]


@dataclass(frozen=True)
class Decision:
    effect: Effect
    why: str


def decide(ratios: Sequence[float], null: Sequence[float]) -> Decision:
    """Whether an arm differs from the reference.

    ratios: arm's rate / reference's rate, one a round. null: the same of the null arm.
    Fewer than MINIMUM_ROUNDS pairs of either decide nothing.
    """
    if len(ratios) < MINIMUM_ROUNDS:
        return Decision("undecided", "fewer than three paired rounds")
    if len(null) < MINIMUM_ROUNDS:
        return Decision("undecided", "fewer than three rounds of the null arm")
    if min(ratios) <= 1 <= max(ratios):
        return Decision("no effect", "the range over the rounds contains 1")
    if min(ratios) <= max(null) and min(null) <= max(ratios):
        return Decision("no effect", "the range overlaps the null arm's")
    direction = "faster" if min(ratios) > 1 else "slower"
    return Decision("effect", f"{direction} in every round, beyond the null arm's range")


def condition(low: float, high: float, sign: str, than: float) -> State:
    """Holds if the whole range satisfies the comparison, fails if the whole range violates it.

    sign: one of ">", "<", ">=", "<=".
    """
    test = {
        ">": lambda x: x > than,
        "<": lambda x: x < than,
        ">=": lambda x: x >= than,
        "<=": lambda x: x <= than,
    }[sign]
    ends = {test(low), test(high)}
    return "unclear" if len(ends) == 2 else "holds" if ends == {True} else "fails"


def settle(states: Sequence[State]) -> Verdict:
    """Supported if all conditions hold, refuted if all fail, else unresolved."""
    if states and all(state == "holds" for state in states):
        return "supported"
    if states and all(state == "fails" for state in states):
        return "refuted"
    return "unresolved"


def combine(verdicts: Sequence[Verdict]) -> Verdict:
    """One verdict over several checkpoints: theirs, if they agree."""
    found = set(verdicts)
    return found.pop() if len(found) == 1 else "unresolved"
