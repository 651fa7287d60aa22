"""Which width the fused kernels' table decides for an arm: an ingredient of that arm's results.

The table is no part of the code's fingerprint: a new entry makes stale what it changes, no more.
"""

import json
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parents[1] / "kernels" / "crossover.json"
PATCH, MODE, WIDTH = "fused", "MOESCOPE_FUSED", "MOESCOPE_FUSED_MAX_WIDTH"


def asks(patches: list[str], env: dict[str, str]) -> bool:
    """Does an arm fuse by the table? One that is forced, off or given a width does not."""
    return PATCH in patches and env.get(MODE, "on").lower() == "on" and not env.get(WIDTH)


def widest(language: str, device: str | None, mlx: str, table: Path = TABLE) -> Any:
    """The widest expert that is fused: of this device and MLX, failing that of the nearest entry,
    as kernels/gate.py chooses it; None without an entry.

    A machine class that names no device could take any entry of its language: then these are given.
    """
    entries = json.loads(table.read_text(encoding="utf-8"))["entries"]
    entries = [one for one in entries if one["language"] == language]
    if device is None:
        keys = ("device", "mlx", "max_width")
        return sorted([one[key] for key in keys] for one in entries) or None

    def near(entry: dict[str, Any]) -> tuple[bool, bool, str]:
        return entry["device"] == device, entry["mlx"] == mlx, entry["mlx"]

    return max(entries, key=near)["max_width"] if entries else None
