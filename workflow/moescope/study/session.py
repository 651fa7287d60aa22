"""The study that a command works on: read by the Snakefile, passed on to its jobs.

The Snakefile validates the study once and puts it, with the machine class, into the environment,
so that all jobs of a run see the same study and none reads a file that may have changed meanwhile.
"""

import json
import os
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import canonical
from .load import load, read_yaml
from .machine import detect
from .plan import Plan
from .schema import Machine, Study

VARIABLE = "MOESCOPE_STUDY"


def open_plan(config: dict[str, Any], where: str, root: Path) -> Plan:
    """Validate a study and plan it for its machine class or, if it names none, this host's.

    Raises UserError for a study that is not valid, and for one that cannot run on the class.
    """
    study = load(config, where, root)
    machine = study.machine or detect()
    if study.rounds.pinned and machine.backend == "metal":
        raise UserError(
            "macOS does not bind a process to a CPU; leave it out for a Metal machine",
            f"{where}: rounds.pinned",
        )
    return Plan(study, machine, root)


def pass_on(plan: Plan) -> None:
    """Put a plan's study and machine class, and this package, where the jobs find them."""
    value = {
        "study": plan.study.model_dump(mode="json", by_alias=True, exclude_none=True),
        "machine": plan.machine.model_dump(mode="json", exclude_none=True),
        "code": [[list(modules), found] for modules, found in plan.code.items()],
    }
    os.environ[VARIABLE] = canonical(value)
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])


def current_plan(root: Path, study_file: Path | None = None) -> Plan:
    """The plan passed on by the Snakefile, or that of a study file (default: config.yaml)."""
    passed = os.environ.get(VARIABLE)
    if study_file is None and passed:
        value = json.loads(passed)
        study = Study.model_validate(value["study"])
        code = {tuple(modules): found for modules, found in value["code"]}
        return Plan(study, Machine.model_validate(value["machine"]), root, code)
    path = study_file or root / "config.yaml"
    return open_plan(read_yaml(path), path.name, root)
