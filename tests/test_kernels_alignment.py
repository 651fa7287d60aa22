"""moescope.kernels: tests/kernels/alignment.py, run in the arm's interpreter."""

import pytest

import kernels_checks


@pytest.mark.parametrize("name", kernels_checks.names("alignment"))
def test_kernels(name):
    kernels_checks.require("alignment", name)
