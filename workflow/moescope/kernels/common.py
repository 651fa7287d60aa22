"""What the kernels of both languages take: checks of the shape, inputs and their order."""

from typing import Any

import mlx.core as mx

from .classes import Unsupported
from .spec import Spec, Tensors
from .weights import Format, Projection


def check(spec: Spec) -> None:
    """Raise Unsupported where the shape does not suit the kernels."""
    for what, value, unit in (
        ("expert width", spec.width, 32),
        ("output width", spec.out, 16),
        ("shared width", spec.shared.width if spec.shared else 0, 32),
    ):
        if value % unit:
            raise Unsupported(f"{what} {value} is no multiple of {unit}")
    if not 1 <= spec.router.top_k <= 24 or spec.router.top_k + spec.router.shared > 32:
        raise Unsupported(f"{spec.router.top_k} experts a token")
    if spec.router.experts > 1024:
        raise Unsupported(f"{spec.router.experts} experts")


def projection_text(name: str, form: Format) -> str:
    """Arrays that a projection has not get the name of one that it has."""
    lines = []
    if form.mode == "dense":
        lines.append(f"#define {name}_s {name}_w")
    if form.mode != "affine":
        lines.append(f"#define {name}_b {name}_w")
    return "\n".join(lines)


def arrays_of(name: str, projection: Projection | None) -> dict[str, Any]:
    """A projection's big arrays by the names that the bodies use."""
    if projection is None:
        return {}
    arrays = {"w": projection.weight, "s": projection.scales, "b": projection.biases}
    return {f"{name}_{key}": array for key, array in arrays.items() if array is not None}


def expert_factor(name: str, projection: Projection, tensors: Tensors) -> Any:
    """Factor of each expert's output of one projection, float32 [experts]."""
    factor = mx.ones((projection.experts,), mx.float32)
    if projection.factor is not None:
        factor = factor * projection.factor
    extra = tensors.small.get(name + "_factor")
    return factor if extra is None else factor * extra


def static_inputs(spec: Spec, tensors: Tensors, prefetch: bool) -> tuple[dict, dict]:
    """Arrays that never change, by name, for the first and for the second half."""
    small = tensors.small
    names = ("choice_bias", "route_factor", "expert_factor", "table")
    first: dict[str, Any] = {name: small[name] for name in names if name in small}
    first |= arrays_of("gate", tensors.gate) | arrays_of("up", tensors.up)
    first |= arrays_of("shared_gate", tensors.shared_gate)
    first |= arrays_of("shared_up", tensors.shared_up)
    second = arrays_of("down", tensors.down) | arrays_of("shared_down", tensors.shared_down)
    if prefetch:
        first["down_w"] = tensors.down.weight
    for name, projection in (("gate", tensors.gate), ("up", tensors.up), ("down", tensors.down)):
        into = second if name == "down" else first
        if spec.scaled and (projection or name == "gate"):
            into[name + "_global"] = (
                expert_factor(name, projection, tensors)
                if projection
                else mx.ones((tensors.up.experts,), mx.float32)
            )
        if spec.biased and projection:
            into[name + "_bias"] = projection.bias
    # Made here, and to be read in whatever thread decodes.
    mx.eval([array for name, array in (first | second).items() if name.endswith("_global")])
    return first, second


def dynamic_names(spec: Spec) -> list[str]:
    """Inputs of the first half that change from call to call, in their order."""
    names = ["x"]
    names += ["picks", "pick_weights"] if spec.router.select == "given" else ["logits"]
    if spec.router.select == "table":
        names += ["token"]
    if spec.shared and spec.shared.weight == "gate":
        names += ["shared_logit"]
    return names
