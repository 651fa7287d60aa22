"""moescope.kernels: tests/kernels/shim_metal.py, run in the arm's interpreter."""

import pytest

import kernels_checks


@pytest.mark.parametrize("name", kernels_checks.names("shim_metal"))
def test_kernels(name):
    kernels_checks.require("shim_metal", name)
