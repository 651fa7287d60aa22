"""The same few CPUs for all arms, so that arms that take turns see the same ones.

On a virtual host each CPU has its own neighbours and so its own speed, and where the scheduler
puts a process after a pause is chance: two processes of the same arm then differ by what they run
on. Confined to the same CPUs they do not.
"""

import os
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ..errors import UserError

TRIES, SWEEPS = 5, 5
STEPS = 20_000  # of a loop in Python: about a millisecond


def fastest(count: int) -> list[int]:
    """The ``count`` CPUs that do a fixed piece of work the fastest, in the order of their numbers.

    Each CPU is tried in several sweeps over all, and judged by its slowest sweep, so that a CPU
    whose neighbour pauses just now is not chosen. Takes about 25 ms a CPU.

    Raises UserError where processes cannot be confined (macOS) and with fewer CPUs than wanted.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise UserError(
            "this system does not confine a process to CPUs; leave it out of the study",
            "rounds.cpus",
        )
    here = sorted(os.sched_getaffinity(0))
    if len(here) < count:
        raise UserError(
            f"{count} CPUs are asked for and this process may use {len(here)}; allowed: 1 to "
            f"{len(here)}, or leave it out of the study",
            "rounds.cpus",
        )
    times: dict[int, list[float]] = {cpu: [] for cpu in here}
    try:
        for _ in range(SWEEPS):
            for cpu in here:
                os.sched_setaffinity(0, [cpu])
                times[cpu].append(statistics.median(_work() for _ in range(TRIES)))
    finally:
        os.sched_setaffinity(0, here)
    return sorted(sorted(here, key=lambda cpu: max(times[cpu]))[:count])


def confine(pid: int, cpus: Sequence[int]) -> None:
    """All threads of a process, and what they start from now on, run on these CPUs alone."""
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(ProcessLookupError):  # it may end meanwhile
            os.sched_setaffinity(int(thread.name), cpus)


def _work() -> float:
    begin, total = time.perf_counter(), 0
    for step in range(STEPS):
        total += step * step
    return time.perf_counter() - begin
