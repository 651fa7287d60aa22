"""Exactly which class a module is of. What a fused block reads off a module in place of calling it
is right for that one class: a subclass, an adapter or another wrapper may do anything else.
"""

import sys
from collections.abc import Collection
from typing import Any


class Unsupported(Exception):
    """Why something is left to its own path; the text goes into the report."""


def class_of(module: Any) -> str:
    """As "mlx.nn.layers.linear.Linear"."""
    return dotted(type(module))


def dotted(kind: type) -> str:
    """A class by its module and name."""
    return f"{kind.__module__}.{kind.__qualname__}"


def known(module: Any, classes: Collection[str], what: str) -> str:
    """The module's class, one of these. Raises Unsupported naming it, where it is not that class or
    where something else has put a call over it."""
    name, kind = class_of(module), type(module)
    home = sys.modules.get(kind.__module__)
    if name not in classes:
        raise Unsupported(f"{what} of class {name}")
    if getattr(home, kind.__name__, None) is not kind or _package(kind.__call__) != _package(kind):
        raise Unsupported(f"{what} of class {name} with another call")
    return name


def _package(thing: Any) -> str:
    # A wrapper may have taken over the name of what it wraps, but not where it was written.
    home = getattr(thing, "__globals__", {}).get("__name__") or getattr(thing, "__module__", "")
    return str(home).partition(".")[0]
