"""What makes a run void: it did not do the work that it is timed for."""

from math import isfinite
from typing import Any

# Between the sum of a run's intervals and its decode time, as a share and in seconds.
TOLERANCE, TOLERANCE_S = 0.05, 0.002


def void(result: dict[str, Any], shape: dict[str, int]) -> str | None:
    """Why a worker's decode result must not be used, or None.

    shape: {"prompt", "generate"} in tokens. All forwards but the prefill's are timed.
    """
    prompt, generate = shape["prompt"], shape["generate"]
    if result["prompt_tokens"] != prompt:
        return f"{result['prompt_tokens']} prompt tokens, not {prompt}"
    if result["generated_tokens"] != generate:
        return f"{result['generated_tokens']} tokens generated, not {generate}"
    if result["finite"] is not True:
        return "NaN or Inf in the logits"
    if result["forwards"] != generate - 1:
        return f"{result['forwards']} forwards timed, not {generate - 1}"
    if len(result["token_s"]) != result["forwards"]:
        return f"{len(result['token_s'])} intervals for {result['forwards']} forwards"
    times = {"prefill_s": result["prefill_s"], "decode_s": result["decode_s"]}
    times |= {f"token_s[{i}]": value for i, value in enumerate(result["token_s"])}
    for name, value in times.items():
        if not (isinstance(value, int | float) and isfinite(value) and value > 0):
            return f"{name} is {value}, not a positive time"
    total = sum(result["token_s"])
    if abs(total - result["decode_s"]) > TOLERANCE * result["decode_s"] + TOLERANCE_S:
        return f"the intervals add up to {total:.4f} s, the decode took {result['decode_s']:.4f} s"
    return None


def flag_changed_tokens(rows: list[dict[str, Any]]) -> None:
    """Mark each valid row whose tokens differ from its arm's first: greedy decoding repeats itself.

    A flagged run stays valid; its ``flags`` say so.
    """
    first: dict[str, str] = {}
    for row in rows:
        if not row["valid"]:
            continue
        expected = first.setdefault(row["arm"], row["tokens_sha256"])
        if row["tokens_sha256"] != expected:
            row["flags"] = [*row.get("flags", []), "other tokens than in the arm's first valid run"]
