"""Commands as workers: command lines, outputs, denominators, failures, and a real tool beside the
in-process arm of the same runtime.
"""

import json
import os
import re
import shutil
import sys
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import stages
import toy_runtime as toy
from moescope.errors import UserError
from moescope.runtimes import binary, command, expression, output, process, spec
from moescope.runtimes.client import WorkerDied, WorkerError

needs_compiler = pytest.mark.skipif(
    not (shutil.which("git") and shutil.which("make") and shutil.which("cc")),
    reason="needs git, make and a C compiler",
)


@pytest.fixture(scope="module")
def tool(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    commit = toy.write(folder / "toy")
    return binary.provide(toy.runtime(folder / "toy", commit), folder / "work", folder)


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "a model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3_moe"}')
    (folder / "model.safetensors").write_bytes(b"x" * 100)
    return folder


def ask(worker, tokens=9, prompt=(1, 2, 3, 4), limit=60.0):
    return worker.ask("decode", limit, prompt=list(prompt), tokens=tokens, patches=[])


@needs_compiler
def test_a_decode_counts_forwards_not_tokens(tool, model, tmp_path):
    with command.CommandWorker(tool, tmp_path / "log.txt", {"TOY_MS": "10"}) as worker:
        loaded = worker.ask("load", 60, package=None, path=str(model))
        found = ask(worker, tokens=9)
    assert (loaded["model_type"], loaded["parameters_bytes"]) == ("qwen3_moe", 100)
    assert loaded["seconds"] == 0.01 and loaded["peak_memory"] == 750_000_000
    assert (found["prompt_tokens"], found["generated_tokens"], found["forwards"]) == (4, 9, 8)
    said = re.findall(r"Decode: ([\d.]+) ms", (tmp_path / "log.txt").read_text())
    assert found["decode_s"] == pytest.approx(float(said[-1]) / 1e3) and float(said[-1]) >= 8 * 10
    # The tool's own rate counts the prefill's token too: by 9/8 higher.
    ratio = found["tool_rate"] / (found["forwards"] / found["decode_s"])
    assert ratio == pytest.approx(9 / 8, rel=1e-3)
    assert found["load_s"] == 0.01 and found["peak_memory"] == 750_000_000
    assert found["tokens"] == [7, 8, 9, 7, 8, 9, 7, 8, 9]
    assert found["tokens_sha256"] and found["token_s"] is None
    assert found["binary_sha256"] == tool.sha256
    assert found["same_prompt"] is False
    assert worker.ready["library_sha256"] == tool.sha256
    assert worker.ready["versions"]["mlx"] == toy.PIN
    assert "[Profile Results]" in (tmp_path / "log.txt").read_text()


@needs_compiler
def test_the_arms_variables_reach_the_tool_and_the_callers_do_not(tool, model, monkeypatch):
    monkeypatch.setenv("MLX_INHERITED", "yes")
    for settings, path in (({}, "gather"), ({"TOY_FUSED": "1"}, "fused")):
        with command.CommandWorker(tool, settings=settings) as worker:
            worker.ask("load", 60, path=str(model))
            assert ask(worker)["paths"] == [f"[toy arch] path: {path}; inherited: nothing"]
    with command.CommandWorker(tool, settings={"MLX_INHERITED": "arm"}) as worker:
        worker.ask("load", 60, path=str(model))
        assert ask(worker)["paths"][0].endswith("inherited: arm")


@needs_compiler
@pytest.mark.parametrize(
    ("settings", "limit", "kind"),
    [
        ({"TOY_CRASH": "1"}, 20, "crash"),
        ({"TOY_MEMORY": "1"}, 20, "out_of_memory"),
        ({"TOY_SLEEP": "1"}, 0.3, "timeout"),
    ],
)
def test_bad_ends_have_their_kind_and_leave_no_process(tool, model, settings, limit, kind):
    with command.CommandWorker(tool) as worker:
        worker.ask("load", 60, path=str(model))
        worker.settings = settings
        with pytest.raises(WorkerDied) as error:
            ask(worker, limit=limit)
        assert error.value.kind == kind
        assert worker.pid is None
        assert str(model) not in error.value.message


@needs_compiler
@pytest.mark.parametrize(
    ("settings", "kind", "why"),
    [
        ({"TOY_CRASH": "1"}, "crash", r"a short run: crashed \(status 134\): terminate called"),
        (
            {"TOY_MEMORY": "1"},
            "out_of_memory",
            r"a short run: ran out of memory \(status 1\): .*allocate 9 bytes",
        ),
    ],
)
def test_what_cannot_run_here_says_so_when_it_is_loaded(tool, model, settings, kind, why):
    with command.CommandWorker(tool, settings=settings) as worker:
        with pytest.raises(WorkerDied, match=why) as error:
            worker.ask("load", 60, path=str(model))
        assert error.value.kind == kind and str(model) not in str(error.value)
        with pytest.raises(WorkerError, match="decode before load"):
            ask(worker)
    with (
        command.CommandWorker(tool, settings={"TOY_SLEEP": "1"}) as worker,
        pytest.raises(WorkerDied, match="time limit"),
    ):
        worker.ask("load", 0.2, path=str(model))


@needs_compiler
def test_what_a_command_cannot_do_is_not_applicable(tool, model):
    with command.CommandWorker(tool) as worker:
        with pytest.raises(WorkerError, match="decode before load"):
            ask(worker)
        worker.ask("load", 60, path=str(model))
        for do in ("scopes", "forced", "layout"):
            with pytest.raises(WorkerError, match=f"a command has no {do}") as error:
                worker.ask(do, 60)
            assert error.value.kind == "not_applicable"
        with pytest.raises(WorkerError, match="skip_experts: a command cannot be patched"):
            worker.ask("decode", 10, prompt=[1], tokens=4, patches=["skip_experts"])
        with pytest.raises(WorkerError, match="no instrument graph"):
            worker.ask("graph", 10, prompt=[1, 2], patches=[])
    with pytest.raises(WorkerDied, match="has ended"):
        ask(worker)


@needs_compiler
def test_a_run_can_be_watched_between_sending_and_receiving(tool, model):
    with command.CommandWorker(tool, settings={"TOY_MS": "20"}) as worker:
        worker.ask("load", 60, path=str(model))
        deadline = time.monotonic() + 20
        worker.send("decode", deadline=deadline, prompt=[1], tokens=11, patches=[])
        assert Path(f"/proc/{worker.pid}").exists() or sys.platform != "linux"
        assert worker.receive("decode", deadline=deadline)["forwards"] == 10


@needs_compiler
def test_leaving_kills_what_runs(tool, model):
    with command.CommandWorker(tool) as worker:
        worker.ask("load", 60, path=str(model))
        worker.settings = {"TOY_SLEEP": "1"}
        worker.send("decode", deadline=time.monotonic() + 60, prompt=[1], tokens=4, patches=[])
        pid = worker.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_several_runs_in_one_process_are_one_decode(fake):
    """Each trial of the script is slower by the first's time: 5 tokens in 0.1, 0.2, 0.3 s."""
    tool, folder = fake
    several = binary.Tool(
        tool.words, tool.env, tool.manifest, {**tool.invoke, "runs_per_process": 3}
    )
    with command.CommandWorker(several) as worker:
        worker.ask("load", 60, path=str(folder))
        found, again = ask(worker, tokens=5), ask(worker, tokens=5)
    assert [one["decode_s"] for one in found["passes"]] == pytest.approx([0.1, 0.2, 0.3])
    assert found["decode_s"] == pytest.approx(0.2) and found["forwards"] == 4
    assert found["prefill_s"] == pytest.approx(4 / 400)
    # As the tool counts: all tokens of all runs over their time.
    assert found["tool_rate"] == pytest.approx(15 / 0.6)
    assert found["process_s"] != again["process_s"] and found["counted"] == []
    with command.CommandWorker(tool) as worker:
        worker.ask("load", 60, path=str(folder))
        assert "passes" not in ask(worker, tokens=5)
    one = binary.Tool(tool.words, tool.env, tool.manifest, {**tool.invoke, "runs": "one"})
    with pytest.raises(UserError, match="the preset fake measures one"):
        command.CommandWorker(one, batch=2)


@pytest.fixture
def fake(tmp_path):
    """The mlx_lm.benchmark preset with a script in its place: it prints, and writes a graph."""
    script = tmp_path / "tool.py"
    script.write_text(
        "import os, sys\n"
        "a = dict(zip(sys.argv[1::2], sys.argv[2::2]))\n"
        "p, g, n = a['--prompt-tokens'], a['--generation-tokens'], int(a['--num-trials'])\n"
        "print(f'Timing with prompt_tokens={p}, generation_tokens={g}, batch_size=1.')\n"
        "for i in range(n):\n"
        "    print(f'Trial {i + 1}:  prompt_tps=400.000, generation_tps={50 / (i + 1)}, '\n"
        "          'peak_memory=1.500, total_time=0.1')\n"
        "print('Averages: prompt_tps=400.000, generation_tps=50.000, peak_memory=1.500')\n"
        "if 'DOT' in os.environ:\n"
        "    open(os.environ['DOT'], 'w').write(open(os.environ['FROM']).read())\n"
    )
    invoke = spec.preset("mlx_lm.benchmark").invoke.model_dump(mode="json")
    invoke["argv"] = ["{python}", str(script), *invoke["argv"][3:]]
    invoke["instruments"] = {
        "graph": {"env": {"DOT": "{file}", "FROM": str(tmp_path / "graph.dot")}, "generate": 4,
                  "reads": "dot", "keep": None, "caveat": "fused later"},
        "profile": {"env": {}, "generate": 4, "reads": "text", "keep": r"(?m)^(Trial .*)$",
                    "caveat": "shares only"},
    }  # fmt: skip
    manifest = {
        "preset": "fake", "package": "mlx-lm", "packages": {"mlx-lm": "0.32.2", "mlx": "0.32.4"},
        "library": {"path": "mlx/lib/libmlx.so", "sha256": "ab" * 32}, "lacking": [],
    }  # fmt: skip
    (tmp_path / "config.json").write_text("{}")
    return binary.Tool({"python": sys.executable}, dict(os.environ), manifest, invoke), tmp_path


def test_instruments_are_runs_of_their_own(fake):
    tool, folder = fake
    (folder / "graph.dot").write_text(
        'digraph { 94 [label ="GatherQMM", shape=rectangle]; "A" -> 94; { "B"; } 94 -> "B";\n'
        '94 [label ="GatherQMM", shape=rectangle]; 7 [label ="AsType", shape=rectangle]; }'
    )
    with command.CommandWorker(tool) as worker:
        worker.ask("load", 60, path=str(folder))
        graph = worker.ask("graph", 10, prompt=[1, 2], patches=[])
        lines = worker.ask("profile", 10, prompt=[1, 2], patches=[])
    assert graph["operations"] == [
        {"primitive": "GatherQMM", "term": "other", "count": 2},
        {"primitive": "AsType", "term": "other", "count": 1},
    ]
    assert (graph["total"], graph["astype"], graph["caveat"]) == (3, 1, "fused later")
    assert len(lines["lines"]) == 1 and lines["caveat"] == "shares only"


# Outputs.

MLXCEL = """\
[phase] warmup_start monotonic_ns=100 boottime_ns=na
[long-prompt] target=512 tokens -> using 512 tokens (max_context=Some(32768), reserved 128)
[mlxcel arch] compute capability 12.1 (sm_121); compiled for [121]; coverage: cubin
[mlxcel arch] quantized matmul path on first call: qmv (device sm_121)
[phase] decode_start monotonic_ns=500 boottime_ns=900
\x1b[1m[Load]\x1b[0m wall: 4.125 s  MLX peak: 17.20 GB
[Profile Results]
  Prompt tokens: 512
  Generated tokens: 128
  Prefill: 411.25 ms (1244.98 tok/s)
  Decode: 1420.50 ms (90.11 tok/s)
  MLX peak memory: 17.61 GB
"""


def test_mlxcels_output_is_read():
    invoke = spec.preset("mlxcel").invoke.model_dump(mode="json")
    (run,) = output.runs(MLXCEL.replace("\x1b[1m[Load]\x1b[0m", "\x1b[1;32m[Load]\x1b[0m"), invoke)
    assert (run["prompt_tokens"], run["generated_tokens"], run["forwards"]) == (512, 128, 127)
    assert run["prefill_s"] == pytest.approx(0.41125) and run["decode_s"] == 1.4205
    assert run["peak_memory"] == 17_610_000_000 and run["load_s"] == 4.125
    assert len(run["paths"]) == 2 and run["paths"][1].endswith("qmv (device sm_121)")
    assert command.phase_marks(run["phases"]) == {
        "warmup_start": {"monotonic_ns": 100},
        "decode_start": {"monotonic_ns": 500, "boottime_ns": 900},
    }


def test_older_output_without_load_and_peak_is_read_too():
    invoke = spec.preset("mlxcel").invoke.model_dump(mode="json")
    text = "\n".join(line for line in MLXCEL.splitlines() if "peak" not in line)
    (run,) = output.runs(text, invoke)
    assert "peak_memory" not in run and "load_s" not in run and run["forwards"] == 127


def test_an_output_that_lacks_a_number_says_which_and_shows_the_end():
    invoke = spec.preset("mlxcel").invoke.model_dump(mode="json")
    text = MLXCEL.replace("Decode: 1420.50 ms (90.11 tok/s)", "thread 'main' panicked")
    with pytest.raises(UserError, match=r"no value decode_ms .*Decode.*panicked"):
        output.runs(text, invoke)
    with pytest.raises(UserError, match="holds no run"):
        output.runs("nothing of the kind", spec_invoke("mlx_lm.benchmark"))
    with pytest.raises(UserError, match="no measurement"):
        output.runs(MLXCEL.replace("1420.50", "0.0"), invoke)


def spec_invoke(name):
    return spec.preset(name).invoke.model_dump(mode="json")


def invoke_with(kind, fields, **rest):
    base = {**toy.INVOKE, "output": {"kind": kind, **rest}, "fields": fields}
    return spec.Invoke.model_validate(base).model_dump(mode="json")


FIELDS = {
    "prompt_tokens": "p",
    "generated_tokens": "n",
    "prefill_s": "ttft / 1000",
    "decode_s": "n / rate",
    "forwards": "n",
}


def test_json_lines_and_csv_are_read():
    columns = {
        "p": "target_len",
        "n": "out.tokens",
        "ttft": "ttft_ms",
        "rate": "decode_tok_s",
    }
    invoke = invoke_with(
        "json_lines", FIELDS, prefix="[engine-bench] ", where={"path": "engine"}, columns=columns
    )
    lines = [
        {"path": "engine", "target_len": 8, "ttft_ms": 4, "decode_tok_s": 2.0,
         "out": {"tokens": 6}},
        {"path": "warmup", "target_len": 8},
    ]  # fmt: skip
    text = "hello {\n" + "".join(f"[engine-bench] {json.dumps(x)}\n" for x in lines)
    (run,) = output.runs(text, invoke)
    assert (run["decode_s"], run["forwards"], run["prefill_s"]) == (3.0, 6, 0.004)
    with pytest.raises(UserError, match="no JSON after"):
        output.runs("[engine-bench] {oops", invoke)
    table = invoke_with(
        "csv", FIELDS, header=r"^model,", columns={"p": "pp", "n": "tg", "ttft": "t", "rate": "r"}
    )
    text = "load\nmodel,pp,tg,t,r\nm,8,6,4,2\nm,8,6,4,3\n\nbye,1\n"
    assert [r["decode_s"] for r in output.runs(text, table)] == [3.0, 2.0]
    with pytest.raises(UserError, match="rate is 'fast', which is no number"):
        output.runs("model,pp,tg,t,r\nm,8,6,4,fast\n", table)


def test_terminal_sequences_and_overwritten_lines_go_away():
    assert (
        output.plain("\x1b[2K\x1b[1;31mred\x1b[0m\r\nx 10%\rx 99%\n\x1b]0;t\x07y")
        == "red\nx 99%\ny"
    )


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_arithmetic_is_pythons(a, b):
    assert expression.value("(a - 2 * b) / b + -1", {"a": a, "b": b}) == (a - 2 * b) / b + -1


@pytest.mark.parametrize("text", ["__import__('os')", "a.b", "a[0]", "a if b else c", "a ** b",
                                  "True", "'x'", "f(1)", "a <", "lambda: 1", "a; b"])  # fmt: skip
def test_anything_but_arithmetic_is_refused(text):
    with pytest.raises(ValueError):
        expression.names(text)


def test_presets_that_do_not_fit_together_are_refused():
    with pytest.raises(ValueError, match=r"fields\.decode_s: the output yields no time; it yields"):
        spec.Invoke.model_validate({**toy.INVOKE, "fields": {**toy.INVOKE["fields"],
                                                             "decode_s": "time"}})  # fmt: skip
    with pytest.raises(ValueError, match=r"\{modle\} is unknown; allowed"):
        spec.Invoke.model_validate({**toy.INVOKE, "argv": ["{binary.bench}", "{modle}"]})
    with pytest.raises(ValueError, match=r"fields\.forwards is missing"):
        fields = {k: v for k, v in toy.INVOKE["fields"].items() if k != "forwards"}
        spec.Invoke.model_validate({**toy.INVOKE, "fields": fields})
    with pytest.raises(ValueError, match="above 1 needs `runs: many`"):
        spec.Invoke.model_validate({**toy.INVOKE, "runs_per_process": 2})
    with pytest.raises(ValueError, match="belong together"):
        spec.Invoke.model_validate({**toy.INVOKE, "runs": "many"})


def test_a_study_says_how_many_runs_a_process_measures():
    study = {
        "kind": "command", "preset": "mlx_lm.benchmark", "runs_per_process": 3,
        "source": {"kind": "python", "package": "mlx-lm", "env": "mlx-lm-0.32.2"},
    }  # fmt: skip
    runtime = spec.CommandRuntime.model_validate(study)
    assert spec.resolve(runtime, "runtimes.b")["invoke"]["runs_per_process"] == 3
    once = spec.CommandRuntime.model_validate(
        study | {"preset": "mlxcel", "source": {"kind": "git", "url": "x"}}
    )
    with pytest.raises(UserError, match=r"preset mlxcel measures one; allowed: 1") as error:
        spec.resolve(once, "runtimes.b")
    assert "runtimes.b.runs_per_process" in str(error.value)


def test_processes_end_with_their_children_and_say_their_memory():
    script = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid)"
    ended = process.run([sys.executable, "-c", script], os.environ, 60)
    assert ended.good and ended.peak_memory > 1 << 20
    assert stages.gone(int(ended.stdout))
    assert process.run(["/no/such/tool"], {}, 1).status is None
    assert process.run([sys.executable, "-c", "import os; os.abort()"], {}, 60).status == 134


@pytest.mark.alone
def test_a_real_tool_agrees_with_the_in_process_arm(tmp_path):
    """Here short pairs on a host that may be loaded, so each side's fastest counts, and a host
    that disturbs one side gets another chance; tests/agreement.py measures well."""
    import agreement

    model, rows = agreement.checkpoint(tmp_path / "model"), []
    for _ in range(8):
        rows += agreement.pairs(model, rounds=1, trials=2, generate=17)
        # None where a host stood still: no pair counts in which one was not timed alone.
        fastest = [max((row[name] for row in rows), default=0.0) for name in ("tool", "worker")]
        if rows and 0.75 < fastest[0] / fastest[1] < 1.33:
            break
    assert rows and 0.75 < fastest[0] / fastest[1] < 1.33, rows
    for row in rows:
        # The tool's own convention counts the prefill's token: 17 over 16 intervals.
        assert row["tool_own"] / row["tool"] == pytest.approx(17 / 16, rel=1e-6)
        assert row["worker_own"] / row["worker"] == pytest.approx(17 / 16, rel=1e-6)


def test_the_page_about_runtimes_shows_what_works(root, tmp_path, monkeypatch):
    text = (root / "docs" / "runtimes.md").read_text()
    blocks = re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL)
    files = {}
    for language, body in blocks:
        title = re.match(r"# (\S+\.yaml)", body)
        if language == "yaml" and title:
            files.setdefault(title[1], []).append(yaml.safe_load(body))
    monkeypatch.setattr(spec, "PRESETS", tmp_path)
    study, more = files.pop("studies/opinion.yaml")
    for name, (preset,) in files.items():
        assert name.startswith("workflow/moescope/runtimes/presets/")
        (tmp_path / Path(name).name).write_text(yaml.safe_dump(preset))
    assert spec.presets() == ["mlx_lm.generate", "mybench"]
    printed, lines = (body for language, body in blocks if language == "text")
    invoke = spec.preset("mybench").invoke.model_dump(mode="json")
    assert output.runs(lines, invoke) == [
        {"prompt_tokens": 32, "generated_tokens": 65, "forwards": 64, "prefill_s": 0.012,
         "decode_s": 0.128}
    ]  # fmt: skip
    invoke = spec.preset("mlx_lm.generate").invoke.model_dump(mode="json")
    (run,) = output.runs(printed, invoke)
    assert (run["prompt_tokens"], run["forwards"]) == (3, 4)
    assert run["forwards"] / run["decode_s"] == pytest.approx(43.046 * 4 / 5)
    runtime = spec.CommandRuntime.model_validate(more["runtimes"]["generate"])
    resolved = spec.resolve(runtime, "runtimes.generate")
    assert len(resolved["invoke"]["options"]["text"].split()) == study["shape"]["prompt"]
    for key in ("argv", "optional", "runs", "env", "fields", "asked", "instruments"):
        assert f"`{key}`" in text and key in spec.Invoke.model_fields
