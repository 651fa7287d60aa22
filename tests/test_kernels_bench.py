"""The bench's variants of the kernels: tests/kernels/bench.py, run in the arm's interpreter."""

import pytest

import kernels_checks


@pytest.mark.parametrize("name", kernels_checks.names("bench"))
def test_kernels(name):
    kernels_checks.require("bench", name)
