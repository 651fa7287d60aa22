"""How the work is cut up: what the shape fixes, and what may be tuned.

Which warp sums which part of a row, and in what order the parts are added, follows from the shape
alone. The tunable geometry (tiles a block, blocks a multiprocessor) only deals tiles to blocks. So
results are the same bits for every geometry.
"""

import os
from dataclasses import dataclass, replace

from moescope.errors import UserError

from .spec import Spec
from .weights import Format

VARIABLE = "MOESCOPE_FUSED_GEOMETRY"
STEP = 128  # weights of a row that a warp takes at once
REGISTER_WORDS = 32  # registers that a warp's lane may keep in flight for weights
NOMINAL_CORES = 132
DOWN_WARPS = 24  # warps of the second half that a multiprocessor is to hold


@dataclass(frozen=True)
class Geometry:
    """tiles: tiles that a block of the first half works on at once (0: by shape); warps: its warps
    per multiprocessor; prefetch: MiB of the second half's weights fetched early."""

    tiles: int = 0
    warps: int = 20
    prefetch: int = 24

    def residents(self, threads: int) -> int:
        """Blocks of so many threads per multiprocessor."""
        return max(1, self.warps * 32 // threads)


def geometry(value: str | None = None) -> Geometry:
    """Geometry from ``MOESCOPE_FUSED_GEOMETRY`` ("tiles=2,warps=24,prefetch=0"), or the defaults.

    Raises UserError naming the variable, the allowed keys and ranges.
    """
    value = os.environ.get(VARIABLE, "") if value is None else value
    limits = {"tiles": (1, 8), "warps": (1, 64), "prefetch": (0, 256)}
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


def even_batch(each: int, most: int) -> int:
    """How many of ``each`` steps to have in flight: few rounds, little left over."""

    def cost(u: int) -> float:
        rounds = -(-each // u)
        return rounds * u / each * (1 + 0.04 * rounds)

    return min(range(1, most + 1), key=cost)


def split(count: int, target: float, most_parts: int, most_batch: int) -> int:
    """Into how many parts ``count`` steps are cut: even parts first, near the target second."""

    def cost(parts: int) -> float:
        each = -(-count // parts)
        rounds = -(-each // even_batch(each, most_batch))
        away = max(parts, target) / min(parts, target)
        return parts * each / count * (1 + 0.04 * rounds) * away**0.3

    return min(range(1, min(count, most_parts) + 1), key=cost)


@dataclass(frozen=True)
class Cut:
    """First half: warps a tile, steps each, steps in flight (routed, shared), tiles a block.

    Second half: parts of a routed slot, steps each, in flight; the same of the shared one.
    """

    warps: int
    each: int
    batch: int
    shared_batch: int
    tiles: int
    split: int
    down_each: int
    down_batch: int
    shared_split: int = 0
    shared_each: int = 0
    shared_down_batch: int = 1


def cut(spec: Spec, chosen: Geometry) -> Cut:
    """By shape; only ``tiles`` looks at the geometry."""
    most = batch(spec.gate or spec.up, spec.up)
    count = steps(spec.hidden)
    warps = split(count, count / most, 4, most)
    each = -(-count // warps)
    tiles = min(chosen.tiles or max(1, 4 // warps), 32 // warps)
    k = spec.router.top_k
    blocks = -(-(spec.out // 16) // NOMINAL_CORES)
    total = steps(spec.width)
    down_most = batch(spec.down, spec.down)
    room = DOWN_WARPS / (k * min(blocks, 3))
    parts = split(total, max(1.0, room), max(1, int(room * 1.2)), down_most)
    down_each = -(-total // parts)
    plan = Cut(
        warps,
        each,
        even_batch(each, most),
        1,
        tiles,
        parts,
        down_each,
        even_batch(down_each, down_most),
    )
    if not spec.shared:
        return plan
    shared = spec.shared
    shared_total = steps(shared.width)
    shared_most = batch(shared.down, shared.down)
    room = min(8, 31 - k * parts)
    shared_parts = split(shared_total, max(1.0, shared_total / down_each), room, shared_most)
    shared_each = -(-shared_total // shared_parts)
    return replace(
        plan,
        shared_batch=even_batch(each, batch(shared.gate or shared.up, shared.up)),
        shared_split=shared_parts,
        shared_each=shared_each,
        shared_down_batch=even_batch(shared_each, shared_most),
    )


def down_residents(spec: Spec, plan: Cut) -> int:
    """Blocks of the second half that a multiprocessor is to hold at once (a bound on registers)."""
    threads = 32 * (spec.router.top_k * plan.split + plan.shared_split)
    wanted = -(-(spec.out // 16) // NOMINAL_CORES)
    return max(1, min(wanted, 896 // threads, 4))
