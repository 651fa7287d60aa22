"""What passes the boundaries of a model's modules while one step's graph is built.

For each call the recorder keeps the arrays that go in and come out, in the order of time; nothing
is evaluated. From that, each node of the step's graph gets the call that made it: a node that an
event's arrays need, and that no earlier event's arrays needed, was made just before that event, by
the innermost call then active. So the softmax between a gate and its experts belongs to the block
that calls both, although no module of its own holds it.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .order import Graph
from .wrap import Changes

# Methods that take part in a step -> what is put behind the module's path for them. A tied head
# is a call of the embedding's as_linear.
METHODS = {"__call__": "", "as_linear": ".as_linear"}


@dataclass(frozen=True)
class Call:
    """One call of a module. parent: position of the calling call, -1 for the root."""

    path: str
    parent: int


@dataclass(frozen=True)
class Event:
    """Arrays seen at a boundary, and the call that made what is new in them. output: they are that
    call's result."""

    maker: int
    arrays: tuple[int, ...]
    output: bool


@dataclass
class Recorder:
    """Records while ``on``; ``arrays`` holds what it saw, by identity (mx.array's hash).

    Held arrays cannot be donated: call ``forget`` before the step is evaluated.
    """

    on: bool = False
    calls: list[Call] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    arrays: dict[int, mx.array] = field(default_factory=dict)
    stack: list[int] = field(default_factory=list)

    def enter(self, path: str, parent: int) -> int:
        self.calls.append(Call(path, parent))
        self.stack.append(len(self.calls) - 1)
        return self.stack[-1]

    def leave(self, call: int) -> None:
        if self.stack and self.stack[-1] == call:
            self.stack.pop()

    def see(self, maker: int, values: Any, output: bool = False) -> None:
        if not self.on:
            return
        found = tuple(arrays_in(values))
        self.arrays.update((hash(array), array) for array in found)
        self.events.append(Event(maker, tuple(hash(array) for array in found), output))

    def forget(self) -> None:
        self.on = False
        self.calls, self.events, self.arrays, self.stack = [], [], {}, []


def arrays_in(value: Any) -> Iterator[mx.array]:
    """The arrays in nested lists, tuples, dicts and plain objects' fields (dataclasses)."""
    if isinstance(value, mx.array):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from arrays_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from arrays_in(item)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from arrays_in(getattr(value, name))


@contextmanager
def recorded(model: nn.Module) -> Iterator[Recorder]:
    """Watch the calls of all the model's modules; put back whatever happens."""
    recorder = Recorder()
    modules: dict[int, tuple[nn.Module, list[str]]] = {}
    for path, module in walk(model):
        modules.setdefault(id(module), (module, []))[1].append(path)
    with Changes() as changes:
        for module, paths in modules.values():
            for name, suffix in METHODS.items():
                if any(name in base.__dict__ for base in type(module).__mro__):
                    changes.method(module, name, _watch(recorder, paths, suffix))
        try:
            yield recorder
        finally:
            recorder.forget()


def _watch(recorder: Recorder, paths: list[str], suffix: str) -> Callable[[Callable], Callable]:
    def make(method: Callable) -> Callable:
        def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not recorder.on:
                return method(module, *args, **kwargs)
            parent = recorder.stack[-1] if recorder.stack else -1
            above = recorder.calls[parent].path if parent >= 0 else None
            recorder.see(parent, (args, kwargs))
            me = recorder.enter(_path(paths, above) + suffix, parent)
            try:
                result = method(module, *args, **kwargs)
            finally:
                recorder.leave(me)
            recorder.see(me, result, output=True)
            return result

        return watched

    return make


def _path(candidates: list[str], above: str | None) -> str:
    """Of a module's paths, the one below its caller's: one object may stand in every layer."""
    below = [path for path in candidates if above and path.startswith(f"{above}.")]
    return (below or candidates)[0]


def walk(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every module with every path that leads to it (``named_modules`` gives one path each)."""
    yield path, module
    for name, child in module.children().items():
        yield from _below(f"{path}.{name}" if path else name, child)


def _below(path: str, child: Any) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(child, nn.Module):
        yield from walk(child, path)
    elif isinstance(child, list | tuple):
        for i, item in enumerate(child):
            yield from _below(f"{path}.{i}", item)
    elif isinstance(child, dict):
        for name, item in child.items():
            yield from _below(f"{path}.{name}", item)


def results(events: Iterable[Event], names: dict[int, str]) -> dict[str, list[int]]:
    """Array -> the calls that returned it, as far as the arrays have names."""
    found: dict[str, list[int]] = {}
    for event in events:
        if event.output:
            for array in event.arrays:
                if array in names:
                    found.setdefault(names[array], []).append(event.maker)
    return found


def makers(graph: Graph, events: Iterable[Event], names: dict[int, str]) -> list[int | None]:
    """For each node of the graph the position of the call that made it; None if no event needs it.

    names: array identity -> its name in the graph's text.
    """
    made: list[int | None] = [None] * len(graph.nodes)
    for event in events:
        left = [graph.maker.get(names[array]) for array in event.arrays if array in names]
        while left:
            node = left.pop()
            if node is None or made[node] is not None:
                continue
            made[node] = event.maker
            left += [graph.maker.get(name) for name in graph.nodes[node].inputs]
    return made
