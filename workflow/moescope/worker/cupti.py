"""What the GPU did, as CUPTI tells it: kernels, copies, CUDA API calls, the profiler's own work.

CUPTI only sees a process in which it was there first: start the worker with
MOESCOPE_BEFORE_MLX=cupti, and ``prepare`` runs before MLX is imported. Kernel records stay enabled
from then on, since a CUDA graph whose nodes are to be told apart must have been instantiated under
them; what is recorded outside ``recording`` is dropped. Buffers are large enough for a window of
decode, so that they are drained after it and not during it. Times are nanoseconds of one clock for
host and GPU (``now``).
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from .state import Refusal

BUFFER = 64 << 20  # bytes; a kernel's record takes about 200
LIMIT = 4_000_000  # records kept of one recording; what comes after is counted and dropped

_cupti: Any = None
_events: "Events | None" = None


@dataclass
class Events:
    """Records of one recording, in no order. Names are mangled.

    kernels: name, start, end, grid x y z, block x y z, stream, graph, graph node, correlation.
    copies: kind ("memcpy" or "memset"), start, end, bytes, stream, graph, graph node, correlation.
    calls: name, start, end, thread, correlation. overhead: kind, start, end.
    dropped: records lost to LIMIT or by CUPTI itself.
    """

    kernels: list[tuple] = field(default_factory=list)
    copies: list[tuple] = field(default_factory=list)
    calls: list[tuple] = field(default_factory=list)
    overhead: list[tuple] = field(default_factory=list)
    dropped: int = 0

    def __len__(self) -> int:
        return sum(map(len, (self.kernels, self.copies, self.calls, self.overhead)))


def prepare() -> None:
    """Start CUPTI in this process; raises Refusal where there is none."""
    global _cupti
    try:
        from cupti import cupti
    except ImportError as error:
        raise Refusal("unsupported", f"the environment has no cupti-python: {error}") from None
    try:
        cupti.activity_register_callbacks(lambda: (BUFFER, 0), _drain)
        for kind in ("CONCURRENT_KERNEL", "MEMCPY", "MEMSET"):
            cupti.activity_enable(getattr(cupti.ActivityKind, kind))
    except Exception as error:
        raise Refusal("unsupported", f"CUPTI does not start: {error}") from None
    _cupti = cupti


def running() -> Any:
    """The bindings; a Refusal if CUPTI was not started before MLX."""
    if _cupti is None:
        raise Refusal("unsupported", "start the worker with MOESCOPE_BEFORE_MLX=cupti")
    return _cupti


def now() -> int:
    """CUPTI's clock, in nanoseconds."""
    return _cupti.get_timestamp()


@contextmanager
def recording(calls: str = "all") -> Iterator[Events]:
    """Collect records; complete when the context is left, if the GPU is idle then.

    calls: "all" (every CUDA call, at a cost per call) or "none". CUPTI can leave out calls one by
    one, but refused that on the H200 it was tried on.
    """
    global _events
    cupti = running()
    _flush()  # what came before is dropped
    kinds = ["OVERHEAD"] + (["RUNTIME", "DRIVER"] if calls != "none" else [])
    events = _events = Events()
    try:
        for kind in kinds:
            cupti.activity_enable(getattr(cupti.ActivityKind, kind))
        yield events
    finally:
        _flush()
        _events = None
        for kind in kinds:
            cupti.activity_disable(getattr(cupti.ActivityKind, kind))
        lost = ctypes.c_size_t()
        cupti.activity_get_num_dropped_records(0, 0, ctypes.addressof(lost))
        events.dropped += lost.value


def _flush() -> None:
    _cupti.activity_flush_all(1)


SHAPE = attrgetter("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z")
GRAPH = attrgetter("graph_id", "graph_node_id", "correlation_id")


def _drain(records: list[Any]) -> None:
    events = _events
    if events is None:
        return
    if len(events) + len(records) > LIMIT:
        events.dropped += len(records)
        return
    kind = _cupti.ActivityKind
    kernel, runtime, driver = kind.CONCURRENT_KERNEL, kind.RUNTIME, kind.DRIVER
    for r in records:
        if r.kind == kernel:
            events.kernels.append((r.name, r.start, r.end, *SHAPE(r), r.stream_id, *GRAPH(r)))
        elif r.kind in (runtime, driver):
            name = _call_name(r.kind == driver, r.cbid)
            events.calls.append((name, r.start, r.end, r.thread_id, r.correlation_id))
        elif r.kind in (kind.MEMCPY, kind.MEMSET):
            events.copies.append(
                (
                    "memcpy" if r.kind == kind.MEMCPY else "memset",
                    *(r.start, r.end, r.bytes, r.stream_id, *GRAPH(r)),
                )
            )
        elif r.kind == kind.OVERHEAD:
            name = _cupti.ActivityOverheadKind(r.overhead_kind).name
            events.overhead.append((name, r.start, r.end))


_names: dict[tuple[bool, int], str] = {}


def _call_name(driver: bool, number: int) -> str:
    """A call's name without its version ("cudaGraphLaunch_v10000")."""
    key = (driver, number)
    if key not in _names:
        domain = _cupti.CallbackDomain
        domain = domain.DRIVER_API if driver else domain.RUNTIME_API
        name = _cupti.get_callback_name(domain, number)
        _names[key] = name.split("_")[0]
    return _names[key]
