"""Admission before launch, and telling bad ends apart."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moescope.measure import admission

GIB = 1 << 30


def test_what_fits_is_admitted_and_what_does_not_says_its_numbers():
    good = admission.admit(100 * GIB, host=128 * GIB)
    assert good.admitted and good.why is None
    bad = admission.admit(141 * GIB, host=128 * GIB)
    assert not bad.admitted
    assert bad.why.startswith("needs about 141.0 GiB, 108.8 GiB are allowed here (85% of the host")
    assert bad.as_dict() == {
        "admitted": False,
        "predicted": 141 * GIB,
        "room": int(128 * GIB * 0.85),
        "host": 128 * GIB,
        "why": bad.why,
    }


def test_the_tightest_limit_decides_and_is_named():
    assert admission.room(512 * GIB)[1].startswith("85% of the host")
    assert admission.room(512 * GIB, device=384 * GIB)[1] == "85% of the device's 384.0 GiB"
    alone = admission.room(64 * GIB, 140 * GIB, apart=True)
    assert alone == (int(140 * GIB * 0.85), "85% of the device's 140.0 GiB")
    assert admission.room(64 * GIB, None, apart=True)[1].startswith("85% of the host's")
    assert admission.room(512 * GIB, 384 * GIB, cap=8 * GIB) == (8 * GIB, "the cap of 8.0 GiB")


@given(st.integers(0, 1 << 45), st.integers(1, 1 << 45), st.integers(1, 1 << 45))
def test_a_cap_never_admits_more(predicted, host, cap):
    with_cap = admission.admit(predicted, host, cap=cap)
    without = admission.admit(predicted, host)
    assert with_cap.admitted <= without.admitted
    assert with_cap.room == min(cap, without.room)
    assert with_cap.admitted == (predicted <= with_cap.room)


def test_the_prediction_is_the_inspections_else_weights_and_cache():
    assert admission.predict({"memory": {"predicted": 7}}, 512, 128) == 7
    architecture = {
        "layers": 48,
        "attention": {"kv_heads": 4, "head_dim": 128},
        "bytes": {"total": 17 * GIB},
    }
    cache = 48 * 2 * 4 * 128 * 640 * 2
    assert admission.predict(architecture, 512, 128) == 17 * GIB + cache + 17 * GIB // 20


def test_the_prediction_before_inspection_looks_below_text_config():
    config = {"text_config": {"num_hidden_layers": 48, "num_key_value_heads": 4, "head_dim": 128}}
    cache = 48 * 2 * 4 * 128 * 640 * 2
    assert admission.predict_from(17 * GIB, config, 512, 128) == 17 * GIB + cache + 17 * GIB // 20
    tied = {"num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 512}
    assert admission.predict_from(0, tied, 30, 2) == 2 * 2 * 8 * 64 * 32 * 2 + GIB // 2
    assert admission.predict_from(0, {}, 30, 2) == GIB // 2


@pytest.mark.parametrize(
    ("status", "text", "timed_out", "kind"),
    [
        (137, "", False, "out_of_memory"),
        (None, "", True, "timeout"),
        (124, "", False, "failed"),
        (137, "Killed", True, "timeout"),
        (1, "[metal::malloc] Attempting to allocate 9 bytes", False, "out_of_memory"),
        (134, "terminate called after throwing 'std::bad_alloc'", False, "out_of_memory"),
        (1, "CUDA error: out of memory", False, "out_of_memory"),
        (134, "terminate called without an active exception", False, "crash"),
        (139, "warning: rope scaling is not supported", False, "crash"),
        (143, "", False, "killed"),
        (134, "[metal_kernel] No Metal back-end.", False, "no_backend"),
        (1, "RuntimeError: [cuda_kernel] No CUDA back-end.", False, "no_backend"),
        (1, "no kernel image is available for execution on the device", False, "no_kernel"),
        (
            1,
            "[gather_qmm] No implementation for problem shape: 1x768x2048x8",
            False,
            "no_kernel",
        ),
        (1, "ValueError: Model type inkling not supported.", False, "unsupported"),
        (1, "ValueError: Received 362 parameters not in model", False, "unsupported"),
        (2, "error: unexpected argument '--ignore-eos' found", False, "unsupported"),
        (1, "ERR_NVGPUCTRPERM: no permission to use the counters", False, "not_permitted"),
        (1, "thread 'main' panicked", False, "failed"),
        (None, "no such file", False, "failed"),
    ],
)
def test_bad_ends_are_told_apart(status, text, timed_out, kind):
    assert admission.classify(status, text, timed_out) == kind
    assert kind in admission.KINDS


def test_the_deciding_sentence_is_quoted_without_paths():
    text = "loading /home/somebody/models/x\n[malloc] Unable to allocate 9 bytes in /a/b/c.cpp\nbye"
    line = admission.explain("out_of_memory", 1, text)
    assert line == "ran out of memory (status 1): [malloc] Unable to allocate 9 bytes in c.cpp"
    assert admission.explain("timeout", None, "") == "did not end within the time limit"
