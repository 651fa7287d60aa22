"""What all tests share: the repository, and an arm's interpreter with MLX."""

import itertools
import os
import tempfile
from pathlib import Path

import jinja2
import pytest
from filelock import FileLock, Timeout
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parents[1]

# A host may stand still for seconds; what an example takes says nothing of the code.
settings.register_profile("still", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("still")


def pytest_configure(config):
    """Tests of the worker need an arm's interpreter with both packages: envs/tests.txt. It is made
    once, in work/, unless MOESCOPE_ARM_PYTHON names one."""
    _own_temporary_folder(config)
    if "MOESCOPE_ARM_PYTHON" in os.environ or config.option.collectonly:
        return
    from moescope.files import sha256_text
    from moescope.runtimes.environments import ensure_layout

    name = "tests"
    lock = sha256_text((ROOT / "envs" / f"{name}.txt").read_text())
    interpreter = ensure_layout(name, lock, ROOT / "work", ROOT)
    os.environ["MOESCOPE_ARM_PYTHON"] = str(interpreter.python)


def pytest_collection_modifyitems(items):
    """What runs MLX comes first, so that of two processes mostly one has its kernels compiled."""
    items.sort(key=lambda item: not hasattr(item.module, "tiny"))


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session", autouse=True)
def frugal():
    """Without what takes time and no test looks at: files that outlast a power cut, and templates
    that are compiled anew for each record."""
    compiled, compile_template = {}, jinja2.Environment.compile

    def once(self, source, name=None, filename=None, **more):
        key = (source, name, self.autoescape, self.trim_blocks, self.lstrip_blocks, *more.items())
        if key not in compiled:
            compiled[key] = compile_template(self, source, name, filename, **more)
        return compiled[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        patch.setattr(jinja2.Environment, "compile", once)
        yield


def _own_temporary_folder(config) -> None:
    """MLX writes what it compiles into TMPDIR in place, and a process beside that needs the same
    would read half of it: each process of pytest-xdist has a folder of its own, which it keeps."""
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        return  # this one only hands the tests out
    name = getattr(config, "workerinput", {}).get("workerid", "gw0")
    for number in itertools.count():  # another run of the tests may be on
        folder = Path(tempfile.gettempdir()) / f"moescope-tests-{os.getuid()}" / f"{name}-{number}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        config.folder_lock = FileLock(folder / "lock", blocking=False)
        try:
            config.folder_lock.acquire()
            break
        except Timeout:
            continue
    os.environ["TMPDIR"] = str(folder)
