"""Interventions: what an arm changes in a loaded model, by name, taken back afterwards.

A patch that finds nothing to change is refused with kind not_applicable: an arm must not be taken
for something that it is not.
"""

import contextlib
import importlib
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from .modules import MoeBlock, Survey, survey
from .spin import spin
from .state import Refusal, State
from .wrap import Changes

# Imported by name: what is fused is no code of the arms that fuse nothing (study.plan.PATCH_CODE).
KERNELS = "moescope.kernels"
SPIN_S = 0.0003  # time.sleep returns late by about this much; the rest is waited for actively


@contextlib.contextmanager
def applied(state: State, patches: Sequence[str]) -> Iterator[None]:
    """The model with these patches, each "name" or "name=value", in this order.

    Restored on leaving, and when a patch is refused after others took effect. Refusal kinds:
    unsupported (no such patch, or a value it cannot take), not_applicable.
    """
    state.loaded()
    with Changes() as changes:
        for text in patches:
            name, _, value = str(text).partition("=")
            if name not in PATCHES:
                raise Refusal(
                    "unsupported", f"there is no patch {text!r}; known: {', '.join(PATCHES)}"
                )
            pattern, apply = PATCHES[name]
            match = re.fullmatch(pattern, value)
            if match is None:
                raise Refusal("unsupported", f"{text!r}: the value has to look like {pattern}")
            sites = survey(state).known()
            apply(state, sites, changes, *(float(number) for number in match.groups()))
        yield


class Constants:
    """Arrays that are made once and evaluated, so that a step only refers to them."""

    def __init__(self) -> None:
        self._made: dict[tuple, mx.array] = {}

    def full(self, shape: Sequence[int], dtype: mx.Dtype, value: float = 0.0) -> mx.array:
        """An array of one value."""
        return self._get(("full", tuple(shape), dtype, value), lambda: mx.full(shape, value, dtype))

    def first(self, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
        """0, 1, 2, ... along the last axis."""
        return self._get(
            ("first", tuple(shape), dtype),
            lambda: mx.contiguous(mx.broadcast_to(mx.arange(shape[-1], dtype=dtype), shape)),
        )

    def _get(self, key: tuple, make: Callable[[], mx.array]) -> mx.array:
        if key not in self._made:
            self._made[key] = make()
            mx.eval(self._made[key])
        return self._made[key]


def _after(x: mx.array, made: mx.array) -> mx.array:
    """The same as ``made``, once x is there. MLX computes only what something needs: what comes
    before a skipped part, a norm, would go with it, and the part would seem to cost more."""
    return mx.depends([made], [x])[0]


def _blocks(sites: Survey) -> tuple[MoeBlock, ...]:
    if not sites.blocks:
        raise Refusal("not_applicable", "the model has no experts")
    return sites.blocks


def _skip_experts(state: State, sites: Survey, changes: Changes) -> None:
    """Routed experts give zeros; routing and combining stay."""
    constants = Constants()

    def make(width: int, inner: Callable) -> Callable:
        def call(switch, x, indices, weights=None, shared=None, residual=None):
            routed = _after(x, constants.full((*indices.shape, width), x.dtype))
            if weights is None and shared is None and residual is None:
                return routed
            return switch._combine(routed, weights, shared, residual)

        return call

    for block in _blocks(sites):
        width = block.projections[-1].module.output_dims
        changes.call(block.switch.module, partial(make, width))
        if hasattr(block.switch.module, "scales_trivial"):
            # inkling on Metal would reach past the switch to a fused kernel
            changes.method(block.switch.module, "scales_trivial", lambda _: lambda _: False)


def _skip_router(state: State, sites: Survey, changes: Changes) -> None:
    """Each token goes to experts 0 .. top_k-1 with equal weights; nothing decides that."""
    constants = Constants()
    for block in _blocks(sites):
        if block.routing == "module":
            changes.call(block.router[0].module, partial(_fixed_routing, constants, {}))
        elif block.routing == "method":
            changes.method(block.module, "_route", partial(_fixed_routing, constants, {}))
        else:
            changes.call(block.module, partial(_fixed_block, constants, block))


def _fixed_routing(constants: Constants, known: dict, inner: Callable) -> Callable:
    """The router's outputs as constants. Their shapes and types are read off a graph that it
    builds once for each input shape and that is never evaluated."""

    def call(router, x, *args):
        if x.shape not in known:
            indices, *weights = inner(router, x, *args)
            share = 1.0 / indices.shape[-1]
            known[x.shape] = (
                constants.first(indices.shape, indices.dtype),
                *(constants.full(w.shape, w.dtype, share) for w in weights),
            )
        return known[x.shape]

    return call


def _fixed_block(constants: Constants, block: MoeBlock, inner: Callable) -> Callable:
    """A block that works its routing out inline, written again without that part."""

    def call(module, x):
        shape = (*x.shape[:-1], block.top_k)
        weights = constants.full(shape, x.dtype, 1.0 / block.top_k)
        routed = block.switch.module(x, constants.first(shape, mx.uint32))
        y = (routed * weights[..., None]).sum(axis=-2)
        for part in block.shared:
            shared = part.module(x)
            if block.shared_gate is not None:
                shared = mx.sigmoid(block.shared_gate.module(x)) * shared
            y = y + shared
        return y

    return call


def _skip_moe(state: State, sites: Survey, changes: Changes) -> None:
    """The whole block gives zeros: router, experts, combine and the shared experts inside it."""
    constants = Constants()

    def make(switch: Any, inner: Callable) -> Callable:
        def call(module, x, *args, residual=None, **kwargs):
            y = _after(x, constants.full(x.shape, x.dtype))
            return y if residual is None else switch._combine(y, None, None, residual)

        return call

    for block in _blocks(sites):
        changes.call(block.module, partial(make, block.switch.module))
        for router in block.router:
            if not router.path.startswith(f"{block.path}."):
                changes.call(router.module, lambda _: lambda *_: (None, None))


def _skip_attention(state: State, sites: Survey, changes: Changes) -> None:
    """Attention gives zeros in steps of one token and leaves its cache alone; the prefill of the
    prompt before its last token stays, as the caches have to hold something."""
    constants = Constants()

    def make(seen: list[Any], inner: Callable) -> Callable:
        def call(module, x, *args, **kwargs):
            if x.shape[1] > 1 or not seen:
                output = inner(module, x, *args, **kwargs)
                seen[:] = [len(output) - 1 if isinstance(output, tuple) else None]
                return output
            zeros = _after(x, constants.full(x.shape, x.dtype))
            return zeros if seen[0] is None else (zeros, *(None,) * seen[0])

        return call

    if not sites.attention:
        raise Refusal("not_applicable", "the model has no attention that modules.json knows")
    for part in sites.attention:
        changes.call(part.module, partial(make, []))


def _top_k(state: State, sites: Survey, changes: Changes, wanted: float) -> None:
    """Send each token to this many experts."""
    blocks = _blocks(sites)
    k = int(wanted)
    for block in blocks:
        limit = block.experts if block.lookup is None else block.top_k
        if not 1 <= k <= limit:
            raise Refusal("not_applicable", f"top_k={k}: {block.path} allows 1 to {limit}")
    if all(block.top_k == k for block in blocks):
        raise Refusal("not_applicable", f"top_k is {k} already")
    for block in blocks:
        changes.attribute(block.holder, block.attribute, k)
        if block.lookup is not None:
            table = mx.contiguous(block.lookup[:, :k])
            mx.eval(table)
            changes.attribute(block.router[0].module, "tid2eid", table)


def _split_gather(state: State, sites: Survey, changes: Changes, wanted: float) -> None:
    """Gather at most this many experts a call, in steps of one token."""
    rows = int(wanted)
    blocks = [block for block in _blocks(sites) if block.top_k > rows]
    if rows < 1 or not blocks:
        raise Refusal("not_applicable", f"split_gather={rows}: top_k has to be larger, rows >= 1")

    def make(k: int, inner: Callable) -> Callable:
        def call(projection, x, indices, *args, **kwargs):
            if indices.ndim < 2 or indices.size != k:
                return inner(projection, x, indices, *args, **kwargs)
            parts = []
            for start in range(0, k, rows):
                part = slice(start, start + rows)
                piece = x if x.shape[-3] == 1 else x[..., part, :, :]
                parts.append(inner(projection, piece, indices[..., part], *args, **kwargs))
            return mx.concatenate(parts, axis=-3)

        return call

    for block in blocks:
        for part in block.projections:
            changes.call(part.module, partial(make, block.top_k))


def _fused(state: State, sites: Survey, changes: Changes, backend: str | None = None) -> None:
    """Single tokens take the fused kernels where these run and win; what was left goes to the log
    with its reason, and a model without one fused block is refused with the first of them."""
    kernels = importlib.import_module(KERNELS)
    _blocks(sites)
    model = state.loaded()
    report = kernels.fuse(model, backend)
    changes.undo(lambda: kernels.unfuse(model))
    print(report, file=sys.stderr)
    if not report.fused:
        why = report.left[0][1] if report.left else "no block of experts that it knows"
        raise Refusal("not_applicable", f"nothing is fused: {why}")


def _delay(places: Callable[[State, Survey], list[Any]]) -> Callable:
    def apply(state: State, sites: Survey, changes: Changes, milliseconds: float) -> None:
        found = places(state, sites)
        if not found:
            raise Refusal("not_applicable", "the model has no such part")
        for module in found:
            changes.call(module, partial(_late, milliseconds / 1000))

    return apply


def _late(seconds: float, inner: Callable) -> Callable:
    def call(module, *args, **kwargs):
        # What is in flight is waited for, else the delay would hide behind it.
        mx.synchronize()
        wait(seconds)
        return inner(module, *args, **kwargs)

    return call


def _spin(places: Callable[[State, Survey], list[Any]]) -> Callable:
    def apply(state: State, sites: Survey, changes: Changes, microseconds: float) -> None:
        found = places(state, sites)
        if not found:
            raise Refusal("not_applicable", "the model has no such part")
        for module in found:
            changes.call(module, partial(_held, microseconds))

    return apply


def _held(microseconds: float, inner: Callable) -> Callable:
    def call(module, x, *args, **kwargs):
        return inner(module, spin(x, microseconds), *args, **kwargs)

    return call


def wait(seconds: float) -> None:
    """Keep the host for this long, to some microseconds."""
    end = time.perf_counter() + seconds
    if seconds > SPIN_S:
        time.sleep(seconds - SPIN_S)
    while time.perf_counter() < end:
        pass


def _routers(state: State, sites: Survey) -> list[Any]:
    """Where the router's term begins: its module, or the entry of the block that routes inline."""
    return [
        block.router[0].module if block.routing == "module" else block.module
        for block in sites.blocks
    ]


def _gathers(state: State, sites: Survey) -> list[Any]:
    return [block.projections[0].module for block in sites.blocks]


def _attentions(state: State, sites: Survey) -> list[Any]:
    return [part.module for part in sites.attention]


NONE, COUNT = "", r"(\d+)"
TIME, SHORT = r"(\d+(?:\.\d+)?)ms", r"(\d+(?:\.\d+)?)us"
PATCHES: dict[str, tuple[str, Callable]] = {
    "skip_experts": (NONE, _skip_experts),
    "skip_router": (NONE, _skip_router),
    "skip_moe": (NONE, _skip_moe),
    "skip_attention": (NONE, _skip_attention),
    "top_k": (COUNT, _top_k),
    "split_gather": (COUNT, _split_gather),
    # moescope.kernels; _reference: its float32 reference in the kernels' place, on any device.
    "fused": (NONE, _fused),
    "fused_reference": (NONE, partial(_fused, backend="reference")),
    # A delay at each call of the part (once a layer); of delay_step, at each step.
    "delay_router": (TIME, _delay(_routers)),
    "delay_expert_gather": (TIME, _delay(_gathers)),
    "delay_attention": (TIME, _delay(_attentions)),
    "delay_step": (TIME, _delay(lambda state, sites: [state.root])),
    # On a CUDA GPU: a kernel that lasts this long, at each call of the part.
    "spin_router": (SHORT, _spin(_routers)),
    "spin_expert_gather": (SHORT, _spin(_gathers)),
    "spin_attention": (SHORT, _spin(_attentions)),
}
