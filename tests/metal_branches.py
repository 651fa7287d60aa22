"""What the worker does where Metal is there, run on a CPU that is told so.

Runs in the arm's interpreter. Argument: the folder of an inkling checkpoint. Output: JSON.
"""

import contextlib
import importlib
import json
import sys
from types import SimpleNamespace

import mlx.core as mx

from moescope.worker import bandwidth, load, runtime
from moescope.worker.modules import survey
from moescope.worker.patches import applied
from moescope.worker.state import State


def wired():
    """package -> [(what wired_limit was given, whether it was left)], and without Metal."""
    found = {}
    for name in ("mlx_lm", "mlx_vlm"):
        generate = importlib.import_module(f"{name}.generate")
        given = []

        @contextlib.contextmanager
        def limit(model, streams=None, given=given, generate=generate):
            right = streams == [generate.generation_stream]
            given.append([model, right, "in"])
            yield
            given.append("left")

        original, generate.wired_limit = generate.wired_limit, limit
        state = SimpleNamespace(package=name.replace("_", "-"), model=f"the model of {name}")
        with runtime.wired(state):
            given.append("inside")
        mx.metal.is_available = lambda: False
        with runtime.wired(state):
            given.append("without")
        mx.metal.is_available = lambda: True
        generate.wired_limit = original
        found[name] = given
    return found


def patterns():
    """Bandwidth on a GPU that is not CUDA's: MLX's own operations, not the CUDA kernels."""

    def refuse(*_):
        raise AssertionError("the CUDA kernels were taken")

    original = mx.default_device
    mx.default_device = lambda: SimpleNamespace(type=mx.DeviceType.gpu)
    bandwidth._cuda = refuse
    try:
        return bandwidth.run(None, size=1 << 20, repeats=1)
    finally:
        mx.default_device = original


def trivial(path):
    """Whether inkling's switch says that its scales are trivial, which on Metal lets the block
    reach past the switch: plainly, and with its experts skipped."""
    state = State()
    load.run(state, package="mlx-vlm", path=path)
    switch = survey(state).blocks[0].switch.module
    plain = switch.scales_trivial()
    with applied(state, ["skip_experts"]):
        skipped = switch.scales_trivial()
    return [plain, skipped, switch.scales_trivial()]


if __name__ == "__main__":
    mx.metal.is_available = lambda: True
    found = {"wired": wired(), "bandwidth": patterns()}
    mx.metal.is_available = lambda: False
    found["trivial"] = trivial(sys.argv[1])
    print(json.dumps(found))
