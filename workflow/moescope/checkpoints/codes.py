"""Numbers in few bits, as MLX stores them: affine groups, e2m1 with e8m0 or e4m3 scales, e4m3.

Formats: the OCP Microscaling specification (mxfp4, mxfp8) and NVIDIA's nvfp4; packing: the first
value of a row stands in the lowest bits of its 32-bit word.
"""

import math

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)  # the eight magnitudes; bit 3 is the sign
E2M1_STD = float(np.sqrt((E2M1**2).mean()))


def e4m3(codes: np.ndarray) -> np.ndarray:
    """uint8 codes -> float32 values; 0x7f and 0xff, which are NaN, come out as 480."""
    exponent, mantissa = (codes >> 3) & 15, (codes & 7).astype(np.float32)
    value = np.where(
        exponent == 0,
        mantissa / 512,
        np.ldexp(1 + mantissa / 8, exponent.astype(np.int32) - 7),
    ).astype(np.float32)
    return np.where(codes & 128, -value, value)


E4M3_POSITIVE = e4m3(np.arange(127, dtype=np.uint8))  # ascending, all finite ones


def to_e4m3(values: np.ndarray) -> np.ndarray:
    """Positive float32 values -> the nearest e4m3 code, never 0."""
    middles = (E4M3_POSITIVE[1:] + E4M3_POSITIVE[:-1]) / 2
    return np.clip(np.searchsorted(middles, values), 1, 126).astype(np.uint8)


def to_e8m0(values: np.ndarray) -> np.ndarray:
    """Positive values -> the code of the nearest power of two (in the exponent)."""
    part, exponent = np.frexp(values)  # not log2, whose last bit differs between libraries
    return np.clip(exponent - (part < math.sqrt(0.5)) + 127, 1, 254).astype(np.uint8)


def ceil_e8m0(values: np.ndarray) -> np.ndarray:
    """Positive values -> the code of the power of two that is not below: no value overflows."""
    part, exponent = np.frexp(values)
    return np.clip(exponent - (part == 0.5) + 127, 1, 254).astype(np.uint8)


def e8m0(codes: np.ndarray) -> np.ndarray:
    """uint8 codes -> the float32 powers of two that they stand for."""
    return np.ldexp(np.float32(1), codes.astype(np.int32) - 127)


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """[..., n] codes below 2**bits -> [..., n * bits / 32] uint32; n * bits divides by 32."""
    if 8 % bits == 0:
        held = [codes[..., i :: 8 // bits] << np.uint8(i * bits) for i in range(8 // bits)]
        return np.ascontiguousarray(sum(held[1:], held[0])).view("<u4")
    weights = 1 << np.arange(bits, dtype=np.uint8)
    stream = (codes[..., None].astype(np.uint8) & weights).astype(bool)
    packed = np.packbits(stream.reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little")
    return packed.view("<u4")


def quantise(rows: np.ndarray, mode: str, bits: int, group_size: int) -> dict[str, np.ndarray]:
    """[n, k] float32 -> {"weight": uint32, "scales", and for affine "biases"} as MLX reads them.

    affine: value = scale * code + bias with the group's least and largest value at the ends.
    """
    grouped = rows.reshape(len(rows), -1, group_size)
    if mode == "affine":
        low = grouped.min(-1)
        scale = np.maximum((grouped.max(-1) - low) / ((1 << bits) - 1), 1e-8).astype(np.float32)
        codes = np.rint((grouped - low[..., None]) / scale[..., None])
        codes = np.clip(codes, 0, (1 << bits) - 1).astype(np.uint8)
        return {"weight": pack(codes.reshape(rows.shape), bits), "scales": scale, "biases": low}
    largest = np.maximum(np.abs(grouped).max(-1), 1e-6)
    if mode == "mxfp8":
        scales = ceil_e8m0(largest / 448)
        codes = to_e4m3(np.abs(grouped) / e8m0(scales)[..., None])
        codes |= np.where(grouped < 0, 128, 0).astype(np.uint8)
        return {"weight": pack(codes.reshape(rows.shape), 8), "scales": scales}
    if mode == "mxfp4":
        scales = ceil_e8m0(largest / E2M1[-1])
        unit = e8m0(scales)
    else:
        scales = to_e4m3(largest / E2M1[-1])
        unit = e4m3(scales)
    middles = (E2M1[1:] + E2M1[:-1]) / 2
    codes = np.searchsorted(middles, np.abs(grouped) / unit[..., None]).astype(np.uint8)
    codes |= np.where(grouped < 0, 8, 0).astype(np.uint8)
    return {"weight": pack(codes.reshape(rows.shape), 4), "scales": scales}


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 -> uint16 with bfloat16's bits, rounded to nearest even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
