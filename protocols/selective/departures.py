"""Detects members that leave selective averaging early, so that the coordinator can warn of them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

#: Seconds after a departure in which no warning is due. Ranks that train for equal times leave within this time.
_PATIENCE_S: Final = 10.0


@dataclass(slots=True)
class _Departure:
    """Time at which a member has left, and the iteration of its last report, or -1 without one."""

    left_at: float
    iteration: int


class Departures:
    """Finds members that have left although the others continue to train and average.

    In a normal end, all ranks make as many steps, so that a slow rank may continue for long, but never makes more steps
    than a member that has left. Otherwise, they train for as long, and leave within seconds.

    Args:
        average_every: Number of steps between two reports of a member.
    """

    def __init__(self, average_every: int) -> None:
        self._average_every = average_every
        self._departures: dict[int, _Departure] = {}  # by rank, until the warning
        self._early: list[int] = []

    def add(self, rank: int, iteration: int, now: float) -> None:
        """Record that a member has left after its report of ``iteration``."""
        self._departures[rank] = _Departure(now, iteration)

    def note_report(self, rank: int, iteration: int) -> None:
        """Record a report of a member that has left. It may arrive after the notice of the departure."""
        if rank in self._departures:
            self._departures[rank].iteration = max(self._departures[rank].iteration, iteration)

    def forget(self, rank: int) -> None:
        """Forget that a member has left, because its new process has joined."""
        self._departures.pop(rank, None)

    def on_decision(self, iterations: Iterable[int], now: float) -> None:
        """Find members that have left early, when the coordinator judges reports of these ``iterations``."""
        reached = list(iterations) if self._departures else []
        if len(reached) < 2:  # a rank that trains alone averages nothing
            return
        for rank, departure in list(self._departures.items()):
            is_behind = max(reached) > departure.iteration + 2 * self._average_every
            if is_behind and now >= departure.left_at + _PATIENCE_S:
                del self._departures[rank]
                self._early.append(rank)

    def take_early(self) -> list[int]:
        """Return each member that has left early, once."""
        early, self._early = self._early, []
        return early
