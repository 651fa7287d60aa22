"""The warm-up stage: an arm's first process on this machine, which compiles and is discarded."""

import time
from pathlib import Path
from typing import Any

from ..files import write_json
from ..runtimes.client import WorkerError
from ..task import Task
from . import bench as benches
from . import guard as guards
from .failed import told
from .failing import failure

SCHEMA = "moescope/warmup/1"
LOCK_LIMIT_S = 3600.0


def run(task: Task) -> None:
    """Writes warmup.json (moescope/warmup/1): load and two passes, in a process of their own.

    first_use_s is what the first pass took longer than the second: compilation, first touches. What
    MLX had compiled and kept before is in cache_before, what it kept after in cache. A
    runtime that does not know the model is no error: then "unsupported" says so instead. Neither is
    an arm that dies or fails: then "failed" has its kind and why; the measure stage tries it again.
    """
    params = task.params
    arm, shape = params["arm"], params["shape"]
    try:
        bench = benches.open_bench(task, [arm["runtime"]], shape["prompt"])
    except benches.NotAdmitted as skipped:
        write_json(task.out / "warmup.json", {"schema": SCHEMA, **skipped.facts, "cache": None})
        return
    caches = cache_folders(bench.variables(arm))
    what = f"warmup {task.subject}"
    with guards.locked(what, params["machine"]["backend"], LOCK_LIMIT_S, task.say):
        before = cached(caches)
        try:
            found = _first_process(bench, arm, shape)
        except WorkerError as refused:
            if refused.kind == "unsupported":
                found = {"unsupported": refused.message}
                task.say(f"{arm['name']}: unsupported: {refused.message}")
            else:
                found = {"failed": failure(refused)}
                task.say(f"{arm['name']}: {told(found['failed'])}")
    kept = {"cache_before": before, "cache": cached(caches)}
    write_json(task.out / "warmup.json", {"schema": SCHEMA, **found, **kept})


def _first_process(
    bench: benches.Bench, arm: dict[str, Any], shape: dict[str, int]
) -> dict[str, Any]:
    with bench.worker(arm) as worker:
        loaded = worker.ask("load", benches.LOAD_LIMIT_S, **bench.loading(arm))
        passes = []
        for _ in range(2):
            begin = time.monotonic()
            result = worker.ask(
                "decode",
                benches.FIRST_LIMIT_S,
                prompt=bench.prompt,
                tokens=shape["generate"],
                patches=arm.get("patches", []),
            )
            passes.append(
                {
                    "prefill_s": result["prefill_s"],
                    "decode_s": result["decode_s"],
                    "wall_s": time.monotonic() - begin,
                }
            )
    first, second = passes
    return {
        "load_s": loaded["seconds"],
        "import_s": loaded["import_s"],
        "first_pass": first,
        "second_pass": second,
        "first_use_s": max(first["wall_s"] - second["wall_s"], 0.0),
    }


def cache_folders(env: dict[str, str]) -> list[Path]:
    """Where MLX keeps what it compiles: on CPU under TMPDIR, on CUDA where it is told."""
    return [Path(env[name]) for name in ("TMPDIR", "MLX_PTX_CACHE_DIR") if env.get(name)]


def cached(folders: list[Path]) -> dict[str, int]:
    """{"files", "bytes"} of all files below some folders."""
    sizes = []
    for folder in dict.fromkeys(folders):
        for path in folder.rglob("*") if folder.is_dir() else ():
            if path.is_file():
                sizes.append(path.stat().st_size)
    return {"files": len(sizes), "bytes": sum(sizes)}
