"""The tensors of a checkpoint that does not exist yet, from the family's own model code.

A model is built from its configuration and quantised the way the runtime's loader does it; all of
it stays a lazy graph, so that no weight is allocated, whatever the size.
"""

import copy
from fnmatch import fnmatchcase
from typing import Any

import mlx.core as mx

from .state import Refusal, check_package

# safetensors' names of MLX's types
TYPES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "bool": "BOOL",
}
QUANTISED = ("weight", "scales", "biases")


def run(
    state: Any,
    package: str,
    config: dict[str, Any],
    quantization: dict[str, Any] | None = None,
    dtype: str = "float32",
) -> dict[str, Any]:
    """{"tensors", "config"}: what a checkpoint of ``config`` holds, for the package's own loader.

    quantization: {"default": rule or None, "overrides": [rules with "match"]}; a rule is {"mode",
    "bits", "group_size"} or {"keep": true}. "match" is a pattern on the module's path, the last
    override that matches wins. A module that cannot be quantised (no such method, or its input is
    not a multiple of the group) stays as it is. dtype: of all floating tensors, except those that
    the family keeps in float32.

    tensors: {"name", "dtype" (safetensors'), "shape", "module", "parameter", "quant"}, sorted by
    name; text only, no tower for images or sound. config: with each quantised module's entry.

    Refuses with unsupported (unknown family, a dtype) or not_applicable (an override that matches
    no module that can be quantised).
    """
    check_package(package)
    if dtype not in ("float32", "float16", "bfloat16"):
        raise Refusal("unsupported", f"dtype is {dtype!r}; float32, float16, bfloat16 are known")
    model, family = _build(package, copy.deepcopy(config))
    _cast(model, getattr(mx, dtype))
    rules = _quantise(model, quantization or {})
    parameters = _parameters(model)
    _check_names(package, config, model, family, parameters)
    written = copy.deepcopy(config)
    if rules:
        written["quantization"] = {**_top(quantization, rules), **rules}
    return {
        "tensors": [_tensor(name, value, rules) for name, value in sorted(parameters.items())],
        "config": written,
    }


def _build(package: str, config: dict[str, Any]) -> tuple[Any, Any]:
    """The model, and in mlx-vlm the module of its family."""
    try:
        if package == "mlx-lm":
            from mlx_lm.utils import _get_classes

            model_class, arguments = _get_classes(config)
            return model_class(arguments.from_dict(config)), None
        return _build_vlm(config)
    except ModuleNotFoundError as error:
        raise Refusal("unsupported", f"{package} is not installed here: {error}") from None
    except ValueError as error:
        if "not supported" in str(error).lower():
            raise Refusal("unsupported", str(error)) from None
        raise
    except (KeyError, TypeError) as error:
        raise Refusal(
            "failed", f"{package} cannot build a model of this config: {error!r}"
        ) from error


def _build_vlm(config: dict[str, Any]) -> tuple[Any, Any]:
    """As mlx_vlm.utils.load_model does before it looks at weights; towers without weights go."""
    from mlx.nn import Module
    from mlx.utils import tree_flatten
    from mlx_vlm.utils import get_model_and_args, update_module_configs

    family, _ = get_model_and_args(config)
    for part in ("text_config", "vision_config", "audio_config"):
        config.setdefault(part, {})
    settings = family.ModelConfig.from_dict(config)
    parts = ["text", "vision", "perceiver", "projector", "audio"]
    model = family.Model(update_module_configs(settings, family, config, parts))
    for name, child in list(model.items()):
        tower = isinstance(child, Module) and name != "language_model"
        if tower and tree_flatten(child.parameters()):
            setattr(model, name, None)
    return model, family


def _cast(model: Any, dtype: mx.Dtype) -> None:
    from mlx.utils import tree_map_with_path

    kept = getattr(model, "cast_predicate", lambda path: True)

    def cast(path: str, value: mx.array) -> mx.array:
        floating = mx.issubdtype(value.dtype, mx.floating)
        return value.astype(dtype) if floating and kept(path) else value

    model.update(tree_map_with_path(cast, model.parameters()))


def _quantise(model: Any, quantization: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Quantise in place; each quantised module's path and rule."""
    from mlx.nn import quantize

    default = quantization.get("default")
    overrides = quantization.get("overrides") or []
    used: set[int] = set()
    rules: dict[str, dict[str, Any]] = {}

    def predicate(path: str, module: Any) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized"):
            return False
        rule = default
        for index, override in enumerate(overrides):
            if fnmatchcase(path, override["match"]):
                rule = override
                used.add(index)
        if rule is None or rule.get("keep"):
            return False
        if module.weight.shape[-1] % rule["group_size"]:
            return False
        rules[path] = {key: rule[key] for key in ("group_size", "bits", "mode")}
        return dict(rules[path])

    if default or overrides:
        # The defaults here are never used: the predicate names each module's own.
        quantize(model, group_size=64, bits=4, class_predicate=predicate)
    for index, override in enumerate(overrides):
        if index not in used:
            raise Refusal(
                "not_applicable",
                f"the override {override['match']!r} matches no module that can be quantised",
            )
    return rules


def _top(quantization: dict[str, Any], rules: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What both loaders want beside the modules' own entries."""
    default = quantization.get("default") or next(iter(rules.values()))
    return {key: default[key] for key in ("group_size", "bits", "mode")}


def _parameters(model: Any) -> dict[str, mx.array]:
    from mlx.utils import tree_flatten

    return dict(tree_flatten(model.parameters()))


def _check_names(
    package: str,
    config: dict[str, Any],
    model: Any,
    family: Any,
    parameters: dict[str, mx.array],
) -> None:
    """Refuse a family whose loader would rename or reshape the tensors listed here.

    The loader's ``sanitize`` turns published names into the model's own. It has to leave the
    model's own names alone, else a checkpoint written with them does not load.
    """
    weights = dict(parameters)
    if hasattr(model, "sanitize"):
        weights = model.sanitize(weights)
    if family is not None:
        weights = _sanitize_parts(model, family, weights)
    before = {name: (value.shape, value.dtype) for name, value in parameters.items()}
    after = {name: (value.shape, value.dtype) for name, value in weights.items()}
    if before != after:
        changed = sorted(name for name in before | after if before.get(name) != after.get(name))
        raise Refusal(
            "unsupported",
            f"{config.get('model_type')}: {package} changes {len(changed)} tensors on loading"
            f" ({changed[0]}: {before.get(changed[0])} to {after.get(changed[0])})",
        )


def _sanitize_parts(model: Any, family: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    parts = {"VisionModel": "vision", "LanguageModel": "text", "AudioModel": "audio"}
    for name, part in parts.items():
        kind = getattr(family, name, None)
        settings = getattr(model.config, f"{part}_config", None)
        if settings is not None and hasattr(kind, "sanitize"):
            weights = kind(settings).sanitize(weights)
    return weights


def _tensor(name: str, value: mx.array, rules: dict[str, dict[str, Any]]) -> dict[str, Any]:
    module, _, parameter = name.rpartition(".")
    return {
        "name": name,
        "dtype": TYPES[str(value.dtype).rpartition(".")[2]],
        "shape": list(value.shape),
        "module": module,
        "parameter": parameter,
        "quant": rules.get(module) if parameter in QUANTISED else None,
    }
