"""The GPU's work of an in-process arm on a Mac: xctrace attached to the worker while it decodes.

As for commands, at two lengths. The worker is loaded and warm before the recording starts, so that
both recordings hold one prefill and one decode each and nothing else.
"""

import os
import shutil
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..measure import bench as benches
from ..runtimes import process
from . import command, metal
from .command import EXPORT_LIMIT_S, LONGER, NotMeasured, Profiled

if TYPE_CHECKING:
    from .stage import Context

STARTED = "Ctrl-C to stop"  # printed when the recording is on
START_LIMIT_S = 120.0
SETTLE_S = 1.0  # the GPU's counters come on a little after


def measure(context: "Context") -> dict[str, Any]:
    """Called by the trace stage; what it returns joins trace.json."""
    folder = context.task.work / "traces" / context.task.key
    folder.mkdir(parents=True, exist_ok=True)
    more = max(context.task.params["trace"]["tokens"], LONGER)
    try:
        command.xctrace_is_there()
        with context.worker() as worker:
            context.guard.own(worker.pid)
            run = Attached(context, worker, folder, more)
            run.warm_up()
            return run.on_metal()
    except (NotMeasured, UserError) as why:
        return {"not_measured": [f"command buffers and GPU times: {why}"]}


class Attached(Profiled):
    """A worker's runs, recorded from outside."""

    def warm_up(self) -> None:
        limit, loading = benches.LOAD_LIMIT_S, self.context.bench.loading(self.context.arm)
        self.worker.ask("load", limit, **loading)
        self.context.guard.settle()
        self._decode(command.SHORTER)

    def _decode(self, tokens: int) -> dict[str, Any]:
        return self.worker.ask(
            "decode",
            benches.FIRST_LIMIT_S,
            prompt=self.context.bench.prompt,
            patches=self.context.patches,
            tokens=tokens,
        )

    def _xctrace(self, name: str) -> metal.Trace:
        bundle, log = self.folder / f"{name}.trace", self.folder / f"{name}.log"
        shutil.rmtree(bundle, ignore_errors=True)
        log.unlink(missing_ok=True)
        env = dict(os.environ)
        argv = metal.attach_command(bundle, self.worker.pid, command.LIMIT_S)
        self.context.guard.gate(f"profiled {name}")
        with process.Process([shutil.which(argv[0]), *argv[1:]], env, log=log) as recording:
            _wait_for(recording, log)
            reply = self._decode(self.lengths[name])
            os.killpg(recording.pid, signal.SIGINT)
            ended = recording.wait(EXPORT_LIMIT_S)
        # Its status after an interrupt differs between versions; the bundle tells.
        if ended.timed_out or not bundle.exists():
            raise NotMeasured(f"xctrace ({name}) saved no recording: {_last(ended.text)}")
        self.walls[name] = reply["decode_s"] / reply["forwards"] * 1e3
        return self._exported(name, bundle, env)


def _wait_for(recording: process.Process, log: Path) -> None:
    """Until the recording is on. Raises NotMeasured if it ends, or is not within the limit."""
    deadline = time.monotonic() + START_LIMIT_S
    while True:
        alive = recording.alive  # asked first: what it says as it ends is then in the log
        if STARTED in (text := log.read_text(errors="replace")):
            break
        if not alive or time.monotonic() > deadline:
            raise NotMeasured(f"xctrace did not begin to record: {_last(text)}")
        time.sleep(0.05)
    time.sleep(SETTLE_S)


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"
