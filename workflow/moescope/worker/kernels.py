"""A window of decode under CUPTI: which kernels ran, when, for which step.

The records go to a file (they are many); what they mean is worked out elsewhere
(moescope.trace.kernels), from the file alone.
"""

import gzip
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from . import cupti, nvtx, runtime, scopes
from .graph import Step, capture
from .modules import survey
from .patches import applied
from .state import Refusal, State, check_ids
from .steps import watched
from .wrap import Changes

SCHEMA = "moescope/events/1"


def run(
    state: State,
    prompt: list[int],
    tokens: int,
    save: str,
    calls: str = "all",
    order: bool = False,
    forced: bool = False,
    steps: list[int] | None = None,
    patches: list[str] | tuple[str, ...] = (),
) -> dict[str, Any]:
    """Decode ``tokens`` tokens greedily after ``prompt``; write what happened to ``save``.

    save: a .json.gz, schema moescope/events/1. marks: [what, step, time]: "begin" and "end" of the
    whole, with the GPU idle; "built", the step's graph handed to MLX; "taken", MLX has encoded it;
    "token", its token in hand. Step 0 is the last position of the prompt. cpu: [step, processor
    nanoseconds of the process, of the loop's thread] at each token. calls: see
    cupti.recording. order: for the worker started with MLX_USE_CUDA_GRAPHS=0, where each launch is
    a CUDA call of its own. Exports the graphs of ``steps`` (default: of each; "sequences" of
    [primitive, module, term] in order of execution; "steps": step -> which) and listens to MLX's
    ranges ("ranges": [name, time] where one begins, [null, time] where the last begun ends; null if
    they cannot be heard). Host
    times mean nothing then. forced: evaluate at module boundaries, as scopes does; "boundaries" are
    [term, time] then: the term of what ran since the one before; marks are "built" and "taken"
    only. Times are nanoseconds.
    """
    check_ids("prompt", prompt)
    cupti.running()
    if calls not in ("all", "none"):
        raise Refusal("failed", f"calls is {calls!r}; give all or none")
    marks: list[tuple[str, int, int]] = []
    made: list[int] = []
    cpu: list[tuple[int, int, int]] = []

    def mark(what: str, step: int) -> None:
        marks.append((what, step, cupti.now()))

    def built(step: int, _: Any) -> None:
        mark("built", step)

    def taken(step: int) -> None:
        mark("taken", step)

    def decode() -> Any:
        generator = runtime.steps(state, prompt, tokens)
        for token, _ in generator:
            mark("token", len(made))
            cpu.append((len(made), time.process_time_ns(), time.thread_time_ns()))
            made.append(token)
            yield token
            if len(made) == tokens:
                break
        generator.close()

    found: dict[int, Step] = {}
    heard: list[tuple[str | None, int]] | None = None
    boundaries: list[tuple[str, int]] = []
    with applied(state, patches):
        runtime.synchronize(state)
        with cupti.recording(calls) as events:
            mark("begin", 0)
            if forced:
                with watched(built, taken):
                    boundaries = _forced(state, prompt, tokens)
            elif order:
                wanted = set(range(1, tokens + 1) if steps is None else steps)
                with nvtx.listening(cupti.now) as heard:
                    found = capture(state, decode, wanted, taken)
            else:
                with watched(built, taken):
                    for _ in decode():
                        pass
            runtime.synchronize(state)
            mark("end", tokens)
    sequences, which = _distinct({step: one.sequence() for step, one in found.items()})
    content = {
        "schema": SCHEMA,
        "marks": marks,
        "cpu": cpu,
        **_table("kernels", events.kernels),
        **_table("copies", events.copies),
        **_table("calls", events.calls),
        **_table("overhead", events.overhead),
        "dropped": events.dropped,
        "ranges": heard,
        "boundaries": boundaries,
        "forced_tokens": tokens if forced else 0,
        "sequences": sequences,
        "steps": which,
    }
    with gzip.open(Path(save), "wt", compresslevel=1) as file:
        json.dump(content, file, separators=(",", ":"))
    return {
        "prompt_tokens": len(prompt),
        "generated_tokens": len(made),
        "kernels": len(events.kernels),
        "kernel_s": sum(row[2] - row[1] for row in events.kernels) / 1e9,
        "calls": len(events.calls),
        "ranges": None if heard is None else len(heard),
        "dropped": events.dropped,
        "wall_s": (marks[-1][2] - marks[0][2]) / 1e9,
        "token_ns": [time for what, _, time in marks if what == "token"],
        "peak_memory": mx.get_peak_memory(),
    }


class _Marked(scopes.Clock):
    """The clock of the scopes, which also keeps when each boundary was passed."""

    def start(self) -> None:
        super().start()
        self.boundaries: list[tuple[str, int]] = [("", cupti.now())]

    def _add(self) -> None:
        term = self.stack[-1].term
        super()._add()
        self.boundaries.append((term, cupti.now()))


def _forced(state: State, prompt: list[int], tokens: int) -> list[tuple[str, int]]:
    with Changes() as changes:
        clock = _Marked()
        scopes._instrument(state, survey(state).known(), changes, clock)
        scopes._one(state, clock, prompt, tokens)
        return clock.boundaries


def _distinct(sequences: dict[int, list]) -> tuple[list[list], dict[int, int]]:
    """The different sequences, and which of them each step has."""
    found: list[list] = []
    which: dict[int, int] = {}
    for step, sequence in sequences.items():
        if sequence not in found:
            found.append(sequence)
        which[step] = found.index(sequence)
    return found, which


def _table(what: str, rows: Sequence[tuple]) -> dict[str, Any]:
    """Rows by time, each name once."""
    names = {row[0]: None for row in rows}
    place = {name: i for i, name in enumerate(names)}
    ordered = sorted(rows, key=lambda row: row[1])
    return {what: {"names": list(names), "rows": [[place[row[0]], *row[1:]] for row in ordered]}}
