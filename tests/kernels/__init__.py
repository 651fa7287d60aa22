"""Checks of moescope.kernels that need MLX: they run in the arm's interpreter (see runner.py)."""


class Skip(Exception):
    """Why a check cannot run here."""
