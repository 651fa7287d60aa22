"""The rounds: every arm once in each, whole or in slices, watched, and repeated when disturbed.

In a whole round each arm decodes all its tokens before the next one begins. In a sliced round the
arms take turns of a few tokens, so that all of them see the same speeds of a host that changes its
speed within seconds; a disturbed sliced round is done again by all its arms. Commands cannot be
paused: in a study with slices their runs are whole and follow those of the round.
"""

import time
from datetime import UTC, datetime
from typing import Any

from ..errors import UserError
from ..runtimes.client import WorkerError
from ..task import Task
from . import guard as guards
from .arms import Arms
from .failed import told
from .failing import failure
from .journal import Journal
from .runs import ALSO_KEPT, KEPT, RUN, round_id, run_id
from .schedule import order, parts, turns
from .validity import void

LEAST_ROUNDS = 3

Row = dict[str, Any]
# What a pass gave: the worker's result, or why there is none.
Outcome = dict[str, Any] | WorkerError


class Rounds:
    def __init__(self, task: Task, guard: guards.Guard, journal: Journal, arms: Arms):
        self.task, self.guard, self.journal, self.arms = task, guard, journal, arms

    def run(self, finished: dict[int, dict[str, list[Any]]]) -> dict[int, dict[str, list[Any]]]:
        """Round number -> its rows and guard lines; those in ``finished`` are not run again.

        Raises UserError when fewer than three rounds can be complete on this host.
        """
        count = self.task.params["rounds"]["count"]
        found = dict(finished)
        broken: list[int] = []
        progress = Progress(self.arms.pass_s, count - len(finished), self.task)
        for number in range(count):
            if number in finished or not self.arms.here:
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

    def _round(self, number: int, progress: "Progress") -> tuple[list[Row], dict[str, str]]:
        """A round's rows, and the arms that were disturbed in all attempts (arm -> why)."""
        names = order(list(self.arms.here), number)
        sliced = [arm for arm in names if self.arms.slices > 1 and not self.arms.is_command(arm)]
        rows: list[Row] = []
        disturbed: dict[str, str] = {}
        whole = [[arm] for arm in names if arm not in sliced]
        for together in ([sliced] if sliced else []) + whole:
            for attempt in range(1, self.guard.settings["attempts"] + 1):
                together = [arm for arm in together if arm in self.arms.here]
                if not together:
                    break  # failed, or went with a process that it shared
                positions = {arm: names.index(arm) for arm in together}
                more, rejected = self._attempt(number, positions, attempt, bool(sliced))
                rows += more
                for row in more:
                    progress.done(row)
                for arm in together:
                    disturbed.pop(arm, None)
                if not rejected:
                    break
                disturbed |= {arm: rejected for arm in together if arm in self.arms.here}
        return rows, disturbed

    def _attempt(
        self, number: int, positions: dict[str, int], attempt: int, sliced: bool
    ) -> tuple[list[Row], str | None]:
        """One attempt of some arms: their rows, and why it was rejected as disturbed."""
        names = list(positions)
        sliced = sliced and not self.arms.is_command(names[0])
        name = round_id(number, attempt) if sliced else run_id(number, names[0], attempt)
        gate = self.guard.gate(name)
        started = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        with self.guard.watch(name, attempt) as watch:
            found = self._take_turns(names, number) if sliced else self._whole(names[0])
        rows = []
        for arm in names:
            row = self._row(run_id(number, arm, attempt), arm, found[arm], gate, watch)
            rows.append(
                row
                | {
                    "round": number,
                    "position": positions[arm],
                    "attempt": attempt,
                    "started": started,
                }
            )
        # Leaving may start another process, which is no part of what was watched.
        for arm, outcome in found.items():
            if isinstance(outcome, WorkerError):
                self.arms.fail(arm, outcome)
        return rows, next((row["why"] for row in rows if row["why"] == watch.why), None)

    def _whole(self, arm: str) -> dict[str, Outcome]:
        try:
            return {arm: self.arms.ask(arm, "decode", **self.arms.decoding(arm))}
        except WorkerError as error:
            return {arm: error}

    def _take_turns(self, names: list[str], number: int) -> dict[str, Outcome]:
        """All prefills, then a slice of each arm in turn. An arm that fails leaves the turns."""
        sizes = parts(self.arms.shape["generate"], self.arms.slices)
        found: dict[str, Outcome] = {}

        def step(arm: str, what: str, **arguments: Any) -> None:
            if isinstance(found.get(arm), WorkerError):
                return
            try:
                found[arm] = self.arms.ask(arm, "sliced", step=what, **arguments)
            except WorkerError as error:
                found[arm] = error

        for arm in names:
            step(arm, "start", slices=sizes, **self.arms.decoding(arm))
        for turn in turns(names, len(sizes)):
            for arm in turn:
                step(arm, "more")
        for arm in names:
            step(arm, "end")
        return found

    def _row(
        self, name: str, arm: str, outcome: Outcome, gate: guards.Gate, watch: guards.Watch
    ) -> Row:
        failed = failure(outcome) if isinstance(outcome, WorkerError) else None
        result = dict.fromkeys(KEPT) if isinstance(outcome, WorkerError) else outcome
        why = told(failed) if failed else void(result, self.arms.shape)
        process = self.arms.process(arm)
        return {
            "schema": RUN,
            "id": name,
            "checkpoint": self.task.params.get("checkpoint", self.task.subject),
            "arm": arm,
            **{key: result[key] for key in KEPT},
            **{key: result[key] for key in ALSO_KEPT if key in result},
            "env": self.arms.here[arm].get("env", {}),
            "patches": self.arms.here[arm].get("patches", []),
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
            "valid": why is None and watch.why is None,
            "why": why or watch.why,
            **({"failed": failed} if failed else {}),
        }


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
