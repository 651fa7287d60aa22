"""Sliced rounds: the arms take turns, so that all see the same speeds of an unsteady host."""

import itertools
import random
import statistics
import threading
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stages
from moescope.files import read_json, read_jsonl
from moescope.measure import bench as benches
from moescope.measure import guard as guards
from moescope.measure import stage
from moescope.measure.schedule import order, parts, processes, turns
from moescope.measure.validity import void
from moescope.runtimes.client import Worker
from moescope.verdict.results import read_runs

ARMS = ["ref", "null", "skip", "moe"]
SLOW, FAST = 3.5e-3, 2.3e-3


@pytest.fixture(autouse=True)
def quiet(tmp_path, monkeypatch):
    stages.stand_in(monkeypatch)
    monkeypatch.setenv("MOESCOPE_LOCK_DIR", str(tmp_path))


def measure(tmp_path, arms=stages.ARMS, count=4, slices=2, **guard):
    params = stages.measure_params(arms, count, **guard)
    params["rounds"]["slices"] = slices
    task = stages.make(tmp_path, "measure", "tiny", params)
    stage.run(task)
    return task, read_runs(task.out / "runs.jsonl")


# Who decodes when.


@given(st.integers(4, 600), st.data())
def test_slices_are_even_and_hold_all_tokens_but_the_first(tokens, data):
    slices = data.draw(st.integers(1, (tokens - 1) // 2))
    sizes = parts(tokens, slices)
    assert len(sizes) == slices and sum(sizes) == tokens - 1
    assert max(sizes) - min(sizes) <= 1 and (min(sizes) >= 2 or slices == 1)


@given(st.integers(1, 9), st.integers(0, 20))
def test_each_arm_has_each_slice_each_position_and_each_neighbour(count, first):
    arms = [str(i) for i in range(count)]
    times = 2 if count % 2 else 1  # an odd number of arms needs the rows backwards too
    found = turns(arms, (first + 1) * times * count)[first * times * count :]
    assert [sorted(turn) for turn in found] == [arms] * times * count
    places = Counter((place, arm) for turn in found for place, arm in enumerate(turn))
    assert len(places) == count**2 and set(places.values()) == {times}
    after = Counter(pair for turn in found for pair in itertools.pairwise(turn))
    assert len(after) == count * (count - 1) and set(after.values()) <= {times}


def test_arms_that_pause_have_a_process_each():
    arms = {n: {"runtime": "vlm", "env": {}, "role": "candidate"} for n in "abc"}
    assert processes(arms) == [["a", "b", "c"]]
    assert processes(arms, apart=True) == [["a"], ["b"], ["c"]]


# What it is for.


class Host:
    """A clock, and a speed that flips between two states, on average each ``stay_s`` seconds."""

    def __init__(self, seed, stay_s=0.3):
        self.random, self.stay_s = random.Random(seed), stay_s
        self.now, self.token_s = 0.0, FAST
        self.flip = self.random.expovariate(1 / stay_s)

    def token(self):
        while self.now >= self.flip:
            self.token_s = SLOW if self.token_s == FAST else FAST
            self.flip += self.random.expovariate(1 / self.stay_s)
        self.now += self.token_s
        return self.token_s


def null_spread(seed, slices, rounds=5, tokens=128):
    """Largest less smallest ratio of two equal arms over the rounds of the schedule."""
    host, ratios = Host(seed), []
    for number in range(rounds):
        timed = {arm: [] for arm in ARMS}
        for turn, size in zip(
            turns(order(ARMS, number), slices), parts(tokens, slices), strict=True
        ):
            for arm in turn:
                spent = [host.token() for _ in range(size)]
                timed[arm] += spent[1:] if slices > 1 else spent
        rates = {arm: len(spent) / sum(spent) for arm, spent in timed.items()}
        ratios.append(rates["null"] / rates["ref"])
    return max(ratios) - min(ratios)


@settings(max_examples=5)
@given(st.integers(0, 10_000))
def test_the_null_arms_spread_is_several_times_smaller(seed):
    seeds = range(seed, seed + 25)
    whole = statistics.median(null_spread(one, 1) for one in seeds)
    sliced = statistics.median(null_spread(one, 16) for one in seeds)
    assert whole > 3 * sliced, (whole, sliced)
    assert sliced < 0.12 < whole


# The stage.


def test_on_a_host_that_flips_its_speed_slices_narrow_the_null_arm(tmp_path):
    """The schedule's simulation again, through processes: twice as slow at random, for 0.15 s of
    a clock that all share and only their decoding moves."""
    clock = tmp_path / "clock"
    arms = [
        stages.arm(name, role, token_s="0.002", flip_s="0.15", clock=clock, n=name)
        for name, role in (("ref", "reference"), ("again", "null"), ("x", "candidate"))
    ]
    spread = {}
    for slices in (1, 12):
        params = stages.measure_params(arms, 6, enabled=False)
        params["shape"] = {"prompt": 16, "generate": 61}
        params["rounds"] |= {"slices": slices} if slices > 1 else {}
        clock.write_text("0")
        task = stages.make(tmp_path / str(slices), "measure", "tiny", params)
        stage.run(task)
        rows = read_runs(task.out / "runs.jsonl")
        assert all(row["valid"] for row in rows)
        rate = {(r["arm"], r["round"]): r["forwards"] / r["decode_s"] for r in rows}
        ratios = [rate["again", n] / rate["ref", n] for n in range(6)]
        spread[slices] = max(ratios) - min(ratios)
    # Ten times, and the same at each run: the host is played.
    assert spread[1] > 5 * spread[12], spread


def test_a_sliced_round_is_watched_as_one_and_its_runs_say_so(tmp_path):
    task, rows = measure(tmp_path)
    assert Counter((row["round"], row["arm"]) for row in rows) == {
        (number, arm["name"]): 1 for number in range(4) for arm in stages.ARMS
    }
    # 5 tokens after the prefill's in slices of 3 and 2; the first of each is not timed.
    assert all(row["valid"] and row["slices"] == 2 for row in rows)
    assert all(row["forwards"] == len(row["token_s"]) == 3 for row in rows)
    assert all(row["cpu_s"] == pytest.approx(row["decode_s"] / 2) for row in rows)
    assert [row["arm"] for row in rows[3:6]] == ["again", "skip", "ref"]
    assert [row["position"] for row in rows[:6]] == [0, 1, 2, 0, 1, 2]
    assert rows[0]["guard"] == rows[1]["guard"] == rows[2]["guard"]
    assert {row["process"]["index"] for row in rows} == {0, 1, 2}
    lines = read_jsonl(task.out / "guard.jsonl", "moescope/guard/1")
    watched = [line["run"] for line in lines if line["event"] == "watch"]
    assert watched == ["r00", "r01", "r02", "r03"]


def test_the_turns_are_taken_as_the_schedule_says(tmp_path, monkeypatch):
    from moescope.measure.arms import Arms

    asked, ask = [], Arms.ask

    def listen(self, arm, do, **arguments):
        asked.append((arm, arguments.get("step", do)))
        return ask(self, arm, do, **arguments)

    monkeypatch.setattr(Arms, "ask", listen)
    measure(tmp_path, count=3)
    second = asked[len(asked) // 3 : len(asked) // 3 * 2]
    names = ["again", "skip", "ref"]
    assert second == [
        *((arm, "start") for arm in names),
        *((arm, "more") for turn in turns(names, 2) for arm in turn),
        *((arm, "end") for arm in names),
    ]


def test_the_processes_end_at_the_same_time(tmp_path, monkeypatch):
    together, end = threading.Barrier(len(stages.ARMS)), Worker.close

    def close(self, patient=True):
        if patient:  # not one that is given up
            together.wait(60)  # raises if the others are not being ended meanwhile
        end(self, patient)

    monkeypatch.setattr(Worker, "close", close)
    measure(tmp_path, count=1)
    assert not together.broken


def test_tokens_are_the_same_sliced_or_not(tmp_path):
    hashes = [
        {row["arm"]: row["tokens_sha256"] for row in measure(tmp_path / str(n), slices=n)[1]}
        for n in (1, 2)
    ]
    assert hashes[0] == hashes[1]


def test_whole_runs_say_nothing_of_slices(tmp_path):
    _, rows = measure(tmp_path, count=3, slices=1)
    assert not any("slices" in row for row in rows)
    assert all(row["forwards"] == 5 for row in rows)


def test_a_disturbed_round_is_done_again_by_all_its_arms(tmp_path, monkeypatch):
    stages.Disturbed(monkeypatch, "r01")
    _, rows = measure(tmp_path, stages.ARMS[:2], max_wait_s=0.2)
    again = [row for row in rows if row["round"] == 1]
    assert [(row["id"], row["valid"]) for row in again] == [
        ("r01-again", False), ("r01-ref", False), ("r01-again-try2", True), ("r01-ref-try2", True),
    ]  # fmt: skip
    assert all(row["why"].startswith("disturbed in") for row in again[:2])
    assert len([row for row in rows if row["valid"]]) == 8


def test_a_round_that_stays_disturbed_is_broken_for_all(tmp_path, monkeypatch):
    stages.Disturbed(monkeypatch, "r01", "r01-try2", "r01-try3")
    _, rows = measure(tmp_path, stages.ARMS[:2], max_wait_s=0.2)
    assert [row["round"] for row in rows if row["valid"]] == [0, 0, 2, 2, 3, 3]
    assert Counter(row["attempt"] for row in rows if row["round"] == 1) == {1: 2, 2: 2, 3: 2}


def test_the_processes_that_slices_need_must_fit(tmp_path, monkeypatch):
    monkeypatch.setattr("moescope.measure.admission.predict_from", lambda *_: 5 << 30)
    params = stages.measure_params(count=3) | {"memory": 12 << 30}
    task = stages.make(tmp_path, "measure", "tiny", params)
    stage.run(task)  # one process at a time is what the memory is asked for
    params["rounds"]["slices"] = 2
    task = stages.make(tmp_path, "measure", "tiny", params)
    stage.run(task)
    environment = read_json(task.out / "environment.json")
    assert environment["admission"]["predicted"] == 3 * (5 << 30)
    why = environment["unsupported"]["ref"]
    assert "needs about 15.0 GiB" in why and "rounds.slices above 1 keeps 3 processes" in why
    assert read_runs(task.out / "runs.jsonl") == []


def test_a_sliced_pass_that_times_another_number_is_void():
    shape = {"prompt": 4, "generate": 9}
    result = {
        "prompt_tokens": 4, "generated_tokens": 9, "finite": True, "forwards": 6, "slices": 2,
        "token_s": [0.1] * 6, "prefill_s": 1.0, "decode_s": 0.6,
    }  # fmt: skip
    assert void(result, shape) is None
    assert void(result | {"slices": 1}, shape) == "6 forwards timed, not 7"
    assert void({k: v for k, v in result.items() if k != "slices"}, shape) is not None


def test_on_cuda_the_arms_warm_up_at_the_same_time(tmp_path, monkeypatch):
    """The first compiles for the others; these wait for each other in their first pass."""
    from moescope.measure import arms as module
    from moescope.measure import host
    from moescope.measure.journal import Journal

    monkeypatch.setattr(host, "device_memory", lambda _: None)
    (tmp_path / "met").mkdir()
    meet = {"meet": f"{tmp_path / 'met'}:4"}
    params = stages.measure_params(
        [stages.arm(f"a{i}", "candidate", n=i, **(meet if i else {})) for i in range(5)]
    )
    params["machine"] = {"name": "test", "backend": "cuda"}
    task = stages.make(tmp_path, "measure", "tiny", params)
    bench = benches.open_bench(task, ["vlm"], 16)
    with guards.Guard(stages.GUARD, []) as guard:
        journal = Journal(tmp_path / "journal", {})
        asked, ask_all = [], benches.ask_all

        def watched(workers, *rest):
            asked.append(list(workers))
            return ask_all(workers, *rest)

        monkeypatch.setattr(benches, "ask_all", watched)
        with module.Arms(task, bench, guard, journal).started():
            pass
    assert asked == [["a0"], ["a1", "a2", "a3", "a4"]]
    assert len(list((tmp_path / "met").iterdir())) == 4
