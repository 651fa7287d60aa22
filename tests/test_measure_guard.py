"""The quiet host: who uses the cores, when a run may start, what is rejected, the lock."""

import dataclasses
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from moescope.errors import UserError
from moescope.measure import guard as guards
from moescope.measure.cpu import (
    CpuProbe,
    CpuReading,
    Total,
    Usage,
    consumed,
    descendants,
    read_processes,
    read_table,
    read_total,
)
from moescope.measure.guard import Guard
from moescope.measure.lock import HostLock

pytestmark = pytest.mark.alone
WORKFLOW = str(Path(guards.__file__).parents[2])
SETTINGS = {
    "enabled": True,
    "idle_s": 0.06,
    "max_foreign_cpu": 0.5,
    "max_wait_s": 0.6,
    "sample_s": 0.02,
    "max_busy_fraction": 0.25,
    "attempts": 3,
}


# Accounting.


def test_what_a_process_used_is_not_counted_again_when_it_ends():
    shell, child = (1, 0.0), (2, 5.0)
    start = {shell: Usage("sh", 0, 1.0, 0.0)}
    running = {shell: Usage("sh", 0, 1.0, 0.0), child: Usage("cc", 1, 3.0, 0.0)}
    # The child used one more second and was waited for: its four are in the shell's children.
    ended = {shell: Usage("sh", 0, 1.5, 4.0)}
    assert consumed(start, running) == 3.0
    assert consumed(running, ended) == pytest.approx(1.5)
    # It came and went between two looks.
    assert consumed(start, ended) == pytest.approx(4.5)
    # Nobody waited for it: what it used last is lost, nothing becomes negative.
    assert consumed(running, start) == 0.0
    # The same pid is another process when its start differs.
    other = {shell: start[shell], (2, 9.0): Usage("ls", 1, 0.25, 0.0)}
    assert consumed(running, other) == pytest.approx(0.25)


def test_descendants_are_followed_down():
    table = {
        (1, 0.0): Usage("init", 0, 0, 0),
        (7, 0.0): Usage("ours", 1, 0, 0),
        (8, 0.0): Usage("child", 7, 0, 0),
        (9, 0.0): Usage("grandchild", 8, 0, 0),
        (10, 0.0): Usage("other", 1, 0, 0),
    }
    assert {pid for pid, _ in descendants(table, {7})} == {7, 8, 9}


class Host:
    """A scripted host with one core: each step advances a second."""

    def __init__(self, kernel_counts=True):
        self.now = 0.0
        self.busy = 0.0
        self.steal = 0.0
        self.table = {(1, 0.0): Usage("init", 0, 0, 0), (7, 0.0): Usage("ours", 1, 0, 0)}
        self.scans = 0
        self.kernel_counts = kernel_counts

    def use(self, pid, seconds, name="app", parent=1):
        key = (pid, 0.0)
        old = self.table.get(key, Usage(name, parent, 0.0, 0.0))
        self.table[key] = old._replace(own_s=old.own_s + seconds)
        self.busy += seconds

    def outside(self, seconds):
        """A neighbour outside the container: in the kernel's total, no process of ours."""
        self.busy += seconds

    def probe(self, limit=0.25):
        return CpuProbe(limit, self.total, self.look, lambda: self.now)

    def total(self):
        on = self.now if self.kernel_counts else 0.0
        return Total(self.busy if self.kernel_counts else 0.0, self.steal, on)

    def look(self):
        self.scans += 1
        return dict(self.table)

    def step(self, probe, thorough=False):
        self.now += 1
        return probe.read({7}, thorough)


def test_our_own_use_disturbs_nothing():
    host = Host()
    probe = host.probe()
    host.use(7, 0.9)
    host.use(8, 0.5, "compiler-of-ours", parent=7)
    reading = host.step(probe)
    assert reading.why is None
    assert reading.foreign_cpu == 0


def test_foreign_use_is_seen_in_cores_and_named():
    host = Host()
    probe = host.probe()
    host.use(7, 0.5)
    host.use(20, 0.4, "browser")
    host.use(21, 0.1, "clock")
    reading = host.step(probe)
    assert reading.foreign_cpu == pytest.approx(0.5)
    assert (reading.why, reading.who) == ("foreign CPU use", "browser")
    host.use(20, 0.1)
    assert host.step(probe).why is None


@pytest.mark.parametrize("kernel_counts", [True, False])
def test_a_busy_second_after_quiet_ones_is_not_diluted(kernel_counts):
    host = Host(kernel_counts)
    probe = host.probe()
    for _ in range(5):
        assert host.step(probe).why is None
    host.use(20, 0.5)
    assert host.step(probe).foreign_cpu == pytest.approx(0.5)
    assert host.step(probe).why is None


def test_neighbours_outside_a_container_are_not_ours_to_wait_for():
    host = Host()
    probe = host.probe()
    host.outside(3.0)
    reading = host.step(probe)
    assert reading.why is None
    assert reading.foreign_cpu == 0


def test_a_quiet_host_is_seen_without_reading_all_processes():
    host = Host()
    probe = host.probe()
    host.step(probe)
    probe._table, seen = None, host.scans  # would fail if it were called
    probe._processes = lambda pids: {}
    assert host.step(probe).why is None
    assert host.scans == seen


def test_compilers_are_found_when_it_looks_closely():
    host = Host()
    probe = host.probe()
    host.table[30, 0.0] = Usage("cc1plus", 1, 0.0, 0.0)
    assert host.step(probe).why is None
    assert host.step(probe, thorough=True).why == "compiling: cc1plus"
    host.table[30, 0.0] = Usage("cc1plus", 7, 0.0, 0.0)
    assert host.step(probe, thorough=True).why is None


def test_steal_is_reported_in_cores():
    host = Host()
    probe = host.probe()
    host.steal += 0.3
    reading = host.step(probe)
    assert reading.steal == pytest.approx(0.3)
    assert CpuProbe.summary([reading])["steal"] == pytest.approx(0.3)


def test_the_summary_weighs_by_time_and_ignores_instants():
    readings = [CpuReading(1.0, 0.2, 0.0, None), CpuReading(0.01, 9.0, 0.0, None)]
    found = CpuProbe.summary(readings)
    assert found["peak_foreign_cpu"] == 0.2
    assert found["mean_foreign_cpu"] == pytest.approx(0.29 / 1.01, abs=1e-4)
    assert CpuProbe.summary([])["peak_foreign_cpu"] == 0.0


def test_this_host_can_be_read():
    assert read_total().all_s > 0
    ((pid, _), usage), *_ = read_processes([os.getpid()]).items()
    assert pid == os.getpid() and usage.own_s > 0 and usage.parent == os.getppid()


@pytest.mark.skipif(sys.platform != "linux", reason="other users' processes are hidden there")
def test_a_real_process_is_foreign_and_a_child_is_not():
    spin = "while True: pass"
    probe = CpuProbe(0.1)
    # Started by a shell that ends at once, so that it is nobody's child.
    command = ["sh", "-c", f'{sys.executable} -c "$0" >&- 2>&- & echo $!', spin]
    orphan = int(subprocess.run(command, capture_output=True, text=True, timeout=60).stdout)
    child = subprocess.Popen([sys.executable, "-c", spin])
    try:
        deadline = time.monotonic() + 30
        while True:
            time.sleep(0.5)
            reading = probe.read({os.getpid()}, True)
            if reading.why is not None or time.monotonic() > deadline:
                break
        ours = {pid for pid, _ in descendants(read_table(), {os.getpid()})}
    finally:
        child.kill()
        child.wait()
        os.kill(orphan, signal.SIGKILL)
    assert reading.why is not None
    assert reading.foreign_cpu > 0.1
    assert child.pid in ours and os.getpid() in ours
    assert orphan not in ours


# Gate and watch.


class Scripted:
    name = "cpu"

    def __init__(self):
        self.busy = False
        self.error = None
        self.reads = 0

    def read(self, own, thorough):
        self.reads += 1
        if self.error:
            raise self.error
        return CpuReading(0.02, float(self.busy), 0.0, "foreign CPU use" if self.busy else None)

    def settle(self, own):
        pass

    def summary(self, readings):
        return {"peak_foreign_cpu": max((r.foreign_cpu for r in readings), default=0.0)}


@pytest.fixture
def probe():
    return Scripted()


class Played(Guard):
    """A guard in whose time nothing passes but what a test or a wait lets pass.

    later: (seconds from the beginning, what happens then).
    """

    def __init__(self, monkeypatch, probe, *later, **settings):
        self.now, self.later = 0.0, list(later)
        monkeypatch.setattr(guards, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.said = []
        super().__init__(SETTINGS | {"sample_s": 3600} | settings, [probe], self.said.append)

    def passes(self, seconds):
        for _ in range(round(seconds / 0.02)):
            self.now += 0.02
            while self.later and self.later[0][0] <= self.now:
                self.later.pop(0)[1]()
            self._sample()

    def _wait_for_sample(self):
        self.passes(0.02)


def test_the_first_gate_waits_for_the_idle_time_later_ones_do_not(probe, monkeypatch):
    with Played(monkeypatch, probe) as guard:
        first = guard.gate("r00-a")
        assert not first.waited_out
        assert 0.06 <= first.waited_s <= 0.08
        with guard.watch("r00-a") as watch:
            guard.passes(0.3)
        assert guard.gate("r00-b").waited_s == 0
    assert watch.why is None
    assert watch.samples >= 15
    assert watch.busy_fraction == 0


def test_a_thread_samples_while_a_run_is_on(probe):
    with Guard(SETTINGS, [probe]) as guard, guard.watch("r00-a") as watch:
        seen = probe.reads
        while probe.reads < seen + 3:
            time.sleep(0.005)
    assert watch.samples >= 3


def test_the_gate_waits_while_the_host_is_busy(probe, monkeypatch):
    probe.busy = True
    quiet = (0.25, lambda: setattr(probe, "busy", False))
    with Played(monkeypatch, probe, quiet, max_wait_s=10) as guard:
        gate = guard.gate("r00-a")
        assert 0.3 <= gate.waited_s < 0.4
        assert not gate.waited_out
    (line,) = [line for line in guard.lines if line["event"] == "gate"]
    assert line["why"].keys() == {"foreign CPU use"}


def test_a_compiler_is_waited_for_though_it_only_shows_at_a_close_look(probe, monkeypatch):
    probe.compiling = True
    real = probe.read

    def read(own, thorough):
        found = real(own, thorough)
        why = "compiling: cc1" if thorough and probe.compiling else None
        return dataclasses.replace(found, why=why)

    probe.read = read
    compiled = (0.3, lambda: setattr(probe, "compiling", False))
    with Played(monkeypatch, probe, compiled, max_wait_s=10) as guard:
        gate = guard.gate("r00-a")
    assert 0.3 <= gate.waited_s < 0.4
    assert not gate.waited_out


def test_a_wait_in_vain_is_said_and_not_repeated_at_length(probe, monkeypatch):
    probe.busy = True
    with Played(monkeypatch, probe) as guard:
        first, second = guard.gate("r00-a"), guard.gate("r00-b")
        assert first.waited_out and 0.6 <= first.waited_s < 0.65
        assert second.waited_out and 0.12 <= second.waited_s < 0.15  # twice the idle time
        probe.busy = False
        assert not guard.gate("r00-c").waited_out
        probe.busy = True
        guard.passes(0.06)
        assert guard.gate("r00-d").waited_s >= 0.6
    assert any("did not become quiet" in line for line in guard.said)


def test_a_run_is_rejected_by_the_share_of_its_time(probe, monkeypatch):
    with Played(monkeypatch, probe) as guard:
        for run, seconds in (("r00-a", 0.24), ("r00-b", 0.28)):
            with guard.watch(run, 2) as watch:
                guard.passes(0.5)
                probe.busy = True
                guard.passes(seconds)
                probe.busy = False
                guard.passes(0.5 - seconds)
            assert watch.busy_fraction == pytest.approx(seconds)
            assert watch.facts == {"peak_foreign_cpu": 1.0}
    a, b = [line for line in guard.lines if line["event"] == "watch"]
    assert (a["rejected"], b["rejected"], b["attempt"]) == (False, True, 2)
    assert a["why"] is None
    assert b["why"].startswith("disturbed in 28%") and "foreign CPU use" in b["why"]


def test_a_switched_off_guard_only_looks(probe):
    probe.busy = True
    with Guard(SETTINGS | {"enabled": False}, [probe]) as guard:
        assert guard.gate("r00-a").waited_s == 0
        with guard.watch("r00-a") as watch:
            time.sleep(0.05)
    assert watch.busy_fraction == 1.0
    assert watch.why is None


def test_a_probe_that_fails_stops_the_measurement(probe):
    with Guard(SETTINGS, [probe]) as guard:
        probe.error = OSError("no driver")
        with pytest.raises((UserError, OSError), match="no driver"):
            guard.gate("r00-a")
            guard.gate("r00-b")


def test_a_probe_that_hangs_stops_the_measurement(probe, monkeypatch):
    monkeypatch.setattr(guards, "SILENCE_S", 0.2)
    stop = threading.Event()
    with Guard(SETTINGS, [probe]) as guard:
        real = probe.read
        probe.read = lambda own, thorough: (stop.wait(5), real(own, thorough))[1]
        time.sleep(0.05)
        with pytest.raises(UserError, match="silent"):
            guard.gate("r00-a")
        stop.set()


def test_sampling_costs_little():
    probe = CpuProbe(64.0)
    own = {os.getpid()}
    probe.read(own, True)
    begin = time.process_time()
    for _ in range(50):
        probe.read(own, False)
    assert (time.process_time() - begin) / 50 < 0.003


# The lock.

HOLD = """
import sys, time
from moescope.measure.lock import HostLock
lock = HostLock("host", "measure other")
lock.acquire(0, print)
print("held", flush=True)
time.sleep(60)
"""
CHILD = """
from moescope.measure.lock import HostLock
print(HostLock("host", "inner").acquire(0, print)["nested"])
"""


def python(code, **kinds):
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": WORKFLOW},
        stdout=subprocess.PIPE,
        text=True,
        **kinds,
    )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MOESCOPE_LOCK_DIR", str(tmp_path))
    return tmp_path


def test_the_lock_names_its_holder_and_dies_with_it(folder):
    other = python(HOLD)
    try:
        assert other.stdout.readline() == "held\n"
        lock = HostLock("host", "measure mine")
        said = []
        with pytest.raises(UserError, match=rf"measure other \(process {other.pid}, since 20"):
            lock.acquire(0.3, said.append)
        assert said and "measure other" in said[0]
        other.kill()
        other.wait()
        assert lock.acquire(30, said.append)["nested"] is False
        assert "measure mine" in (folder / "moescope-host.lock").read_text()
        lock.release()
        assert (folder / "moescope-host.lock").read_text() == ""
    finally:
        other.kill()
        other.communicate()


def test_what_is_not_timed_shares_the_lock_with_its_like_alone(folder):
    one, two = (HostLock("host", f"parity {name}", shared=True) for name in "ab")
    alone = HostLock("host", "measure c")
    one.acquire(0, print)
    other = python(HOLD.replace('"measure other"', '"parity other", shared=True'))
    try:
        assert other.stdout.readline() == "held\n"
        two.acquire(0, print)
        two.release()
        one.release()
        with pytest.raises(UserError, match="another measurement is running"):
            alone.acquire(0.3, print)
    finally:
        other.kill()
        other.communicate()
    other = python(HOLD)
    try:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="measure other"):
            one.acquire(0.3, print)
    finally:
        other.kill()
        other.communicate()


def test_a_descendant_and_the_holder_itself_are_let_through(folder):
    lock = HostLock("host", "outer")
    lock.acquire(0, print)
    try:
        assert HostLock("host", "inner").acquire(0, print)["nested"] is True
        child = python(CHILD)
        assert child.communicate(timeout=60)[0] == "True\n"
    finally:
        lock.release()
    child = python(CHILD)
    assert child.communicate(timeout=60)[0] == "False\n"


def test_a_child_does_not_keep_the_lock(folder):
    lock = HostLock("host", "outer")
    lock.acquire(0, print)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"], close_fds=False)
    try:
        lock.release()
        other = python(HOLD)
        assert other.stdout.readline() == "held\n"
    finally:
        child.kill()
        child.wait()
        other.kill()
        other.communicate()


def test_everyone_may_use_the_file_and_names_become_paths(folder):
    lock = HostLock("gpu-GPU/../x y", "me")
    lock.acquire(0, print)
    lock.release()
    (path,) = folder.iterdir()
    assert path.name == "moescope-gpu-GPU-..-x-y.lock"
    assert path.stat().st_mode & 0o777 == 0o666


def test_locks_are_taken_in_order_and_given_back(folder, monkeypatch):
    from moescope.measure import gpu

    monkeypatch.setattr(gpu, "in_use", lambda: ["GPU-1"])
    with guards.locked("measure x", "cuda", 1, print) as taken:
        assert taken["locks"] == ["host", "gpu"]
        with pytest.raises(BlockingIOError):
            _flock(folder / "moescope-gpu-GPU-1.lock", fcntl.LOCK_SH)
    with guards.locked("parity x", "cuda", 1, print, shared=True):
        for name in ("host", "gpu-GPU-1"):
            _flock(folder / f"moescope-{name}.lock", fcntl.LOCK_SH)
            with pytest.raises(BlockingIOError):
                _flock(folder / f"moescope-{name}.lock")
    _flock(folder / "moescope-gpu-GPU-1.lock")
    _flock(folder / "moescope-host.lock")


def _flock(path, kind=fcntl.LOCK_EX):
    with open(path) as file:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
