"""Whose kernel is it: on windows of a real H200, and on made ones."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_traces import FAMILIES, LAYERS, launches, recorded
from moescope.errors import UserError
from moescope.trace import align
from moescope.trace.align import Mismatch, StepLabels
from moescope.trace.events import Kernel, base_name, demangle, read_events


@pytest.mark.parametrize("family", FAMILIES)
def test_mlx_ran_the_derived_order_and_every_launch_has_an_owner(family):
    events = recorded(family)
    steps = align.by_ranges(events)
    assert [step.step for step in steps] == sorted(events.steps)
    for step in steps:
        assert step.launches == launches(events, step.step) and len(step.launches) > 100
        outside = [
            base_name(kernel.name)
            for kernel, label in zip(step.launches, step.labels, strict=True)
            if label == align.OUTSIDE
        ]
        assert set(outside) <= {"event_signal_kernel"} and len(outside) <= 1


@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        ("qwen3-moe", {"qmm_sm80_kernel": 3}),  # top 8: the tensor-core path
        ("inkling", {"gather_qmv_kernel": 3}),  # top 6: the vector path
        ("deepseek-v4", {"fp_gather_qmv": 2, "gather_qmv_kernel": 1}),
    ],
)
def test_the_experts_products_are_whole_multiples_of_the_layers(family, kernels):
    layers = FAMILIES[family]
    for step in align.by_ranges(recorded(family)):
        ran = Counter(
            base_name(kernel.name)
            for kernel, label in zip(step.launches, step.labels, strict=True)
            if label.primitive == "GatherQMM"
        )
        moved = {name: count for name, count in ran.items() if name.startswith("copy")}
        assert ran - Counter(moved) == {name: each * layers for name, each in kernels.items()}
        # Each gather's first step: indices of its rows; and a copy of the token for two of three.
        arange = sum(
            label.primitive == "Arange" and label.term == "expert_gather" for label in step.labels
        )
        assert arange == 3 * layers and sum(moved.values()) == 2 * layers


def test_the_routers_sort_and_the_attention_are_where_they_belong():
    (first, *_) = align.by_ranges(recorded("qwen3-moe"))
    terms = Counter(
        (label.term, base_name(kernel.name).split("_sdpa_")[0])
        for kernel, label in zip(first.launches, first.labels, strict=True)
    )
    assert terms["router", "block_sort_kernel"] == LAYERS
    assert terms["router", "softmax"] == LAYERS
    assert terms["attention", "cudnn_generated_fort_native"] == LAYERS
    assert terms["attention", "rope_single"] == 2 * LAYERS
    assert terms["norm", "rms_norm_small"] == 2 * LAYERS + 1
    assert terms["attention", "rms_norm_small"] == 2 * LAYERS  # of queries and keys
    assert terms["head", "qmv_kernel"] == 1
    assert terms["sampler", "arg_reduce_general"] == 1
    assert None not in {label.term for label in first.labels}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_agrees_with_the_ranges_where_it_is_sure(family):
    events = recorded(family)
    for exact, guessed in zip(align.by_ranges(events), align.by_table(events), strict=True):
        assert exact.launches == guessed.launches
        pairs = list(zip(exact.labels, guessed.labels, strict=True))
        assert all(right.term in (left.term, None) for left, right in pairs)
        assert all(right.primitive in (left.primitive, None) for left, right in pairs)
        unsure = sum(right.term is None for _, right in pairs)
        assert unsure <= 0.06 * len(pairs)
        assert family != "qwen3-moe" or unsure == 0


def tampered(events, **changes):
    return replace(events, **changes)


def test_ranges_that_are_not_the_derived_order_are_a_mismatch():
    events = recorded("inkling")
    ranges = list(events.ranges)
    swapped = [i for i, entry in enumerate(ranges) if entry[0].startswith("GatherQMM")][3]
    _, start, end = ranges[swapped]
    ranges[swapped] = ("Softmax::eval_gpu", start, end)
    with pytest.raises(Mismatch, match="MLX evaluated Softmax where GatherQMM"):
        align.by_ranges(tampered(events, ranges=ranges))
    del ranges[swapped]
    with pytest.raises(Mismatch, match="step 3"):
        align.by_ranges(tampered(events, ranges=ranges))
    with pytest.raises(Mismatch, match="not heard"):
        align.by_ranges(tampered(events, ranges=None))


def test_a_launch_without_its_call_is_a_mismatch():
    events = recorded("qwen3-moe")
    launched = {kernel.launch for kernel in events.kernels}
    calls = [call for call in events.calls if call.launch in launched][1:]
    with pytest.raises(Mismatch, match="no CUDA call was recorded"):
        align.launches_by_step(tampered(events, calls=calls))


@pytest.mark.parametrize("family", FAMILIES)
def test_launches_that_the_graph_cannot_start_are_a_mismatch(family):
    events = recorded(family)
    step = max(events.steps)
    sequence, kernels = events.steps[step], launches(events, step)
    align.labels_by_table(sequence, kernels)
    at = next(i for i, kernel in enumerate(kernels) if "rms_norm" in base_name(kernel.name))
    with pytest.raises(Mismatch, match=r"cannot start|start at most"):
        align.labels_by_table(sequence, kernels[:at] + kernels[at + 1 :])
    with pytest.raises(Mismatch):
        align.labels_by_table(sequence, [*kernels[:at], kernels[at], *kernels[at:]])
    with pytest.raises(Mismatch):
        align.labels_by_table(sequence, kernels[:-1])


def kernel(name: str, at: int = 0, grid: int = 1) -> Kernel:
    return Kernel(name, at, at + 10, (grid, 1, 1), (32, 1, 1), 7, 0, 0, at)


SIMPLE = {
    "Softmax": [["softmax"], ["copy_g_nd", "softmax"]],
    "GatherQMM": [["qmm_sm80_kernel"], ["copy_g", "gather_qmv_kernel"]],
    "Reshape": [[], ["copy_gg_nd"]],
    "Transpose": [[]],
    "AsType": [[], ["copy_v"]],
    "Sum": [["row_reduce_simple"], ["col_reduce_looped"], ["all_reduce", "all_reduce"]],
    "CompiledSigmoidMultiply": [["Xab_contiguous"], ["Xab_strided"]],
}


@settings(max_examples=300)
@given(st.lists(st.tuples(st.sampled_from(sorted(SIMPLE)), st.integers(0, 2)), min_size=1))
def test_the_table_is_never_wrong_where_it_is_sure(choices):
    terms = ("router", "expert_gather", "attention")
    sequence = [(name, f"m{i}", terms[i % 3]) for i, (name, _) in enumerate(choices)]
    owners, names = [], []
    for i, (name, which) in enumerate(choices):
        for started in SIMPLE[name][which % len(SIMPLE[name])]:
            owners.append(i)
            names.append(started)
    labels = align.labels_by_table(sequence, [kernel(n, i) for i, n in enumerate(names)])
    for owner, label in zip(owners, labels, strict=True):
        for found, true in zip(
            (label.primitive, label.module, label.term), sequence[owner], strict=True
        ):
            assert found in (true, None)


def test_what_two_primitives_may_have_started_is_known_as_far_as_they_agree():
    sequence = [("Reshape", "a", "router"), ("AsType", "b", "router"), ("AsType", "c", "norm")]
    (label,) = align.labels_by_table(sequence[:2], [kernel("copy_v")])
    assert (label.primitive, label.module, label.term) == (None, None, "router")
    (label,) = align.labels_by_table(sequence, [kernel("copy_v")])
    assert label == align.UNKNOWN
    outside = align.labels_by_table(sequence[:1], [kernel("event_signal_kernel")])
    assert outside == [align.OUTSIDE]


def test_labels_are_carried_over_to_cuda_graphs():
    events = recorded("qwen3-moe")
    step = align.by_ranges(events)[0]
    labels, how = align.transfer(step, list(step.launches))
    assert how == "order" and labels == step.labels

    # Two projections of one layer may change places: independent nodes of a graph.
    order = list(range(len(step.launches)))
    random.Random(1).shuffle(order)
    labels, how = align.transfer(step, [step.launches[i] for i in order])
    assert how == "occurrence"
    count = Counter((base_name(k.name), lab.term) for k, lab in zip(
        [step.launches[i] for i in order], labels, strict=True))  # fmt: skip
    assert count == Counter(
        (base_name(k.name), lab.term) for k, lab in zip(step.launches, step.labels, strict=True)
    )

    many = len(step.launches) // align.UNLIKE + 1
    with pytest.raises(Mismatch, match=f"{many} launches are missing and 0 are new"):
        align.transfer(step, step.launches[many:])
    other = StepLabels(1, [kernel("a", grid=1)], [align.OUTSIDE])
    with pytest.raises(Mismatch, match="a against a"):
        align.transfer(other, [kernel("a", grid=2)])


def test_a_launch_more_under_cuda_graphs_leaves_the_others_their_labels():
    """MLX copies what another still holds; which of several copies is the new one nobody knows."""
    step = align.by_ranges(recorded("qwen3-moe"))[0]
    alike = align._name_and_shape
    copies = [i for i, k in enumerate(step.launches) if base_name(k.name) == "copy_g_nd"]
    at = copies[0]
    more = [*step.launches[:at], step.launches[at], *step.launches[at:]]
    labels, how = align.transfer(step, more)
    assert how == "occurrence, but for copy_g_nd"
    assert {labels[i].term for i in (at, *[i + 1 for i in copies])} == {"expert_gather"}
    others = [i for i, k in enumerate(step.launches) if alike(k) != alike(more[at])]
    assert [labels[i + (i >= at)] for i in others] == [step.labels[i] for i in others]

    # Of two terms, none of them can be told, and the rest can.
    changed = [*step.labels]
    changed[at] = replace(changed[at], term="attention")
    labels, _ = align.transfer(replace(step, labels=changed), more)
    assert {labels[i].term for i in (at, *[i + 1 for i in copies])} == {None}
    assert [labels[i + (i >= at)] for i in others] == [changed[i] for i in others]

    # One less: the others keep what they agree on.
    labels, how = align.transfer(step, [k for i, k in enumerate(step.launches) if i != at])
    assert how == "occurrence, but for copy_g_nd"
    assert [labels[i - (i > at)] for i in others] == [step.labels[i] for i in others]

    labels, how = align.transfer(step, [*step.launches, kernel("never_seen")])
    assert labels == [*step.labels, align.UNKNOWN] and how == "occurrence, but for never_seen"


def test_names_of_kernels():
    name = (
        "_ZN4cute4gemmINS_1CILi16EEEEEvi",
        "not mangled",
        "_Z9one_entryPKfS0_Pf",
    )
    assert base_name(name[0]) == "cute::gemm"
    assert demangle(name[0]) == "cute::gemm<cute::C<16> >"
    assert demangle(name[1]) == name[1]
    assert base_name(name[2]) == "one_entry"
    events = recorded("qwen3-moe")
    names = {base_name(k.name) for k in events.kernels}
    assert {"qmm_sm80_kernel", "qmv_kernel", "gather_axis", "binary_vv"} <= names
    assert not any(set("<>( ") & set(name) for name in names)


def test_files_that_are_no_events_are_refused(tmp_path):
    path = tmp_path / "e.json.gz"
    path.write_bytes(b"\x1f\x8b")
    with pytest.raises(UserError, match=r"e\.json\.gz"):
        read_events(path)
