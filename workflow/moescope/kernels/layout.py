"""How the work is cut up: what the shape fixes, and what may be tuned.

Which warp sums which part of a row, and in what order the parts are added, follows from the shape
alone. The tunable geometry (warps a block, stages of a ring, blocks) only deals tiles to warps and
says how far ahead they read. So results are the same bits for every geometry.
"""

import math
import os
from dataclasses import dataclass

from moescope.errors import UserError

from .device import Device
from .source import STEP, by_logits, each_chooses, router_bytes
from .spec import Spec
from .weights import Format

VARIABLE = "MOESCOPE_FUSED_GEOMETRY"
NOMINAL_CORES = 132
IN_FLIGHT = 32  # words of weights per lane and stage: two rows' chunks of each step
LITTLE_GIVEN = 32768  # bytes of the second half's operand in a block that are asked for at once
SETS_MOST = 2  # sixteens of rows of the second half that a block takes at once
GIVEN_STEP = 512 + 16  # bytes of a step of it
MANY_STEPS = 128  # of the second half's rows, above which more warps share them
DOWN_WARPS = 8  # warps of the second half per block, about
SHORT_WARPS = 12  # warps of a block that has a short run (measured)


@dataclass(frozen=True)
class Geometry:
    """warps: of a block of the first half (on Metal: simdgroups of a threadgroup, 8 unless given);
    steps: of a stage (0: by format); stages: of a warp's ring (0: two; of two launches, as many as
    fit); prefetch: MiB of the second half's weights that the first half sends for (two launches
    alone); cores: multiprocessors to use (0: all).
    """

    warps: int = 0
    steps: int = 0
    stages: int = 0
    prefetch: int = 8
    cores: int = 0


def geometry(value: str | None = None) -> Geometry:
    """Geometry from ``MOESCOPE_FUSED_GEOMETRY`` ("warps=16,stages=2,prefetch=0"), or the defaults.

    Raises UserError naming the variable, the allowed keys and ranges.
    """
    value = os.environ.get(VARIABLE, "") if value is None else value
    limits = {
        "warps": (1, 32),
        "steps": (1, 8),
        "stages": (2, 16),
        "prefetch": (0, 256),
        "cores": (1, 1024),
    }
    given: dict[str, int] = {}
    for item in filter(None, value.split(",")):
        key, _, number = item.partition("=")
        low, high = limits.get(key, (1, 0))
        if not number.isdecimal() or not low <= int(number) <= high:
            allowed = ", ".join(f"{k} ({a} to {b})" for k, (a, b) in limits.items())
            raise UserError(f'"{item}" is not allowed; write key=number, with {allowed}', VARIABLE)
        if key in given:
            raise UserError(f"{key} is given twice", VARIABLE)
        given[key] = int(number)
    return Geometry(**given)


def check_cores(chosen: Geometry, device: Device) -> None:
    """Raise UserError where more multiprocessors are asked for than there are: one launch waits for
    itself, so all its blocks have to be on the device at once."""
    if 0 < device.cores < chosen.cores:
        found = f"{device.name} has {device.cores} multiprocessors"
        raise UserError(f"cores={chosen.cores} is not allowed: {found}", VARIABLE)


def steps(columns: int) -> int:
    """Steps of 128 columns in a row, the last one perhaps short."""
    return -(-columns // STEP)


def batch(*forms: Format) -> int:
    """Steps of one stage for two panels of these formats."""
    return max(1, min(4, IN_FLIGHT // sum(f.bits for f in forms)))


def even_batch(each: int, most: int) -> int:
    """How many of ``each`` steps to put in a stage: few stages, little left over."""

    def cost(u: int) -> float:
        rounds = -(-each // u)
        return rounds * u / each * (1 + 0.04 * rounds)

    return min(range(1, most + 1), key=cost)


def split(count: int, target: float, most_parts: int, most_batch: int) -> int:
    """Into how many parts ``count`` steps are cut: even parts first, near the target second."""

    def cost(parts: int) -> float:
        each = -(-count // parts)
        u = even_batch(each, most_batch)
        padded = parts * -(-each // u) * u
        away = max(parts, target) / min(parts, target)
        rounds = -(-each // u)
        return padded / count * away**0.3 * (1 + 0.02 * rounds)

    return min(range(1, max(1, min(count, most_parts)) + 1), key=cost)


@dataclass(frozen=True)
class Cut:
    """What the shape fixes. First half: warps a tile, steps of each. Second half: parts of a routed
    slot and of the shared one, steps of each; or parts of all routed slots together (``joint``)."""

    warps: int
    each: int
    split: int
    down_each: int
    shared_split: int = 0
    shared_each: int = 0
    joint: int = 0


def _most(spec: Spec) -> tuple[int, int]:
    """Steps of a stage at most, first and second half."""
    first = [batch(spec.gate or spec.up, spec.up)]
    second = [batch(spec.down, spec.down)]
    if spec.shared:
        first.append(batch(spec.shared.gate or spec.shared.up, spec.shared.up))
        second.append(batch(spec.shared.down, spec.shared.down))
    return min(first), min(second)


def _steps_most(spec: Spec, wanted: int) -> tuple[int, int, int, int]:
    """Steps of a stage at most: routed and shared of the first half, then of the second."""
    pairs = [(spec.gate or spec.up, spec.up), (spec.down, spec.down)]
    if spec.shared:
        pairs.insert(1, (spec.shared.gate or spec.shared.up, spec.shared.up))
        pairs.append((spec.shared.down, spec.shared.down))
    else:
        pairs = [pairs[0], pairs[0], pairs[1], pairs[1]]
    found = [min(batch(*pair), wanted or 8) for pair in pairs]
    return found[0], found[1], found[2], found[3]


def cut(spec: Spec) -> Cut:
    """By shape alone."""
    most, down_most = _most(spec)
    count = steps(spec.hidden)
    warps = split(count, count / most, 4, most)
    each = -(-count // warps)
    k, total = spec.router.top_k, steps(spec.width)
    wanted = DOWN_WARPS * (1.5 if k * total > MANY_STEPS else 1)
    parts = split(total, max(1.0, wanted / k), max(1, 24 // k), down_most)
    down_each = -(-total // parts)
    if not spec.shared:
        joint = joint_parts(spec, down_most)
        if joint > k * parts:
            return Cut(warps, each, 1, k * total // joint, joint=joint)
        return Cut(warps, each, parts, down_each)
    shared_total = steps(spec.shared.width)
    room = max(1, min(8, 28 - k * parts))
    shared_parts = split(shared_total, max(1.0, shared_total / down_each), room, down_most)
    return Cut(warps, each, parts, down_each, shared_parts, -(-shared_total // shared_parts))


def joint_parts(spec: Spec, each: int) -> int:
    """Parts of ``each`` steps, a stage, of all chosen experts' columns together, no more than a
    short run's warps; 0 where parts of one expert are as even, this does not come out even, or a
    lane would copy of several steps at once."""
    form, total = spec.down, steps(spec.width)
    count = spec.router.top_k * total
    if spec.width % STEP or total < each or total % each == 0 or count % each:
        return 0
    if form.bits != 4 or covered(form, spec.width) or count // each > SHORT_WARPS:
        return 0
    return count // each


def whole_numbers(spec: Spec, plan: Cut) -> bool:
    """Whether the first half multiplies whole numbers (matvec.cuh: whole16): in a short run, whose
    launch waits for its products."""
    forms = (spec.gate or spec.up, spec.up)
    small = all(f.mode == "affine" and f.bits == 4 and f.group >= 64 for f in forms)
    return plan.joint > 0 and small and spec.dtype == "bfloat16"


def covered(form: Format, columns: int) -> bool:
    """Whether rows of scales begin at odd multiples of two bytes (matvec.cuh: Panel::COVERED)."""
    each = {"affine": 2}.get(form.mode, 1)
    return columns // form.group * each % 4 == 2 and form.group >= 32 * each


def panel_bytes(form: Format, columns: int, unit: int) -> int:
    """Bytes of eight rows of ``unit`` steps in a stage (matvec.cuh: Panel::SIZE)."""
    wide = unit * 4 * form.chunk_bytes
    stride = wide if form.chunk_bytes == 16 else -(-wide // 128) * 128 + 16
    each = {"affine": 2}.get(form.mode, 1)
    count = 0 if form.mode == "dense" else -(-unit * STEP // form.group)
    beside = 14 if count and covered(form, columns) else 0
    scales = -(-(count * each + beside) // 16) * 16
    return 8 * stride + 8 * scales * (2 if form.mode == "affine" else 1)


def stage_bytes(a: Format, b: Format, columns: int, unit: int) -> int:
    """Bytes of a stage of these two panels."""
    return -(-(panel_bytes(a, columns, unit) + panel_bytes(b, columns, unit)) // 128) * 128


def first_stage(spec: Spec, unit: int, extra: int) -> int:
    """Bytes of a stage of the first half: ``unit`` steps of it, ``extra`` of the shared expert."""
    found = stage_bytes(spec.gate or spec.up, spec.up, spec.hidden, unit)
    if spec.shared:
        forms = (spec.shared.gate or spec.shared.up, spec.shared.up)
        found = max(found, stage_bytes(*forms, spec.hidden, extra))
    return found


def down_stage(spec: Spec, unit: int, extra: int) -> int:
    """Bytes of a stage of the second half, likewise."""
    found = stage_bytes(spec.down, spec.down, spec.width, unit)
    if spec.shared:
        found = max(
            found, stage_bytes(spec.shared.down, spec.shared.down, spec.shared.width, extra)
        )
    return found


def first_static(spec: Spec, warps: int) -> int:
    """Bytes of shared memory of the first half beside the rings, roughly from above."""
    parts = 1 if spec.dtype == "bfloat16" else 2
    padded = steps(spec.hidden) * STEP
    each = 3 if whole_numbers(spec, cut(spec)) else 2 * parts
    choices = 128 * warps if each_chooses(spec.router) else 0
    return padded * each + padded // 8 + router_bytes(spec.router) + choices + 128 * warps + 1024


def down_static(spec: Spec, plan: Cut) -> int:
    """Bytes of shared memory of the second half beside rings and operand, roughly from above."""
    return 128 * part_sums(spec, plan, 1) + 2048


def part_sums(spec: Spec, plan: Cut, sets: int) -> int:
    """Sums of sixteen rows that a block keeps (down_sum.body); a joint part may have two."""
    return sets * (2 * plan.joint or down_warps(spec, plan))


def block_static(spec: Spec, plan: Cut, warps: int, sets: int) -> int:
    """Bytes of shared memory of both halves in one launch beside rings and operand."""
    return first_static(spec, warps) + 128 * part_sums(spec, plan, sets)


def tiles(spec: Spec) -> tuple[int, int]:
    """Routed and shared tiles of the first half."""
    rows = 8 if spec.gate else 16
    shared = spec.shared.width // rows if spec.shared else 0
    return spec.router.top_k * (spec.width // rows), shared


@dataclass(frozen=True)
class Launch:
    """One half's launch: blocks, warps a block, steps a stage (of the shared expert: ``extra``),
    stages of a ring, bytes of a stage.

    Steps are added one by one whatever the stage holds, so none of this touches the result.
    """

    blocks: int
    warps: int
    batch: int
    extra: int
    stages: int
    stage: int
    groups: int = 0  # tiles at once, where there are warps beside theirs
    sets: int = 1  # sixteens of rows of the second half at once
    given: int = 0  # bytes of the second half's operand, behind the rings
    kept: int = 0  # steps of it that a warp's part keeps: all of them (whole), or a stage's
    whole: bool = False
    beside: int = 0  # warps beside those, which only choose the experts and weigh them

    @property
    def threads(self) -> int:
        """Of a block."""
        return (self.warps + self.beside) * 32

    @property
    def ring_bytes(self) -> int:
        """Shared memory of the block's rings, and of what stands behind them."""
        return self.warps * self.stages * self.stage + self.given


def _stages(room: int, wanted: int, needed: int) -> int:
    """Stages that fit: as many as wanted (0: needed, eight at most), at least two or none."""
    count = min(room, wanted or max(2, min(needed, 8)))
    return count if count >= 2 else 0


def first_launch(spec: Spec, plan: Cut, chosen: Geometry, cores: int, memory: int) -> Launch | None:
    """The first half's launch; None where not even a small one fits the shared memory."""
    total = sum(tiles(spec))
    blocks = min(chosen.cores or cores, total)
    each = -(-total // blocks)
    # A short run is over before deep stages have filled: shallow ones, fewer warps (measured).
    most, extra_most = _steps_most(spec, chosen.steps)[:2]
    short = -(-each * plan.warps // 16) * -(-plan.each // min(most, plan.each)) <= 3
    if short and not chosen.steps:
        most, extra_most = min(most, 2), min(extra_most, 2)
    groups = max(1, (chosen.warps or (12 if short else 16)) // plan.warps)
    groups = min(groups, each, 15, 32 // plan.warps)
    for limit in range(max(most, extra_most), 0, -1):
        unit = even_batch(plan.each, min(most, limit))
        extra = even_batch(plan.each, min(extra_most, limit))
        stage = first_stage(spec, unit, extra)
        for count in range(groups, 0, -1):
            warps = count * plan.warps
            room = (memory - first_static(spec, warps)) // (warps * stage)
            needed = -(-plan.each // unit) * -(-each // count)
            stages = _stages(room, chosen.stages, needed)
            if stages:
                return Launch(blocks, warps, unit, extra, stages, stage)
    return None


def down_launch(spec: Spec, plan: Cut, chosen: Geometry, cores: int, memory: int) -> Launch | None:
    """The second half's launch; None where it does not fit the shared memory."""
    row_tiles = spec.out // 16
    blocks = min(chosen.cores or cores, row_tiles)
    warps = down_warps(spec, plan)
    most, extra_most = _steps_most(spec, chosen.steps)[2:]
    short = -(-plan.down_each // min(most, plan.down_each)) * -(-row_tiles // blocks) <= 2
    if short and not chosen.steps:
        most, extra_most = min(most, 2), min(extra_most, 2)
    for limit in range(max(most, extra_most), 0, -1):
        unit = even_batch(plan.down_each, min(most, limit))
        extra = even_batch(plan.shared_each or 1, min(extra_most, limit))
        stage = down_stage(spec, unit, extra)
        needed = -(-plan.down_each // unit) * -(-row_tiles // blocks)
        for given, kept, whole in given_choices(spec, plan, max(unit, extra), 1):
            room = (memory - down_static(spec, plan) - given) // (warps * stage)
            stages = _stages(room, chosen.stages, needed)
            if stages and warps <= 32:
                rest = {"given": given, "kept": kept, "whole": whole}
                return Launch(blocks, warps, unit, extra, stages, stage, **rest)
    return None


def given_choices(spec: Spec, plan: Cut, unit: int, sets: int) -> list[tuple[int, int, bool]]:
    """How the second half's operand may be kept in a block, best first: bytes, steps of a warp's
    part, whether that is all of them. Whole it is there once for all sets."""
    each, step = max(plan.down_each, plan.shared_each), GIVEN_STEP * down_warps(spec, plan)
    whole = (each * step, each, True)
    return [whole] if plan.joint else [whole, (unit * step * sets, unit, False)]


def little_given(spec: Spec, plan: Cut) -> bool:
    """Whether all of the second half's operand is little: a short run."""
    return given_choices(spec, plan, 1, 1)[0][0] <= LITTLE_GIVEN


def down_warps(spec: Spec, plan: Cut) -> int:
    """Warps of the second half: the chosen experts' parts and the shared one's."""
    return plan.joint or spec.router.top_k * plan.split + plan.shared_split


def block_warps(spec: Spec, plan: Cut, each: int) -> int:
    """Warps of a block that has ``each`` tiles: 16; in a short run 12 where that fills their turns
    no worse (measured)."""

    def full(warps: int) -> float:
        groups = max(1, warps // plan.warps)
        return each / groups / math.ceil(each / groups)

    short = little_given(spec, plan) and full(SHORT_WARPS) >= full(16)
    return SHORT_WARPS if short else 16


def block_launch(
    spec: Spec, plan: Cut, chosen: Geometry, cores: int, memory: int
) -> tuple[Launch, Launch] | None:
    """Both halves in one launch, which share blocks, warps, stages and the bytes of a stage: they
    run through one ring. None where that does not fit the shared memory."""
    total, row_tiles = sum(tiles(spec)), spec.out // 16
    blocks = min(chosen.cores or cores, max(total, row_tiles))
    second = down_warps(spec, plan)
    each, rows = -(-total // blocks), -(-row_tiles // blocks)
    chooser = by_logits(spec.router) and not spec.shared and rows == 1
    most = _steps_most(spec, chosen.steps)
    cuts = (plan.each, plan.each, plan.down_each, plan.shared_each or 1)
    # A ring of two stages: more on their way only stand in each other's (measured).
    groups = max(1, (chosen.warps or block_warps(spec, plan, each)) // plan.warps)
    groups = min(groups, each, 14 - SETS_MOST + 1, 32 // plan.warps)
    for limit in range(max(most), 0, -1):
        units = [even_batch(c, min(m, limit)) for c, m in zip(cuts, most, strict=True)]
        unit, extra, down_unit, down_extra = units
        stage = max(first_stage(spec, unit, extra), down_stage(spec, down_unit, down_extra))
        for count in range(groups, 0, -1):
            warps = max(count * plan.warps, second)
            if warps > 32:
                continue
            sets = min(SETS_MOST, rows, warps // second)
            for given, kept, whole in given_choices(spec, plan, max(down_unit, down_extra), sets):
                fixed = block_static(spec, plan, warps, sets) + given
                room = (memory - fixed) // (warps * stage)
                stages = min(room, chosen.stages or 2)
                if stages >= 2:
                    beside = int(chooser and sets == 1 and warps < 32)
                    rest = (stages, stage, count, sets, given, kept, whole, beside)
                    return (
                        Launch(blocks, warps, unit, extra, *rest),
                        Launch(blocks, warps, down_unit, down_extra, *rest),
                    )
    return None
