"""Runs a module of tests/kernels in the arm's interpreter, once, and gives each check's outcome."""

import ast
import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
LIMIT_S = 900  # a minute or two on an idle host


@cache
def outcomes(module: str) -> dict[str, dict[str, Any]]:
    """Check name -> its line (see kernels/runner.py); {} of a check that never came to its end."""
    import tiny

    workflow = HERE.parent / "workflow"
    environment = os.environ | {
        "PYTHONPATH": f"{workflow}{os.pathsep}{HERE}",
        "MOESCOPE_TINY": json.dumps(tiny.CONFIGS),
        "MLX_DISABLE_COMPILE": "1",
    }
    argv = [os.environ["MOESCOPE_ARM_PYTHON"], "-m", "kernels.runner", f"kernels.{module}"]
    try:
        done = subprocess.run(
            argv, cwd=HERE, env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:  # caught, so that the others do not wait as long again
        return {"": {"outcome": "failed", "message": f"not done in {LIMIT_S} s"}}
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found = {row["check"]: row for row in rows}
    if done.returncode:
        found[""] = {"outcome": "failed", "message": done.stderr[-4000:]}
    return found


def names(module: str) -> list[str]:
    """The checks of a module, by its text: known before anything runs."""
    tree = ast.parse((HERE / "kernels" / f"{module}.py").read_text(encoding="utf-8"))
    found = [n.name for n in tree.body if isinstance(n, ast.FunctionDef)]
    return [name for name in found if name.startswith("check_")]


def require(module: str, name: str) -> None:
    """Fail or skip as the check did, with what it said; all its cases count."""
    rows = outcomes(module)
    if "" in rows:
        pytest.fail(f"the checks of {module} broke off: {rows['']['message']}")
    mine = {k: v for k, v in rows.items() if k == name or k.startswith(name + "[")}
    assert mine, f"{name} did not run"
    failed = {k: v["message"] for k, v in mine.items() if v["outcome"] == "failed"}
    assert not failed, "\n".join(f"{k}: {text}" for k, text in failed.items())
    if all(v["outcome"] == "skipped" for v in mine.values()):
        pytest.skip(next(iter(mine.values()))["message"])
