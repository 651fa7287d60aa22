"""Metal System Traces of commands and of in-process arms, through an xctrace played by a script."""

import csv
import json
import math
import os
import shutil
import sys
import time
from types import SimpleNamespace

import pytest

import stages
import toy_runtime as toy
from moescope.checkpoints.headers import Tensor, write_tensors
from moescope.files import read_json
from moescope.runtimes import binary, command
from moescope.runtimes.client import WorkerError
from moescope.study.plan import BACKEND_CODE
from moescope.trace import command as commands
from moescope.trace import derived, metal_worker, stage
from moescope.trace.command import NotMeasured
from moescope.verdict.bound import bound
from moescope.verdict.kernels import kernels
from moescope.verdict.results import Found

XCRUN = """#!{python}
import os, shutil, signal, subprocess, sys, time
sys.path[:0] = [{tests!r}, {workflow!r}]
from pathlib import Path
argv = sys.argv[2:]
if argv[0] == "version":
    sys.exit(os.environ.get("NO_XCTRACE"))
if argv[0] == "record":
    bundle = Path(argv[argv.index("--output") + 1])
    if "--attach" in argv:  # nothing slow before it says that it records
        os.kill(int(argv[argv.index("--attach") + 1]), 0)  # it is there
        if os.environ.get("REFUSE"):
            sys.exit("Cannot attach to process: not permitted")
        def stop(*_):
            print("Recording completed. Saving output file...", flush=True)
            if not os.environ.get("LOSE"):
                import metal_export
                metal_export.trace(bundle, 8 if bundle.stem == "short" else 40, how="attached")
            sys.exit(54)
        signal.signal(signal.SIGINT, stop)
        print("Starting recording with the Metal System Trace template.", flush=True)
        if not os.environ.get("MUTE"):
            print("Ctrl-C to stop the recording", flush=True)
        time.sleep(120)
    command = argv[argv.index("--") + 1:]
    import metal_export
    names = [a for a, b in zip(argv[1:], argv) if b == "--env"]
    assert "TOY_MS=3" in names, names
    metal_export.trace(bundle, int(command[command.index("--max-tokens") + 1]))
    sys.exit(subprocess.run(command).returncode)
bundle = argv[argv.index("--input") + 1]
text = " ".join(argv)
what = "toc" if "--toc" in argv else "gpu" if "gpu-intervals" in text else "host"
shutil.copy(f"{{bundle}}/{{what}}.xml", argv[argv.index("--output") + 1])
"""


LAYERS = 3


def fetched(folder):
    """A fetch result of a small qwen3_moe: affine, 4 bits, groups of 64, float32 activations."""
    rows = []

    def module(path, *shape, quantised=True):
        if not quantised:
            rows.append((f"{path}.weight", "F32", shape))
            return
        *outer, k = shape
        rows.append((f"{path}.weight", "U32", (*outer, k // 8)))
        rows.extend((f"{path}.{name}", "F32", (*outer, k // 64)) for name in ("scales", "biases"))

    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        for name, out in (("q", 512), ("k", 128), ("v", 128), ("o", 512)):
            module(f"{layer}.self_attn.{name}_proj", out, 512)
        for name in ("q", "k"):
            module(f"{layer}.self_attn.{name}_norm", 64, quantised=False)
        for name in ("input", "post_attention"):
            module(f"{layer}.{name}_layernorm", 512, quantised=False)
        module(f"{layer}.mlp.gate", 128, 512)
        for name, out, into in (("gate", 256, 512), ("up", 256, 512), ("down", 512, 256)):
            module(f"{layer}.mlp.switch_mlp.{name}_proj", 128, out, into)
    module("model.embed_tokens", 2048, 512)
    module("model.norm", 512, quantised=False)
    module("lm_head", 2048, 512)
    config = {
        "model_type": "qwen3_moe", "vocab_size": 2048, "hidden_size": 512,
        "num_hidden_layers": LAYERS, "intermediate_size": 1024, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 64, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 256, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "norm_topk_prob": True, "tie_word_embeddings": False,
        "quantization": {"mode": "affine", "bits": 4, "group_size": 64},
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: Tensor(dtype, shape, 4 * math.prod(shape), "m") for name, dtype, shape in rows}
    write_tensors(folder / "tensors.csv", tensors)
    return folder


class Worker:
    """An in-process worker's surface: what it was asked, and how long it has decoded."""

    def __init__(self):
        self.pid, self.asked = os.getpid(), []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def ask(self, do, limit, **arguments):
        assert limit > 0
        self.asked.append((do, arguments.get("tokens")))
        if do == "decode":
            forwards = arguments["tokens"] - 1
            return {"decode_s": forwards * 5e-3, "forwards": forwards}
        return {}


@pytest.fixture
def xcrun(tmp_path, monkeypatch, root):
    programs = tmp_path / "bin"
    programs.mkdir()
    script = programs / "xcrun"
    script.write_text(
        XCRUN.format(
            python=sys.executable,
            tests=str(root / "tests"),
            workflow=str(root / "workflow"),
        )
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(metal_worker, "SETTLE_S", 0.0)
    return script


@pytest.fixture
def context(tmp_path):
    """What the trace stage gives to its instruments, with a quiet host."""
    params = {"machine": {"backend": "metal"}, "trace": {"tokens": 16, "passes": 2}}
    for name in ("out", "work"):
        (tmp_path / name).mkdir()
    fetch = fetched(tmp_path / "fetch")
    task = SimpleNamespace(
        params=params,
        key="k0",
        work=tmp_path / "work",
        out=tmp_path / "out",
        one=lambda stage: fetch,
    )
    worker = Worker()
    guard = SimpleNamespace(own=lambda pid: None, settle=lambda: None, gate=lambda name: None)
    return SimpleNamespace(
        task=task,
        arm={"name": "lm", "runtime": "lm"},
        patches=["top_k=2"],
        bench=SimpleNamespace(prompt=[1, 2, 3], loading=lambda arm: {"path": str(tmp_path)}),
        worker=lambda **extra: worker,
        the_worker=worker,
        guard=guard,
        guarded=lambda name, call: call(),
    )


def test_an_in_process_arm_is_recorded_while_it_decodes(context, xcrun):
    found = metal_worker.measure(context)
    assert found["instruments"] == ["xctrace"]
    buffers = found["command_buffers"]
    assert buffers["command_buffers"] == 4 and buffers["tokens"] == 32
    assert buffers["busy_s"] == pytest.approx(4 * 900e-6)
    assert buffers["idle_s"] == pytest.approx(4 * 100e-6)
    assert buffers["wall_ms"] == pytest.approx([5.0, 5.0])
    assert buffers["profiled_wall_ms"] == pytest.approx([5.0])
    assert "single kernels" in found["not_measured"][0]
    # Warm, two plain passes, one recording of each length; nothing is loaded while it records.
    assert context.the_worker.asked == [
        ("load", None), ("decode", 8), ("decode", 40), ("decode", 40),
        ("decode", 40), ("decode", 8),
    ]  # fmt: skip
    rows = found["derived_dispatches"]["rows"]
    assert all(row["derived"] for row in rows)
    assert not list((context.task.work / "traces" / "k0").glob("*.xml"))


def test_a_record_has_the_busy_share_and_refuses_terms(context, xcrun):
    metal_worker.measure(context)
    out = context.task.out
    table = list(csv.DictReader((out / "kernels.csv").read_text().splitlines()))
    terms = json.loads((out / "terms.json").read_text())
    limits = {"profiler_cost": 0.03, "unclassified": 0.01}
    found = kernels(Found(table, "kernels.csv"), Found(terms, "terms.json"), limits)
    assert found["busy_ms"]["value"] == pytest.approx(3.6)
    assert found["busy"]["value"] == pytest.approx(3.6 / 5)
    assert found["host_gap_ms"]["value"] == pytest.approx(1.4)
    assert found["launches"]["value"] == 8
    assert "unclassified 1.000 is above the limit" in found["refused"]
    assert "names no kernel" in found["kernels"][0]["kernel"]
    assert bound(found, None)["resource"] == "both"


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"NO_XCTRACE": "no such tool"}, "xcrun finds no xctrace: it comes with Xcode"),
        ({"REFUSE": "1"}, "xctrace did not begin to record: Cannot attach to process"),
        ({"LOSE": "1"}, "xctrace (long) saved no recording: Recording completed"),
        ({"MUTE": "1"}, "xctrace did not begin to record: Starting recording"),
    ],
)
def test_what_xctrace_does_not_do_is_one_sentence(context, xcrun, monkeypatch, variables, said):
    if "MUTE" in variables:
        monkeypatch.setattr(metal_worker, "START_LIMIT_S", 5.0)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    begin = time.monotonic()
    (line,) = metal_worker.measure(context)["not_measured"]
    assert line.startswith(f"command buffers and GPU times: {said}") and "\n" not in line
    assert time.monotonic() - begin < 90  # it would go on for 120
    assert bool(context.the_worker.asked) is ("NO_XCTRACE" not in variables)


def test_what_xctrace_says_as_it_ends_is_not_lost(tmp_path):
    """It writes and ends between two looks of ours."""
    log = tmp_path / "log"
    log.write_text("")

    class Ending:
        @property
        def alive(self):
            log.write_text("Cannot attach to process: not permitted")
            return False

    with pytest.raises(NotMeasured, match="not permitted"):
        metal_worker._wait_for(Ending(), log)


def test_without_xcode_an_arm_is_not_even_loaded(context, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert metal_worker.measure(context) == {
        "not_measured": ["command buffers and GPU times: xcrun (Xcode) is not in PATH"]
    }
    assert context.the_worker.asked == []
    assert commands.measure(context) == {"not_measured": ["kernels: xcrun (Xcode) is not in PATH"]}


def test_a_failing_arm_is_an_error_and_the_recording_ends(context, xcrun, monkeypatch):
    def refuse(do, limit, **arguments):
        if len(context.the_worker.asked) >= 4:
            raise WorkerError("failed", "no more")
        return Worker.ask(context.the_worker, do, limit, **arguments)

    monkeypatch.setattr(context.the_worker, "ask", refuse)
    begin = time.monotonic()
    with pytest.raises(WorkerError, match="no more"):
        metal_worker.measure(context)
    assert time.monotonic() - begin < 90


@pytest.mark.parametrize("xcode", [True, False])
def test_the_trace_stage_of_a_mac(tmp_path, xcrun, monkeypatch, xcode):
    """The whole stage, over the fake worker: scopes and graph as elsewhere, xctrace beside them."""
    stages.stand_in(monkeypatch)
    monkeypatch.setenv("MOESCOPE_LOCK_DIR", str(tmp_path))
    if not xcode:
        xcrun.write_text("#!/bin/sh\nexit 72\n")
    params = {
        "checkpoint": "tiny",
        "arm": stages.arm("ref", "reference"),
        "shape": stages.SHAPE,
        "trace": {"passes": 2, "tokens": 4},
        "limits": {"conservation": 0.02, "unclassified": 0.01, "profiler_cost": 0.03},
        "guard": stages.GUARD,
        "machine": stages.MACHINE | {"backend": "metal"},
        "session": 1,
    }
    task = stages.make(tmp_path / "tree", "trace", "tiny.ref", params)
    fetched(tmp_path / "fetch")
    shutil.copy(tmp_path / "fetch" / "tensors.csv", task.one("fetch") / "tensors.csv")
    stage.run(task)
    found = read_json(task.out / "trace.json", "moescope/trace/1")
    assert (task.out / "scopes.json").is_file() and (task.out / "operations.csv").is_file()
    if xcode:
        assert found["instruments"] == ["scopes", "graph", "xctrace"]
        assert found["command_buffers"]["tokens"] == 32
        assert (task.out / "kernels.csv").is_file() and (task.out / "terms.json").is_file()
    else:
        assert found["instruments"] == ["scopes", "graph"]
        assert found["not_measured"] == [
            "command buffers and GPU times: xcrun finds no xctrace: it comes with Xcode, not with "
            "its tools"
        ]
        assert not (task.out / "kernels.csv").exists()


def test_the_stage_and_the_plan_name_the_module():
    assert stage.BACKENDS["metal"] == f"moescope.{BACKEND_CODE['metal'][0]}"


@pytest.mark.skipif(
    not (shutil.which("git") and shutil.which("make") and shutil.which("cc")),
    reason="needs git, make and a C compiler",
)
def test_a_command_gives_command_buffers_a_token(context, xcrun, tmp_path, monkeypatch):
    commit = toy.write(tmp_path / "toy")
    tool = binary.provide(toy.runtime(tmp_path / "toy", commit), tmp_path / "work", tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    context.worker = lambda **extra: command.CommandWorker(tool, settings={"TOY_MS": "3"} | extra)
    context.bench.loading = lambda arm: {"path": str(model)}
    context.patches = []
    printed, runs = [], commands.output.runs
    monkeypatch.setattr(
        commands.output, "runs", lambda *given: printed.append(runs(*given)[0]) or printed[-1:]
    )
    found = commands.measure(context)
    assert found["instruments"] == ["xctrace"]
    buffers = found["command_buffers"]
    assert buffers["command_buffers"] == 4 and buffers["tokens"] == 32
    assert buffers["busy_s"] == pytest.approx(4 * 900e-6)
    walls = {run["forwards"]: run["decode_s"] / run["forwards"] * 1e3 for run in printed}
    assert buffers["profiled_wall_ms"] == pytest.approx([walls[39]]) and walls[39] > 3
    assert "single kernels" in found["not_measured"][0]


def test_kernels_are_derived_from_the_headers(context):
    """A layer has three experts' products and five dense ones; the head is one, the embedding
    none."""
    found = derived.dispatches(context.task.one("fetch"))["rows"]
    assert {row["kernel"]: row["dispatches_per_token"] for row in found} == {
        "affine_qmv_fast_float_gs_64_b_4_batch_0": 5 * LAYERS + 1,
        "affine_gather_qmv_fast_float_gs_64_b_4": 2 * LAYERS,
        "affine_gather_qmv_float_gs_64_b_4": LAYERS,
    }
    assert not any("embed" in module for row in found for module in row["modules"])


def test_what_cannot_be_derived_says_why(context):
    fetch = context.task.one("fetch")
    (fetch / "config.json").write_text('{"model_type": "nobody_knows_it"}')
    found = derived.dispatches(fetch)
    assert found["rows"] == [] and "nobody_knows_it" in found["why"]
