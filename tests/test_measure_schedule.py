"""Who runs when and where: properties of the rounds, the grouping into processes, the prompt."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moescope.errors import UserError
from moescope.measure.prompt import prompt_ids, vocabulary
from moescope.measure.schedule import order, processes

names = st.lists(st.text("abcdef", min_size=1, max_size=4), min_size=1, max_size=7, unique=True)


@given(names, st.integers(0, 50))
def test_each_arm_once_a_round_in_the_same_circle(arms, number):
    ordered = order(arms, number)
    assert Counter(ordered) == Counter(arms)
    start = arms.index(ordered[0])
    assert ordered == arms[start:] + arms[:start]


@given(names, st.integers(0, 50))
def test_the_start_moves_on_by_one_arm(arms, number):
    first, following = order(arms, number)[0], order(arms, number + 1)[0]
    assert arms.index(following) == (arms.index(first) + 1) % len(arms)


@given(names, st.integers(0, 20))
def test_positions_are_balanced_over_as_many_rounds_as_arms(arms, first):
    seen = Counter(
        (position, arm)
        for number in range(first, first + len(arms))
        for position, arm in enumerate(order(arms, number))
    )
    assert set(seen.values()) == {1}
    assert len(seen) == len(arms) ** 2


def arm(runtime="vlm", role="candidate", **env):
    return {"runtime": runtime, "role": role, "env": env}


def test_arms_share_a_process_by_runtime_and_variables():
    arms = {
        "ref": arm(role="reference"),
        "null": arm(role="null"),
        "lm": arm("lm"),
        "skip": arm(role="intervention"),
        "tuned": arm(X="1"),
        "top-k-1": arm(role="intervention"),
    }
    assert processes(arms) == [["ref", "skip", "top-k-1"], ["null"], ["lm"], ["tuned"]]


@given(
    st.dictionaries(
        st.text("abc", min_size=1, max_size=3),
        st.builds(arm, st.sampled_from(["lm", "vlm"]), st.sampled_from(["candidate", "null"])),
        min_size=1,
    )
)
def test_every_arm_is_in_one_process_and_a_null_arm_is_alone(arms):
    groups = processes(arms)
    assert sorted(name for group in groups for name in group) == sorted(arms)
    for group in groups:
        assert len({arms[name]["runtime"] for name in group}) == 1
        if any(arms[name]["role"] == "null" for name in group):
            assert len(group) == 1


@given(st.integers(1, 600), st.integers(16, 200_000))
def test_the_prompt_is_spread_over_the_vocabulary_and_leaves_its_ends_out(count, vocab):
    ids = prompt_ids(count, vocab)
    low = min(1024, vocab // 8)
    assert len(ids) == count
    assert all(low <= i < vocab - low for i in ids)
    assert len(set(ids)) == min(count, vocab - 2 * low)
    assert prompt_ids(count + 1, vocab)[:count] == ids
    if count >= 64 and vocab >= 1000:
        quarter = (vocab - 2 * low) / 4
        shares = Counter(int((i - low) // quarter) for i in ids)
        assert all(count / 8 < shares[part] < count / 2 for part in range(4))


def test_a_prompt_needs_a_vocabulary():
    with pytest.raises(UserError):
        prompt_ids(4, 1)


def test_the_vocabulary_is_found_at_either_level():
    assert vocabulary({"vocab_size": 7}, "c") == 7
    assert vocabulary({"text_config": {"vocab_size": 8}}, "c") == 8
    assert vocabulary({"vocab_size": 8, "text_config": {"vocab_size": 8}}, "c") == 8
    with pytest.raises(UserError, match="c: two sizes"):
        vocabulary({"vocab_size": 7, "text_config": {"vocab_size": 8}}, "c")
    with pytest.raises(UserError, match="no vocab_size"):
        vocabulary({"text_config": None}, "c")
