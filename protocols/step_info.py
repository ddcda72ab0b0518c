"""Defines a policy's reports to the user: the result of each step, and the events that ``on_event`` receives.

``on_event`` is called inside ``step``, on the same thread, in the order of the events.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import torch

from asyncdist.wording import plural, ranks_in_words


@dataclass(frozen=True, slots=True)
class StepInfo:
    """Result of one call of ``step``. It is truthy if the weights have changed.

    Attributes:
        averaged_this_iteration: Whether the weights have changed.
        round: Number of the round that changed the weights or was abandoned; 0 if there was none.
        donors: Ranks whose weights were averaged, ascending.
        weights: Weights of the donors in the average; their sum is 1.
        staleness_steps: Age of the oldest snapshot in steps: this rank's iteration minus the donor's, at least 0.
        seconds: Seconds from this rank's assignment as a replacer until its new weights were in place.
        nbytes: Number of bytes received for the average, excluding bytes received as a reducer.
        abandoned: Reason why this rank's replacement was abandoned, or "".
        recovered: Description of this rank's non-finite state, or "". If the state was not finite, momentum was ignored
            and the optimizer's state was reset.
        coordinator: Rank that coordinated the round; -1 without a coordinator.
        route: Route of the donors' weights, ``"direct"`` or ``"sharded"``; "" without routes.
        island: Number of this rank's island, from 0; -1 without islands.
        migrants: Ranks in ``donors`` that are in another island.
        fragment: Number of the averaged fragment, from 0; -1 without fragments.
        wire_nbytes: Encoded size in bytes of this rank's contribution to the average; 0 without codecs.
        outer_norm: L2 norm of the mean difference, the outer optimizer's gradient; None without such an optimizer.
        cosine: Mean cosine between two ranks' differences, near 0 if the ranks learn different things; None if unknown.
        unencoded_nbytes: Size in bytes that this rank's contribution would have with ``wire="float32"``.
        waited_s: Seconds for which this step waited for the average.
        fragment_count: Number of the policy's fragments.
        version: Number of averages of this fragment, including this average; -1 if not counted.
        staleness_versions: Number of averages of this fragment since the average from which the oldest contribution was
            computed; None if not counted.
        left_out: Members whose contributions were not averaged, ascending, because they arrived too late, were not
            finite, or were judged harmful.
        grace_s: Seconds that the leader waited for further contributions after the quorum.
        gains: Gain of each donor's contribution on held-out data; empty if not measured.
        hyperparameters: New hyperparameters of this rank, by name, if they were replaced along with the weights; else
            empty.
        inherited: The donor's hyperparameters, from which the new hyperparameters were made; else empty.
        parts: Result of each average, in the order of rounds, if the step has applied several; else empty. The other
            attributes then summarise these averages (see :func:`together`).
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
    fragment: int = -1
    wire_nbytes: int = 0
    outer_norm: float | None = None
    cosine: float | None = None
    unencoded_nbytes: int = 0
    waited_s: float = 0.0
    fragment_count: int = 1
    version: int = -1
    staleness_versions: int | None = None
    left_out: tuple[int, ...] = ()
    grace_s: float = 0.0
    gains: tuple[float, ...] = ()
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    inherited: Mapping[str, Any] = field(default_factory=dict)
    parts: tuple[StepInfo, ...] = ()

    def __bool__(self) -> bool:
        return self.averaged_this_iteration

    def __str__(self) -> str:
        if self.parts:
            return "; ".join(map(str, self.parts))
        number = f"round {self.round}" + (f", fragment {self.fragment}" if self.fragment_count > 1 else "")
        if self.abandoned:
            return f"{number}: abandoned, {self.abandoned}"
        if not self.averaged_this_iteration:
            return "nothing changed"
        if not self.donors and self.fragment >= 0:
            return f"{number}: no rank's weights were averaged"
        if not self.donors:
            return f"{number}: fresh weights"
        ranks = ", ".join(map(str, self.donors))
        age = f"{self.staleness_steps} step{'' if self.staleness_steps == 1 else 's'} old"
        if self.migrants:
            age += f"; {', '.join(map(str, self.migrants))} from another island"
        if self.staleness_versions:
            age += f", {plural(self.staleness_versions, 'version')}"
        if self.left_out:
            age += f"; without {ranks_in_words(self.left_out)}"
        cure = f"; {self.recovered}: taken whole, optimizer reset" if self.recovered else ""
        if self.hyperparameters:
            changes = ", ".join(
                _change(name, self.inherited.get(name), new) for name, new in self.hyperparameters.items()
            )
            return f"{number}: copy of rank {ranks} ({age}); {changes}"
        return f"{number}: average of rank{'' if len(self.donors) == 1 else 's'} {ranks} ({age}){cure}"


def _change(name: str, old: Any, new: Any) -> str:
    texts = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in (old, new)]
    return f"{name} {' -> '.join(texts)}"


#: Result of each step in which nothing happened. It is shared, so that such a step creates no object.
NOTHING = StepInfo()


def together(infos: Sequence[StepInfo]) -> StepInfo:
    """Return one result that summarises the rounds that end in one step. There must be at least one.

    Sizes and durations are sums, the staleness is the largest, and the outer norm is the norm of all fragments. The
    round, its donors and their weights describe the last average, or the last round if all rounds were abandoned. The
    cosine is unknown.
    """
    if len(infos) == 1:
        return infos[0]
    norms = [info.outer_norm for info in infos if info.outer_norm is not None]
    return replace(
        next((info for info in reversed(infos) if info), infos[-1]),
        staleness_steps=max(info.staleness_steps for info in infos),
        seconds=math.fsum(info.seconds for info in infos),
        nbytes=sum(info.nbytes for info in infos),
        wire_nbytes=sum(info.wire_nbytes for info in infos),
        unencoded_nbytes=sum(info.unencoded_nbytes for info in infos),
        waited_s=math.fsum(info.waited_s for info in infos),
        left_out=tuple(sorted({rank for info in infos for rank in info.left_out})),
        recovered=next((info.recovered for info in infos if info.recovered), ""),
        outer_norm=math.hypot(*norms) if norms else None,
        cosine=None,
        parts=tuple(infos),
    )


def fields_of(info: StepInfo) -> dict[str, Any]:
    """Return the fields of a step's result as a new dict."""
    return dict(_NOTHING) if info is NOTHING else {name: getattr(info, name) for name in _NAMES}


_NAMES: Final = tuple(StepInfo.__dataclass_fields__)
_NOTHING: Final = {name: getattr(NOTHING, name) for name in _NAMES}


@dataclass(frozen=True, slots=True, eq=False)
class SnapshotTaken:
    """Reports, inside ``step``, that a snapshot of this rank's state was taken.

    Attributes:
        round: Round that needs the snapshot; for a snapshot published to all members, its version.
        iteration: Iteration of this rank, from 0.
        state: Flat 1-D tensors by dtype name, such as ``"float32"``. They are valid only during the call; do not change
            them.
        island: Number of the island that needs the snapshot; -1 for this rank's own island, or without islands.
    """

    round: int
    iteration: int
    state: Mapping[str, torch.Tensor]
    island: int = -1


@dataclass(frozen=True, slots=True, eq=False)
class AverageApplied:
    """Reports, inside ``step``, that this rank's weights have just been replaced.

    Attributes:
        donors: Ranks of the donors, ascending.
        weights: Weights of the donors, in the same order, not normalised.
        best: Donor whose integer and bool entries are copied; -1 if there are no donors.
        iteration: Iteration of this rank, from 0.
        state: New state of this rank, as flat 1-D tensors by dtype name; valid only during the call.
        versions: Version of each donor's snapshot, if snapshots are published; otherwise empty.
        info: Result of the step for this average.
    """

    round: int
    donors: tuple[int, ...]
    weights: tuple[float, ...]
    best: int
    iteration: int
    state: Mapping[str, torch.Tensor]
    versions: tuple[int, ...] = ()
    info: StepInfo = NOTHING


@dataclass(frozen=True, slots=True)
class Contributed:
    """Reports, inside ``step``, that this rank has contributed to an averaging round.

    :class:`AverageApplied` of the same round follows, unless the policy ends first.

    Attributes:
        fragment: Number of the averaged fragment, from 0.
        iteration: Iteration of this rank, from 0.
        version: Number of averages of the fragment that this rank had applied before the contribution.
        weight: Weight of the contribution, such as its number of tokens; not normalised.
        norm: L2 norm of the contribution. If it is NaN or infinite, because this rank's weights were not finite, the
            contribution is left out.
        wire_nbytes: Encoded size of the contribution in bytes.
        unencoded_nbytes: Size in bytes that the contribution would have with ``wire="float32"``.
    """

    round: int
    fragment: int
    iteration: int
    version: int
    weight: float
    norm: float
    wire_nbytes: int
    unencoded_nbytes: int


@dataclass(frozen=True, slots=True)
class RoleAssigned:
    """Reports that this rank has a role in a new averaging round.

    :class:`AverageApplied`, :class:`RoundEnded` or :class:`RoundAbandoned` of the same round follows, unless the policy
    ends first. On a donor, :class:`SnapshotTaken` precedes that event, unless the round ends before the next step.

    Attributes:
        role: Role of this rank, ``"donor"`` or ``"replacer"``.
        donors: Ranks whose snapshots are averaged, ascending; empty for fresh weights from ``model_builder``.
        replacers: Ranks whose weights will be replaced, ascending.
        island: Number of the round's island; -1 for this rank's own island, or without islands.
    """

    round: int
    role: str
    donors: tuple[int, ...]
    replacers: tuple[int, ...]
    island: int = -1


@dataclass(frozen=True, slots=True)
class RoundEnded:
    """Reports, on a donor, that the round has ended and the donor's snapshot was freed.

    Attributes:
        reason: Reason for the end, such as ``"every replacer has answered"``.
        island: Number of the round's island; -1 for this rank's own island, or without islands.
    """

    round: int
    reason: str
    island: int = -1


@dataclass(frozen=True, slots=True)
class RoundAbandoned:
    """Reports that this rank has abandoned its role in an averaging round.

    Attributes:
        reason: Reason why the replacer keeps its weights, or the donor sends no snapshot.
        island: Number of the round's island; -1 for this rank's own island, or without islands.
    """

    round: int
    reason: str
    island: int = -1


@dataclass(frozen=True, slots=True)
class CoordinatorChanged:
    """Reports that a different rank has become the coordinator.

    Attributes:
        rank: Rank of the new coordinator.
        epoch: Number that increases with each new coordinator.
    """

    rank: int
    epoch: int


PolicyEvent: TypeAlias = (
    SnapshotTaken | Contributed | AverageApplied | RoleAssigned | RoundEnded | RoundAbandoned | CoordinatorChanged
)


class UserEvents:
    """Passes this rank's events to the user's ``on_event`` callback, immediately or inside the next step.

    Attributes:
        has_callback: Whether the user has passed a callback.
    """

    def __init__(self, on_event: Callable[[PolicyEvent], None] | None) -> None:
        self._on_event = on_event
        self._pending: deque[PolicyEvent] = deque()
        self.has_callback = on_event is not None

    @property
    def are_pending(self) -> bool:
        """Whether the next step must call ``on_event``."""
        return bool(self._pending)

    def add(self, event: PolicyEvent) -> None:
        """Store an event until the next step."""
        if self.has_callback:
            self._pending.append(event)

    def deliver(self) -> None:
        """Call ``on_event`` for all stored events. If a call raises, the next step continues with the next event."""
        while self._pending:
            self.deliver_now(self._pending.popleft())

    def deliver_now(self, event: PolicyEvent) -> None:
        """Call ``on_event`` immediately, if there is a callback."""
        if self._on_event is not None:
            self._on_event(event)
