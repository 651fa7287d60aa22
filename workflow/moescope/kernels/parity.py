"""The probe in place: every fused call beside the gather path, and beside itself once more.

``MOESCOPE_FUSED_PARITY=1`` before ``fuse``. For finding faults, not for speed: each call waits.
"""

import atexit
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .flags import flag

VARIABLE = "MOESCOPE_FUSED_PARITY"


@dataclass
class Tally:
    """One block's calls: how many, how far from the gather path, how often not the same bits twice.

    worst, mean: root mean square of the difference over that of the gather path's output.
    """

    path: str
    calls: int = 0
    worst: float = 0.0
    total: float = 0.0
    unequal: int = 0
    not_finite: int = 0

    @property
    def mean(self) -> float:
        return self.total / max(self.calls, 1)


class Probe:
    """Collects tallies; prints the worst when the process ends, if anything was seen."""

    def __init__(self) -> None:
        self.tallies: dict[str, Tally] = {}
        self._registered = False

    def watch(self, path: str, fused: Callable, original: Callable) -> Callable[..., Any]:
        """The fused call, compared each time; what it returns is the fused result."""
        tally = self.tallies.setdefault(path, Tally(path))
        if not self._registered:
            self._registered = True
            atexit.register(self.write)

        def call(*args: Any, **kwargs: Any) -> Any:
            first, second = fused(*args, **kwargs), fused(*args, **kwargs)
            other = original(*args, **kwargs).astype(mx.float32)
            a = first.astype(mx.float32)
            error = mx.sqrt(mx.mean((a - other) ** 2) / mx.maximum(mx.mean(other**2), 1e-30))
            same = mx.array_equal(first, second, equal_nan=True)
            finite = mx.all(mx.isfinite(a))
            mx.eval(error, same, finite)
            tally.calls += 1
            tally.unequal += not same.item()
            tally.not_finite += not finite.item()
            value = error.item()
            tally.total += value
            tally.worst = max(tally.worst, value)
            return first

        return call

    def lines(self) -> list[str]:
        """The summary: the worst block first named, then totals."""
        seen = [t for t in self.tallies.values() if t.calls]
        if not seen:
            return []
        worst = max(seen, key=lambda t: t.worst)
        calls = sum(t.calls for t in seen)
        return [
            f"fused parity: {calls} calls in {len(seen)} blocks; "
            f"worst {worst.worst:.2e} at {worst.path}, "
            f"mean {sum(t.total for t in seen) / calls:.2e} (relative to the gather path); "
            f"{sum(t.unequal for t in seen)} not the same bits twice, "
            f"{sum(t.not_finite for t in seen)} not finite"
        ]

    def write(self) -> None:
        """To standard error, so that no protocol on standard output is disturbed."""
        for line in self.lines():
            print(line, file=sys.stderr)


probe = Probe()


def wanted() -> bool:
    """Whether the environment asks for the probe. Raises UserError."""
    return flag(VARIABLE)
