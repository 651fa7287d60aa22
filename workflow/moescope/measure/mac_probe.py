"""The guard's view of a Mac beside its cores: heat, power mode, battery, who else uses the GPU.

Foreign cores are CpuProbe's. Asking takes commands, which are work themselves, so it is done
rarely; readings in between repeat the last one.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import macos

PERIOD_S = 2.0
# Windows and their compositor take some; a decode or a video call takes more.
IDLE_GPU = 0.25


@dataclass(frozen=True)
class MacReading:
    """found: as ``macos.health``, with "gpu_busy": a share until ``settle``, then None."""

    found: dict[str, Any]
    why: str | None
    who: str = ""


class MacProbe:
    """Objects to a throttled chip, Low Power Mode, a battery, and, until our processes have loaded,
    to a GPU in use: afterwards the registry cannot tell ours from others'.

    run: how commands are asked. period_s: the least time between two looks.
    """

    name = "mac"

    def __init__(
        self,
        run: macos.Ask | None = None,
        period_s: float = PERIOD_S,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.run, self.period_s, self.clock = run or macos.ask, period_s, clock
        self._reading: MacReading | None = None
        self._at = 0.0
        self._settled = False

    def read(self, own: set[int], thorough: bool) -> MacReading:
        now = self.clock()
        if self._reading is None or now - self._at >= self.period_s:
            self._reading, self._at = self._look(), now
        return self._reading

    def settle(self, own: set[int]) -> None:
        """Our processes are up: the GPU's use may be theirs from now on."""
        self._settled = True
        self._reading = None

    def _look(self) -> MacReading:
        busy = None if self._settled else macos.gpu_busy(self.run)
        found = macos.health(self.run) | {"gpu_busy": busy}
        reasons = macos.objections(found)
        if busy is not None and busy > IDLE_GPU:
            reasons.append(f"others use {busy:.0%} of the GPU")
        return MacReading(found, "; ".join(reasons) or None)

    @staticmethod
    def summary(readings: list[MacReading]) -> dict[str, Any]:
        """Over a run: {"mac": {"throttled", "pressure": the highest, "speed_limit": the lowest (%),
        "power_modes", "power_sources"}}; None or empty where nothing is known."""
        thermal = [reading.found["thermal"] for reading in readings]
        power = [reading.found["power"] for reading in readings]
        said = [one["throttled"] for one in thermal if one["throttled"] is not None]
        levels = [macos.PRESSURES.index(one["pressure"]) for one in thermal if one["pressure"]]
        limits = [one["speed_limit"] for one in thermal if one["speed_limit"] is not None]
        return {
            "mac": {
                "throttled": any(said) if said else None,
                "pressure": macos.PRESSURES[max(levels)] if levels else None,
                "speed_limit": min(limits, default=None),
                "power_modes": sorted({one["mode"] for one in power if one["mode"]}),
                "power_sources": sorted({one["source"] for one in power if one["source"]}),
            }
        }
