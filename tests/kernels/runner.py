"""Runs the checks of one module and reports each as a line of JSON. Arm's interpreter, no pytest.

    python -m kernels.runner kernels.formats [NAME ...]

A check is a function ``check_*`` without parameters, or with ``CASES = {check: [case, ...]}`` one
run for each case. What it prints or returns comes back; ``Skip`` says why it cannot run here.
"""

import contextlib
import importlib
import io
import json
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from kernels import Skip


def checks(module: Any) -> dict[str, Callable[[], Any]]:
    """Name (with its case in brackets) -> what runs it."""
    cases = getattr(module, "CASES", {})
    found: dict[str, Callable[[], Any]] = {}
    for name, function in vars(module).items():
        if not name.startswith("check_"):
            continue
        if name in cases:
            for case in cases[name]:
                found[f"{name}[{case}]"] = lambda function=function, case=case: function(case)
        else:
            found[name] = function
    return found


def main() -> None:
    """Run all checks of the module, or those named."""
    module = importlib.import_module(sys.argv[1])
    wanted = sys.argv[2:]
    for name, function in checks(module).items():
        if wanted and not any(name.startswith(w) for w in wanted):
            continue
        begun = time.perf_counter()
        row: dict[str, Any] = {"check": name, "outcome": "passed", "message": ""}
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said):
                row["found"] = function()
        except Skip as reason:
            row |= {"outcome": "skipped", "message": str(reason)}
        except Exception:
            row |= {"outcome": "failed", "message": traceback.format_exc(limit=6)}
        row["message"] += said.getvalue()
        row["seconds"] = round(time.perf_counter() - begun, 3)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
