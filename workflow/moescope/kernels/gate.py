"""Whether a block is to be fused: by the measured crossover, unless an environment variable says.

``MOESCOPE_FUSED``: "on" (the default: where it wins), "off", "force" (wherever it can run).
``MOESCOPE_FUSED_MAX_WIDTH``: the widest expert to fuse, in place of the measured crossover.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from moescope.errors import UserError

from .device import Device
from .spec import Spec

TABLE = Path(__file__).parent / "crossover.json"
SCHEMA = "moescope/crossover/1"
MODE = "MOESCOPE_FUSED"
WIDTH = "MOESCOPE_FUSED_MAX_WIDTH"


@dataclass(frozen=True)
class Crossover:
    """The widest expert that is fused, and where that number comes from.

    kind: "measured" on this device and MLX; "carried" from another pin, device or document.
    """

    max_width: int
    kind: str
    source: str


def mode() -> str:
    """on, off or force. Raises UserError naming the variable."""
    value = os.environ.get(MODE, "on").lower()
    if value not in ("on", "off", "force"):
        raise UserError(f'"{value}" is not allowed; write on, off or force', MODE)
    return value


def width_limit() -> int | None:
    """``MOESCOPE_FUSED_MAX_WIDTH`` if it is set. Raises UserError if it is no number."""
    value = os.environ.get(WIDTH, "")
    if not value:
        return None
    if not value.isdecimal():
        raise UserError(f'"{value}" is not allowed; write an expert width, as 8192', WIDTH)
    return int(value)


def crossover(device: Device, mlx: str, table: Path = TABLE) -> Crossover:
    """The entry for this device and MLX; failing that the nearest one, marked as carried."""
    data = json.loads(table.read_text(encoding="utf-8"))
    if data.get("schema") != SCHEMA:
        raise UserError(f"schema {data.get('schema')!r}, expected {SCHEMA}", table.name)
    entries = [e for e in data["entries"] if e["language"] == device.language]

    def near(entry: dict) -> tuple[bool, bool, str]:
        return entry["device"] == device.name, entry["mlx"] == mlx, entry["mlx"]

    best = max(entries, key=near)
    same = best["device"] == device.name and best["mlx"] == mlx
    kind = best["about"]["kind"] if same else "carried"
    source = best["about"]["source"]
    if not same:
        source += f" (for {best['device']}, MLX {best['mlx']})"
    return Crossover(int(best["max_width"]), kind, source)


def declined(spec: Spec, device: Device, mlx: str) -> str | None:
    """Why this block keeps its own path, or None if it is fused."""
    how = mode()
    if how == "off":
        return f"{MODE}=off"
    if how == "force":
        return None
    limit = width_limit()
    if limit is not None:
        return f"width {spec.width} is above {WIDTH}={limit}" if spec.width > limit else None
    known = crossover(device, mlx)
    if spec.width > known.max_width:
        where = f"crossover {known.max_width} ({known.kind}: {known.source})"
        return f"width {spec.width} is above the {where}"
    return None
