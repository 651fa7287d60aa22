"""A task for a stage over the fake worker: upstream results, an arm's interpreter, no weights.

Run as a program it runs the measure stage of the task described in its argument (JSON), for
tests that kill it.
"""

import dataclasses
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import fake_worker
from moescope.checkpoints import materialise
from moescope.files import write_json
from moescope.measure import guard
from moescope.measure.cpu import CpuProbe, CpuReading
from moescope.runtimes import environments
from moescope.runtimes.client import Worker
from moescope.runtimes.environments import Interpreter
from moescope.task import INGREDIENTS, Task

SHAPE = {"prompt": 16, "generate": 6}
GUARD = {
    "enabled": True,
    "idle_s": 0.05,
    "max_foreign_cpu": 64.0,
    "max_wait_s": 0.5,  # others may be compiling here; runs go on then
    "sample_s": 0.02,
    "max_busy_fraction": 0.5,
    "attempts": 3,
}
MACHINE = {"name": "test", "backend": "cpu"}


def arm(name: str, role: str, patches: list[str] | None = None, **env: Any) -> dict[str, Any]:
    """An arm; its FAKE_ variables are given without the prefix, in any case."""
    return {
        "name": name,
        "runtime": "vlm",
        "role": role,
        "env": {f"FAKE_{key.upper()}": str(value) for key, value in env.items()},
        "patches": patches or [],
    }


class Disturbed:
    """The only probe from now on: it disturbs some runs, from their first moment on and until
    the next begins.

    busy: what is watched, by name. A part of a run would be a matter of the host's speed.
    """

    name = "cpu"

    def __init__(self, monkeypatch: Any, *busy: str):
        watch = guard.Guard.watch

        def watched(this: Any, run: str, attempt: int = 1) -> Any:
            self.now = run in busy
            return watch(this, run, attempt)

        self.now = False
        monkeypatch.setattr(guard.Guard, "watch", watched)
        monkeypatch.setattr(guard, "probes", lambda *_: [self])

    def read(self, own: set[int], thorough: bool) -> CpuReading:
        why, who = ("foreign CPU use", "x") if self.now else (None, "")
        return CpuReading(0.02, 2.0 * self.now, 0.0, why, who)

    def settle(self, own: set[int]) -> None:
        pass

    summary = staticmethod(CpuProbe.summary)


def gone(pid: int, limit_s: float = 30) -> bool:
    """Whether a process has ended (a zombie has)."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat")
            if state.exists() and state.read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.02)
    return False


ARMS = (
    arm("ref", "reference"),
    arm("again", "null"),
    arm("skip", "intervention", ["skip_experts"]),
)


def make(folder: Path, stage: str, subject: str, params: dict[str, Any], kind: str = "hub") -> Task:
    """A task below ``folder`` with the upstream results that measuring stages read."""
    root = folder / "root"
    if not (root / "workflow").exists():
        fake_worker.install(root)
    fetch, build = root / "results/fetch/tiny/f0", root / "results/build/vlm/b0"
    manifest = {"schema": "moescope/manifest/1", "kind": kind, "files": [], "bytes": 0}
    write_json(fetch / "manifest.json", manifest)
    write_json(fetch / "config.json", {"vocab_size": 50})
    made_of = {"schema": INGREDIENTS, "key": "f0", "params": {"source": {"kind": kind}}}
    write_json(fetch / "ingredients.json", made_of)
    runtime = {"name": "vlm", "kind": "python", "package": "mlx-vlm"}
    made_of = {"schema": INGREDIENTS, "key": "b0", "params": {"runtime": runtime}}
    write_json(build / "ingredients.json", made_of)
    out = root / "work" / "tmp" / f"{stage}-{os.getpid()}"
    out.mkdir(parents=True, exist_ok=True)
    upstream = {"fetch/tiny": fetch, "build/vlm": build}
    return Task(stage, subject, "k0", params, upstream, out, root / "work", root)


def measure_params(arms: Any = ARMS, count: int = 4, **guard: Any) -> dict[str, Any]:
    return {
        "checkpoint": "tiny",
        "arms": {one["name"]: one for one in arms},
        "shape": SHAPE,
        "rounds": {"count": count, "warmup": 1},
        "guard": GUARD | guard,
        "machine": MACHINE,
        "session": 1,
    }


def stand_in(patch: Any = None) -> None:
    """Put the fake interpreter and no weights in the place of what stages materialise.

    patch: pytest's monkeypatch; without it the change stays (in a process of its own).
    """

    def ensure_environment(manifest, work, root):
        return Interpreter(Path(sys.executable), dict(os.environ))

    def ensure_weights(manifest, source, folder, work, root):
        return folder

    put = patch.setattr if patch else setattr
    put(environments, "ensure", ensure_environment)
    put(materialise, "ensure", ensure_weights)


def little_bandwidth(patch: Any) -> None:
    """The memory's rate over 4 MiB instead of 256: where its figure does not matter."""
    ask = Worker.ask

    def smaller(self, do, limit_s, **arguments):
        size = {"size": 4 << 20} if do == "bandwidth" else {}
        return ask(self, do, limit_s, **arguments, **size)

    patch.setattr(Worker, "ask", smaller)


def describe(task: Task) -> str:
    """A task as JSON, for a process of its own."""
    return json.dumps(dataclasses.asdict(task), default=str)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    for name in ("out", "work", "root"):
        given[name] = Path(given[name])
    given["upstream"] = {name: Path(path) for name, path in given["upstream"].items()}
    stand_in()
    importlib.import_module("moescope.measure.stage").run(Task(**given))
