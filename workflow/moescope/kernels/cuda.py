"""The CUDA kernels of a spec, and what calls them.

One launch a block, or two: router, gate, up and activation; down and combine. Text in sources/,
see block.body for the order of things and matvec.cuh for the arithmetic.
"""

import itertools
import math
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from moescope.errors import UserError

from . import source
from .classes import Unsupported
from .common import check, dynamic_names, projection_text, static_inputs
from .device import Device
from .flags import flag
from .layout import (
    GIVEN_STEP,
    Cut,
    Geometry,
    Launch,
    block_launch,
    block_static,
    check_cores,
    cut,
    down_launch,
    down_static,
    down_warps,
    first_launch,
    first_static,
    little_given,
    part_sums,
    steps,
    tiles,
    whole_numbers,
)
from .source import STEP
from .spec import Spec, Tensors
from .weights import Format

TYPE_TEXT = {
    "bfloat16": """
FN void to_floats(uint4 v, float (&f)[8]) {
  const u32 w[4] = {v.x, v.y, v.z, v.w};
  for (int i = 0; i < 4; ++i) {
    f[2 * i] = as_float(w[i] << 16);
    f[2 * i + 1] = as_float(w[i] & 0xffff0000u);
  }
}
FN u32 from_float(float v) { return round_bf16(v); }
#define PARTS 1
""",
    "float16": """
FN void to_floats(uint4 v, float (&f)[8]) {
  const u32 w[4] = {v.x, v.y, v.z, v.w};
  for (int i = 0; i < 4; ++i) {
    f[2 * i] = half_to_float(w[i] & 0xffffu);
    f[2 * i + 1] = half_to_float(w[i] >> 16);
  }
}
FN u32 from_float(float v) { return round_half(v); }
#define PARTS 2
""",
}
MATH = """
#define EXP expf
#define LOG logf
#define LOG1P log1pf
#define SQRT sqrtf
"""


def bounds(threads: int, residents: int) -> str:
    """Registers bounded by what is to be resident.

    MLX writes the kernel's signature itself; all that comes before it is this header, so the bound
    has to ride on the word ``__global__``.
    """
    return (
        "#undef __global__\n"
        f"#define __global__ __attribute__((global)) __launch_bounds__({threads}, {residents})"
    )


def prelude() -> str:
    """The language under the kernels; the shim has another."""
    return source.text("prelude.cuh") + MATH


def first_values(spec: Spec, plan: Cut, how: Launch, rows: int) -> dict[str, object]:
    """Constants of the first half. rows: of each expert's down projection, to fetch into L2."""
    routed, shared = tiles(spec)
    groups = how.groups or how.warps // plan.warps
    early = routed // spec.router.top_k * soon(spec.router.top_k, how)
    values = source.router_values(spec.router, spec.dtype) | source.block_values(spec)
    return (
        values
        | source.kept(spec.router)
        | source.choice_values(spec.router, spec.dtype)
        | source.lifts(spec)
        | source.middle(spec)
        | {
            "ONE_LAUNCH": 0,
            "CHOOSER": 0,
            "WHOLE": int(whole_numbers(spec, plan)),
            "BEGINS_FIRST": "false",
            "PADDED": steps(spec.hidden) * STEP,
            "STEPS": steps(spec.hidden),
            "STEPS_EACH": plan.each,
            "EVEN_STEPS": int(
                plan.each * plan.warps * STEP == spec.hidden and plan.each % how.batch == 0
            ),
            "BLOCK_WARPS": how.warps,
            "WARPS": plan.warps,
            "TILES": groups,
            "TILE_ROWS": 8 if spec.gate else 16,
            "ROUTED_TILES": routed,
            "SHARED_TILES": shared,
            "SOON_TILES": early,
            "JOINT_RUNS": int(joint_runs(shared, early, routed - early, how.blocks)),
            "BATCH": how.batch,
            "EXTRA_BATCH": how.extra,
            "EVEN_EXTRA": int(
                plan.each * plan.warps * STEP == spec.hidden and plan.each % how.extra == 0
            ),
            "STAGES": how.stages,
            "STAGE_BYTES": how.stage,
            "PREFETCH_ROWS": rows,
            # Where nearly all groups of warps have a shared tile to begin with (measured).
            "CHOOSERS_LAST": int(shared >= 0.75 * how.blocks * groups),
        }
    )


def second_values(spec: Spec, plan: Cut, how: Launch) -> dict[str, object]:
    """Constants of the second half."""
    even = plan.down_each * plan.split * STEP == spec.width or plan.joint > 0
    even = even and plan.down_each % how.batch == 0
    extra_even = bool(spec.shared) and (
        plan.shared_each * plan.shared_split * STEP == spec.shared.width
        and plan.shared_each % how.extra == 0
    )
    return (
        source.block_values(spec)
        | source.lifts(spec)
        | source.middle(spec)
        | {
            "ONE_LAUNCH": 0,
            "EAGER": 0,
            "ARRIVES": 0,
            "CHOOSER": 0,
            "DOWN_AT_ONCE": 0,
            "READY_STEP": 0,
            "PART_BARRIER": 0,
            "ROUTER_K": spec.router.top_k,
            "SPLIT": plan.split,
            "JOINT_PARTS": plan.joint,
            "PART_SUMS": part_sums(spec, plan, how.sets),
            "JOINT_UNIT": math.gcd(plan.down_each, steps(spec.width)),
            "DOWN_STEPS": plan.down_each,
            "EVEN_DOWN": int(even),
            "EVEN_EXTRA_DOWN": int(extra_even),
            "DOWN_BATCH": how.batch,
            "BLOCK_WARPS": how.warps,
            "EXTRA_DOWN_BATCH": how.extra,
            "GIVEN_BYTES": how.kept * GIVEN_STEP,
            "GIVEN_STEPS": how.kept,
            "GIVEN_WHOLE": int(how.whole),
            "DOWN_SETS": how.sets,
            "STAGES": how.stages,
            "STAGE_BYTES": how.stage,
            "SHARED_SPLIT": plan.shared_split,
            "SHARED_STEPS": plan.shared_each,
        }
    )


FIRST_FILES = ("formats.cuh", "matvec.cuh", "softmax.cuh", "router.h", "activation.h")


def first_half(
    spec: Spec, plan: Cut, how: Launch, rows: int, language: str = ""
) -> tuple[str, str]:
    """Header and body of the router, gate and up kernel. language: in place of the prelude."""
    forms = {"gate": spec.gate, "up": spec.up, "down": spec.down}
    if spec.shared:
        forms |= {"shared_gate": spec.shared.gate, "shared_up": spec.shared.up}
    values = first_values(spec, plan, how, rows)
    return header(spec, values, forms, FIRST_FILES, language), source.text("gate_up.body")


def second_half(spec: Spec, plan: Cut, how: Launch, language: str = "") -> tuple[str, str]:
    """Header and body of the down and combine kernel."""
    forms = {"down": spec.down}
    if spec.shared:
        forms["shared_down"] = spec.shared.down
    values = second_values(spec, plan, how)
    return header(spec, values, forms, FIRST_FILES[:2], language), source.text("down.body")


def whole_block(
    spec: Spec, plan: Cut, how: tuple[Launch, Launch], language: str = ""
) -> tuple[str, str]:
    """Header and body of the kernel that does both."""
    forms = {"gate": spec.gate, "up": spec.up, "down": spec.down}
    if spec.shared:
        forms |= {"shared_gate": spec.shared.gate, "shared_up": spec.shared.up}
        forms |= {"shared_down": spec.shared.down}
    values = second_values(spec, plan, how[1]) | first_values(spec, plan, how[0], 0)
    values |= {
        "ONE_LAUNCH": 1,
        "EAGER": int(little_given(spec, plan)),
        "ARRIVES": int(-(-(spec.out // 16) // how[0].blocks) <= 2),
        "BEGINS_FIRST": str(begins_first(spec, plan, how[0])).lower(),
        "DOWN_AT_ONCE": int(down_at_once(spec, plan, how)),
        "READY_STEP": int(how[0].beside and down_at_once(spec, plan, how)),
        "PART_BARRIER": part_barrier(spec, plan, how[0]),
        "CHOOSER": how[0].beside,
        "MEET_FIRST": 1 + how[0].groups if how[0].beside else 0,
        "GRID_BLOCKS": f"{how[0].blocks}ull",
        "SCRATCH_HEAD": SCRATCH_HEAD,
        "MID_PLACE": place_bytes(spec),
    }
    return header(spec, values, forms, FIRST_FILES, language), source.text("block.body")


def begins_first(spec: Spec, plan: Cut, how: Launch) -> bool:
    """Whether every warp's first stages, but one, are the first half's: less text, which counts."""
    routed, _ = tiles(spec)
    early = routed // spec.router.top_k * soon(spec.router.top_k, how)
    late = routed - early
    runs = [routed] if joint_runs(0, early, late, how.blocks) else [early, late]
    each = sum(run // how.blocks for run in runs)  # a block has at least so many
    alone = how.warps == how.groups * plan.warps
    return alone and how.stages == 2 and each >= how.groups and not spec.shared


def down_at_once(spec: Spec, plan: Cut, how: tuple[Launch, Launch]) -> bool:
    """Whether the second half is a stage a warp, which was sent for before it begins."""
    one_tile = spec.out // 16 <= how[1].blocks * how[1].sets
    return one_tile and not spec.shared and plan.down_each <= how[1].batch


def part_barrier(spec: Spec, plan: Cut, how: Launch) -> int:
    """The first of the barriers at which the sets' warps of one part meet; 0 where there are not
    as many: 16 a block, of which the first half's tiles and the sets have their own."""
    first = 1 + how.groups
    return first if how.sets > 1 and first + down_warps(spec, plan) + how.sets <= 16 else 0


def joint_runs(shared: int, soon: int, late: int, blocks: int) -> bool:
    """Whether a block's runs of these tiles may be dealt together: then what it has of the first
    two is never less than of the first, nor of all less than of the first two."""
    return (not shared or soon >= blocks) and (not late or late >= blocks)


def soon(top_k: int, how: Launch) -> int:
    """Slots whose tiles a block takes first: half where sets of warps share the second half,
    so that the first ones' warps begin while the rest is made (measured); else all in one run."""
    return top_k // 2 if how.sets > 1 else top_k


def header(
    spec: Spec,
    values: dict[str, object],
    forms: dict[str, Format | None],
    files: tuple[str, ...],
    language: str,
) -> str:
    """All that stands before a kernel's body."""
    projections = [
        f"{source.projection(name.upper(), form)}\n{projection_text(name, form)}"
        for name, form in forms.items()
        if form
    ]
    parts = [language or prelude(), TYPE_TEXT[spec.dtype], source.defines(values)]
    return "\n".join([*parts, *map(source.text, files), *projections])


def include(text: str) -> str:
    """The text as a file, and the line that includes it; the text itself where that fails.

    MLX copies and hashes a kernel's whole text at every call; a line costs less than 30 kB.
    """
    folder = Path(tempfile.gettempdir()) / f"moescope-kernels-{os.getuid()}"
    file = folder / f"{source.digest(text)}.cuh"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            return text
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            fresh = folder / f"{file.name}.{os.getpid()}"
            fresh.write_text(text, encoding="utf-8")
            fresh.replace(file)
    except OSError:
        return text
    return f'#include "{file}"\n'


@cache
def _kernel(
    kind: str, inputs: tuple[str, ...], output: str, header: str, body: str, memory: int
) -> Callable[..., Any]:
    name = f"moescope_{kind}_{source.digest(header, body)}"
    if not inline():
        header, body = include(header), include(body)
    return mx.fast.cuda_kernel(
        name=name,
        input_names=list(inputs),
        output_names=[output],
        source=body,
        header=header,
        shared_memory=memory,
    )


def requested(rings: int, beside: int) -> int:
    """Dynamic shared memory to ask for: MLX lifts the limit of 48 KiB, which static memory counts
    towards, only for a request above 48000 bytes."""
    return max(rings, 48128) if rings + beside > 48 * 1024 else rings


def prefetch_rows(spec: Spec, chosen: Geometry) -> int:
    """Rows of each chosen expert's down projection that the first half fetches into L2."""
    row = spec.width * spec.down.bits // 8
    rows = chosen.prefetch * 2**20 // (row * spec.router.top_k)
    return min(spec.out, rows // 16 * 16)


LAUNCHES = "MOESCOPE_FUSED_LAUNCHES"
INLINE = "MOESCOPE_FUSED_INLINE"
SCRATCH_HEAD = 512
TURNS = 2
WIDEST_LOAD = 16
CUDA_TYPES = {
    mx.bfloat16: "__nv_bfloat16",
    mx.float16: "__half",
    mx.float32: "float",
    mx.uint32: "unsigned",
    mx.int32: "int",
    mx.uint8: "unsigned char",
}


def launches() -> int:
    """One launch a block, or two, by ``MOESCOPE_FUSED_LAUNCHES``. Raises UserError."""
    value = os.environ.get(LAUNCHES, "1")
    if value not in ("1", "2"):
        raise UserError(f'"{value}" is not allowed; write 1 or 2', LAUNCHES)
    return int(value)


def inline() -> bool:
    """Whether MLX is handed the whole text, by ``MOESCOPE_FUSED_INLINE``. Raises UserError."""
    return flag(INLINE)


def place_bytes(spec: Spec) -> int:
    """Room for what the first half hands to the second, once."""
    return -(-source.middle(spec)["MID_BYTES"] // 128) * 128


def addresses_text(arrays: dict[str, Any]) -> str:
    """The lines by which a kernel takes these arrays from the addresses in its scratch."""
    lines = []
    for i, (name, array) in enumerate(arrays.items()):
        kind = f"const {CUDA_TYPES[array.dtype]}*"
        lines.append(f"{kind} const {name} = ({kind})((const u64*)scratch)[{i + 2}];")
    return "\n".join(lines) + "\n"


def addresses_ptx(name: str, count: int) -> str:
    """A kernel in PTX that writes its arguments' addresses to its last: no compiler to wait for."""
    parameters = ", ".join(f".param .u64 p{i}" for i in range(count + 1))
    lines = [f"ld.param.u64 %rd0, [p{count}];", "cvta.to.global.u64 %rd0, %rd0;"]
    for i in range(count):
        lines += [f"ld.param.u64 %rd1, [p{i}];", f"st.global.u64 [%rd0+{8 * i}], %rd1;"]
    body = "\n".join([".reg .u64 %rd<2>;", *lines, "ret;"])
    head = ".version 7.0\n.target sm_80\n.address_size 64\n"
    return f"{head}.visible .entry {name}({parameters}) {{\n{body}\n}}\n"


def addresses(arrays: list[Any]) -> Any:
    """Where the arrays lie on the device, uint32 [2 n]: low and high words."""
    count = len(arrays)
    shape = {
        "inputs": arrays,
        "output_shapes": [(2 * count,)],
        "output_dtypes": [mx.uint32],
        "grid": (1, 1, 1),
        "threadgroup": (1, 1, 1),
    }
    name = f"moescope_addresses_{count}"
    try:
        text = addresses_ptx(name, count).encode()
        found = mx.fast.precompiled_cuda_kernel(
            name=name, compiled_source=text, scalars=[], **shape
        )[0]
        mx.eval(found)
        return found
    except (AttributeError, RuntimeError, TypeError):  # experimental in MLX: then with its compiler
        names = [f"a{i}" for i in range(count)]
        body = "".join(f"((size_t*)out)[{i}] = (size_t){a};\n" for i, a in enumerate(names))
        return _kernel("addresses", tuple(names), "out", "", body, 0)(**shape)[0]


def scratches(spec: Spec, arrays: list[Any]) -> list[Any]:
    """A block's scratches, to be used by turns: a counter, these arrays' addresses, two places.

    An address costs nothing at a call, where an array among the inputs costs MLX a third of a
    microsecond. Places begin as ones.
    """
    if len(arrays) > SCRATCH_HEAD // 8 - 2:
        raise Unsupported(f"{len(arrays)} arrays")
    found = addresses(arrays)
    rest = SCRATCH_HEAD // 4 - 4 - 2 * len(arrays)
    parts = [mx.zeros((4,), mx.uint32), found, mx.zeros((rest,), mx.uint32)]
    ones = mx.full((place_bytes(spec) // 2,), 0xFFFFFFFF, mx.uint32)
    made = [mx.concatenate([*parts, ones]) for _ in range(TURNS)]
    mx.eval(made)
    return made


def pointers(arrays: list[Any]) -> tuple[list[Any], list[Any]]:
    """The arrays in row order, and of each a few elements at its own address.

    MLX adds up the sizes of what kernels take and cuts its graphs by them, though of all experts'
    weights only a few per cent are read.
    """

    def few(arrays: list[Any]) -> list[Any]:
        return [array.reshape(-1)[:16] if array.size > 4096 else array for array in arrays]

    whole = [mx.contiguous(array) for array in arrays]
    mx.eval(whole)
    whole = realigned(whole, addresses(few(whole)))
    some = few(whole)
    mx.eval(whole, some)
    return whole, some


def realigned(arrays: list[Any], found: Any) -> list[Any]:
    """The arrays, those at no multiple of 16 bytes (``found``: as ``addresses`` gives them) copied.

    MLX begins an array at a multiple of 256 bytes (of 8, if it has no more than that), but a view,
    one half of a joint gate and up for one, wherever its first element is. Kernels load up to 16
    bytes at once of all but the few single numbers.
    """
    low = found.tolist()[::2]
    return [
        array if at % WIDEST_LOAD == 0 or array.nbytes <= 8 else _copied(array)
        for array, at in zip(arrays, low, strict=True)
    ]


def _copied(array: Any) -> Any:
    flat = array.reshape(-1)
    return mx.concatenate([flat, flat[:1]])[: flat.size].reshape(array.shape)


def build(spec: Spec, tensors: Tensors, chosen: Geometry, device: Device) -> Callable[..., Any]:
    """A callable ``run(shape, x, *dynamic) -> y`` for one block; kernels are shared by text.

    dynamic: as ``dynamic_names`` says; shape: the output's. ``run.first_half(*dynamic)`` is the
    first of two kernels alone. Raises Unsupported, UserError.
    """
    check(spec)
    check_cores(chosen, device)
    if device.capability < 80:
        raise Unsupported(f"compute capability {device.capability / 10}")
    plan = cut(spec)
    fit = (spec, plan, chosen, device.cores, device.shared_memory)
    pair = block_launch(*fit) if launches() == 1 else None
    if pair:
        return _one_launch(spec, tensors, plan, pair)
    one, two = first_launch(*fit), down_launch(*fit)
    if one is None or two is None:
        raise Unsupported("the shape does not fit the shared memory")
    return two_launches(spec, tensors, plan, (one, two), prefetch_rows(spec, chosen))


def _one_launch(
    spec: Spec, tensors: Tensors, plan: Cut, pair: tuple[Launch, Launch]
) -> Callable[..., Any]:
    how = pair[0]
    first, second = static_inputs(spec, tensors, False)
    head, body = whole_block(spec, plan, pair)
    head += "\n" + bounds(how.threads, 1) + "\n"
    names = (*dynamic_names(spec), "scratch")
    whole, few = pointers([*first.values(), *second.values()])
    body = addresses_text(first | second) + body
    memory = requested(how.ring_bytes, block_static(spec, plan, how.warps, how.sets))
    kernel = _kernel("moe", names, "out", head, body, memory)
    turn = itertools.cycle(scratches(spec, few))
    grid, group = (how.blocks * how.threads, 1, 1), (how.threads, 1, 1)
    types = [getattr(mx, spec.dtype)]

    def run(shape: tuple[int, ...], *dynamic: Any) -> Any:
        return kernel(
            inputs=[*dynamic, next(turn)],
            output_shapes=[shape],
            output_dtypes=types,
            grid=grid,
            threadgroup=group,
        )[0]

    run.keep = whole  # the arrays whose addresses the kernel takes
    return run


def two_launches(
    spec: Spec, tensors: Tensors, plan: Cut, pair: tuple[Launch, Launch], rows: int
) -> Callable[..., Any]:
    """The same with a launch for each half; the same bits."""
    one, two = pair
    first, second = static_inputs(spec, tensors, rows > 0)
    head, body = first_half(spec, plan, one, rows)
    head += "\n" + bounds(one.threads, 1) + "\n"
    names = (*dynamic_names(spec), *first)
    memory = requested(one.ring_bytes, first_static(spec, one.warps))
    gate_up = _kernel("gate_up", names, "middle", head, body, memory)
    head, body = second_half(spec, plan, two)
    head += "\n" + bounds(two.threads, 1) + "\n"
    memory = requested(two.ring_bytes, down_static(spec, plan))
    down = _kernel("down", ("middle", *second), "out", head, body, memory)

    whole_first, static_first = pointers(list(first.values()))
    whole_second, static_second = pointers(list(second.values()))
    first_grid, first_group = (one.blocks * one.threads, 1, 1), (one.threads, 1, 1)
    second_grid, second_group = (two.blocks * two.threads, 1, 1), (two.threads, 1, 1)
    middle_shapes = [(source.middle(spec)["MID_BYTES"] // 4,)]
    middle_types = [mx.uint32]
    out_types = [getattr(mx, spec.dtype)]

    def first_half_of(*dynamic: Any) -> list[Any]:
        return gate_up(
            inputs=[*dynamic, *static_first],
            output_shapes=middle_shapes,
            output_dtypes=middle_types,
            grid=first_grid,
            threadgroup=first_group,
        )

    def run(shape: tuple[int, ...], *dynamic: Any) -> Any:
        return down(
            inputs=[*first_half_of(*dynamic), *static_second],
            output_shapes=[shape],
            output_dtypes=out_types,
            grid=second_grid,
            threadgroup=second_group,
        )[0]

    run.first_half, run.keep = first_half_of, (whole_first, whole_second)
    return run


def choice(spec: Spec, middle: Any) -> tuple[Any, Any]:
    """What the router chose, from the first half's output: experts and weights [top_k]."""
    at, k = source.middle(spec), spec.router.top_k
    chosen, weights = at["MID_CHOSEN"] // 4, at["MID_WEIGHT"] // 4
    return middle[chosen : chosen + k], middle[weights : weights + k].view(mx.float32)
