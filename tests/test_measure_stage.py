"""The measure stage end to end, over a fake worker: voids, rejections, kill, resume, lock."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

import stages
from moescope.errors import UserError
from moescope.files import read_json, read_jsonl, write_json
from moescope.measure import guard as guards
from moescope.measure import stage
from moescope.measure.cpu import CpuReading
from moescope.task import INGREDIENTS
from moescope.verdict.results import read_runs

TESTS = Path(stages.__file__).parent


@pytest.fixture(autouse=True)
def quiet(tmp_path, monkeypatch):
    stages.stand_in(monkeypatch)
    monkeypatch.setenv("MOESCOPE_LOCK_DIR", str(tmp_path))


def measure(tmp_path, arms=stages.ARMS, count=4, **guard):
    task = stages.make(tmp_path, "measure", "tiny", stages.measure_params(arms, count, **guard))
    stage.run(task)
    return task, read_runs(task.out / "runs.jsonl")


def start(task) -> subprocess.Popen:
    """The stage in a process of its own."""
    path = os.pathsep.join([str(TESTS), str(TESTS.parent / "workflow")])
    return subprocess.Popen(
        [sys.executable, str(TESTS / "stages.py"), stages.describe(task)],
        env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.DEVNULL,
    )


class Scripted:
    """A probe that disturbs while ``busy(run count)`` says so."""

    name = "cpu"

    def __init__(self, busy):
        self.busy = busy

    def read(self, own, thorough):
        busy = self.busy()
        return CpuReading(0.02, 2.0 * busy, 0.0, "foreign CPU use" if busy else None, "x" * busy)

    def settle(self, own):
        pass

    def summary(self, readings):
        return {"peak_foreign_cpu": max((r.foreign_cpu for r in readings), default=0.0)}


def script(monkeypatch, busy):
    monkeypatch.setattr(guards, "probes", lambda settings, backend: [Scripted(busy)])


def test_every_arm_runs_once_a_round_in_rotating_order(tmp_path):
    task, rows = measure(tmp_path)
    assert Counter((row["round"], row["arm"]) for row in rows) == {
        (number, arm["name"]): 1 for number in range(4) for arm in stages.ARMS
    }
    assert [row["arm"] for row in rows[:6]] == ["ref", "again", "skip", "again", "skip", "ref"]
    assert all(row["valid"] and row["why"] is None for row in rows)
    assert all(row["forwards"] == 5 and len(row["token_s"]) == 5 for row in rows)
    assert not any("tokens" in row for row in rows)
    index = {row["arm"]: row["process"]["index"] for row in rows}
    assert index["ref"] == index["skip"] != index["again"]
    environment = read_json(task.out / "environment.json", "moescope/host/1")
    assert [process["arms"] for process in environment["processes"]] == [["ref", "skip"], ["again"]]
    assert environment["processes"][0]["variables"]["OMP_NUM_THREADS"] == str(environment["cores"])
    lines = read_jsonl(task.out / "guard.jsonl", "moescope/guard/1")
    watched = [line["run"] for line in lines if line["event"] == "watch"]
    assert watched == [row["id"] for row in rows]
    assert not (task.work / "journal" / "measure" / "k0").exists()


def test_nothing_names_the_host_or_its_user(tmp_path, monkeypatch):
    monkeypatch.setattr("platform.node", lambda: "host-of-lovelace")
    monkeypatch.setattr("socket.gethostname", lambda: "host-of-lovelace")
    for name in ("USER", "LOGNAME", "HOSTNAME"):
        monkeypatch.setenv(name, "lovelace")
    task, _ = measure(tmp_path, count=3)
    text = "".join(path.read_text() for path in task.out.iterdir())
    assert "lovelace" not in text
    assert str(tmp_path) not in text
    assert f'"pid": {os.getpid()}' not in text


def test_a_run_that_lacks_a_token_is_void_and_not_tried_again(tmp_path):
    # Pass 0 of a process is its warm-up; "again" has a process of its own.
    arms = (stages.arm("ref", "reference"), stages.arm("again", "null", short_at="2", nan_at="3"))
    _, rows = measure(tmp_path, arms)
    bad = {row["id"]: row["why"] for row in rows if not row["valid"]}
    assert bad == {
        "r01-again": "5 tokens generated, not 6",
        "r02-again": "NaN or Inf in the logits",
    }
    assert len(rows) == 8


def test_slow_and_drifting_arms_show(tmp_path):
    arms = (
        stages.arm("ref", "reference", token_s="0.004"),
        stages.arm("slow", "candidate", ["slow"], token_s="0.004"),
        stages.arm("drift", "candidate", token_s="0.004", drift="0.5"),
    )
    begin = time.monotonic()
    _, rows = measure(tmp_path, arms)
    took = time.monotonic() - begin
    # A busy host lengthens any of them and shortens none: what each takes at least is exact.
    passes = {"ref": [1, 1, 1, 1], "slow": [2, 2, 2, 2], "drift": [1.5, 2, 2.5, 3]}
    for name, least in passes.items():
        times = [row["decode_s"] for row in rows if row["arm"] == name]
        assert all(has >= 5 * 0.004 * each for has, each in zip(times, least, strict=True))
    assert sum(row["decode_s"] for row in rows) < took


def test_changed_tokens_are_flagged(tmp_path):
    arms = (stages.arm("ref", "reference", flaky_at="3"), stages.arm("again", "null"))
    _, rows = measure(tmp_path, arms)
    flagged = [row["id"] for row in rows if row.get("flags")]
    assert flagged == ["r02-ref"]
    assert all(row["valid"] for row in rows)


def test_a_disturbed_run_is_rejected_and_tried_again(tmp_path, monkeypatch):
    stages.Disturbed(monkeypatch, "r02-ref")
    task, rows = measure(tmp_path, stages.ARMS[:2], max_wait_s=0.2)
    rejected = [row for row in rows if not row["valid"]]
    assert [row["id"] for row in rejected] == ["r02-ref"]
    assert all(row["why"].startswith("disturbed in") for row in rejected)
    assert "r02-ref-try2" in [row["id"] for row in rows if row["valid"]]
    assert len([row for row in rows if row["valid"]]) == 8
    lines = read_jsonl(task.out / "guard.jsonl")
    assert [x["run"] for x in lines if x.get("rejected")] == [row["id"] for row in rejected]
    # The gate before the second attempt waited in vain and said so.
    again = next(row for row in rows if row["id"] == "r02-ref-try2")
    assert again["guard"]["waited_out"] and again["guard"]["waited_s"] >= 0.1


def test_a_host_that_never_becomes_quiet_ends_the_stage(tmp_path, monkeypatch):
    script(monkeypatch, lambda: True)
    waited, gate = [], guards.Guard.gate
    monkeypatch.setattr(
        guards.Guard, "gate", lambda *given: waited.append(gate(*given)) or waited[-1]
    )
    with pytest.raises(UserError, match=r"the host is not quiet.*all 2 attempts.*max_foreign_cpu"):
        measure(tmp_path, attempts=2, max_wait_s=0.5)
    assert len(waited) > 2 and waited[0].waited_s >= 0.5
    # One long wait, then short ones: twice the idle time, or what one sample takes here.
    assert min(gate.waited_s for gate in waited[1:]) < 0.5


def test_a_round_may_break_while_three_are_left(tmp_path, monkeypatch):
    stages.Disturbed(monkeypatch, "r01-ref", "r01-ref-try2", "r01-ref-try3")
    arms = stages.ARMS[:2]
    _, rows = measure(tmp_path, arms, max_wait_s=0.1)
    valid = Counter(row["round"] for row in rows if row["valid"] and row["arm"] == "ref")
    assert valid == {0: 1, 2: 1, 3: 1}
    assert [row["attempt"] for row in rows if row["arm"] == "ref" and row["round"] == 1] == [
        1,
        2,
        3,
    ]
    with pytest.raises(UserError, match="not quiet"):
        measure(tmp_path, arms, count=3, max_wait_s=0.1)


def test_a_switched_off_guard_records_and_rejects_nothing(tmp_path, monkeypatch):
    script(monkeypatch, lambda: True)
    _, rows = measure(tmp_path, count=3, enabled=False)
    assert all(row["valid"] for row in rows)
    assert all(row["guard"]["busy_fraction"] == 1.0 for row in rows)


def test_arms_that_cannot_run_here_are_absent_not_errors(tmp_path):
    arms = (
        stages.arm("ref", "reference", not_applicable="skip_experts"),
        stages.arm("skip", "intervention", ["skip_experts"], not_applicable="skip_experts"),
        stages.arm("other", "candidate", refuse_load="unsupported"),
    )
    task, rows = measure(tmp_path, arms)
    assert {row["arm"] for row in rows} == {"ref"}
    environment = read_json(task.out / "environment.json")
    assert environment["not_applicable"] == {"skip": "skip_experts: there are no experts"}
    assert environment["unsupported"] == {"other": "mlx-vlm does not load it"}


def test_no_worker_is_left(tmp_path):
    arms = (stages.arm("ref", "reference", die_at="2"), stages.arm("again", "null"))
    measure(tmp_path, arms)
    assert not [child for child in psutil.Process().children() if child.status() != "zombie"]


def test_killed_and_started_again_it_keeps_the_finished_rounds(tmp_path):
    # The first process stays in round 3, which the second has as an earlier pass of its own.
    held = stages.arm("ref", "reference", hold_at="4", hold=str(tmp_path / "never"))
    arms = (held, stages.arm("again", "null"))
    task = stages.make(tmp_path, "measure", "tiny", stages.measure_params(arms, count=5))
    journal = task.work / "journal" / "measure" / "k0"
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent / "workflow")]),
    }
    process = subprocess.Popen(
        [sys.executable, str(TESTS / "stages.py"), stages.describe(task)], env=env
    )
    try:
        deadline = time.monotonic() + 60
        while not (journal / "round-001.json").exists():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.01)
        workers = psutil.Process(process.pid).children()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert len(workers) == 2
    assert all(stages.gone(worker.pid) for worker in workers)
    kept = sorted(path.name for path in journal.glob("round-*.json"))
    assert 2 <= len(kept) < 5
    before = {name: read_json(journal / name)["runs"] for name in kept}

    stage.run(task)
    rows = read_runs(task.out / "runs.jsonl")
    assert len(rows) == 10 and all(row["valid"] for row in rows)
    assert rows[: 2 * len(kept)] == [row for name in kept for row in before[name]]
    assert [row["process"]["start"] for row in rows] == [1] * 2 * len(kept) + [2] * (
        10 - 2 * len(kept)
    )
    assert read_json(task.out / "environment.json")["starts"] == 2
    watched = [x["run"] for x in read_jsonl(task.out / "guard.jsonl") if x["event"] == "watch"]
    assert watched == [row["id"] for row in rows]
    assert not journal.exists()


def test_a_journal_of_another_host_is_thrown_away(tmp_path):
    from moescope.measure.journal import Journal

    first = Journal(tmp_path / "j", {"cpu": "a"})
    first.open()
    first.keep(0, [{"id": "x"}], [])
    assert list(Journal(tmp_path / "j", {"cpu": "a"}).open()) == [0]
    again = Journal(tmp_path / "j", {"cpu": "b"})
    assert again.open() == {}
    assert again.starts == 1


def test_two_at_once_wait_for_each_other_or_refuse(tmp_path):
    go = tmp_path / "go"
    slow = (stages.arm("ref", "reference", hold_at="1", hold=go), stages.arm("again", "null"))
    task = stages.make(tmp_path / "a", "measure", "tiny", stages.measure_params(slow, count=3))
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent / "workflow")]),
    }
    other = subprocess.Popen(
        [sys.executable, str(TESTS / "stages.py"), stages.describe(task)],
        env=env,
        stderr=subprocess.DEVNULL,
    )
    try:
        lock = tmp_path / "moescope-host.lock"
        deadline = time.monotonic() + 60
        while not (lock.exists() and lock.read_text()):
            assert time.monotonic() < deadline and other.poll() is None
            time.sleep(0.01)
        with pytest.raises(UserError, match=rf"measure tiny \(process {other.pid}, since"):
            measure(tmp_path / "b", max_wait_s=0.1)
        go.touch()
        measure(tmp_path / "b", max_wait_s=60)
        assert other.wait(60) == 0
    finally:
        other.kill()
        other.wait()


@pytest.mark.skipif(
    not (shutil.which("git") and shutil.which("make") and shutil.which("cc")),
    reason="needs git, make and a C compiler",
)
def test_a_command_is_measured_beside_a_worker(tmp_path, monkeypatch):
    import toy_runtime
    from moescope.runtimes import binary
    from moescope.trace import stage as trace

    commit = toy_runtime.write(tmp_path / "toy")
    runtime = toy_runtime.runtime(tmp_path / "toy", commit)
    tool = binary.provide(runtime, tmp_path / "work", tmp_path)
    monkeypatch.setattr(binary, "ensure", lambda *_: tool)
    toy = {"name": "toy", "runtime": "toy", "role": "candidate", "env": {"TOY_MS": "5"}}
    patched = toy | {"name": "patched", "role": "intervention", "patches": ["skip_experts"]}
    arms = (stages.arm("ref", "reference"), toy, patched)

    def with_toy(task):
        build = task.root / "results" / "build" / "toy" / "t0"
        made_of = {"schema": INGREDIENTS, "key": "t0", "params": {"runtime": runtime}}
        write_json(build / "ingredients.json", made_of)
        task.upstream["build/toy"] = build
        return task

    params = stages.measure_params(arms, count=3)
    task = with_toy(stages.make(tmp_path, "measure", "tiny", params))
    (tmp_path / "root/work/checkpoints/f0").mkdir(parents=True)
    write_json(tmp_path / "root/work/checkpoints/f0/config.json", {"model_type": "tiny"})
    stage.run(task)
    rows = [row for row in read_runs(task.out / "runs.jsonl") if row["arm"] == "toy"]
    assert [row["valid"] for row in rows] == [True] * 3
    assert all(row["token_s"] is None and row["decode_s"] >= 0.025 for row in rows)
    assert rows[0]["paths"] and rows[0]["binary_sha256"] == tool.sha256
    environment = read_json(task.out / "environment.json")
    assert "cannot be patched" in environment["not_applicable"]["patched"]

    # A command cannot be paused: its runs are whole and follow the slices of their round.
    params = stages.measure_params((toy, *arms[:1], stages.arm("again", "null")), count=3)
    params["rounds"]["slices"] = 2
    task = with_toy(stages.make(tmp_path, "measure", "tiny", params))
    stage.run(task)
    rows = read_runs(task.out / "runs.jsonl")
    assert all(row["valid"] for row in rows) and len(rows) == 9
    assert [row["arm"] for row in rows[2::3]] == ["toy"] * 3
    assert [row.get("slices") for row in rows[:3]] == [2, 2, None]
    assert [row["position"] for row in rows if row["arm"] == "toy"] == [0, 2, 1]
    watched = [x["run"] for x in read_jsonl(task.out / "guard.jsonl") if x["event"] == "watch"]
    assert watched == [name for n in range(3) for name in (f"r0{n}", f"r0{n}-toy")]

    params = {
        "arm": toy,
        "shape": stages.SHAPE,
        "trace": {"passes": 2, "tokens": 4},
        "limits": {"conservation": 0.02},
        "guard": stages.GUARD,
        "machine": stages.MACHINE,
    }
    task = with_toy(stages.make(tmp_path, "trace", "tiny.toy", params))
    trace.run(task)
    found = read_json(task.out / "trace.json")
    assert found["instruments"] == []
    assert "time by term: a command has no scopes" in found["not_measured"]
