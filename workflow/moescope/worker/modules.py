"""Which module of a loaded model is which part: the table modules.json, applied.

Scopes, patches and the graph exporter all ask here, so that a term means the same to each. Paths
start at the model that the loader returned ("language_model.model.layers.0.mlp" in mlx-vlm).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from .state import Refusal, State

TERMS = (
    "router",
    "expert_gather",
    "activation",
    "combine",
    "shared_expert",
    "attention",
    "norm",
    "head",
    "sampler",
    "other",
)
SWITCHES = ("SwitchGLU", "SwitchMLP")
# What moescope.kernels puts on the class of a module whose call it has replaced.
FUSED = "__moescope_fused__"


@dataclass(frozen=True)
class Part:
    """One module and its path."""

    path: str
    module: Any = field(repr=False)


@dataclass(frozen=True)
class MoeBlock:
    """One layer's mixture of experts.

    path, module: the block; in gemma4 what holds the experts, its router stands beside it.
    router: the modules that routing consists of (none in inkling, which routes inline).
    switch: the routed experts as one module; projections: its gathers in the order of their calls,
    the last one's output leaves the experts. shared, shared_gate: what every token passes.
    routing: "module" (the router returns indices and weights), "inline" (the block works them out)
    or "method" (the block's ``_route``). holder, attribute: where top_k is kept. lookup: the
    router's table of experts by token id (deepseek_v4's first layers), else None.
    """

    layer: int
    path: str
    module: Any = field(repr=False)
    router: tuple[Part, ...]
    switch: Part
    projections: tuple[Part, ...]
    activation: Part
    shared: tuple[Part, ...]
    shared_gate: Part | None
    routing: str
    holder: Any = field(repr=False)
    attribute: str
    lookup: Any = field(repr=False)

    @property
    def top_k(self) -> int:
        """Experts that each token is sent to."""
        if self.lookup is not None:
            return self.lookup.shape[-1]
        return getattr(self.holder, self.attribute)

    @property
    def fused(self) -> bool:
        """Whether router, experts and combine run as one, in kernels of moescope.kernels."""
        return any(hasattr(type(part), FUSED) for part in (self.module, self.switch.module))

    @property
    def experts(self) -> int:
        """Routed experts of the layer."""
        return self.projections[0].module.num_experts


@dataclass(frozen=True)
class Survey:
    """A model's parts. family: its entry in the table, None if it has none.

    foreign: MoE layers that the table does not describe; scopes and patches refuse such a model
    rather than take it for a dense one. beside_attention: state of its own next to attention;
    other: the same next to the experts, and projections around these. head: the module of the
    logits; tied: it is the embedding, called through ``as_linear``. root: path of the module that
    is called once a step.
    """

    family: str | None
    layers: tuple[Part, ...]
    blocks: tuple[MoeBlock, ...]
    foreign: tuple[str, ...]
    attention: tuple[Part, ...]
    beside_attention: tuple[Part, ...]
    norms: tuple[Part, ...]
    other: tuple[Part, ...]
    head: Part
    tied: bool
    root: str
    outputs: dict[str, str] = field(repr=False)

    def known(self) -> "Survey":
        """Itself, if every MoE layer is described; a Refusal (unsupported) otherwise."""
        if self.foreign:
            raise Refusal(
                "unsupported",
                f"modules.json does not describe the experts at {self.foreign[0]}; add the family",
            )
        return self

    def term_of(self, path: str, side: str = "output") -> str:
        """The term of the work that ends at a module's boundary.

        side "output": what happens in the module last, after any listed module inside it; a module
        inside a listed one (a projection of an attention) belongs to that. side "input": the work
        that made its inputs, as far as no other boundary lies between.
        """
        if path == self.root:
            return "head" if side == "output" else "sampler"
        if side == "output":
            return self._owner(path)
        parent = path.rpartition(".")[0]
        for block in self.blocks:
            if path == block.switch.path or path in {part.path for part in block.shared}:
                return "router"
            if parent == block.switch.path:
                return "expert_gather"
        return self._owner(parent) if parent else "other"

    def _owner(self, path: str) -> str:
        while path:
            if path in self.outputs:
                return self.outputs[path]
            path = path.rpartition(".")[0]
        return "other"


def survey(state: State) -> Survey:
    """Find the parts of the loaded model; raises Refusal if there is none."""
    model, root = state.loaded(), state.root
    table = _table()
    family = _family(table, model, root)
    entry = table["families"].get(family)
    where = table["common"] | (entry or {})
    names = {id(module): path for path, module in model.named_modules()}
    layers = tuple(Part(names[id(layer)], layer) for layer in root.layers)
    blocks = tuple(_blocks(layers, where)) if entry else ()
    described = {id(block.switch.module) for block in blocks}
    foreign = tuple(
        f"{layer.path}.{path}"
        for layer in layers
        for path, module in layer.module.named_modules()
        if _is_switch(module) and id(module) not in described
    )
    attention = tuple(_parts(layers, where["attention"]))
    beside = tuple(_parts(layers, where["beside_attention"]))
    other = tuple(_parts(layers, where["other"]))
    inside = [part.path for part in (*attention, *beside)] + [block.path for block in blocks]
    inside += [part.path for block in blocks for part in block.router]
    norms = tuple(
        Part(names[id(module)], module)
        for path, module in root.named_modules()
        if fnmatchcase(path.rpartition(".")[2], where["norm"])
        and not any(names[id(module)].startswith(f"{outer}.") for outer in inside)
    )
    head, tied = _head(root, names, where)
    outputs = _outputs(blocks, (*attention, *beside), norms, other, head, tied)
    return Survey(
        family,
        layers,
        blocks,
        foreign,
        attention,
        beside,
        norms,
        other,
        head,
        tied,
        names[id(root)],
        outputs,
    )


def moe_blocks(state: State) -> tuple[MoeBlock, ...]:
    """The MoE blocks of the loaded model, one a MoE layer; empty for a dense model."""
    return survey(state).known().blocks


def _family(table: dict[str, Any], model: Any, root: Any) -> str | None:
    """The first of the model type's spellings that the table knows."""
    for holder in (model, getattr(model, "config", None), root):
        kind = getattr(holder, "model_type", None)
        kind = table["aliases"].get(kind, kind)
        if kind in table["families"]:
            return kind
    return None


@cache
def _table() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("modules.json").read_text())


def _blocks(layers: tuple[Part, ...], where: dict[str, Any]) -> Iterator[MoeBlock]:
    for index, layer in enumerate(layers):
        switch = _part(layer, where["switch"])
        if switch is None:
            continue
        block = _part(layer, where["block"])
        holder, _, attribute = where["top_k"].rpartition(".")
        yield MoeBlock(
            index,
            block.path,
            block.module,
            router=tuple(_several(layer, where["router"])),
            switch=switch,
            projections=tuple(_several(switch, where["projections"])),
            activation=_part(switch, where["activation"]),
            shared=tuple(_several(layer, where["shared"])),
            shared_gate=_part(layer, where["shared_gate"]),
            routing=where["routing"],
            holder=_get(layer.module, holder),
            attribute=attribute,
            lookup=_get(layer.module, where["table"]) if where["table"] else None,
        )


def _get(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name, None)
        if module is None:
            return None
    return module


def _part(start: Part, path: str | None) -> Part | None:
    found = _get(start.module, path) if path else None
    return None if found is None else Part(f"{start.path}.{path}", found)


def _several(start: Part, paths: list[str]) -> Iterator[Part]:
    return (part for path in paths if (part := _part(start, path)) is not None)


def _parts(layers: tuple[Part, ...], entries: list[Any]) -> Iterator[Part]:
    for layer in layers:
        for entry in entries:
            path, children = (
                (entry, ()) if isinstance(entry, str) else (entry["path"], entry["with"])
            )
            part = _part(layer, path)
            if part and (not children or any(name in part.module for name in children)):
                yield part


def _head(root: Any, names: dict[int, str], where: dict[str, Any]) -> tuple[Part, bool]:
    found = {path.rpartition(".")[2]: module for path, module in root.named_modules()}
    for name in where["head"]:
        if name in found:
            return Part(names[id(found[name])], found[name]), False
    for name in where["embedding"]:
        if name in found:
            return Part(names[id(found[name])], found[name]), True
    raise Refusal("unsupported", "neither a head nor an embedding was found by modules.json")


def _is_switch(module: Any) -> bool:
    return any(base.__name__ in SWITCHES for base in type(module).__mro__)


def _outputs(
    blocks: tuple[MoeBlock, ...],
    attention: tuple[Part, ...],
    norms: tuple[Part, ...],
    other: tuple[Part, ...],
    head: Part,
    tied: bool,
) -> dict[str, str]:
    terms = {part.path: "attention" for part in attention}
    terms |= {part.path: "norm" for part in norms}
    terms |= {part.path: "other" for part in other}
    if not tied:
        terms[head.path] = "head"
    for block in blocks:
        terms[block.path] = terms[block.switch.path] = "combine"
        terms |= {part.path: "router" for part in block.router}
        terms |= {part.path: "expert_gather" for part in block.projections}
        terms |= {part.path: "shared_expert" for part in block.shared}
        terms[block.activation.path] = "activation"
        if block.shared_gate:
            terms[block.shared_gate.path] = "shared_expert"
    return terms
