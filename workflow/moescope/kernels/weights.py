"""Weight formats: what a projection's arrays hold, and how to take them apart.

The layouts are MLX's (``mx.quantize``): along each row, ``bits``-wide integers packed low bits
first into a stream of bytes, one scale (affine: and one bias) for every ``group`` of weights.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

AFFINE_BITS = (4, 6, 8)
AFFINE_GROUPS = (32, 64, 128)
FLOAT_MODES = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}
GLOBAL_SCALE_UNIT = 448.0 * 6.0  # nvfp4: largest e4m3 times largest e2m1
CHUNK = 32  # weights that a lane takes at once

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Unsupported(Exception):
    """Why something is left to its own path; the text goes into the report."""


@dataclass(frozen=True)
class Format:
    """mode: affine, mxfp4, mxfp8, nvfp4 or dense; scale: dtype of the scales, "" if dense."""

    mode: str
    bits: int
    group: int
    scale: str

    @property
    def label(self) -> str:
        """As "affine4g64"."""
        return "dense" if self.mode == "dense" else f"{self.mode}{self.bits}g{self.group}"

    @property
    def chunk_bytes(self) -> int:
        """Bytes of 32 weights, scales apart."""
        return CHUNK * self.bits // 8

    def bytes_per_weight(self) -> float:
        """Bytes read per weight, scales and biases included."""
        if self.mode == "dense":
            return 2.0
        scales = 4 if self.mode == "affine" else 1
        return self.bits / 8 + scales / self.group


@dataclass(frozen=True)
class Projection:
    """One (expert-stacked or plain) linear map: rows x columns, all arrays as the module has them.

    bias: [experts, rows] or [rows] or None; global_scale: [experts] float32 or None (nvfp4).
    """

    format: Format
    rows: int
    columns: int
    experts: int
    weight: Any
    scales: Any
    biases: Any
    bias: Any
    global_scale: Any


def describe(module: Any, dtype: Any) -> Projection:
    """A linear or switch layer's format; raises Unsupported with the reason.

    dtype: the activations' (mx.bfloat16 or mx.float16).
    """
    weight = module["weight"]
    bias = module.get("bias")
    name = str(dtype).rpartition(".")[2]
    if "scales" not in module:
        if weight.dtype != dtype or name != "bfloat16":
            raise Unsupported(f"unquantised {str(weight.dtype).rpartition('.')[2]} weights")
        form, columns = Format("dense", 16, CHUNK, ""), weight.shape[-1]
    else:
        form = _quantised(module, name)
        columns = module["scales"].shape[-1] * form.group
    if columns % CHUNK:
        raise Unsupported(f"rows of {columns} weights are no multiple of {CHUNK}")
    if weight.ndim not in (2, 3):
        raise Unsupported(f"weights of {weight.ndim} dimensions")
    return Projection(
        form,
        weight.shape[-2],
        columns,
        weight.shape[0] if weight.ndim == 3 else 1,
        weight,
        module.get("scales"),
        module.get("biases"),
        bias,
        getattr(module, "global_scale", None),
    )


def _quantised(module: Any, name: str) -> Format:
    mode = getattr(module, "mode", "affine")
    bits, group = module.bits, module.group_size
    scale = str(module["scales"].dtype).rpartition(".")[2]
    if mode == "affine":
        if bits not in AFFINE_BITS:
            raise Unsupported(f"affine with {bits} bits")
        if group not in AFFINE_GROUPS:
            raise Unsupported(f"affine groups of {group}")
        if scale != name:
            raise Unsupported(f"{scale} scales with {name} activations")
    elif FLOAT_MODES.get(mode) != (bits, group):
        raise Unsupported(f"mode {mode} with {bits} bits in groups of {group}")
    return Format(mode, bits, group, scale)


def integers(weight: Any, form: Format) -> Any:
    """The packed integers [..., columns] as uint32: the bit stream, read in words of 8 bits."""
    data = mx.contiguous(weight).view(mx.uint8).astype(mx.uint32)
    lead = data.shape[:-1]
    if form.bits == 8:
        return data
    if form.bits == 4:
        return mx.stack([data & 15, data >> 4], axis=-1).reshape(*lead, -1)
    three = data.reshape(*lead, -1, 3)
    word = three[..., 0] | (three[..., 1] << 8) | (three[..., 2] << 16)
    return mx.stack([(word >> (6 * i)) & 63 for i in range(4)], axis=-1).reshape(*lead, -1)


def e4m3(code: Any) -> Any:
    """Bytes as 8-bit floats of 4 exponent and 3 mantissa bits (bias 7), in float32."""
    sign = mx.where(code >= 128, -1.0, 1.0)
    exponent = ((code >> 3) & 15).astype(mx.float32)
    mantissa = (code & 7).astype(mx.float32) / 8
    normal = (1 + mantissa) * mx.power(mx.array(2.0), exponent - 7)
    return sign * mx.where(exponent == 0, mantissa * 2.0**-6, normal)


def e8m0(code: Any) -> Any:
    """Bytes as powers of two (bias 127), in float32; zero stands for the least, 2^-127."""
    return mx.power(mx.array(2.0), code.astype(mx.float32) - 127)


def unpack(projection: Projection, experts: Any = None) -> Any:
    """The weights in float32, exactly: [experts, rows, columns], or those of ``experts`` alone."""

    def pick(array: Any) -> Any:
        return array if array is None or experts is None else array[experts]

    form = projection.format
    if form.mode == "dense":
        return pick(projection.weight).astype(mx.float32)
    codes = integers(pick(projection.weight), form)
    scales = pick(projection.scales)

    def spread(per_group: Any) -> Any:
        return mx.repeat(per_group.astype(mx.float32), form.group, axis=-1)

    if form.mode == "affine":
        values = codes.astype(mx.float32)
        return spread(scales) * values + spread(pick(projection.biases))
    if form.mode == "mxfp8":
        return e4m3(codes) * spread(e8m0(scales))
    table = mx.array(E2M1 + tuple(-v for v in E2M1), mx.float32)
    values = table[codes]
    if form.mode == "mxfp4":
        return values * spread(e8m0(scales))
    values = values * spread(e4m3(scales))
    if projection.global_scale is not None:
        factor = pick(projection.global_scale) / GLOBAL_SCALE_UNIT
        values = values * factor.reshape(-1, *([1] * (values.ndim - 1)))
    return values
