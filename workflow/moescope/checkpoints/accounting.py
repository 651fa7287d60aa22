"""Which part of the model each tensor is, and how many of its bytes one decoded token reads.

Weights only: routed experts by top_k / experts, tables (embeddings, a router's table of experts by
token) by one row, the head once, towers and prediction heads not at all, the rest once a token.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import UserError
from .families import Architecture, groups
from .headers import Tensor
from .quantisation import Module

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
ONE_EXPERT = re.compile(r"\.experts\.(\d+)\.")
TABLES = re.compile(r"\.tid2eid$")
OUTSIDE = ("vision", "audio", "mtp")
TERMS = ("router", "expert_gather", "shared_expert", "attention", "norm", "head", "other")
TERM_OF = {
    "router": "router",
    "experts": "expert_gather",
    "shared_experts": "shared_expert",
    "attention": "attention",
    "norm": "norm",
    "head": "head",
}
CALIBRATION = ("input_amax", "original_shape")  # published beside experts, used by no loader
CACHED = 4096  # positions that the predicted memory has a cache for
TEMPORARIES = 512 << 20  # bytes, at least: interpreter, MLX, activations
WIDTHS = {"F32": 4, "BF16": 2, "F16": 2}


def group_of(name: str, architecture: Architecture) -> str:
    """The group of a tensor, by its name; "other" if no pattern matches."""
    layer = LAYER.search(name)
    matching = (
        group
        for group, patterns in groups().items()
        if any(pattern.search(name) for pattern in patterns)
    )
    group = next(matching, "other")
    if group in OUTSIDE:
        return group
    if layer and int(layer[1]) >= architecture.layers:
        return "mtp"  # layers beyond the last one predict further tokens
    if group == "dense_mlp" and architecture.dense_mlp_is_shared:
        return "shared_experts"
    return group


def per_token(found: Iterable[Module], architecture: Architecture) -> dict[str, int]:
    """Bytes of weights that one decoded token reads, by term, and "total".

    A head tied to the embedding reads the whole of it once, beside the row of the token.
    """
    found = list(found)
    read = dict.fromkeys(TERMS, 0)
    tied, routed = is_tied(found), 0
    for module in found:
        term = TERM_OF.get(module.group, "other")
        for parameter, tensor in module.tensors.items():
            name = f"{module.path}.{parameter}".rstrip(".")
            if module.group in OUTSIDE:
                continue
            if module.group == "embedding":
                read["other"] += _row(tensor)
                if tied and _is_token_embedding(module):
                    read["head"] += tensor.bytes
            elif module.group == "experts":
                routed += tensor.bytes
            elif TABLES.search(name):
                read[term] += _row(tensor)
            else:
                read[term] += tensor.bytes
    if routed:
        read["expert_gather"] = routed * architecture.top_k // architecture.experts
    return {**read, "total": sum(read.values())}


def is_tied(found: Iterable[Module]) -> bool:
    """There is no head of its own: the embedding is used twice."""
    return not any(module.group == "head" for module in found)


def _is_token_embedding(module: Module) -> bool:
    return "per_layer" not in module.path


def _row(tensor: Tensor) -> int:
    return tensor.bytes // tensor.shape[0] if tensor.shape else tensor.bytes


def memory(total: int, found: Iterable[Module], architecture: Architecture) -> dict[str, Any]:
    """Bytes that a process needs: {"predicted", "weights", "cache_per_position", "positions",
    "temporaries", "includes"}. The cache is counted as if every layer kept keys and values."""
    width = max(
        (WIDTHS.get(tensor.dtype, 2) for module in found if module.group == "norm"
         for tensor in module.tensors.values()),
        default=2,
    )  # fmt: skip
    attention = architecture.attention
    position = 2 * architecture.layers * attention["kv_heads"] * attention["head_dim"] * width
    temporaries = max(total // 20, TEMPORARIES)
    return {
        "predicted": total + position * CACHED + temporaries,
        "weights": total,
        "cache_per_position": position,
        "positions": CACHED,
        "temporaries": temporaries,
        "includes": f"all weights, keys and values of {CACHED} positions in every layer, and"
        " 5 % of the weights (512 MiB at least) for interpreter, library and activations",
    }


def check(tensors: Mapping[str, Tensor], found: Iterable[Module], expected: Architecture) -> None:
    """The headers hold what the config says. Raises UserError for the first thing that differs:
    layers, MoE layers, experts, their width and input, vocabulary."""
    found = list(found)
    text = [module for module in found if module.group not in OUTSIDE]
    layers = {int(match[1]) for module in text if (match := LAYER.search(f"{module.path}."))}
    _same("layers", len(layers), expected.layers, expected, "layers")
    experts = [module for module in text if module.group == "experts"]
    with_experts = {int(LAYER.search(f"{module.path}.")[1]) for module in experts}
    if with_experts != set(expected.moe_layers):
        raise UserError(
            f"the headers have routed experts in layers {_list(with_experts)}, the config says"
            f" {_list(expected.moe_layers)}",
            where=expected.model_type,
        )
    _check_experts(experts, expected)
    for module in text:
        if module.group in ("embedding", "head") and "per_layer" not in module.path:
            weight = module.tensors.get("weight")
            if weight is not None:
                _same(f"{module.path} rows", weight.shape[0], expected.vocab, expected, "vocab")
                _same(
                    f"{module.path} columns", columns(module), expected.hidden, expected, "hidden"
                )
    if not any(module.group == "embedding" for module in text):
        raise UserError("there is no embedding among the tensors", where=expected.model_type)


def _check_experts(experts: list[Module], expected: Architecture) -> None:
    single: dict[int, set[int]] = {}
    for module in experts:
        weight = module.tensors.get("weight")
        index = ONE_EXPERT.search(f"{module.path}.")
        if index:
            layer = int(LAYER.search(module.path)[1])
            single.setdefault(layer, set()).add(int(index[1]))
        else:
            for parameter, tensor in module.tensors.items():
                if parameter in CALIBRATION:
                    continue
                count = tensor.shape[0] if tensor.shape else 1
                _same(f"{module.path}: experts", count, expected.experts, expected, "experts")
        name = module.path.rpartition(".")[2]
        if weight is None or len(weight.shape) < 2:
            continue
        if name in ("gate_proj", "up_proj", "fc1", "w1", "w3"):
            width = weight.shape[-2]
            _same(f"{module.path}: width", width, expected.expert_width, expected, "expert_width")
            reads = columns(module)
            _same(f"{module.path}: input", reads, expected.expert_input, expected, "hidden")
    for layer, indices in single.items():
        _same(f"layer {layer}: experts", len(indices), expected.experts, expected, "experts")


def columns(module: Module) -> int:
    """What a matrix reads, in elements, whether packed or not."""
    if module.rule is None or module.rule.mode == "fp8":
        return module.tensors["weight"].shape[-1]
    return module.tensors["scales"].shape[-1] * module.rule.group_size


def _same(what: str, found: int, said: int, expected: Architecture, role: str) -> None:
    if found != said:
        path = expected.paths.get(role, role)
        raise UserError(f"{what}: the headers have {found}, {path} is {said}", where="config.json")


def _list(layers: Iterable[int]) -> str:
    return ",".join(map(str, sorted(layers))) or "none"
