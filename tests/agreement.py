"""A second opinion: mlx_lm.benchmark beside the in-process arm of the same mlx-lm, in pairs.

Run as a script it prints the ratio of the two rates, forwards over the seconds that they took:

    MOESCOPE_ARM_PYTHON=... PYTHONPATH=workflow python tests/agreement.py --rounds 7

The checkpoint is the embedded study's qwen3_moe. Both sides decode the same number of tokens after
prompts of the same length; the tool draws its own prompt.

The two alternate pass by pass: the tool sleeps between its trials (``--delay``), and meanwhile the
worker decodes once, so that each trial stands between two passes of the worker, some seconds apart.
The ratio of a pair is the trial's to the mean of the two; a speed that drifts evenly cancels.
"""

import argparse
import itertools
import math
import os
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import yaml

import tiny
from moescope.checkpoints import synthetic
from moescope.files import sha256_text
from moescope.runtimes import binary, command, environments, output, spec
from moescope.runtimes.client import Worker
from moescope.runtimes.environments import Interpreter

PROMPT, GENERATE = 32, 65
LIMIT_S = 300.0
LOCK = "mlx-lm-0.32.2"


@cache
def interpreter() -> Interpreter:
    """The arm's interpreter, if it holds mlx-lm; else mlx-lm's locked environment, in work/."""
    arm = Interpreter(tiny.arm_python(), dict(os.environ))
    if "mlx-lm" in environments.inventory(arm)["packages"]:
        return arm
    lock = sha256_text((tiny.ROOT / "envs" / f"{LOCK}.txt").read_text())
    return environments.ensure_layout(LOCK, lock, tiny.ROOT / "work", tiny.ROOT)


def new_worker() -> Worker:
    found = interpreter()
    return Worker(found.python, found.env, tiny.ROOT)


def checkpoint(folder: Path, name: str = "qwen3-moe") -> Path:
    """The embedded study's checkpoint, made into an empty folder."""
    study = yaml.safe_load((tiny.ROOT / "config.yaml").read_text())
    source = study["checkpoints"][name]["source"] | {"shard_bytes": 1 << 30}
    with new_worker() as worker:
        layout = worker.ask(
            "layout", 120, package=source["package"], config=source["config"],
            quantization=source["quantization"],
        )  # fmt: skip
    folder.mkdir(parents=True)
    synthetic.make(source, layout, folder)
    return folder


def benchmark_tool() -> binary.Tool:
    """mlx_lm.benchmark of the arm's interpreter, by its preset."""
    found = interpreter()
    runtime = {"kind": "ambient", "package": "mlx-lm"}
    manifest = environments.describe(runtime, found) | {"preset": "mlx_lm.benchmark"}
    invoke = spec.preset("mlx_lm.benchmark").invoke.model_dump(mode="json")
    words = {"python": str(found.python)}
    manifest |= binary.check_flags(invoke, words, found.env, "runtimes.benchmark")
    return binary.Tool(words, found.env, manifest, invoke)


def pairs(
    model: Path, rounds: int, generate: int = GENERATE, trials: int = 1
) -> list[dict[str, Any]]:
    """One row a trial; ``rounds`` processes of the tool with ``trials`` each.

    Rates are forwards per second: "tool" of the trial, "worker" of the passes around it; "ratio":
    tool / worker. "worker_own", "tool_own": by the tool's own convention.
    """
    prompt = [(7 * i + 3) % 2000 for i in range(PROMPT)]
    found = []
    with (
        new_worker() as worker,
        command.CommandWorker(benchmark_tool()) as tool,
    ):

        def decode() -> dict[str, Any]:
            return worker.ask("decode", LIMIT_S, prompt=prompt, tokens=generate, patches=[])

        worker.ask("load", LIMIT_S, package="mlx-lm", path=str(model))
        tool.ask("load", LIMIT_S, package=None, path=str(model))
        decode()  # discarded; the tool has a warm-up pass of its own in each process
        begin = time.monotonic()
        decode()
        delay = math.ceil(0.5 + 1.5 * (time.monotonic() - begin))  # the tool takes whole seconds
        for _ in range(rounds):
            argv, env = tool.command(prompt, generate, batch=trials)
            text, ours = _between([*argv, "--delay", str(delay)], env, decode, delay)
            for trial, around in zip(
                output.runs(text, tool.tool.invoke), itertools.pairwise(ours), strict=True
            ):
                if None in around:
                    continue  # it met the trial itself
                assert {run["forwards"] for run in (trial, *around)} == {generate - 1}
                row = {
                    "tool": trial["forwards"] / trial["decode_s"],
                    "worker": (generate - 1) / statistics.fmean(run["decode_s"] for run in around),
                    "tool_own": trial["tool_rate"],
                    "worker_own": statistics.harmonic_mean(run["tool_rate"] for run in around),
                }
                found.append(row | {"ratio": row["tool"] / row["worker"]})
    return found


def _between(
    argv: list[str], env: dict[str, str], decode: Callable[[], Any], delay: int
) -> tuple[str, list[Any]]:
    """What the tool prints, and what ``decode`` gave before, between and after its trials; None
    where it took longer than the tool slept."""
    found: list[Any] = []
    lines: list[str] = []
    with subprocess.Popen(
        argv, env={**env, "PYTHONUNBUFFERED": "1"}, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        # Nothing that the tool does can last: it is killed, and the output ends.
        watchdog = threading.Timer(LIMIT_S, process.kill)
        watchdog.start()
        try:
            for line in process.stdout:
                lines.append(line)
                if line.startswith(("Timing with", "Trial")):
                    begin = time.monotonic()
                    result = decode()
                    found.append(result if time.monotonic() - begin < delay else None)
        finally:
            watchdog.cancel()
            process.kill()
    return "".join(lines), found


def summary(rows: list[dict[str, Any]], key: str) -> str:
    values = [row[key] for row in rows]
    return f"{statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="processes of the tool")
    parser.add_argument("--generate", type=int, default=GENERATE)
    parser.add_argument("--trials", type=int, default=7, help="of each process")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = checkpoint(Path(folder) / "model")
        rows = pairs(model, options.rounds, options.generate, options.trials)
    for name in ("worker", "tool"):
        print(f"{name}: {summary(rows, name)} forwards/s")
    print(f"tool's own convention: {summary(rows, 'tool_own')} tokens/s")
    print(f"tool / worker: {summary(rows, 'ratio')}, n = {len(rows)}")
    quarters = statistics.quantiles([row["ratio"] for row in rows], n=4)
    print(f"half of the pairs lie within {quarters[0]:.4g} to {quarters[2]:.4g}")


if __name__ == "__main__":
    main()
