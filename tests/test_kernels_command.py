"""The kernels command around a CUPTI of our own: marks, what is recorded, what is refused."""

import gzip
import json
from itertools import pairwise

import pytest

import tiny
from moescope.runtimes.client import Worker, WorkerError

TOKENS = 4


@pytest.fixture(scope="module")
def model(root, tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernels") / "model"
    with Worker(tiny.arm_python(), {"PATH": "/usr/bin:/bin"}, root) as worker:
        layout = worker.ask("layout", 30, package="mlx-lm", config=tiny.config("qwen3_moe"))
        tiny.write(folder, layout)
    return folder


@pytest.fixture(scope="module")
def worker(root, model):
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(root / "tests" / "fake_cupti")}
    with Worker(tiny.arm_python(), env, root, settings={"MOESCOPE_BEFORE_MLX": "cupti"}) as worker:
        worker.ask("load", 60, package="mlx-lm", path=str(model))
        yield worker


def events(path):
    with gzip.open(path, "rt") as file:
        return json.load(file)


def kernels(worker, path, **arguments):
    reply = worker.ask(
        "kernels", 60, prompt=tiny.PROMPT, tokens=TOKENS, save=str(path), **arguments
    )
    return reply, events(path)


def test_marks_tell_the_steps_apart(worker, tmp_path):
    reply, found = kernels(worker, tmp_path / "e.json.gz")
    assert found["schema"] == "moescope/events/1"
    marks = found["marks"]
    assert marks[0][:2] == ["begin", 0] and marks[-1][:2] == ["end", TOKENS]
    assert [time for *_, time in marks] == sorted(time for *_, time in marks)
    # Step 0 is the prompt's last position; one step is always built ahead of the token.
    what = [(name, step) for name, step, _ in marks[1:-1]]
    expected = [("built", 0), ("taken", 0)]
    for token in range(TOKENS):
        expected += [("built", token + 1), ("taken", token + 1), ("token", token)]
    assert what == expected
    assert reply["generated_tokens"] == TOKENS == len(reply["token_ns"])
    assert 0 < reply["kernels"] == len(found["kernels"]["rows"])
    assert reply["kernel_s"] == pytest.approx(reply["kernels"] * 500e-9)


def test_calls_are_recorded_or_not(worker, tmp_path):
    _, found = kernels(worker, tmp_path / "a.json.gz")
    assert set(found["calls"]["names"]) == {"cudaLaunchKernelExC", "cudaMalloc"}
    _, found = kernels(worker, tmp_path / "b.json.gz", calls="none")
    assert found["calls"] == {"names": [], "rows": []} and found["kernels"]["rows"]
    _, found = kernels(worker, tmp_path / "c.json.gz", calls="all")
    assert found["calls"]["rows"]
    with pytest.raises(WorkerError, match="all or none"):
        kernels(worker, tmp_path / "d.json.gz", calls="some")


def test_order_exports_the_graph_of_each_step(worker, tmp_path):
    _, found = kernels(worker, tmp_path / "e.json.gz", order=True)
    assert found["ranges"] is None  # the CPU's library has no ranges
    assert set(found["steps"]) == {str(step) for step in range(1, TOKENS + 1)}
    graph = worker.ask("graph", 60, prompt=tiny.PROMPT)
    assert found["sequences"][found["steps"]["2"]] == graph["sequence"]
    assert [mark[0] for mark in found["marks"]].count("taken") == TOKENS + 1


def test_a_worker_without_cupti_says_how_to_start_it(root, model, tmp_path):
    with Worker(tiny.arm_python(), {"PATH": "/usr/bin:/bin"}, root) as worker:
        worker.ask("load", 60, package="mlx-lm", path=str(model))
        with pytest.raises(WorkerError, match="MOESCOPE_BEFORE_MLX=cupti") as error:
            kernels(worker, tmp_path / "e.json.gz")
    assert error.value.kind == "unsupported"


def test_only_the_steps_asked_for_are_exported(worker, tmp_path):
    _, found = kernels(worker, tmp_path / "e.json.gz", order=True, steps=[2, 3])
    assert set(found["steps"]) == {"2", "3"}
    whole = kernels(worker, tmp_path / "f.json.gz", order=True)[1]
    assert [found["sequences"][found["steps"][n]] for n in "23"] == [
        whole["sequences"][whole["steps"][n]] for n in "23"
    ]
    taken = [step for name, step, _ in found["marks"] if name == "taken"]
    assert taken == list(range(TOKENS + 1)), "all steps are marked"


def test_a_forced_pass_begins_with_step_two_and_marks_the_steps(worker, tmp_path):
    _, found = kernels(worker, tmp_path / "e.json.gz", forced=True)
    taken = {step: time for name, step, time in found["marks"] if name == "taken"}
    assert sorted(taken) == list(range(TOKENS + 2))
    times = [time for _, time in found["boundaries"]]
    assert taken[1] < times[0] < taken[2] and taken[TOKENS + 1] < times[-1]
    assert times == sorted(times)
    # Step 2's own model call lies before its mark: as many boundaries as in any other step.
    inside = [sum(taken[n - 1] < time <= taken[n] for time in times) for n in range(2, TOKENS + 2)]
    assert inside[0] - 1 == inside[1] == inside[2]  # the first has the beginning too
    assert found["forced_tokens"] == TOKENS


def test_processor_time_is_taken_at_each_token(worker, tmp_path):
    _, found = kernels(worker, tmp_path / "e.json.gz", calls="none")
    assert [step for step, *_ in found["cpu"]] == list(range(TOKENS))
    for before, after in pairwise(found["cpu"]):
        assert after[1] - before[1] >= after[2] - before[2] > 0


def test_loading_tells_how_many_experts_a_token_may_have(worker, model):
    reply = worker.ask("load", 60, package="mlx-lm", path=str(model))
    config = tiny.config("qwen3_moe")
    assert reply["routing"] == {
        "top_k": config["num_experts_per_tok"], "most": config["num_experts"]
    }  # fmt: skip
