"""What all tests share: the repository, and an arm's interpreter with MLX."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def pytest_configure(config):
    """Tests of the worker need an arm's interpreter with both packages: envs/tests.txt. It is made
    once, in work/, unless MOESCOPE_ARM_PYTHON names one."""
    if "MOESCOPE_ARM_PYTHON" in os.environ or config.option.collectonly:
        return
    from moescope.files import sha256_text
    from moescope.runtimes.environments import ensure_layout

    name = "tests"
    lock = sha256_text((ROOT / "envs" / f"{name}.txt").read_text())
    interpreter = ensure_layout(name, lock, ROOT / "work", ROOT)
    os.environ["MOESCOPE_ARM_PYTHON"] = str(interpreter.python)


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT
