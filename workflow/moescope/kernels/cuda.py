"""The CUDA kernels of a spec, and what calls them.

Two launches a block: router, gate, up and activation; down and combine. Text in sources/, see
matvec.cuh for the arithmetic.
"""

import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from . import source
from .common import check, dynamic_names, projection_text, static_inputs
from .layout import Cut, Geometry, cut, down_residents, steps
from .spec import Spec, Tensors
from .weights import Unsupported

TYPE_TEXT = {
    "bfloat16": """
FN void to_floats(uint4 v, float (&f)[8]) {
  const u32 w[4] = {v.x, v.y, v.z, v.w};
  for (int i = 0; i < 4; ++i) { f[2 * i] = as_float(w[i] << 16); f[2 * i + 1] = as_float(w[i] & 0xffff0000u); }
}
FN u32 from_float(float v) { return round_bf16(v); }
#define PARTS 1
""",
    "float16": """
FN void to_floats(uint4 v, float (&f)[8]) {
  const u32 w[4] = {v.x, v.y, v.z, v.w};
  for (int i = 0; i < 4; ++i) { f[2 * i] = half_to_float(w[i] & 0xffffu); f[2 * i + 1] = half_to_float(w[i] >> 16); }
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
SHARED_MEMORY = 46 * 1024


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


def first_half(spec: Spec, plan: Cut, prefetch_rows: int, language: str = "") -> tuple[str, str]:
    """Header and body of the router, gate and up kernel. language: in place of the prelude."""
    language = language or prelude()
    shared = spec.shared
    rows = 8 if spec.gate else 16
    values = source.router_values(spec.router, spec.dtype) | source.block_values(spec)
    values |= source.middle(spec) | {
        "PADDED": steps(spec.hidden) * 128,
        "STEPS": steps(spec.hidden),
        "STEPS_EACH": plan.each,
        "WARPS": plan.warps,
        "TILES": plan.tiles,
        "TILE_ROWS": rows,
        "ROUTED_TILES": spec.router.top_k * (spec.width // rows),
        "SHARED_TILES": shared.width // rows if shared else 0,
        "BATCH": plan.batch,
        "SHARED_BATCH": plan.shared_batch,
        "PREFETCH_ROWS": prefetch_rows,
    }
    forms = {"gate": spec.gate, "up": spec.up, "down": spec.down}
    if shared:
        forms |= {"shared_gate": shared.gate, "shared_up": shared.up}
    header = "\n".join(
        [
            language,
            TYPE_TEXT[spec.dtype],
            source.defines(values),
            source.text("formats.cuh"),
            source.text("matvec.cuh"),
            source.text("softmax.cuh"),
            source.text("router.h"),
            source.text("activation.h"),
            *(f"{source.projection(name.upper(), form)}\n{projection_text(name, form)}" for name, form in forms.items() if form),
        ]
    )
    return header, source.text("gate_up.body")


def second_half(spec: Spec, plan: Cut, language: str = "") -> tuple[str, str]:
    """Header and body of the down and combine kernel."""
    language = language or prelude()
    shared = spec.shared
    values = source.block_values(spec) | source.middle(spec) | {
        "ROUTER_K": spec.router.top_k,
        "SPLIT": plan.split,
        "STEPS_EACH": plan.down_each,
        "BATCH": plan.down_batch,
        "SHARED_SPLIT": plan.shared_split,
        "SHARED_STEPS_EACH": plan.shared_each,
        "SHARED_BATCH": plan.shared_down_batch,
    }
    forms = {"down": spec.down}
    if shared:
        forms["shared_down"] = shared.down
    header = "\n".join(
        [
            language,
            TYPE_TEXT[spec.dtype],
            source.defines(values),
            source.text("formats.cuh"),
            source.text("matvec.cuh"),
            *(f"{source.projection(name.upper(), form)}\n{projection_text(name, form)}" for name, form in forms.items() if form),
        ]
    )
    return header, source.text("down.body")


def fits(spec: Spec) -> None:
    """Raise Unsupported where a block's operand does not fit shared memory."""
    parts = 1 if spec.dtype == "bfloat16" else 2
    need = steps(spec.hidden) * 128 * (2 * parts + 0.5) + 12 * spec.router.logits + 8192
    if need > SHARED_MEMORY:
        raise Unsupported(f"hidden size {spec.hidden} does not fit shared memory")


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
def _kernel(kind: str, inputs: tuple[str, ...], output: str, header: str, body: str) -> Callable:
    if not os.environ.get("MOESCOPE_FUSED_INLINE"):
        header, body = include(header), include(body)
    return mx.fast.cuda_kernel(
        name=f"moescope_{kind}_{source.digest(header, body)}",
        input_names=list(inputs),
        output_names=[output],
        source=body,
        header=header,
    )


def prefetch_rows(spec: Spec, chosen: Geometry) -> int:
    """Rows of each chosen expert's down projection that the first half fetches into L2."""
    row = spec.width * spec.down.bits // 8
    rows = chosen.prefetch * 2**20 // (row * spec.router.top_k)
    return min(spec.out, rows // 16 * 16)


def build(spec: Spec, tensors: Tensors, chosen: Geometry, cores: int) -> Callable[..., Any]:
    """A callable ``run(shape, x, *dynamic) -> y`` for one block; kernels are shared by text.

    dynamic: as ``dynamic_names`` says; shape: the output's. Raises Unsupported.
    """
    check(spec)
    fits(spec)
    plan = cut(spec, chosen)
    rows = prefetch_rows(spec, chosen)
    first, second = static_inputs(spec, tensors, rows > 0)
    rows_a_tile = 8 if spec.gate else 16
    tiles = spec.router.top_k * spec.width // rows_a_tile
    tiles += spec.shared.width // rows_a_tile if spec.shared else 0
    threads = plan.tiles * plan.warps * 32
    blocks = min(-(-tiles // plan.tiles), cores * chosen.residents(threads))
    down_threads = 32 * (spec.router.top_k * plan.split + plan.shared_split)

    header, body = first_half(spec, plan, rows)
    header += "\n" + bounds(threads, chosen.residents(threads)) + "\n"
    gate_up = _kernel("gate_up", (*dynamic_names(spec), *first), "middle", header, body)
    header, body = second_half(spec, plan)
    header += "\n" + bounds(down_threads, down_residents(spec, plan)) + "\n"
    down = _kernel("down", ("middle", *second), "out", header, body)

    static_first, static_second = list(first.values()), list(second.values())
    first_grid, first_group = (blocks * threads, 1, 1), (threads, 1, 1)
    second_grid, second_group = (spec.out // 16 * down_threads, 1, 1), (down_threads, 1, 1)
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

    run.first_half = first_half_of
    return run


def choice(spec: Spec, middle: Any) -> tuple[Any, Any]:
    """What the router chose, from the first half's output: experts and weights [top_k]."""
    at, k = source.middle(spec), spec.router.top_k
    chosen, weights = at["MID_CHOSEN"] // 4, at["MID_WEIGHT"] // 4
    return middle[chosen : chosen + k], middle[weights : weights + k].view(mx.float32)
