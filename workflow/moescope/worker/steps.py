"""Steps of a runtime's own decode loop, seen from outside.

``generate_step`` of mlx-lm and of mlx-vlm builds a step's graph and hands it to ``mx.async_eval``
as (token, logprobs). Standing in that call's place shows each step's real outputs, in the order
that decides the order of execution. Step 0 is the last position of the prompt, step n the n-th
decoded token's forward.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import mlx.core as mx

from .boundaries import arrays_in


@contextmanager
def watched(
    before: Callable[[int, list[mx.array]], None], after: Callable[[int], None]
) -> Iterator[None]:
    """Call ``before(step, outputs)`` before each step is evaluated and ``after(step)`` once MLX
    has taken it (on a GPU: encoded it; the GPU may still be running it)."""
    real, step = mx.async_eval, 0

    def stand_in(*args: object) -> None:
        nonlocal step
        now, step = step, step + 1
        before(now, list(arrays_in(args)))
        real(*args)
        after(now)

    mx.async_eval = stand_in
    try:
        yield
    finally:
        mx.async_eval = real
