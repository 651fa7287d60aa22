"""moescope.kernels: tests/kernels/patching.py, run in the arm's interpreter."""

import pytest

import kernels_checks


@pytest.mark.parametrize("name", kernels_checks.names("patching"))
def test_kernels(name):
    kernels_checks.require("patching", name)
