"""The prompt: token ids by count alone, the same for every arm and every stage."""

from math import gcd
from typing import Any

from ..errors import UserError


def prompt_ids(count: int, vocab: int) -> list[int]:
    """``count`` ids spread over a vocabulary of ``vocab`` entries.

    Steps by the golden section, so that any prefix covers the vocabulary evenly; ids repeat only
    after all have been used. The ends of the vocabulary, where special tokens stand, are left out.
    """
    low = min(1024, vocab // 8)
    span = vocab - 2 * low
    if count < 1 or span < 2:
        raise UserError(f"no prompt of {count} ids from a vocabulary of {vocab}")
    step = round(span * 0.6180339887498949) or 1
    while gcd(step, span) != 1:
        step += 1
    return [low + (span // 3 + i * step) % span for i in range(count)]


def vocabulary(config: dict[str, Any], where: str) -> int:
    """``vocab_size`` of a checkpoint's config.json, at its top level or in text_config.

    Raises UserError if neither has it, or if they disagree.
    """
    nested = config.get("text_config") or {}
    found = {
        key: value
        for key, value in (
            ("vocab_size", config.get("vocab_size")),
            ("text_config.vocab_size", nested.get("vocab_size")),
        )
        if isinstance(value, int)
    }
    if not found:
        raise UserError("no vocab_size, at the top level or in text_config", where)
    if len(set(found.values())) > 1:
        raise UserError(f"two sizes of the vocabulary: {found}", where)
    return next(iter(found.values()))
