"""A second opinion: mlx_lm.benchmark beside the in-process arm of the same mlx-lm, in pairs.

Run as a script it prints the ratio of the two rates, forwards over the seconds that they took:

    MOESCOPE_ARM_PYTHON=... PYTHONPATH=workflow python tests/agreement.py --rounds 7

The checkpoint is the embedded study's qwen3_moe. Both sides decode the same number of tokens after
prompts of the same length; the tool draws its own prompt.
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


def benchmark_tool() -> binary.Tool:
    """mlx_lm.benchmark of the arm's interpreter, by its preset."""
    found = interpreter()
    runtime = {"kind": "ambient", "package": "mlx-lm"}
    manifest = environments.describe(runtime, found) | {"preset": "mlx_lm.benchmark"}
    invoke = spec.preset("mlx_lm.benchmark").invoke.model_dump(mode="json")
    words = {"python": str(found.python)}
    manifest |= binary.check_flags(invoke, words, found.env, "runtimes.benchmark")
    return binary.Tool(words, found.env, manifest, invoke)


def pairs(model: Path, rounds: int, generate: int = GENERATE) -> list[dict[str, Any]]:
    """One pair a round, the other first each time; rates in forwards per second."""
    found = []
    prompt = [(7 * i + 3) % 2000 for i in range(PROMPT)]
    with (
        new_worker() as worker,
        command.CommandWorker(benchmark_tool()) as tool,
    ):
        worker.ask("load", 120, package="mlx-lm", path=str(model))
        tool.ask("load", 120, package=None, path=str(model))
        arms = {"worker": worker, "tool": tool}
        # Discarded; the tool has a warm-up pass of its own in each process.
        worker.ask("decode", 300, prompt=prompt, tokens=generate, patches=[])
        for number in range(rounds):
            row: dict[str, Any] = {}
            for name in list(arms) if number % 2 else reversed(arms):
                run = arms[name].ask("decode", 300, prompt=prompt, tokens=generate, patches=[])
                assert run["forwards"] == generate - 1
                row[name] = run["forwards"] / run["decode_s"]
                row[f"{name}_own"] = run["tool_rate"]
            row["ratio"] = row["tool"] / row["worker"]
            found.append(row)
    return found


def summary(rows: list[dict[str, Any]], key: str) -> str:
    values = [row[key] for row in rows]
    return f"{statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--generate", type=int, default=GENERATE)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = pairs(checkpoint(Path(folder) / "model"), options.rounds, options.generate)
    for name in ("worker", "tool"):
        print(f"{name}: {summary(rows, name)} forwards/s")
    print(f"tool's own convention: {summary(rows, 'tool_own')} tokens/s")
    print(f"tool / worker: {summary(rows, 'ratio')}, n = {len(rows)}")


if __name__ == "__main__":
    main()
