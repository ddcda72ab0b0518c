"""Defines the messages between the workers and the leader, which keeps their common weights (the anchor).

The round number in a frame's header is the worker's sequence number, unless a message's docstring says that it is a
version. Annotations are not strings, because `get_type_hints` must return plain types.
"""

from dataclasses import dataclass
from math import isfinite
from typing import Final

#: Largest version or sequence number, because both are sent as the round number in a frame's header.
NUMBER_MAX: Final = 2**32 - 1
#: Contributions that an anchor contains: each worker's rank and last sequence number, in ascending order of ranks.
Applications = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Arrived:
    """Offers a worker's contribution to the leader.

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
        if not 0 <= self.base_version <= NUMBER_MAX or self.steps < 0:
            raise ValueError(f"base_version must be from 0 to 2**32 - 1, and steps >= 0, got {self!r:.300}")
        if not 0 < self.tokens < float("inf") or not 0 <= self.speed < float("inf"):
            raise ValueError(f"tokens must be finite and > 0, and speed finite and >= 0, got {self!r:.300}")


@dataclass(frozen=True, slots=True)
class Applied:
    """Offers an anchor (the updated common weights) to a worker whose contribution it contains.

    Attributes:
        applied: Contributions that the anchor contains.
        donors, weights: Ranks whose contributions made this version, ascending, and their weights.
        staleness: Number of versions between the contribution's base and its application.
        norm, cosine: L2 norm of the mean difference, and mean cosine between pairs of contributions; NaN if unknown.
        steps: Number of training steps until the worker's next contribution.
        outer_nbytes: Size in bytes of the outer optimizer's state, which the worker must fetch too; 0 if not offered.
        grace_s: Seconds that the leader has waited for contributions to this version after the quorum.
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
        if min(self.staleness, self.outer_nbytes, self.merged) < 0 or self.steps < 1:
            raise ValueError(f"staleness, outer_nbytes and merged must be >= 0, and steps >= 1, got {self!r:.300}")
        if not 0 <= self.version <= NUMBER_MAX:
            raise ValueError(f"version must be from 0 to 2**32 - 1, got {self!r:.300}")
        if not 0 <= self.grace_s < float("inf"):
            raise ValueError(f"grace_s must be finite and >= 0, got {self!r:.300}")
        if len(self.donors) != len(self.weights) or not all(weight > 0 and isfinite(weight) for weight in self.weights):
            raise ValueError(f"each donor must have a weight > 0, got {self!r:.300}")


@dataclass(frozen=True, slots=True)
class AnchorTaken:
    """Confirms that an offered anchor (common weights) has arrived. The round number is the anchor's version."""


@dataclass(frozen=True, slots=True)
class MemberState:
    """Reports a member's newest anchor (common weights) and unanswered contribution to a new leader.

    Attributes:
        applied: Contributions that the anchor contains.
        outer_version: Version of the member's copy of the outer optimizer's state; -1 without a copy.
        sequence: Sequence number of the unanswered contribution; 0 if there is none.
        outstanding: The unanswered contribution; empty if there is none.
    """

    version: int
    applied: Applications
    outer_version: int
    sequence: int
    outstanding: tuple[Arrived, ...]

    def __post_init__(self) -> None:
        if not -1 <= self.outer_version <= self.version <= NUMBER_MAX or self.version < 0:
            raise ValueError(
                f"version must be from 0 to 2**32 - 1, and outer_version from -1 to version, got {self!r:.300}"
            )
        if not 0 <= self.sequence <= NUMBER_MAX or len(self.outstanding) != bool(self.sequence):
            raise ValueError(f"sequence must be > 0 if and only if there is a contribution, got {self!r:.300}")


@dataclass(frozen=True, slots=True)
class AnchorRequest:
    """Asks a member to offer its newest anchor to a new leader, the sender. The round number is the anchor's version.

    Attributes:
        is_outer: Whether the leader wants the member's copy of the outer optimizer's state instead.
    """

    is_outer: bool


@dataclass(frozen=True, slots=True)
class AnchorOffer:
    """Offers an anchor or the outer optimizer's state to a new leader, or as a leaving leader to the next leader.

    The round number is the anchor's version.

    Attributes:
        applied, merged: Fields of :class:`Applied`.
        outer_nbytes: Size in bytes of the outer optimizer's state; 0 if not offered.
    """

    applied: Applications
    outer_nbytes: int
    merged: int

    def __post_init__(self) -> None:
        if min(self.outer_nbytes, self.merged) < 0:
            raise ValueError(f"outer_nbytes and merged must be >= 0, got {self!r:.300}")


@dataclass(frozen=True, slots=True)
class Register:
    """Registers the sending rank with the global server as the server of its island.

    The global server then drops the island's unapplied contributions.
    """


@dataclass(frozen=True, slots=True)
class Registered:
    """Answers :class:`Register` by offering the global anchor. The round number is the anchor's version.

    Attributes:
        applied: Contributions that the anchor contains, by island.
    """

    applied: Applications


AsyncMessage = Arrived | Applied | AnchorTaken | MemberState | AnchorRequest | AnchorOffer | Register | Registered
