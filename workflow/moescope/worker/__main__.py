"""The loop: one request a line on standard input, one reply a line on standard output.

What libraries print cannot reach the replies: they are written to a private copy of standard
output, and file descriptor 1 becomes standard error before anything heavy is imported.
"""

import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import platform
import re
import sys
import traceback
from pathlib import Path
from typing import IO, Any

from .state import Refusal, State

# A worker module named here is imported, and its ``prepare()`` called, before MLX is imported:
# CUPTI only sees a process in which it came first.
FIRST = "MOESCOPE_BEFORE_MLX"
NO_MEMORY = (
    "out of memory",
    "outofmemory",
    "bad_alloc",
    "bad allocation",
    "cannot allocate memory",
    "unable to allocate",
    "[malloc",
    "[metal::malloc",
    "cudaerrormemoryallocation",
    "insufficient memory",
    "greater than the maximum allowed buffer size",
)
# What MLX and the runtimes say of a kernel or a mode that this build or device does not have.
NOT_SUPPORTED = (
    "only supports",
    "only supported",
    "not supported",
    "unsupported",
    "no implementation",
    "not yet implemented",
    "not implemented",
    "back-end",
)


def main() -> None:
    _die_with_parent()
    requests, replies = _take_pipes()
    if name := os.environ.get(FIRST):
        _module(name).prepare()
    _send(replies, _ready())
    state = State()
    for line in requests:
        if line.strip():
            reply = _answer(state, line)
            if reply is None:
                break
            _send(replies, reply)


def _answer(state: State, line: str) -> dict[str, Any] | None:
    try:
        request = json.loads(line)
        if not isinstance(request, dict) or not isinstance(request.get("do"), str):
            raise Refusal("failed", 'a request is an object with "do", the name of a command')
        do = request.pop("do")
        if do == "quit":
            return None
        return {"ok": True, "result": _run(state, do, request)}
    except Refusal as error:
        return _failure(error.kind, str(error))
    except ValueError as error:
        if isinstance(error, json.JSONDecodeError):
            return _failure("failed", f"the request is not JSON: {error}")
        return _unexpected(error)
    except (Exception, SystemExit) as error:  # a library may call exit(); the loop goes on
        return _unexpected(error)


def _run(state: State, do: str, arguments: dict[str, Any]) -> dict[str, Any]:
    run = getattr(_module(do), "run", None)
    if run is None:
        raise Refusal("unsupported", f"there is no command {do!r}")
    try:
        inspect.signature(run).bind(state, **arguments)
    except TypeError as error:
        raise Refusal("failed", f"{do}: {error}") from None
    return run(state, **arguments)


def _module(name: str) -> Any:
    if not re.fullmatch("[a-z][a-z_]*", name):
        raise Refusal("unsupported", f"there is no command {name!r}")
    if importlib.util.find_spec(f"{__package__}.{name}") is None:
        raise Refusal("unsupported", f"there is no command {name!r}")
    return importlib.import_module(f"{__package__}.{name}")


def _unexpected(error: BaseException) -> dict[str, Any]:
    traceback.print_exception(error)
    text = f"{type(error).__name__}: {error}"
    lowered = text.lower()
    kind = "failed"
    if isinstance(error, MemoryError) or any(sign in lowered for sign in NO_MEMORY):
        kind = "out_of_memory"
    elif any(sign in lowered for sign in NOT_SUPPORTED):
        kind = "unsupported"
    return _failure(kind, text[:2000])


def _failure(kind: str, message: str) -> dict[str, Any]:
    return {"ok": False, "error": {"kind": kind, "message": message}}


def _send(replies: IO[str], value: dict[str, Any]) -> None:
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        traceback.print_exception(error)
        text = json.dumps(_failure("failed", f"the result cannot be sent: {error}"))
    sys.stderr.flush()
    replies.write(text + "\n")
    replies.flush()


def _take_pipes() -> tuple[IO[str], IO[str]]:
    """Private copies of standard input and output; children and libraries get neither."""
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return requests, replies


def _die_with_parent() -> None:
    if not sys.platform.startswith("linux"):
        return
    import ctypes
    import signal

    parent = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it died before the call
        os._exit(1)


def _ready() -> dict[str, Any]:
    import mlx.core as mx

    versions = {name: _version(name) for name in ("mlx", "mlx-lm", "mlx-vlm")}
    return {
        "ready": True,
        "pid": os.getpid(),
        "versions": {**versions, "python": platform.python_version()},
        "device": mx.default_device().type.name,
        "library_sha256": _library_digest(),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _library_digest() -> str | None:
    """sha256 of libmlx, the code that computes; None if the package has none of its own."""
    spec = importlib.util.find_spec("mlx")
    for folder in spec.submodule_search_locations or ():
        for path in sorted(Path(folder).glob("lib/libmlx.*")):
            if path.suffix in (".so", ".dylib"):
                with open(path, "rb") as file:
                    return hashlib.file_digest(file, "sha256").hexdigest()
    return None


if __name__ == "__main__":
    main()
