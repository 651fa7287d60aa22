"""All arms on the same CPU: a fast one is chosen, and all threads go where they should."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import stages
from moescope.files import read_json
from moescope.measure import pinning, stage

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="this system does not bind processes to CPUs"
)
HERE = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
two = pytest.mark.skipif(len(HERE) < 2, reason="one CPU leaves no choice")


@two
def test_a_slow_cpu_is_not_chosen(monkeypatch):
    slow = set(HERE[:-1])
    monkeypatch.setattr(pinning, "_work", lambda: 2.0 if os.sched_getaffinity(0) <= slow else 1.0)
    assert pinning.fastest() == HERE[-1]
    assert sorted(os.sched_getaffinity(0)) == HERE, "the controller itself goes where it went"


@two
def test_one_slow_sweep_counts(monkeypatch):
    """A neighbour that pauses now comes back."""
    seen = []

    def work():
        (cpu,) = os.sched_getaffinity(0)
        seen.append(cpu)
        return 3.0 if cpu == HERE[0] and seen.count(cpu) <= pinning.TRIES else 1.0

    monkeypatch.setattr(pinning, "_work", work)
    assert pinning.fastest() == HERE[1]


@two
@pytest.mark.parametrize("threads", [True, False])
def test_where_threads_go(threads):
    program = (
        "import threading, time\n"
        "for _ in range(3): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "print('up', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()
            pinning.pin(process.pid, HERE[0], threads=threads)
            found = [int(path.name) for path in Path(f"/proc/{process.pid}/task").iterdir()]
            assert len(found) == 4
            others = {HERE[0]} if threads else set(HERE[1:])
            assert {thread: os.sched_getaffinity(thread) for thread in found} == {
                thread: {HERE[0]} if thread == process.pid else others for thread in found
            }
        finally:
            process.kill()


@two
def test_the_controller_leaves_the_cpu_and_comes_back():
    with pinning.away_from(HERE[0]):
        assert sorted(os.sched_getaffinity(0)) == HERE[1:]
    with pinning.away_from(None):
        assert sorted(os.sched_getaffinity(0)) == HERE


@pytest.fixture
def pinned(tmp_path, monkeypatch):
    """pid -> where a process went, of the measurements of a test."""
    stages.stand_in(monkeypatch)
    monkeypatch.setenv("MOESCOPE_LOCK_DIR", str(tmp_path))
    found, pin = {}, pinning.pin

    def seen(pid, cpu, **more):
        pin(pid, cpu, **more)
        found[pid] = os.sched_getaffinity(pid)

    monkeypatch.setattr(pinning, "pin", seen)
    return found


def measured(tmp_path, arms, **rounds):
    params = stages.measure_params(arms, 3)
    params["rounds"] |= rounds
    task = stages.make(tmp_path, "measure", "tiny", params)
    stage.run(task)
    return read_json(task.out / "environment.json")


def test_a_measurement_pins_every_arm_to_one_cpu(tmp_path, pinned):
    cpu = measured(tmp_path, stages.ARMS, slices=2, pinned=True)["pinned_to"]
    assert len(pinned) == len(stages.ARMS)
    assert set(map(frozenset, pinned.values())) == {frozenset([cpu])}
    assert sorted(os.sched_getaffinity(0)) == HERE


def test_without_the_key_nothing_is_pinned(tmp_path, pinned):
    assert "pinned_to" not in measured(tmp_path, stages.ARMS, slices=2)
    assert not pinned


def test_a_process_that_replaces_a_dead_one_is_pinned_too(tmp_path, pinned):
    shared = stages.arm("ref", "reference", die_at="3")
    skip = shared | {"name": "skip", "role": "intervention", "patches": ["skip_experts"]}
    environment = measured(tmp_path, [shared, stages.arm("again", "null"), skip], pinned=True)
    assert list(environment["failed"]) == ["skip"]
    assert len(pinned) == 3, "two at first, and the one that came for the first"
