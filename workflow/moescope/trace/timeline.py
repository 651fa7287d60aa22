"""One decode step drawn in time: for Perfetto (Chrome's trace format), and small, for a page."""

import json
from collections.abc import Sequence
from typing import Any

from .align import Label
from .events import Events, Kernel, demangle
from .kernels import UNCLASSIFIED, phases, plain

GPU, HOST = 1, 2


def perfetto(
    events: Events, steps: Sequence[int], kernels: dict[int, Sequence[Kernel]],
    labels: dict[int, Sequence[Label]],
) -> str:  # fmt: skip
    """Chrome trace JSON of these steps: rows for each stream, the terms, the host's loop and
    each thread that calls CUDA. Times start at 0."""
    loop = phases(events, steps[0], steps[-1])
    zero, end = loop["build"][0][0], loop["wait"][-1][1]
    rows: list[dict[str, Any]] = [
        _name(GPU, None, "GPU"), _name(HOST, None, "host"), _name(GPU, 0, "terms"),
        _name(HOST, 0, "decode loop"),
    ]  # fmt: skip
    for step in steps:
        for kernel, label in zip(kernels[step], labels[step], strict=True):
            term = label.term or UNCLASSIFIED
            more = {
                "term": term, "module": label.module, "primitive": plain(label.primitive),
                "step": step, "grid": kernel.grid, "block": kernel.block, "graph": kernel.graph,
            }  # fmt: skip
            rows.append(_span(GPU, kernel.stream, demangle(kernel.name), kernel, zero, more))
            rows.append(_span(GPU, 0, term, kernel, zero, {}))
        for stream in sorted({kernel.stream for kernel in kernels[step]}):
            rows.append(_name(GPU, stream, f"stream {stream}"))
    for phase, spans in loop.items():
        for a, b in spans:
            rows.append(_event(HOST, 0, phase, a, b, zero, {}))
    for call in events.calls:
        if zero <= call.start < end:
            rows.append(_event(HOST, call.thread, call.name, call.start, call.end, zero, {}))
    for thread in sorted({call.thread for call in events.calls}):
        rows.append(_name(HOST, thread, f"CUDA calls of thread {thread}"))
    return json.dumps({"traceEvents": rows, "displayTimeUnit": "ns"}, separators=(",", ":"))


def spans(kernels: Sequence[Kernel], labels: Sequence[Label]) -> list[dict[str, Any]]:
    """One step's GPU time as {"start_us", "end_us", "term", "launches"}: what follows in the same
    term is one span, gaps inside it included. Times from the first kernel's start."""
    found: list[dict[str, Any]] = []
    order = sorted(zip(kernels, labels, strict=True), key=lambda pair: pair[0].start)
    zero = order[0][0].start if order else 0
    for kernel, label in order:
        term = label.term or UNCLASSIFIED
        start, end = (kernel.start - zero) / 1e3, (kernel.end - zero) / 1e3
        if found and found[-1]["term"] == term:
            found[-1]["end_us"] = max(found[-1]["end_us"], end)
            found[-1]["launches"] += 1
        else:
            found.append({"start_us": start, "end_us": end, "term": term, "launches": 1})
    return found


def _span(
    process: int, thread: int, name: str, kernel: Kernel, zero: int, more: dict[str, Any]
) -> dict[str, Any]:
    return _event(process, thread, name, kernel.start, kernel.end, zero, more)


def _event(
    process: int, thread: int, name: str, start: int, end: int, zero: int, more: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X", "pid": process, "tid": thread, "name": name, "ts": (start - zero) / 1e3,
        "dur": (end - start) / 1e3, **({"args": more} if more else {}),
    }  # fmt: skip


def _name(process: int, thread: int | None, name: str) -> dict[str, Any]:
    what = "process_name" if thread is None else "thread_name"
    return {"ph": "M", "pid": process, "tid": thread or 0, "name": what, "args": {"name": name}}
