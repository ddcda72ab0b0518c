"""Defines the messages between the workers and the leader, which keeps the anchor.

The round number in the frame's header is the worker's sequence number, or a version if the message's docstring says so.
Annotations are real objects, never strings, since `get_type_hints` must return plain types.
"""

from dataclasses import dataclass
from math import isfinite
from typing import Final

#: Largest version or sequence number: both are sent as the round number in a frame's header.
NUMBER_MAX: Final = 2**32 - 1
#: Contributions that an anchor contains: the rank and last sequence number of each worker, in ascending order of ranks.
Applications = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Arrived:
    """Worker to leader: this worker offers a contribution.

    Attributes:
        base_version: Version of the anchor from which the worker has trained.
        steps: Number of training steps since the previous contribution.
        tokens: Number of tokens or examples since the previous contribution.
        norm: L2 norm of the difference; NaN or infinite if the contribution must be left out.
        speed: Training steps per second; 0 if unknown.
    """

    base_version: int
    steps: int
    tokens: float
    norm: float
    speed: float

    def __post_init__(self) -> None:
        """Raise ValueError if a field is out of range."""
        if not 0 <= self.base_version <= NUMBER_MAX or self.steps < 0:
            raise ValueError(f"base_version must be from 0 to 2**32 - 1, and steps >= 0, got {self!r:.300}")
        if not 0 < self.tokens < float("inf") or not 0 <= self.speed < float("inf"):
            raise ValueError(f"tokens must be finite and > 0, and speed finite and >= 0, got {self!r:.300}")


@dataclass(frozen=True, slots=True)
class Applied:
    """Leader to worker: the anchor contains the contribution, and is offered to the worker.

    Attributes:
        version: Version of the offered anchor.
        applied: The contributions that this anchor contains.
        donors, weights: Ranks whose contributions made this version, ascending, and their weights.
        staleness: Number of versions between the contribution's base and its application.
        norm, cosine: L2 norm of the mean difference, and mean cosine between two contributions; NaN if unknown.
        steps: Number of training steps until the worker's next contribution.
        outer_nbytes: Size in bytes of the outer optimizer's state, which the worker must also fetch; 0 without one.
        grace_s: Seconds that the leader has waited for further contributions to this version, after its quorum.
        merged: Number of the island's last contribution whose answer was merged into this anchor; 0 without islands.
    """

    version: int
    applied: Applications
    donors: tuple[int, ...]
    weights: tuple[float, ...]
    staleness: int
    norm: float
    cosine: float
    steps: int
    outer_nbytes: int
    grace_s: float
    merged: int

    def __post_init__(self) -> None:
        """Raise ValueError if a field is out of range or contradicts another field."""
        if min(self.staleness, self.outer_nbytes, self.merged) < 0 or self.steps < 1:
            raise ValueError(f"staleness, outer_nbytes and merged must be >= 0, and steps >= 1, got {self!r:.300}")
        if not 0 <= self.version <= NUMBER_MAX:
            raise ValueError(f"version must be from 0 to 2**32 - 1, got {self!r:.300}")
        if not 0 <= self.grace_s < float("inf"):
            raise ValueError(f"grace_s must be finite and >= 0, got {self!r:.300}")
        if len(self.donors) != len(self.weights) or not all(weight > 0 and isfinite(weight) for weight in self.weights):
            raise ValueError(f"each donor must have a weight > 0, got {self!r:.300}")


@dataclass(frozen=True, slots=True)
class Taken:
    """Receiver of an anchor to the rank that offers it: the anchor has arrived. The round number is its version."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Member to a new leader: the newest anchor that this member has, and its contribution without an answer.

    Attributes:
        version: Version of the anchor.
        applied: The contributions that the anchor contains.
        outer_version: Version to which the member's copy of the outer optimizer's state belongs; -1 without a copy.
        sequence: Sequence number of the contribution; 0 if there is none.
        outstanding: The contribution; empty if there is none.
    """

    version: int
    applied: Applications
    outer_version: int
    sequence: int
    outstanding: tuple[Arrived, ...]

    def __post_init__(self) -> None:
        """Raise ValueError if a field is out of range or contradicts another field."""
        if not -1 <= self.outer_version <= self.version <= NUMBER_MAX or self.version < 0:
            raise ValueError(
                f"version must be from 0 to 2**32 - 1, and outer_version from -1 to version, got {self!r:.300}"
            )
        if not 0 <= self.sequence <= NUMBER_MAX or len(self.outstanding) != bool(self.sequence):
            raise ValueError(f"sequence must be > 0 if and only if there is a contribution, got {self!r:.300}")


@dataclass(frozen=True, slots=True)
class Wanted:
    """New leader to a member: the leader will fetch the member's newest anchor. The round number is its version.

    Attributes:
        is_outer: Whether the leader will fetch the member's copy of the outer optimizer's state instead.
    """

    is_outer: bool


@dataclass(frozen=True, slots=True)
class Given:
    """Offers an anchor or the outer optimizer's state.

    A member sends it to a new leader, or a leaving leader to its successor. The message's round number is the anchor's
    version.

    Attributes:
        applied: The contributions that the anchor contains.
        outer_nbytes: Size in bytes of the outer optimizer's state; 0 without one.
        merged: Number of the island's last contribution whose answer the anchor includes; 0 without islands.
    """

    applied: Applications
    outer_nbytes: int
    merged: int

    def __post_init__(self) -> None:
        """Raise ValueError if a field is negative."""
        if min(self.outer_nbytes, self.merged) < 0:
            raise ValueError(f"outer_nbytes and merged must be >= 0, got {self!r:.300}")


@dataclass(frozen=True, slots=True)
class Register:
    """Server of an island to the global server: this rank now serves its island.

    The global server drops the island's contributions that it has not applied.
    """


@dataclass(frozen=True, slots=True)
class Registered:
    """Answer to :class:`Register`: the global anchor is offered. The round number is its version.

    Attributes:
        applied: The contributions that the anchor contains, by island.
    """

    applied: Applications


AsyncMessage = Arrived | Applied | Taken | Standing | Wanted | Given | Register | Registered
