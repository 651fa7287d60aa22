"""moescope.kernels: tests/kernels/leaving.py, run in the arm's interpreter."""

import pytest

import kernels_checks


@pytest.mark.parametrize("name", kernels_checks.names("leaving"))
def test_kernels(name):
    kernels_checks.require("leaving", name)
