"""Rounds of a measurement that was interrupted for good."""

import json
from types import SimpleNamespace

import pytest

from moescope.errors import UserError
from moescope.files import read_json
from moescope.measure import conclude
from moescope.measure.journal import Journal
from moescope.verdict.results import read_runs

HOST = {"schema": "moescope/host/1", "cores": 4}
VERSIONS = {"mlx": "0.32.4", "python": "3.12.3"}


def row(arm, number, index):
    return {
        "schema": "moescope/run/1", "id": f"r{number:02}-{arm}", "arm": arm, "round": number,
        "tokens_sha256": "a", "decode_s": 1.0, "valid": True, "why": None,
        "process": {"index": index, "start": 1, "versions": VERSIONS},
    }  # fmt: skip


@pytest.fixture
def task(tmp_path):
    (tmp_path / "out").mkdir()
    return SimpleNamespace(
        params={"rounds": {"count": 5, "warmup": 1}}, key="k" * 12, subject="c", say=print,
        work=tmp_path / "work", out=tmp_path / "out",
    )  # fmt: skip


def interrupted(task, rounds):
    journal = Journal(task.work / "journal" / "measure" / task.key, HOST)
    journal.open()
    for number in range(rounds):
        rows = [row("a", number, 0), row("null", number, 1)]
        journal.keep(number, rows, [{"schema": "moescope/guard/1", "run": rows[0]["id"]}])
    return journal


def test_finished_rounds_are_the_result_and_it_says_how_many(task):
    journal = interrupted(task, 4)
    conclude.run(task)
    rows = read_runs(task.out / "runs.jsonl")
    assert [one["id"] for one in rows] == [
        f"r{number:02}-{arm}" for number in range(4) for arm in ("a", "null")
    ]
    environment = read_json(task.out / "environment.json", "moescope/host/1")
    assert environment["interrupted"] == "after 4 of 5 rounds"
    assert environment["cores"] == 4 and environment["starts"] == 1
    assert environment["processes"] == [
        {"index": 0, "arms": ["a"], "versions": VERSIONS},
        {"index": 1, "arms": ["null"], "versions": VERSIONS},
    ]
    lines = (task.out / "guard.jsonl").read_text().splitlines()
    assert [json.loads(line)["run"] for line in lines] == [f"r{n:02}-a" for n in range(4)]
    assert not journal.folder.exists()


def test_fewer_than_three_rounds_are_no_measurement(task):
    journal = interrupted(task, 2)
    with pytest.raises(UserError, match="only 2 rounds"):
        conclude.run(task)
    assert journal.folder.exists() and not list(task.out.iterdir())


def test_what_was_not_interrupted_cannot_be_concluded(task):
    with pytest.raises(UserError, match="no journal"):
        conclude.run(task)
