"""Where a token's time goes, by evaluating at each module's boundary.

MLX builds a graph and computes it later. Here every array that crosses the boundary of a known
module is evaluated before control passes, so that its time falls to where it was made. One clock
runs through: at each boundary the time since the last one is added to the term in force. Nothing is
scaled: the terms sum to the wall clock, which is taken apart from them, because none is left out.
"""

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from . import runtime
from .decode import digest
from .modules import TERMS, MoeBlock, Survey, survey
from .patches import applied
from .state import Refusal, State, check_ids
from .wrap import Changes

TOP_MODULES = 20


def run(
    state: State,
    prompt: list[int],
    tokens: int,
    passes: int = 1,
    patches: list[str] | tuple[str, ...] = (),
) -> dict[str, Any]:
    """``passes`` times: prefill as usual, then ``tokens`` steps under forced evaluation.

    {"passes": [{"wall_s", "tokens", "terms_s", "modules_s", "tokens_sha256"}]}: terms_s holds every
    term, seconds of the whole window; modules_s the modules with the most time of their own.
    tokens_sha256 is of all ids generated, to be compared with an unforced pass of tokens + 1.

    What evaluation at boundaries costs (a host wait at each) is part of the terms. The sampler's
    term is all that the generator does outside the model's call.
    """
    check_ids("prompt", prompt)
    if type(tokens) is not int or tokens < 1:
        raise Refusal("failed", f"tokens is {tokens!r}; give at least 1")
    if type(passes) is not int or passes < 1:
        raise Refusal("failed", f"passes is {passes!r}; give at least 1")
    sites = survey(state).known()
    with applied(state, patches), Changes() as changes, runtime.wired(state):
        clock = Clock()
        _instrument(state, sites, changes, clock)
        return {"passes": [_one(state, clock, prompt, tokens) for _ in range(passes)]}


def _one(state: State, clock: "Clock", prompt: list[int], tokens: int) -> dict[str, Any]:
    runtime.synchronize(state)
    generator = runtime.steps(state, prompt, tokens + 1)
    ids: list[int] = []
    try:
        ids.append(next(generator)[0])
        runtime.synchronize(state)
        started = time.perf_counter()
        clock.start()
        for _ in range(tokens):
            ids.append(next(generator)[0])
        clock.stop()
        wall = time.perf_counter() - started
    except StopIteration:
        raise Refusal("failed", f"the runtime ended after {len(ids)} tokens") from None
    finally:
        clock.active = False
        generator.close()
        runtime.synchronize(state)
    most = sorted(clock.modules.items(), key=lambda item: -item[1])[:TOP_MODULES]
    return {
        "wall_s": wall,
        "tokens": tokens,
        "terms_s": {term: clock.terms[term] for term in TERMS},
        "modules_s": dict(most),
        "tokens_sha256": digest(ids),
    }


@dataclass
class Scope:
    """A module that is being called. term: in force now; it may change on the way through.

    kind: "block", "switch" or "" for what has one term. frame: the call's own, where the walk
    through the callers' variables ends.
    """

    path: str
    term: str
    kind: str = ""
    frame: Any = None


class Clock:
    """One running clock and the stack of modules that it is in."""

    def __init__(self) -> None:
        self.active = False
        self.stack: list[Scope] = []
        self.terms: dict[str, float] = defaultdict(float)
        self.modules: dict[str, float] = defaultdict(float)
        self._last = 0.0

    def start(self) -> None:
        self.terms.clear()
        self.modules.clear()
        self.stack = [Scope("", "sampler")]
        self.active = True
        self._last = time.perf_counter()

    def stop(self) -> None:
        self._add()
        self.active = False

    def enter(self, scope: Scope) -> None:
        self._add()
        self.stack.append(scope)

    def leave(self) -> None:
        self._add()
        self.stack.pop()

    def become(self, scope: Scope, term: str) -> None:
        """From now on, the scope's own time is another term's."""
        self._add()
        scope.term = term

    def inner(self, kind: str) -> Scope | None:
        """The innermost open scope, if it is of this kind."""
        return self.stack[-1] if self.stack[-1].kind == kind else None

    def _add(self) -> None:
        now = time.perf_counter()
        scope = self.stack[-1]
        self.terms[scope.term] += now - self._last
        self.modules[scope.path] += now - self._last
        self._last = now


def _instrument(state: State, sites: Survey, changes: Changes, clock: Clock) -> None:
    watched: set[int] = set()

    def watch(module: Any, path: str, term: str, kind: str = "", **hooks: Callable) -> None:
        if id(module) not in watched:  # layers may share one activation object
            watched.add(id(module))
            changes.call(module, partial(_watched, clock, path, term, kind, hooks))

    for block in sites.blocks:
        _instrument_block(block, watch)
    for part in (*sites.attention, *sites.beside_attention):
        watch(part.module, part.path, "attention", caches=_caches)
    for part in sites.norms:
        watch(part.module, part.path, "norm")
    for part in sites.other:
        watch(part.module, part.path, "other", caches=_caches)
    if sites.tied:
        wrapper = partial(_watched, clock, sites.head.path, "head", "", {"after": _head_done})
        changes.method(sites.head.module, "as_linear", wrapper)
    else:
        watch(sites.head.module, sites.head.path, "head", after=_head_done)
    watch(state.root, sites.root, "other", "root")


def _instrument_block(block: MoeBlock, watch: Callable) -> None:
    """The block is the router's until its switch is called, and the combine's after it; one fused
    into kernels that hold all three is the expert gather's."""
    watch(block.module, block.path, "expert_gather" if block.fused else "router", "block")
    for part in block.router:
        watch(part.module, part.path, "router")
    for part in (*block.shared, *((block.shared_gate,) if block.shared_gate else ())):
        watch(part.module, part.path, "shared_expert", after=_shared_done)
    watch(block.switch.module, block.switch.path, "expert_gather", "switch", after=_switch_done)
    *before, last = block.projections
    for part in before:
        watch(part.module, part.path, "expert_gather", after=_direct)
    watch(last.module, last.path, "expert_gather", after=_last_projection_done)
    watch(block.activation.module, block.activation.path, "activation")


def _switch_done(clock: Clock) -> None:
    if block := clock.inner("block"):
        clock.become(block, "combine")


def _last_projection_done(clock: Clock) -> None:
    if switch := clock.inner("switch"):
        clock.become(switch, "combine")
    _direct(clock)


def _direct(clock: Clock) -> None:
    """A block that calls the projections itself: what follows is a fused gather, or a combine."""
    if block := clock.inner("block"):
        clock.become(block, "expert_gather")


def _shared_done(clock: Clock) -> None:
    block = clock.inner("block")
    if block and block.term == "expert_gather":
        clock.become(block, "combine")


def _head_done(clock: Clock) -> None:
    """What the model does to its logits belongs to the head."""
    if root := clock.inner("root"):
        clock.become(root, "head")


def _watched(
    clock: Clock, path: str, term: str, kind: str, hooks: dict[str, Callable], inner: Callable
) -> Callable:
    after, caches = hooks.get("after"), hooks.get("caches")

    def call(module, *args, **kwargs):
        if not clock.active:
            return inner(module, *args, **kwargs)
        # What flows in was made by the enclosing module; so was what it has left unevaluated.
        mx.eval(list(_arrays((args, kwargs))), _pending(clock))
        scope = Scope(path, term, kind, sys._getframe())
        clock.enter(scope)
        try:
            output = inner(module, *args, **kwargs)
            mx.eval(list(_arrays(output)), caches(args, kwargs) if caches else [])
        finally:
            scope.frame = None
            clock.leave()
        if after:
            after(clock)
        return output

    return call


def _pending(clock: Clock) -> list[mx.array]:
    """Arrays in the variables of the enclosing block's code: routing weights, for one, which the
    experts' call does not take, would else be computed after it and be called combine."""
    scope = clock.stack[-1]
    if scope.kind != "block":
        return []
    frame = sys._getframe(2)
    found: list[mx.array] = []
    while frame is not None and frame is not scope.frame:
        found += [value for value in frame.f_locals.values() if isinstance(value, mx.array)]
        frame = frame.f_back
    return found


def _arrays(value: Any) -> Iterator[mx.array]:
    """Arrays in what a module takes or gives: nested containers, and the tools' output objects."""
    if isinstance(value, mx.array):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _arrays(item)
    elif isinstance(value, dict) and type(value) is dict:
        yield from _arrays(list(value.values()))
    elif hasattr(type(value), "__dataclass_fields__"):
        yield from _arrays(list(vars(value).values()))


def _caches(args: tuple, kwargs: dict[str, Any]) -> list[mx.array]:
    """What attention has put into its cache and its output may not depend on."""
    found: list[mx.array] = []
    for value in (*args, *kwargs.values()):
        _collect(value, found, 0)
    return found


def _collect(value: Any, found: list[mx.array], depth: int) -> None:
    if isinstance(value, mx.array):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, found, depth)
    elif depth < 4 and "cache" in type(value).__module__.lower() and hasattr(value, "__dict__"):
        for item in vars(value).values():
            _collect(item, found, depth + 1)
