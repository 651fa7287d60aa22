"""The measure stage: all arms of a checkpoint in interleaved rounds on a quiet host."""

from ..files import write_json, write_jsonl
from ..task import Task, ingredients
from . import bench as benches
from . import guard as guards
from . import host
from .arms import Arms
from .journal import Journal
from .rounds import Rounds
from .runs import write_runs
from .validity import flag_changed_tokens


def run(task: Task) -> None:
    """Writes runs.jsonl (moescope/run/1), guard.jsonl (moescope/guard/1) and environment.json
    (moescope/host/1). An arm that cannot run here, or fails, is no error: environment.json says
    why. Raises UserError if fewer than three rounds came out complete since the host is not quiet.
    """
    params = task.params
    backend = params["machine"]["backend"]
    try:
        bench = benches.open_bench(task, _runtimes(task), params["shape"]["prompt"], _apart(task))
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
            arms = Arms(task, bench, guard, journal)
            with arms.started():
                rounds = Rounds(task, guard, journal, arms).run(finished)
                bandwidth = arms.bandwidth()
            rows = [row for number in sorted(rounds) for row in rounds[number]["runs"]]
            lines = [line for number in sorted(rounds) for line in rounds[number]["guard"]]
            flag_changed_tokens(rows)
            write_runs(task.out / "runs.jsonl", rows)
            write_jsonl(task.out / "guard.jsonl", guard.lines + lines)
            found = facts | arms.environment() | {"bandwidth": bandwidth}
            write_json(task.out / "environment.json", found)
    journal.clear()


def _runtimes(task: Task) -> list[str]:
    return [arm["runtime"] for arm in task.params["arms"].values()]


def _apart(task: Task) -> int:
    """The processes that hold the weights at the same time for the sake of slices; 1 without.

    Each arm's, and one for all commands, which run one after the other.
    """
    if task.params["rounds"].get("slices", 1) == 1:
        return 1
    commands = [
        ingredients(task.upstream[f"build/{name}"])["params"]["runtime"]["kind"] == "command"
        for name in _runtimes(task)
    ]
    return commands.count(False) + any(commands)


def _skip(task: Task, skipped: benches.NotAdmitted, backend: str) -> None:
    """A checkpoint that does not fit has no runs; each arm says why."""
    absent = dict.fromkeys(task.params["arms"], skipped.facts["unsupported"])
    facts = host.describe(backend) | {"admission": skipped.facts["admission"]}
    nobody = {"not_applicable": {}, "unsupported": absent, "failed": {}}
    write_runs(task.out / "runs.jsonl", [])
    write_jsonl(task.out / "guard.jsonl", [])
    write_json(task.out / "environment.json", facts | nobody)
