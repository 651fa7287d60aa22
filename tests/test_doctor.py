"""The doctor: each thing that can be missing is found, named, and comes with what to do."""

import json
import os
import platform
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from moescope import doctor as package
from moescope.doctor import Finding, doctor, gpu, host, render, study
from moescope.files import write_json
from moescope.study.load import read_yaml
from moescope.study.schema import Machine
from moescope.study.session import open_plan


@pytest.fixture
def plan(root, tmp_path, monkeypatch):
    """Plans of changed copies of the embedded study, in a root of their own."""
    monkeypatch.setattr("moescope.study.plan.fingerprints", lambda *modules: {})
    monkeypatch.setenv("MOESCOPE_LOCK_DIR", str(tmp_path))
    shutil.copytree(root / "envs", tmp_path / "envs")
    (tmp_path / "templates").mkdir()

    def make(change=lambda config: None, backend="cpu"):
        config = read_yaml(root / "config.yaml")
        config["machine"] = Machine(name="test", backend=backend).model_dump(exclude_none=True)
        change(config)
        return open_plan(config, "config.yaml", tmp_path)

    return make


def only(findings):
    (finding,) = findings
    return finding


def test_this_host_is_judged_and_rendered(plan):
    findings = doctor(plan())
    text = render(findings)
    assert {"python", "uv", "system", "machine", "lock", "disk", "memory", "quiet"} <= {
        finding.what for finding in findings
    }
    verdict = text.splitlines()[-1]
    assert (verdict == "ready") is all(finding.ok for finding in findings)
    assert all(finding.todo for finding in findings if not finding.ok)
    assert doctor(root=plan().root)


def test_what_is_wrong_is_marked_and_listed_last():
    text = render([
        Finding(True, "python", "3.12"),
        Finding(False, "compiler", "no g++", "apt install g++"),
    ])  # fmt: skip
    lines = text.splitlines()
    assert lines[0] == "ok    python    3.12"
    assert lines[1] == "STOP  compiler  no g++"
    assert lines[2].strip() == "-> apt install g++"
    assert lines[3] == "not ready: compiler"
    assert render([Finding(True, "python", "3.12", "mind this")]).endswith("ready")


def test_the_exit_code_says_whether_something_is_missing(plan, monkeypatch, capsys):
    from moescope import cli

    monkeypatch.setattr(cli, "_plan", lambda options: plan())
    for ok, code in ((True, 0), (False, 1)):
        monkeypatch.setattr(package, "doctor", lambda plan, ok=ok: [Finding(ok, "x", "y", "z")])
        assert cli.main(["doctor"]) == code
    assert "not ready: x" in capsys.readouterr().out


def test_packages_are_compared_with_the_lock(tmp_path):
    installed = importlib_version("pydantic")
    requirements = tmp_path / "requirements.txt"
    requirements.write_text(
        f"pydantic=={installed} \\\n    --hash=sha256:00\n"
        "colorama==0.0.1 ; sys_platform == 'win32' \\\n    --hash=sha256:00\n"
    )
    assert only(host.interpreter(tmp_path)).found.endswith("packages as locked")
    requirements.write_text("pydantic==0.0.1\n")
    older = only(host.interpreter(tmp_path))
    assert older.ok and f"pydantic {installed} (locked: 0.0.1)" in older.found and older.todo
    requirements.write_text("no-such-package-here==1.0\n")
    assert not only(host.interpreter(tmp_path)).ok


def importlib_version(name):
    from importlib.metadata import version

    return version(name)


def test_an_old_python_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 2))
    assert not only(host.interpreter(tmp_path)).ok


@pytest.mark.parametrize(
    ("kind", "arch", "libc", "mac", "ok"),
    [
        ("Linux", "x86_64", ("glibc", "2.36"), "", True),
        ("Linux", "aarch64", ("glibc", "2.35"), "", True),
        ("Linux", "x86_64", ("glibc", "2.31"), "", False),
        ("Linux", "x86_64", ("", ""), "", False),
        ("Linux", "riscv64", ("glibc", "2.40"), "", False),
        ("Darwin", "arm64", ("", ""), "15.1", True),
        ("Darwin", "arm64", ("", ""), "13.6", False),
        ("Darwin", "x86_64", ("", ""), "15.1", False),
        ("Windows", "AMD64", ("", ""), "", False),
    ],
)
def test_the_system_must_have_wheels(monkeypatch, kind, arch, libc, mac, ok):
    monkeypatch.setattr(platform, "system", lambda: kind)
    monkeypatch.setattr(platform, "machine", lambda: arch)
    monkeypatch.setattr(platform, "libc_ver", lambda: libc)
    monkeypatch.setattr(platform, "mac_ver", lambda: (mac, ("", "", ""), ""))
    finding = only(host.system("cpu"))
    assert finding.ok is ok
    assert bool(finding.todo) is not ok


def program(folder, name, text):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_the_compiler_must_be_there_and_work(tmp_path, monkeypatch):
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setenv("PATH", str(tmp_path))
    finding = only(host.compiler())
    assert not finding.ok and "no g++" in finding.found and "apt install" in finding.todo
    program(
        tmp_path,
        "g++",
        '[ "$1" = --version ] && echo "g++ 12" && exit 0; echo "no cmath" >&2; exit 1',
    )
    finding = only(host.compiler())
    assert not finding.ok and finding.found == "g++ 12 does not compile: no cmath"
    program(tmp_path, "g++", "echo g++ 12")
    assert only(host.compiler()) == Finding(True, "compiler", "g++ 12")


def test_a_study_for_a_gpu_needs_one(plan, tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    cuda = plan(backend="cuda")
    assert not only(study.machine(cuda)).ok
    finding = only(gpu.nvidia())
    assert not finding.ok and "render" in finding.todo
    findings = doctor(cuda)
    assert not {f.what: f.ok for f in findings}["machine"]
    # The locks of the embedded study hold MLX for CPU.
    locks = list(study.locks(cuda))
    assert [lock.ok for lock in locks] == [False, False]
    assert "has mlx-cpu, mlx-metal, the machine's is cuda" in locks[0].found


def test_a_study_for_a_mac_needs_one_and_has_its_locks(plan, tmp_path, monkeypatch):
    metal = plan(backend="metal")
    assert not only(study.machine(metal)).ok
    locks = list(study.locks(metal))
    assert all(lock.ok and lock.found.endswith(": mlx-metal") for lock in locks) and locks
    (tmp_path / "envs" / "mlx-lm-0.32.2.txt").write_text("mlx-cuda-13==0.32.4 \\\n")
    assert "has mlx-cuda-13, the machine's is metal" in next(study.locks(metal)).found
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert only(study.machine(metal)).ok


def test_a_gpu_in_use_is_seen_and_the_driver_compared(plan, tmp_path, monkeypatch):
    from test_measure_gpu import SMI

    folder = tmp_path / "bin"
    folder.mkdir()
    program(folder, "nvidia-smi", SMI.replace("#!/bin/sh\n", "").replace(
        'case "$1" in', 'case "$1" in\n*list-gpus*) echo "GPU 0" ;;\n'
        '*gpu=driver_version*) echo 560.10 ;;'))  # fmt: skip
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("moescope.measure.gpu.Nvml", lambda: (_ for _ in ()).throw(ImportError))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = {finding.what: finding for finding in gpu.nvidia()}
    assert found["gpu"].found == "NVIDIA H200, 140.4 GiB, driver 580.159.04"
    assert found["gpu's users"].found.startswith("2 processes, 1.0 GiB")
    assert "nvidia-ml-py" in found["gpu's watch"].todo
    cuda = plan(backend="cuda")
    assert only(study.machine(cuda)).ok
    assert only(study.memory(cuda)).ok
    for env in ("mlx-lm-0.32.2", "mlx-vlm-0.7.10"):
        (tmp_path / "envs" / f"{env}.txt").write_text("mlx-cuda-13==0.32.4 \\\n")
    drivers = [finding for finding in study.locks(cuda) if finding.what == "driver"]
    assert not drivers[0].ok and "560.10; CUDA 13 needs 580 or newer" in drivers[0].found


@pytest.mark.parametrize(
    ("text", "user", "said"),
    [
        ("RmProfilingAdminOnly: 1\n", 1000, "hardware counters: administrators"),
        ("RmProfilingAdminOnly: 1\n", 0, "are permitted"),
        ("RmProfilingAdminOnly: 0\n", 1000, "are permitted"),
        ("", 1000, "does not say"),
    ],
)
def test_who_may_profile(tmp_path, monkeypatch, text, user, said):
    monkeypatch.setattr(os, "geteuid", lambda: user)
    (tmp_path / "params").write_text(text)
    finding = next(iter(gpu.profiler(tmp_path / "params")))
    assert finding.ok and said in finding.found


def test_disk_and_memory_are_compared_with_the_weights(plan, tmp_path, monkeypatch):
    prepared = plan()
    assert "not known before" in only(study.memory(prepared)).found
    job = prepared.job("fetch", "qwen3-moe")
    write_json(tmp_path / job.folder / "manifest.json", {"bytes": 10 << 30})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=13 << 30))
    finding = only(study.disk(prepared))
    # Ten for the weights, one each for two environments, one to spare.
    assert finding.ok and "13.0 GiB free, about 13.0 GiB needed" in finding.found
    assert "besides deepseek-v4" in finding.found
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=12 << 30))
    assert not only(study.disk(prepared)).ok
    (tmp_path / "work" / "checkpoints" / job.key).mkdir(parents=True)
    (tmp_path / "work" / "envs" / "mlx-lm-0.32.2-0123456789ab").mkdir(parents=True)
    assert "about 2.0 GiB needed" in only(study.disk(prepared)).found
    # Three processes load it: the reference's, the null arm's, the candidate's.
    for free, ok in ((31 << 30, True), (30 << 30, False)):
        monkeypatch.setattr("psutil.virtual_memory", lambda free=free: SimpleNamespace(
            available=free, total=free))  # fmt: skip
        finding = only(study.memory(prepared))
        assert finding.ok is ok
        assert "about 31.0 GiB needed for qwen3-moe" in finding.found


def test_a_missing_lock_is_said(plan, tmp_path):
    prepared = plan()
    (tmp_path / "envs" / "mlx-lm-0.32.2.txt").unlink()
    missing, there = study.locks(prepared)
    assert not missing.ok and "uv pip compile" in missing.todo
    assert there.ok


# The Hub: a server that answers as it does.

REVISION = "0123456789" * 4
MODEL = {
    "id": "org/model",
    "sha": REVISION,
    "siblings": [{"rfilename": "config.json", "size": 3 << 30}],
}


@pytest.fixture
def server(monkeypatch):
    answers = {}

    class Handler(BaseHTTPRequestHandler):
        def answer(self):
            kind = "file" if "/resolve/" in self.path else "model"
            status, code, body = answers.get(kind, (200, None, MODEL))
            data = json.dumps(body).encode()
            self.send_response(status)
            if code:
                self.send_header("X-Error-Code", code)
            self.send_header("ETag", '"abc"')
            self.send_header("X-Repo-Commit", REVISION)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        do_GET = do_HEAD = answer

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(
        "huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}"
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    for name in (
        "http_proxy",
        "https_proxy",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "all_proxy",
        "ALL_PROXY",
    ):
        monkeypatch.delenv(name, raising=False)
    yield answers
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("answers", "ok", "said"),
    [
        ({}, True, "org/model at 012345678901, 3.0 GiB"),
        ({"file": (403, "GatedRepo", {})}, False, "org/model is gated"),
        ({"model": (404, "RevisionNotFound", {})}, False, "has no revision 012345678901"),
        ({"model": (404, "RepoNotFound", {})}, False, "is not there, or not for us"),
        ({"model": (401, "RepoNotFound", {})}, False, "is not there, or not for us"),
        ({"model": (503, None, {})}, False, "does not answer"),
    ],
)
def test_the_hub_is_asked_and_its_refusals_told_apart(server, answers, ok, said):
    server.update(answers)
    finding = study.hub("checkpoint x", "org/model", REVISION)
    assert finding.ok is ok, finding
    assert said in finding.found
    assert bool(finding.todo) is not ok


def test_the_hub_is_asked_only_for_what_is_not_here(plan, tmp_path, monkeypatch, server):
    def hub_and_local(config):
        config["checkpoints"]["qwen3-moe"]["source"] = {
            "kind": "hub", "repo": "org/model", "revision": REVISION}  # fmt: skip
        config["checkpoints"]["qwen3-dense"]["source"] = {
            "kind": "local", "path": "weights", "digest": "ab" * 32}  # fmt: skip

    prepared = plan(hub_and_local)
    remote, local = study.sources(prepared)
    assert remote.ok and "3.0 GiB" in remote.found
    assert not local.ok and "weights: missing" in local.found
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    remote, _ = study.sources(prepared)
    assert not remote.ok and "HF_HUB_OFFLINE" in remote.found
    (tmp_path / "work" / "checkpoints" / prepared.job("fetch", "qwen3-moe").key).mkdir(parents=True)
    (tmp_path / "weights").mkdir()
    assert [finding.ok for finding in study.sources(prepared)] == [True, True]


def test_a_running_measurement_is_mentioned(tmp_path, monkeypatch):
    from test_measure_guard import HOLD, WORKFLOW

    monkeypatch.setenv("MOESCOPE_LOCK_DIR", str(tmp_path))
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD],
        env={**os.environ, "PYTHONPATH": WORKFLOW},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert other.stdout.readline() == "held\n"
        (found,) = [finding for finding in host.quiet() if finding.what == "lock"]
        assert found.ok and "measure other" in found.found
    finally:
        other.kill()
        other.communicate()
    assert not [finding for finding in host.quiet() if finding.what == "lock"]
