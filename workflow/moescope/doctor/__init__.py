"""Is this host ready for the study? Each finding says what was found and, if need be, what to do.

Nothing is installed, loaded or measured; every question has a time limit.
"""

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import UserError
from ..study.plan import Plan
from . import gpu, host, study
from .finding import Finding

__all__ = ["Finding", "doctor", "render"]


def doctor(plan: Plan | None = None, root: Path | None = None) -> list[Finding]:
    """All findings, for a study's plan; without one, only what any study needs."""
    root = root or (plan.root if plan else Path())
    backend = plan.machine.backend if plan else host.backend()
    checks: list[Callable[[], Iterator[Finding]]] = [
        lambda: host.interpreter(root),
        host.uv,
        lambda: host.system(backend),
    ]
    checks += {"cpu": [host.compiler], "cuda": [gpu.nvidia, gpu.profiler], "metal": [gpu.xcode]}[
        backend
    ]
    if plan:
        for check in (study.machine, study.locks, study.sources, study.disk, study.memory):
            checks.append(lambda check=check: check(plan))
    checks.append(host.quiet)
    findings: list[Finding] = []
    for check in checks:
        try:
            findings += check()
        except UserError as error:
            findings.append(Finding(False, "check", str(error), "mend this, then ask again"))
    return findings


def render(findings: list[Finding]) -> str:
    """A line for each finding, advice below it, the verdict last."""
    width = max(len(finding.what) for finding in findings)
    lines = []
    for finding in findings:
        mark = "ok  " if finding.ok else "STOP"
        lines.append(f"{mark}  {finding.what:<{width}}  {finding.found}")
        if finding.todo:
            indent = " " * (width + 8)
            lines += textwrap.wrap(
                f"-> {finding.todo}",
                100,
                initial_indent=indent,
                subsequent_indent=f"{indent}   ",
                break_on_hyphens=False,
                break_long_words=False,
            )
    wrong = [finding.what for finding in findings if not finding.ok]
    lines.append(f"not ready: {', '.join(wrong)}" if wrong else "ready")
    return "\n".join(lines)
