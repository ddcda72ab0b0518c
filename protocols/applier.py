"""Puts an average, or fresh weights, in place of a rank's own weights inside a step, and says what was done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from asyncdist.protocols.own_state import OwnState
from asyncdist.protocols.step_info import AverageApplied, StepInfo, UserEvents
from asyncdist.tensors.flat_state import FlatBuffers, FlatState, SnapshotPool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NewWeights:
    """Describes what takes the place of a rank's weights, and where it comes from.

    Attributes:
        round: the number that events and results call it by.
        donors: the ranks whose weights were averaged, ascending; empty for fresh weights of ``model_builder``.
        weights: of the donors, in their order, not normalised.
        iterations: the step at which each donor took its snapshot.
        best: the donor of the integer and bool entries; -1 for fresh weights.
        versions: of the donors' snapshots, where they are not all of this round.
        average: the mean; None for fresh weights.
        began_at: when the rank learnt that it was to be replaced.
        nbytes: received for it.
        coordinator: the rank that coordinated the round; -1 where none did.
        route: as in :class:`StepInfo`.
    """

    round: int
    donors: tuple[int, ...]
    weights: tuple[float, ...]
    iterations: tuple[int, ...]
    best: int
    versions: tuple[int, ...] = ()
    average: FlatBuffers | None
    began_at: float
    nbytes: int
    coordinator: int = -1
    route: str = ""


class Applier:
    """Applies new weights to one rank's model. Both selective policies use it, so both give the same results.

    Args:
        flat: the model's state.
        own: the rank's model and optimizer, which decide what of the old state is kept.
        snapshots: Lends the buffers of the state that ``on_event`` receives.
        events: Tells the user of each application.
    """

    def __init__(self, flat: FlatState, own: OwnState, snapshots: SnapshotPool, events: UserEvents) -> None:
        self._flat = flat
        self._own = own
        self._snapshots = snapshots
        self._events = events

    def apply(
        self, new: NewWeights, iteration: int, clock: Callable[[], float], trouble: str | None = None
    ) -> StepInfo:
        """Change the weights in place, and return what the step reports.

        Args:
            new: the new weights.
            iteration: this rank's, 0-based.
            clock: the world's, read when the new weights are in place.
            trouble: as for :meth:`OwnState.take`.
        """
        if new.donors:
            assert new.average is not None, f"round {new.round} is complete without an average"
            recovered = self._own.take(new.average, trouble)
        else:
            self._own.take_fresh()
            recovered = ""
        total = sum(new.weights)
        return StepInfo(
            averaged_this_iteration=True,
            round=new.round,
            donors=new.donors,
            weights=tuple(weight / total for weight in new.weights),
            staleness_steps=max([0, *(iteration - taken_at for taken_at in new.iterations)]),
            seconds=clock() - new.began_at,
            nbytes=new.nbytes,
            recovered=recovered,
            coordinator=new.coordinator,
            route=new.route,
        )

    def announce(self, new: NewWeights, iteration: int) -> None:
        """Call ``on_event`` with the state of this rank after :meth:`apply`, if the user asked for events."""
        if not self._events.are_wanted:
            return
        state = self._snapshots.acquire()
        try:
            self._flat.snapshot(state)
            self._events.tell_now(
                AverageApplied(new.round, new.donors, new.weights, new.best, iteration, state.by_name(), new.versions)
            )
        finally:
            self._snapshots.release(state)
