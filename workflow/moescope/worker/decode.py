"""One measured pass: the runtime's own generator, its yields timed."""

import contextlib
import gc
import hashlib
import itertools
import json
import time
from typing import Any, Self

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


class Pass:
    """A pass over one prompt that can be paused between tokens, as a context manager.

    The patches are applied from entering to leaving. ``begin`` gives the first token, ``advance``
    more of them; a pause before ``advance`` costs an interval, see there.
    """

    def __init__(
        self, state: State, prompt: list[int], tokens: int, patches: list[str] | tuple[str, ...]
    ):
        check_ids("prompt", prompt)
        if type(tokens) is not int or tokens < 2:
            raise Refusal(
                "failed", f"tokens is {tokens!r}; give at least 2: the first is the prefill's"
            )
        self.state, self.prompt, self.tokens, self.patches = state, prompt, tokens, patches
        self.ids: list[int] = []
        self._clock = BuildClock()
        self._kept: list[mx.array] = []
        self._token_s: list[float] = []
        self._prefill_s = self._build_s = self._cpu_s = 0.0
        self._peak = 0
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(applied(self.state, self.patches))
            stack.enter_context(Changes()).call(self.state.root, self._clock.watch)
            stack.enter_context(runtime.wired(self.state))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def begin(self) -> None:
        """The prefill, from a silent device to the first token in hand."""
        gc.collect()
        runtime.synchronize(self.state)
        mx.reset_peak_memory()
        started = time.perf_counter()
        self._generator = runtime.steps(self.state, self.prompt, self.tokens)
        self._stack.callback(self._generator.close)
        self._moment = self._next(1)[-1]
        self._prefill_s = self._moment - started

    def advance(self, count: int, paused: bool = False) -> None:
        """The next ``count`` tokens; the intervals between their yields are timed.

        paused: the step in flight has ended meanwhile, so the first interval, which would wait for
        it, is not timed; from the second on the pipeline runs as without a pause.
        """
        if paused:
            if count < 2:
                raise Refusal("failed", f"{count} tokens after a pause leave no interval to time")
            self._moment = self._next(1)[-1]
            count -= 1
        built, cpu = self._clock.seconds, time.process_time()
        moments = [self._moment, *self._next(count)]
        self._cpu_s += time.process_time() - cpu
        self._build_s += self._clock.seconds - built
        self._token_s += [after - before for before, after in itertools.pairwise(moments)]
        self._moment = moments[-1]

    def pause(self) -> None:
        """Wait for the step in flight, so that it disturbs nobody."""
        runtime.synchronize(self.state)

    def end(self) -> dict[str, Any]:
        """What was counted and timed, as ``run`` returns it."""
        self._generator.close()
        runtime.synchronize(self.state)
        peak, finite = mx.get_peak_memory(), runtime.finite(self._kept)
        decode_s, forwards = sum(self._token_s), len(self._token_s)
        return {
            "prompt_tokens": len(self.prompt),
            "generated_tokens": len(self.ids),
            "prefill_s": self._prefill_s,
            "decode_s": decode_s,
            "forwards": forwards,
            "token_s": self._token_s,
            "build_s": self._build_s,
            "cpu_s": self._cpu_s,
            "tokens": self.ids,
            "tokens_sha256": digest(self.ids),
            "finite": finite,
            "peak_memory": peak,
            "tool_rate": len(self.ids) / decode_s * forwards / (len(self.ids) - 1),
        }

    def _next(self, count: int) -> list[float]:
        """The moments at which the next ``count`` tokens came."""
        moments: list[float] = []
        ids, kept, tokens = self.ids, self._kept, self.tokens
        for token, logprobs in self._generator:
            moments.append(time.perf_counter())
            ids.append(token)
            if len(ids) in (1, tokens // 2, tokens):
                kept.append(logprobs)
            if len(moments) == count:
                break
        if len(moments) < count:
            raise Refusal("failed", f"the runtime ended after {len(ids)} tokens")
        return moments


def run(
    state: State, prompt: list[int], tokens: int, patches: list[str] | tuple[str, ...] = ()
) -> dict[str, Any]:
    """Decode ``tokens`` tokens greedily after ``prompt``; at least 2, so that one is timed.

    prefill_s: from a silent device to the first token in hand. token_s: the intervals between
    the yields, one for each forward timed (tokens - 1); decode_s is their sum. build_s: the part of
    decode_s in which the host built the graphs of as many forwards (each of the token after, as the
    runtimes build one ahead). cpu_s: processor seconds, user and system, of all threads of this
    process over the same intervals. The forward in flight after the last token is waited for
    outside. finite: no NaN or +inf in the first, the middle and the last token's log probabilities
    (a NaN in between stays in the attention's cache). tool_rate: tokens/s as the tools print it,
    all tokens over the intervals between them.
    """
    with Pass(state, prompt, tokens, patches) as one:
        one.begin()
        one.advance(tokens - 1)
        return one.end()


def digest(ids: list[int]) -> str:
    """sha256 of the ids as compact JSON."""
    return hashlib.sha256(json.dumps(ids, separators=(",", ":")).encode()).hexdigest()
