"""moescope.kernels: tests/kernels/deciding.py, run in the arm's interpreter."""

import pytest

import kernels_checks


@pytest.mark.parametrize("name", kernels_checks.names("deciding"))
def test_kernels(name):
    kernels_checks.require("deciding", name)
