# The plan says which jobs there are and what they read; a rule only asks it.
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(workflow.basedir) / "workflow"))

from moescope.errors import UserError
from moescope.onerun import hold
from moescope.study.load import read_yaml
from moescope.study.plan import OUTPUTS
from moescope.study.session import open_plan, pass_on

PYTHON = shlex.quote(sys.executable)


def read_plan():
    """The study of this run, planned; its complaints end the run before any job."""
    files = workflow.configfiles or ["config.yaml"]
    try:
        for name in files:
            read_yaml(Path(name))  # Snakemake has merged them and hides keys that stand twice
        plan = open_plan(dict(config), Path(files[-1]).name, Path.cwd())
    except UserError as error:
        sys.exit(f"moescope: {error}")
    pass_on(plan)
    if plan.unpinned:
        keys = ", ".join(plan.unpinned.values())
        print(f"moescope: not pinned yet: {keys}; run `snakemake pin`", file=sys.stderr)
    return plan


def only_run():
    """The folder is held while results are made: no second run in this folder beside it. The tools make none."""
    targets = set(workflow.dag_settings.targets)  # none: the default, the record
    tools = targets and targets <= {"explain", "audit", "doctor", "history"}
    if tools or not workflow.is_main_process:
        return
    try:
        hold(Path.cwd())
    except UserError as error:
        sys.exit(f"moescope: {error}")


def gpu_jobs():
    """How many GPU jobs may run at once: one, or what `--resources gpu=N` says."""
    given = workflow.global_resources.get("gpu")
    return int(given and given.value or 1)


def result(stage):
    """The files of a stage's result."""
    base = "results/" + ("records" if stage == "record" else stage)
    return [f"{base}/{{subject}}/{{key}}/{name}" for name in (*OUTPUTS[stage], "ingredients.json")]


def upstream(stage):
    """Input function: the results that a job reads. Their files' times mean nothing."""

    def inputs(wildcards):
        job = PLAN.job(stage, wildcards.subject)
        if job.key != wildcards.key:
            raise ValueError(f"{job.name}: {wildcards.key} is not the current key, {job.key} is")
        return [ancient(path) for path in PLAN.inputs(job)]

    return inputs


def stage_command(stage):
    return f"exec {PYTHON} -m moescope run {stage} {{wildcards.subject}} --key {{wildcards.key}} --log {{log}}"


def tool_command(tool, options=""):
    return f"exec {PYTHON} -m moescope {tool} {options} 2> >(tee {{log}} >&2)"


def study_file():
    """The file that this run's study stands in."""
    return shlex.quote(str((workflow.configfiles or ["config.yaml"])[-1]))
