"""Interventions: what an arm changes in a loaded model, by name, and takes back afterwards."""

import contextlib
from collections.abc import Iterator, Sequence

from .state import State


@contextlib.contextmanager
def applied(state: State, patches: Sequence[str]) -> Iterator[None]:
    yield
