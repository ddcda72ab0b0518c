"""Defines what a policy tells its user: the result of each step, and the events for ``on_event``.

Events are told inside ``step``, on the thread that calls it, in the order in which they happened.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch


@dataclass(frozen=True, slots=True)
class StepInfo:
    """Says what one ``step`` did; it is true when weights changed.

    Attributes:
        averaged_this_iteration: whether weights changed.
        round: the round that changed them, or that was abandoned; 0 when neither happened.
        donors: the ranks whose weights were averaged, ascending.
        weights: their weights, summing to one.
        staleness_steps: the oldest snapshot's age: this rank's iteration minus the donor's, in steps, at least 0.
        seconds: from the assignment to the new weights.
        nbytes: received for it; what this rank received as a reducer is apart, so that it is 0 where this rank alone
            added up.
        abandoned: why a round that this rank was to apply came to nothing, else "".
        recovered: what of this rank's own state was not finite, where the average was therefore taken whole and the
            optimizer's state reset, whatever the options say; else "".
        coordinator: the rank that coordinated the round; -1 where none did.
        route: how the donors' weights came, ``"direct"`` or ``"sharded"``; "" where a policy has no routes.
        island: the number of this rank's island, from 0; -1 where a policy has no islands.
        migrants: those of ``donors`` that are in another island.
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


#: The result of every step in which nothing happened: such a step makes no object.
NOTHING = StepInfo()


def fields_of(info: StepInfo) -> dict[str, Any]:
    """Return the fields by name, in a dict of the caller's own."""
    return dict(_NOTHING) if info is NOTHING else {name: getattr(info, name) for name in _NAMES}


_NAMES: Final = tuple(StepInfo.__dataclass_fields__)
_NOTHING: Final = {name: getattr(NOTHING, name) for name in _NAMES}


@dataclass(frozen=True, slots=True, eq=False)
class SnapshotTaken:
    """Announces to ``on_event``, inside a donor's step, that a snapshot of its state was taken.

    Attributes:
        round: the round that asked for it; of a snapshot that is published to all members, its version.
        iteration: the donor's, 0-based.
        state: dtype name (``"float32"``) to the flat 1-D tensor; valid during the call, not to be changed.
        island: the other island whose round asked for it; -1 where it is this rank's own, or there are none.
    """

    round: int
    iteration: int
    state: Mapping[str, torch.Tensor]
    island: int = -1


@dataclass(frozen=True, slots=True, eq=False)
class AverageApplied:
    """Announces to ``on_event``, inside a replacer's step, that its weights have just been replaced.

    Attributes:
        round: the round.
        donors: ascending.
        weights: as they were used: not normalised, in the donors' order.
        best: the donor of the integer and bool entries; -1 for none.
        iteration: the replacer's, 0-based.
        state: this rank's own state now; as in :class:`SnapshotTaken`.
        versions: of the donors' snapshots, in their order, where they are not all of this round.
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
    is left before. For a donor :class:`SnapshotTaken` comes between, if the round still goes on at its next step.

    Attributes:
        round: the round.
        role: ``"donor"`` or ``"replacer"``.
        donors: the ranks that are asked to give, ascending; empty for fresh weights of ``model_builder``.
        replacers: those that are to take, ascending.
        island: the other island whose round it is; -1 where it is this rank's own, or there are none.
    """

    round: int
    role: str
    donors: tuple[int, ...]
    replacers: tuple[int, ...]
    island: int = -1


@dataclass(frozen=True, slots=True)
class RoundEnded:
    """Announces to ``on_event`` that a donor's part in a round is over: its snapshot is sent, and not kept any more.

    Attributes:
        round: the round.
        reason: why, as ``"every replacer has answered"``.
        island: as in :class:`RoleAssigned`.
    """

    round: int
    reason: str
    island: int = -1


@dataclass(frozen=True, slots=True)
class RoundAbandoned:
    """Announces to ``on_event`` that this rank's part in a round came to nothing.

    Attributes:
        round: the round.
        reason: why a replacer keeps its weights, or a donor gives no snapshot.
        island: as in :class:`RoleAssigned`.
    """

    round: int
    reason: str
    island: int = -1


@dataclass(frozen=True, slots=True)
class CoordinatorChanged:
    """Announces to ``on_event`` that another rank coordinates the rounds from now on.

    Attributes:
        rank: that rank.
        epoch: grows with each change.
    """

    rank: int
    epoch: int


PolicyEvent: TypeAlias = (
    SnapshotTaken | AverageApplied | RoleAssigned | RoundEnded | RoundAbandoned | CoordinatorChanged
)


class UserEvents:
    """Tells ``on_event`` what happens on this rank: at once, or inside the next step.

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
        """Tell the events that were kept. If the callback raises, the next step continues with the event after it."""
        while self._pending:
            self.tell_now(self._pending.popleft())

    def tell_now(self, event: PolicyEvent) -> None:
        """Call the user's callback, if there is one."""
        if self._on_event is not None:
            self._on_event(event)
