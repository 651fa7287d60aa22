"""Arms that die or fail: recorded, left out, and the others go on."""

import pytest

import stages
from moescope.files import read_json
from moescope.measure import stage, warmup
from moescope.measure.failed import KINDS, told
from moescope.measure.failing import failure
from moescope.measure.journal import Journal
from moescope.runtimes.client import WorkerDied, WorkerError
from moescope.verdict.results import read_runs


@pytest.fixture(autouse=True)
def quiet(tmp_path, monkeypatch):
    stages.stand_in(monkeypatch)
    monkeypatch.setenv("MOESCOPE_LOCK_DIR", str(tmp_path))


def measure(tmp_path, *arms, count=4, slices=1):
    params = stages.measure_params(arms, count)
    if slices > 1:
        params["rounds"]["slices"] = slices
    task = stages.make(tmp_path, "measure", "tiny", params)
    stage.run(task)
    rows = read_runs(task.out / "runs.jsonl")
    return task, rows, read_json(task.out / "environment.json", "moescope/host/1")


REF, AGAIN = stages.arm("ref", "reference"), stages.arm("again", "null")


def valid(rows, arm):
    return [row["round"] for row in rows if row["arm"] == arm and row["valid"]]


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"die_of": "SIGKILL"}, "out_of_memory"),
        ({"die_of": "SIGSEGV"}, "crash"),
        ({"die_of": "SIGABRT", "last_words": "what(): std::bad_alloc"}, "out_of_memory"),
    ],
)
def test_an_arm_that_exits_in_round_2_leaves_and_the_others_go_on(tmp_path, settings, kind):
    toy = stages.arm("toy", "candidate", die_at="3", **settings)
    task, rows, environment = measure(tmp_path, REF, AGAIN, toy)
    assert valid(rows, "ref") == valid(rows, "again") == [0, 1, 2, 3]
    assert valid(rows, "toy") == [0, 1]
    (row,) = (row for row in rows if not row["valid"])
    assert (row["id"], row["failed"]["kind"], row["decode_s"]) == ("r02-toy", kind, None)
    assert row["why"].startswith("failed (") and row["guard"]["samples"] >= 1
    assert environment["failed"] == {"toy": row["failed"]}
    assert not (task.work / "journal" / "measure" / "k0").exists()


def test_those_that_share_its_process_go_on_in_a_new_one(tmp_path):
    # Passes of the one process: ref and skip warm up, ref, skip, which dies. The new one ends with
    # its third.
    arms = [stages.arm("ref", "reference", die_at="3"), AGAIN]
    arms.append({**arms[0], "name": "skip", "role": "intervention", "patches": ["skip_experts"]})
    _, rows, environment = measure(tmp_path, *arms, count=3)
    assert list(environment["failed"]) == ["skip"]
    assert valid(rows, "ref") == valid(rows, "again") == [0, 1, 2]
    assert valid(rows, "skip") == []
    assert [process["arms"] for process in environment["processes"]] == [["ref", "skip"], ["again"]]


def test_a_refusal_in_a_round_is_a_failure_and_names_no_path(tmp_path):
    _, rows, environment = measure(
        tmp_path, REF, AGAIN, stages.arm("toy", "candidate", refuse_at=2)
    )
    why = "a library gave up in model.py"
    assert environment["failed"] == {"toy": {"kind": "failed", "why": why}}
    assert valid(rows, "toy") == [0] and valid(rows, "ref") == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("settings", "kind"),
    [({"die_early": "1"}, "crash"), ({"refuse_load": "out_of_memory"}, "out_of_memory"),
     ({"die_at": "0"}, "out_of_memory")],
)  # fmt: skip
def test_an_arm_that_does_not_come_up_is_absent(tmp_path, settings, kind):
    _, rows, environment = measure(tmp_path, REF, AGAIN, stages.arm("toy", "candidate", **settings))
    assert environment["failed"]["toy"]["kind"] == kind
    assert {row["arm"] for row in rows} == {"ref", "again"}
    assert len(rows) == 8 and all(row["valid"] for row in rows)


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"refuse_load": "unsupported"}, "unsupported"),
        ({"refuse_load": "failed"}, "failed"),
        ({"die_at": "2"}, "failed"),
        ({"die_early": "1"}, "failed"),
    ],
)
def test_without_its_reference_the_other_arms_have_their_figures(tmp_path, settings, where):
    arms = (stages.arm("ref", "reference", **settings), AGAIN, stages.arm("lm", "candidate", x=1))
    _, rows, environment = measure(tmp_path, *arms)
    assert "ref" in environment[where]
    assert valid(rows, "again") == valid(rows, "lm") == [0, 1, 2, 3]


def test_when_all_arms_fail_there_is_a_result_without_runs(tmp_path):
    arms = [stages.arm(n, r, die_early="1") for n, r in (("ref", "reference"), ("again", "null"))]
    _, rows, environment = measure(tmp_path, *arms)
    assert rows == [] and set(environment["failed"]) == {"ref", "again"}
    assert environment["processes"][0]["versions"] is None


def test_a_second_start_does_not_try_a_failed_arm_again(tmp_path, monkeypatch):
    from moescope.measure import host

    facts = {"schema": "moescope/host/1", "cores": 2}
    monkeypatch.setattr(host, "describe", lambda _: facts)
    params = stages.measure_params((REF, AGAIN, stages.arm("toy", "candidate", y=1)), 3)
    task = stages.make(tmp_path, "measure", "tiny", params)
    journal = Journal(task.work / "journal" / "measure" / "k0", facts)
    journal.open()
    journal.fail("toy", {"kind": "crash", "why": "it fell over"})
    stage.run(task)
    environment = read_json(task.out / "environment.json")
    assert environment["failed"] == {"toy": {"kind": "crash", "why": "it fell over"}}
    assert environment["starts"] == 2 and len(environment["processes"]) == 2
    assert {row["arm"] for row in read_runs(task.out / "runs.jsonl")} == {"ref", "again"}


def test_in_a_sliced_round_the_others_finish_it(tmp_path):
    toy = stages.arm("toy", "candidate", die_in_slice="2.1")
    _, rows, environment = measure(tmp_path, REF, AGAIN, toy, slices=2)
    assert valid(rows, "ref") == valid(rows, "again") == [0, 1, 2, 3]
    assert valid(rows, "toy") == [0]
    assert environment["failed"]["toy"]["kind"] == "out_of_memory"
    assert environment["failed"]["toy"]["why"].startswith("sliced: the worker ended with 137")


def test_the_warm_up_stage_records_a_failure(tmp_path):
    params = {"arm": stages.arm("ref", "reference", die_at="1", die_of="SIGSEGV"),
              "checkpoint": "tiny", "shape": stages.SHAPE, "machine": stages.MACHINE}  # fmt: skip
    task = stages.make(tmp_path, "warmup", "tiny.ref", params)
    warmup.run(task)
    found = read_json(task.out / "warmup.json", "moescope/warmup/1")
    assert found["failed"]["kind"] == "crash" and "load_s" not in found


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (WorkerError("out_of_memory", "[malloc] Unable to allocate"), "out_of_memory"),
        (WorkerError("failed", "RuntimeError: no kernel image is available"), "unsupported"),
        (WorkerError("failed", "ValueError: x"), "failed"),
        (WorkerDied("timeout", "decode: no answer within the time limit; killed"), "timeout"),
        (WorkerDied("protocol", "decode: the worker answered b'x', which is no reply"), "crash"),
        (WorkerDied("crash", "decode: ended", 139, "cannot allocate memory"), "out_of_memory"),
        (WorkerDied("crash", "decode: ended", 1, "no module named mlx"), "crash"),
        (WorkerDied("killed", "ended by somebody else", 143), "crash"),
    ],
)
def test_every_bad_end_has_a_kind_of_the_record(error, kind):
    found = failure(error)
    assert found["kind"] == kind in KINDS
    assert found["why"] in told(found)


def test_why_is_one_line_without_paths():
    found = failure(WorkerError("failed", "OSError:\n/home/ada/models/a b.bin and /opt/x/y.so"))
    assert found["why"] == "OSError: a b.bin and y.so" or "ada" not in found["why"]
    assert "\n" not in found["why"] and "/home" not in found["why"]
