"""A Mac's traces, read from small exports written in the documented format.

Nothing here ran on a Mac; docs/metal.md says what a first user there should check.
"""

import importlib
import re
import shlex
import textwrap
from pathlib import Path

import pytest

from metal_export import BUFFERS, ENCODERS, GAP, PID, RUN, Document, contents, trace
from moescope.errors import UserError
from moescope.measure import mac_probe as macos_probe
from moescope.trace import metal, metal_worker


@pytest.mark.parametrize("second_node", [False, True])
@pytest.mark.parametrize("process_column", [False, True])
def test_a_token_is_the_difference_of_two_lengths(tmp_path, second_node, process_column):
    long = trace(tmp_path / "long", 30, second_node, process_column)
    short = trace(tmp_path / "short", 10, second_node, process_column)
    found = metal.difference(long, short, 20)
    assert found.busy_s == pytest.approx(BUFFERS * RUN / 1e9)
    assert found.idle_s == pytest.approx(BUFFERS * GAP / 1e9)
    assert (found.command_buffers, found.encoders) == (BUFFERS, BUFFERS * ENCODERS)
    assert found.encode_s == pytest.approx(BUFFERS * 30e-6)
    assert {i.channel for i in long.intervals} == {"Compute"}
    assert any("belong to other processes" in note for note in long.notes)
    with pytest.raises(UserError, match="no more GPU time"):
        metal.difference(short, long, 20)


def test_references_reach_into_earlier_cells(tmp_path):
    document = Document(metal.INTERVALS)
    document.row(start=1, duration=2, event_label="x", process=PID, state="Active")
    document.row(start=5, duration=2, event_label="x", process=PID, state="Active")
    path = document.write(tmp_path / "t.xml")
    assert '<process ref="' in path.read_text()
    first, second = metal.rows(path, metal.INTERVALS)
    assert first["process"].pid == second["process"].pid == PID
    assert second["duration"].number == 2 and first["frame-number"] is None
    broken = path.read_text().replace('<duration ref="', '<duration ref="9')
    (tmp_path / "b.xml").write_text(broken)
    with pytest.raises(UserError, match="which is nowhere"):
        list(metal.rows(tmp_path / "b.xml", metal.INTERVALS))


def test_what_does_not_fit_is_refused(tmp_path):
    document = Document(metal.INTERVALS)
    document.row(start=1, duration=2, process=77, state="Active")
    path = document.write(tmp_path / "t.xml")
    with pytest.raises(UserError, match="this is the table 'metal-gpu-intervals', expected"):
        list(metal.rows(path, metal.SUBMISSIONS))
    (tmp_path / "s.xml").write_text(path.read_text().replace("<sentinel/>", "", 1))
    with pytest.raises(UserError, match=r"a row has 12 cells, the schema 13 columns"):
        list(metal.rows(tmp_path / "s.xml", metal.INTERVALS))
    (tmp_path / "e.xml").write_text("<trace-query-result></trace-query-result>")
    with pytest.raises(UserError, match="no table in it"):
        list(metal.rows(tmp_path / "e.xml", metal.INTERVALS))
    (tmp_path / "n.xml").write_text("<trace")
    with pytest.raises(UserError, match="not XML"):
        list(metal.rows(tmp_path / "n.xml", metal.INTERVALS))
    host = Document(metal.SUBMISSIONS).write(tmp_path / "h.xml")
    with pytest.raises(UserError, match=r"bench \(2297\) ran nothing on the GPU .* 1 intervals"):
        metal.read(contents(tmp_path / "toc.xml"), path, host)


def test_an_attached_process_is_found_wherever_the_contents_name_it(tmp_path):
    toc = tmp_path / "toc.xml"
    attached = f'<process type="attached" name="python" pid="{PID}"/>'
    toc.write_text(f"<trace-toc><run><processes>{attached}</processes></run></trace-toc>")
    assert metal.recorded(toc) == (PID, "python")
    toc.write_text(
        f"<trace-toc><run><processes><process pid='{PID}'/></processes></run></trace-toc>"
    )
    with pytest.raises(UserError, match="of no one process; record with --launch or --attach"):
        metal.recorded(toc)


def test_the_commands_name_template_table_and_variables(tmp_path):
    argv = metal.record_command(tmp_path / "x.trace", ["bench", "-n", "8"], {"A": "1"}, 30)
    assert argv[:4] == ["xcrun", "xctrace", "record", "--template"]
    assert argv[argv.index("--env") + 1] == "A=1" and argv[-5:-3] == ["--launch", "--"]
    export = metal.export_command(tmp_path / "x.trace", metal.INTERVALS, tmp_path / "o.xml")
    assert '/trace-toc/run[@number="1"]/data/table[@schema="metal-gpu-intervals"]' in export
    assert "--toc" in metal.contents_command(tmp_path / "x.trace", tmp_path / "o.xml")


@pytest.mark.parametrize(
    ("shape", "mode", "bits", "group", "dtype", "gather", "name"),
    [
        ((1, 2048, 768), "affine", 4, 64, "bfloat16", True,
         "affine_gather_qmv_fast_bfloat16_t_gs_64_b_4"),
        ((1, 768, 2048), "affine", 4, 64, "bfloat16", True,
         "affine_gather_qmv_bfloat16_t_gs_64_b_4"),
        ((1, 768, 2048), "affine", 6, 64, "float16", True,
         "affine_gather_qmv_fast_float16_t_gs_64_b_6"),
        ((1, 4096, 2048), "mxfp4", 4, 32, "bfloat16", True,
         "mxfp4_gather_qmv_fast_bfloat16_t_gs_32_b_4"),
        ((1, 2048, 4096), "affine", 8, 64, "bfloat16", False,
         "affine_qmv_fast_bfloat16_t_gs_64_b_8_batch_0"),
        ((1, 128, 4096), "affine", 4, 64, "float32", False,
         "affine_qmv_quad_float_gs_64_b_4_d_128_batch_0"),
    ],
)  # fmt: skip
def test_names_follow_the_rules(shape, mode, bits, group, dtype, gather, name):
    assert metal.quantised_name(shape, mode, bits, group, dtype, gather) == name


def test_derived_dispatches_say_that_they_are():
    weights = [
        {"module": f"model.layers.{layer}.mlp.switch_mlp.{name}", "shape": shape,
         "mode": "affine", "bits": 4, "group_size": 64}
        for layer in range(3)
        for name, shape in (("gate_proj", [128, 768, 256]), ("up_proj", [128, 768, 256]),
                            ("down_proj", [128, 2048, 96]))
    ]  # fmt: skip
    first, second = metal.derived_dispatches(weights, "bfloat16")
    assert first == {
        "kernel": "affine_gather_qmv_fast_bfloat16_t_gs_64_b_4",
        "modules": [
            "model.layers.*.mlp.switch_mlp.gate_proj",
            "model.layers.*.mlp.switch_mlp.up_proj",
        ],
        "dispatches_per_token": 6,
        "derived": True,
    }
    assert second["kernel"] == "affine_gather_qmv_bfloat16_t_gs_64_b_4"
    with pytest.raises(UserError, match="only decode"):
        metal.quantised_name((2, 64, 64), "affine", 4, 64, "float16", True)


def page(root):
    return (root / "docs" / "metal.md").read_text()


def test_docs_say_what_was_never_run(root):
    text = page(root)
    assert "never run on a Mac" in text
    for command in ("xctrace", "pmset -g therm", "sysctl", "notifyutil"):
        assert command in text
    # Every module that the page names exists.
    for name in re.findall(r"`(moescope(?:\.\w+)+)`", text):
        importlib.import_module(name)


def test_the_pages_commands_are_the_codes(root, tmp_path):
    """The command lines and tables that the page shows are those that the trace stage uses."""
    text = " ".join(page(root).replace("\\\n", " ").split())
    attach = metal.attach_command(Path("/tmp/long.trace"), 1, 60)
    shown = shlex.join(attach[:-1]).replace("'Metal System Trace'", "'Metal System Trace'")
    assert f"{shown} PID" in text
    for table in metal.TABLES:
        assert table in text
    assert metal_worker.STARTED in text and "mac_probe" in text
    assert str(int(macos_probe.PERIOD_S)) + " s" in text


def test_the_pages_reading_of_an_export_works(root, tmp_path, capsys):
    trace(tmp_path / "t", 12, how="attached")
    for part, table in (("toc", "toc"), ("gpu", metal.TABLES[0]), ("host", metal.TABLES[1])):
        (tmp_path / "t" / f"{part}.xml").rename(tmp_path / f"long-{table}.xml")
    (*_, code) = re.findall(r"<<'E'\n(.*?)\n +E\n", page(root), re.DOTALL)
    code = textwrap.dedent(code).replace("/tmp/", f"{tmp_path}/")
    exec(compile(code, "docs/metal.md", "exec"), {})
    intervals, submissions, *_ = capsys.readouterr().out.split()
    assert int(submissions) == 1 + BUFFERS * (3 + 12) and int(intervals) > int(submissions)
