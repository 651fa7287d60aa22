"""Judging tokens: an arm's greedy text and its teacher-forced logits beside the reference's."""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Seen:
    """What an arm did. Commands do not show everything: None is what was not seen.

    tokens: greedy, of our prompt. finite: whether all logits were. logits: [len(continuation),
    vocab] (float32) over the reference's tokens. why_not: why there is nothing to compare.
    """

    tokens: list[int] | None
    tokens_sha256: str | None
    finite: bool | None
    logits: np.ndarray | None
    generated: int
    why_not: str | None = None


class Judge:
    """Compares what arms did with what the reference did.

    limits: decided_gap (logits), loop_period, loop_tokens. synthetic: the weights are random, so
    that text that repeats itself is no sign of a fault unless the reference's does not.
    """

    def __init__(self, reference: Seen, limits: dict[str, Any], generate: int, synthetic: bool):
        self.reference, self.limits, self.generate = reference, limits, generate
        self.excused = synthetic and self._loops(reference)

    def compare(self, arm: Seen) -> dict[str, Any]:
        """An arm's entry of parity.json; the reference's own is a comparison with itself."""
        found = {
            "greedy": self._greedy(arm),
            "forced": self._forced(arm),
            "finite": arm.finite,
            "repetition": self._loop(arm),
            "void": self._void(arm),
        }
        return found | ({"not_compared": arm.why_not} if arm.why_not else {})

    def _greedy(self, arm: Seen) -> dict[str, Any] | None:
        if arm.tokens is None or self.reference.tokens is None:
            return None
        first = first_divergence(self.reference.tokens, arm.tokens)
        logits, gap = self.reference.logits, None
        if logits is not None and first is not None and first < min(len(arm.tokens), len(logits)):
            row = logits[first]
            if arm.tokens[first] < len(row):
                gap = _finite(row[self.reference.tokens[first]] - row[arm.tokens[first]])
        return {
            "identical": first is None,
            "first_divergence": first,
            "logit_gap": gap,
            "tokens_sha256": arm.tokens_sha256,
        }

    def _forced(self, arm: Seen) -> dict[str, Any] | None:
        if arm.logits is None or self.reference.logits is None:
            return None
        if not (arm.finite and self.reference.finite):
            return None
        width = min(arm.logits.shape[1], self.reference.logits.shape[1])
        ours = np.asarray(arm.logits[:, :width], np.float64)
        theirs = np.asarray(self.reference.logits[:, :width], np.float64)
        same = ours.argmax(axis=1) == theirs.argmax(axis=1)
        two = np.partition(theirs, -2, axis=1)[:, -2:]
        decided = two[:, 1] - two[:, 0] >= self.limits["decided_gap"]
        tokens = self.reference.tokens
        known = max(tokens) < width
        ratio = perplexity_of(ours, tokens) / perplexity_of(theirs, tokens) if known else np.nan
        return {
            "top1_agreement": float(same.mean()),
            "max_abs_logit": _finite(difference(ours, theirs).max()),
            "decided": int(decided.sum()),
            "decided_mismatches": int((decided & ~same).sum()),
            "perplexity_ratio": _finite(ratio),
            "tokens": len(same),
        }

    def _void(self, arm: Seen) -> str | None:
        if arm.generated != self.generate:
            return f"{arm.generated} tokens generated, not {self.generate}"
        if arm.finite is False:
            return "NaN or Inf in the logits"
        if self._loops(arm) and not self.excused:
            loop = self._loop(arm)
            return (
                f"the text repeats itself: {loop['longest_loop']} tokens with period "
                f"{loop['period']}"
            )
        return None

    def _loop(self, arm: Seen) -> dict[str, int | None] | None:
        if arm.tokens is None:
            return None
        return longest_loop(arm.tokens, self.limits["loop_period"])

    def _loops(self, arm: Seen) -> bool:
        loop = self._loop(arm)
        return loop is not None and loop["longest_loop"] >= self.limits["loop_tokens"]


def first_divergence(reference: list[int], tokens: list[int]) -> int | None:
    """Index of the first token that differs, or where the shorter list ends; None if equal."""
    for index, (one, other) in enumerate(zip(reference, tokens, strict=False)):
        if one != other:
            return index
    return None if len(reference) == len(tokens) else min(len(reference), len(tokens))


def longest_loop(tokens: list[int], most: int) -> dict[str, int | None]:
    """The longest tail that repeats with a period of at most ``most``: {"longest_loop", "period"}.

    The length counts all tokens of the tail, whole periods or not; a tail shorter than two
    periods is no loop. Of equal lengths the smallest period is given.
    """
    best: dict[str, int | None] = {"longest_loop": 0, "period": None}
    for period in range(1, most + 1):
        length = period
        while length < len(tokens) and tokens[-1 - length] == tokens[-1 - length + period]:
            length += 1
        length = min(length, len(tokens))
        if length >= 2 * period and length > best["longest_loop"]:
            best = {"longest_loop": length, "period": period}
    return best


def sound(logits: np.ndarray) -> bool:
    """No NaN and no +inf; -inf is how a model masks tokens."""
    return not bool(np.isnan(logits).any() or np.isposinf(logits).any())


def difference(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Absolute differences; two tokens that are both masked do not differ."""
    with np.errstate(invalid="ignore"):
        return np.where(ours == theirs, 0.0, np.abs(ours - theirs))


def perplexity_of(logits: np.ndarray, tokens: list[int]) -> float:
    """exp of the mean negative log probability; logits [n, vocab], row i predicts token i."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return float(np.exp(-logprobs[np.arange(len(tokens)), tokens].mean()))


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
