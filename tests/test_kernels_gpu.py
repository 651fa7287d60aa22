"""moescope.kernels on a CUDA device: tests/kernels/on_gpu.py, in the arm's interpreter.

On a host with such a device but without the controller's packages, from tests/:
PYTHONPATH=../workflow:. python -m kernels.runner kernels.on_gpu
"""

import pytest

import kernels_checks


@pytest.mark.gpu
@pytest.mark.parametrize("name", kernels_checks.names("on_gpu"))
def test_kernels(name):
    kernels_checks.require("on_gpu", name)
