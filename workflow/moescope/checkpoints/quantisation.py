"""How each weight is stored, read from the shapes in the headers and checked against the config.

MLX's formats: ``weight`` is [..., K * bits / 32] uint32, ``scales`` (and for affine ``biases``)
[..., K / group_size]. So bits x group_size = 32 x columns(weight) / columns(scales): the headers
prove this product and, by the biases and the scales' type, the kind; the config names the rest.

Published checkpoints that were never converted keep codes in bytes: two four-bit ones in each
beside a scale for 32 (mxfp4) or 16 of them (nvfp4), or float8 beside a scale for 128 x 128. These
are known by their shapes alone.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import UserError
from ..files import digest
from .headers import Tensor

FLOATING = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F8_E4M3": "float8 e4m3"}
# Modes of fixed bits and group size.
FIXED = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}
QUANTISED = ("weight", "scales", "biases")
# gpt_oss as published: "gate_up_proj_blocks" [..., groups, 16] uint8 with "gate_up_proj_scales".
PUBLISHED = {"blocks": "weight", "scales": "scales"}
# deepseek_v4 and inkling as published: "w1.scale" beside "w1.weight" in bytes, "w13_weight.scale".
SCALES = ("scale", "weight_scale_inv", "weight_scale")
STACKED = re.compile(r"w\d+_weight")
BYTES = ("U8", "I8", "F8_E4M3", "F8_E5M2")
BLOCK = 128  # rows and columns that share a float8 scale
PREFIXES = ("model.language_model.", "language_model.")
REST = ("attention", "shared_experts", "dense_mlp", "head", "embedding")
OUTSIDE = ("vision", "audio", "mtp")
ALSO = 0.01  # a second rule with this share of a group's bytes is named in the label


@dataclass(frozen=True, order=True)
class Rule:
    """mode: affine, mxfp4, nvfp4, mxfp8 or fp8. bits a weight; group_size: weights a scale."""

    mode: str
    bits: int
    group_size: int

    @property
    def label(self) -> str:
        """ "affine 4-bit g64"; a mode with fixed numbers is its own label."""
        if FIXED.get(self.mode) == (self.bits, self.group_size):
            return self.mode
        return f"{self.mode} {self.bits}-bit g{self.group_size}"


@dataclass(frozen=True)
class Module:
    """A module's tensors by parameter, its group, and its rule (None: not quantised)."""

    path: str
    group: str
    tensors: dict[str, Tensor]
    rule: Rule | None

    @property
    def bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.tensors.values())

    @property
    def label(self) -> str:
        weight = self.tensors.get("weight") or next(iter(self.tensors.values()))
        return self.rule.label if self.rule else FLOATING.get(weight.dtype, weight.dtype)

    @property
    def is_matrix(self) -> bool:
        """A matrix that a linear layer, an embedding or the experts multiply by."""
        weight = self.tensors.get("weight")
        return weight is not None and len(weight.shape) >= 2 and "conv" not in self.path


def modules(
    tensors: Mapping[str, Tensor], groups: Mapping[str, str], config: dict[str, Any]
) -> list[Module]:
    """The modules of a checkpoint with their rules, sorted by path. groups: tensor name -> group.

    Raises UserError where the config and the shapes disagree, naming the module and both sides.
    """
    parts: dict[str, dict[str, Tensor]] = defaultdict(dict)
    kinds: dict[str, str] = {}
    for name, tensor in tensors.items():
        path, parameter = _split(name)
        parts[path][parameter] = tensor
        if kinds.setdefault(path, groups[name]) != groups[name]:
            # A parameter of a block itself (a router's bias): a module of its own.
            del parts[path][parameter]
            parts[name] = {"": tensor}
            kinds[name] = groups[name]
    for path in parts:
        parts[path] = _published(parts[path])
    default, named = stated(config)
    return [
        Module(path, kinds[path], parts[path], _rule(path, parts[path], default, named))
        for path in sorted(parts)
    ]


def _split(name: str) -> tuple[str, str]:
    path, _, parameter = name.rpartition(".")
    stem, _, last = parameter.rpartition("_")
    if stem.endswith("_proj") and last in PUBLISHED:
        return f"{path}.{stem}", PUBLISHED[last]
    if STACKED.search(parameter):
        return name, "weight"
    return path, parameter


def _published(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parts by MLX's names where a published module has scales by another."""
    weight = parts.get("weight")
    if weight is None or weight.dtype not in BYTES or "scales" in parts:
        return parts
    known = next((name for name in SCALES if name in parts), None)
    return {"scales" if name == known else name: tensor for name, tensor in parts.items()}


def _by_shape(path: str, weight: Tensor, scales: Tensor | None) -> Rule:
    """The rule of codes in bytes, which no config names one by one."""
    if scales is None:
        raise UserError(
            f"{weight.dtype} weights without scales; convert the checkpoint by the runtime's tool",
            where=path,
        )
    if len(weight.shape) == len(scales.shape) >= 2:
        if weight.shape[:-1] == scales.shape[:-1]:
            values = 2 * weight.shape[-1]
            for mode in ("mxfp4", "nvfp4"):
                if weight.dtype in ("U8", "I8") and values == scales.shape[-1] * FIXED[mode][1]:
                    return Rule(mode, *FIXED[mode])
        blocks = tuple(-(-size // BLOCK) for size in weight.shape[-2:])
        if weight.shape[:-2] + blocks == scales.shape:
            return Rule("fp8", 8, BLOCK)
    raise UserError(
        f"no format is known of {weight.dtype} {_shape(weight)} with scales {scales.dtype}"
        f" {_shape(scales)}; convert the checkpoint by the runtime's tool",
        where=path,
    )


def _packed(weight: Tensor, scales: Tensor) -> tuple[tuple[int, ...], int]:
    """(shape without the packed axes, bits of the rest)."""
    if weight.dtype == "U8" and len(weight.shape) == len(scales.shape) + 1:
        return weight.shape[:-2], 8 * weight.shape[-1] * weight.shape[-2]
    return weight.shape[:-1], 32 * weight.shape[-1] if weight.dtype == "U32" else 0


def stated(config: dict[str, Any]) -> tuple[Rule | None, dict[str, Rule | None]]:
    """The config's default rule and its entries for modules (None: said to be unquantised).

    Raises UserError if ``quantization`` and ``quantization_config`` differ, or an entry is odd.
    """
    places = {
        "quantization": config.get("quantization"),
        "quantization_config": config.get("quantization_config"),
    }
    inner = config.get("text_config")
    if isinstance(inner, dict) and not any(places.values()):
        places["text_config.quantization"] = inner.get("quantization")
        places["text_config.quantization_config"] = inner.get("quantization_config")
    given = {path: value for path, value in places.items() if value}
    mine = {
        path: value for path, value in given.items() if "bits" in value and "group_size" in value
    }
    if len(mine) > 1 and len({digest(value) for value in mine.values()}) > 1:
        raise UserError(f"{' and '.join(mine)} differ; make them equal", where="config.json")
    if mine:
        path, value = next(iter(mine.items()))
        named = {
            _plain(key): _entry(f"{path}.{key}", entry)
            for key, entry in value.items()
            if isinstance(entry, dict) or entry is False
        }
        return _entry(path, value), named
    for value in given.values():
        method = value.get("quant_method")
        if method in FIXED:
            return Rule(method, *FIXED[method]), {}
    return None, {}


def _entry(where: str, entry: Any) -> Rule | None:
    if entry is False:
        return None
    mode = entry.get("mode") or "affine"
    bits, group = (FIXED.get(mode) or (None, None)) if mode in FIXED else (None, None)
    bits, group = entry.get("bits", bits), entry.get("group_size", group)
    if mode not in ("affine", *FIXED):
        raise UserError(
            f"mode is {mode!r}; affine, {', '.join(FIXED)} are known", where=f"config.json: {where}"
        )
    if not isinstance(bits, int) or not isinstance(group, int) or bits < 1 or group < 1:
        raise UserError("bits and group_size must be numbers", where=f"config.json: {where}")
    if mode in FIXED and FIXED[mode] != (bits, group):
        raise UserError(
            f"{mode} is {FIXED[mode][0]}-bit in groups of {FIXED[mode][1]}, not {bits}-bit in"
            f" groups of {group}",
            where=f"config.json: {where}",
        )
    return Rule(mode, bits, group)


def _plain(path: str) -> str:
    """A module's path without the prefix that packages add for multimodal models."""
    for prefix in PREFIXES:
        path = path.removeprefix(prefix)
    return path.removeprefix("model.")


def _rule(
    path: str,
    parts: dict[str, Tensor],
    default: Rule | None,
    named: dict[str, Rule | None],
) -> Rule | None:
    weight, scales = parts.get("weight"), parts.get("scales")
    if weight is not None and weight.dtype in BYTES:
        blocks = scales is not None and len(weight.shape) == len(scales.shape) + 1
        if not blocks and len(weight.shape) >= 2:
            return _by_shape(path, weight, scales)
    plain = _plain(path)
    if weight is None or scales is None:
        if weight is not None and weight.dtype == "U32":
            raise UserError("packed weights without scales", where=path)
        if weight is not None and named.get(plain):
            raise UserError(
                f"the config says {named[plain].label}, the headers hold {weight.dtype}"
                " without scales",
                where=path,
            )
        return None
    said = named.get(plain, default)
    if said is None:
        raise UserError(
            f"the headers hold quantised weights ({_kind(parts)}), the config says that there are"
            " none; mend config.json: quantization",
            where=path,
        )
    outer, stored = _packed(weight, scales)
    affine = "biases" in parts
    fits = (
        outer == scales.shape[:-1]
        and stored == said.bits * said.group_size * scales.shape[-1] > 0
        and affine == (said.mode == "affine")
        and (affine or scales.dtype == "U8")
    )
    if affine and fits:
        fits = parts["biases"].shape == scales.shape and parts["biases"].dtype == scales.dtype
    if not fits:
        raise UserError(
            f"the config says {said.label}, the headers hold {_kind(parts)}: weight"
            f" {weight.dtype} {_shape(weight)}, scales {scales.dtype} {_shape(scales)}",
            where=path,
        )
    return said


def _kind(parts: dict[str, Tensor]) -> str:
    """What the shapes alone prove."""
    weight, scales = parts["weight"], parts["scales"]
    stored = _packed(weight, scales)[1]
    product, left = divmod(stored, scales.shape[-1] or 1)
    if left or not stored:
        return "nothing that MLX packs"
    if "biases" in parts:
        likely = [
            f"{bits}-bit g{product // bits}"
            for bits in (2, 3, 4, 5, 6, 8)
            if product in (32 * bits, 64 * bits, 128 * bits)
        ]
        return f"affine {' or '.join(likely) or f'with bits x group size = {product}'}"
    likely = [mode for mode, (bits, group) in FIXED.items() if bits * group == product]
    return likely[0] if likely else f"scales alone, bits x group size = {product}"


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape))


def table(found: Iterable[Module]) -> list[dict[str, Any]]:
    """The map's lines: modules of one group that are stored alike; their bytes sum to all.

    [{"group", "mode", "bits", "group_size" (None if unquantised), "dtype" (safetensors' name, of
    the weights), "scale_dtype", "tensors", "bytes"}], in the groups' order, then by size.
    """
    lines: dict[tuple, list[int]] = defaultdict(lambda: [0, 0])
    for module in found:
        for parameter, tensor in module.tensors.items():
            rule = module.rule if parameter in QUANTISED else None
            key = (module.group, rule, module.tensors["weight"].dtype if rule else tensor.dtype,
                   module.tensors["scales"].dtype if rule else None)  # fmt: skip
            lines[key][0] += 1
            lines[key][1] += tensor.bytes
    return [
        {
            "group": group,
            "mode": rule.mode if rule else None,
            "bits": rule.bits if rule else None,
            "group_size": rule.group_size if rule else None,
            "dtype": dtype,
            "scale_dtype": scales,
            "tensors": count,
            "bytes": size,
        }
        for (group, rule, dtype, scales), (count, size) in sorted(
            lines.items(), key=lambda line: (line[0][0], -line[1][1], str(line[0][1:]))
        )
    ]


def fingerprint(found: Iterable[Module]) -> str:
    """16 hex digits of how every tensor of the text model is stored, by its module."""
    stored = [
        [_plain(module.path), parameter, module.label if parameter in QUANTISED else "",
         tensor.dtype]
        for module in found
        if module.group not in OUTSIDE
        for parameter, tensor in module.tensors.items()
    ]  # fmt: skip
    return digest(sorted(stored))[:16]


def recipe(found: Iterable[Module]) -> str:
    """A short name of the map, by the matrices of the text model.

    "experts-only affine 4-bit g64", "mxfp4 experts under affine 4-bit g64", "nvfp4" (all alike),
    "dense affine 4-bit g64", "bfloat16"; groups that differ from the rest follow after commas.
    """
    sizes: dict[str, Counter[str]] = defaultdict(Counter)
    quantised: set[str] = set()
    for module in found:
        if module.is_matrix and module.group in (*REST, "experts", "router"):
            sizes[module.group][module.label] += module.bytes
            if module.rule:
                quantised.add(module.group)
    main = {group: counted.most_common(1)[0][0] for group, counted in sizes.items()}
    rest = sum((sizes[group] for group in REST if group in sizes), Counter())
    under = rest.most_common(1)[0][0] if rest else ""
    experts = main.get("experts")
    if experts and "experts" in quantised and not quantised & {*REST, "router"}:
        return _also(f"experts-only {experts}", sizes, ("experts",))
    if experts is None:
        label = f"dense {under}"
    else:
        label = experts if experts == under else f"{experts} experts under {under}"
    for group in (*REST, "router"):
        differs = group in main and main[group] != under
        # No package quantises every router: a raw one is nobody's choice.
        if differs and (group != "router" or group in quantised):
            label += f", {group.replace('_', ' ')} {main[group]}"
    return _also(label, sizes, ("experts", *REST))


def _also(label: str, sizes: dict[str, Counter[str]], groups: Iterable[str]) -> str:
    for group in groups:
        counted = sizes.get(group, Counter())
        for other, size in counted.most_common()[1:]:
            if size >= ALSO * counted.total() and other not in FLOATING.values():
                label += f", {group.replace('_', ' ')} also {other}"
    return label
