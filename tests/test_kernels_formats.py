"""moescope.kernels: tests/kernels/formats.py, run in the arm's interpreter."""

import pytest

import kernels_checks


@pytest.mark.parametrize("name", kernels_checks.names("formats"))
def test_kernels(name):
    kernels_checks.require("formats", name)
