"""Replaces a rank's weights inside a step with an average or with fresh weights, and reports the replacement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from asyncdist.messaging.services import Services
from asyncdist.protocols.own_state import OwnState
from asyncdist.protocols.step_info import AverageApplied, StepInfo, UserEvents
from asyncdist.tensors.flat_state import FlatBuffers, FlatState, SnapshotPool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NewWeights:
    """New weights of a rank, and their origin.

    Attributes:
        donors: Ranks whose weights were averaged, ascending; empty for fresh weights from ``model_builder``.
        weights: Coefficients of the donors in the average, in the same order, not normalised.
        iterations: Iteration at which each donor took its snapshot.
        best: Donor whose integer and bool entries are copied; -1 for fresh weights.
        versions: Version of each donor's snapshot, if snapshots are published; otherwise empty.
        average: Mean of the donors' states; None for fresh weights.
        began_at: Time at which the rank was assigned as a replacer, or decided to replace its weights.
        route: Route of the donors' weights, ``"direct"`` or ``"sharded"``, or "".
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


def announce_average(
    on_event: Callable[[AverageApplied], None] | None,
    flat: FlatState,
    snapshots: SnapshotPool,
    iteration: int,
    info: StepInfo,
    weights: Sequence[float],
    best: int | None = None,
    versions: tuple[int, ...] = (),
) -> None:
    """Pass :class:`AverageApplied`, with this rank's new state, to the user's ``on_event`` callback, if there is one.

    Args:
        info: Result of the step.
        best: Donor whose integer and bool entries were copied; None for the first donor, or -1 without donors.
    """
    if on_event is None:
        return
    state = snapshots.acquire()
    try:
        flat.snapshot(state)
        best = (*info.donors, -1)[0] if best is None else best
        facts = info.round, info.donors, tuple(weights), best, iteration
        on_event(AverageApplied(*facts, state.by_name(), versions, info))
    finally:
        snapshots.release(state)


class Applier:
    """Applies new weights to one rank's model, and reports them to the user."""

    def __init__(self, flat: FlatState, own: OwnState, snapshots: SnapshotPool, events: UserEvents) -> None:
        self._flat = flat
        self._own = own
        self._snapshots = snapshots
        self._events = events

    def apply(
        self,
        new: NewWeights,
        iteration: int,
        services: Services,
        nonfinite: str | None = None,
        momentum: float | None = None,
    ) -> StepInfo:
        """Replace the weights in place, and return the result of the step.

        Args:
            nonfinite, momentum: See :meth:`OwnState.adopt_average`.
        """
        if new.donors:
            assert new.average is not None, f"round {new.round} is complete without an average"
            recovered = self._own.adopt_average(new.average, nonfinite, momentum)
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
            seconds=services.time() - new.began_at,
            nbytes=new.nbytes,
            recovered=recovered,
            coordinator=new.coordinator,
            route=new.route,
        )

    def announce(self, new: NewWeights, iteration: int, info: StepInfo) -> None:
        """Pass :class:`AverageApplied`, with this rank's new state, to the user's ``on_event`` callback."""
        on_event = self._events.deliver_now if self._events.has_callback else None
        announce_average(
            on_event, self._flat, self._snapshots, iteration, info, new.weights, best=new.best, versions=new.versions
        )
