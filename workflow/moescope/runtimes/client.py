"""A worker process seen from the controller: started, asked, watched, and always ended.

The worker (``python -m moescope.worker``) runs under an arm's own interpreter. Requests and replies
are JSON lines on its stdin and stdout; what libraries print goes to its stderr, hence to the log.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

READY_LIMIT_S = 120.0
ENDING_LIMIT_S = 5.0
TAIL_BYTES = 4000

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "GOTO_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
# What allocators say when there is no memory left: C++, MLX, CUDA, Metal, Python.
NO_MEMORY = (
    "bad_alloc",
    "out of memory",
    "outofmemory",
    "cannot allocate memory",
    "unable to allocate",
    "cudaerrormemoryallocation",
    "memoryerror",
    "[malloc]",
    "metal::malloc",
)


class WorkerError(Exception):
    """A request that the worker refused; it can be asked again.

    kind: not_applicable, unsupported, out_of_memory or failed.
    """

    def __init__(self, kind: str, message: str):
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message


class WorkerDied(WorkerError):
    """The process is gone; its group has been killed.

    kind: out_of_memory, timeout, crash or protocol. status: the exit status as a shell shows it
    (137 for SIGKILL), None if it had to be killed. tail: the end of its stderr.
    """

    def __init__(self, kind: str, message: str, status: int | None = None, tail: str = ""):
        super().__init__(kind, message)
        self.status = status
        self.tail = tail


class Worker:
    """One worker process, as a context manager.

    python, env: an Interpreter's fields; ``env`` is the whole environment, nothing is inherited.
    root: the repository (its workflow/ holds the worker's code). log: where stderr goes.
    settings: the arm's variables; they win over everything set here.

    Use ``start`` on several before the first ``wait_ready``, and ``send`` before ``receive``, to
    have them work at the same time. Start workers from the main thread: on Linux a worker dies
    with the thread that started it.
    """

    def __init__(
        self,
        python: Path,
        env: dict[str, str],
        root: Path,
        log: Path | None = None,
        settings: dict[str, str] | None = None,
    ):
        self.python = python
        self.root = root
        self.log = log
        self.threads = usable_cores()
        self.env = worker_variables(env, root, self.threads) | (settings or {})
        self.ready: dict[str, Any] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr: IO[bytes] | None = None
        self._stderr_start = 0
        self._buffer = bytearray()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def __enter__(self) -> Self:
        if self._process is None:
            self.start()
        if not self.ready:
            self.wait_ready()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(patient=kind is None)

    def start(self) -> None:
        """Start the process; returns at once. Raises WorkerDied if there is no such interpreter."""
        if self.log is None:
            self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        else:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            self._stderr = open(self.log, "a+b")  # noqa: SIM115
            self._stderr_start = self._stderr.seek(0, os.SEEK_END)
        try:
            self._process = subprocess.Popen(
                [self.python, "-m", "moescope.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env=self.env,
                cwd=self.root,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            self._stderr.close()
            raise WorkerDied("crash", f"{self.python} does not start: {error.strerror}") from None
        os.set_blocking(self._process.stdin.fileno(), False)

    def wait_ready(self, timeout: float = READY_LIMIT_S) -> dict[str, Any]:
        """The worker's first line: {"ready", "pid", "versions", "device", "library_sha256"}."""
        deadline = time.monotonic() + timeout
        while not self.ready:
            line = self._line(deadline, "start")
            with contextlib.suppress(ValueError):
                value = json.loads(line)
                if isinstance(value, dict) and value.get("ready") is True:
                    self.ready = value
        return self.ready

    def ask(self, do: str, timeout: float, **arguments: Any) -> dict[str, Any]:
        """The result of one request.

        Raises WorkerError if the worker refuses, WorkerDied if it ends, answers with something
        that is not a reply, or does not answer within ``timeout`` seconds (it is killed then).
        """
        deadline = time.monotonic() + timeout
        self.send(do, deadline=deadline, **arguments)
        return self.receive(do, deadline=deadline)

    def send(self, do: str, *, deadline: float, **arguments: Any) -> None:
        """Write one request; ``deadline`` is on the monotonic clock."""
        if self._process is None:
            raise WorkerDied("crash", "the worker has ended")
        data = json.dumps({"do": do, **arguments}, allow_nan=False).encode() + b"\n"
        pipe = self._process.stdin.fileno()
        while data:
            left = deadline - time.monotonic()
            if left <= 0:
                self._give_up(do)
            _, writable, _ = select.select([], [pipe], [], min(left, 1.0))
            if not writable:
                continue
            try:
                data = data[os.write(pipe, data) :]
            except BlockingIOError:
                continue
            except OSError:
                self._died(do)

    def receive(self, do: str, *, deadline: float) -> dict[str, Any]:
        """The reply to the request sent last."""
        line = self._line(deadline, do)
        try:
            reply = json.loads(line)
            if reply["ok"]:
                return reply["result"]
            error = WorkerError(str(reply["error"]["kind"]), str(reply["error"]["message"]))
        except (ValueError, KeyError, TypeError):
            self.close(patient=False)
            raise WorkerDied(
                "protocol", f"{do}: the worker answered {line[:200]!r}, which is no reply"
            ) from None
        raise error

    def close(self, patient: bool = True) -> None:
        """End the process: end of input first if ``patient``, then the whole group is killed."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(OSError):
            process.stdin.close()
        if patient:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ENDING_LIMIT_S)
        _kill_group(process.pid)
        process.wait()
        process.stdout.close()
        self._stderr.close()

    def stderr_tail(self) -> str:
        """The end of what this process has written to stderr."""
        if self._stderr is None or self._stderr.closed:
            return ""
        # pread leaves alone the file position, which a temporary file shares with the worker.
        handle = self._stderr.fileno()
        size = os.fstat(handle).st_size
        start = max(self._stderr_start, size - TAIL_BYTES)
        return os.pread(handle, size - start, start).decode(errors="replace").strip()

    def _line(self, deadline: float, doing: str) -> bytes:
        if self._process is None:
            raise WorkerDied("crash", "the worker has ended")
        pipe = self._process.stdout.fileno()
        while (end := self._buffer.find(b"\n")) < 0:
            left = deadline - time.monotonic()
            if left <= 0:
                self._give_up(doing)
            readable, _, _ = select.select([pipe], [], [], min(left, 1.0))
            if readable:
                piece = os.read(pipe, 1 << 16)
                if not piece:
                    self._died(doing)
                self._buffer += piece
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    def _give_up(self, doing: str) -> None:
        tail = self.stderr_tail()
        self.close(patient=False)
        raise WorkerDied("timeout", f"{doing}: no answer within the time limit; killed", None, tail)

    def _died(self, doing: str) -> None:
        process = self._process
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_LIMIT_S)
        code = process.poll()
        tail = self.stderr_tail()
        self.close(patient=False)
        status = None if code is None else (128 - code if code < 0 else code)
        kind = "out_of_memory" if _no_memory(status, tail) else "crash"
        last = tail.splitlines()[-1][:300] if tail else "nothing on stderr"
        raise WorkerDied(kind, f"{doing}: the worker ended with {status}: {last}", status, tail)


def close_all(workers: Iterable[Worker]) -> None:
    """End workers at the same time: one with gigabytes on a GPU takes a while."""
    ending = list(workers)
    if ending:
        with ThreadPoolExecutor(len(ending)) as pool:
            list(pool.map(lambda worker: worker.close(), ending))


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def worker_variables(env: dict[str, str], root: Path, threads: int) -> dict[str, str]:
    """A worker's environment: no Python variable but its path, thread counts set by name.

    Snakemake exports a thread count of one into every job, which must not reach measured code. A
    PYTHONPATH in ``env`` (an ambient interpreter's) stays, behind the worker's code.
    """
    kept = {name: value for name, value in env.items() if not name.startswith("PYTHON")}
    path = os.pathsep.join(
        part for part in (str(root.resolve() / "workflow"), env.get("PYTHONPATH", "")) if part
    )
    return {
        **kept,
        **dict.fromkeys(THREAD_VARIABLES, str(threads)),
        "PYTHONPATH": path,
        "PYTHONSAFEPATH": "1",
        "PYTHONHASHSEED": "0",
    }


def _no_memory(status: int | None, tail: str) -> bool:
    # Nobody but the kernel's out-of-memory killer sends SIGKILL to a worker that answers.
    return status == 137 or any(sign in tail.lower() for sign in NO_MEMORY)


def _kill_group(group: int) -> None:
    # The group may be empty (gone), or hold only a zombie (macOS says "not permitted").
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
