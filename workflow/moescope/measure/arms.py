"""The arms of a checkpoint and their processes: started, loaded, warmed up, asked.

Arms that cannot run here leave, and the others go on: an arm that finds nothing to change, one
whose runtime does not know the model, and one that fails or dies.
"""

import itertools
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..runtimes.client import THREAD_VARIABLES, Worker, WorkerDied, WorkerError, close_all
from ..runtimes.environments import Interpreter
from ..task import Task
from . import bench as benches
from . import guard as guards
from . import pinning
from .failed import told
from .failing import failure
from .journal import Journal
from .schedule import processes

BANDWIDTH_LIMIT_S = 120.0
REFUSALS = ("not_applicable", "unsupported")


@dataclass
class Process:
    """A worker and the arms that share it; ``worker`` is replaced when it died of one of them."""

    index: int
    arms: list[str]
    worker: Worker
    loaded: dict[str, Any] = field(default_factory=dict)


class Arms:
    """here: the arms that are left. absent: kind -> arm -> why. failed: arm -> {"kind", "why"}.

    limits: seconds that a pass of an arm may take. pass_s: what its last warm-up took.
    """

    def __init__(self, task: Task, bench: benches.Bench, guard: guards.Guard, journal: Journal):
        self.task, self.bench, self.guard, self.journal = task, bench, guard, journal
        self.shape = task.params["shape"]
        self.slices = task.params["rounds"].get("slices", 1)
        self.failed = journal.failed
        arms = task.params["arms"]
        self.here: dict[str, Any] = {n: arm for n, arm in arms.items() if n not in self.failed}
        self.absent: dict[str, dict[str, str]] = {kind: {} for kind in REFUSALS}
        self.processes: list[Process] = []
        self.limits: dict[str, float] = {}
        self.pass_s: dict[str, float] = {}
        self.cpu: int | None = None  # that all processes are pinned to

    @contextmanager
    def started(self) -> Iterator[None]:
        """All workers loaded, at the same time, and each arm warmed up; ended afterwards."""
        with ExitStack() as stack:
            # At the same time: a process with gigabytes on a GPU takes a while to end.
            stack.callback(lambda: close_all(process.worker for process in self.processes))
            for index, names in enumerate(self._groups()):
                if not any(name in self.here for name in names):
                    continue
                process = Process(index, names, self.bench.worker(self.here_of(names)))
                self.processes.append(process)
                try:
                    process.worker.start()
                except WorkerError as error:
                    self._give_up(process, error)
                self.guard.own(process.worker.pid)
            self._load(self.processes)
            self.guard.settle()
            self._warm_up(list(self.here))
            if self.task.params["rounds"].get("pinned"):
                self.cpu = pinning.fastest()
                self.task.say(f"all arms run on CPU {self.cpu}")
                self._pin(self.processes)
            with pinning.away_from(self.cpu):
                yield

    def ask(self, arm: str, do: str, **arguments: Any) -> dict[str, Any]:
        """One request to an arm's process. Raises WorkerError; see ``fail``."""
        return self.process(arm).worker.ask(do, self.limits[arm], **arguments)

    def decoding(self, arm: str) -> dict[str, Any]:
        """The arguments of a whole pass."""
        return {
            "prompt": self.bench.prompt,
            "tokens": self.shape["generate"],
            "patches": self.here[arm].get("patches", []),
        }

    def is_command(self, arm: str) -> bool:
        return not isinstance(self.bench.runtimes[self.here[arm]["runtime"]], Interpreter)

    def process(self, arm: str) -> Process:
        return next(process for process in self.processes if arm in process.arms)

    def here_of(self, names: Iterable[str]) -> dict[str, Any]:
        """The first arm of some that is left."""
        return next(self.here[name] for name in names if name in self.here)

    def fail(self, arm: str, error: WorkerError) -> dict[str, str]:
        """The arm leaves; those that share its process go on in a new one if it died.

        Returns what it failed of.
        """
        process = self.process(arm)
        found = self._leave(arm, error)
        if isinstance(error, WorkerDied) and self._left(process):
            self._restart(process)
        return found

    def bandwidth(self) -> dict[str, Any] | None:
        """What the memory of this host gives, in this session: the ceiling of a decode step.

        None where no process can tell (a command), and on CUDA, where the trace measures it.
        """
        able = [arm for arm in self.here if not self.is_command(arm)]
        if self.task.params["machine"]["backend"] == "cuda" or not able:
            return None
        try:
            worker = self.process(able[0]).worker
            return worker.ask("bandwidth", BANDWIDTH_LIMIT_S, repeats=3)
        except WorkerError as error:
            self.task.say(f"no bandwidth was measured: {error}")
            return None

    def environment(self) -> dict[str, Any]:
        """environment.json's part about the processes and the arms that could not run here."""
        return {
            "processes": [
                {
                    "index": process.index,
                    "arms": process.arms,
                    # None for a process that never came up; its arms have failed.
                    **{
                        name: process.worker.ready.get(name)
                        for name in ("versions", "device", "library_sha256")
                    },
                    "variables": {
                        name: process.worker.env[name] for name in sorted(THREAD_VARIABLES)
                    },
                    "load_s": process.loaded.get("seconds"),
                }
                for process in self.processes
            ],
            "starts": self.journal.starts,
            **({} if self.cpu is None else {"pinned_to": self.cpu}),
            **self.absent,
            "failed": self.failed,
        }

    # Starting.

    def _groups(self) -> list[list[str]]:
        return processes(self.task.params["arms"], apart=self.slices > 1)

    def _left(self, process: Process) -> list[str]:
        return [arm for arm in process.arms if arm in self.here]

    def _load(self, starting: list[Process]) -> None:
        deadline = time.monotonic() + benches.LOAD_LIMIT_S
        for process in starting:
            if self._left(process):
                try:
                    process.worker.wait_ready()
                    arguments = self.bench.loading(self.here_of(process.arms))
                    process.worker.send("load", deadline=deadline, **arguments)
                except WorkerError as error:
                    self._give_up(process, error)
        for process in starting:
            if self._left(process):
                try:
                    process.loaded = process.worker.receive("load", deadline=deadline)
                except WorkerError as error:
                    self._give_up(process, error)

    def _warm_up(self, names: list[str]) -> None:
        """The discarded passes.

        On CUDA those of different processes run at the same time, and nothing of them is kept. The
        first is alone: what MLX compiles, it writes to its cache in place, and others that need the
        same kernels at the same time would read half of them.
        """
        for together in self._waves(names):
            for _ in range(self.task.params["rounds"]["warmup"]):
                here = [arm for arm in together if arm in self.here]
                begin = time.monotonic()
                replies = benches.ask_all(
                    {arm: self.process(arm).worker for arm in here},
                    "decode",
                    benches.FIRST_LIMIT_S,
                    {arm: self.decoding(arm) for arm in here},
                )
                for arm, reply in replies.items():
                    if isinstance(reply, WorkerError):
                        self._refused(arm, reply)
                    else:
                        self.pass_s[arm] = time.monotonic() - begin
                        self.limits[arm] = benches.decode_limit_s(self.pass_s[arm])

    def _waves(self, names: list[str]) -> list[list[str]]:
        """Arms that warm up together; never two of one process, and commands alone."""
        if self.task.params["machine"]["backend"] != "cuda":
            return [[name] for name in names]
        alone = [name for name in names if self.is_command(name)]
        rows = (
            [arm for arm in self._left(process) if arm in names and arm not in alone]
            for process in self.processes
        )
        waves = [[name for name in wave if name] for wave in itertools.zip_longest(*rows)]
        return [*(waves[:1] and [waves[0][:1], waves[0][1:]]), *waves[1:], *([n] for n in alone)]

    # Leaving.

    def _refused(self, arm: str, error: WorkerError) -> None:
        if arm not in self.here:
            return  # it went with its process
        if error.kind in REFUSALS:
            self._drop(arm, error.kind, error.message)
        else:
            self.fail(arm, error)

    def _give_up(self, process: Process, error: WorkerError) -> None:
        """All arms of a process that does not come up leave."""
        for arm in self._left(process):
            if error.kind == "unsupported":
                self._drop(arm, "unsupported", error.message)
            else:
                self._leave(arm, error)

    def _drop(self, arm: str, kind: str, why: str) -> None:
        self.task.say(f"{arm}: {kind.replace('_', ' ')}: {why}")
        self.absent[kind][arm] = why
        del self.here[arm]

    def _leave(self, arm: str, error: WorkerError) -> dict[str, str]:
        found = failure(error)
        self.journal.fail(arm, found)
        log, root = self.bench.log, self.task.root
        log = log.relative_to(root) if log.is_relative_to(root) else log
        self.task.say(f"{arm}: {told(found)}; the other arms go on ({log} may say more)")
        del self.here[arm]
        return found

    def _restart(self, process: Process) -> None:
        """A new process for the arms that are left, each warmed up again if it was before.

        Each restart has cost an arm, so there are no more of them than arms.
        """
        process.worker.close(patient=False)
        process.worker = self.bench.worker(self.here_of(process.arms))
        try:
            process.worker.start()
        except WorkerError as error:
            self._give_up(process, error)
            return
        self.guard.own(process.worker.pid)
        self._load([process])
        self.guard.settle()
        self._warm_up([arm for arm in self._left(process) if arm in self.limits])
        self._pin([process])

    def _pin(self, processes: list[Process]) -> None:
        """After loading and warm-up, which all CPUs do faster. Commands stay free."""
        if self.cpu is None:
            return
        threads = self.task.params["machine"]["backend"] == "cpu"
        for process in processes:
            if any(not self.is_command(arm) for arm in self._left(process)):
                pinning.pin(process.worker.pid, self.cpu, threads=threads)
