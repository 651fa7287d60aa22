"""The blocks of a model that kernels exist for, and whether what they are handed fits."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from .classes import Unsupported, class_of, dotted, known
from .common import dynamic_names
from .families import BLOCKS, SWITCHES, Site, gemma4
from .spec import Spec
from .weights import type_name


def sites(model: Any, dtype: Any) -> tuple[list[Site], list[tuple[str, str]]]:
    """Every block that kernels exist for, and what is left with its reason, in layer order."""
    found: list[Site] = []
    left: list[tuple[str, str]] = []
    owned: set[str] = set()
    seen: set[int] = set()
    modules = dict(model.named_modules())
    for path, module in sorted(modules.items(), key=lambda item: _natural(item[0])):
        if id(module) in seen:  # a layer in two places
            continue
        seen.add(id(module))
        kind = next((k for k in map(dotted, type(module).__mro__) if k in BLOCKS), "")
        if not kind or (BLOCKS[kind] is gemma4 and "router" not in module):
            if _is_switch(module) and not path.startswith(tuple(owned)):
                parent = path.rpartition(".")[0]
                holder = modules.get(parent, module)  # a list is none
                left.append((parent, f"no recogniser for class {class_of(holder)}"))
            continue
        owned.add(f"{path}." if path else "")
        try:
            if dtype is None:
                raise Unsupported("activations are neither bfloat16 nor float16")
            known(module, BLOCKS, "a block")
            site = BLOCKS[kind](path, module, dtype)
            _agree(site, dtype)
            found.append(site)
        except Unsupported as reason:
            left.append((path, str(reason)))
        except (AttributeError, KeyError, TypeError, ValueError) as missing:
            left.append((path, f"not the block of mlx-lm 0.32.2 or mlx-vlm 0.7.10: {missing}"))
    return found, left


def _is_switch(module: Any) -> bool:
    return not {*map(dotted, type(module).__mro__)}.isdisjoint(SWITCHES)


def _agree(site: Site, dtype: Any) -> None:
    """Raise Unsupported where the kernels would be given another type or size than they read, or
    where the block's own path ends in another type. Both are seen on graphs that nothing runs."""
    module = site.module
    x = mx.zeros((1, 1, site.hidden or site.spec.hidden), dtype)

    def run(shape: tuple[int, ...], *dynamic: Any) -> Any:
        for name, array in zip(dynamic_names(site.spec), dynamic, strict=True):
            what, size = _READ[name](site.spec)
            if array.dtype != dtype and name not in _ANY_TYPE:
                raise Unsupported(
                    f"{type_name(array.dtype)} {what} with {type_name(dtype)} activations"
                )
            if array.size != size:
                raise Unsupported(f"{array.size} {what} where {size} are read")
        return mx.zeros(shape, dtype)

    try:
        rest = site.rest(x)
        own = x if site.rounds else type(module).__call__(module, x, *rest)
        if site.companion:
            companion, call = site.companion
            rest = call(companion, x)
        fused = site.enter(run)(module, x, *rest)
    except (TypeError, ValueError, RuntimeError) as error:
        raise Unsupported(f"it takes no token: {error}") from error
    if fused.dtype != own.dtype:
        raise Unsupported(
            f"its own path gives {type_name(own.dtype)} for {type_name(dtype)} activations"
        )
    if fused.shape != own.shape:
        raise Unsupported(f"its own path gives {own.size} numbers where {fused.size} are written")


_ANY_TYPE = ("picks", "pick_weights", "token")
# What the kernels read at each call: its name, and how many numbers.
_READ: dict[str, Callable[[Spec], tuple[str, int]]] = {
    "x": lambda spec: ("experts' input", spec.hidden),
    "logits": lambda spec: ("router logits", spec.router.logits),
    "picks": lambda spec: ("chosen experts", spec.router.top_k),
    "pick_weights": lambda spec: ("chosen experts' weights", spec.router.top_k),
    "token": lambda spec: ("token ids", 1),
    "shared_logit": lambda spec: ("shared expert's gate", 1),
}


def _natural(path: str) -> list[tuple[int, int, str]]:
    return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in path.split(".")]


def activations(model: Any) -> Any:
    """The activations' type: what most norm weights are in; None if there are none."""
    count: dict[Any, int] = {}
    for _, module in model.named_modules():
        if "norm" in type(module).__name__.lower() and "weight" in module:
            kind = module["weight"].dtype
            count[kind] = count.get(kind, 0) + 1
    return max(count, key=count.__getitem__, default=None)
