"""All arms on the same CPUs: the fastest are chosen, and each process stays there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import stages
from moescope.errors import UserError
from moescope.files import read_json
from moescope.measure import cpus, stage

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="this system does not confine processes"
)
HERE = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def test_the_slowest_cpu_is_left_out(monkeypatch):
    slow = {HERE[-1]} if len(HERE) > 1 else set()

    def work():
        return 2.0 if os.sched_getaffinity(0) <= slow else 1.0

    monkeypatch.setattr(cpus, "_work", work)
    assert cpus.fastest(max(len(HERE) - 1, 1)) == HERE[: max(len(HERE) - 1, 1)]
    assert sorted(os.sched_getaffinity(0)) == HERE, "the controller itself goes where it went"


def test_one_slow_sweep_counts(monkeypatch):
    """A neighbour that pauses now comes back."""
    if len(HERE) < 2:
        pytest.skip("one CPU leaves no choice")
    seen = []

    def work():
        (cpu,) = os.sched_getaffinity(0)
        seen.append(cpu)
        return 3.0 if cpu == HERE[0] and seen.count(cpu) <= cpus.TRIES else 1.0

    monkeypatch.setattr(cpus, "_work", work)
    assert cpus.fastest(1) == [HERE[1]]


def test_more_than_there_are():
    with pytest.raises(UserError, match=r"rounds.cpus.*allowed: 1 to"):
        cpus.fastest(len(HERE) + 1)


def test_all_threads_are_confined():
    program = (
        "import threading, time\n"
        "for _ in range(3): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "print('up', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()
            cpus.confine(process.pid, HERE[:1])
            threads = [int(path.name) for path in Path(f"/proc/{process.pid}/task").iterdir()]
            assert len(threads) == 4
            assert all(os.sched_getaffinity(thread) == {HERE[0]} for thread in threads)
        finally:
            process.kill()


def test_a_measurement_confines_every_arm(tmp_path, monkeypatch):
    stages.stand_in(monkeypatch)
    monkeypatch.setenv("MOESCOPE_LOCK_DIR", str(tmp_path))
    confined, confine = {}, cpus.confine

    def seen(pid, where):
        confine(pid, where)
        confined[pid] = os.sched_getaffinity(pid)

    monkeypatch.setattr(cpus, "confine", seen)
    params = stages.measure_params(stages.ARMS, 3)
    params["rounds"] |= {"slices": 2, "cpus": 1}
    task = stages.make(tmp_path, "measure", "tiny", params)
    stage.run(task)
    chosen = read_json(task.out / "environment.json")["cpus"]
    assert len(chosen) == 1 and set(chosen) <= set(HERE)
    assert len(confined) == len(stages.ARMS)
    assert set(map(frozenset, confined.values())) == {frozenset(chosen)}


def test_a_process_that_replaces_a_dead_one_is_confined_too(tmp_path, monkeypatch):
    stages.stand_in(monkeypatch)
    monkeypatch.setenv("MOESCOPE_LOCK_DIR", str(tmp_path))
    confined, confine = [], cpus.confine

    def seen(pid, where):
        confine(pid, where)
        confined.append(pid)

    monkeypatch.setattr(cpus, "confine", seen)
    shared = stages.arm("ref", "reference", die_at="3")
    skip = shared | {"name": "skip", "role": "intervention", "patches": ["skip_experts"]}
    params = stages.measure_params([shared, stages.arm("again", "null"), skip], 3)
    params["rounds"]["cpus"] = 1
    task = stages.make(tmp_path, "measure", "tiny", params)
    stage.run(task)
    assert list(read_json(task.out / "environment.json")["failed"]) == ["skip"]
    assert len(set(confined)) == 3, "two at first, and the one that came for the first"
