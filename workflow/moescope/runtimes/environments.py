"""A Python runtime's pin made into an environment of its own, outside the workflow's graph.

An environment stands in ``work/envs/<name>-<lock>/`` and is made again whenever it is missing.
What is committed is its manifest: the version of every package and the hash of MLX's library,
against which an environment is checked before an arm runs in it.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import read_json, sha256_file, sha256_text, write_json
from ..task import ingredients

SCHEMA = "moescope/environment/1"
INSTALL_LIMIT_S = 1800
QUERY_LIMIT_S = 120
MODEL_CODE = ("mlx", "mlx-lm", "mlx-vlm")

# Runs in the environment itself: what is installed, and where MLX's library is.
INVENTORY = """
import importlib.metadata, json, pathlib, platform, sys
packages = {d.metadata["Name"].lower().replace("_", "-"): d.version
            for d in importlib.metadata.distributions()}
library = None
for entry in sys.path:
    found = sorted(pathlib.Path(entry or ".").glob("mlx/lib/libmlx.*"))
    if found:
        library = str(found[0].resolve())
        break
print(json.dumps({"packages": packages, "library": library,
                  "python": platform.python_version(),
                  "platform": f"{sys.platform}-{platform.machine()}"}))
"""


@dataclass(frozen=True)
class Interpreter:
    """An arm's interpreter and the environment variables that go with it."""

    python: Path
    env: dict[str, str]


def ensure(manifest: Path, work: Path, root: Path) -> Interpreter:
    """The environment of a build result (its folder), made again if it is missing.

    Raises UserError if what is there does not match the manifest.
    """
    runtime = ingredients(manifest)["params"]["runtime"]
    interpreter = provide(runtime, work, root)
    expected = read_json(manifest / "manifest.json", SCHEMA)
    _check(interpreter, expected, work)
    return interpreter


def ensure_layout(layout: str, lock: str, work: Path, root: Path) -> Interpreter:
    """The environment whose model code lists a synthetic checkpoint's tensors.

    The running interpreter serves as well, and needs no package index, if it has the versions that
    the lock names of MLX and of the packages with model code: nothing else decides the list.
    """
    versions = locked(_requirements(layout, lock, root).read_text())
    here = Interpreter(Path(sys.executable), _variables(work, "ambient"))
    found = inventory(here)["packages"]
    decisive = {name: versions[name] for name in MODEL_CODE if name in versions}
    if decisive and all(found.get(name) == version for name, version in decisive.items()):
        return here
    return _python_environment(layout, lock, work, root)


def locked(requirements: str) -> dict[str, str]:
    """Name -> version of a lock file's lines."""
    return dict(re.findall(r"(?m)^([a-z0-9-]+)==([^\s;]+)", requirements))


def provide(runtime: dict[str, Any], work: Path, root: Path) -> Interpreter:
    """The interpreter of a runtime's pin, without a check against a manifest."""
    if runtime["kind"] == "python":
        return _python_environment(runtime["env"], runtime["lock"], work, root)
    interpreter = Interpreter(Path(sys.executable), _variables(work, "ambient"))
    found = inventory(interpreter)["packages"]
    for package, version in runtime["pins"].items():
        if found.get(package) != version:
            raise UserError(
                f"{package} is {found.get(package, 'not installed')} in this interpreter, the "
                f"study pins {version}; install that version or change the pin",
                where=f"runtimes.{runtime['name']}.pins.{package}",
            )
    return interpreter


def inventory(interpreter: Interpreter) -> dict[str, Any]:
    """{"packages": name -> version, "library": path or None, "python", "platform"}."""
    result = subprocess.run(
        [interpreter.python, "-c", INVENTORY],
        env=interpreter.env,
        capture_output=True,
        text=True,
        timeout=QUERY_LIMIT_S,
    )
    if result.returncode:
        raise UserError(f"the interpreter does not start: {result.stderr.strip()[-300:]}")
    return json.loads(result.stdout)


def describe(runtime: dict[str, Any], interpreter: Interpreter) -> dict[str, Any]:
    """The manifest of an environment; paths are relative to its packages."""
    found = inventory(interpreter)
    if found["library"] is None:
        raise UserError("MLX's library is not in the environment; is mlx in its lock file?")
    library = Path(found["library"])
    return {
        "schema": SCHEMA,
        "kind": runtime["kind"],
        "package": runtime["package"],
        "python": found["python"],
        "platform": found["platform"],
        "packages": dict(sorted(found["packages"].items())),
        "library": {"path": f"mlx/lib/{library.name}", "sha256": sha256_file(library)},
    }


def _requirements(name: str, lock: str, root: Path) -> Path:
    requirements = root / "envs" / f"{name}.txt"
    if not requirements.is_file():
        raise UserError(f"there is no envs/{name}.txt; the study names it")
    if sha256_text(requirements.read_text()) != lock:
        raise UserError(f"envs/{name}.txt has changed since the study was read; start again")
    return requirements


def _python_environment(name: str, lock: str, work: Path, root: Path) -> Interpreter:
    requirements = _requirements(name, lock, root)
    folder = work / "envs" / f"{name}-{lock[:12]}"
    interpreter = Interpreter(folder / "bin" / "python", _variables(work, folder.name))
    from filelock import FileLock

    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock", timeout=INSTALL_LIMIT_S):
        if not (folder / "complete").exists():
            _install(requirements, folder, work)
    return interpreter


def _install(requirements: Path, folder: Path, work: Path) -> None:
    from uv import find_uv_bin

    uv = find_uv_bin()
    shutil.rmtree(folder, ignore_errors=True)
    print(f"making the environment {folder.name}", file=sys.stderr, flush=True)
    for command in (
        [uv, "venv", "--quiet", "--python", sys.executable, folder],
        [uv, "pip", "sync", "--quiet", "--require-hashes", "--python", folder / "bin" / "python",
         requirements],
    ):  # fmt: skip
        try:
            result = subprocess.run(
                command, capture_output=True, text=True, timeout=INSTALL_LIMIT_S
            )
        except subprocess.TimeoutExpired:
            raise UserError(
                f"uv did not finish within {INSTALL_LIMIT_S} s; is the package index reachable?",
                where=f"envs/{requirements.name}",
            ) from None
        if result.returncode:
            raise UserError(
                f"uv could not install it: {' '.join(result.stderr.split())[-600:]}",
                where=f"envs/{requirements.name}",
            )
    (folder / "complete").touch()


def _variables(work: Path, cache: str) -> dict[str, str]:
    """The caller's variables, less what would reach into the environment; MLX's compiled kernels
    are kept per environment (its CPU backend keeps them under TMPDIR)."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "VIRTUAL_ENV", "CONDA", "MLX", "MOESCOPE"))
    }
    if cache == "ambient" and "PYTHONPATH" in os.environ:
        kept["PYTHONPATH"] = os.environ["PYTHONPATH"]
    folder = work.resolve() / "cache" / cache
    for name in ("tmp", "ptx"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    return {**kept, "TMPDIR": str(folder / "tmp"), "MLX_PTX_CACHE_DIR": str(folder / "ptx")}


def _check(interpreter: Interpreter, expected: dict[str, Any], work: Path) -> None:
    """Compare with the manifest; the hash is taken once, then the library's size and time vouch."""
    seal = work / "cache" / f"checked-{expected['library']['sha256'][:16]}.json"
    found = inventory(interpreter)
    library = Path(found["library"] or "")
    if not library.is_file():
        raise UserError("MLX's library is missing in the environment; remove work/envs/")
    status = library.stat()
    now = {"path": str(library), "bytes": status.st_size, "mtime_ns": status.st_mtime_ns}
    sealed = json.loads(seal.read_text()) if seal.is_file() else None
    if sealed != now:
        if sha256_file(library) != expected["library"]["sha256"]:
            raise UserError(
                f"MLX's library is not the one of the manifest "
                f"({expected['library']['sha256'][:12]}...); remove {library.parents[2]} and retry"
            )
        write_json(seal, now)
    for package in ("mlx", "mlx-lm", "mlx-vlm", "transformers"):
        if found["packages"].get(package) != expected["packages"].get(package):
            raise UserError(
                f"{package} is {found['packages'].get(package)}, the manifest says "
                f"{expected['packages'].get(package)}; remove work/envs/ and retry"
            )
