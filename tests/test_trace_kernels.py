"""Time of kernels: what adds up, what the host did, what two instruments say."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_traces import LAYERS, launches, recorded, with_graphs
from moescope.trace import align, kernels, timeline
from moescope.trace.align import Label
from moescope.trace.events import Call, Events, Kernel, Mark

SIGNAL = "_ZN3mlx4core2cu19event_signal_kernelEPjj"

INTERVALS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 20)).map(lambda p: (p[0], p[0] + p[1])),
    max_size=12,
)


def ticks(intervals):
    return {t for a, b in intervals for t in range(a, b)}


def run(name, start, end, launch=0, node=0, stream=7):
    return Kernel(name, start, end, (1, 1, 1), (32, 1, 1), stream, 0, node, launch)


@given(INTERVALS, INTERVALS)
def test_union_overlap_and_complement_count_the_same_time(left, right):
    one, other = kernels.union(left), kernels.union(right)
    assert ticks(one) == ticks(left)
    assert all(a[1] < b[0] for a, b in pairwise(one))
    assert kernels.overlap(one, other) == len(ticks(left) & ticks(right))
    assert ticks(kernels.complement(one, 10, 50)) == set(range(10, 50)) - ticks(left)


@given(INTERVALS.filter(bool))
def test_parts_share_the_busy_time_out(intervals):
    ran = [run("k", *interval) for interval in intervals]
    parts = kernels.parts(ran)
    assert sum(parts) == pytest.approx(len(ticks(intervals)))
    for kernel, part in zip(ran, parts, strict=True):
        together = [
            sum(other.start <= t < other.end for other in ran)
            for t in range(kernel.start, kernel.end)
        ]
        assert part == pytest.approx(sum(1 / n for n in together))


@pytest.fixture(scope="module")
def step():
    return align.by_ranges(recorded("qwen3-moe"))[0]


@pytest.fixture(scope="module")
def events(step):
    return with_graphs(step.launches, steps=8)


def labelled(events, step, first, last):
    steps = align.launches_by_step(events)
    return steps, {n: align.transfer(step, steps[n])[0] for n in range(first, last + 1)}


def test_terms_sum_to_busy_and_busy_and_gap_to_the_wall(events, step):
    window = kernels.window(events, *labelled(events, step, 3, 7))
    each = sum(kernel.ns for kernel in step.launches)
    assert window.steps == 5 and window.busy == 5 * each
    assert window.busy + window.gap == window.wall
    terms = kernels.by_term(window)
    assert sum(entry["ms"] for entry in terms.values()) == pytest.approx(each / 1e6)
    assert sum(entry["launches"] for entry in terms.values()) == len(step.launches)
    assert max(terms, key=lambda term: terms[term]["ms"]) == "expert_gather"
    rows = kernels.by_kernel(window)
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    largest = rows[0]
    assert largest["kernel"].startswith("qmm_sm80_kernel<64, ")
    assert (largest["term"], largest["primitives"]) == ("expert_gather", "GatherQMM")
    assert largest["launches_per_token"] == 3 * LAYERS


def test_overlapping_kernels_are_not_counted_twice(events, step):
    twice = replace(
        events,
        kernels=[k for kernel in events.kernels for k in (kernel, replace(kernel, stream=8))],
    )
    plain = kernels.window(events, *labelled(events, step, 3, 7))
    once = labelled(events, step, 3, 7)[1]
    labels = {n: [label for label in found for _ in (0, 1)] for n, found in once.items()}
    double = kernels.window(twice, align.launches_by_step(twice), labels)
    assert double.busy == plain.busy
    one, two = kernels.by_term(plain), kernels.by_term(double)
    assert all(two[term]["ms"] == pytest.approx(one[term]["ms"]) for term in one)
    assert all(two[t]["launches"] == pytest.approx(2 * one[t]["launches"]) for t in one)


def test_a_window_needs_steps_in_a_row_with_tokens(events, step):
    steps, labels = labelled(events, step, 3, 7)
    with pytest.raises(ValueError, match="in a row"):
        kernels.window(events, steps, {3: labels[3], 5: labels[5]})
    with pytest.raises(ValueError, match="no tokens"):
        kernels.window(events, steps, labels | {8: labels[7]})


def test_a_spinning_kernel_is_found_in_its_term(step):
    at = next(i for i, lab in enumerate(step.labels) if lab.term == "router")
    spin = replace(step.launches[at], name="custom_kernel_moescope_spin", end=100_000, start=0)
    slow = align.StepLabels(
        1,
        [*step.launches[:at], spin, *step.launches[at:]],
        [*step.labels[:at], step.labels[at], *step.labels[at:]],
    )
    tables = [
        kernels.by_term(kernels.window(e, *labelled(e, s, 3, 7)))
        for s, e in ((s, with_graphs(s.launches, steps=8)) for s in (step, slow))
    ]
    gain = {term: tables[1][term]["ms"] - tables[0][term]["ms"] for term in tables[0]}
    assert gain.pop("router") == pytest.approx(0.1)
    assert all(value == pytest.approx(0, abs=1e-9) for value in gain.values())


def test_paths_name_the_experts_kernels_and_what_comes_out_uneven(events, step):
    window = kernels.window(events, *labelled(events, step, 3, 7))
    found = kernels.path(window, LAYERS)
    assert found["experts"][0] == {
        "kernel": "qmm_sm80_kernel",
        "launches": 5 * 3 * LAYERS,
        "launches_per_token": 3 * LAYERS,
        "per_layer": 3,
        "helper": False,
    }
    assert [row["helper"] for row in found["experts"]] == [False, True]  # copies of the indices
    assert (found["steps"], found["moe_layers"]) == (5, LAYERS)
    assert found["uneven"] == []
    stray = (run("softmax", 1, 2), Label("Softmax", "m", "router"), 1.0)
    fewer = replace(window, kernels=[*window.kernels, stray])
    assert [row["kernel"] for row in kernels.path(fewer, LAYERS)["uneven"]] == ["softmax"]
    assert kernels.path(window, 0)["uneven"] == []


def test_two_lengths_give_a_token_what_the_window_gives(step):
    launches, apart = [*step.launches, run(SIGNAL, 0, 7000)], 7e-3
    short, long = (with_graphs(launches, steps=n) for n in (5, 9))
    each = sum(k.ns for k in launches) / 1e6
    found = kernels.difference([short, short], [long])
    assert found["launches"] == len(step.launches)
    assert found["all_launches"] == len(step.launches) + 1
    assert found["all_ms"] == pytest.approx(each)
    assert found["ms"] == pytest.approx(each - apart)
    # One pass of several that was held up is not what the others have.
    held = replace(short, kernels=[replace(k, end=k.end + 90_000) for k in short.kernels])
    late = replace(long, kernels=[replace(k, end=k.end + 90_000) for k in long.kernels])
    found = kernels.difference([short, held, short], [long, late, long])
    assert found["ms"] == pytest.approx(each - apart)
    with pytest.raises(ValueError, match=r"the longer runs have \[5\] tokens, the shorter \[9\]"):
        kernels.difference([long], [short])
    with pytest.raises(ValueError, match=r"the longer runs have \[5, 9\] tokens"):
        kernels.difference([short], [long, short])


def test_while_the_gpu_is_held_by_a_signal_no_time_is_the_model_s():
    # A gather waits for the same page as the signal: its own time is what is left of it.
    ran = [run("a", 0, 10), run(SIGNAL, 10, 100), run("gather", 40, 103), run("b", 103, 110)]
    assert kernels.parts(ran) == [10, 90, 3, 7]
    labels = {1: [Label("P", "m", "norm"), align.OUTSIDE, *[Label("P", "m", "other")] * 2]}
    marks = [Mark("token", 0, 0), Mark("token", 1, 120)]
    events = Events(marks, ran, [], [], {}, None, {}, [])
    window = kernels.window(events, {1: ran}, labels)
    terms = kernels.by_term(window)
    assert terms["synchronisation"] == {"ms": 90e-6, "launches": 1.0}
    assert terms["other"] == {"ms": pytest.approx(10e-6), "launches": 2.0}
    assert (window.busy, window.model_busy) == (110, 20) and kernels.busy(ran) == 20
    assert sum(entry["ms"] for entry in terms.values()) == pytest.approx(window.busy / 1e6)
    assert kernels.folded(terms)["other"] == {"ms": pytest.approx(100e-6), "launches": 3.0}
    assert kernels.model(terms).keys() == {"norm", "other"}


def test_a_forced_pass_can_begin_at_a_step():
    marks = [Mark("taken", 1, 5), Mark("taken", 2, 35), Mark("taken", 3, 70)]
    boundaries = [("", 10), ("norm", 20), ("head", 30), ("sampler", 40), ("norm", 55), ("head", 65),
                  ("sampler", 80)]  # fmt: skip
    ran = [run("n", 12, 15), run("h", 22, 25), run("s", 36, 38), run("n", 42, 45), run("h", 56, 60)]
    events = Events(marks, ran, [], [], {}, None, {}, boundaries, 2)
    whole, later = kernels.forced(events), kernels.forced(events, 3)
    assert (whole.steps, later.steps) == (2, 1)
    assert [kernel.start for kernel, *_ in later.kernels] == [36, 42, 56]
    assert kernels.by_term(later)["norm"] == {"ms": 3e-6, "launches": 1.0}


def test_processor_time_is_that_of_the_window():
    cpu = [(n, 10_000_000 * n, 4_000_000 * n) for n in range(6)]
    events = Events([], [], [], [], {}, None, {}, [], cpu=cpu)
    assert kernels.processor(events, 2, 4) == {"process": 10.0, "loop": 4.0}
    assert kernels.processor(replace(events, cpu=[]), 2, 4) is None


def test_the_host_s_time_is_told_apart_and_the_idle_gpu_s_too():
    marks = [Mark("token", 1, 0)]
    for n, (build, encode, wait) in {2: (10, 30, 5), 3: (20, 20, 10)}.items():
        at = marks[-1].time
        marks += [
            Mark("built", n + 1, at + build),
            Mark("taken", n + 1, at + build + encode),
            Mark("token", n, at + build + encode + wait),
        ]
    ran = [run("k", 5, 15), run("k", 40, 60), run("k", 50, 55)]
    events = Events(marks, ran, [], [], {}, None, {}, [])
    found = kernels.host(events, 2, 3, ran)
    # 0 build 10 encode 40 wait 45 | build 65 encode 85 wait 95
    assert found["ms"] == {"build": 15e-6, "encode": 25e-6, "wait": 7.5e-6}
    idle = {"build": (5 + 5) / 2, "encode": (25 + 20) / 2, "wait": (0 + 10) / 2}
    assert found["idle_ms"] == {phase: pytest.approx(ns / 1e6) for phase, ns in idle.items()}


def test_cuda_s_calls_by_name_and_thread():
    marks = [Mark("token", n, 100 * n) for n in range(4)]
    calls = [
        Call("cudaGraphLaunch", 110, 130, 1, 1),
        Call("cudaGraphLaunch", 210, 220, 1, 2),
        Call("cudaEventQuery", 220, 221, 2, 3),
        Call("cudaGraphLaunch", 310, 399, 1, 4),
    ]
    events = Events(marks, [], calls, [], {}, None, {}, [])
    assert kernels.calls(events, 2, 3) == [
        {"call": "cudaGraphLaunch", "thread": "loop", "count": 1.0, "ms": 15e-6},
        {"call": "cudaEventQuery", "thread": "other", "count": 0.5, "ms": 0.5e-6},
    ]


def test_a_forced_pass_gives_kernels_to_the_boundary_that_follows():
    ran = [run("before", 0, 5), run("r", 12, 14), run("g", 21, 26), run("g", 27, 29),
           run("after", 50, 60)]  # fmt: skip
    boundaries = [("", 10), ("router", 20), ("expert_gather", 30), ("norm", 40)]
    events = Events([], ran, [], [], {}, None, {}, boundaries, 2)
    window = kernels.forced(events)
    assert (window.steps, window.wall) == (2, 30)
    assert kernels.by_term(window) == {
        "router": {"ms": 1e-6, "launches": 0.5},
        "expert_gather": {"ms": pytest.approx(3.5e-6), "launches": 1.0},
    }
    assert kernels.forced(replace(events, boundaries=[])) is None


def test_disagreement_is_the_share_that_is_elsewhere():
    one = {"router": {"ms": 1.0}, "norm": {"ms": 3.0}}
    assert kernels.disagreement(one, one) == 0
    assert kernels.disagreement(one, {"router": {"ms": 4.0}, "norm": {"ms": 12.0}}) == 0
    assert kernels.disagreement(one, {"router": {"ms": 2.0}, "norm": {"ms": 2.0}}) == 0.25
    assert kernels.disagreement(one, {"head": {"ms": 2.0}}) == 1
    assert kernels.disagreement(one, {}) == 1


def test_the_timeline_opens_in_perfetto_s_format(events, step):
    steps, labels = labelled(events, step, 6, 7)
    rows = json.loads(timeline.perfetto(events, [6, 7], steps, labels))["traceEvents"]
    ran = [row for row in rows if row["ph"] == "X" and row["pid"] == timeline.GPU]
    assert len(ran) == 2 * 2 * len(step.launches)  # a row of the stream, a row of the terms
    assert all(row["dur"] > 0 and row["ts"] >= 0 for row in ran)
    host = [row["name"] for row in rows if row["ph"] == "X" and row["pid"] == timeline.HOST]
    assert {"build", "encode", "wait", "cudaGraphLaunch"} <= set(host)
    assert {row["ph"] for row in rows} == {"X", "M"}


def test_a_step_s_spans_merge_what_stays_in_a_term(step):
    spans = timeline.spans(step.launches, step.labels)
    assert sum(span["launches"] for span in spans) == len(step.launches)
    assert all(a["term"] != b["term"] for a, b in pairwise(spans))
    assert spans[0]["start_us"] == 0
    assert launches(recorded("qwen3-moe"), step.step) == step.launches
