"""The quiet host: a lock, a gate before each run, a watch during it, and a log of both.

A thread samples the probes the whole time, also while our own runs are on: what others use is
told apart from what we use. So the gate rarely waits: it asks whether the last ``idle_s`` seconds
were quiet, and a run that was watched has just shown it.
"""

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, Self

from ..errors import UserError
from .cpu import CpuProbe
from .lock import HostLock

SCHEMA = "moescope/guard/1"
SILENCE_S = 20.0
DEFAULTS = {
    "enabled": True,
    "idle_s": 0.5,
    "max_foreign_cpu": 0.25,
    "max_wait_s": 120,
    "sample_s": 0.25,
    "max_busy_fraction": 0.2,
    "attempts": 5,
}


class Reading(Protocol):
    """What a probe saw: ``why`` says what disturbs, or is None; ``who`` is for logs only."""

    why: str | None
    who: str


class Probe(Protocol):
    """Something that can disturb a run. Called from one thread at a time."""

    name: str

    def read(self, own: set[int], thorough: bool) -> Reading: ...

    def settle(self, own: set[int]) -> None: ...

    def summary(self, readings: list[Any]) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Sample:
    """All probes at one moment; it speaks of the interval from start to end (monotonic)."""

    start: float
    end: float
    readings: dict[str, Any]

    @property
    def why(self) -> list[str]:
        return [reading.why for reading in self.readings.values() if reading.why]

    @property
    def who(self) -> str:
        return next((r.who for r in self.readings.values() if r.why and r.who), "")


@dataclass(frozen=True)
class Gate:
    """How long a run waited for a quiet host, and whether it went on without one."""

    waited_s: float
    waited_out: bool


@dataclass
class Watch:
    """What was seen during a run; filled when the watch ends.

    samples: their number. busy_fraction: share of the run's time in which something disturbed.
    """

    samples: int = 0
    busy_fraction: float = 0.0
    why: str | None = None
    facts: dict[str, Any] | None = None


class Guard:
    """Gate, watch and log over a list of probes.

    settings: the study's guard. With ``enabled`` false nothing waits and nothing is rejected; what
    the probes see is recorded all the same.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        probes: list[Probe] | None = None,
        say: Callable[[str], None] = lambda _: None,
    ):
        self.settings = DEFAULTS | settings
        self.probes = probes if probes is not None else [CpuProbe(self.settings["max_foreign_cpu"])]
        self.say = say
        self.lines: list[dict[str, Any]] = []
        self._own: set[int] = set()
        self._samples: list[Sample] = []
        self._keep_from = float("inf")
        self._lock = threading.Lock()
        self._fresh = threading.Condition()
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._waiting_s = 0.0
        self._thread = threading.Thread(target=self._run, name="guard", daemon=True)

    def __enter__(self) -> Self:
        import os

        self._own.add(os.getpid())
        self._last = time.monotonic()
        self._thread.start()
        self.log("start", settings=self.settings, probes=[probe.name for probe in self.probes])
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(SILENCE_S)

    def own(self, pid: int | None) -> None:
        """A process of ours, which disturbs nothing (its descendants neither)."""
        if pid is not None:
            self._own = self._own | {pid}

    def settle(self) -> None:
        """All processes of ours are up; tell the probes."""
        with self._lock:
            for probe in self.probes:
                probe.settle(self._own)

    def log(self, event: str, **facts: Any) -> None:
        self.lines.append({"schema": SCHEMA, "event": event, **facts})

    def gate(self, run: str) -> Gate:
        """Wait until the last ``idle_s`` seconds were quiet, ``max_wait_s`` at most.

        After a wait in vain the next gates are short, until the host has been quiet once: a loaded
        host costs one long wait, then the watch decides.
        """
        if not self.settings["enabled"]:
            return Gate(0.0, False)
        idle_s = self.settings["idle_s"]
        begin = time.monotonic()
        limit = max(self.settings["max_wait_s"] - self._waiting_s, 2 * idle_s)
        reasons: Counter[str] = Counter()
        told = False
        while True:
            self._sample(thorough=True)
            now = time.monotonic()
            window = [s for s in self._recent() if s.end > now - idle_s]
            disturbing = [sample for sample in window if sample.why]
            covered = bool(window) and window[0].start <= now - idle_s
            if covered and not disturbing:
                self._waiting_s = 0.0
                waited, out = now - begin, False
                break
            if now - begin >= limit:
                self._waiting_s += now - begin
                waited, out = now - begin, True
                break
            if disturbing:
                reasons.update(disturbing[-1].why)
                if not told and now - begin > 2 * idle_s:
                    self.say(f"the host is not quiet ({_told(disturbing[-1])}); waiting")
                    told = True
            self._wait_for_sample()
        if told or out:
            self.log("gate", run=run, waited_s=round(waited, 3), waited_out=out,
                     why=dict(reasons.most_common()))  # fmt: skip
        if out:
            self.say(f"the host did not become quiet within {waited:.0f} s; going on")
        return Gate(round(waited, 3), out)

    @contextmanager
    def watch(self, run: str, attempt: int = 1) -> Iterator[Watch]:
        """Watch a run; afterwards the Watch says what was seen and, in ``why``, if to reject it."""
        watch = Watch()
        self._sample()
        begin = self._keep_from = time.monotonic()
        try:
            yield watch
        finally:
            self._sample()
            samples = [s for s in self._recent() if s.end > begin]
            self._keep_from = float("inf")
            self._judge(watch, samples)
            self.log(
                "watch", run=run, attempt=attempt, rejected=watch.why is not None, why=watch.why,
                samples=watch.samples, busy_fraction=watch.busy_fraction, **watch.facts,
            )  # fmt: skip

    def _judge(self, watch: Watch, samples: list[Sample]) -> None:
        seconds = sum(s.end - s.start for s in samples)
        busy = [sample for sample in samples if sample.why]
        watch.samples = len(samples)
        if seconds > 0:
            watch.busy_fraction = round(sum(s.end - s.start for s in busy) / seconds, 4)
        watch.facts = {}
        for probe in self.probes:
            readings = [sample.readings[probe.name] for sample in samples]
            watch.facts |= probe.summary(readings)
        if self.settings["enabled"] and watch.busy_fraction > self.settings["max_busy_fraction"]:
            reasons = Counter(reason for sample in busy for reason in sample.why)
            watch.why = f"disturbed in {watch.busy_fraction:.0%} of its time: " + ", ".join(reasons)
            if who := next((s.who for s in busy if s.who), ""):
                self.say(f"disturbed by {who}")

    # Sampling.

    def _run(self) -> None:
        try:
            while not self._stop.wait(self.settings["sample_s"]):
                self._sample()
        except BaseException as error:
            with self._fresh:
                self._error = error
                self._fresh.notify_all()

    def _sample(self, thorough: bool = False) -> None:
        if self._error is not None:
            raise UserError(f"the guard cannot see the host: {self._error}") from self._error
        if not self._lock.acquire(timeout=SILENCE_S):
            raise UserError(
                f"the guard's probes have been silent for {SILENCE_S:g} s; is the GPU's driver "
                "hanging? Nothing is measured on a host that cannot be seen"
            )
        try:
            start, self._last = self._last, time.monotonic()
            readings = {probe.name: probe.read(self._own, thorough) for probe in self.probes}
            with self._fresh:
                self._samples.append(Sample(start, self._last, readings))
                oldest = min(self._last - 2 * self.settings["idle_s"] - 1, self._keep_from)
                while self._samples[0].end < oldest:
                    self._samples.pop(0)
                self._fresh.notify_all()
        finally:
            self._lock.release()

    def _recent(self) -> list[Sample]:
        with self._fresh:
            return list(self._samples)

    def _wait_for_sample(self) -> None:
        with self._fresh:
            answered = self._fresh.wait(SILENCE_S)
        if not answered or self._error is not None:
            self._sample()


def _told(sample: Sample) -> str:
    return ", ".join(sample.why) + (f" by {sample.who}" if sample.who else "")


@contextmanager
def locked(
    what: str,
    backend: str,
    limit_s: float,
    say: Callable[[str], None],
    shared: bool = False,
) -> Iterator[dict[str, Any]]:
    """Hold the host's lock and, on CUDA, that of the GPU in use; yields what taking them cost.

    limit_s bounds the wait for each. shared: beside others for whom time means nothing either.
    Raises UserError when the time is over.
    """
    names = ["host"]
    if backend == "cuda":
        from . import gpu

        names += [f"gpu-{uuid}" for uuid in gpu.in_use()]
    with ExitStack() as stack:
        waited = 0.0
        for name in names:
            lock = HostLock(name, what, shared)
            waited += lock.acquire(limit_s, say)["waited_s"]
            stack.callback(lock.release)
        yield {"locks": [name.split("-")[0] for name in names], "waited_s": round(waited, 3)}


def probes(settings: dict[str, Any], backend: str) -> list[Probe]:
    """The probes of a backend on this system."""
    found: list[Probe] = [CpuProbe((DEFAULTS | settings)["max_foreign_cpu"])]
    if backend == "cuda":
        from .gpu import GpuProbe

        found.append(GpuProbe())
    if sys.platform == "darwin":
        from .mac_probe import MacProbe

        found.append(MacProbe())
    return found
