"""The inspect stage: what a checkpoint is, by its config and its headers alone."""

from typing import Any

from ..files import digest, read_json, write_json
from ..task import Task
from . import accounting, quantisation
from .families import PACKAGES, Architecture, resolve
from .headers import Tensor, read_tensors

SCHEMA = "moescope/architecture/1"


def run(task: Task) -> None:
    """Reads the fetch stage's config.json and tensors.csv; writes architecture.json."""
    upstream = task.one("fetch")
    config = read_json(upstream / "config.json")
    described = describe(config, read_tensors(upstream / "tensors.csv"))
    write_json(task.out / "architecture.json", described)
    moe = f"{described['moe_layers']} MoE layers, {described['top_k']} of {described['experts']}"
    task.say(
        f"{task.subject}: {described['family']}, {described['layers']} layers,"
        f" {'dense' if described['dense'] else moe}, {described['quantization']['recipe']}"
    )


def describe(config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """architecture.json. Raises UserError where config and headers cannot be understood, or
    disagree."""
    architecture = resolve(config)
    groups = {name: accounting.group_of(name, architecture) for name in tensors}
    modules = quantisation.modules(tensors, groups, config)
    accounting.check(tensors, modules, architecture)
    total = sum(tensor.bytes for tensor in tensors.values())
    facts = _facts(architecture)
    fingerprint = quantisation.fingerprint(modules)
    return {
        "schema": SCHEMA,
        "model_type": architecture.model_type,
        "family": architecture.family,
        "package_families": {
            package: architecture.family if package in architecture.packages else None
            for package in PACKAGES
        },
        "config_path": architecture.paths,
        **facts,
        "moe_layer_ids": list(architecture.moe_layers),
        "tied": accounting.is_tied(modules),
        "quantization": {
            "groups": quantisation.table(modules),
            "recipe": quantisation.recipe(modules),
            "fingerprint": fingerprint,
        },
        "bytes": {"total": total, "per_token": accounting.per_token(modules, architecture)},
        "memory": accounting.memory(total, modules, architecture),
        "compare": digest([architecture.family, facts, list(architecture.moe_layers), fingerprint])[
            :16
        ],
    }


def _facts(architecture: Architecture) -> dict[str, Any]:
    return {
        "layers": architecture.layers,
        "moe_layers": len(architecture.moe_layers),
        "experts": architecture.experts,
        "top_k": architecture.top_k,
        "shared_experts": architecture.shared_experts,
        "hidden": architecture.hidden,
        "expert_width": architecture.expert_width,
        "shared_width": architecture.shared_width,
        "vocab": architecture.vocab,
        "attention": architecture.attention,
        "dense": architecture.dense,
    }
