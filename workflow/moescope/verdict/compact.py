"""JSON that people can read and git can compare: what fits stands on one line, a Figure always."""

import json
from pathlib import Path
from typing import Any

from ..files import write_text
from .statistics import is_figure

WIDTH = 100


def dumps(value: Any) -> str:
    """The same value gives the same text; keys stay in their order; NaN and Inf are refused."""
    return _lines(value, 0) + "\n"


def write(path: Path, value: Any) -> None:
    write_text(path, dumps(value))


def _flat(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _lines(value: Any, depth: int) -> str:
    if not isinstance(value, dict | list) or not value or is_figure(value):
        return _flat(value)
    if not _has_figure(value):
        flat = _flat(value)
        if len(flat) + depth <= WIDTH:
            return flat
    inner, outer = " " * (depth + 1), " " * depth
    if isinstance(value, dict):
        parts = [f"{_flat(key)}: {_lines(item, depth + 1)}" for key, item in value.items()]
        opening, closing = "{", "}"
    else:
        parts = [_lines(item, depth + 1) for item in value]
        opening, closing = "[", "]"
    return f"{opening}\n{inner}" + f",\n{inner}".join(parts) + f"\n{outer}{closing}"


def _has_figure(value: Any) -> bool:
    if is_figure(value):
        return True
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(_has_figure(item) for item in items)
