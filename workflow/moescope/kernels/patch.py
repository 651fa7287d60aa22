"""Fusing a loaded model in place, and taking it back.

A block's call is replaced by giving that one object a subclass of its own class: parameters, paths
and ``isinstance`` stay as they are. The subclass runs the kernels for a single token and calls the
block's own path for everything else (prefill, batches, other types). There is one subclass of each
class; what an object runs is an attribute of that object, so that it goes when the object goes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import mlx.core as mx

from moescope.errors import UserError

from . import cuda, device, gate, metal, parity, reference
from .classes import Unsupported
from .families import Site
from .flags import only
from .layout import VARIABLE as GEOMETRY
from .layout import Geometry, check_cores, geometry
from .sites import activations, sites
from .spec import Spec, Tensors

MARK = "__moescope_fused__"
CALL = "__moescope_call__"
VARIABLES = (gate.MODE, gate.WIDTH, cuda.LAUNCHES, GEOMETRY, parity.VARIABLE, cuda.INLINE)


@dataclass(frozen=True)
class Fused:
    """One fused block. left: parts of it that keep their own path, with the reason."""

    path: str
    spec: Spec
    left: tuple[str, ...] = ()


@dataclass
class Report:
    """What ``fuse`` did. left: (path, reason) of every block that keeps its own path."""

    device: str
    fused: list[Fused] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)
    crossover: str = ""

    def __str__(self) -> str:
        lines = [f"{len(self.fused)} blocks fused, {len(self.left)} left, on {self.device}"]
        shapes: dict[str, list[str]] = {}
        for block in self.fused:
            shapes.setdefault(block.spec.label, []).append(block.path)
        for label, paths in shapes.items():
            lines.append(f"  fused: {label}: {paths[0]} and {len(paths) - 1} more")
        apart = {text for block in self.fused for text in block.left}
        lines += [f"  beside it: {text}" for text in sorted(apart)]
        reasons: dict[str, list[str]] = {}
        for path, reason in self.left:
            reasons.setdefault(reason, []).append(path)
        for reason, paths in reasons.items():
            lines.append(f"  left: {reason}: {paths[0]} and {len(paths) - 1} more")
        if self.crossover:
            lines.append(f"  crossover: {self.crossover}")
        return "\n".join(lines)


def _reference(spec: Spec, tensors: Tensors, *_: Any) -> Callable[..., Any]:
    kind = getattr(mx, spec.dtype)

    def run(shape: tuple[int, ...], x: Any, *dynamic: Any) -> Any:
        rest = list(dynamic)
        given: dict[str, Any] = {}
        if spec.router.select == "given":
            given["picks"] = (rest.pop(0), rest.pop(0))
        else:
            given["logits"] = rest.pop(0)
        if spec.router.select == "table":
            given["token"] = rest.pop(0)
        if rest:
            given["shared_logit"] = rest.pop(0)
        return reference.block(spec, tensors, x, **given).astype(kind).reshape(shape)

    return run


BUILDERS = {"cuda": cuda.build, "metal": metal.build, "reference": _reference}


def fuse(model: Any, backend: str | None = None) -> Report:
    """Fuse every MoE block of an mlx-lm or mlx-vlm model that fits; returns what was done and why.

    backend: None for the device's own kernels; "reference" runs the float32 reference in their
    place (slow; for tests without a GPU). Weights are taken as they are now: fuse again after
    changing them. A model that is fused already is fused anew. Raises UserError on a malformed
    environment variable or an unknown backend; whatever is raised, the model is as it was.
    """
    if backend not in (None, "reference"):
        raise UserError(f"backend {backend!r} is not known; leave it out, or give 'reference'")
    here = device.current()
    chosen = settings(here)
    lifted = _lift(model)
    try:
        report, calls = _plan(model, backend, here, chosen)
    except BaseException:
        for module, kind, call in lifted:
            _put(module, kind, call)
        raise
    for module, call in calls:
        _put(module, _fused_class(type(module)), call)
    return report


def settings(here: device.Device | None) -> Geometry:
    """The geometry that the environment asks for. Raises UserError where any of the variables is
    malformed or unknown, whether this model and device would ask it or not."""
    only(VARIABLES)
    for asked in (gate.mode, gate.width_limit, cuda.launches, cuda.inline, parity.wanted):
        asked()
    chosen = geometry()
    if here:
        check_cores(chosen, here)
    return chosen


def _plan(
    model: Any, backend: str | None, here: device.Device | None, chosen: Geometry
) -> tuple[Report, list[tuple[Any, "OneToken"]]]:
    """What is fused and what is left; each fused module's call. Changes nothing."""
    language = backend or (here.language if here else "")
    report = Report(f"{here.name or here.language}" if here else "CPU")
    kind = activations(model)
    if language != "reference" and kind and kind not in (mx.bfloat16, mx.float16):
        kind = None
    found, report.left = sites(model, kind)
    if here and backend is None:
        known = gate.crossover(here, mx.__version__)
        report.crossover = f"{known.max_width} ({known.kind}: {known.source})"
    calls: list[tuple[Any, OneToken]] = []
    for site in found:
        try:
            run = _build(site, language, here, chosen)
        except Unsupported as reason:
            report.left.append((site.path, str(reason)))
            continue
        calls += _calls(site, run)
        report.fused.append(Fused(site.path, site.spec, tuple(site.left)))
    return report, calls


def _build(
    site: Site, language: str, here: device.Device | None, chosen: Geometry
) -> Callable[..., Any]:
    if language == "reference":
        if gate.mode() == "off":
            raise Unsupported(f"{gate.MODE}=off")
    elif here is None:
        raise Unsupported("no CUDA or Metal device")
    else:
        reason = gate.declined(site.spec, here, mx.__version__)
        if reason:
            raise Unsupported(reason)
    return BUILDERS[language](site.spec, site.tensors, chosen, here)


class OneToken:
    """What stands in for one object's call where x is one token, ``size`` numbers of this type;
    otherwise ``plain`` does, if it has one. Both are called with the object first."""

    __slots__ = ("enter", "kind", "plain", "size")

    def __init__(self, size: int, kind: Any, enter: Callable, plain: Callable | None = None):
        self.size, self.kind, self.enter, self.plain = size, kind, enter, plain


def _calls(site: Site, run: Callable[..., Any]) -> list[tuple[Any, OneToken]]:
    """The calls of the site's module and of its companion."""
    size, kind, made = site.hidden or site.spec.hidden, getattr(mx, site.spec.dtype), site.tensors
    factors = [p.factor for p in (made.gate, made.up, made.down) if p]
    # All that is made here: a thread runs no array that another has only put into a graph.
    mx.eval(site.held, made.small, factors)
    enter = site.enter(run)
    if parity.wanted():
        own = site.plain or type(site.module).__call__
        enter = parity.probe.watch(site.path, enter, own)
    calls = [(site.module, OneToken(size, kind, enter, site.plain))]
    if site.companion:
        companion, call = site.companion
        calls.append((companion, OneToken(size, kind, call)))
    return calls


@cache
def _fused_class(before: type) -> type:
    def call(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        one = getattr(self, CALL)
        if x.size == one.size and x.dtype == one.kind:
            return one.enter(self, x, *args, **kwargs)
        if one.plain is not None:
            return one.plain(self, x, *args, **kwargs)
        return before.__call__(self, x, *args, **kwargs)

    def reduce(self: Any, protocol: Any) -> tuple:
        # A copy has arrays of its own, which no kernel knows: it is of the class before.
        if type(self) is not kind:
            raise UserError("another change lies over a fused call; take it back before copying")
        _, _, state, *items = before.__reduce_ex__(self, protocol)
        state = {name: value for name, value in state.items() if name != CALL}
        return before.__new__, (before,), state, *items

    fields = {
        "__call__": call,
        "__reduce_ex__": reduce,
        "__module__": before.__module__,
        "__qualname__": before.__qualname__,
        "__doc__": before.__doc__,
        MARK: before,
    }
    kind = type(before.__name__, (before,), fields)
    return kind


def _put(module: Any, kind: type, call: OneToken) -> None:
    object.__setattr__(module, CALL, call)
    object.__setattr__(module, "__class__", kind)


def unfuse(model: Any) -> int:
    """Give every fused module its own class back; returns how many there were.

    Raises UserError if something else has been put over a fused module since: take that off first.
    """
    return len(_lift(model))


def _lift(model: Any) -> list[tuple[Any, type, OneToken]]:
    """Unfuse; the modules, with what makes them fused again."""
    found: dict[int, tuple[Any, type, OneToken]] = {}
    for path, module in model.named_modules():
        kind = type(module)
        if MARK in vars(kind):
            found[id(module)] = module, kind, getattr(module, CALL)
        elif getattr(kind, MARK, None) is not None:
            raise UserError("another change lies over the fused call; take it back first", path)
    for module, kind, _ in found.values():
        object.__setattr__(module, "__class__", vars(kind)[MARK])
        object.__delattr__(module, CALL)
    return list(found.values())
