"""What a config.json says the model is, whatever its family calls things.

The names are data (families.json). A key may stand at the top level or in ``text_config``: at
both with different values is an error, since runtimes differ in which they read.
"""

import difflib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import UserError

TABLE = Path(__file__).with_name("families.json")
COUNTS = re.compile(r"expert|top_?k|moe", re.IGNORECASE)
PACKAGES = ("mlx-lm", "mlx-vlm")


@dataclass(frozen=True)
class Architecture:
    """A model's dimensions, in elements; 0 where a dense model has none.

    family, packages: the entry of families.json, and which packages have model code for it.
    moe_layers: indices of the layers with routed experts. shared_experts: their number;
    shared_width: the width of all of them together. expert_input: what an expert reads (hidden,
    if there is no latent projection before it). attention: heads, kv_heads, head_dim and what
    else the config says. paths: what was read -> its JSON path. dense_mlp_is_shared: the family
    has a dense MLP beside the experts of a layer.
    """

    model_type: str
    family: str
    packages: tuple[str, ...]
    layers: int
    moe_layers: tuple[int, ...]
    experts: int
    top_k: int
    shared_experts: int
    hidden: int
    expert_input: int
    expert_width: int
    shared_width: int
    vocab: int
    attention: dict[str, int]
    paths: dict[str, str] = field(compare=False)
    dense_mlp_is_shared: bool = False

    @property
    def dense(self) -> bool:
        return not self.moe_layers


class Config:
    """A config.json whose keys are looked up at both levels; ``paths`` keeps where they stood."""

    def __init__(self, value: dict[str, Any], nested: list[str]):
        self.value, self.nested = value, nested
        self.paths: dict[str, str] = {}

    def find(self, role: str, key: str) -> Any:
        """The value of a key, or None; null counts as absent.

        Raises UserError if two levels have it with different values. Of two equal ones the
        nested one is recorded: it is what the loaders of nested models read.
        """
        places = {key: self.value.get(key)}
        for part in self.nested:
            inner = self.value.get(part)
            if isinstance(inner, dict):
                places[f"{part}.{key}"] = inner.get(key)
        places = {path: value for path, value in places.items() if value is not None}
        if not places:
            return None
        *others, path = places
        for other in others:
            if places[other] != places[path]:
                raise UserError(
                    f"{other} is {places[other]!r} and {path} is {places[path]!r}; runtimes differ"
                    " in which they read: make them equal or take one out",
                    where="config.json",
                )
        self.paths[role] = path
        return places[path]

    def number(self, role: str, key: str | None, default: int | None = None) -> int:
        """A count. Raises UserError if it is absent and there is no default, or no count."""
        value = self.find(role, key) if key else None
        if value is None:
            if default is None:
                raise UserError(
                    f"{key} is missing, at the top level and in {', '.join(self.nested)}"
                    f"{_hint(self.value)}",
                    where="config.json",
                )
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise UserError(
                f"{self.paths[role]} is {value!r}, a whole number is wanted", where="config.json"
            )
        return value


def resolve(config: dict[str, Any]) -> Architecture:
    """Read a family's dimensions.

    Raises UserError for an unknown family (with the counts that its config seems to hold), a key
    that is missing, no number, or at two levels with different values.
    """
    table = _table()
    model_type = config.get("model_type")
    family = _family(model_type, config)
    entry = table["families"][family]
    keys = table["keys"] | entry.get("keys", {})
    read = Config(config, table["nested"])
    hidden = read.number("hidden", keys["hidden"])
    layers = _layers(read, keys, entry)
    has_experts = not entry.get("dense", False)
    if has_experts and "switch" in entry:
        has_experts = bool(read.find("switch", entry["switch"]))
    experts = top_k = width = shared = shared_width = 0
    moe_layers: tuple[int, ...] = ()
    if has_experts:
        experts = read.number("experts", keys["experts"])
        moe_layers = _moe_layers(read, entry["moe_layers"], layers) if experts else ()
    if moe_layers:
        top_k = read.number("top_k", keys["top_k"])
        width = read.number("expert_width", keys["expert_width"])
        shared, shared_width = _shared(read, keys, entry, width)
        if not 0 < top_k <= experts:
            raise UserError(
                f"{read.paths['top_k']} is {top_k}, of {experts} experts", where="config.json"
            )
    heads = read.number("heads", keys["heads"])
    attention = {
        "heads": heads,
        "kv_heads": read.number("kv_heads", keys["kv_heads"], heads),
        "head_dim": read.number("head_dim", keys["head_dim"], hidden // heads if heads else 0),
    }
    for key in table["attention"]:
        value = read.find(f"attention.{key}", key)
        if isinstance(value, int) and not isinstance(value, bool):
            attention[key] = value
    return Architecture(
        model_type=model_type,
        family=family,
        packages=tuple(entry["packages"]),
        layers=layers,
        moe_layers=moe_layers,
        experts=experts if moe_layers else 0,
        top_k=top_k,
        shared_experts=shared,
        hidden=hidden,
        expert_input=read.number("expert_input", entry.get("expert_input"), hidden),
        expert_width=width,
        shared_width=shared_width,
        vocab=read.number("vocab", keys["vocab"]),
        attention=attention,
        paths=dict(sorted(read.paths.items())),
        dense_mlp_is_shared=entry.get("dense_mlp_is_shared", False) and bool(moe_layers),
    )


def groups() -> dict[str, tuple[re.Pattern[str], ...]]:
    """Group of tensors -> patterns on names; the first group that matches has the tensor."""
    return _groups()


@cache
def _groups() -> dict[str, tuple[re.Pattern[str], ...]]:
    return {
        group: tuple(re.compile(pattern) for pattern in patterns)
        for group, patterns in _table()["groups"].items()
    }


@cache
def _table() -> dict[str, Any]:
    return json.loads(TABLE.read_text())


def _family(model_type: Any, config: dict[str, Any]) -> str:
    known: dict[str, str] = {}
    for family, entry in _table()["families"].items():
        known |= dict.fromkeys(entry.get("model_types", [family]), family)
    if model_type in known:
        return known[model_type]
    near = difflib.get_close_matches(str(model_type), known, 3)
    raise UserError(
        f"model_type is {model_type!r}, which families.json does not describe"
        f"{_hint(config)}; add the family there"
        + (f", after {', '.join(near)}" if near else f" (known: {', '.join(sorted(known))})"),
        where="config.json",
    )


def _hint(config: dict[str, Any]) -> str:
    found = [f"{path} = {value}" for path, value in _counts(config, "")]
    return f"; keys that look like expert counts: {', '.join(found)}" if found else ""


def _counts(value: dict[str, Any], prefix: str) -> Iterator[tuple[str, int]]:
    for key, inner in value.items():
        if isinstance(inner, dict) and key not in ("quantization", "quantization_config"):
            yield from _counts(inner, f"{prefix}{key}.")
        elif isinstance(inner, int) and not isinstance(inner, bool) and COUNTS.search(key):
            yield f"{prefix}{key}", inner


def _layers(read: Config, keys: dict[str, str], entry: dict[str, Any]) -> int:
    rule = entry.get("moe_layers", {})
    if rule.get("rule") == "pattern":
        pattern = read.find("pattern", rule["key"])
        if pattern is not None:
            layers = read.number("layers", keys["layers"], len(pattern))
            if layers != len(pattern):
                raise UserError(
                    f"{read.paths['layers']} is {layers}, {read.paths['pattern']} has"
                    f" {len(pattern)} layers",
                    where="config.json",
                )
            return layers
    return read.number("layers", keys["layers"])


def _moe_layers(read: Config, rule: dict[str, Any], layers: int) -> tuple[int, ...]:
    """The layers with routed experts; the rules are those of the families' model code."""

    def listed(role: str, key: str) -> Any:
        value = read.find(role, key)
        if value is None or len(value) < layers:
            raise UserError(f"{key} must name each of {layers} layers", where="config.json")
        return value

    every = range(layers)
    if rule["rule"] == "all":
        return tuple(every)
    if rule["rule"] == "step":
        step = max(1, read.number("moe_layers.step", rule["step"], 1))
        skipped = read.find("moe_layers.skip", rule["skip"]) or []
        return tuple(i for i in every if (i + 1) % step == 0 and i not in skipped)
    if rule["rule"] == "from":
        if rule.get("types") and read.find("moe_layers.types", rule["types"]) is not None:
            types = listed("moe_layers.types", rule["types"])
            return tuple(i for i in every if types[i] != rule["dense"])
        first = read.number("moe_layers.first", rule["first"], rule.get("default", 0))
        step = read.number("moe_layers.every", rule.get("every"), 1) or 1
        return tuple(i for i in every if i >= first and i % step == 0)
    if rule["rule"] == "span":
        first = _least(read.find("moe_layers.first", rule["first"]), 0)
        last = _least(read.find("moe_layers.last", rule["last"]), layers - 1)
        step = read.number("moe_layers.every", rule["every"], 1) or 1
        return tuple(i for i in every if first <= i <= last and (i + 1) % step == 0)
    if rule["rule"] == "flags":
        flags = listed("moe_layers.flags", rule["key"])
        return tuple(i for i in every if flags[i])
    pattern = listed("pattern", rule["key"])
    return tuple(i for i in every if pattern[i] == rule["letter"])


def _least(value: Any, default: int) -> int:
    """ernie4_5_moe gives one number, or one for text and one for images."""
    if isinstance(value, list):
        return min(value)
    return default if value is None else value


def _shared(
    read: Config, keys: dict[str, str], entry: dict[str, Any], expert_width: int
) -> tuple[int, int]:
    """(number of shared experts, their width together); without a width key, each is as wide as a
    routed one."""
    given = read.number("shared_width", keys.get("shared_width"), 0)
    count = read.number("shared_experts", keys.get("shared_experts"), 1 if given else 0)
    if not count:
        return 0, 0
    if given and entry.get("shared_width") != "each":
        return count, given
    return count, count * (given or expert_width)
