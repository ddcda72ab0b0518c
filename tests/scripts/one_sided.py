"""Shared by the tests of the one-sided policy: a record of published and applied snapshots, and its check.

Used on the local transport, in simulations and, from the ranks' reports, under mpirun. Averages are recomputed with
numpy from the snapshots that ``on_event`` received from the donors, found by donor and version.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from scripts.population import State, expected_average, flat_state, kept_part, same_bits
from torch import nn

from protocols import AverageApplied, PolicyEvent, SnapshotTaken


@dataclass(slots=True)
class Applied:
    """One replacement: the rank, its event, and its state before and after."""

    rank: int
    event: AverageApplied
    before: State | None
    state: State


@dataclass(slots=True)
class Ledger:
    """Everything that the ranks of one policy reported.

    Attributes:
        snapshots: Flat state by (donor, version).
        applied: Replacements, in order.
        before: State of each rank before its current step.
        stepping: Ranks inside ``step``.
        told: Metrics that each rank passed to ``step``, the newest last; for :meth:`verify_weights`.
        metrics: Metric that was published with each snapshot.
    """

    snapshots: dict[tuple[int, int], State] = field(default_factory=dict)
    iterations: dict[tuple[int, int], int] = field(default_factory=dict)
    applied: list[Applied] = field(default_factory=list)
    before: dict[int, State] = field(default_factory=dict)
    stepping: set[int] = field(default_factory=set)
    told: dict[int, list[float]] = field(default_factory=dict)
    metrics: dict[tuple[int, int], float] = field(default_factory=dict)

    def listener(self, rank: int, model: nn.Module) -> Callable[[PolicyEvent], None]:
        """Return the callback for one rank."""

        def on_event(event: PolicyEvent) -> None:
            assert rank in self.stepping, f"rank {rank} received {type(event).__name__} outside its step"
            state = {name: tensor.clone() for name, tensor in event.state.items()}
            now = flat_state(model)
            assert state.keys() == now.keys() and all(same_bits(state[name], now[name]) for name in now)
            if isinstance(event, SnapshotTaken):
                first = event.round - event.round % 1_000_000  # of a restarted rank
                versions = (version for donor, version in self.snapshots if donor == rank and version > first)
                last = max(versions, default=first)
                assert event.round == last + 1, f"rank {rank} published version {event.round} after version {last}"
                self.snapshots[rank, event.round] = state
                self.iterations[rank, event.round] = event.iteration
                if rank in self.told:
                    self.metrics[rank, event.round] = self.told[rank][-1]
            else:
                self.applied.append(Applied(rank, event, self.before.get(rank), state))

        return on_event

    def by(self, rank: int) -> list[AverageApplied]:
        return [entry.event for entry in self.applied if entry.rank == rank]

    def verify(self, *, momentum: float = 0.0) -> int:
        """Recompute every average, bit for bit; return their number."""
        for entry in self.applied:
            verify(entry, self.snapshots, momentum=momentum)
        return len(self.applied)

    def verify_weights(self, metric_mode: str) -> int:
        """Recompute the weights of ``weighted_mean`` from the metrics of the snapshots that were averaged.

        The weights are differences from the worst metric at the time when the donors were drawn: one number for all
        donors, which some rank had reported. Metrics and their differences must be exact, and below 2**20.

        Returns:
            The number of averages of several donors with such weights. If no donor has gained anything, all weights are
            1.
        """
        sign = 1.0 if metric_mode == "max" else -1.0
        told = {metric for metrics in self.told.values() for metric in metrics}
        count = 0
        for entry in self.applied:
            event = entry.event
            keys = list(zip(event.donors, event.versions, strict=True))
            if set(event.weights) == {1.0}:
                continue
            floors = {self.metrics[key] - sign * weight for key, weight in zip(keys, event.weights, strict=True)}
            assert len(floors) == 1 and floors <= told, (
                f"rank {entry.rank}, replacement {event.round}: weights {event.weights} for versions "
                f"{event.versions} of {event.donors} with metrics {[self.metrics[key] for key in keys]} must follow "
                f"from one floor, got {floors}"
            )
            count += len(keys) > 1
        return count


def verify(entry: Applied, snapshots: dict[tuple[int, int], State], *, momentum: float = 0.0) -> None:
    """Check one replacement against the snapshots of its donors."""
    rank, event = entry.rank, entry.event
    assert event.donors == tuple(sorted(set(event.donors))) and rank not in event.donors, event.donors
    assert len(event.donors) == len(event.weights) == len(event.versions)
    assert all(math.isfinite(weight) and weight > 0.0 for weight in event.weights), event.weights
    if not event.donors:
        return
    assert event.best in event.donors
    given = {donor: snapshots[donor, version] for donor, version in zip(event.donors, event.versions, strict=True)}
    momentum = kept_part(entry.before, momentum)
    for name, tensor in entry.state.items():
        own = None if entry.before is None else entry.before[name]
        expected = expected_average(name, given, event.weights, event.best, own, momentum)
        if momentum == 1.0 and own is not None and own.is_floating_point():
            expected = own
        assert same_bits(tensor, expected), (
            f"rank {rank}, replacement {event.round}, {name}: {tensor.tolist()[:8]} must be "
            f"{expected.tolist()[:8]}, the average of versions {event.versions} of {event.donors} with weights "
            f"{event.weights}"
        )
