"""A second opinion: mlx_lm.benchmark beside the in-process arm of the same mlx-lm, in pairs.

Run as a script it prints the ratio of the two rates, forwards over the seconds that they took:

    MOESCOPE_ARM_PYTHON=... PYTHONPATH=workflow python tests/agreement.py --rounds 7

The checkpoint is the embedded study's qwen3_moe. Both sides decode the same number of tokens after
prompts of the same length; the tool draws its own prompt.

In a round the worker decodes before and after the tool's process, each time half as many passes as
that process has trials, so that a speed that drifts evenly cancels. A pair is made twice: of all
passes, and of each side's fastest one, since other programs only ever slow a pass down. On a quiet
host the two agree; where they do not, the host was not quiet and the fastest speak.
"""

import argparse
import os
import statistics
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import yaml

import tiny
from moescope.checkpoints import synthetic
from moescope.files import sha256_text
from moescope.runtimes import binary, command, environments, spec
from moescope.runtimes.client import Worker
from moescope.runtimes.environments import Interpreter

PROMPT, GENERATE = 32, 65
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


def benchmark_tool(trials: int = 1) -> binary.Tool:
    """mlx_lm.benchmark of the arm's interpreter, by its preset, with so many trials a process."""
    found = interpreter()
    runtime = {"kind": "ambient", "package": "mlx-lm"}
    manifest = environments.describe(runtime, found) | {"preset": "mlx_lm.benchmark"}
    invoke = spec.preset("mlx_lm.benchmark").invoke.model_dump(mode="json")
    invoke["runs_per_process"] = trials
    words = {"python": str(found.python)}
    manifest |= binary.check_flags(invoke, words, found.env, "runtimes.benchmark")
    return binary.Tool(words, found.env, manifest, invoke)


def pairs(
    model: Path, rounds: int, generate: int = GENERATE, trials: int = 2
) -> list[dict[str, Any]]:
    """One row a round; rates in forwards per second, ratios tool / worker.

    "worker", "tool": over all passes; "ratio": of those. "fastest": the same of each side's fastest
    pass. "worker_own", "tool_own": by the tool's convention, over all passes.
    """
    found = []
    prompt = [(7 * i + 3) % 2000 for i in range(PROMPT)]
    asked = {"prompt": prompt, "tokens": generate, "patches": []}
    with (
        new_worker() as worker,
        command.CommandWorker(benchmark_tool(trials)) as tool,
    ):
        worker.ask("load", 120, package="mlx-lm", path=str(model))
        tool.ask("load", 120, package=None, path=str(model))
        # Discarded; the tool has a warm-up pass of its own in each process.
        worker.ask("decode", 300, **asked)
        before = -(-trials // 2)
        for _ in range(rounds):
            ours = [worker.ask("decode", 300, **asked) for _ in range(before)]
            theirs = tool.ask("decode", 300, **asked)
            ours += [worker.ask("decode", 300, **asked) for _ in range(max(trials - before, 1))]
            forwards = generate - 1
            assert {run["forwards"] for run in (*ours, theirs)} == {forwards}
            seconds = {
                "worker": [run["decode_s"] for run in ours],
                "tool": [run["decode_s"] for run in theirs.get("passes", [theirs])],
            }
            row = {name: forwards / statistics.fmean(each) for name, each in seconds.items()}
            row["ratio"] = row["tool"] / row["worker"]
            row["fastest"] = min(seconds["worker"]) / min(seconds["tool"])
            row["worker_own"] = statistics.harmonic_mean(run["tool_rate"] for run in ours)
            row["tool_own"] = theirs["tool_rate"]
            found.append(row)
    return found


def summary(rows: list[dict[str, Any]], key: str) -> str:
    values = [row[key] for row in rows]
    return f"{statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--generate", type=int, default=GENERATE)
    parser.add_argument("--trials", type=int, default=6, help="passes of each side in a round")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = checkpoint(Path(folder) / "model")
        rows = pairs(model, options.rounds, options.generate, options.trials)
    for name in ("worker", "tool"):
        print(f"{name}: {summary(rows, name)} forwards/s")
    print(f"tool's own convention: {summary(rows, 'tool_own')} tokens/s")
    for key, of in (("ratio", "all passes"), ("fastest", "each side's fastest pass")):
        print(f"tool / worker, {of}: {summary(rows, key)}, n = {len(rows)}")


if __name__ == "__main__":
    main()
