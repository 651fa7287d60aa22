"""Teacher-forced logits, by the decode path: a model judged on the same tokens, step by step."""

import os
from pathlib import Path
from typing import Any

import mlx.core as mx

from . import runtime
from .patches import applied
from .state import Refusal, State, check_ids
from .wrap import Changes


def run(
    state: State,
    prompt: list[int],
    continuation: list[int],
    save: str,
    patches: list[str] | tuple[str, ...] = (),
) -> dict[str, Any]:
    """Write float32 logits [len(continuation), vocab] to ``save`` (.npy, whole or not at all).

    Row i predicts continuation[i], after the prompt and continuation[:i]. The runtime's generator
    runs as in decode, with a sampler that always gives the next token of the continuation.
    {"finite": no NaN or +inf, "vocab"}.
    """
    check_ids("prompt", prompt)
    check_ids("continuation", continuation)
    target = Path(save)
    if target.suffix != ".npy":
        raise Refusal("failed", f"save is {save!r}; it must end in .npy")
    rows: list[mx.array] = []
    latest: list[mx.array] = []
    upcoming = iter([*continuation, continuation[-1]])  # one forward more is always in flight

    def sampler(logprobs: mx.array) -> mx.array:
        # Only a step's logits are sampled from; the prefill's chunks pass through keep alone.
        rows.append(latest.pop().astype(mx.float32))
        return mx.array([next(upcoming)])

    def keep(inner):
        def call(module, *args, **kwargs):
            output = inner(module, *args, **kwargs)
            latest[:] = [getattr(output, "logits", output)[:, -1, :]]
            return output

        return call

    with applied(state, patches), Changes() as changes, runtime.wired(state):
        changes.call(state.root, keep)
        generator = runtime.steps(state, prompt, len(continuation), sampler)
        given = [token for token, _ in generator]
        runtime.synchronize(state)
    rows = rows[: len(continuation)]
    if given != continuation or len(rows) != len(continuation):
        raise Refusal("failed", f"{len(rows)} steps for {len(continuation)} tokens were taken")
    logits = mx.concatenate(rows, axis=0)
    partial = target.with_name(f".{target.name}.{os.getpid()}.npy")
    try:
        mx.save(str(partial), logits)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
    return {"finite": runtime.finite(rows), "vocab": logits.shape[-1]}
