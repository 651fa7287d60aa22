"""A run that did not do its work is void, and says what it lacks."""

import contextlib
import json
import math

import pytest

import stages
from moescope.errors import UserError
from moescope.files import read_json
from moescope.measure import host, warmup
from moescope.measure.runs import run_id, write_runs
from moescope.measure.validity import flag_changed_tokens, void
from moescope.verdict.results import read_runs

SHAPE = {"prompt": 8, "generate": 5}


def result(**changes):
    good = {
        "prompt_tokens": 8,
        "generated_tokens": 5,
        "prefill_s": 0.1,
        "decode_s": 0.4,
        "forwards": 4,
        "token_s": [0.1, 0.1, 0.1, 0.1],
        "finite": True,
    }
    return good | changes


def test_a_good_run_is_valid():
    assert void(result(), SHAPE) is None
    assert void(result(token_s=[0.1, 0.1, 0.1, 0.099]), SHAPE) is None


def test_a_command_shows_less_and_may_time_the_first_token_too():
    unseen = {"finite": None, "token_s": None}
    assert void(result(**unseen), SHAPE) is None
    assert void(result(**unseen, forwards=5), SHAPE) is None
    assert void(result(**unseen, forwards=6), SHAPE) == "6 forwards timed, not 4"
    assert void(result(**unseen, forwards=3), SHAPE) == "3 forwards timed, not 4"
    assert void(result(**unseen, decode_s=0.0), SHAPE) == "decode_s is 0.0, not a positive time"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"prompt_tokens": 7}, "7 prompt tokens, not 8"),
        ({"generated_tokens": 4}, "4 tokens generated, not 5"),
        ({"generated_tokens": 6}, "6 tokens generated, not 5"),
        ({"finite": False}, "NaN or Inf in the logits"),
        ({"forwards": 5}, "5 forwards timed, not 4"),
        ({"token_s": [0.2, 0.2]}, "2 intervals for 4 forwards"),
        ({"decode_s": 0.0}, "decode_s is 0.0, not a positive time"),
        ({"prefill_s": -1}, "prefill_s is -1, not a positive time"),
        ({"decode_s": math.inf}, "decode_s is inf, not a positive time"),
        ({"token_s": [0.1, 0.1, math.nan, 0.1]}, "token_s[2] is nan, not a positive time"),
        ({"token_s": [0.1, 0.1, 0.1, 0]}, "token_s[3] is 0, not a positive time"),
        ({"decode_s": 0.5}, "the intervals add up to 0.4000 s, the decode took 0.5000 s"),
    ],
)
def test_a_run_is_void_for_each_reason(changes, why):
    assert void(result(**changes), SHAPE) == why


def test_tokens_that_change_are_flagged_by_arm_among_the_valid():
    rows = [
        {"arm": arm, "valid": valid, "tokens_sha256": tokens}
        for arm, valid, tokens in (
            ("a", False, "x"),
            ("c", True, None),
            ("a", True, "p"),
            ("b", True, "q"),
            ("a", True, "r"),
            ("b", True, "q"),
            ("a", False, "s"),
            ("a", True, "p"),
        )
    ]
    flag_changed_tokens(rows)
    assert [i for i, row in enumerate(rows) if "flags" in row] == [4]


def test_the_file_of_runs_is_sealed(tmp_path):
    rows = [
        {"schema": "moescope/run/1", "id": run_id(2, "vlm-null", attempt), "arm": "vlm-null",
         "round": 2, "valid": attempt == 2}
        for attempt in (1, 2)
    ]  # fmt: skip
    path = tmp_path / "runs.jsonl"
    write_runs(path, rows)
    assert [row["id"] for row in read_runs(path)] == ["r02-vlm-null", "r02-vlm-null-try2"]
    path.write_text(path.read_text().replace("true", "false"))
    with pytest.raises(UserError, match="altered"):
        read_runs(path)


def test_the_host_is_described_without_its_name():
    facts = host.describe("cpu")
    assert facts["schema"] == "moescope/host/1"
    assert facts["cores"] >= 1 and facts["memory"] > 1 << 28
    assert facts["cpu"] and facts["system"] in ("linux", "darwin")
    assert set(facts) <= {
        "schema", "system", "kernel", "distribution", "machine", "cpu", "cores", "cores_physical",
        "memory", "last_level_cache", "backend", "virtualisation", "governor", "turbo",
        "power_source", "python",
    }  # fmt: skip
    json.dumps(facts, allow_nan=False)


@pytest.fixture
def task(tmp_path, monkeypatch):
    stages.stand_in(monkeypatch)
    monkeypatch.setenv("MOESCOPE_LOCK_DIR", str(tmp_path))

    def make(**settings):
        params = {
            "checkpoint": "tiny",
            "arm": stages.arm("ref", "reference", tmpdir=str(tmp_path / "tmp"), **settings),
            "shape": stages.SHAPE,
            "machine": stages.MACHINE,
        }
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache" / "kernel.so").write_bytes(b"12345")
        params["arm"]["env"]["TMPDIR"] = str(tmp_path / "cache")
        return stages.make(tmp_path, "warmup", "tiny.ref", params)

    return make


def test_the_warm_up_times_two_passes_and_counts_what_is_cached(task):
    task = task()
    warmup.run(task)
    found = read_json(task.out / "warmup.json", "moescope/warmup/1")
    assert found["cache"] == found["cache_before"] == {"files": 1, "bytes": 5}
    assert found["first_use_s"] >= 0
    assert found["first_pass"]["decode_s"] > 0 and found["second_pass"]["decode_s"] > 0


def test_what_is_cached_is_counted_when_its_turn_has_come(task, tmp_path, monkeypatch):
    """Another warm-up, which had the host first, has left a kernel more."""
    locked = warmup.guards.locked

    @contextlib.contextmanager
    def after_another(*arguments):
        with locked(*arguments) as facts:
            (tmp_path / "cache" / "another.so").write_bytes(b"123")
            yield facts

    task = task()
    monkeypatch.setattr(warmup.guards, "locked", after_another)
    warmup.run(task)
    found = read_json(task.out / "warmup.json", "moescope/warmup/1")
    assert found["cache_before"] == {"files": 2, "bytes": 8}


def test_a_runtime_without_the_family_is_said_not_failed(task):
    task = task(refuse_load="unsupported")
    warmup.run(task)
    found = read_json(task.out / "warmup.json", "moescope/warmup/1")
    assert found["unsupported"] == "mlx-vlm does not load it"
    assert "first_pass" not in found


def test_a_warm_up_that_fails_is_said_too(task):
    task = task(refuse_load="failed")
    warmup.run(task)
    found = read_json(task.out / "warmup.json", "moescope/warmup/1")
    assert found["failed"] == {"kind": "failed", "why": "mlx-vlm does not load it"}
    assert "first_pass" not in found
