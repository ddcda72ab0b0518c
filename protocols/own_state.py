"""Checks whether a rank's state may be sent to other ranks, replaces the rank's weights, and reports this to the user.

A replaced rank keeps a share of its own weights (``momentum``) and its optimizer's state only if they are finite. NaN
moments in Adam, for example, would make the new weights NaN in the next step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from asyncdist.functional.seeding import random_states, set_random_states
from asyncdist.messaging.services import Services
from asyncdist.protocols.options import AveragingOptions, ModelBuilder
from asyncdist.protocols.step_info import AverageApplied, StepInfo, UserEvents
from asyncdist.tensors.flat_state import FlatBuffers, FlatState, SnapshotPool, first_difference
from asyncdist.tensors.infinities import KnownInfinities, all_finite
from asyncdist.tensors.optimizers.reset import reset_optimizer_state
from asyncdist.tensors.optimizers.weights import OptimizerWeights

logger = logging.getLogger("protocols.own_state")


@dataclass(slots=True, kw_only=True, eq=False)
class NewWeights:
    """New weights of a rank, and their origin.

    Attributes:
        donors: Ranks whose weights were averaged, ascending; empty for fresh weights from ``model_builder``.
        weights: Coefficients of the donors in the average, in the same order, not normalised.
        iterations: Iteration at which each donor took its snapshot.
        best: Donor whose integer and bool entries are copied; -1 for fresh weights.
        versions: Version of each donor's snapshot, if snapshots are published; otherwise empty.
        average: Mean of the donors' states; None for fresh weights.
        began_at: Time at which the rank became a replacer, or decided to replace its weights.
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


class OwnState:
    """Checks and replaces the state of one rank's model and optimizer, and reports replacements to the user.

    Attributes:
        flat: The model as flat tensors.
        snapshots: Memory for copies of the model.
        events: Passes events to the user's callback.

    Raises:
        ValueError: ``model_builder`` returns a model with a different layout; the message names the first difference.
    """

    def __init__(self, flat: FlatState, weights: OptimizerWeights, options: AveragingOptions) -> None:
        self.flat = flat
        self._weights = weights
        self._momentum = float(options.momentum)
        self._resets_optimizer = options.resets_optimizer
        self._model_builder = options.model_builder if options.makes_fresh_weights else None
        self._timing = options.timing
        self.snapshots = SnapshotPool(flat)
        self.events = UserEvents(options.on_event)
        self._infinities: KnownInfinities
        self._has_warned = False
        if self._model_builder is not None:
            states = random_states()
            try:
                self._build(self._model_builder)
            finally:
                set_random_states(states)

    def begin(self) -> None:
        """At the policy's start, record the infinite values that belong to the model, such as those in masks."""
        self._infinities = KnownInfinities(self.flat)

    def can_be_sent(self, snapshot: FlatBuffers) -> bool:
        """Return whether a snapshot may be sent to other ranks, i.e. has no unexpected NaN or infinity.

        For the first snapshot that may not be sent, the name of such an entry is logged.
        """
        self._weights.look()
        name = self._infinities.unsound_entry(snapshot)
        if name is not None and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%r contains NaN or infinite values, so this rank is not a donor until all of its values are finite. "
                "(Infinities that a buffer or a frozen parameter contained at the policy's start are allowed.)",
                name,
            )
        return name is None

    def unsound_entry(self, mean: FlatBuffers) -> str | None:
        """Return the name of an entry of ``mean`` that has an unexpected NaN or infinity, or None."""
        return self._infinities.unsound_entry(mean)

    def describe_nonfinite(self) -> str:
        """Describe the non-finite values in the state that this rank would keep after an average, or return ""."""
        keeps_state = not self._resets_optimizer and bool(self._weights.optimizer.state)
        if (self._momentum or keeps_state) and (name := self._infinities.unsound_entry_of_model()) is not None:
            return f"{name!r} was not finite"
        if keeps_state and not all_finite(dict(self._weights.optimizer.state)):
            return "the optimizer's state was not finite"
        return ""

    def apply(
        self,
        new: NewWeights,
        iteration: int,
        services: Services,
        nonfinite: str | None = None,
        momentum: float | None = None,
    ) -> StepInfo:
        """Replace the weights in place, and return the result of the step.

        If this rank's state was not finite, momentum is ignored and the optimizer's state is reset.

        Args:
            nonfinite: Result of :meth:`describe_nonfinite` on a rank of this replica; None to call that method now.
            momentum: Share of this rank's own weights in the new weights; None to use the option's value.
        """
        recovered = ""
        if new.donors:
            assert new.average is not None, f"round {new.round} is complete without an average"
            recovered = self.describe_nonfinite() if nonfinite is None else nonfinite
            kept = self._momentum if momentum is None else momentum
            self.load(new.average, momentum=0.0 if recovered else kept)
        else:
            self._take_fresh()
        if self._resets_optimizer or recovered:
            reset_optimizer_state(self._weights.optimizer)
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
        on_event = self.events.deliver_now if self.events.has_callback else None
        announce_average(
            on_event, self.flat, self.snapshots, iteration, info, new.weights, best=new.best, versions=new.versions
        )

    def note_time(self, name: str, duration_s: float) -> None:
        """Append a duration in seconds to the list ``name`` in the user's ``timing`` dict, if there is one."""
        if self._timing is not None:
            self._timing.setdefault(name, []).append(duration_s)

    def load(self, buffers: FlatBuffers, *, momentum: float = 0.0, has_new_state: bool = False) -> None:
        """Write weights into the model, and update the copies of weights in the optimizer's state.

        If ``has_new_state``, the optimizer's state was already replaced, and belongs to the new weights.
        """
        with self._weights.following(has_new_state=has_new_state):
            self.flat.load(buffers, momentum=momentum)

    def _take_fresh(self) -> None:
        """Replace the weights with those of a new model from ``model_builder``."""
        assert self._model_builder is not None, "reset_weights without model_builder was refused at the start"
        fresh = self._build(self._model_builder)
        buffers = fresh.new_buffers()
        fresh.snapshot(buffers)
        self.load(buffers)

    def _build(self, model_builder: ModelBuilder) -> FlatState:
        built = model_builder()
        model = built[0] if isinstance(built, tuple) else built
        fresh = FlatState(model, trained_only=self.flat.trained_only)
        difference = first_difference(self.flat.fingerprint, fresh.fingerprint)
        if difference is not None:
            raise ValueError(
                f"model_builder must return a model with the same layout as the policy's model (here), but {difference}"
            )
        return fresh
