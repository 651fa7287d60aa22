"""Weight formats: what a projection's arrays hold, and how to take them apart.

The layouts are MLX's (``mx.quantize``): along each row, ``bits``-wide integers packed low bits
first into a stream of bytes, one scale (affine: and one bias) for every ``group`` of weights.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .classes import Unsupported, known

AFFINE_BITS = (4, 6, 8)
AFFINE_GROUPS = (32, 64, 128)
FLOAT_MODES = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}
NVFP4_MOST = 448.0 * 6.0  # largest e4m3 times largest e2m1
CHUNK = 32  # weights that a lane takes at once

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


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

    bias: [experts, rows] or [rows] or None; factor: of each expert's output before the bias,
    [experts] float32, or None (nvfp4's global scale).
    """

    format: Format
    rows: int
    columns: int
    experts: int
    weight: Any
    scales: Any
    biases: Any
    bias: Any
    factor: Any


def type_name(dtype: Any) -> str:
    """As "bfloat16"."""
    return str(dtype).rpartition(".")[2]


def describe(module: Any, dtype: Any) -> Projection:
    """A linear or switch layer's format, of one of the classes in ``LAYERS``; raises Unsupported
    with the reason.

    dtype: the activations' (mx.bfloat16 or mx.float16).
    """
    home = known(module, LAYERS, "a layer")
    weight, name = module["weight"], type_name(dtype)
    if "scales" not in module:
        if weight.dtype != dtype or name != "bfloat16":
            raise Unsupported(f"unquantised {type_name(weight.dtype)} weights")
        form, columns = Format("dense", 16, CHUNK, ""), weight.shape[-1]
    else:
        form = _quantised(module, name)
        columns = module["scales"].shape[-1] * form.group
    if columns % CHUNK:
        raise Unsupported(f"rows of {columns} weights are no multiple of {CHUNK}")
    if weight.ndim not in (2, 3):
        raise Unsupported(f"weights of {weight.ndim} dimensions")
    bias = module.get("bias")
    if bias is not None and bias.dtype != dtype:
        raise Unsupported(f"{type_name(bias.dtype)} bias with {name} activations")
    rows, experts = weight.shape[-2], weight.shape[0] if weight.ndim == 3 else 1
    return Projection(
        form,
        rows,
        columns,
        experts,
        weight,
        module.get("scales"),
        module.get("biases"),
        bias,
        LAYERS[home](module, form, experts),
    )


def _quantised(module: Any, name: str) -> Format:
    mode, bits, group = module.mode, module.bits, module.group_size
    scale = type_name(module["scales"].dtype)
    if mode == "affine":
        if bits not in AFFINE_BITS:
            raise Unsupported(f"affine with {bits} bits")
        if group not in AFFINE_GROUPS:
            raise Unsupported(f"affine groups of {group}")
        for what in ("scales", "biases"):
            if (kind := type_name(module[what].dtype)) != name:
                raise Unsupported(f"{kind} {what} with {name} activations")
    elif FLOAT_MODES.get(mode) != (bits, group):
        raise Unsupported(f"mode {mode} with {bits} bits in groups of {group}")
    return Format(mode, bits, group, scale)


def _no_factor(module: Any, form: Format, experts: int) -> None:
    """Whatever is called a global scale on it, such a layer does not apply it."""


def _factor_of_mlx(module: Any, form: Format, experts: int) -> Any:
    """mlx-lm's global scale is MLX's: the expert's largest weight before it was scaled."""
    scale = getattr(module, "global_scale", None)
    return None if scale is None else _each(scale.astype(mx.float32) / NVFP4_MOST, form, experts)


def _factor_of_checkpoint(module: Any, form: Format, experts: int) -> Any:
    """mlx-vlm's: ModelOpt's ``weight_scale_2`` multiplies the layer's output, compressed-tensors'
    ``weight_global_scale`` divides it."""
    if module._quantize_activations:
        raise Unsupported("activations quantised as weights are")
    scale = module.global_scale.astype(mx.float32)
    return _each(module.apply_scale(mx.array(1.0), scale), form, experts)


def _each(factor: Any, form: Format, experts: int) -> Any:
    """From one factor for all, one for each expert, or for each of its rows if those are equal."""
    if form.mode != "nvfp4":
        raise Unsupported(f"a global scale with mode {form.mode}")
    if factor.size == 1:
        return mx.broadcast_to(factor.reshape(1), (experts,))
    rows = factor.reshape(experts, -1)
    if not mx.all(rows == rows[:, :1]).item():
        raise Unsupported("a global scale for each row")
    return rows[:, 0]


# The layers that are read: class -> what gives its factor.
LAYERS: dict[str, Callable[[Any, Format, int], Any]] = {
    "mlx.nn.layers.linear.Linear": _no_factor,
    "mlx.nn.layers.quantized.QuantizedLinear": _no_factor,
    "mlx_lm.models.switch_layers.SwitchLinear": _no_factor,
    "mlx_lm.models.switch_layers.QuantizedSwitchLinear": _factor_of_mlx,
    "mlx_vlm.models.switch_layers.SwitchLinear": _no_factor,
    "mlx_vlm.models.switch_layers.QuantizedSwitchLinear": _no_factor,
    "mlx_vlm.quantization.nvfp4.ScaledQuantizedLinear": _factor_of_checkpoint,
    "mlx_vlm.quantization.nvfp4.ScaledQuantizedSwitchLinear": _factor_of_checkpoint,
}


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
    if projection.factor is not None:
        values = values * pick(projection.factor).reshape(-1, *([1] * (values.ndim - 1)))
    return values
