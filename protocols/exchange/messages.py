"""Defines the messages between the members of an exchange and their leader.

The frame's header contains the round number. Annotations are not strings, because `get_type_hints` must return plain
types.
"""

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Final

#: Maximum number of decisions on one round that a message may claim. Only losses of ranks cause further decisions.
ATTEMPT_MAX: Final = 1 << 12


@dataclass(frozen=True, slots=True)
class Verdict:
    """Defines the leader's decision on an averaging round.

    Attributes:
        attempt: Number of the decision on this round, from 1. A later decision replaces earlier ones.
        donors: Ranks whose contributions are averaged, in ascending order. Empty if no contribution was finite.
        weights: Weights of the donors, in the same order.
        norms: L2 norms of the donors' contributions, in the same order.
        holder: Rank that already has the mean and provides all its slices, or -1 if the donors provide them.
        receiver: The only rank that receives this verdict's mean, and averages all slices itself. -1 if all members
            share the mean.
        scores: Further values of the donors' reports, in the same order. Empty if the reports have none.
        late: Members that had not contributed when the leader decided, in ascending order.
    """

    attempt: int
    donors: tuple[int, ...]
    weights: tuple[float, ...]
    norms: tuple[float, ...]
    holder: int = -1
    receiver: int = -1
    scores: tuple[tuple[float, ...], ...] = ()
    late: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        lengths = {len(self.donors), len(self.weights), len(self.norms), len(self.scores or self.donors)}
        if not 1 <= self.attempt <= 2 * ATTEMPT_MAX or len(lengths) != 1:
            raise ValueError(
                f"attempt must be from 1 to {2 * ATTEMPT_MAX}, with a weight and a norm for each donor, got "
                f"{self!r:.300}"
            )
        if list(self.donors) != sorted(set(self.donors)) or not all(weight > 0 for weight in self.weights):
            raise ValueError(f"donors must be ascending, and weights > 0, got {self!r:.300}")

    @property
    def sources(self) -> tuple[int, ...]:
        """Ranks whose data the members need: the holder if there is one (its donors may be lost), or all donors."""
        return (self.holder,) if self.holder >= 0 else self.donors

    def among(self, ranks: Container[int]) -> "Verdict":
        """Return the leader's decision with only the donors that are in ``ranks``."""
        kept = [place for place, donor in enumerate(self.donors) if donor in ranks]
        return replace(
            self,
            donors=tuple(self.donors[place] for place in kept),
            weights=tuple(self.weights[place] for place in kept),
            norms=tuple(self.norms[place] for place in kept),
            scores=tuple(self.scores[place] for place in kept if self.scores),
        )

    def source_of(self, number: int) -> int:
        """Return the rank that provides the mean of the slices with owner number ``number``."""
        if self.receiver >= 0:
            return self.receiver
        return self.holder if self.holder >= 0 else self.donors[number % len(self.donors)]


@dataclass(frozen=True, slots=True)
class RoundState:
    """Reports the state of one averaging round on one member to the leader, after a loss.

    Attributes:
        attempt: Number of the leader's last decision that the member has received, or 0 before the first.
        weight, norm, scores: The member's :class:`protocols.exchange.ledger.Report`. The weight and norm are 0 if the
            member joined after the round had begun, so that it only receives the mean.
        donors, weights, norms, donor_scores, late: Fields of the verdict if the member has the mean; otherwise empty.
    """

    round: int
    attempt: int
    has_merged: bool
    weight: float
    norm: float
    donors: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    scores: tuple[float, ...] = ()
    donor_scores: tuple[tuple[float, ...], ...] = ()
    late: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.round < 1 or not 0 <= self.attempt <= ATTEMPT_MAX:
            raise ValueError(
                f"round must be >= 1, and attempt from 0 to {ATTEMPT_MAX}, got round {self.round} and attempt "
                f"{self.attempt}"
            )
        if self.has_merged:
            Verdict(self.attempt, self.donors, self.weights, self.norms, scores=self.donor_scores)


@dataclass(frozen=True, slots=True)
class Captured:
    """Member to leader: the sender's contribution to the round is complete, and can now be requested.

    See :class:`protocols.exchange.ledger.Report` for the attributes.
    """

    weight: float
    norm: float
    scores: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"weight must be finite and > 0, got {self.weight}")


@dataclass(frozen=True, slots=True)
class Merged:
    """Member to leader: the sender has the round's mean, or a state of the model fragment that includes it."""


@dataclass(frozen=True, slots=True)
class Paused:
    """Member to leader: rounds need not wait for the sender until it contributes again."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Member to all members: the sender will contribute to no further round, and leaves after its last rounds.

    Members that lack means then request the newest state, because it may be lost when the sender leaves.
    """


@dataclass(frozen=True, slots=True)
class Released:
    """Leader to an ending member: the receiver may leave, since no continuing member needs its state."""


@dataclass(frozen=True, slots=True)
class Decided:
    """Leader to members: which contributions the round averages."""

    verdict: Verdict


@dataclass(frozen=True, slots=True)
class CensusRequest:
    """Leader to members: stop receiving the means of all rounds, and reply with a `CensusReply`."""

    number: int


@dataclass(frozen=True, slots=True)
class CensusReply:
    """Member to leader: the state of each unfinished round on the sender, which stops receiving means.

    Attributes:
        number: Number of the census, or 0 if the sender reports to a new leader without being asked.
        round_states: State of each round whose mean is still offered.
        retired: Last round of each fragment whose mean is no longer offered, or 0 if there is none.
        newest: Last round of each fragment whose state the member has, or 0 without a state.
    """

    number: int
    round_states: tuple[RoundState, ...]
    retired: tuple[int, ...]
    newest: tuple[int, ...]

    def __post_init__(self) -> None:
        if min((self.number, *self.retired, *self.newest)) < 0 or len(self.retired) != len(self.newest):
            raise ValueError(
                f"number, retired and newest must be >= 0, and retired and newest of equal length, got {self!r:.300}"
            )


@dataclass(frozen=True, slots=True)
class Retired:
    """Leader to members: the model fragment's means up to the given round are not needed, so free their memory.

    Attributes:
        holder: Member that provides the fragment's state to members without the mean, or -1 without a quorum.
    """

    holder: int = -1


@dataclass(frozen=True, slots=True)
class StateRequest:
    """Requests a model fragment's state after the given round or a later one.

    Sent by a member that has missed means.
    """


@dataclass(frozen=True, slots=True)
class StateOffer:
    """Reply to `StateRequest`: the sender offers the model fragment's state after the given round."""

    nbytes: int

    def __post_init__(self) -> None:
        if self.nbytes < 0:
            raise ValueError(f"nbytes must be >= 0, got {self.nbytes}")


@dataclass(frozen=True, slots=True)
class StateTaken:
    """Reply to `StateOffer`: the state after the given round has arrived, or the sender no longer needs it."""


ExchangeMessage = (
    Captured
    | Merged
    | Paused
    | Ending
    | Released
    | Decided
    | CensusRequest
    | CensusReply
    | Retired
    | StateRequest
    | StateOffer
    | StateTaken
)
