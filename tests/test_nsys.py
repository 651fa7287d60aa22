"""Nsight Systems: commands, exports by the documented schema, differences, terms by order."""

import dataclasses
import sqlite3
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moescope.errors import UserError
from moescope.trace import nsys
from nsys_export import (
    ARGMAX,
    GATHER,
    GRAPH_TABLE,
    LAYERS,
    NORM,
    PID,
    QMV,
    SORT,
    Export,
    full,
    step_kernels,
)


def test_the_commands_trace_nodes_and_export():
    argv = nsys.profile_command("nsys", Path("r"), ["bench", "-n", "8"])
    assert argv[:2] == ["nsys", "profile"] and argv[-3:] == ["bench", "-n", "8"]
    assert "--cuda-graph-trace=node" in argv and "--trace=cuda,nvtx" in argv
    export = nsys.export_command("nsys", Path("r"), Path("r.sqlite"))
    assert export[-1] == "r.nsys-rep" and "--type=sqlite" in export


@pytest.mark.parametrize("graphs", [False, True])
def test_the_difference_of_two_lengths_is_a_tokens_share(tmp_path, graphs):
    long = nsys.read(Export(tmp_path / "long.sqlite", graphs).write(40))
    short = nsys.read(Export(tmp_path / "short.sqlite", graphs).write(20))
    found = nsys.difference(long, short, 20)
    assert found.uneven == {}
    kernels = step_kernels()
    for row in (NORM, QMV, GATHER, SORT, ARGMAX):
        count = sum(1 for other, _ in kernels if other is row)
        launches, seconds = found.kernels[row[0]]
        assert launches == count
        assert seconds == pytest.approx(count * row[3] / 1e9)
    assert "load_copy_v" not in found.kernels
    assert found.total_s == pytest.approx(sum(row[3] for row, _ in kernels) / 1e9)
    assert found.busy_s == pytest.approx(found.total_s)
    call = "cudaGraphLaunch" if graphs else "cudaLaunchKernelExC"
    assert found.calls[call][0] == (1 if graphs else len(kernels))
    assert long.version == "EXPORT_SCHEMA_VERSION 3.14.1"


def test_uneven_launches_are_named(tmp_path):
    long = nsys.read(Export(tmp_path / "l.sqlite").write(31))
    short = nsys.read(Export(tmp_path / "s.sqlite").write(20))
    found = nsys.difference(long, short, 10)  # in truth 11
    assert found.uneven[GATHER[0]] == pytest.approx(LAYERS * 3 * 1.1)
    with pytest.raises(UserError, match="launched no more kernels"):
        nsys.difference(short, long, 10)
    with pytest.raises(UserError, match="differ by 0 tokens"):
        nsys.difference(long, short, 0)


def test_overlapping_kernels_count_once_for_busy(tmp_path):
    export = Export(tmp_path / "x.sqlite", graphs=True)
    export.write(4)
    trace = nsys.read(export.path)
    doubled = nsys.Trace(trace.launches + trace.launches, trace.calls, (0, 0), 1)
    assert doubled.busy == trace.busy
    assert nsys.union([(0, 10), (5, 12), (5, 6), (20, 30), (12, 13)]) == 23


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12))
def test_the_union_is_that_of_the_points(pairs):
    intervals = [(start, start + length) for start, length in pairs]
    points = {t for start, end in intervals for t in range(start, end)}
    assert nsys.union(intervals) == len(points)


def test_graphs_as_wholes_are_refused(tmp_path):
    other = GRAPH_TABLE
    export = Export(tmp_path / "a.sqlite")
    export.database.execute(other)
    export.database.execute(
        "INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (1,9,0,1,7,1,1,1,1)"
    )
    with pytest.raises(UserError, match=r"1 CUDA graphs were traced as wholes.*graph-trace=node"):
        nsys.read(export.write(4))
    # An empty table, as newer versions write it, is no such trace.
    export = Export(tmp_path / "b.sqlite")
    export.database.execute(other)
    assert nsys.read(export.write(4)).launches
    # Graphs launched, and nothing of their inside.
    export = Export(tmp_path / "c.sqlite")
    export.call("cudaGraphLaunch_v10000")
    with pytest.raises(UserError, match="no kernel belongs to a graph node"):
        nsys.read(export.write(4))


def test_what_is_no_export_is_refused(tmp_path):
    (tmp_path / "x").write_text("hello")
    with pytest.raises(UserError, match="not an SQLite export"):
        nsys.read(tmp_path / "x")
    with sqlite3.connect(tmp_path / "y.sqlite") as database:
        database.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
    with pytest.raises(UserError, match="holds no kernel"):
        nsys.read(tmp_path / "y.sqlite")


def test_primitives_come_from_the_ranges_around_the_launches(tmp_path):
    trace = nsys.read(Export(tmp_path / "x.sqlite").write(3))
    found = {launch.name: launch.primitive for launch in trace.launches}
    assert found[GATHER[0]] == "GatherQMM" and found[SORT[0]] == "ArgPartition"
    assert found["load_copy_v"] is None
    graphs = nsys.read(Export(tmp_path / "y.sqlite", graphs=True).write(3))
    assert {launch.primitive for launch in graphs.launches} == {None}
    assert any(launch.node for launch in graphs.launches)


def test_another_processs_records_are_left_out(tmp_path):
    path = Export(tmp_path / "x.sqlite").write(3)
    assert nsys.read(path, process=PID).launches
    with pytest.raises(UserError, match="no kernel"):
        nsys.read(path, process=PID + 1)


def test_terms_by_order_are_those_of_the_layer(tmp_path):
    trace = nsys.read(Export(tmp_path / "x.sqlite", noise=0.1).write(30))
    step = nsys.decode_step(trace)
    # The prefill of the test samples twice.
    assert step.layers == LAYERS and step.count == 30 and step.others == 2
    assert [term for _, _, term, _ in step.rows] == [term for _, term in step_kernels()]
    expected: dict[str, float] = {}
    for row, term in step_kernels():
        expected[term] = expected.get(term, 0) + row[3] / 1e9
    assert step.terms() == pytest.approx(expected, rel=0.05)


def test_ranges_tell_what_kernels_of_unknown_names_do(tmp_path, monkeypatch):
    """Another release calls its kernels otherwise; MLX's ranges around the launches do not change,
    and the tiled product of the experts is told from a dense one without its grid."""
    strange = {"qmv_kernel": "tile_a", "qmm_sm80_kernel": "cutlass_tile", "arg_reduce": "pick",
               "block_sort_kernel": "order", "rms_norm": "scale"}  # fmt: skip
    plain = nsys.read(Export(tmp_path / "x.sqlite").write(12))

    def renamed(launch, primitive=True):
        name = next((new for old, new in strange.items() if old in launch.name), launch.name)
        kept = launch.primitive if primitive else None
        return dataclasses.replace(launch, name=name, grid=(256, 1, 1), primitive=kept)

    known = dataclasses.replace(plain, launches=[renamed(launch) for launch in plain.launches])
    step = nsys.decode_step(known)
    assert [term for _, _, term, _ in step.rows] == [term for _, term in step_kernels()]
    mute = [renamed(launch, primitive=False) for launch in plain.launches]
    with pytest.raises(UserError, match="occurs three times"):
        nsys.decode_step(dataclasses.replace(plain, launches=mute))


def test_rows_name_the_primitives_where_ranges_were_recorded(tmp_path):
    long = nsys.read(Export(tmp_path / "l.sqlite").write(40))
    short = nsys.read(Export(tmp_path / "s.sqlite").write(20))
    step = nsys.decode_step(long)
    rows = nsys.kernel_rows(nsys.difference(long, short, 20), step)
    found = {(row["kernel"], row["term"]): row["primitives"] for row in rows}
    assert found[GATHER[0], "expert_gather"] == "GatherQMM"
    assert found[QMV[0], "router"] == "QuantizedMatmul"
    mute = dataclasses.replace(step, primitives=(None,) * len(step.rows))
    rows = nsys.kernel_rows(nsys.difference(long, short, 20), mute)
    assert {row["primitives"] for row in rows} == {""}


def test_dense_layers_and_fused_experts_and_shared_experts():
    dense = ["norm", "matmul", "rope", "attention", "matmul", "elementwise",
             "norm", "matmul", "matmul", "elementwise", "matmul", "elementwise"]  # fmt: skip
    fused = ["norm", "matmul", "rope", "attention", "matmul", "elementwise",
             "norm", "matmul", "sort", "expert_kernel", "expert_kernel",
             "reduce", "matmul", "elementwise"]  # fmt: skip
    tail = ["norm", "matmul", "sampler"]
    terms, layers = nsys.assign(dense + fused + tail)
    assert layers == 1
    assert terms[7:12] == ["other"] * 5
    assert terms[12:26] == [
        "norm", "attention", "attention", "attention", "attention", "attention",
        "norm", "router", "router", "expert_gather", "expert_gather",
        "combine", "shared_expert", "combine",
    ]  # fmt: skip
    assert terms[26:] == ["norm", "head", "sampler"]


def test_too_few_equal_steps_are_no_answer(tmp_path):
    with pytest.raises(UserError, match="occurs three times"):
        nsys.decode_step(nsys.read(Export(tmp_path / "x.sqlite").write(2)))


def test_rows_split_a_kernel_over_its_terms(tmp_path):
    long = nsys.read(Export(tmp_path / "l.sqlite").write(40))
    short = nsys.read(Export(tmp_path / "s.sqlite").write(20))
    found = nsys.difference(long, short, 20)
    rows = nsys.kernel_rows(found, nsys.decode_step(long))
    assert rows[0]["kernel"] == GATHER[0] and rows[0]["launches_per_token"] == 3 * LAYERS
    matmul = {row["term"]: row["launches_per_token"] for row in rows if row["kernel"] == QMV[0]}
    assert matmul == {"attention": 4 * LAYERS, "router": LAYERS, "head": 1}
    assert sum(row["ms_per_token"] for row in rows) == pytest.approx(found.total_s * 1e3)
    assert sum(row["share_of_busy"] for row in rows) == pytest.approx(1)
    assert {row["term"] for row in nsys.kernel_rows(found)} == {"other"}


@pytest.mark.parametrize(
    ("name", "grid", "kind"),
    [
        (GATHER[0], (1, 6, 8), "gather"),
        (GATHER[0], (1, 6, 1), "matmul"),
        ("gather_qmv_kernel<8, 16, 64, true>", (0, 0, 0), "gather"),
        ("fp_gather_qmv<__nv_bfloat16, 8>", (0, 0, 0), "gather"),
        ("gather_axis<float>", (0, 0, 0), "index"),
        ("void mlx::core::cu::custom_kernel_moe_gateup_8_768", (0, 0, 0), "expert_kernel"),
        ("custom_kernel_moe_down", (0, 0, 0), "expert_kernel"),
        ("custom_kernel_ssm", (0, 0, 0), "custom"),
        ("nvjet_tst_64x8", (0, 0, 0), "matmul"),
        ("event_signal_kernel", (0, 0, 0), "signal"),
        ("something_new", (0, 0, 0), "other"),
    ],
)
def test_kinds_by_name(name, grid, kind):
    assert nsys.kind(name, grid) == kind


@pytest.mark.parametrize(
    ("name", "primitive", "kind"),
    [
        ("something_new", "GatherMM", "gather"),
        ("cutlass_80_tile", "GatherQMM", "gather"),
        (GATHER[0], "QuantizedMatmul", "matmul"),
        # What a primitive does beside its own kernel keeps its name's kind.
        ("copy_v<float, float>", "GatherQMM", "copy"),
        ("custom_kernel_moe_gateup_8", "CustomKernel", "expert_kernel"),
        ("something_new", "NobodyKnows", "other"),
    ],
)
def test_kinds_by_the_range_around_a_launch(name, primitive, kind):
    assert nsys.kind(name, (1, 6, 1), primitive) == kind


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (full(GATHER[0]), GATHER[0]),
        ("nvjet_tst_64x8_64x16", "nvjet_tst_64x8_64x16"),
        ("_ZN3mlx4core2cu8copy_gg_IfEEvPT_", "copy_gg_<float>"),
        ("qmv_kernel<(int)8, (bool)1>(int)", "qmv_kernel<(int)8, (bool)1>"),
    ],
)
def test_names_are_those_of_traces_in_process(name, short):
    assert nsys.short_name(name) == short
