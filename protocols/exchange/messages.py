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
    """Member to leader: this member has the round's mean, or the state after the round."""


@dataclass(frozen=True, slots=True)
class Paused:
    """Member to leader: no round needs to wait for this member until it contributes again."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Member to all: this member will contribute to no further round, and leaves after its last rounds.

    Members that are behind catch up, because the newest state may leave with this member.
    """


@dataclass(frozen=True, slots=True)
class Released:
    """Leader to a member that is ending: a member that continues, if there is one, has the newest state."""


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
        retired: Last round of each fragment that is retired; 0 for none.
        newest: Last round of each fragment whose state the member has; 0 for none.
    """

    number: int
    standings: tuple[Standing, ...]
    retired: tuple[int, ...]
    newest: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Retired:
    """Leader to members: the fragment's means up to this round are needed no longer, so their memory is freed.

    Attributes:
        holder: Member from which a member without the mean receives the fragment's state; -1 without a quorum.
    """

    holder: int = -1


@dataclass(frozen=True, slots=True)
class Asked:
    """Member that is behind to a holder: it needs the fragment's state after this round, or a newer one."""


@dataclass(frozen=True, slots=True)
class Given:
    """Holder to a member that is behind: the fragment's state after this round is offered.

    Attributes:
        nbytes: Size of the state in bytes.
    """

    nbytes: int

    def __post_init__(self) -> None:
        """Raise ValueError if the size is negative."""
        if self.nbytes < 0:
            raise ValueError(f"nbytes must be >= 0, got {self.nbytes}")


@dataclass(frozen=True, slots=True)
class Taken:
    """Member to a holder: the state after this round has arrived, or is needed no longer."""


ExchangeMessage = (
    Captured | Merged | Paused | Ending | Released | Decided | Hold | Census | Retired | Asked | Given | Taken
)
