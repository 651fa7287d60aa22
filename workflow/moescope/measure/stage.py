"""The measure stage: all arms of a checkpoint in interleaved rounds on a quiet host."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from ..errors import UserError
from ..files import write_json, write_jsonl
from ..runtimes.client import THREAD_VARIABLES, Worker, WorkerError
from ..task import Task
from . import bench as benches
from . import guard as guards
from . import host
from .journal import Journal
from .runs import ALSO_KEPT, KEPT, RUN, run_id, write_runs
from .schedule import order, processes
from .validity import flag_changed_tokens, void

BANDWIDTH_LIMIT_S = 120.0
LEAST_ROUNDS = 3


def run(task: Task) -> None:
    """Writes runs.jsonl (moescope/run/1), guard.jsonl (moescope/guard/1) and environment.json
    (moescope/host/1). Raises UserError if fewer than three rounds came out complete."""
    params = task.params
    arms = params["arms"]
    runtimes = [arm["runtime"] for arm in arms.values()]
    backend = params["machine"]["backend"]
    try:
        bench = benches.open_bench(task, runtimes, params["shape"]["prompt"])
    except benches.NotAdmitted as skipped:
        _skip(task, skipped, backend)
        return
    settings = guards.DEFAULTS | params["guard"]
    what = f"measure {task.subject}"
    with guards.locked(what, backend, settings["max_wait_s"], task.say) as lock:
        facts = host.describe(backend)
        journal = Journal(task.work / "journal" / "measure" / task.key, facts)
        finished = journal.open()
        if finished:
            task.say(f"{len(finished)} rounds were finished before; going on after them")
        with guards.Guard(settings, guards.probes(settings, backend), task.say) as guard:
            guard.log("lock", **lock)
            guard.gate("start")
            session = Session(task, bench, guard, journal)
            with session.started():
                rounds = session.rounds(finished)
                bandwidth = session.bandwidth()
            rows = [row for number in sorted(rounds) for row in rounds[number]["runs"]]
            lines = [line for number in sorted(rounds) for line in rounds[number]["guard"]]
            flag_changed_tokens(rows)
            write_runs(task.out / "runs.jsonl", rows)
            write_jsonl(task.out / "guard.jsonl", guard.lines + lines)
            found = facts | session.environment() | {"bandwidth": bandwidth}
            write_json(task.out / "environment.json", found)
    journal.clear()


def _skip(task: Task, skipped: benches.NotAdmitted, backend: str) -> None:
    """A checkpoint that does not fit has no runs; each arm says why."""
    absent = dict.fromkeys(task.params["arms"], skipped.facts["unsupported"])
    facts = host.describe(backend) | {"admission": skipped.facts["admission"]}
    write_runs(task.out / "runs.jsonl", [])
    write_jsonl(task.out / "guard.jsonl", [])
    write_json(task.out / "environment.json", facts | {"not_applicable": {}, "unsupported": absent})


@dataclass
class Process:
    """A worker and the arms that share it."""

    index: int
    arms: list[str]
    worker: Worker
    loaded: dict[str, Any] = field(default_factory=dict)


class Session:
    """The processes of one start of the stage, and the rounds that they run."""

    def __init__(self, task: Task, bench: benches.Bench, guard: guards.Guard, journal: Journal):
        self.task, self.bench, self.guard, self.journal = task, bench, guard, journal
        self.arms: dict[str, dict[str, Any]] = dict(task.params["arms"])
        self.shape = task.params["shape"]
        self.processes: list[Process] = []
        self.absent: dict[str, dict[str, str]] = {"not_applicable": {}, "unsupported": {}}
        self.limits: dict[str, float] = {}
        self.pass_s: dict[str, float] = {}

    @contextmanager
    def started(self) -> Iterator[None]:
        """All workers loaded, at the same time, and each arm warmed up; ended afterwards."""
        with ExitStack() as stack:
            for index, names in enumerate(processes(self.arms)):
                worker = self.bench.worker(self.arms[names[0]])
                self.processes.append(Process(index, names, worker))
                stack.callback(worker.close)
                with benches.explained(names[0], self.bench, self.task):
                    worker.start()
                self.guard.own(worker.pid)
            self._load()
            self.guard.settle()
            self._warm_up()
            yield

    def bandwidth(self) -> dict[str, Any] | None:
        """What the memory of this host gives, in this session: the ceiling of a decode step.

        None where no process can tell (a command), and on CUDA, where the trace measures it.
        """
        if self.task.params["machine"]["backend"] == "cuda":
            return None
        arm = next(iter(self.arms))
        try:
            return self._process(arm).worker.ask("bandwidth", BANDWIDTH_LIMIT_S, repeats=3)
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
                    "versions": process.worker.ready["versions"],
                    "device": process.worker.ready["device"],
                    "library_sha256": process.worker.ready["library_sha256"],
                    "variables": {
                        name: process.worker.env[name] for name in sorted(THREAD_VARIABLES)
                    },
                    "load_s": process.loaded.get("seconds"),
                }
                for process in self.processes
            ],
            "starts": self.journal.starts,
            **self.absent,
        }

    def rounds(self, finished: dict[int, dict[str, list[Any]]]) -> dict[int, dict[str, list[Any]]]:
        """Round number -> its rows and guard lines; those in ``finished`` are not run again."""
        count = self.task.params["rounds"]["count"]
        found = dict(finished)
        broken: list[int] = []
        progress = Progress(self.pass_s, count - len(finished), self.task)
        for number in range(count):
            if number in finished:
                continue
            first_line = len(self.guard.lines)
            rows, disturbed = self._round(number, progress)
            lines = self.guard.lines[first_line:]
            del self.guard.lines[first_line:]
            found[number] = {"runs": rows, "guard": lines}
            if not disturbed:
                self.journal.keep(number, rows, lines)
                continue
            broken.append(number)
            if count - len(broken) < min(LEAST_ROUNDS, count):
                raise UserError(_not_quiet(disturbed, number, self.guard.settings))
        return found

    def _load(self) -> None:
        deadline = time.monotonic() + benches.LOAD_LIMIT_S
        for process in self.processes:
            with benches.explained(process.arms[0], self.bench, self.task):
                process.worker.wait_ready()
                arguments = self.bench.loading(self.arms[process.arms[0]])
                process.worker.send("load", deadline=deadline, **arguments)
        for process in self.processes:
            with benches.explained(process.arms[0], self.bench, self.task):
                try:
                    process.loaded = process.worker.receive("load", deadline=deadline)
                except WorkerError as refused:
                    if refused.kind != "unsupported":
                        raise
                    for arm in list(process.arms):
                        self._drop(arm, "unsupported", refused.message)

    def _warm_up(self) -> None:
        """The discarded passes; an arm that finds nothing to change here leaves."""
        for arm in list(self.arms):
            with benches.explained(arm, self.bench, self.task):
                try:
                    for _ in range(self.task.params["rounds"]["warmup"]):
                        begin = time.monotonic()
                        self._decode(arm, benches.FIRST_LIMIT_S)
                        self.pass_s[arm] = time.monotonic() - begin
                except WorkerError as refused:
                    if refused.kind not in self.absent:
                        raise
                    self._drop(arm, refused.kind, refused.message)
                    continue
            self.limits[arm] = benches.decode_limit_s(self.pass_s[arm])

    def _drop(self, arm: str, kind: str, why: str) -> None:
        if self.arms[arm]["role"] == "reference":
            raise UserError(f"the reference cannot run here, {kind}: {why}", where=f"arm {arm}")
        self.task.say(f"{arm}: {kind.replace('_', ' ')}: {why}")
        self.absent[kind][arm] = why
        del self.arms[arm]

    def _round(self, number: int, progress: "Progress") -> tuple[list[dict], dict[str, str]]:
        """A round's rows, and the arms that were disturbed in all attempts (arm -> why)."""
        rows: list[dict[str, Any]] = []
        disturbed: dict[str, str] = {}
        for position, arm in enumerate(order(list(self.arms), number)):
            for attempt in range(1, self.guard.settings["attempts"] + 1):
                row, rejected = self._run(number, position, arm, attempt)
                rows.append(row)
                progress.done(row)
                if not rejected:
                    disturbed.pop(arm, None)
                    break
                disturbed[arm] = rejected
        return rows, disturbed

    def _run(
        self, number: int, position: int, arm: str, attempt: int
    ) -> tuple[dict[str, Any], str | None]:
        """One attempt: its row, and why it was rejected as disturbed."""
        name = run_id(number, arm, attempt)
        gate = self.guard.gate(name)
        started = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        with (
            benches.explained(arm, self.bench, self.task),
            self.guard.watch(name, attempt) as watch,
        ):
            result = self._decode(arm, self.limits[arm])
        why = void(result, self.shape)
        rejected = watch.why if why is None else None
        process = self._process(arm)
        row = {
            "schema": RUN,
            "id": name,
            "checkpoint": self.task.params.get("checkpoint", self.task.subject),
            "arm": arm,
            "round": number,
            "position": position,
            "attempt": attempt,
            "started": started,
            **{key: result[key] for key in KEPT},
            **{key: result[key] for key in ALSO_KEPT if key in result},
            "env": self.arms[arm].get("env", {}),
            "patches": self.arms[arm].get("patches", []),
            "process": {
                "index": process.index,
                "start": self.journal.starts,
                "versions": process.worker.ready["versions"],
            },
            "guard": {
                "waited_s": gate.waited_s,
                "waited_out": gate.waited_out,
                "samples": watch.samples,
                "busy_fraction": watch.busy_fraction,
                **(watch.facts or {}),
            },
            "valid": why is None and rejected is None,
            "why": why or rejected,
        }
        return row, rejected

    def _decode(self, arm: str, limit_s: float) -> dict[str, Any]:
        return self._process(arm).worker.ask(
            "decode",
            limit_s,
            prompt=self.bench.prompt,
            tokens=self.shape["generate"],
            patches=self.arms[arm].get("patches", []),
        )

    def _process(self, arm: str) -> Process:
        return next(process for process in self.processes if arm in process.arms)


class Progress:
    """Lines with the rate and the time left, from the passes so far."""

    def __init__(self, pass_s: dict[str, float], rounds: int, task: Task):
        self.left_s = sum(pass_s.values()) * rounds
        self.pass_s, self.task = pass_s, task
        self.expected_s = self.spent_s = 0.0
        self.last = time.monotonic()

    def done(self, row: dict[str, Any]) -> None:
        now = time.monotonic()
        self.spent_s += now - self.last
        self.last = now
        if row["attempt"] == 1:
            self.left_s -= self.pass_s[row["arm"]]
            self.expected_s += self.pass_s[row["arm"]]
        pace = self.spent_s / self.expected_s if self.expected_s else 1.0
        outcome = (
            f"{row['forwards'] / row['decode_s']:.1f} tokens/s" if row["valid"] else row["why"]
        )
        self.task.say(f"{row['id']}: {outcome}; {_duration(max(self.left_s, 0) * pace)} left")


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _not_quiet(disturbed: dict[str, str], number: int, settings: dict[str, Any]) -> str:
    arms = "; ".join(f"{arm}: {why}" for arm, why in disturbed.items())
    return (
        f"the host is not quiet, so fewer than {LEAST_ROUNDS} rounds can be complete. In round "
        f"{number} all {settings['attempts']} attempts were rejected ({arms}). Close what else "
        f"runs here, or raise guard.max_foreign_cpu (now {settings['max_foreign_cpu']:g} cores) "
        "in the study; finished rounds are kept"
    )
