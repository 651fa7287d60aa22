"""The worker's loop: its first line, its replies, what it refuses, how it ends."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys

import pytest

import stages
from moescope.worker.__main__ import _unexpected
from tiny import ROOT, arm_python

LOUD = """
import os, subprocess, sys
print("printed")
os.write(1, b"written to 1\\n")
subprocess.run(["sh", "-c", "echo from a child; cat"])
print("input:", repr(sys.stdin.read()))
raise ModuleNotFoundError("this is not the real package")
"""


class Raw:
    """A worker spoken to line by line, without the client's help."""

    def __init__(self, *folders):
        path = os.pathsep.join(str(folder) for folder in (*folders, ROOT / "workflow"))
        self.process = subprocess.Popen(
            [arm_python(), "-m", "moescope.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            text=True,
        )

    def __enter__(self):
        self.ready = json.loads(self.process.stdout.readline())
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait(timeout=60)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            with contextlib.suppress(OSError):  # a line may be left that nobody reads any more
                pipe.close()

    def line(self, text):
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], 30)
        assert ready, "no reply in 30 s"
        return json.loads(self.process.stdout.readline())

    def ask(self, do, **arguments):
        return self.line(json.dumps({"do": do, **arguments}))


@pytest.fixture(scope="module")
def raw():
    with Raw() as worker:
        yield worker


def test_the_first_line_says_what_runs(raw):
    ready = raw.ready
    assert ready["ready"] is True
    assert ready["pid"] == raw.process.pid
    assert ready["device"] in ("cpu", "gpu")
    assert set(ready["versions"]) == {"mlx", "mlx-lm", "mlx-vlm", "python"}
    code = "import hashlib, mlx.core, pathlib; p = pathlib.Path(mlx.core.__file__).parent / 'lib'"
    code += "; f = [*p.glob('libmlx.so'), *p.glob('libmlx.dylib')][0]"
    code += "; print(mlx.core.__version__, hashlib.sha256(f.read_bytes()).hexdigest())"
    output = subprocess.run([arm_python(), "-c", code], capture_output=True, text=True, timeout=60)
    assert output.stdout.split() == [ready["versions"]["mlx"], ready["library_sha256"]]


@pytest.mark.parametrize(
    ("line", "kind", "part"),
    [
        ("{not json", "failed", "not JSON"),
        ("[1]", "failed", "object"),
        ('{"do": 3}', "failed", "object"),
        ('{"do": "os"}', "unsupported", "no command 'os'"),
        ('{"do": "state"}', "unsupported", "no command 'state'"),
        ('{"do": "../decode"}', "unsupported", "no command"),
        ('{"do": "decode", "prompt": [1], "tokens": 4}', "failed", "send load first"),
        ('{"do": "decode", "prompt": [1], "token": 4}', "failed", "token"),
        ('{"do": "load", "package": "mlx-lm", "path": "/nowhere"}', "failed", "config.json"),
        ('{"do": "load", "package": "torch", "path": "/nowhere"}', "unsupported", "torch"),
    ],
)
def test_what_it_refuses_and_goes_on(raw, line, kind, part):
    reply = raw.line(line)
    assert reply["ok"] is False
    assert reply["error"]["kind"] == kind
    assert part in reply["error"]["message"]
    assert raw.ask("nothing")["error"]["kind"] == "unsupported"


def test_nothing_but_replies_reaches_standard_output(tmp_path):
    """A package that prints, writes to descriptor 1, starts children and reads input: the replies
    stay whole, its output is on standard error, and it cannot eat the next request. It is imported
    by the first request that needs it, not by the start."""
    (tmp_path / "mlx_lm").mkdir()
    (tmp_path / "mlx_lm" / "__init__.py").write_text(LOUD)
    with Raw(tmp_path) as worker:
        reply = worker.ask("layout", package="mlx-lm", config={"model_type": "qwen3"})
        assert reply["error"]["kind"] == "unsupported"
        assert "not the real package" in reply["error"]["message"]
        assert worker.ask("nothing")["ok"] is False
        worker.process.stdin.close()
        said = worker.process.stderr.read()
        for words in ("printed", "written to 1", "from a child", "input: ''"):
            assert words in said


def test_a_library_that_exits_does_not_end_the_loop(tmp_path):
    (tmp_path / "mlx_lm").mkdir()
    (tmp_path / "mlx_lm" / "__init__.py").write_text("import sys; sys.exit('no')")
    with Raw(tmp_path) as worker:
        reply = worker.ask("layout", package="mlx-lm", config={"model_type": "qwen3"})
        assert reply["error"]["kind"] == "failed"
        assert worker.ask("nothing")["ok"] is False


def test_it_ends_with_its_input_and_on_quit():
    for ending in ("close", "quit"):
        with Raw() as worker:
            if ending == "close":
                worker.process.stdin.close()
            else:
                worker.process.stdin.write('{"do": "quit"}\n')
                worker.process.stdin.flush()
            assert worker.process.wait(timeout=60) == 0
            assert worker.process.stdout.read() == ""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a Linux service of the kernel")
def test_it_dies_with_its_parent():
    # The worker's input stays open: its end is not what ends it.
    reader, writer = os.pipe()
    code = (
        "import subprocess, sys, time; p = subprocess.Popen([sys.argv[1], '-m', 'moescope.worker'],"
        " stdin=int(sys.argv[2]), stdout=subprocess.PIPE); print(p.stdout.readline().decode());"
        " sys.stdout.flush(); time.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, arm_python(), str(reader)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "workflow")},
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=[reader],
    )
    os.close(reader)
    child = json.loads(parent.stdout.readline())["pid"]
    os.kill(child, 0)
    os.kill(parent.pid, signal.SIGKILL)
    parent.communicate(timeout=60)
    try:
        assert stages.gone(child)
    finally:
        os.close(writer)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError(), "out_of_memory"),
        (RuntimeError("[malloc] Unable to allocate 99 bytes."), "out_of_memory"),
        (RuntimeError("cudaMallocAsync(&p, n, s) failed: out of memory"), "out_of_memory"),
        (RuntimeError("[GatherMM::eval] Currently only supports float32."), "unsupported"),
        (RuntimeError("[cuda_kernel] No CUDA back-end."), "unsupported"),
        (RuntimeError("[matmul] Last dimension of first input"), "failed"),
        (KeyError("hidden_size"), "failed"),
    ],
)
def test_the_kind_of_an_unexpected_error(error, kind, capsys):
    reply = _unexpected(error)
    assert reply["ok"] is False
    assert reply["error"]["kind"] == kind
    assert type(error).__name__ in capsys.readouterr().err
