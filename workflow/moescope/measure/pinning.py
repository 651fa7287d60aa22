"""One CPU for the host's part of every arm, so that arms that take turns see the same speeds.

The CPUs of a virtual host share cores with its neighbours' and change their speed by up to two
within a second, each on its own; where the scheduler puts a process after a pause is chance. Two
processes of the same arm then differ by what they run on. On the same CPU they do not.
"""

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import UserError

TRIES, SWEEPS = 3, 3
STEPS = 20_000  # of a loop in Python: one or two milliseconds


def fastest() -> int:
    """The CPU that does a fixed piece of work the fastest, of those that this process may use.

    Each is tried in several sweeps over all and judged by its slowest, so that one whose neighbour
    pauses just now is not chosen. Takes about 20 ms a CPU.

    Raises UserError where a process cannot be bound to a CPU (macOS).
    """
    if not hasattr(os, "sched_setaffinity"):
        raise UserError(
            "this system does not bind a process to a CPU; leave it out of the study",
            "rounds.pinned",
        )
    here = sorted(os.sched_getaffinity(0))
    times: dict[int, list[float]] = {cpu: [] for cpu in here}
    try:
        for _ in range(SWEEPS):
            for cpu in here:
                os.sched_setaffinity(0, [cpu])
                times[cpu].append(statistics.median(_work() for _ in range(TRIES)))
    finally:
        os.sched_setaffinity(0, here)
    return min(here, key=lambda cpu: max(times[cpu]))


def pin(pid: int, cpu: int, *, threads: bool) -> None:
    """A process's main thread, which runs the model's code and encodes for a GPU, on one CPU.

    threads: the others too, as MLX's CPU backend needs, which computes in one of them. Else they
    run on all others.
    """
    others = os.sched_getaffinity(0) - {cpu}
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        here = {cpu} if threads or int(thread.name) == pid or not others else others
        with suppress(ProcessLookupError):  # it may end meanwhile
            os.sched_setaffinity(int(thread.name), here)


@contextmanager
def away_from(cpu: int | None) -> Iterator[None]:
    """This thread, and those that it starts meanwhile, on the other CPUs if there are any."""
    if cpu is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, before - {cpu} or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _work() -> float:
    begin, total = time.perf_counter(), 0
    for step in range(STEPS):
        total += step * step
    return time.perf_counter() - begin
