"""What is stale after which change: by the plan, and by Snakemake itself in a fresh clone."""

import base64
import copy
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moescope.errors import UserError
from moescope.files import write_json, write_text
from moescope.onerun import hold
from moescope.study import crossover
from moescope.study.explain import explain
from moescope.study.load import load, read_yaml
from moescope.study.plan import OUTPUTS, Plan
from moescope.study.schema import Machine
from moescope.task import INGREDIENTS

MACHINE = Machine(name="a-test-machine", backend="cpu")


def fill(plan: Plan, root: Path, seconds: float = 2.0) -> None:
    """Put a result, though an empty one, where each job's would stand."""
    for job in plan:
        for name in OUTPUTS[job.stage]:
            write_text(root / job.folder / name, "{}\n")
        write_json(root / job.folder / "ingredients.json",
                   {"schema": INGREDIENTS, "key": job.key, **job.ingredients})  # fmt: skip
        if job.stage == "fetch":
            write_json(root / job.folder / "manifest.json", {"bytes": 1})
        write_json(root / job.folder / "cost.json", {"seconds": seconds, "peak_memory": 2**30})


@pytest.fixture
def repository(root, tmp_path):
    """The parts of the repository that keys are made of, with results of the embedded study."""
    for name in ("envs", "templates"):
        shutil.copytree(root / name, tmp_path / name)
    config = read_yaml(root / "config.yaml")
    fill(plan(config, tmp_path), tmp_path)
    return config, tmp_path


def plan(config, root) -> Plan:
    return Plan(load(config, "config.yaml", root), MACHINE, root)


def stale(config, root) -> set[str]:
    return {job.name for job in plan(config, root).stale()}


def changed(config, *path, value):
    config = copy.deepcopy(config)
    place = config
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    return config


LAST = {"analyse/embedded", f"record/embedded@{MACHINE.name}"}


def test_nothing_is_stale_with_all_results(repository):
    assert stale(*repository) == set()


def test_the_order_of_keys_in_the_study_does_not_count(repository):
    config, root = repository
    turned = json.loads(json.dumps(config, sort_keys=True))
    assert {k: turned[k] for k in reversed(turned)} == config
    turned["shape"] = dict(reversed(config["shape"].items()))
    assert stale(turned, root) == set()


def test_a_pin_bump_of_one_arm(repository):
    config, root = repository
    lock = (root / "envs/mlx-lm-0.32.2.txt").read_text()
    (root / "envs/mlx-lm-0.32.3.txt").write_text(lock.replace("mlx==0.32.4", "mlx==0.32.5"))
    bumped = changed(config, "runtimes", "mlx-lm", "env", value="mlx-lm-0.32.3")
    on = ("qwen3-moe", "qwen3-dense")
    expected = {"build/mlx-lm"}
    for stage in ("warmup", "trace"):
        expected |= {f"{stage}/{checkpoint}.lm" for checkpoint in on}
    for stage in ("measure", "parity"):
        expected |= {f"{stage}/{checkpoint}" for checkpoint in on}
    assert stale(bumped, root) == expected | LAST


def test_a_new_revision_of_a_checkpoint(repository):
    config, root = repository
    moved = changed(config, "checkpoints", "qwen3-moe", "source", "seed", value=99)
    expected = {f"{stage}/qwen3-moe" for stage in ("fetch", "inspect", "measure", "parity")}
    expected |= {
        f"{stage}/qwen3-moe.{arm}" for stage in ("warmup", "trace") for arm in ("vlm", "lm")
    }
    assert stale(moved, root) == expected | LAST


@pytest.mark.parametrize(
    ("path", "value", "stages"),
    [
        (("study", "session"), 99, {"measure", "trace"}),
        (("rounds", "count"), 7, {"measure"}),
        (("trace", "passes"), 5, {"trace"}),
        (("claims", 0, "all", 0, "than"), 0.1, set()),
        (("shape", "generate"), 65, {"warmup", "measure", "trace", "parity"}),
        (("limits", "parity"), {"decided_gap": 1.0}, {"parity"}),
        (("parity",), {"generate": 64}, {"parity"}),
    ],
)
def test_a_parameter_concerns_its_stages(repository, path, value, stages):
    config, root = repository
    found = stale(changed(config, *path, value=value), root)
    assert {name.split("/")[0] for name in found} == stages | {"analyse", "record"}
    assert found >= LAST


def test_the_fused_kernels_are_code_of_the_arms_that_fuse(repository):
    config, root = repository
    fused = {**config["arms"]["vlm"], "role": "candidate", "patches": ["fused"]}
    jobs = plan(changed(config, "arms", "fused", value=fused), root)
    concerned = {job.name for job in jobs if any(name.startswith("kernels") for name in job.code)}
    some = next(iter(config["checkpoints"]))
    assert {f"warmup/{some}.fused", f"trace/{some}.fused", f"measure/{some}"} <= concerned
    assert f"parity/{some}" in concerned
    assert not {f"warmup/{some}.vlm", f"trace/{some}.vlm", f"fetch/{some}"} & concerned
    assert "kernels/sources/router.h" in jobs.job("trace", f"{some}.fused").code


def test_a_template_concerns_the_record_alone(repository):
    config, root = repository
    with open(root / "templates" / "record.md.j2", "a") as file:
        file.write("\nmore\n")
    assert stale(config, root) == {f"record/embedded@{MACHINE.name}"}


def test_another_machine_measures_again_but_fetches_nothing(repository):
    config, root = repository
    other = Plan(load(config, "c", root), Machine(name="another", backend="cpu"), root)
    stages = {job.stage for job in other.stale()}
    assert stages == {"build", "warmup", "measure", "trace", "parity", "analyse", "record"}


def test_going_back_finds_the_old_results(repository):
    config, root = repository
    moved = changed(config, "rounds", "count", value=9)
    fill(plan(moved, root), root)
    assert stale(moved, root) == set()
    assert stale(config, root) == set()


def test_explain_names_what_changed_and_the_cost(repository):
    config, root = repository
    moved = changed(config, "rounds", "count", value=9)
    text = explain(plan(moved, root))
    assert "rounds.count: 5 -> 9" in text
    assert "measure/qwen3-moe" in text and "trace/" not in text
    assert "reads measure/qwen3-moe, which is stale too: " in text
    # five measurements, the analysis and the record, two seconds each in the earlier run
    assert "about 14 s; at most 1.0 GiB" in text


def test_explain_names_a_file_that_it_cannot_read(repository):
    config, root = repository
    job = plan(config, root).job("measure", "qwen3-moe")
    write_text(root / job.folder / "cost.json", "{")
    with pytest.raises(UserError, match=f"{job.key}/cost.json: not JSON"):
        explain(plan(changed(config, "rounds", "count", value=9), root))


def test_explain_says_nothing_to_do(repository):
    assert "nothing to do" in explain(plan(*repository))


def test_explain_counts_the_bytes_to_fetch(repository):
    config, root = repository
    job = plan(config, root).job("fetch", "qwen3-moe")
    write_json(root / job.folder / "manifest.json", {"bytes": 123_000_000})
    moved = changed(config, "checkpoints", "qwen3-moe", "source", "seed", value=99)
    assert "make qwen3-moe: 0.12 GB" in explain(plan(moved, root))


def test_a_result_without_its_ingredients_is_stale(repository):
    config, root = repository
    job = plan(config, root).job("inspect", "qwen3-moe")
    (root / job.folder / "ingredients.json").unlink()
    assert stale(config, root) == {"inspect/qwen3-moe"}


# Snakemake agrees with the plan, in a clone whose file times say nothing.


@pytest.fixture(scope="module")
def clone(root, tmp_path_factory):
    """A clone of the repository as it stands, with a result for each job of the study."""
    folder = tmp_path_factory.mktemp("clone") / "moescope"
    files = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root, capture_output=True, text=True, check=True, timeout=60,
    ).stdout.split("\0")  # fmt: skip
    for name in files:
        if name and (root / name).is_file() and not name.startswith("results/"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, folder / name)
    text = (folder / "config.yaml").read_text()
    machine = "machine: {name: a-test-machine, backend: cpu}\n"
    (folder / "config.yaml").write_text(text.replace("\nstudy:", f"\n{machine}\nstudy:", 1))
    fill(plan(read_yaml(folder / "config.yaml"), folder), folder)
    return folder


def dry_run(folder: Path, *more: str) -> subprocess.CompletedProcess:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MOESCOPE"))}
    return subprocess.run(
        [sys.executable, "-m", "snakemake", "-n", "record", *more],
        cwd=folder, env=env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def planned(result) -> set[str]:
    """ "stage/subject" of the jobs that a dry run lists (the target itself left out)."""
    assert result.returncode == 0, result.stdout + result.stderr
    jobs, rule = set(), None
    for line in (result.stdout + result.stderr).splitlines():
        line = line.strip()
        if line.startswith(("rule ", "localrule ")):
            rule = line.split()[1].rstrip(":").replace("render", "record")
        elif line.startswith("wildcards:"):
            jobs.add(f"{rule}/{line.split('subject=')[1].split(',')[0]}")
    return jobs


@pytest.mark.parametrize(("seed", "comment"), [(1, ""), (2, "# a comment\n")])
def test_a_clone_with_results_has_nothing_to_do_whatever_the_times(clone, seed, comment):
    """Nor after a comment in the code."""
    path = clone / "workflow/moescope/measure/stage.py"
    text = path.read_text()
    path.write_text(f"{comment}{text}")
    try:
        files = [path for path in clone.rglob("*") if path.is_file()]
        random.Random(seed).shuffle(files)
        for age, file in enumerate(files):
            os.utime(file, (1_700_000_000 + 60 * age,) * 2)
        result = dry_run(clone)
    finally:
        path.write_text(text)
    assert "Nothing to be done" in result.stdout + result.stderr


def test_changed_code_concerns_its_stage(clone):
    path = clone / "workflow/moescope/measure/stage.py"
    text = path.read_text()
    path.write_text(f"{text}\n_ANOTHER = 1\n")
    try:
        found = planned(dry_run(clone))
    finally:
        path.write_text(text)
    assert {name.split("/")[0] for name in found} == {"measure", "analyse", "record"}


def test_snakemake_lists_exactly_the_stale_jobs(clone):
    found = planned(dry_run(clone, "--config", "rounds={'count': 6}"))
    config = read_yaml(clone / "config.yaml")
    config["rounds"]["count"] = 6
    assert found == stale(config, clone) != set()


@pytest.mark.parametrize(("given", "whole"), [((), 1), (("gpu=3",), 3), (("gpu=0",), 1)])
def test_what_takes_times_has_the_gpu_alone(clone, given, whole):
    """Warm-up and parity may share it, by the command line."""
    more = ("--resources", *given) if given else ()
    result = dry_run(clone, "--config", "study={'session': 99}", "shape={'prompt': 48}", *more)
    assert result.returncode == 0, result.stdout + result.stderr
    found, rule = {}, None
    for line in (result.stdout + result.stderr).splitlines():
        if line.startswith("rule "):
            rule = line.split()[1].rstrip(":")
        elif "gpu=" in line and line.strip().startswith("resources:"):
            found.setdefault(rule, set()).add(int(line.split("gpu=")[1].split(",")[0]))
    assert found == {"warmup": {1}, "parity": {1}, "measure": {whole}, "trace": {whole}}


def test_what_an_interrupted_run_leaves_behind_forces_nothing(clone):
    """A result is there as a whole or not at all: Snakemake's marks of files say nothing."""
    plan_of = plan(read_yaml(clone / "config.yaml"), clone)
    marks = clone / ".snakemake" / "incomplete"
    marks.mkdir(parents=True, exist_ok=True)
    for name in plan_of.stage("measure")[0].outputs:
        mark = marks / base64.urlsafe_b64encode(name.encode()).decode()
        mark.write_text('{"external_jobid": null}')
    try:
        result = dry_run(clone)
    finally:
        shutil.rmtree(clone / ".snakemake")
    assert "Nothing to be done" in result.stdout + result.stderr


def test_a_second_run_in_a_folder_is_refused_and_a_tool_is_not(clone):
    def snakemake(*command):
        return subprocess.run(
            [sys.executable, "-m", "snakemake", *command],
            cwd=clone, capture_output=True, text=True, timeout=120,
        )  # fmt: skip

    held = hold(clone)
    try:
        second = snakemake("--config", "study={'title': 'another'}")
        tool = snakemake("history")
    finally:
        held.release()
    said = second.stdout + second.stderr
    assert second.returncode != 0
    assert "another run is under way in this folder" in said and "Traceback" not in said
    assert "rule analyse" not in said.split("another run")[1]
    assert tool.returncode == 0, tool.stdout + tool.stderr


def test_a_run_holds_its_folder_until_it_ends(clone):
    """Seen by a job of it, in the place of which this stands."""
    main = clone / "workflow/moescope/__main__.py"
    text = main.read_text()
    main.write_text(
        "from pathlib import Path\n"
        "from .errors import UserError\n"
        "from .onerun import hold\n"
        "try:\n"
        "    hold(Path.cwd())\n"
        "except UserError:\n"
        "    Path('work/seen').write_text('held')\n"
        "raise SystemExit(1)\n"
    )
    try:
        run = subprocess.run(
            [sys.executable, "-m", "snakemake", "--config", "study={'title': 'another'}"],
            cwd=clone, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    finally:
        main.write_text(text)
    assert run.returncode != 0 and (clone / "work/seen").read_text() == "held"
    hold(clone).release()


def test_a_run_that_was_killed_leaves_no_lock(clone):
    """Snakemake's own lock outlives a kill; the folder's dies with its process."""
    main = clone / "workflow/moescope/__main__.py"
    text = main.read_text()
    main.write_text(
        "import os, signal\n"
        "from pathlib import Path\n"
        "import psutil\n"
        "with Path('work/seen').open('a') as file:\n"
        "    file.write('x')\n"
        "for parent in psutil.Process().parents():\n"
        "    if parent.cmdline()[1:3] == ['-m', 'snakemake']:\n"
        "        os.kill(parent.pid, signal.SIGKILL)\n"
        "raise SystemExit(1)\n"
    )
    seen = clone / "work/seen"
    seen.unlink(missing_ok=True)
    try:
        for times in (1, 2):
            subprocess.run(
                [sys.executable, "-m", "snakemake", "--config", "study={'title': 'another'}"],
                cwd=clone, capture_output=True, text=True, timeout=120,
            )  # fmt: skip
            assert seen.read_text() == "x" * times
    finally:
        main.write_text(text)


def test_a_bad_study_ends_before_any_job(clone):
    result = dry_run(clone, "--config", "rounds={'count': 1}")
    assert result.returncode != 0
    assert "rounds.count: '1': " in result.stdout + result.stderr
    assert "Traceback" not in result.stdout + result.stderr


def test_slices_are_a_change_of_the_measurement_alone(repository):
    config, root = repository
    assert not stale(changed(config, "rounds", "slices", value=1), root)
    names = stale(changed(config, "rounds", "slices", value=4), root)
    assert {name.partition("/")[0] for name in names} == {"measure", "analyse", "record"}
    sliced = plan(changed(config, "rounds", "slices", value=4), root)
    assert all("worker.sliced" in job.code for job in sliced.stage("measure"))
    assert not any("worker.sliced" in job.code for job in plan(config, root))


def test_a_crossover_is_a_change_of_the_analysis_alone(repository):
    config, root = repository
    asked = {"over": "expert_width", "checkpoints": ["qwen3-moe", "qwen3-dense"]}
    names = stale(changed(config, "crossover", value=asked), root)
    assert {name.partition("/")[0] for name in names} == {"analyse", "record"}


def test_a_new_entry_of_the_table_reaches_the_arms_that_ask_it(root, tmp_path, monkeypatch):
    table = tmp_path / "crossover.json"
    entries = json.loads(crossover.TABLE.read_text())
    monkeypatch.setattr(crossover.widest, "__defaults__", (table,))

    def keys(change) -> dict[str, str]:
        (entry,) = (one for one in entries["entries"] if one["device"] == "NVIDIA H200")
        entry |= change
        write_json(table, entries)
        found = {}
        for name in ("fused-crossover-h200", "fused-moe-h200"):
            study = load(read_yaml(root / f"studies/{name}.yaml"), name, root)
            found |= {f"{name} {job.name}": job.key for job in Plan(study, study.machine, root)}
        return found

    before = keys({})
    assert keys({"about": {"kind": "measured", "source": "record"}}) == before
    changed = {name for name, key in keys({"max_width": 9000}).items() if key != before[name]}
    assert changed and all(name.startswith("fused-moe-h200 ") for name in changed)
    stages = {name.split()[1].partition("/")[0] for name in changed}
    assert stages == {"warmup", "measure", "trace", "parity", "analyse", "record"}
    assert not any(name.endswith((".vlm", ".lm")) for name in changed)
