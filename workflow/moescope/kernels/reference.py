"""The block in float32, dense, with the experts' weights taken apart: what is exact up to float32.

Slow on purpose: no packed matmul, no half-precision step between the input and the one rounding at
the end. The kernels' parity is measured against it, and without a GPU it can stand in for them.
"""

import math
from typing import Any

import mlx.core as mx

from .router import route
from .spec import Spec, Tensors
from .weights import Projection, unpack


def activate(spec: Spec, gate: Any, up: Any) -> Any:
    """gate and up (float32) to the activation."""
    kind = spec.activation
    if kind == "relu2":
        return mx.square(mx.maximum(up, 0))
    if kind == "geglu":
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        return 0.5 * gate * (1 + mx.tanh(inner)) * up
    if kind == "swiglu_oai":
        gate = mx.minimum(gate, spec.limit)
        up = mx.clip(up, -spec.limit, spec.limit)
        return (up + 1) * gate * mx.sigmoid(spec.alpha * gate)
    if kind == "swiglu_clamped":
        gate = mx.minimum(gate, spec.limit)
        up = mx.clip(up, -spec.limit, spec.limit)
    return gate * mx.sigmoid(gate) * up


def multiply(weights: Any, value: Any) -> Any:
    """weights [..., rows, columns] times value [..., columns]: products and sums in float32, where
    a GPU's matmul may round its inputs to tf32."""
    return (weights * mx.expand_dims(value, -2)).sum(axis=-1)


def experts(spec: Spec, tensors: Tensors, x: Any, chosen: Any) -> Any:
    """Each chosen expert's output [top_k, out] in float32, x: [hidden]."""
    x = x.reshape(-1).astype(mx.float32)
    small = tensors.small

    def apply(name: str, projection: Projection, value: Any) -> Any:
        y = multiply(unpack(projection, chosen), value)
        factor = small.get(name + "_factor")
        if factor is not None:
            y = y * factor[chosen][:, None]
        if projection.bias is not None:
            y = y + projection.bias[chosen].astype(mx.float32)
        return y

    up = apply("up", tensors.up, x)
    gate = apply("gate", tensors.gate, x) if tensors.gate else up
    return apply("down", tensors.down, activate(spec, gate, up))


def shared(spec: Spec, tensors: Tensors, x: Any, logit: Any, weights: Any) -> Any:
    """The shared expert's output [out] in float32. logit: its own gate's; weights: the router's."""
    x = x.reshape(-1).astype(mx.float32)
    up = multiply(unpack(tensors.shared_up), x)
    gate = multiply(unpack(tensors.shared_gate), x) if tensors.shared_gate else up
    value = activate(spec, gate, up)
    if spec.shared.weight == "gate":
        value = value * mx.sigmoid(logit.reshape(-1).astype(mx.float32))
    elif spec.shared.weight == "router":
        parts = weights[-spec.router.shared :].astype(mx.float32)
        value = value * mx.repeat(parts, spec.shared.width // spec.router.shared)
    return multiply(unpack(tensors.shared_down), value)


def block(
    spec: Spec,
    tensors: Tensors,
    x: Any,
    logits: Any = None,
    token: Any = None,
    picks: tuple[Any, Any] | None = None,
    shared_logit: Any = None,
) -> Any:
    """The whole block's output [out] in float32, not yet rounded.

    picks: experts and weights from outside (``select`` "given"); otherwise logits are routed.
    """
    if picks is None:
        chosen, weights = route(spec.router, logits, tensors.small, token)
    else:
        chosen, weights = (p.reshape(-1) for p in picks)
    routed = experts(spec, tensors, x, chosen)
    y = (weights[: spec.router.top_k].astype(mx.float32)[:, None] * routed).sum(axis=0)
    if spec.shared:
        y = y + shared(spec, tensors, x, shared_logit, weights)
    return y
