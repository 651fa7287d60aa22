"""runs.jsonl: one line a run, rejected ones too, and a trailer that seals the file."""

import hashlib
from pathlib import Path
from typing import Any

from ..files import canonical, write_text

RUN = "moescope/run/1"
TRAILER = "moescope/run-trailer/1"

# What a worker's decode reports and a run keeps; the tokens themselves are kept as their hash.
KEPT = (
    "prompt_tokens",
    "generated_tokens",
    "prefill_s",
    "decode_s",
    "forwards",
    "token_s",
    "build_s",
    "tokens_sha256",
    "finite",
    "peak_memory",
    "tool_rate",
)
# What only some runtimes report.
ALSO_KEPT = (
    "cpu_s",
    "slices",
    "load_s",
    "paths",
    "phases",
    "binary_sha256",
    "process_s",
    "passes",
    "counted",
    "same_prompt",
)


def run_id(number: int, arm: str, attempt: int) -> str:
    """For example "r03-vlm-null", or "r03-vlm-null-try2" for its second attempt."""
    return f"r{number:02}-{arm}" + _again(attempt)


def round_id(number: int, attempt: int) -> str:
    """The same for a sliced round, which all its arms are tried in again: "r03", "r03-try2"."""
    return f"r{number:02}" + _again(attempt)


def _again(attempt: int) -> str:
    return f"-try{attempt}" if attempt > 1 else ""


def write_runs(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write the rows, which carry their schema, and the trailer: counts, hash of the lines."""
    lines = "".join(canonical(row) + "\n" for row in rows)
    trailer = {
        "schema": TRAILER,
        "runs": len(rows),
        "valid": sum(row["valid"] for row in rows),
        "sha256": hashlib.sha256(lines.encode()).hexdigest(),
    }
    write_text(path, lines + canonical(trailer) + "\n")
