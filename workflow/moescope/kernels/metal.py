"""The Metal kernels of a spec, and what calls them: the same two launches as on CUDA.

Plain float32 arithmetic in lanes, ``simd_sum`` across them; text in sources/. Their arithmetic is
tested on CPU (shim/), their speed is not known.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx

from . import source
from .classes import Unsupported
from .common import check, dynamic_names, projection_text, static_inputs
from .device import Device
from .layout import Geometry
from .spec import Spec, Tensors
from .weights import Format

ROWS = 4
CODES = {"affine": 0, "mxfp4": 1, "nvfp4": 1, "mxfp8": 2, "dense": 3}
THREADGROUP_MEMORY = 30 * 1024
MATH = """
#define TG threadgroup
#define PRIVATE thread
#define LANE int(thread_index_in_simdgroup)
"""


def projection_code(name: str, form: Format) -> str:
    """A format as the template arguments that matvec.metal takes."""
    scale = {"affine": source.TYPES.get(form.scale, 0), "mxfp4": 3, "mxfp8": 3, "nvfp4": 4}
    group = form.group if form.mode != "dense" else 32
    values = (CODES[form.mode], form.bits, group, scale.get(form.mode, 0))
    return f"#define {name.upper()} {', '.join(map(str, values))}"


def halves(
    spec: Spec, groups: int, language: str = MATH
) -> tuple[tuple[str, str], tuple[str, str]]:
    """(header, body) of both kernels. groups: simdgroups a threadgroup."""
    shared = spec.shared
    values = source.block_values(spec) | source.router_values(spec.router, spec.dtype)
    rows = spec.router.top_k * spec.width + (shared.width if shared else 0)
    values |= {
        "ROWS": ROWS,
        "GROUPS": groups,
        "ROUTED_TILES": spec.router.top_k * (spec.width // ROWS),
        "SHARED_TILES": shared.width // ROWS if shared else 0,
        "MID_CHOSEN": rows,
        "MID_WEIGHT": rows + 32,
    }
    forms = {"gate": spec.gate, "up": spec.up, "down": spec.down}
    if shared:
        forms |= {"shared_gate": shared.gate, "shared_up": shared.up, "shared_down": shared.down}
    projections = [
        projection_code(name, form) + "\n" + projection_text(name, form)
        for name, form in forms.items()
        if form
    ]
    common = [language, source.defines(values), source.text("prelude.metal"), *projections]
    first = [source.text(n) for n in ("softmax.metal", "router.h", "activation.h", "matvec.metal")]
    return (
        ("\n".join([*common, *first]), source.text("gate_up.metal")),
        ("\n".join([*common, source.text("matvec.metal")]), source.text("down.metal")),
    )


def middle_size(spec: Spec) -> int:
    """float32 numbers that the first half hands to the second."""
    rows = spec.router.top_k * spec.width + (spec.shared.width if spec.shared else 0)
    return rows + 64


@cache
def _kernel(kind: str, inputs: tuple[str, ...], output: str, header: str, body: str) -> Callable:
    return mx.fast.metal_kernel(
        name=f"moescope_{kind}_{source.digest(header, body)}",
        input_names=list(inputs),
        output_names=[output],
        source=body,
        header=header,
    )


def build(spec: Spec, tensors: Tensors, chosen: Geometry, device: Device) -> Callable[..., Any]:
    """A callable ``run(shape, x, *dynamic) -> y`` for one block. Raises Unsupported.

    Of the geometry only ``warps`` applies: simdgroups a threadgroup. device is not used.
    """
    check(spec)
    if 4 * spec.hidden + 12 * spec.router.logits + 256 > THREADGROUP_MEMORY:
        raise Unsupported(f"hidden size {spec.hidden} does not fit threadgroup memory")
    groups = chosen.warps or 8
    first, second = static_inputs(spec, tensors, prefetch=False)
    names = dynamic_names(spec)
    (first_header, first_body), (second_header, second_body) = halves(spec, groups)
    gate_up = _kernel("gate_up", (*names, *first), "middle", first_header, first_body)
    down = _kernel("down", ("middle", *second), "out", second_header, second_body)
    static_first, static_second = list(first.values()), list(second.values())
    tiles = spec.router.top_k * spec.width // ROWS
    tiles += spec.shared.width // ROWS if spec.shared else 0
    threads = groups * 32
    first_grid = (-(-tiles // groups) * threads, 1, 1)
    second_grid = (-(-(spec.out // ROWS) // groups) * threads, 1, 1)
    group = (threads, 1, 1)
    middle_shapes, middle_types = [(middle_size(spec),)], [mx.float32]
    out_types = [getattr(mx, spec.dtype)]

    def run(shape: tuple[int, ...], *dynamic: Any) -> Any:
        middle = gate_up(
            inputs=[*dynamic, *static_first],
            output_shapes=middle_shapes,
            output_dtypes=middle_types,
            grid=first_grid,
            threadgroup=group,
        )
        return down(
            inputs=[*middle, *static_second],
            output_shapes=[shape],
            output_dtypes=out_types,
            grid=second_grid,
            threadgroup=group,
        )[0]

    return run
