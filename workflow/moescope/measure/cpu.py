"""What other processes use of the host's cores, seen while our own run.

Two views. The kernel's total less our own processes costs two or three small files; when it is
below the limit, the host is quiet. Only when it is not, the table of all processes is read to
see what of it is really others' (in a container the total holds neighbours whose processes,
and cores, are not ours).
"""

import os
import resource
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

# Processes that say "somebody is building": exact names, as the kernel shows them.
# fmt: off
COMPILERS = frozenset({
    "cargo", "rustc", "cc1", "cc1plus", "clang", "clang++", "nvcc", "cicc", "ptxas", "cudafe++",
    "hipcc", "ld", "ld.lld", "lld", "ld.gold", "ld.bfd", "mold", "collect2", "ninja",
    "swift-frontend", "metal", "metallib",
})
# fmt: on
SHORTEST_S = 0.05  # in less, a tick of the kernel's clock looks like much
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Usage(NamedTuple):
    """A process: own CPU seconds, those of children it has waited for, and where it belongs."""

    name: str
    parent: int
    own_s: float
    reaped_s: float


Table = dict[tuple[int, float], Usage]  # (pid, start time) -> usage


class Total(NamedTuple):
    """The host's cores since boot, in seconds: busy, taken by the hypervisor, all."""

    busy_s: float
    steal_s: float
    all_s: float


@dataclass(frozen=True)
class CpuReading:
    """Over the interval since the last reading.

    foreign_cpu: cores used by processes that are not ours. steal: cores that the hypervisor gave
    to others. why: what disturbs, or None; who: the largest foreign process (for logs only).
    """

    seconds: float
    foreign_cpu: float
    steal: float
    why: str | None
    who: str = ""


class CpuProbe:
    """Foreign CPU use in cores, and compilers; our own process tree is exempt.

    limit: cores. roots: pids of our own processes, besides this one and its descendants.
    total, table, clock: how the host is read (for tests).
    """

    name = "cpu"

    def __init__(
        self,
        limit: float,
        total: Callable[[], Total] | None = None,
        table: Callable[[], Table] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.limit = limit
        self._total = total or read_total
        self._table = table or read_table
        self._clock = clock
        self._visible = table is not None or _sees_processes()
        # On a Mac no container hides neighbours, and ps loses what ended between two looks: there
        # the kernel's total tells how much, the table only who.
        self._total_decides = sys.platform == "darwin"
        self._at = clock()
        self._last = self._total()
        self._last_own: Table = self._processes({os.getpid()})
        self._scan: Table = self._table() if self._visible else {}
        self._since_scan_s = 0.0
        self._total_works = False

    def read(self, own: set[int], thorough: bool) -> CpuReading:
        """One reading. ``thorough`` looks at every process, and for compilers."""
        now, total = self._clock(), self._total()
        mine = self._processes(own)
        seconds = max(now - self._at, 1e-6)
        steal = max(total.steal_s - self._last.steal_s, 0.0) / seconds
        self._total_works |= total.all_s > self._last.all_s
        busy = total.busy_s - self._last.busy_s
        upper = max(busy - consumed(self._last_own, mine), 0.0)
        self._at, self._last, self._last_own = now, total, mine
        self._since_scan_s += seconds

        if not self._visible:
            return self._judged(seconds, upper, steal, "", set())
        if self._total_works and not thorough and not self._disturbed(upper, seconds):
            return self._judged(seconds, upper, steal, "", set())
        foreign, who, compilers = self._foreign(own)
        if self._total_works:
            foreign = upper if self._total_decides else min(foreign, upper)
        else:
            foreign *= seconds / self._since_scan_s
        self._since_scan_s = 0.0
        return self._judged(seconds, foreign, steal, who, compilers)

    def settle(self, own: set[int]) -> None:
        """Nothing to do: our processes are known by their pids."""

    def _processes(self, pids: set[int]) -> Table:
        if self._table is read_table:
            return read_processes(pids)
        return {key: usage for key, usage in self._table().items() if key[0] in pids}

    def _foreign(self, own: set[int]) -> tuple[float, str, set[str]]:
        """CPU seconds of foreign processes since the last look at them all."""
        table = self._table()
        ours = descendants(table, own)
        before = {key: usage for key, usage in self._scan.items() if key not in ours}
        after = {key: usage for key, usage in table.items() if key not in ours}
        self._scan = table
        largest = max(after, key=lambda key: _growth(before, after, key), default=None)
        who = after[largest].name if largest and _growth(before, after, largest) > 0 else ""
        compilers = {usage.name for usage in after.values() if usage.name in COMPILERS}
        return consumed(before, after), who, compilers

    def _disturbed(self, foreign_s: float, seconds: float) -> bool:
        # The kernel counts in ticks, ours and everybody's: one more or less says nothing.
        return foreign_s > self.limit * seconds + 2 * TICK_S

    def _judged(
        self, seconds: float, foreign_s: float, steal: float, who: str, compilers: set[str]
    ) -> CpuReading:
        why = None
        if compilers:
            why = f"compiling: {', '.join(sorted(compilers))}"
        elif self._disturbed(foreign_s, seconds):
            why = "foreign CPU use"
        return CpuReading(seconds, foreign_s / seconds, steal, why, who)

    @staticmethod
    def summary(readings: list[CpuReading]) -> dict[str, float]:
        """Cores: the largest and mean foreign use, and the mean steal, over a run's readings."""
        seconds = sum(reading.seconds for reading in readings) or 1.0
        return {
            "peak_foreign_cpu": round(
                max((r.foreign_cpu for r in readings if r.seconds >= SHORTEST_S), default=0.0), 4
            ),
            "mean_foreign_cpu": round(
                sum(r.foreign_cpu * r.seconds for r in readings) / seconds, 4
            ),
            "steal": round(sum(r.steal * r.seconds for r in readings) / seconds, 4),
            "load1": round(os.getloadavg()[0], 2),
        }


def consumed(before: Table, after: Table) -> float:
    """CPU seconds that a set of processes used between two looks, those that ended included.

    What a process used until it ended moves to the one that waits for it; what was already
    counted while it ran is taken off there.
    """
    used = moved = 0.0
    for key, usage in after.items():
        earlier = before.get(key)
        used += usage.own_s - (earlier.own_s if earlier else 0.0)
        moved += usage.reaped_s - (earlier.reaped_s if earlier else 0.0)
    counted = sum(u.own_s + u.reaped_s for key, u in before.items() if key not in after)
    return max(used, 0.0) + max(moved - counted, 0.0)


def descendants(table: Table, roots: Iterable[int]) -> set[tuple[int, float]]:
    """Keys of the processes with these pids and of all below them."""
    children: dict[int, list[tuple[int, float]]] = {}
    for key, usage in table.items():
        children.setdefault(usage.parent, []).append(key)
    found: set[tuple[int, float]] = set()
    wanted = set(roots)
    waiting = [key for key in table if key[0] in wanted]
    while waiting:
        key = waiting.pop()
        if key not in found:
            found.add(key)
            waiting += children.get(key[0], [])
    return found


def read_total() -> Total:
    """The host's CPU time; guests' time is in user time already."""
    import psutil

    times = psutil.cpu_times()
    steal = getattr(times, "steal", 0.0)
    idle = times.idle + getattr(times, "iowait", 0.0)
    busy = times.user + times.system + getattr(times, "nice", 0.0)
    busy += getattr(times, "irq", 0.0) + getattr(times, "softirq", 0.0)
    return Total(busy, steal, busy + idle + steal)


def read_table() -> Table:
    """All processes that can be seen."""
    if sys.platform == "darwin":
        from . import macos

        rows = macos.processes(macos.ask)
        return {(row.pid, 0.0): Usage(row.name, row.parent, row.used_s, 0.0) for row in rows}
    return read_processes(int(name) for name in os.listdir("/proc") if name.isdigit())


def read_processes(pids: Iterable[int]) -> Table:
    """The usage of some processes; those that have ended are left out.

    Not on Linux: with their descendants, since nobody's parent says there what children used.
    """
    if not sys.platform.startswith("linux"):
        return _read_by_psutil(pids)
    table: Table = {}
    for pid in pids:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                head, _, tail = file.read().decode(errors="replace").rpartition(")")
        except OSError:
            continue
        fields = tail.split()
        # Fields count from 3 (state) after the name: proc(5).
        user, system, reaped_user, reaped_system = (int(fields[i]) for i in (11, 12, 13, 14))
        table[pid, float(fields[19])] = Usage(
            head.partition("(")[2],
            int(fields[1]),
            (user + system) * TICK_S,
            (reaped_user + reaped_system) * TICK_S,
        )
    return table


def _read_by_psutil(pids: Iterable[int]) -> Table:
    import psutil

    found: dict[int, psutil.Process] = {}
    for pid in pids:
        try:
            root = psutil.Process(pid)
            found |= {one.pid: one for one in (root, *root.children(recursive=True))}
        except psutil.Error:
            continue
    table: Table = {}
    for pid, process in found.items():
        try:
            times, created = process.cpu_times(), process.create_time()
        except psutil.Error:
            continue
        reaped = 0.0
        if pid == os.getpid():
            children = resource.getrusage(resource.RUSAGE_CHILDREN)
            reaped = children.ru_utime + children.ru_stime
        table[pid, created] = Usage("", 0, times.user + times.system, reaped)
    return table


def _growth(before: Table, after: Table, key: tuple[int, float]) -> float:
    return after[key].own_s - (before[key].own_s if key in before else 0.0)


def _sees_processes() -> bool:
    """Whether other users' processes can be read: not where /proc hides them."""
    if sys.platform == "darwin":
        return True
    if not sys.platform.startswith("linux"):
        return False
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return False
    options = [line.split()[3] for line in mounts if line.split()[1:3] == ["/proc", "proc"]]
    return not any("hidepid=" in o and "hidepid=0" not in o and "hidepid=off" not in o
                   for o in options)  # fmt: skip
