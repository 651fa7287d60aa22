"""Which interpreter lists a synthetic checkpoint's tensors: one of its own, or the running one."""

import sys
from pathlib import Path

import pytest

from moescope.errors import UserError
from moescope.files import sha256_text
from moescope.runtimes import environments

LOCK = """\
# a comment
mlx==0.32.4 \\
    --hash=sha256:aa
mlx-cpu==0.32.4 ; sys_platform == 'linux' \\
    --hash=sha256:bb
mlx-lm==0.32.2 \\
    --hash=sha256:cc
    # via -r x.in
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs" / "some.txt").write_text(LOCK)
    installed: list[Path] = []

    def install(requirements, folder, work):
        installed.append(folder)

    monkeypatch.setattr(environments, "_install", install)
    return tmp_path, installed


def choose(place, monkeypatch, packages):
    root, installed = place
    monkeypatch.setattr(environments, "inventory", lambda interpreter: {"packages": packages})
    found = environments.ensure_layout("some", sha256_text(LOCK), root / "work", root)
    return found.python, installed


def test_a_lock_names_versions():
    expected = {"mlx": "0.32.4", "mlx-cpu": "0.32.4", "mlx-lm": "0.32.2"}
    assert environments.locked(LOCK) == expected


def test_the_running_interpreter_serves_if_it_has_the_locked_model_code(place, monkeypatch):
    packages = {"mlx": "0.32.4", "mlx-cuda-13": "0.32.4", "mlx-lm": "0.32.2"}
    python, installed = choose(place, monkeypatch, packages)
    assert python == Path(sys.executable) and installed == []


@pytest.mark.parametrize("packages", [{}, {"mlx": "0.32.4"}, {"mlx": "0.32.3", "mlx-lm": "0.32.2"}])
def test_any_other_version_means_an_environment_of_its_own(place, monkeypatch, packages):
    python, installed = choose(place, monkeypatch, packages)
    assert [folder / "bin" / "python" for folder in installed] == [python]
    assert python != Path(sys.executable)


def test_a_lock_that_changed_is_refused(place):
    with pytest.raises(UserError, match="has changed"):
        environments.ensure_layout("some", "0" * 64, place[0] / "work", place[0])
