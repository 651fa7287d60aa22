"""A toy runtime from a git repository beside mlx-lm in one study, through the whole pipeline."""

import inspect
import os
import shutil
import statistics

import pytest
import yaml

import stages
import tiny
import toy_runtime as toy
from moescope.checkpoints import materialise
from moescope.errors import UserError
from moescope.files import read_json
from moescope.measure import guard
from moescope.run import run_job
from moescope.runtimes import binary, environments, spec
from moescope.runtimes.environments import Interpreter
from moescope.study.explain import explain
from moescope.study.load import load
from moescope.study.pin import pin
from moescope.study.plan import Plan
from moescope.study.schema import Machine
from moescope.verdict.results import read_runs

pytestmark = [
    pytest.mark.skipif(
        not (shutil.which("git") and shutil.which("make") and shutil.which("cc")),
        reason="needs git, make and a C compiler",
    ),
    pytest.mark.skipif(
        "unpinned" not in inspect.getsource(Plan), reason="the plan knows no commands yet"
    ),
]
MACHINE = Machine(name="a-test-machine", backend="cpu")
STUDY = """\
schema: moescope/study/1
study: {{name: toy, title: A toy beside mlx-lm, question: "Is it as fast?"}}
checkpoints:
  moe:
    source:
      kind: synthetic
      layout: mlx-lm-0.32.2
      package: mlx-lm
      seed: 1
      dtype: float32
      quantization: {{default: {{mode: affine, bits: 4, group_size: 64}}}}
      config: {config}
runtimes:
  lm: {{kind: python, package: mlx-lm, env: mlx-lm-0.32.2}}
  toy:
    kind: command
    preset: toy
    source:
      kind: git
      url: {url}
      ref: main
arms:
  lm: {{runtime: lm, role: reference}}
  lm-null: {{runtime: lm, role: "null"}}
  toy: {{runtime: toy, role: candidate, env: {{TOY_MS: "2"}}}}
  toy-fused: {{runtime: toy, role: candidate, env: {{TOY_MS: "2", TOY_FUSED: "1"}}}}
shape: {{prompt: 16, generate: 17}}
rounds: {{count: 3, warmup: 1}}
trace: {{passes: 2, tokens: 4}}
guard: {{enabled: false}}
limits: {{memory: {memory}}}
claims:
  - name: on-par
    says: The toy decodes at the reference's rate.
    of: wall
    all: [{{quantity: ratio.toy, is: ">", than: 0.9}}]
"""


def build(folder, root):
    """(root of a repository, folder of the toy), below a folder."""
    here = folder / "root"
    here.mkdir()
    for name in ("envs", "templates"):
        shutil.copytree(root / name, here / name)
    (here / "workflow").symlink_to(root / "workflow")
    presets = folder / "presets"
    presets.mkdir()
    text = {"invoke": toy.INVOKE, "build": toy.BUILD, "framework": toy.FRAMEWORK}
    (presets / "toy.yaml").write_text(yaml.safe_dump(text))
    toy.write(folder / "toy", message="first")
    return here, folder / "toy"


def enter(patch, folder):
    """Work with what was built there; mlx-lm runs in the tests' own interpreter."""
    import agreement

    patch.setattr(spec, "PRESETS", folder / "presets")
    python = Interpreter(agreement.interpreter().python, dict(os.environ))
    patch.setattr(environments, "provide", lambda *_: python)
    patch.setattr(materialise, "ensure_layout", lambda *_: python)
    patch.setenv("MOESCOPE_LOCK_DIR", str(folder))
    stages.little_bandwidth(patch)
    patch.setitem(guard.DEFAULTS, "enabled", False)  # others may be compiling here


@pytest.fixture
def world(tmp_path, monkeypatch, root):
    enter(monkeypatch, tmp_path)
    return build(tmp_path, root)


@pytest.fixture(scope="module")
def measured(tmp_path_factory, root):
    """(world, its plan, all done): a checkpoint that fits, and one too wide for the cap."""
    folder = tmp_path_factory.mktemp("measured")
    world = build(folder, root)
    with pytest.MonkeyPatch.context() as patch:
        enter(patch, folder)
        path = write(world, memory=520 << 20)
        config = yaml.safe_load(path.read_text())
        wide = yaml.safe_load(yaml.safe_dump(config["checkpoints"]["moe"]))
        wide["source"]["config"]["num_experts"] = 512
        config["checkpoints"]["wide"] = wide
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        assert plan(world).unpinned == {
            "build/toy": "runtimes.toy.source.commit, runtimes.toy.framework.value"
        }
        assert "run `snakemake pin`" in explain(plan(world))
        pin(world[0], path)
        first = plan(world)
        assert first.unpinned == {}
        run(first)
        assert not first.stale()
    return world, first


def write(world, memory="null"):
    here, url = world
    config = dict(tiny.config("qwen3_moe"))
    text = STUDY.format(config=yaml.safe_dump(config, default_flow_style=True, width=10**6).strip(),
                        url=url, memory=memory)  # fmt: skip
    (here / "study.yaml").write_text(text)
    return here / "study.yaml"


def plan(world):
    here = world[0]
    config = yaml.safe_load((here / "study.yaml").read_text())
    return Plan(load(config, "study.yaml", here), MACHINE, here)


def run(planned):
    """Run what is missing, in order; returns the names of the jobs that ran."""
    ran = []
    for job in planned:
        if not job.done(planned.root):
            run_job(job, planned.root)
            ran.append(job.name)
    return ran


def repin(world):
    path = world[0] / "study.yaml"
    lines = [
        "      commit: null" if line.strip().startswith("commit:") else line
        for line in path.read_text().splitlines()
    ]
    path.write_text("\n".join(lines) + "\n")
    return pin(world[0], path)


def test_a_binary_is_measured_beside_mlx_lm(measured):
    (here, _), first = measured
    rows = read_runs(here / first.job("measure", "moe").folder / "runs.jsonl")
    built = read_json(here / first.job("build", "toy").folder / "manifest.json", binary.SCHEMA)
    assert [row["valid"] for row in rows] == [True] * 12, [row["why"] for row in rows]
    for row in rows:
        versions = row["process"]["versions"]
        if row["arm"].startswith("toy"):
            assert versions["binary_sha256"] == built["binaries"]["bench"]["sha256"]
            assert versions["mlx"] == toy.PIN
            assert row["forwards"] == 16 and row["token_s"] is None
            assert row["decode_s"] / 16 > 0.002
    # A stall of the host is in one run, not in most.
    typical = statistics.median(row["decode_s"] for row in rows if row["arm"].startswith("toy"))
    assert typical / 16 < 0.01
    record = (here / first.record.folder / "record.md").read_text()
    assert "parity: the command chooses its own prompt" in record
    assert "a command has no scopes" in record


def test_a_checkpoint_that_does_not_fit_is_skipped_with_its_numbers(measured):
    (here, _), first = measured
    assert read_runs(here / first.job("measure", "wide").folder / "runs.jsonl") == []
    record = read_json(here / first.record.folder / "record.json")
    text = (here / first.record.folder / "record.md").read_text()
    assert "GiB are allowed here (the cap of 0.5 GiB); skipped before launch" in text
    assert record["results"]["moe"]["runs"]["valid"]["value"] == 12


def test_only_the_stages_of_a_binary_follow_its_pin(measured, monkeypatch):
    """A commit that leaves the framework where it was, then one that moves it."""
    world, _ = measured
    enter(monkeypatch, world[0].parent)
    here, url = world
    for message, value, moved in (("slower", toy.PIN, False), ("bump", toy.OTHER_PIN, True)):
        commit = toy.write(url, pin=value, message=message)
        repin(world)
        bumped = plan(world)
        said = explain(bumped)
        assert commit in said or commit[:12] in said
        assert ("runtime.framework.value" in said) is moved
        stale = {job.name for job in bumped.stale()}
        assert stale == {
            "build/toy", "analyse/toy", f"record/toy@{MACHINE.name}",
            *(f"{stage}/{name}.{arm}" for stage in ("warmup", "trace")
              for name in ("moe", "wide") for arm in ("toy", "toy-fused")),
            *(f"{stage}/{name}" for stage in ("measure", "parity") for name in ("moe", "wide")),
        }  # fmt: skip
    run_job(bumped.job("build", "toy"), here)
    moved = read_json(here / bumped.job("build", "toy").folder / "manifest.json", binary.SCHEMA)
    assert moved["framework"]["value"] == toy.OTHER_PIN


def test_a_swapped_binary_is_refused_and_a_flag_that_is_gone_stops_before_any_run(world):
    here, url = world
    write(world)
    pin(here, here / "study.yaml")
    planned = plan(world)
    for name in ("fetch/moe", "build/toy"):
        run_job(planned.job(*name.split("/")), here)
    (path,) = (here / "work" / "builds").glob("*/tree/bin/bench")
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(UserError, match="not the binary that was built here"):
        run_job(planned.job("warmup", "moe.toy"), here)
    toy.write(url, flag="--tokens", message="another flag")
    repin(world)
    planned = plan(world)
    with pytest.raises(UserError, match="does not know --max-tokens at this pin"):
        run_job(planned.job("build", "toy"), here)
    assert not (here / "results" / "measure").exists()
    assert not (here / planned.job("build", "toy").folder).exists()


@pytest.mark.parametrize("name", ["issue-1859-gb10", "issue-1859-m3ultra"])
def test_the_seeds_matrix_is_planned_before_it_is_pinned(name, root):
    config = yaml.safe_load((root / "studies" / f"{name}.yaml").read_text())
    study = load(config, name, root)
    planned = Plan(study, study.machine, root)
    assert set(planned.unpinned) == {f"fetch/{c}" for c in study.checkpoints} | {"build/mlxcel"}
    measured = {job.subject for job in planned.stage("measure")}
    assert measured == set(study.checkpoints)
    assert "run `snakemake pin`" in explain(planned)
    for line in (root / "studies" / f"{name}.yaml").read_text().splitlines():
        assert line.count("repo:") <= 1
    gather = study.arms["mlxcel-gather"]
    assert gather.env == {"MLXCEL_FUSED_MOE": "0"}
