"""Changing what modules of a loaded model do, and taking every change back.

A call is intercepted by giving that one object a subclass of its own class: the other modules of
the class are untouched and not slowed down, and ``isinstance`` still holds.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

ABSENT = object()


class Changes:
    """Changes to a model, as a context manager: all are undone, last first, whatever happens."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        failed: list[BaseException] = []
        while self._undo:
            try:
                self._undo.pop()()
            except Exception as problem:  # the other changes are still to be undone
                failed.append(problem)
        if failed and error is None:
            raise failed[0]

    def method(self, module: Any, name: str, make: Callable[[Callable], Callable]) -> None:
        """Replace a method of one object: ``make`` gets the function behind it (called with the
        object first) and returns the new one."""
        before = type(module)
        fields = {
            name: make(getattr(before, name)),
            "__module__": before.__module__,
            "__qualname__": before.__qualname__,
            "__doc__": before.__doc__,
        }
        after = type(before.__name__, (before,), fields)
        object.__setattr__(module, "__class__", after)
        self._undo.append(lambda: object.__setattr__(module, "__class__", before))

    def undo(self, function: Callable[[], None]) -> None:
        """Have this called on leaving, for a change that was made elsewhere."""
        self._undo.append(function)

    def call(self, module: Any, make: Callable[[Callable], Callable]) -> None:
        """Replace what calling the object does."""
        self.method(module, "__call__", make)

    def attribute(self, holder: Any, name: str, value: Any) -> None:
        """Set an attribute of a module or of a plain object."""
        before = getattr(holder, name, ABSENT)
        setattr(holder, name, value)
        if before is ABSENT:
            self._undo.append(lambda: delattr(holder, name))
        else:
            self._undo.append(lambda: setattr(holder, name, before))
