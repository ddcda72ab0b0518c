"""Summarises a job's averaging rounds: the times of contributions, the ranks' waits, and the bytes sent.

Each rank records its contributions (``contributed``) and the averages that it applies (``applied``). Events belong to
the same round if they have the same number and the same policy. Policies on several groups number their rounds
independently, so the group's lowest rank is part of the identity.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from asyncdist.recording.events import Event
from asyncdist.report.series import Interned, TimeBins


class AverageKey(NamedTuple):
    """Identity of an averaging round: its population, policy and group (by its lowest rank), and its number."""

    population: int
    policy: int
    group: int
    round: int


@dataclass(slots=True)
class Average:
    """Describes one averaging round, with times in seconds since the job began.

    Attributes:
        first_s, last_s: Times of the first and the last contribution.
        applied_s: Time at which the last rank applied the average, or NaN if no rank applied it.
        left_out: Ranks of the group whose contributions were not averaged.
        gains: Gain of each averaged contribution on held-out data; empty if gains were not measured.
        waited_s: Longest wait of a rank for the average.
        staleness_steps: Largest number of steps between a rank's contribution and its application of the average.
        staleness_versions: Age, in averages, of the weights from which the oldest contribution was computed.
    """

    key: AverageKey
    fragment: int
    first_s: float = np.inf
    last_s: float = -np.inf
    last_rank: int = -1
    contribution_count: int = 0
    applied_s: float = np.nan
    applied_count: int = 0
    donors: tuple[int, ...] = ()
    left_out: tuple[int, ...] = ()
    gains: tuple[float, ...] = ()
    waited_s: float = 0.0
    staleness_steps: int = 0
    staleness_versions: int = 0
    outer_norm: float | None = None
    cosine: float | None = None

    @property
    def late_s(self) -> float:
        """Seconds from the first contribution to the last."""
        return self.last_s - self.first_s


@dataclass(slots=True)
class RankAverages:
    """Collects the averaging rounds of one rank: its contributions, and the averages that it applied.

    Attributes:
        last_count: Number of rounds in which this rank's contribution was the last of several.
        left_out_count: Number of rounds in which this rank's contribution was not averaged.
        wait_bins: Waits for averages over time, in seconds.
    """

    contribution_count: int = 0
    applied_count: int = 0
    last_count: int = 0
    left_out_count: int = 0
    waited_s: float = 0.0
    waited_max_s: float = 0.0
    wire_nbytes: int = 0
    unencoded_nbytes: int = 0
    wait_bins: TimeBins = field(default_factory=TimeBins)


class Averages:
    """Collects all averaging rounds of a job.

    Attributes:
        ranks: Contributions and averages, keyed by rank.
        populations: Populations of policies that average.
    """

    def __init__(self) -> None:
        self.ranks: dict[int, RankAverages] = {}
        self.populations: set[int] = set()
        self._rounds: dict[AverageKey, Average] = {}
        self._rank_lists = Interned()
        self._groups: dict[tuple[int, int, int], int] = {}  # the group's lowest rank, keyed by rank and policy

    def add(self, rank: int, place: tuple[int, int], time_s: float, event: Event) -> None:
        """Add an event: a contribution to an average, or an applied average.

        Args:
            place: Population of the policy, and the policy's index in it.
        """
        own = self.ranks.setdefault(rank, RankAverages())
        self.populations.add(place[0])
        if event.kind == "contributed":
            self._groups[rank, *place] = int(event.get("group"))
        found = self._find(rank, place, event)
        if event.kind == "contributed":
            own.contribution_count += 1
            own.wire_nbytes += int(event.get("wire_nbytes"))
            own.unencoded_nbytes += int(event.get("unencoded_nbytes"))
            found.contribution_count += 1
            found.first_s = min(found.first_s, time_s)
            if time_s > found.last_s:
                found.last_s, found.last_rank = time_s, rank
            return
        waited_s = float(event.get("waited_s") or 0.0)
        own.applied_count += 1
        own.waited_s, own.waited_max_s = own.waited_s + waited_s, max(own.waited_max_s, waited_s)
        own.wait_bins.add(time_s, waited_s)
        found.applied_s, found.applied_count = np.fmax(found.applied_s, time_s), found.applied_count + 1
        found.donors = self._rank_lists(event.get("donors"))
        found.left_out = self._rank_lists(event.get("left_out"))
        found.gains = tuple(event.get("gains") or ())
        found.waited_s = max(found.waited_s, waited_s)
        found.staleness_steps = max(found.staleness_steps, int(event.get("staleness_steps") or 0))
        found.staleness_versions = max(found.staleness_versions, int(event.get("staleness_versions") or 0))
        found.outer_norm, found.cosine = event.get("outer_norm"), event.get("cosine")

    def first_s(self, rank: int, place: tuple[int, int], event: Event) -> float:
        """Return the time of the first contribution to the round to which ``event``, a contribution, belongs."""
        return self._find(rank, place, event).first_s

    def count_late(self) -> None:
        """Count the rounds in which each rank contributed last, or was left out.

        Called after all events have been added.
        """
        for each in self._rounds.values():
            if each.contribution_count > 1:
                self.ranks[each.last_rank].last_count += 1
            for rank in each.left_out:
                self.ranks.setdefault(rank, RankAverages()).left_out_count += 1

    def rounds(self, population: int | None = None) -> list[Average]:
        """Return the rounds of one population, or of all populations, ordered by their first contributions."""
        found = (each for each in self._rounds.values() if population is None or each.key.population == population)
        return sorted(found, key=lambda each: (min(each.first_s, np.inf), each.key))

    def _find(self, rank: int, place: tuple[int, int], event: Event) -> Average:
        # A rank that has joined may apply its donors' average before it contributes.
        ranks = [rank, *((event.get("donors") or ()) if event.kind == "applied" else ())]
        group = next((self._groups[each, *place] for each in ranks if (each, *place) in self._groups), 0)
        key = AverageKey(*place, group, int(event.get("round")))
        return self._rounds.setdefault(key, Average(key, int(event.get("fragment"))))
