"""Ratios of sliced rounds: turn by turn, so that a spoilt turn does not spoil its round."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moescope.measure.schedule import parts
from moescope.verdict.arms import Pairs, decode_ratio, gain


def run(token_s, slices=1, number=0, name="arm"):
    forwards = len(token_s)
    generated = forwards + 1 + (slices if slices > 1 else 0)
    return {
        "id": f"r{number:02}-{name}", "round": number, "forwards": forwards, "token_s": token_s,
        "decode_s": sum(token_s), "generated_tokens": generated, "slices": slices,
    }  # fmt: skip


def sliced(each, slices=8, slow=(), by=1.8, **more):
    """A run of 8 slices of 4 tokens whose slices ``slow`` ran on a slower host."""
    sizes = parts(4 * slices + 1, slices)
    times = [each * (by if at in slow else 1) for at, n in enumerate(sizes) for _ in range(n - 1)]
    return run(times, slices, **more)


@given(st.sets(st.integers(0, 7), max_size=3), st.floats(0.5, 2))
def test_spoilt_turns_do_not_count(slow, ratio):
    assert decode_ratio(sliced(0.01 / ratio, slow=slow), sliced(0.01)) == pytest.approx(ratio)
    # By their sums they would.
    if slow:
        spoilt, plain = sliced(0.01, slow=slow), sliced(0.01)
        assert plain["decode_s"] / spoilt["decode_s"] < 0.95


@given(st.sets(st.integers(0, 7)))
def test_a_host_that_is_slow_for_both_does_not_count(slow):
    assert decode_ratio(sliced(0.02, slow=slow), sliced(0.01, slow=slow)) == pytest.approx(0.5)


def test_the_first_forward_of_a_slice_is_in_no_turn():
    # 127 tokens in 32 slices: 31 of 4 and one of 3, so 3 timed forwards each and once 2.
    times = [0.01] * 93 + [0.03] * 2
    assert decode_ratio(run(times, 32), run([0.01] * 95, 32)) == 1
    assert decode_ratio(run([0.03] * 3 * 17 + [0.01] * 44, 32), run([0.01] * 95, 32)) == (
        pytest.approx(1 / 3)
    )


def test_whole_runs_go_by_their_sums():
    one, other = run([0.01] * 30 + [0.03] * 10), run([0.01] * 40)
    assert decode_ratio(one, other) == pytest.approx(other["decode_s"] / one["decode_s"])
    assert decode_ratio(one, sliced(0.01)) == pytest.approx(0.01 / (one["decode_s"] / 40))
    unseen = one | {"token_s": None}  # a command's
    assert decode_ratio(unseen, other) == pytest.approx(other["decode_s"] / one["decode_s"])


def test_the_gain_goes_turn_by_turn_too():
    base = [sliced(0.010, number=i, name="ref") for i in range(3)]
    arm = [sliced(0.007, number=i, slow=[i]) for i in range(3)]
    bound = [sliced(0.006, number=i, slow=[i + 1]) for i in range(3)]
    found = gain(Pairs(arm, base, "runs.jsonl"), bound)
    assert [found["min"], found["value"], found["max"]] == pytest.approx([0.75] * 3)
