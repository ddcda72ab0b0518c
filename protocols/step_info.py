"""Defines the reports of a policy to its user: the result of each step, and the events for ``on_event``.

``on_event`` is called inside ``step``, on its thread, in the order of the events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch


@dataclass(frozen=True, slots=True)
class StepInfo:
    """Reports the result of one ``step``; true if weights changed.

    Attributes:
        averaged_this_iteration: Whether weights changed.
        round: Number of the round that changed them or was abandoned; 0 if neither happened.
        donors: Ranks whose weights were averaged, ascending.
        weights: Weights of the donors, with sum 1.
        staleness_steps: Age of the oldest snapshot in steps: this rank's iteration minus the donor's, at least 0.
        seconds: Seconds from the assignment to the new weights.
        nbytes: Number of bytes received for the average, without those that this rank received as a reducer; so 0 if
            this rank was the only reducer.
        abandoned: Reason why a round that this rank should have applied was abandoned, else "".
        recovered: Description of this rank's non-finite state, because of which the average was taken whole and the
            optimizer's state was reset, for any options; else "".
        coordinator: Rank that coordinated the round; -1 if there was none.
        route: Route of the donors' weights, ``"direct"`` or ``"sharded"``; "" if the policy has no routes.
        island: Number of this rank's island, from 0; -1 if the policy has no islands.
        migrants: Ranks in ``donors`` that are in another island.
    """

    averaged_this_iteration: bool = False
    round: int = 0
    donors: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    staleness_steps: int = 0
    seconds: float = 0.0
    nbytes: int = 0
    abandoned: str = ""
    recovered: str = ""
    coordinator: int = -1
    route: str = ""
    island: int = -1
    migrants: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return self.averaged_this_iteration

    def __str__(self) -> str:
        if self.abandoned:
            return f"round {self.round}: abandoned, {self.abandoned}"
        if not self.averaged_this_iteration:
            return "nothing changed"
        if not self.donors:
            return f"round {self.round}: fresh weights"
        ranks = ", ".join(map(str, self.donors))
        age = f"{self.staleness_steps} step{'' if self.staleness_steps == 1 else 's'} old"
        if self.migrants:
            age += f"; {', '.join(map(str, self.migrants))} from another island"
        cure = f"; {self.recovered}: taken whole, optimizer reset" if self.recovered else ""
        return f"round {self.round}: average of rank{'' if len(self.donors) == 1 else 's'} {ranks} ({age}){cure}"


#: Result of every step in which nothing happened, shared so that such a step makes no object.
NOTHING = StepInfo()


def fields_of(info: StepInfo) -> dict[str, Any]:
    """Return the fields by name, in a new dict."""
    return dict(_NOTHING) if info is NOTHING else {name: getattr(info, name) for name in _NAMES}


_NAMES: Final = tuple(StepInfo.__dataclass_fields__)
_NOTHING: Final = {name: getattr(NOTHING, name) for name in _NAMES}


@dataclass(frozen=True, slots=True, eq=False)
class SnapshotTaken:
    """Announces to ``on_event``, inside a donor's step, that a snapshot of its state was taken.

    Attributes:
        round: Round that asked for the snapshot; for a snapshot published to all members, its version.
        iteration: Iteration of the donor, from 0.
        state: Flat 1-D tensors by dtype name (``"float32"``); valid only during the call, and must not be changed.
        island: Number of the island whose round asked for it if it is another island, else -1.
    """

    round: int
    iteration: int
    state: Mapping[str, torch.Tensor]
    island: int = -1


@dataclass(frozen=True, slots=True, eq=False)
class AverageApplied:
    """Announces to ``on_event``, inside a replacer's step, that its weights have just been replaced.

    Attributes:
        round: Number of the round.
        donors: Ranks of the donors, ascending.
        weights: Weights of the donors in the same order, not normalised.
        best: Donor of the integer and bool entries; -1 if there is none.
        iteration: Iteration of the replacer, from 0.
        state: New state of this rank, in the form of :class:`SnapshotTaken`.
        versions: Versions of the donors' snapshots, in the same order, if they are not all of this round.
    """

    round: int
    donors: tuple[int, ...]
    weights: tuple[float, ...]
    best: int
    iteration: int
    state: Mapping[str, torch.Tensor]
    versions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RoleAssigned:
    """Announces to ``on_event`` that a round has given this rank a role.

    :class:`AverageApplied`, :class:`RoundEnded` or :class:`RoundAbandoned` of the same round follows, unless the policy
    is left first. A donor gets :class:`SnapshotTaken` in between, if the round has not ended before its next step.

    Attributes:
        round: Number of the round.
        role: Role of this rank, ``"donor"`` or ``"replacer"``.
        donors: Ranks that are asked for snapshots, ascending; empty for fresh weights of ``model_builder``.
        replacers: Ranks that will take the average, ascending.
        island: Number of the round's island if it is another island than this rank's, else -1.
    """

    round: int
    role: str
    donors: tuple[int, ...]
    replacers: tuple[int, ...]
    island: int = -1


@dataclass(frozen=True, slots=True)
class RoundEnded:
    """Announces to ``on_event`` that a donor's part in a round is over: its snapshot was sent, and is no longer kept.

    Attributes:
        round: Number of the round.
        reason: Reason for the end, such as ``"every replacer has answered"``.
        island: Island as in :class:`RoleAssigned`.
    """

    round: int
    reason: str
    island: int = -1


@dataclass(frozen=True, slots=True)
class RoundAbandoned:
    """Announces to ``on_event`` that this rank has abandoned its part in a round.

    Attributes:
        round: Number of the round.
        reason: Reason why a replacer keeps its weights, or a donor sends no snapshot.
        island: Island as in :class:`RoleAssigned`.
    """

    round: int
    reason: str
    island: int = -1


@dataclass(frozen=True, slots=True)
class CoordinatorChanged:
    """Announces to ``on_event`` that another rank has become the coordinator.

    Attributes:
        rank: Rank of the new coordinator.
        epoch: Number of the epoch, which grows with each change.
    """

    rank: int
    epoch: int


PolicyEvent: TypeAlias = (
    SnapshotTaken | AverageApplied | RoleAssigned | RoundEnded | RoundAbandoned | CoordinatorChanged
)


class UserEvents:
    """Passes this rank's events to ``on_event``, at once or inside the next step.

    Args:
        on_event: The user's callback; None if the user wants no events.

    Attributes:
        are_wanted: Whether there is a callback.
    """

    def __init__(self, on_event: Callable[[PolicyEvent], None] | None) -> None:
        self._on_event = on_event
        self._pending: deque[PolicyEvent] = deque()
        self.are_wanted = on_event is not None

    def add(self, event: PolicyEvent) -> None:
        """Keep an event for the next step."""
        if self.are_wanted:
            self._pending.append(event)

    def tell(self) -> None:
        """Call ``on_event`` for the kept events. If it raises, the next step continues with the event after that."""
        while self._pending:
            self.tell_now(self._pending.popleft())

    def tell_now(self, event: PolicyEvent) -> None:
        """Call ``on_event`` at once, if the user gave it."""
        if self._on_event is not None:
            self._on_event(event)
