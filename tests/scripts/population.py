"""What the tests of policies share: a model with every kind of entry, and a record of what a population did.

Used by tests in this process and by programs under mpirun. It checks with numpy, by its own arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from protocols import AverageApplied, PolicyEvent, SnapshotTaken

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
    """Make every entry of the state equal to ``value``; one that is not finite goes into the floating ones only."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if math.isfinite(value) or tensor.is_floating_point():
                tensor.fill_(value)
    return model


def values(model: nn.Module, *, floating: bool) -> set[float]:
    """The different values among the floating entries, or among the others."""
    return {
        float(element)
        for tensor in model.state_dict().values()
        if tensor.is_floating_point() == floating
        for element in tensor.flatten()
    }


def identity(model: nn.Module) -> list[tuple[str, int, int]]:
    """Which objects a model is made of, and where they lie."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [(name, id(tensor), tensor.data_ptr()) for name, tensor in tensors]


def clone_state(model: nn.Module) -> State:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def equal_states(one: State, two: State) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    # At a process's first optimizer torch imports its compiler, to keep it away from this method: a second of work.
    method = getattr(torch.optim.Optimizer.add_param_group, "__wrapped__", torch.optim.Optimizer.add_param_group)
    vars(method).setdefault("__dynamo_disable", method)
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


@dataclass(slots=True)
class Story:
    """What ``on_event`` told on all ranks of one policy, and the check of it.

    Attributes:
        snapshots: flat state of the donor, by (round, rank).
        applications: (rank, event, the rank's flat state before it or None), in order.
    """

    snapshots: dict[tuple[int, int], State] = field(default_factory=dict)
    applications: list[tuple[int, AverageApplied, State | None]] = field(default_factory=list)
    before: dict[int, State] = field(default_factory=dict)

    def listener(self, rank: int) -> Callable[[PolicyEvent], None]:
        """The callback for one rank."""

        def on_event(event: PolicyEvent) -> None:
            state = {name: tensor.clone() for name, tensor in event.state.items()}
            if isinstance(event, SnapshotTaken):
                assert (event.round, rank) not in self.snapshots, f"rank {rank}: two snapshots in round {event.round}"
                self.snapshots[event.round, rank] = state
            else:
                kept = AverageApplied(event.round, event.donors, event.weights, event.best, event.iteration, state)
                self.applications.append((rank, kept, self.before.get(rank)))

        return on_event

    def applied_by(self, rank: int) -> list[AverageApplied]:
        return [event for who, event, _ in self.applications if who == rank]

    def verify(self, *, momentum: float = 0.0) -> int:
        """Recompute every average bit for bit; how many there were. Also: one role per round, nothing applied twice."""
        seen: dict[int, int] = {}
        for rank, event, before in self.applications:
            assert event.round > seen.get(rank, 0), f"rank {rank} applied round {event.round} after {seen.get(rank)}"
            seen[rank] = event.round
            assert (event.round, rank) not in self.snapshots, f"rank {rank} gave and took in round {event.round}"
            assert event.donors == tuple(sorted(set(event.donors))), f"donors out of order: {event.donors}"
            assert rank not in event.donors, f"rank {rank} is its own donor"
            if not event.donors:
                continue
            given = {donor: self.snapshots[event.round, donor] for donor in event.donors}
            assert event.best in given, f"the best donor {event.best} is none of {event.donors}"
            for name, tensor in event.state.items():
                own = None if before is None else before[name]
                expected = expected_average(name, given, event.weights, event.best, own, momentum)
                assert same_bits(tensor, expected), (
                    f"rank {rank}, round {event.round}, {name}: {tensor.tolist()[:8]} is not {expected.tolist()[:8]}, "
                    f"the average of {event.donors} with {event.weights}"
                )
        return len(self.applications)


def flat_state(model: nn.Module) -> State:
    """A model's state as policies lay it out: by dtype, each memory once, in the order of the modules."""
    found: dict[str, list[torch.Tensor]] = {}
    seen: set[int] = set()
    for module in model.modules():
        for tensor in [*module._parameters.values(), *module._buffers.values()]:
            if tensor is None or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            found.setdefault(str(tensor.dtype).removeprefix("torch."), []).append(tensor.detach().flatten())
    return {name: torch.cat(parts).clone() for name, parts in found.items()}


def expected_average(
    name: str,
    given: Mapping[int, State],
    weights: tuple[float, ...],
    best: int,
    own: torch.Tensor | None,
    momentum: float,
) -> torch.Tensor:
    """One flat tensor of the average: weighted sum in rank order, divided by the sum of the weights."""
    first = next(iter(given.values()))[name]
    if not first.is_floating_point():
        return given[best][name]
    width: Any = np.float64 if first.dtype == torch.float64 else np.float32
    total: Any = None
    for donor, weight in zip(sorted(given), weights, strict=True):
        product = given[donor][name].to(torch.float64 if width is np.float64 else torch.float32).numpy() * width(weight)
        total = product if total is None else total + product
    average = total / width(sum(weights))
    if momentum and own is not None:
        mine = own.to(torch.float64 if width is np.float64 else torch.float32).numpy()
        average = mine * width(momentum) + average * width(1.0 - momentum)
    return torch.from_numpy(np.asarray(average, dtype=width)).to(first.dtype)


def same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Equal to the bit, NaN included."""
    return (
        one.dtype == two.dtype
        and one.shape == two.shape
        and torch.equal(one.contiguous().view(torch.uint8), two.contiguous().view(torch.uint8))
    )
