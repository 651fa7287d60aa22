"""What makes a run void: it did not do the work that it is timed for."""

from math import isfinite
from typing import Any

# Between the sum of a run's intervals and its decode time, as a share and in seconds.
TOLERANCE, TOLERANCE_S = 0.05, 0.002


def void(result: dict[str, Any], shape: dict[str, int]) -> str | None:
    """Why a worker's decode result must not be used, or None.

    shape: {"prompt", "generate"} in tokens. All forwards but the prefill's are timed, and in a pass
    that was cut into ``slices`` not the first of each. A command shows less than a worker does:
    None for ``finite`` and ``token_s`` is "not seen", and it may time the prefill's token too (its
    ``forwards`` say so).
    """
    prompt, generate = shape["prompt"], shape["generate"]
    if result["prompt_tokens"] != prompt:
        return f"{result['prompt_tokens']} prompt tokens, not {prompt}"
    if result["generated_tokens"] != generate:
        return f"{result['generated_tokens']} tokens generated, not {generate}"
    if result["finite"] is False:
        return "NaN or Inf in the logits"
    intervals = result["token_s"]
    least = generate - 1 - result.get("slices", 0)
    most = least if intervals is not None else generate
    if not least <= result["forwards"] <= most:
        return f"{result['forwards']} forwards timed, not {least}"
    if intervals is not None and len(intervals) != result["forwards"]:
        return f"{len(intervals)} intervals for {result['forwards']} forwards"
    times = {"prefill_s": result["prefill_s"], "decode_s": result["decode_s"]}
    times |= {f"token_s[{i}]": value for i, value in enumerate(intervals or ())}
    for name, value in times.items():
        if not (isinstance(value, int | float) and isfinite(value) and value > 0):
            return f"{name} is {value}, not a positive time"
    total = sum(intervals) if intervals is not None else result["decode_s"]
    if abs(total - result["decode_s"]) > TOLERANCE * result["decode_s"] + TOLERANCE_S:
        return f"the intervals add up to {total:.4f} s, the decode took {result['decode_s']:.4f} s"
    return None


def flag_changed_tokens(rows: list[dict[str, Any]]) -> None:
    """Mark each valid row whose tokens differ from its arm's first: greedy decoding repeats itself.

    A flagged run stays valid; its ``flags`` say so.
    """
    first: dict[str, str] = {}
    for row in rows:
        if not row["valid"] or row["tokens_sha256"] is None:
            continue
        expected = first.setdefault(row["arm"], row["tokens_sha256"])
        if row["tokens_sha256"] != expected:
            row["flags"] = [*row.get("flags", []), "other tokens than in the arm's first valid run"]
