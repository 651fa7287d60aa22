"""The client against a fake worker: every way a process can end is a named error, none is left."""

import os
import sys
import time
from pathlib import Path

import pytest

import fake_worker
import stages
from moescope.runtimes.client import Worker, WorkerDied, WorkerError, usable_cores


@pytest.fixture
def root(tmp_path):
    return fake_worker.install(tmp_path / "root")


def start(root: Path, log: Path | None = None, **settings: str) -> Worker:
    return Worker(Path(sys.executable), dict(os.environ), root, log, settings)


def test_asks_and_answers(root):
    with start(root) as worker:
        assert worker.ready["versions"]["mlx"] == "0.0.1"
        assert worker.ask("load", 60, package="mlx-lm", path="x")["layers"] == 2
        run = worker.ask("decode", 60, prompt=[1, 2], tokens=4, patches=[])
        assert (run["generated_tokens"], run["forwards"]) == (4, 3)
        pid = worker.pid
    assert stages.gone(pid)
    assert not worker.alive


def test_a_refusal_leaves_the_worker_usable(root):
    with start(root, FAKE_NOT_APPLICABLE="skip_experts") as worker:
        with pytest.raises(WorkerError) as caught:
            worker.ask("decode", 60, prompt=[1], tokens=4, patches=["skip_experts"])
        assert caught.value.kind == "not_applicable"
        assert not isinstance(caught.value, WorkerDied)
        assert worker.ask("decode", 60, prompt=[1], tokens=4)["generated_tokens"] == 4


@pytest.mark.parametrize(
    ("do", "arguments", "kind", "status"),
    [
        ("crash", {"message": "Segmentation of something", "status": 3}, "crash", 3),
        ("crash", {"message": "std::bad_alloc", "status": 134}, "out_of_memory", 134),
        ("crash", {"message": "[metal::malloc] Attempting", "status": 1}, "out_of_memory", 1),
        ("kill", {}, "out_of_memory", 137),
        ("garble", {}, "protocol", None),
    ],
)
def test_the_end_of_a_worker_is_classified(root, do, arguments, kind, status):
    with start(root) as worker:
        pid = worker.pid
        with pytest.raises(WorkerDied) as caught:
            worker.ask(do, 60, **arguments)
        assert (caught.value.kind, caught.value.status) == (kind, status)
        if "message" in arguments:
            assert arguments["message"] in caught.value.tail
            assert arguments["message"] in str(caught.value)
        assert stages.gone(pid)
        with pytest.raises(WorkerDied):
            worker.ask("load", 1, package="p", path="x")


def test_a_silent_worker_is_killed_with_its_children(root):
    with start(root) as worker:
        pid, child = worker.pid, worker.ask("spawn", 60)["pid"]
        begin = time.monotonic()
        with pytest.raises(WorkerDied) as caught:
            worker.ask("sleep", 0.3, seconds=60)
        assert time.monotonic() - begin < 50
        assert caught.value.kind == "timeout"
    assert stages.gone(pid)
    assert stages.gone(child)


def test_children_end_with_a_worker_that_ends_well(root):
    with start(root) as worker:
        child = worker.ask("spawn", 60)["pid"]
    assert stages.gone(child)


def test_a_worker_that_does_not_come_up(root):
    with pytest.raises(WorkerDied, match="no module named mlx"):
        start(root, FAKE_DIE_EARLY="1").__enter__()
    worker = start(root, FAKE_NEVER_READY="1")
    worker.start()
    with pytest.raises(WorkerDied) as caught:
        worker.wait_ready(0.2)
    assert caught.value.kind == "timeout"
    with pytest.raises(WorkerDied, match="does not start"):
        Worker(root / "nothing" / "python", {}, root).start()


def test_the_environment_is_explicit(root, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONHOME", "")
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    env = {**os.environ, "PYTHONPATH": "/ambient/packages", "KEPT": "yes"}
    settings = {"MLX_X": "2"}
    with Worker(Path(sys.executable), env, root, settings=settings) as worker:
        seen = worker.ask("environment", 60)
    cores = str(usable_cores())
    assert seen["environ"]["OMP_NUM_THREADS"] == cores
    assert seen["environ"]["OPENBLAS_NUM_THREADS"] == cores
    assert (seen["environ"]["MLX_X"], seen["environ"]["KEPT"]) == ("2", "yes")
    assert "PYTHONWARNINGS" not in seen["environ"]
    assert seen["environ"]["PYTHONPATH"] == f"{root / 'workflow'}{os.pathsep}/ambient/packages"
    assert str(root) not in seen["path"]
    with Worker(Path(sys.executable), env, root, settings={"OMP_NUM_THREADS": "1"}) as worker:
        assert worker.ask("environment", 60)["environ"]["OMP_NUM_THREADS"] == "1"


def test_nothing_is_inherited(root, monkeypatch):
    monkeypatch.setenv("SECRET", "x")
    with Worker(Path(sys.executable), {"PATH": os.environ["PATH"]}, root) as worker:
        assert "SECRET" not in worker.ask("environment", 60)["environ"]


def test_large_requests_and_much_noise_do_not_block(root, tmp_path):
    log = tmp_path / "logs" / "worker.log"
    with start(root, log) as worker:
        assert worker.ask("echo", 20, value="y" * 2_000_000)["length"] == 2_000_000
        worker.ask("print_noise", 60, size=300_000)
    assert log.stat().st_size > 300_000


def test_several_work_at_the_same_time(root, tmp_path):
    (tmp_path / "met").mkdir()
    workers = [start(root, FAKE_MEET_LOADING=f"{tmp_path / 'met'}:3") for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.wait_ready()
    deadline = time.monotonic() + 60
    for worker in workers:
        worker.send("load", deadline=deadline, package="p", path="x")
    for worker in workers:
        worker.receive("load", deadline=deadline)
    for worker in workers:
        worker.close()
