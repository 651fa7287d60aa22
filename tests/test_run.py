"""A job's result appears as a whole or not at all."""

import errno
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from moescope import cli, run
from moescope.errors import UserError
from moescope.files import inside, read_json, read_jsonl, write_json, write_text
from moescope.study import plan
from moescope.study.plan import Job
from moescope.task import INGREDIENTS

PACKAGES = str(Path(run.__file__).parents[1])


@pytest.fixture
def stage(monkeypatch):
    """A stage `toy` whose function each test sets."""
    module = types.ModuleType("moescope.toy")
    monkeypatch.setitem(sys.modules, "moescope.toy", module)
    for table in (plan.CODE, run.CODE):
        monkeypatch.setitem(table, "toy", ("toy",))
    for table in (plan.OUTPUTS, run.OUTPUTS):
        monkeypatch.setitem(table, "toy", ("a.json", "b.json"))
    return module


def toy(upstream=None) -> Job:
    return Job("toy", "thing", {"x": 1}, upstream or {}, {"toy": "0" * 12})


def whole(task):
    write_json(task.out / "a.json", {"schema": "moescope/a/1", "x": task.params["x"]})
    write_json(task.out / "b.json", {})
    task.notes["bytes"] = 7


def test_a_result_is_written_with_what_it_depends_on(stage, tmp_path):
    stage.run = whole
    job = toy()
    run.run_job(job, tmp_path)
    assert job.done(tmp_path)
    ingredients = read_json(tmp_path / job.folder / "ingredients.json", INGREDIENTS)
    assert ingredients["key"] == job.key and ingredients["params"] == {"x": 1}
    cost = read_json(tmp_path / job.folder / "cost.json", run.COST)
    assert cost["bytes"] == 7 and cost["seconds"] >= 0 and cost["peak_memory"] > 2**20
    assert not list((tmp_path / "work/tmp").iterdir())


def test_what_a_killed_process_left_of_the_job_goes(stage, tmp_path):
    stage.run = whole
    job = toy()
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    name = f"{job.stage}.{job.subject}.{job.key}"
    left, used = (tmp_path / f"work/tmp/{name}.{pid}" for pid in (ended.pid, os.getppid()))
    for folder in (left, used):
        folder.mkdir(parents=True)
        (folder / "a.json").touch()
    run.run_job(job, tmp_path)
    assert not left.exists() and used.exists()


def test_a_stage_that_fails_leaves_nothing(stage, tmp_path):
    def broken(task):
        write_json(task.out / "a.json", {})
        raise RuntimeError("in the middle")

    stage.run = broken
    with pytest.raises(RuntimeError):
        run.run_job(toy(), tmp_path)
    assert not (tmp_path / "results").exists()
    assert not list((tmp_path / "work/tmp").iterdir())


def test_a_stage_that_forgets_a_file_is_an_error(stage, tmp_path):
    stage.run = lambda task: write_json(task.out / "a.json", {})
    with pytest.raises(UserError, match=r"toy did not write b\.json"):
        run.run_job(toy(), tmp_path)
    assert not (tmp_path / "results").exists()


def test_an_upstream_result_under_a_wrong_path_is_refused(stage, tmp_path):
    stage.run = whole
    job = toy()
    run.run_job(job, tmp_path)
    path = tmp_path / job.folder / "ingredients.json"
    value = json.loads(path.read_text())
    path.write_text(json.dumps({**value, "key": "f" * 12}))
    with pytest.raises(UserError, match="not that of its path"):
        run.run_job(toy({"toy/thing": job.key}), tmp_path)


def test_files_of_another_schema_are_refused_by_name(tmp_path):
    write_json(tmp_path / "x.json", {"schema": "moescope/x/2"})
    with pytest.raises(UserError, match=r"x\.json: schema is 'moescope/x/2'.*reads 'moescope/x/1'"):
        read_json(tmp_path / "x.json", "moescope/x/1")
    write_text(tmp_path / "x.jsonl", '{"a": 1}\nnot json\n')
    with pytest.raises(UserError, match=r"x\.jsonl:2: not JSON"):
        read_jsonl(tmp_path / "x.jsonl")


def test_nan_is_never_written(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "x.json", {"a": float("nan")})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x"])
def test_a_path_stays_inside_its_root(tmp_path, path):
    with pytest.raises(UserError, match="leaves its folder"):
        inside(tmp_path, path)
    assert inside(tmp_path, "a/b") == tmp_path.resolve() / "a" / "b"


def in_a_process(code: str, log):
    """The streams must be the real ones, which pytest replaces."""
    head = "import os, sys\nfrom pathlib import Path\nfrom moescope.run import tee\n"
    return subprocess.run(
        [sys.executable, "-c", f"{head}with tee(Path({str(log)!r})):\n    {code}"],
        capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": PACKAGES},
    )  # fmt: skip


def test_what_a_job_prints_is_in_its_log_with_its_children_s(tmp_path):
    log = tmp_path / "log" / "x.log"
    result = in_a_process('print("one", file=sys.stderr, flush=True); os.system("echo two")', log)
    assert log.read_text().split() == ["one", "two"]
    assert result.stderr.split() == ["one", "two"]


def test_an_error_is_one_line_in_the_log(tmp_path):
    code = 'from moescope.errors import UserError; raise UserError("wrong", where="c.yaml: a.b")'
    result = in_a_process(code, tmp_path / "x.log")
    assert result.returncode == 2
    assert (tmp_path / "x.log").read_text() == "moescope: c.yaml: a.b: wrong\n"


def test_a_bug_s_traceback_is_in_the_log(tmp_path):
    result = in_a_process("1 / 0", tmp_path / "x.log")
    assert result.returncode == 1
    assert "ZeroDivisionError" in (tmp_path / "x.log").read_text()


def test_a_result_is_published_to_another_file_system(stage, tmp_path, monkeypatch):
    stage.run = whole
    real = os.replace

    def replace(old, new):
        if "work" in Path(old).parts and "results" in Path(new).parts:
            raise OSError(errno.EXDEV, "Invalid cross-device link", str(old), None, str(new))
        real(old, new)

    monkeypatch.setattr(os, "replace", replace)
    job = toy()
    run.run_job(job, tmp_path)
    assert job.done(tmp_path)
    assert not [p.name for p in (tmp_path / job.folder).iterdir() if p.name.startswith(".")]


def test_a_disk_that_fills_while_publishing_leaves_nothing(stage, tmp_path, monkeypatch):
    stage.run = whole
    real = os.replace

    def replace(old, new):
        if Path(new).name == "ingredients.json":
            raise OSError(errno.ENOSPC, "No space left on device", str(old), None, str(new))
        real(old, new)

    monkeypatch.setattr(os, "replace", replace)
    job = toy()
    with pytest.raises(OSError, match="No space"):
        run.run_job(job, tmp_path)
    assert not (tmp_path / job.folder).exists()


@pytest.mark.parametrize(
    ("number", "advice"), [(errno.ENOSPC, "make room"), (errno.EROFS, "make it writable")]
)
def test_what_the_host_refuses_is_one_line(monkeypatch, capsys, number, advice):
    def explain(options):
        raise OSError(number, os.strerror(number), "results/x")

    monkeypatch.setattr(cli, "_explain", explain)
    assert cli.main(["explain"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"moescope: results/x: {os.strerror(number)}; {advice}")
    assert said.count("\n") == 1
