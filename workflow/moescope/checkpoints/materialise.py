"""Weights on disk, made again or downloaded again whenever they are missing."""

import os
import shutil
from pathlib import Path
from typing import Any

from filelock import FileLock

from ..errors import UserError
from ..runtimes.client import Worker, WorkerDied, WorkerError
from ..runtimes.environments import ensure_layout
from . import local, manifest, synthetic
from .headers import read_headers

MAKE_LIMIT_S = 6 * 3600
LAYOUT_LIMIT_S = 300


def ensure(
    expected: dict[str, Any], source: dict[str, Any], folder: Path, work: Path, root: Path
) -> Path:
    """The folder with a checkpoint's files, checked against its manifest.

    Raises UserError when a file differs: a checkpoint is never silently another one.
    """
    place = provide(source, folder, work, root)
    manifest.check(place, expected, seal_of(folder))
    return place


def seal_of(folder: Path) -> Path:
    """Where it is kept that a checkpoint's files were checked."""
    return folder.with_suffix(".checked.json")


def provide(source: dict[str, Any], folder: Path, work: Path, root: Path) -> Path:
    """The folder with a checkpoint's files; each shard checked by header, size and index."""
    if source["kind"] == "local":
        return local.folder_of(source, root)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock", timeout=MAKE_LIMIT_S):
        if not folder.is_dir():
            # A download keeps its partial files under the same name, so that it can go on.
            partial = folder.with_suffix(".partial")
            if source["kind"] == "synthetic":
                shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(exist_ok=True)
            _fill(source, partial, work, root)
            read_headers(partial)
            os.replace(partial, folder)
    return folder


def _fill(source: dict[str, Any], folder: Path, work: Path, root: Path) -> None:
    if source["kind"] == "hub":
        from . import hub

        hub.fetch(source, folder)
        return
    interpreter = ensure_layout(source["layout"], source["layout_lock"], work, root)
    log = work / "logs" / f"layout.{folder.stem}.log"
    with Worker(interpreter.python, interpreter.env, root, log) as worker:
        try:
            layout = worker.ask(
                "layout",
                LAYOUT_LIMIT_S,
                package=source["package"],
                config=source["config"],
                quantization=source.get("quantization"),
                dtype=source["dtype"],
            )
        except WorkerDied:
            raise
        except WorkerError as refused:
            raise UserError(
                f"{refused.message}; the config is what {source['layout']} has to build",
                where="source.config",
            ) from refused
    synthetic.make(source, layout, folder)
