"""What a user gets wrong in a study with commands: one line each, what, where, what to do."""

import copy
import os
import shutil
import subprocess
import sys
import time

import pytest
import yaml

import tiny
import toy_runtime as toy
from moescope.errors import UserError
from moescope.runtimes import binary, command, spec
from moescope.runtimes.client import WorkerError
from moescope.study.load import load
from test_command_study import STUDY

pytestmark = pytest.mark.skipif(
    not (shutil.which("git") and shutil.which("make") and shutil.which("cc")),
    reason="needs git, make and a C compiler",
)


@pytest.fixture
def preset(tmp_path, monkeypatch):
    """The toy's preset, to be changed; ``put`` writes it."""
    folder = tmp_path / "presets"
    folder.mkdir()
    monkeypatch.setattr(spec, "PRESETS", folder)
    text = copy.deepcopy({"invoke": toy.INVOKE, "build": toy.BUILD, "framework": toy.FRAMEWORK})

    def put(path=None, value=None):
        place = text
        *parts, last = path.split("/") if path else [None]
        for part in parts:
            place = place[int(part) if part.isdigit() else part]
        if path:
            place[int(last) if last.isdigit() else last] = value
        (folder / "toy.yaml").write_text(yaml.safe_dump(text))

    put()
    return put


def said(root, change=lambda toy: None):
    """What a study with the toy is told; ``change`` gets its runtime."""
    config = dict(tiny.config("qwen3_moe"))
    config = yaml.safe_dump(config, default_flow_style=True, width=10**6).strip()
    study = yaml.safe_load(STUDY.format(config=config, url="/somewhere", memory="null"))
    change(study["runtimes"]["toy"])
    with pytest.raises(UserError) as raised:
        load(study, "s.yaml", root)
    line = str(raised.value)
    assert "\n" not in line and line.startswith("s.yaml: runtimes.toy")
    return line


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("presett", "x", "runtimes.toy: unknown key presett; allowed: kind, preset, source"),
        ("preset", "tyo", "runtimes.toy.preset: 'tyo' is no preset; allowed: toy"),
        ("options", {"n": "1"}, "runtimes.toy.options: n: the preset has no such option; allowed:"),
        ("build", {"comands": []}, "runtimes.toy.build: unknown key comands; allowed: commands"),
        ("build", {"timeout_s": 0}, "runtimes.toy.build: timeout_s: 0: input should be greater"),
        ("build", {"features": ["a b"]}, "runtimes.toy.build: features.0: 'a b': string should"),
        (
            "build",
            {"commands": ["make {featurs}"]},
            "{featurs} is unknown; allowed: {features}, {tree}",
        ),
        ("build", {"commands": ['make "x']}, "runtimes.toy.build: commands: "),
        ("build", {"binaries": {"other": "x"}}, "calls {binary.bench}; allowed: other"),
        (
            "framework",
            {"pattern": "[0-9a-f]{40}"},
            "runtimes.toy.framework: pattern: '[0-9a-f]{40}'",
        ),
        ("source", {"kind": "svn"}, "runtimes.toy.source.kind: 'svn' is not allowed; allowed: "),
        (
            "source",
            {"kind": "git", "url": "u", "comit": "x"},
            "runtimes.toy.source: unknown key comit; allowed: kind, url, commit",
        ),
        (
            "source",
            {"kind": "git", "url": "u", "commit": "abc123"},
            "runtimes.toy.source.commit: 'abc123' is not allowed; a revision is 40 hex digits",
        ),
    ],
)
def test_what_a_study_says_wrongly(preset, root, key, value, line):
    assert line in said(root, lambda toy: toy.update({key: value}))


@pytest.mark.parametrize(
    ("path", "value", "line"),
    [
        ("invoke/outputs", {}, "invoke: unknown key outputs; allowed: says, argv"),
        ("invoke/output/once/0", "(open", "invoke.output: '(open' is no regular expression"),
        ("invoke/fields", {}, "fields.prompt_tokens is missing"),
        ("invoke/fields/decode_s", "decode_mss", "the output yields no decode_mss; it yields"),
        ("invoke/fields/decode_s", "open(1)", "only numbers, names, + - * /"),
        ("invoke/argv/1", "--m={modle}", "'--m={modle}': {modle} is unknown; allowed: "),
        ("invoke/help/0", "{binary.bensh}", "calls {binary.bensh}; allowed: bench"),
        ("invoke/help/0", "{python}", "{python}, which a source of kind git does not give"),
        ("invoke/asked", ["prompt"], "asked: prompt is none of the fields: decode_s"),
        ("invoke/env", {"M": "{model}"}, "env.M: nothing is filled in there"),
        ("invoke/optional/0/argv", ["{x}"], "{x} is unknown; allowed"),
        ("build", None, "presets/toy.yaml: build: none: input should be"),
    ],
)
def test_what_a_preset_says_wrongly(preset, root, path, value, line):
    preset(path, value)
    assert line.lower() in said(root).lower()


# The build.

SLEEPS = {"commands": ["sleep 60"], "timeout_s": 0.3}


@pytest.mark.parametrize(
    ("build", "where", "line"),
    [
        ({"commands": ["make gone"]}, "commands", "'make gone' ended with 2: "),
        (
            {"commands": ["no-such-make"]},
            "commands",
            "no-such-make: No such file or directory; ins",
        ),
        ({"commands": ["sh -c 'kill -9 $$'"]}, "commands", "ended with 137 (killed; was there mem"),
        (SLEEPS, "timeout_s", "the build did not end within 0.3 s ('sleep 60'); raise build.timeo"),
        (
            {"binaries": {"bench": "out/bench"}},
            "binaries.bench",
            "the build made no file out/bench in its tree; mend the path or the commands "
            "(there is bin/bench)",
        ),
    ],
)
def test_a_build_that_fails(tmp_path, build, where, line):
    commit = toy.write(tmp_path / "toy")
    begin = time.monotonic()
    with pytest.raises(UserError) as raised:
        binary.provide(toy.runtime(tmp_path / "toy", commit, build=build), tmp_path / "w", tmp_path)
    assert str(raised.value).startswith(f"runtimes.toy.build.{where}: ")
    assert line in str(raised.value) and "\n" not in str(raised.value)
    assert time.monotonic() - begin < 50
    assert not list((tmp_path / "w" / "builds").glob("*/built.json"))


def test_a_commit_that_is_not_there(tmp_path):
    toy.write(tmp_path / "toy")
    with pytest.raises(UserError, match=r"^runtimes.toy.source: .* has no commit 0{40}; .*pin"):
        binary.provide(toy.runtime(tmp_path / "toy", "0" * 40), tmp_path / "w", tmp_path)


def test_a_failing_build_ends_the_command_with_one_line_and_leaves_nothing(tmp_path, root):
    """By the command line, as Snakemake runs it: no traceback, status 2, no result."""
    commit = toy.write(tmp_path / "toy")
    here = tmp_path / "root"
    here.mkdir()
    for name in ("envs", "templates"):
        shutil.copytree(root / name, here / name)
    config = dict(tiny.config("qwen3_moe"))
    config = yaml.safe_dump(config, default_flow_style=True, width=10**6).strip()
    study = yaml.safe_load(STUDY.format(config=config, url=tmp_path / "toy", memory="null"))
    study["runtimes"]["toy"] |= {
        "preset": "mlxcel",
        "build": {"commands": ["make gone"]},
        "framework": {**toy.FRAMEWORK, "value": toy.PIN},
    }
    study["runtimes"]["toy"]["source"]["commit"] = commit
    study["machine"] = {"name": "a-test-machine", "backend": "cpu"}
    (here / "s.yaml").write_text(yaml.safe_dump(study))
    env = os.environ | {"PYTHONPATH": str(root / "workflow")}
    env.pop("MOESCOPE_STUDY", None)
    done = subprocess.run(
        [sys.executable, "-m", "moescope", "--root", str(here), "run", "build", "toy",
         "--study", str(here / "s.yaml"), "--log", str(here / "b.log")],
        env=env, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2 and "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("moescope: ")]
    assert line.startswith("moescope: runtimes.toy.build.commands: 'make gone' ended with 2: ")
    assert "see work/builds/" in line and line in (here / "b.log").read_text()
    assert not list(here.glob("results/**/*")) and not list((here / "work" / "tmp").iterdir())


# The runs.

DECODE = 'printf("Decode: %.4f ms (%.4f tok/s)\\n", (t2 - t1) * 1e3, tokens / (t2 - t1));'
START = "double step = 1e-3"
LOOSE = r"Decode: (?P<decode_ms>\S+) ms \((?P<rate>\S+) tok/s\)"


def printing(text):
    return lambda source: source.replace(DECODE, f'printf("{text}\\n");')


def first(code):
    return lambda source: source.replace(START, f"{code} {START}")


@pytest.mark.parametrize(
    ("change", "pattern", "kind", "line"),
    [
        (
            printing("Decode: nan ms (nan tok/s)"),
            LOOSE,
            "failed",
            "the output's decode_ms is 'nan'",
        ),
        (printing("Decode: inf ms (1 tok/s)"), LOOSE, "failed", "the output's decode_ms is 'inf'"),
        (printing("Decode: -- ms (1 tok/s)"), LOOSE, "failed", "is '--', which is no number"),
        (printing("Decode: 0 ms (0 tok/s)"), None, "failed", "which is no measurement"),
        (printing("Done."), None, "failed", "no value decode_ms (for decode_s); looked for"),
        (first("return 0;"), None, "failed", "holds no run; looked for '"),
        (first("abort();"), None, "crash", "a short run: crashed (status 134)"),
        (first("raise(SIGSEGV);"), None, "crash", "a short run: crashed (status 139)"),
        (first("raise(SIGTERM);"), None, "killed", "was ended by somebody else (status 143)"),
        (first("raise(SIGKILL);"), None, "out_of_memory", "ran out of memory (status 137)"),
        (
            first('fprintf(stderr, "cannot open weights\\n"); return 3;'),
            None,
            "failed",
            "a short run: failed (status 3): cannot open weights",
        ),
        (first("rest(60);"), None, "timeout", "did not end within the time limit"),
    ],
)
def test_a_tool_that_does_not_measure(tmp_path, change, pattern, kind, line):
    commit = toy.write(tmp_path / "toy")
    source = tmp_path / "toy" / "bench.c"
    changed = change(source.read_text())
    assert changed != source.read_text()
    source.write_text("#include <signal.h>\n" + changed)
    toy.git(tmp_path / "toy", "commit", "--quiet", "--all", "-m", "mistake")
    commit = toy.git(tmp_path / "toy", "rev-parse", "HEAD").strip()
    invoke = copy.deepcopy(toy.INVOKE)
    if pattern:
        invoke["output"]["once"][4] = pattern
    runtime = toy.runtime(tmp_path / "toy", commit, invoke=invoke)
    tool = binary.provide(runtime, tmp_path / "work", tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    with command.CommandWorker(tool) as worker, pytest.raises(WorkerError) as raised:
        worker.ask("load", 1.0 if kind == "timeout" else 20.0, path=str(model))
    assert raised.value.kind == kind
    assert line in raised.value.message
