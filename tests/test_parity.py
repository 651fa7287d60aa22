"""Parity: divergence, teacher-forced comparison, loops, and what voids an arm."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stages
from moescope.files import read_json
from moescope.verdict import parity
from moescope.verdict.judge import (
    Judge,
    Seen,
    difference,
    first_divergence,
    longest_loop,
    perplexity_of,
    sound,
)

LIMITS = {"decided_gap": 2.0, "loop_period": 4, "loop_tokens": 8}
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def logits_for(tokens, vocab=10, gap=3.0):
    rows = np.zeros((len(tokens), vocab), np.float32)
    rows[np.arange(len(tokens)), tokens] = gap
    return rows


def seen(tokens=TOKENS, logits=None, finite=True):
    logits = logits_for(TOKENS) if logits is None else logits
    return Seen(tokens, "hash", finite, logits, len(tokens))


def judge(reference=None, synthetic=False):
    return Judge(reference or seen(), LIMITS, len(TOKENS), synthetic)


def test_an_arm_like_the_reference():
    found = judge().compare(seen())
    assert found["void"] is None
    assert found["greedy"]["identical"] and found["greedy"]["first_divergence"] is None
    forced = found["forced"]
    assert forced["top1_agreement"] == 1.0
    assert forced["max_abs_logit"] == 0.0
    assert forced["decided"] == 10 and forced["decided_mismatches"] == 0
    assert forced["perplexity_ratio"] == pytest.approx(1.0)


def test_a_divergence_shows_the_gap_that_the_reference_saw():
    reference = logits_for(TOKENS)
    reference[4, 7] = 2.75  # the runner-up at token 4 is token 7, 0.25 behind
    arm = [*TOKENS[:4], 7, *TOKENS[5:]]
    found = judge(seen(logits=reference)).compare(seen(arm))["greedy"]
    assert found["identical"] is False
    assert found["first_divergence"] == 4
    assert found["logit_gap"] == pytest.approx(0.25)


def test_only_decided_mismatches_count_as_decided():
    reference, arm = logits_for(TOKENS), logits_for(TOKENS)
    reference[2, 0] = 2.5  # undecided: 0.5
    arm[2, 0] = 3.5
    arm[5, 0] = 3.5  # decided: the reference is 3 ahead
    forced = judge(seen(logits=reference)).compare(seen(logits=arm))["forced"]
    assert forced["top1_agreement"] == pytest.approx(0.8)
    assert (forced["decided"], forced["decided_mismatches"]) == (9, 1)
    assert forced["max_abs_logit"] == pytest.approx(3.5)
    assert forced["perplexity_ratio"] > 1


def test_perplexity_is_that_of_the_definition():
    logits = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]])) + 7
    assert perplexity_of(logits, [1, 1]) == pytest.approx((0.25 * 0.8) ** -0.5)


def test_masked_tokens_are_sound_and_equal():
    masked = logits_for(TOKENS)
    masked[:, 0] = -np.inf
    assert sound(masked)
    assert difference(masked, masked).max() == 0
    found = judge(seen(logits=masked)).compare(seen(logits=masked))["forced"]
    assert found["max_abs_logit"] == 0 and found["perplexity_ratio"] == pytest.approx(1)
    assert judge(seen(logits=masked)).compare(seen())["forced"]["max_abs_logit"] is None
    for bad in (np.nan, np.inf):
        masked[3, 3] = bad
        assert not sound(masked)


def test_vocabularies_that_are_padded_differently_are_compared_where_both_have_tokens():
    wide = np.concatenate([logits_for(TOKENS), np.full((10, 6), -1, np.float32)], axis=1)
    assert judge().compare(seen(logits=wide))["forced"]["max_abs_logit"] == 0


def test_what_voids_an_arm():
    assert judge().compare(seen(finite=False))["void"] == "NaN or Inf in the logits"
    assert judge().compare(seen(finite=False))["forced"] is None
    assert judge().compare(seen(TOKENS[:9]))["void"] == "9 tokens generated, not 10"
    looping = judge().compare(seen([3, 1, *[7, 8] * 4]))
    assert looping["void"] == "the text repeats itself: 8 tokens with period 2"
    assert looping["repetition"] == {"longest_loop": 8, "period": 2}
    assert judge().compare(seen([3, 1, 2, *[7, 8] * 3, 7]))["void"] is None


def test_random_weights_may_repeat_themselves_if_the_reference_does():
    loop, text = seen([3, 1, *[7, 8] * 4]), seen()
    assert judge(loop, synthetic=True).compare(loop)["void"] is None
    assert judge(text, synthetic=True).compare(loop)["void"].startswith("the text repeats")
    assert judge(loop, synthetic=False).compare(loop)["void"].startswith("the text repeats")


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=12))
def test_the_first_divergence_is_where_the_common_start_ends(one, other):
    found = first_divergence(one, other)
    if found is None:
        assert one == other
    else:
        assert one[:found] == other[:found]
        assert one[found : found + 1] != other[found : found + 1]


@given(st.lists(st.integers(0, 2), max_size=20), st.integers(1, 5))
def test_the_longest_loop_is_that_of_a_search_by_hand(tokens, most):
    best = (0, None)
    for period in range(1, most + 1):
        for length in range(2 * period, len(tokens) + 1):
            tail = tokens[-length:]
            repeats = all(tail[i] == tail[i - period] for i in range(period, length))
            if repeats and length > best[0]:
                best = (length, period)
    assert tuple(longest_loop(tokens, most).values()) == best


def test_what_a_command_does_not_show_is_not_compared_and_voids_nothing():
    shy = Seen(None, None, None, None, 10, "the command prints no token ids")
    found = judge().compare(shy)
    assert found["void"] is None and found["not_compared"] == "the command prints no token ids"
    assert found["greedy"] is found["forced"] is found["repetition"] is None
    short = Seen(None, None, None, None, 9)
    assert judge().compare(short)["void"] == "9 tokens generated, not 10"
    # Its tokens may be there without logits.
    told = judge().compare(Seen([*TOKENS[:9], 1], "h", None, None, 10))
    assert told["greedy"]["first_divergence"] == 9 and told["forced"] is None


# The stage, over the fake worker.


@pytest.fixture
def stage(tmp_path, monkeypatch):
    stages.stand_in(monkeypatch)
    monkeypatch.setenv("MOESCOPE_LOCK_DIR", str(tmp_path))

    def run(*arms, kind="hub"):
        params = {
            "checkpoint": "tiny",
            "arms": {arm["name"]: arm for arm in arms},
            "shape": {"prompt": 16, "generate": 12},
            "limits": {"decided_gap": 2.0, "loop_period": 4, "loop_tokens": 8},
            "machine": stages.MACHINE,
        }
        task = stages.make(tmp_path, "parity", "tiny", params, kind)
        parity.run(task)
        assert not list((task.work / "tmp").glob("parity.*"))
        found = read_json(task.out / "parity.json", "moescope/parity/1")
        assert found["reference"] == "ref" and list(found["arms"]) == [a["name"] for a in arms]
        return found["arms"]

    return run


def test_the_stage_compares_each_arm_with_the_reference(stage):
    found = stage(
        stages.arm("same", "candidate"),
        stages.arm("ref", "reference"),
        stages.arm("apart", "candidate", diverge_at="5", noise="4"),
        stages.arm("broken", "candidate", nan_logits="1"),
        stages.arm("loops", "candidate", loop="1"),
        stages.arm("none", "candidate", refuse_load="unsupported"),
    )
    assert found["ref"]["void"] is None and found["ref"]["forced"]["top1_agreement"] == 1
    assert found["same"]["greedy"]["identical"]
    assert found["same"]["greedy"]["tokens_sha256"] == found["ref"]["greedy"]["tokens_sha256"]
    assert found["apart"]["greedy"]["first_divergence"] == 5
    assert found["apart"]["greedy"]["logit_gap"] > 2
    assert found["apart"]["forced"]["top1_agreement"] < 1
    assert found["apart"]["void"] is None
    assert (found["broken"]["finite"], found["broken"]["void"]) == (
        False,
        "NaN or Inf in the logits",
    )
    assert found["loops"]["void"].startswith("the text repeats itself: 12 tokens with period 2")
    assert found["none"] == {"void": "unsupported: mlx-vlm does not load it"}


def test_the_reference_compiles_before_the_others_start(stage, monkeypatch):
    real, asked = parity.benches.ask_all, []

    def ask_all(workers, do, *rest):
        asked.append((do, sorted(workers)))
        return real(workers, do, *rest)

    monkeypatch.setattr(parity.benches, "ask_all", ask_all)
    stage(stages.arm("b", "null"), stages.arm("ref", "reference"), stages.arm("a", "candidate"))
    assert [names for do, names in asked if do == "decode"] == [["ref"], ["a", "b"]]


def test_an_arm_that_cannot_be_led_is_compared_by_its_tokens(stage):
    found = stage(stages.arm("ref", "reference"), stages.arm("cmd", "candidate", no_forced="1"))
    assert found["cmd"]["greedy"]["identical"] and found["cmd"]["forced"] is None
    found = stage(stages.arm("ref", "reference"), stages.arm("cmd", "candidate", own_prompt="1"))
    assert found["cmd"]["not_compared"] == "the command chooses its own prompt"
    assert found["cmd"]["greedy"] is None and found["cmd"]["void"] is None


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"refuse_load": "unsupported"}, "unsupported: mlx-vlm does not load it"),
        ({"die_early": "1"}, "failed (crash): start: the worker ended with 1: no module named mlx"),
        ({"die_at": "0"}, "failed (out of memory): decode: the worker ended with 137"),
    ],
)
def test_without_their_reference_arms_are_judged_by_themselves(stage, settings, why):
    found = stage(
        stages.arm("ref", "reference", **settings),
        stages.arm("lm", "candidate"),
        stages.arm("loops", "candidate", loop="1"),
    )
    assert found["ref"]["void"].startswith(why)
    assert found["lm"]["void"] is None and found["lm"]["greedy"] is None
    assert found["loops"]["void"].startswith("the text repeats")


def test_an_arm_that_dies_leaves_the_others_to_be_compared(stage):
    found = stage(
        stages.arm("ref", "reference"),
        stages.arm("lm", "candidate"),
        stages.arm("dies", "candidate", die_at="0", die_of="SIGSEGV"),
    )
    assert found["lm"]["greedy"]["identical"] and found["lm"]["forced"]["top1_agreement"] == 1
    assert found["dies"]["void"].startswith("failed (crash): decode: the worker ended with 139")


def test_synthetic_weights_may_loop_with_their_reference(stage):
    arms = (stages.arm("ref", "reference", loop="1"), stages.arm("again", "null", loop="1"))
    assert stage(*arms, kind="synthetic")["again"]["void"] is None
    assert stage(*arms, kind="hub")["ref"]["void"].startswith("the text repeats")
