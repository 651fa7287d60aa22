"""The kernel side of commands, through profilers that are played by scripts."""

import csv
import json
import os
import shutil
import stat
import sys
from types import SimpleNamespace

import pytest

import nsys_export
import toy_runtime as toy
from moescope.runtimes import binary, command
from moescope.trace import command as trace
from moescope.verdict.kernels import kernels
from moescope.verdict.results import Found

pytestmark = pytest.mark.skipif(
    not (shutil.which("git") and shutil.which("make") and shutil.which("cc")),
    reason="needs git, make and a C compiler",
)
NSYS = """\
#!{python}
import os, subprocess, sys
sys.path[:0] = [{tests!r}, {workflow!r}]
argv = sys.argv[1:]
flags = [a for a in argv if a.startswith("--") and "=" in a]
output = [a for a in flags if a.startswith("--output=")][0].split("=", 1)[1]
if argv[0] == "profile":
    if os.environ.get("REFUSE"):
        sys.exit("ERR_NVGPUCTRPERM: no permission")
    assert "--cuda-graph-trace=node" in flags
    command = argv[1 + len(flags):]
    tokens = command[command.index("--max-tokens") + 1]
    graphs = os.environ.get("MLX_USE_CUDA_GRAPHS") != "0"
    open(output + ".nsys-rep", "w").write(f"{{tokens}} {{int(graphs)}}")
    sys.exit(subprocess.run(command).returncode)
import nsys_export
from pathlib import Path
tokens, graphs = open(argv[-1]).read().split()
nsys_export.Export(Path(output), graphs=graphs == "1").write(int(tokens))
"""


@pytest.fixture(scope="module")
def tool(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    commit = toy.write(folder / "toy")
    return binary.provide(toy.runtime(folder / "toy", commit), folder / "work", folder)


@pytest.fixture
def context(tool, tmp_path, monkeypatch, root):
    """What the trace stage gives to its instruments, with a quiet host and a toy as the arm."""
    programs = tmp_path / "bin"
    programs.mkdir()
    script = programs / "nsys"
    script.write_text(
        NSYS.format(
            python=sys.executable, tests=str(root / "tests"), workflow=str(root / "workflow")
        )
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    params = {"machine": {"backend": "cuda"}, "trace": {"tokens": 16, "passes": 2}}
    for name in ("out", "work"):
        (tmp_path / name).mkdir()
    task = SimpleNamespace(params=params, key="k0", work=tmp_path / "work", out=tmp_path / "out")
    settings, replies = {"TOY_MS": "3"}, []
    return SimpleNamespace(
        task=task,
        arm={"name": "toy", "runtime": "toy"},
        patches=[],
        bench=SimpleNamespace(prompt=[1, 2, 3], loading=lambda arm: {"path": str(model)}),
        worker=lambda **extra: command.CommandWorker(tool, settings=settings | extra),
        guarded=lambda name, call: replies.append(call()) or replies[-1],
        replies=replies,
    )


def test_nsys_gives_the_kernels_and_terms_of_traces_in_process(context):
    found = trace.measure(context)
    assert found["instruments"] == ["nsys"]
    assert len(found["reports"]) == 3 and all(len(r["sha256"]) == 64 for r in found["reports"])
    assert not list(context.task.work.rglob("*.sqlite"))
    out = context.task.out
    terms = json.loads((out / "terms.json").read_text())
    rows = list(csv.DictReader((out / "kernels.csv").read_text().splitlines()))
    layers = nsys_export.LAYERS
    expected: dict[str, float] = {}
    for row, term in nsys_export.step_kernels():
        expected[term] = expected.get(term, 0) + row[3] / 1e6
    assert {name: entry["ms"][0] for name, entry in terms["terms"].items()} == pytest.approx(
        expected
    )
    assert terms["unclassified"] == [0] and terms["window_disagreement"] < 1e-9
    assert terms["launches"] == [len(nsys_export.step_kernels())]
    (expert,) = terms["path"]["experts"]
    assert terms["path"]["moe_layers"] == layers and terms["path"]["steps"] == 40
    assert expert == {
        "kernel": "qmm_sm80_kernel",
        "launches": 3 * layers * 40,
        "launches_per_token": 3 * layers,
        "per_layer": 3,
    }
    assert terms["path"]["uneven"] == []
    assert terms["calls"]["cudaGraphLaunch"]["count"] == 1
    plain = [r["decode_s"] / r["forwards"] * 1e3 for r in context.replies if "forwards" in r]
    assert terms["wall_ms"] == pytest.approx(plain[-2:]) and min(plain) > 3
    assert sum(float(row["share"]) for row in rows) == pytest.approx(1, abs=1e-4)
    primitives = {
        row["kernel"]: row["primitives"] for row in rows if row["term"] == "expert_gather"
    }
    assert primitives[nsys_export.GATHER[0]] == "GatherQMM"
    limits = {"profiler_cost": 0.03, "unclassified": 0.01}
    figures = kernels(Found(rows, "kernels.csv"), Found(terms, "terms.json"), limits)
    assert figures["refused"] is None and figures["method"] == "order"
    assert figures["largest"] == "expert_gather"


def test_without_an_order_the_attribution_is_refused_and_the_launches_stand(context, monkeypatch):
    monkeypatch.setattr(trace.nsys, "kind", lambda *of: "other")
    found = trace.measure(context)
    assert any("the term of each kernel: no sequence" in line for line in found["not_measured"])
    terms = json.loads((context.task.out / "terms.json").read_text())
    assert terms["unclassified"] == [1] and list(terms["terms"]) == ["unclassified"]
    rows = list(csv.DictReader((context.task.out / "kernels.csv").read_text().splitlines()))
    limits = {"profiler_cost": 0.03, "unclassified": 0.01}
    figures = kernels(Found(rows, "kernels.csv"), Found(terms, "terms.json"), limits)
    assert "unclassified" in figures["refused"]


def test_a_profiler_that_is_missing_or_not_permitted_is_not_measured(context, monkeypatch):
    monkeypatch.setenv("REFUSE", "1")
    worker = context.worker
    context.worker = lambda **extra: worker(REFUSE="1", **extra)
    (line,) = trace.measure(context)["not_measured"]
    assert line.startswith("kernels: nsys (long) was not permitted what it asked for")
    assert not list(context.task.out.iterdir())
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert trace.measure(context) == {
        "not_measured": ["kernels: nsys (Nsight Systems) is not in PATH"]
    }
