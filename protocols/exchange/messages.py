"""Defines the messages between the members of an exchange and their leader.

The round number is in the frame's header. Annotations are real objects, never strings, since `get_type_hints` must
return plain types.
"""

from dataclasses import dataclass

from asyncdist.protocols.exchange.ledger import Standing, Verdict


@dataclass(frozen=True, slots=True)
class Captured:
    """Member to leader: this member has captured its contribution to the round, and offers it to the owners.

    Attributes:
        weight: Weight of the contribution, such as its number of tokens.
        norm: L2 norm of the contribution; NaN or infinite if it must be left out.
        scores: Further values of the report; see :class:`protocols.exchange.ledger.Report`.
    """

    weight: float
    norm: float
    scores: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError if the weight is not finite and above 0."""
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"weight must be finite and > 0, got {self.weight}")


@dataclass(frozen=True, slots=True)
class Merged:
    """Member to leader: this member has the round's mean."""


@dataclass(frozen=True, slots=True)
class Decided:
    """Leader to members: the round's verdict."""

    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Hold:
    """Leader to members: stop receiving the means of all rounds, and answer with a `Census`.

    Attributes:
        number: Number of the leader's census.
    """

    number: int


@dataclass(frozen=True, slots=True)
class Census:
    """Member to leader: this member's standing in each round that is not retired; it receives no mean until a verdict.

    Attributes:
        number: Number of the census that is answered; 0 for a new leader, which has not asked.
        standings: Standing in each round.
        last_retired: Last round that is retired.
    """

    number: int
    standings: tuple[Standing, ...]
    last_retired: int


@dataclass(frozen=True, slots=True)
class Retired:
    """Leader to members: all members have the means up to this round, so the memory of their slices is freed."""


ExchangeMessage = Captured | Merged | Decided | Hold | Census | Retired
