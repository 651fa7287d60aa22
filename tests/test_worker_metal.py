"""The worker's Metal branches, in the arm's interpreter on a CPU that is told it has Metal."""

import json
import os
import subprocess
import sys

import pytest

import tiny


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("metal")
    with tiny.worker(folder / "worker.log") as worker:
        path = tiny.checkpoint(worker, folder / "inkling", "mlx-vlm", "inkling")
    root = tiny.ROOT
    done = subprocess.run(
        [os.environ.get("MOESCOPE_ARM_PYTHON", sys.executable), root / "tests/metal_branches.py",
         path],
        env={**os.environ, "PYTHONPATH": str(root / "workflow")},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_weights_are_kept_resident_as_each_runtime_does_it(found):
    for name, given in found["wired"].items():
        assert given == [[f"the model of {name}", True, "in"], "inside", "left", "without"]


def test_bandwidth_on_metal_is_measured_by_mlx_itself(found):
    measured = found["bandwidth"]
    assert measured["size"] == 1 << 20
    assert all(measured[name]["value"] > 0 for name in ("read", "copy", "gather"))


def test_skipped_experts_are_not_reached_past_the_switch(found):
    plain, skipped, after = found["trivial"]
    assert (plain, skipped, after) == (True, False, True)
