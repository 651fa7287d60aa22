"""moescope.kernels: tests/kernels/routing.py, run in the arm's interpreter."""

import pytest

import kernels_checks


@pytest.mark.parametrize("name", kernels_checks.names("routing"))
def test_kernels(name):
    kernels_checks.require("routing", name)
