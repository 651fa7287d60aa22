"""Packing layouts against MLX's own dequantize; what a format is refused for."""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tuner.lora import LoRASwitchLinear

from moescope.kernels.weights import (
    Format,
    Projection,
    Unsupported,
    describe,
    e4m3,
    e8m0,
    integers,
    unpack,
)

FORMATS = [
    *(f"affine {bits} {group}" for bits in (4, 6, 8) for group in (32, 64, 128)),
    "mxfp4 4 32",
    "mxfp8 8 32",
    "nvfp4 4 16",
]
CASES = {"check_unpack": FORMATS, "check_described": FORMATS}


def _parts(text):
    mode, bits, group = text.split()
    return mode, int(bits), int(group)


def check_unpack(text):
    """unpack gives what mx.dequantize gives in float32, for stacked experts and for a choice."""
    mode, bits, group = _parts(text)
    mx.random.seed(bits * group)
    w = mx.random.normal((3, 8, 256))
    packed = mx.quantize(w, group, bits, mode=mode)
    scale = str(packed[1].dtype).rpartition(".")[2]
    form = Format(mode, bits, group, scale)
    biases = packed[2] if len(packed) > 2 else None
    p = Projection(form, 8, 256, 3, packed[0], packed[1], biases, None, None)
    want = mx.dequantize(*packed, group_size=group, bits=bits, mode=mode).astype(mx.float32)
    got = unpack(p)
    # affine: one product and one sum, which MLX may contract; float modes: exact
    limit = 1e-6 if mode == "affine" else 0.0
    assert mx.max(mx.abs(got - want)).item() <= limit * mx.max(mx.abs(want)).item()
    some = mx.array([2, 0], mx.uint32)
    assert mx.array_equal(unpack(p, some), got[some]).item()
    assert mx.max(mx.abs(got - w)).item() < 0.7, "far from what was quantised"


def check_six_bits_lie_in_a_stream():
    """Four weights in three bytes, low bits first, whatever the alignment of the word."""
    values = mx.arange(64, dtype=mx.uint32)[None]
    stream = []
    for i in range(0, 64, 4):
        word = sum((i + j) << (6 * j) for j in range(4))
        stream += [word & 255, word >> 8 & 255, word >> 16 & 255]
    packed = mx.array(stream, mx.uint8).view(mx.uint32)[None]
    assert mx.array_equal(integers(packed, Format("affine", 6, 64, "bfloat16")), values).item()


def check_small_floats():
    """Every code of the scales: against MLX's own conversion, subnormals and signs included."""
    codes = mx.arange(256, dtype=mx.uint8)
    finite = mx.array([c for c in range(256) if c & 127 != 127], mx.uint8)
    want = mx.from_fp8(finite, dtype=mx.float32)
    assert mx.array_equal(e4m3(finite), want).item()
    powers = e8m0(codes[1:255])
    assert mx.array_equal(mx.log2(powers), mx.arange(1, 255).astype(mx.float32) - 127).item()
    assert e8m0(mx.array([0], mx.uint8)).item() == 2.0**-127


def check_global_scale():
    """nvfp4's factor per expert."""
    w = mx.random.normal((2, 4, 64))
    packed = mx.quantize(w, 16, 4, mode="nvfp4")
    scale = mx.array([1.0, 2.0])
    form = Format("nvfp4", 4, 16, "uint8")
    p = Projection(form, 4, 64, 2, packed[0], packed[1], None, None, scale)
    plain = Projection(form, 4, 64, 2, packed[0], packed[1], None, None, None)
    assert mx.allclose(unpack(p), unpack(plain) * mx.array([1.0, 2.0])[:, None, None]).item()


def check_global_scale_of_mlx():
    """mlx-lm's experts, scaled each by its largest weight: taken apart, they are what they were."""
    plain = SwitchLinear(128, 32, 3, bias=False)
    plain.weight = plain.weight * mx.array([1.0, 40.0, 0.01])[:, None, None]
    p = describe(plain.to_quantized(16, 4, "nvfp4", global_scale=True), mx.bfloat16)
    most = mx.max(mx.abs(plain.weight), axis=(1, 2))
    assert mx.allclose(p.factor * 448 * 6, most).item()
    error = mx.max(mx.abs(unpack(p) - plain.weight), axis=(1, 2)) / most
    assert mx.all(error < 0.2).item(), error
    affine = plain.to_quantized(32, 4)
    affine.set_dtype(mx.bfloat16)
    affine.global_scale = most
    assert _reason(affine) == "a global scale with mode affine"


def check_described(text):
    """A switch layer's format is read off the module."""
    mode, bits, group = _parts(text)
    module = QuantizedSwitchLinear(128, 32, 2, bias=True, group_size=group, bits=bits, mode=mode)
    module.set_dtype(mx.bfloat16)
    p = describe(module, mx.bfloat16)
    assert (p.format.mode, p.format.bits, p.format.group) == (mode, bits, group)
    assert (p.experts, p.rows, p.columns) == (2, 32, 128)
    assert p.bias.shape == (2, 32)
    assert (p.biases is None) == (mode != "affine")


def _reason(module, dtype=mx.bfloat16):
    try:
        describe(module, dtype)
    except Unsupported as reason:
        return str(reason)
    raise AssertionError("not refused")


def check_refusals():
    """Each refusal names its cause."""
    quantised = {"input_dims": 128, "output_dims": 32, "num_experts": 2, "bias": False}
    three = QuantizedSwitchLinear(**quantised, bits=3)
    three.set_dtype(mx.bfloat16)
    assert _reason(three) == "affine with 3 bits"
    floats = QuantizedSwitchLinear(**quantised)
    assert _reason(floats) == "float32 scales with bfloat16 activations"
    assert _reason(SwitchLinear(128, 32, 2)) == "unquantised float32 weights"
    odd = nn.Linear(40, 32, bias=False)
    odd.set_dtype(mx.bfloat16)
    assert _reason(odd) == "rows of 40 weights are no multiple of 32"
    wrapped = LoRASwitchLinear.from_base(three)
    assert _reason(wrapped) == "a layer of class mlx_lm.tuner.lora.LoRASwitchLinear"
    half = nn.Linear(64, 32, bias=False)
    half.set_dtype(mx.float16)
    assert _reason(half, mx.float16) == "unquantised float16 weights"
