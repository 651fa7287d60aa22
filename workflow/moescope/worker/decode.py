"""One measured pass: the runtime's own generator, its yields timed."""

import gc
import hashlib
import itertools
import json
import time
from typing import Any

import mlx.core as mx

from . import runtime
from .patches import applied
from .state import Refusal, State, check_ids
from .wrap import Changes


class BuildClock:
    """Host seconds spent inside the model's call: there the graph is built, nothing is computed."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, function: Any) -> Any:
        def call(module, *args, **kwargs):
            start = time.perf_counter()
            try:
                return function(module, *args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        return call


def run(
    state: State, prompt: list[int], tokens: int, patches: list[str] | tuple[str, ...] = ()
) -> dict[str, Any]:
    """Decode ``tokens`` tokens greedily after ``prompt``; at least 2, so that one is timed.

    prefill_s: from a silent device to the first token in hand. token_s: the intervals between
    the yields, one for each forward timed (tokens - 1); decode_s is their sum. build_s: the part of
    decode_s in which the host built the graphs of as many forwards (each of the token after, as the
    runtimes build one ahead). The forward in flight after the last token is waited for outside.
    finite: no NaN or +inf in the first, the middle and the last token's log probabilities (a NaN
    in between stays in the attention's cache). tool_rate: tokens/s as the tools print it, all
    tokens over the intervals between them.
    """
    check_ids("prompt", prompt)
    if type(tokens) is not int or tokens < 2:
        raise Refusal(
            "failed", f"tokens is {tokens!r}; give at least 2: the first is the prefill's"
        )
    clock = BuildClock()
    moments: list[float] = []
    ids: list[int] = []
    kept: list[mx.array] = []
    with applied(state, patches), Changes() as changes, runtime.wired(state):
        changes.call(state.root, clock.watch)
        gc.collect()
        runtime.synchronize(state)
        mx.reset_peak_memory()
        started = time.perf_counter()
        generator = runtime.steps(state, prompt, tokens)
        built = 0.0
        for token, logprobs in generator:
            moments.append(time.perf_counter())
            ids.append(token)
            if len(ids) == 1:
                built = clock.seconds
            if len(ids) in (1, tokens // 2, tokens):
                kept.append(logprobs)
            if len(ids) == tokens:
                break
        built = clock.seconds - built
        generator.close()
        runtime.synchronize(state)
        peak = mx.get_peak_memory()
        finite = runtime.finite(kept)
    if len(ids) < 2:
        raise Refusal("failed", f"the runtime ended after {len(ids)} tokens")
    decode_s = moments[-1] - moments[0]
    return {
        "prompt_tokens": len(prompt),
        "generated_tokens": len(ids),
        "prefill_s": moments[0] - started,
        "decode_s": decode_s,
        "forwards": len(ids) - 1,
        "token_s": [after - before for before, after in itertools.pairwise(moments)],
        "build_s": built,
        "tokens": ids,
        "tokens_sha256": digest(ids),
        "finite": finite,
        "peak_memory": peak,
        "tool_rate": len(ids) / decode_s,
    }


def digest(ids: list[int]) -> str:
    """sha256 of the ids as compact JSON."""
    return hashlib.sha256(json.dumps(ids, separators=(",", ":")).encode()).hexdigest()
