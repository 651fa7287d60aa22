"""What a trace says of itself: what it could not measure, and of a process that died under it."""

import re
from typing import Any

DIED = re.compile(r"(?P<at>.+?): the worker ended with (?P<status>\S+): (?P<last>.*)", re.DOTALL)
FAILED = "its instrumented passes: failed"  # how a trace begins that has none, for whatever reason
SIGNALS = {"134": "SIGABRT", "137": "SIGKILL", "139": "SIGSEGV"}
SILENT = "nothing on stderr"


def told(trace: dict[str, Any]) -> list[str]:
    """trace.json's "not_measured", with one line about a first attempt that died ("crashes")."""
    lines, crashes = list(trace.get("not_measured", [])), trace.get("crashes", [])
    if not crashes:
        return lines
    failed = [line for line in lines if line.startswith(FAILED)]
    if not failed:
        one = f"a first attempt at its trace: {_death(crashes[0])}; all figures are of the second"
        return [*lines, one]
    kept = [line for line in lines if line not in failed]
    if all(line.endswith(f": {text}") for line in failed for text in crashes):
        return [f"its instrumented passes: in both attempts {_death(crashes[0])}", *kept]
    return [*(f"{line}; in the attempt before, {_death(crashes[0])}" for line in failed), *kept]


def _death(text: str) -> str:
    """«kernels: the worker ended with 139: words» as people say it."""
    found = DIED.fullmatch(text)
    if not found:
        return f"the process died ({text})"
    status = found["status"]
    number = f"{status}, {SIGNALS[status]}" if status in SIGNALS else status
    last = found["last"]
    words = ", without a word" if last == SILENT else f"; the last line that it wrote is «{last}»"
    return f"the process died in «{found['at']}» ({number}){words}"
