"""The trace stage over the fake worker: what is written, what is refused, where a backend joins."""

import csv
import sys
import types

import pytest

import stages
from moescope.errors import UserError
from moescope.files import read_json
from moescope.measure import guard as guards
from moescope.measure import host
from moescope.measure.cpu import CpuReading
from moescope.runtimes.client import WorkerDied
from moescope.trace import stage


@pytest.fixture
def trace(tmp_path, monkeypatch):
    stages.stand_in(monkeypatch)
    monkeypatch.setenv("MOESCOPE_LOCK_DIR", str(tmp_path))

    def run(backend="cpu", patches=(), **settings):
        params = {
            "checkpoint": "tiny",
            "arm": stages.arm("ref", "reference", list(patches), **settings),
            "shape": stages.SHAPE,
            "trace": {"passes": 3, "tokens": 4},
            "limits": {"conservation": 0.02, "unclassified": 0.01, "profiler_cost": 0.03},
            "guard": stages.GUARD,
            "machine": stages.MACHINE | {"backend": backend},
            "session": 1,
        }
        task = stages.make(tmp_path, "trace", "tiny.ref", params)
        stage.run(task)
        with open(task.out / "operations.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        scopes = read_json(task.out / "scopes.json", "moescope/scopes/1")
        return scopes, rows, read_json(task.out / "trace.json", "moescope/trace/1")

    return run


def test_both_instruments_write_what_they_found(trace):
    scopes, rows, found = trace(token_s="0.003")
    assert scopes["tokens"] == 4 and len(scopes["passes"]) == 3
    assert 0.003 <= scopes["plain_token_s"] < 0.03
    assert all(one["guard"]["rejected"] is False for one in scopes["passes"] + scopes["plain"])
    assert scopes["passes"][0]["terms_s"]["expert_gather"] == pytest.approx(0.016)
    assert rows == [
        {"term": "router", "primitive": "Matmul", "count": "2"},
        {"term": "expert_gather", "primitive": "GatherMM", "count": "6"},
        {"term": "other", "primitive": "AsType", "count": "3"},
    ]
    assert found["operations"] == {"total": 11, "astype": 3, "gather": 6, "per_moe_layer": 4.0}
    assert found["instruments"] == ["scopes", "graph"]
    assert found["not_measured"] == []
    assert found["moe_layers"] == 2
    assert found["conservation"]["worst"] == pytest.approx(0)


def test_terms_that_do_not_add_up_are_measured_as_such(trace):
    _, _, found = trace(leak="1.25")
    assert found["conservation"] == {"worst": pytest.approx(0.2), "limit": 0.02}


def test_an_instrument_that_does_not_fit_is_named_the_others_stand(trace):
    scopes, rows, found = trace(no_graph="unsupported")
    assert len(scopes["passes"]) == 3 and rows == []
    assert found["operations"] is None and found["instruments"] == ["scopes"]
    assert found["not_measured"] == ["operations by term: export_to_dot is missing"]


def test_an_instrument_that_fails_is_an_error(trace):
    with pytest.raises(UserError, match="arm ref: failed: export_to_dot is missing"):
        trace(no_graph="failed")


def test_a_runtime_without_the_family_leaves_files_that_say_so(trace):
    scopes, rows, found = trace(refuse_load="unsupported")
    assert scopes["passes"] == [] and scopes["plain_token_s"] is None and rows == []
    assert found["unsupported"] == "mlx-vlm does not load it"


def test_a_disturbed_pass_is_repeated_and_in_the_end_marked(trace, monkeypatch):
    class Busy:
        name = "cpu"

        def read(self, own, thorough):
            return CpuReading(0.02, 9.0, 0.0, "foreign CPU use")

        def settle(self, own):
            pass

        def summary(self, readings):
            return {}

    monkeypatch.setattr(guards, "probes", lambda settings, backend: [Busy()])
    monkeypatch.setitem(stages.GUARD, "max_wait_s", 0.1)
    scopes, _, _ = trace()
    assert all(one["guard"] == {"attempts": 3, "busy_fraction": 1.0, "rejected": True}
               for one in scopes["passes"])  # fmt: skip


def test_a_backend_adds_its_own_instruments(trace, monkeypatch):
    monkeypatch.setattr(guards, "locked", lambda what, backend, limit, say: _nothing())
    monkeypatch.setattr(guards, "probes", lambda settings, backend: [])
    monkeypatch.setattr(host, "device_memory", lambda backend: None)
    module = types.ModuleType("moescope.trace.of_test")

    def measure(context):
        (context.task.out / "kernels.csv").write_text("kernel\n")
        with context.worker(FAKE_EXTRA="1") as worker:
            environ = worker.ask("environment", 60)["environ"]
        assert environ["FAKE_TOKEN_S"] == "0.001"
        return {"instruments": ["kernels"], "not_measured": ["heat"], "x": environ["FAKE_EXTRA"]}

    module.measure = measure
    module.__spec__ = types.SimpleNamespace(name=module.__name__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(stage.BACKENDS, "cuda", module.__name__)
    _, _, found = trace("cuda", token_s="0.001")
    assert found["instruments"] == ["scopes", "graph", "kernels"]
    assert (found["not_measured"], found["x"]) == (["heat"], "1")
    monkeypatch.setitem(stage.BACKENDS, "cuda", "moescope.trace.nothing_yet")
    _, _, found = trace("cuda")
    assert found["not_measured"] == ["kernels: there are no instruments for cuda yet"]


def _nothing():
    import contextlib

    return contextlib.nullcontext({})


@pytest.mark.parametrize("settings", [{"die_at": "2"}, {"die_early": "1"}])
def test_an_arm_that_fails_has_a_trace_that_says_so(trace, settings):
    scopes, rows, found = trace(**settings)
    assert scopes["passes"] == [] and rows == [] and found["instruments"] == []
    (line,) = found["not_measured"]
    assert line.startswith("its instrumented passes: failed (")


def test_a_process_that_crashes_once_is_tried_once_more(trace, monkeypatch):
    """Under a profiler processes die now and then; an arm that does it twice has failed."""
    together, attempts = stage._together, []

    def crashing(context, kind, found):
        attempts.append(found)
        if len(attempts) <= crashes:
            raise WorkerDied(kinds[0], "kernels: the worker ended with 139")
        together(context, kind, found)

    monkeypatch.setattr(stage, "_together", crashing)
    crashes, kinds = 1, ["crash"]
    scopes, _, found = trace()
    assert len(attempts) == 2 and len(scopes["passes"]) == 3
    assert found["crashes"] == ["kernels: the worker ended with 139"]
    assert "scopes" in found["instruments"] and found["not_measured"] == []

    crashes, attempts[:] = 2, []
    _, _, found = trace()
    assert len(attempts) == 2 and found["instruments"] == []
    assert found["not_measured"] == [
        "its instrumented passes: failed (crash): kernels: the worker ended with 139"
    ]

    # What a second attempt would meet again is not tried again.
    kinds, attempts[:] = ["timeout"], []
    _, _, found = trace()
    assert len(attempts) == 1 and "crashes" not in found
