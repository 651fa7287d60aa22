"""The two runtimes behind one face: their own loaders and their own token generators."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx

from .state import State


def steps(
    state: State, prompt: list[int], count: int, sampler: Callable | None = None
) -> Iterator[tuple[int, mx.array]]:
    """The runtime's own generate_step: ``count`` greedy tokens, each with its log probabilities.

    When it yields token i it has already dispatched the forward of token i+1, so one forward is in
    flight after the last. No tokenizer takes part and the end-of-sequence token is not looked at.
    """
    if state.package == "mlx-lm":
        from mlx_lm.generate import generate_step

        return generate_step(mx.array(prompt), state.model, max_tokens=count, sampler=sampler)
    from mlx_vlm.generate import generate_step

    return generate_step(
        mx.array(prompt)[None],
        state.model,
        None,
        None,
        max_tokens=count,
        temperature=0.0,
        sampler=sampler,
    )


def _generation_stream(state: State) -> Any:
    if state.package == "mlx-lm":
        from mlx_lm.generate import generation_stream
    else:
        from mlx_vlm.generate import generation_stream
    return generation_stream


def synchronize(state: State) -> None:
    """Wait for everything dispatched, on the runtime's stream and on the default one."""
    mx.synchronize(_generation_stream(state))
    mx.synchronize()


@contextlib.contextmanager
def wired(state: State) -> Iterator[None]:
    """On Metal, weights are kept resident as the runtimes do it; elsewhere nothing happens."""
    if not mx.metal.is_available():
        yield
        return
    if state.package == "mlx-lm":
        from mlx_lm.generate import wired_limit
    else:
        from mlx_vlm.generate import wired_limit
    with wired_limit(state.model, [_generation_stream(state)]):
        yield


def finite(logits: list[mx.array]) -> bool:
    """No NaN and no +inf anywhere; -inf is how models mask parts of the vocabulary."""
    bad = [mx.any(mx.isnan(x) | (x == mx.inf)) | ~mx.any(mx.isfinite(x)) for x in logits]
    return not mx.any(mx.stack(bad)).item()
