"""What a check says."""

import re
import subprocess
from dataclasses import dataclass

ASK_LIMIT_S = 30


@dataclass(frozen=True)
class Finding:
    """ok is False only if the study cannot run as it is; ``todo`` may advise all the same."""

    ok: bool
    what: str
    found: str
    todo: str = ""


def ask(*command: str) -> str:
    """A command's standard output, stripped; nothing if it fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def numbers(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
