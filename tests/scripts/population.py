"""Provides a model with every kind of entry, and a record of a population's events, to the tests of policies.

Used by tests in this process and by programs under mpirun. It checks averages with numpy, by separate arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from protocols import (
    AverageApplied,
    Contributed,
    CoordinatorChanged,
    PolicyEvent,
    RoleAssigned,
    RoundAbandoned,
    RoundEnded,
    SnapshotTaken,
)

State = dict[str, torch.Tensor]


class Mixed(nn.Module):
    """Two floating widths, tied weights, BatchNorm buffers, integers, bools and an empty entry."""

    def __init__(self, value: float = 0.0, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(3, width)
        self.norm = nn.BatchNorm1d(width)
        self.wide = nn.Linear(width, 2, dtype=torch.float64)
        self.head = nn.Linear(3, width, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("counts", torch.zeros(3, dtype=torch.int32))
        self.register_buffer("flags", torch.zeros(2, dtype=torch.bool))
        self.register_buffer("nothing", torch.zeros(0))
        fill(self, value)


def fill(model: nn.Module, value: float) -> nn.Module:
    """Set every entry of the state to ``value``; a value that is not finite is written to the floating entries only."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if math.isfinite(value) or tensor.is_floating_point():
                tensor.fill_(value)
    return model


def values(model: nn.Module, *, floating: bool) -> set[float]:
    """Return the different values among the floating entries, or among the other entries."""
    return {
        float(element)
        for tensor in model.state_dict().values()
        if tensor.is_floating_point() == floating
        for element in tensor.flatten()
    }


def identity(model: nn.Module) -> list[tuple[str, int, int]]:
    """Return the objects of which a model consists, and their addresses."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [(name, id(tensor), tensor.data_ptr()) for name, tensor in tensors]


def clone_state(model: nn.Module) -> State:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def equal_states(one: State, two: State) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    # torch imports its compiler at a process's first optimizer, which takes a second; this setting avoids the import.
    method = getattr(torch.optim.Optimizer.add_param_group, "__wrapped__", torch.optim.Optimizer.add_param_group)
    vars(method).setdefault("__dynamo_disable", method)
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


@dataclass(slots=True)
class Roles:
    """The roles of one rank, as selective averaging reported them to ``on_event``, and a check of their order.

    Attributes:
        told: All events except those with a state, in order.
        current: Round and role that have not ended, by island.
    """

    rank: int
    told: list[PolicyEvent] = field(default_factory=list)
    current: dict[int, tuple[int, str]] = field(default_factory=dict)
    epoch: int = -1

    def see(self, event: PolicyEvent) -> None:
        """Check an event."""
        if isinstance(event, SnapshotTaken):
            assert self.current.get(event.island) == (event.round, "donor"), (
                f"rank {self.rank}: {event} does not match its role: {self}"
            )
        elif isinstance(event, AverageApplied):
            assert self.current.pop(-1, None) == (event.round, "replacer"), (
                f"rank {self.rank}: {event} does not match its role: {self}"
            )
        elif not isinstance(event, Contributed):
            self.told.append(event)
            self._see_role(event)

    def _see_role(self, event: RoleAssigned | RoundEnded | RoundAbandoned | CoordinatorChanged) -> None:
        if isinstance(event, CoordinatorChanged):
            assert event.epoch > self.epoch, f"rank {self.rank}: {event} after epoch {self.epoch}"
            self.epoch = event.epoch
        elif isinstance(event, RoleAssigned):
            assert event.island not in self.current, f"rank {self.rank}: {event} during another round: {self}"
            named = event.donors if event.role == "donor" else event.replacers
            assert self.rank in named, f"rank {self.rank} is not named in {event}"
            self.current[event.island] = event.round, event.role
        else:
            number, role = self.current.pop(event.island)
            assert event.reason and number == event.round, f"rank {self.rank}: {event} in round {number}"
            assert role == "donor" or isinstance(event, RoundAbandoned), (
                f"rank {self.rank}: {event}, but it is a replacer"
            )


@dataclass(slots=True)
class Story:
    """The events of all ranks of one policy, and their check.

    Attributes:
        snapshots: Flat state of the donor, by (round, rank).
        applications: Tuples (rank, event, the rank's previous flat state or None), in order.
        roles: Roles by rank.
    """

    snapshots: dict[tuple[int, int], State] = field(default_factory=dict)
    applications: list[tuple[int, AverageApplied, State | None]] = field(default_factory=list)
    before: dict[int, State] = field(default_factory=dict)
    roles: dict[int, Roles] = field(default_factory=dict)

    def listener(self, rank: int) -> Callable[[PolicyEvent], None]:
        """Return the callback for one rank."""
        roles = self.roles[rank] = Roles(rank)

        def on_event(event: PolicyEvent) -> None:
            roles.see(event)
            if not isinstance(event, SnapshotTaken | AverageApplied):
                return
            state = {name: tensor.clone() for name, tensor in event.state.items()}
            if isinstance(event, SnapshotTaken):
                assert (event.round, rank) not in self.snapshots, (
                    f"rank {rank} took two snapshots in round {event.round}"
                )
                self.snapshots[event.round, rank] = state
            else:
                kept = AverageApplied(event.round, event.donors, event.weights, event.best, event.iteration, state)
                self.applications.append((rank, kept, self.before.get(rank)))

        return on_event

    def applied_by(self, rank: int) -> list[AverageApplied]:
        return [event for who, event, _ in self.applications if who == rank]

    def verify(self, *, momentum: float = 0.0) -> int:
        """Recompute every average bit for bit, check the roles, and return the number of averages."""
        seen: dict[int, int] = {}
        for rank, event, before in self.applications:
            assert event.round > seen.get(rank, 0), (
                f"rank {rank} applied round {event.round} after round {seen.get(rank)}"
            )
            seen[rank] = event.round
            assert (event.round, rank) not in self.snapshots, (
                f"rank {rank} was donor and replacer in round {event.round}"
            )
            assert event.donors == tuple(sorted(set(event.donors))), f"donors out of order: {event.donors}"
            assert rank not in event.donors, f"rank {rank} is its own donor"
            if not event.donors:
                continue
            given = {donor: self.snapshots[event.round, donor] for donor in event.donors}
            assert event.best in given, f"the best donor {event.best} is not among {event.donors}"
            kept = kept_part(before, momentum)
            for name, tensor in event.state.items():
                own = None if before is None else before[name]
                expected = expected_average(name, given, event.weights, event.best, own, kept)
                assert same_bits(tensor, expected), (
                    f"rank {rank}, round {event.round}, {name}: {tensor.tolist()[:8]} must be "
                    f"{expected.tolist()[:8]}, the average of {event.donors} with weights {event.weights}"
                )
        return len(self.applications)


def flat_state(model: nn.Module) -> State:
    """Return a model's state in the policies' layout: by dtype, each memory once, in the order of the modules."""
    found: dict[str, list[torch.Tensor]] = {}
    seen: set[int] = set()
    for module in model.modules():
        for tensor in [*module._parameters.values(), *module._buffers.values()]:
            if tensor is None or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            found.setdefault(str(tensor.dtype).removeprefix("torch."), []).append(tensor.detach().flatten())
    return {name: torch.cat(parts).clone() for name, parts in found.items()}


def kept_part(before: State | None, momentum: float) -> float:
    """Return the share that a rank keeps of its own weights: 0 if some of them are not finite."""
    own = [] if before is None else [tensor for tensor in before.values() if tensor.is_floating_point()]
    return momentum if all(bool(tensor.isfinite().all()) for tensor in own) else 0.0


def expected_average(
    name: str,
    given: Mapping[int, State],
    weights: tuple[float, ...],
    best: int,
    own: torch.Tensor | None,
    momentum: float,
) -> torch.Tensor:
    """Return one flat tensor of the average, by the definition in :mod:`asyncdist.tensors.means`."""
    first = next(iter(given.values()))[name]
    if not first.is_floating_point():
        return given[best][name]
    wide = torch.float64 if first.dtype == torch.float64 else torch.float32
    average = expected_mean([given[donor][name].to(wide).numpy() for donor in sorted(given)], weights)
    if momentum and own is not None:
        mine = own.to(wide).numpy()
        mixed = mine * average.dtype.type(momentum) + average * average.dtype.type(1.0 - momentum)
        average = np.clip(mixed, np.minimum(mine, average), np.maximum(mine, average))
    return torch.from_numpy(average).to(first.dtype)


def expected_mean(arrays: Sequence[Any], weights: Sequence[float]) -> Any:
    """Return the weighted sum in the given order over the sum of the weights; exact for one value or equal values."""
    if len(arrays) == 1:
        return arrays[0].copy()
    mean, of_equal = (_quotient(each, weights) for each in (arrays, [arrays[-1]] * len(arrays)))
    return np.where((mean == of_equal) & (mean != arrays[-1]), arrays[-1], mean)


def _quotient(arrays: Sequence[Any], weights: Sequence[float]) -> Any:
    """Sum and divide; if finite values overflow, repeat this with all weights smaller by 2^64."""
    width = arrays[0].dtype.type
    found = []
    with np.errstate(all="ignore"):
        for scale in (1.0, 2.0**-64):
            total = arrays[0] * width(weights[0] * scale)
            for array, weight in zip(arrays[1:], weights[1:], strict=True):
                total = total + array * width(weight * scale)
            found.append((total, total / width(sum(weights) * scale)))
    (total, mean), (_, scaled) = found
    are_finite = np.isfinite(np.stack(arrays)).all(axis=0)
    mean = np.where(are_finite & ~np.isfinite(total), scaled, mean)
    largest = np.finfo(width).max
    return np.where(are_finite, np.clip(mean, -largest, largest), mean)


def same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Return whether all bits are equal, NaN included."""
    return (
        one.dtype == two.dtype
        and one.shape == two.shape
        and torch.equal(one.contiguous().view(torch.uint8), two.contiguous().view(torch.uint8))
    )
