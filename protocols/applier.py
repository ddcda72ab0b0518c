"""Replaces a rank's weights by an average, or by fresh weights, inside a step, and reports it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from asyncdist.protocols.own_state import OwnState
from asyncdist.protocols.step_info import AverageApplied, StepInfo, UserEvents
from asyncdist.tensors.flat_state import FlatBuffers, FlatState, SnapshotPool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NewWeights:
    """Describes the new weights of a rank, and their origin.

    Attributes:
        round: Number of the round in events and results.
        donors: Ranks whose weights were averaged, ascending; empty for fresh weights of ``model_builder``.
        weights: Weights of the donors, in the same order, not normalised.
        iterations: Step at which each donor took its snapshot.
        best: Donor of the integer and bool entries; -1 for fresh weights.
        versions: Versions of the donors' snapshots if they are not all of this round.
        average: Mean of the donors' states; None for fresh weights.
        began_at: Time at which the rank learnt that it would be replaced.
        nbytes: Number of bytes received for the average.
        coordinator: Rank that coordinated the round; -1 if there was none.
        route: Route as in :class:`StepInfo`.
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
        flat: State of the model.
        own: The rank's model and optimizer, which decide which part of the old state is kept.
        snapshots: Pool of buffers for the state that ``on_event`` receives.
        events: Reports each application to the user.
    """

    def __init__(self, flat: FlatState, own: OwnState, snapshots: SnapshotPool, events: UserEvents) -> None:
        self._flat = flat
        self._own = own
        self._snapshots = snapshots
        self._events = events

    def apply(
        self, new: NewWeights, iteration: int, clock: Callable[[], float], trouble: str | None = None
    ) -> StepInfo:
        """Change the weights in place, and return the result of the step.

        Args:
            new: New weights.
            iteration: Iteration of this rank, from 0.
            clock: Clock of the world, read when the new weights are in place.
            trouble: Argument of :meth:`OwnState.take`.
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
