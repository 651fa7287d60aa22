"""Running one job: a stage gets its task, and its result appears as a whole or not at all."""

import errno
import glob
import importlib
import os
import resource
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from .errors import UserError
from .faults import told
from .files import write_json
from .study.plan import CODE, OUTPUTS, Job, folder
from .task import INGREDIENTS, Task, ingredients

COST = "moescope/cost/1"


def run_job(job: Job, root: Path, run: Callable[[Task], None] | None = None) -> None:
    """Run a job's stage and put its files, then ingredients.json, in their place.

    run: what makes the files instead of the stage's own run.
    """
    upstream = {}
    for name, key in job.upstream.items():
        path = root / folder(*name.split("/", 1), key)
        if ingredients(path)["key"] != key:
            raise UserError(
                "the key inside is not that of its path; restore it from git", str(path)
            )
        upstream[name] = path
    work = root / "work"
    name = f"{job.stage}.{job.subject}.{job.key}"
    _clear(work / "tmp", name)
    out = work / "tmp" / f"{name}.{os.getpid()}"
    out.mkdir(parents=True)
    started = time.monotonic()
    try:
        task = Task(job.stage, job.subject, job.key, job.params, upstream, out, work, root)
        (run or importlib.import_module(f"moescope.{CODE[job.stage][0]}").run)(task)
        missing = [name for name in OUTPUTS[job.stage] if not (out / name).is_file()]
        if missing:
            raise UserError(f"the stage {job.stage} did not write {', '.join(missing)}")
        write_json(
            out / "cost.json",
            {
                "schema": COST,
                "finished": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                "seconds": round(time.monotonic() - started, 3),
                "peak_memory": _peak_memory(),
                **task.notes,
            },
        )
        _publish(job, out, root / job.folder)
    finally:
        shutil.rmtree(out, ignore_errors=True)


def _clear(tmp: Path, name: str) -> None:
    """Remove what killed processes left of a job."""
    import psutil

    for path in tmp.glob(f"{glob.escape(name)}.*"):
        pid = path.name.rpartition(".")[2]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


def _publish(job: Job, out: Path, target: Path) -> None:
    """Move the files into place; ingredients.json comes last, it makes the result valid."""
    target.mkdir(parents=True, exist_ok=True)
    moved: list[Path] = []
    try:
        for path in sorted(out.iterdir()):
            _move(path, target / path.name)
            moved.append(target / path.name)
        write_json(
            target / "ingredients.json", {"schema": INGREDIENTS, "key": job.key, **job.ingredients}
        )
    except BaseException:
        for path in moved:
            path.unlink(missing_ok=True)
        with suppress(OSError):  # other files stand in it
            target.rmdir()
        raise


def _move(path: Path, place: Path) -> None:
    """Into its place at once, from another file system too (work/ may be a disk of its own)."""
    try:
        os.replace(path, place)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        beside = place.with_name(f".{place.name}.{os.getpid()}")
        try:
            shutil.copyfile(path, beside)
            os.replace(beside, place)
        finally:
            beside.unlink(missing_ok=True)


def _peak_memory() -> int:
    """Bytes: the larger of this process and its largest finished child."""
    unit = 1 if sys.platform == "darwin" else 1024
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return max(usage.ru_maxrss for usage in usages) * unit


@contextmanager
def tee(log: Path | None) -> Iterator[None]:
    """What this process and its children print goes to the terminal and to the log."""
    if log is None:
        yield
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    copier = subprocess.Popen(["tee", str(log)], stdin=subprocess.PIPE, stdout=os.dup(2))
    saved = os.dup(1), os.dup(2)
    os.dup2(copier.stdin.fileno(), 1)
    os.dup2(copier.stdin.fileno(), 2)
    copier.stdin.close()
    try:
        with told():
            yield
    except UserError as error:
        print(f"moescope: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(saved[0], 1)
        os.dup2(saved[1], 2)
        try:
            copier.wait(timeout=10)
        except subprocess.TimeoutExpired:  # a child that was left behind holds the pipe
            copier.kill()
