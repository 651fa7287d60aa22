"""The records of one window of decode, as the worker wrote them (moescope/events/1).

Times are nanoseconds of one clock for host and GPU.
"""

import gzip
import json
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import check_schema

SCHEMA = "moescope/events/1"


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel that ran. name: mangled. graph, node: of CUDA's, 0 outside graphs. launch: what
    its launch and its CUDA call share."""

    name: str
    start: int
    end: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    stream: int
    graph: int
    node: int
    launch: int

    @property
    def ns(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Call:
    """One call of CUDA's runtime or driver."""

    name: str
    start: int
    end: int
    thread: int
    launch: int


@dataclass(frozen=True, slots=True)
class Copy:
    """A memory copy or fill on the GPU. kind: "memcpy" or "memset"."""

    kind: str
    start: int
    end: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment of the decode loop: begin, built, taken, token, end; see the worker's kernels."""

    what: str
    step: int
    time: int


@dataclass(frozen=True)
class Events:
    """One window. kernels, calls, copies: by start.

    ranges: (name, begin, end) of MLX's own ranges, by begin, or None if they were not heard.
    steps: step -> its graph's [primitive, module, term] in order of execution, where exported.
    boundaries: (term, time) of a forced pass of forced_tokens tokens: the term of what ran since
    the boundary before. dropped: records that were lost. cpu: at each token (step, processor time
    of the process, of the thread of the loop).
    """

    marks: list[Mark]
    kernels: list[Kernel]
    calls: list[Call]
    copies: list[Copy]
    overhead: dict[str, tuple[int, int]]
    ranges: list[tuple[str, int, int]] | None
    steps: dict[int, list[tuple[str, str, str]]] = field(repr=False)
    boundaries: list[tuple[str, int]] = field(repr=False)
    forced_tokens: int = 0
    dropped: int = 0
    cpu: list[tuple[int, int, int]] = field(default_factory=list, repr=False)

    def times(self, what: str) -> dict[int, int]:
        """Step -> time of one kind of mark."""
        return {mark.step: mark.time for mark in self.marks if mark.what == what}


def read_events(path: Path) -> Events:
    """Read a worker's file; raises UserError if it is cut off or of another version."""
    try:
        with gzip.open(path, "rt") as file:
            content = json.load(file)
    except (OSError, EOFError, ValueError) as error:
        raise UserError(f"no events of a worker: {error}", str(path)) from None
    check_schema(content, SCHEMA, str(path))
    return from_json(content)


def from_json(content: dict[str, Any]) -> Events:
    """The events of a worker's JSON (see the worker's kernels command)."""
    sequences = [[tuple(row) for row in rows] for rows in content["sequences"]]
    overhead: dict[str, tuple[int, int]] = {}
    for name, start, end in _rows(content["overhead"]):
        count, ns = overhead.get(name, (0, 0))
        overhead[name] = (count + 1, ns + end - start)
    return Events(
        [Mark(*mark) for mark in content["marks"]],
        [
            Kernel(name, start, end, (gx, gy, gz), (bx, by, bz), *rest)
            for name, start, end, gx, gy, gz, bx, by, bz, *rest in _rows(content["kernels"])
        ],
        [Call(*row) for row in _rows(content["calls"])],
        [Copy(*row[:4]) for row in _rows(content["copies"])],
        overhead,
        _nested(content["ranges"]) if content.get("ranges") else None,
        {int(step): sequences[which] for step, which in content["steps"].items()},
        [(term, time) for term, time in content.get("boundaries", ())],
        content.get("forced_tokens", 0),
        content["dropped"],
        [(step, process, thread) for step, process, thread in content.get("cpu", ())],
    )


def _rows(table: dict[str, Any]) -> list[list[Any]]:
    names = table["names"]
    return [[names[name], *rest] for name, *rest in table["rows"]]


def _nested(heard: list[list[Any]]) -> list[tuple[str, int, int]]:
    """Ranges from their begins [name, time] and ends [None, time], which nest."""
    found: list[tuple[str, int, int]] = []
    opened: list[tuple[str, int]] = []
    for name, time in heard:
        if name is not None:
            opened.append((name, time))
        elif opened:
            begun, start = opened.pop()
            found.append((begun, start, time))
    return sorted(found, key=lambda entry: entry[1])


@cache
def demangle(name: str) -> str:
    """A kernel's name in C++, without its return type, its parameters and MLX's namespace."""
    import cxxfilt

    if not name.startswith("_Z"):
        return name
    try:
        text = cxxfilt.demangle(name)
    except cxxfilt.InvalidName:
        return name
    text = text.replace("(anonymous namespace)::", "")
    start, depth, end = 0, 0, len(text)
    for at, letter in enumerate(text):
        depth += (letter == "<") - (letter == ">")
        if depth == 0 and letter == " ":
            start = at + 1  # what stands before is the return type
        elif depth == 0 and letter == "(":
            end = at
            break
    return re.sub(r"\bmlx::core::(cu::)?", "", text[start:end])


@cache
def base_name(name: str) -> str:
    """A kernel's name without its template's arguments: what tables of kernels speak of."""
    return demangle(name).partition("<")[0]
