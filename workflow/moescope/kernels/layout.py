"""How the work is cut up: what the shape fixes, and what may be tuned.

Which warp sums which part of a row, and in what order the parts are added, follows from the shape
alone. The tunable geometry (tiles a block, blocks a multiprocessor) only deals tiles to blocks. So
results are the same bits for every geometry.
"""

import os
from dataclasses import dataclass

from moescope.errors import UserError

from .spec import Spec
from .weights import Format

VARIABLE = "MOESCOPE_FUSED_GEOMETRY"
STEP = 128  # weights of a row that a warp takes at once
REGISTER_WORDS = 32  # registers that a warp's lane may keep in flight for weights
NOMINAL_CORES = 132


@dataclass(frozen=True)
class Geometry:
    """tiles: tiles that a block of the first half works on at once (0: by shape); blocks: its
    blocks per multiprocessor; prefetch: MiB of the second half's weights fetched early."""

    tiles: int = 0
    blocks: int = 4
    prefetch: int = 24


def geometry(value: str | None = None) -> Geometry:
    """Geometry from ``MOESCOPE_FUSED_GEOMETRY`` ("tiles=2,blocks=3,prefetch=0"), or the defaults.

    Raises UserError naming the variable, the allowed keys and ranges.
    """
    value = os.environ.get(VARIABLE, "") if value is None else value
    limits = {"tiles": (1, 8), "blocks": (1, 32), "prefetch": (0, 256)}
    given: dict[str, int] = {}
    for item in filter(None, value.split(",")):
        key, _, number = item.partition("=")
        low, high = limits.get(key, (1, 0))
        if not number.isdigit() or not low <= int(number) <= high:
            allowed = ", ".join(f"{k} ({a} to {b})" for k, (a, b) in limits.items())
            raise UserError(f'"{item}" is not allowed; write key=number, with {allowed}', VARIABLE)
        given[key] = int(number)
    return Geometry(**given)


def steps(columns: int) -> int:
    """Steps of 128 weights in a row, the last one perhaps short."""
    return -(-columns // STEP)


def batch(*forms: Format) -> int:
    """Steps whose weights are in flight together: as many as their registers allow."""
    words = sum(f.bits for f in forms)
    return max(1, min(4, REGISTER_WORDS // words))


def split(count: int, target: float, most: int) -> int:
    """Into how many parts ``count`` steps are cut: even parts first, near the target second."""

    def cost(parts: int) -> float:
        waste = parts * -(-count // parts) / count
        away = max(parts, target) / min(parts, target)
        return waste * away**0.35

    return min(range(1, min(count, most) + 1), key=cost)


@dataclass(frozen=True)
class Cut:
    """The first half: warps a tile, steps each, steps in flight; the second: parts a slot."""

    warps: int
    each: int
    batch: int
    shared_batch: int
    tiles: int
    split: int
    down_each: int
    down_batch: int
    shared_split: int
    shared_each: int
    shared_down_batch: int

    @property
    def down_warps(self) -> int:
        return self.split


def cut(spec: Spec, chosen: Geometry) -> Cut:
    """By shape; only ``tiles`` looks at the geometry."""
    up = batch(spec.gate or spec.up, spec.up)
    count = steps(spec.hidden)
    batches = -(-count // up)
    warps = split(batches, min(batches, 8), 8)
    each = -(-batches // warps) * up
    tiles = chosen.tiles or max(1, 8 // warps)
    tiles = max(1, min(tiles, 32 // warps, 15))
    k = spec.router.top_k
    blocks = -(-(spec.out // 16) // NOMINAL_CORES)
    total = steps(spec.width)
    most = batch(spec.down, spec.down)
    parts = split(total, max(1.0, 24 / (k * min(blocks, 3))), max(1, 24 // k))
    down_each = -(-total // parts)
    shared_parts = shared_each = shared_batch = shared_most = 0
    if spec.shared:
        shared_batch = batch(spec.shared.gate or spec.shared.up, spec.shared.up)
        shared_most = batch(spec.shared.down, spec.shared.down)
        shared_total = steps(spec.shared.width)
        room = max(1, 31 - k * parts)
        shared_parts = split(shared_total, max(1.0, shared_total / down_each), min(room, 8))
        shared_each = -(-shared_total // shared_parts)
    return Cut(
        warps,
        each,
        up,
        shared_batch,
        tiles,
        parts,
        down_each,
        even_batch(down_each, most),
        shared_parts,
        shared_each,
        even_batch(shared_each, shared_most) if shared_each else 1,
    )


def even_batch(each: int, most: int) -> int:
    """The largest batch within ``most`` that leaves the least over."""
    return min(range(1, most + 1), key=lambda u: (-(-each // u) * u - each, -u))
