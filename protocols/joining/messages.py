"""Defines the messages about a policy's coordinator and members, and about donors for other islands.

All policies of a rank share one channel for messages about coordinators and donors
(:mod:`protocols.joining.dispatcher`). Each policy has its own channel for messages about members
(:mod:`protocols.joining.membership`). Annotations are not strings, because `get_type_hints` must return plain types.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Nomination:
    """Asks the receiver to become coordinator, because the present coordinator is lost or has stopped.

    ``epoch`` is the number of the newest coordinator that the sender knows.
    """

    policy: int
    epoch: int


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Notifies a member that ``coordinator`` is now the coordinator, with the number ``epoch``.

    ``incarnation`` is the number of restarts of the coordinator's rank.
    """

    policy: int
    epoch: int
    coordinator: int
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class Declined:
    """Answers a message about a policy that the sender has left."""

    policy: int


@dataclass(frozen=True, slots=True)
class Emigrant:
    """Announces the best member of an island (group of ranks), which can send its weights to another island.

    The coordinator of the member's island sends this message to one rank of the other island. That rank forwards the
    message once, to its own coordinator.

    Attributes:
        digest: Digest of the class, name, model and options of the policy.
        is_passed_on: Whether a rank of the other island has forwarded this message.
        marks: Up to two different checksums of initial weights in the sender's island.
    """

    policy: int
    rank: int
    incarnation: int
    digest: str
    is_passed_on: bool = False
    marks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Invitation:
    """Invites a rank of another island to send its weights to the sender's island.

    The sender is the coordinator of its island. The invited rank answers with `Joined`. All later messages use the
    channels of the sender's island.
    """

    policy: int
    to_members: int
    to_coordinator: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Left:
    """Member to all members: the sender is no longer a member.

    Attributes:
        incarnation, attempt: Number of the sender's restarts, and of its attempts to join. A later attempt may follow.
    """

    incarnation: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Abdicated:
    """Leader to all members: the next member leads, and the sender follows it.

    Attributes:
        count: Number of times that the sender has abdicated since the last admission.
    """

    count: int

    def __post_init__(self) -> None:
        if not 1 <= self.count < 2**32:
            raise ValueError(f"count must be from 1 to 2**32 - 1, got {self.count}")


@dataclass(frozen=True, slots=True)
class Waiting:
    """Restarted rank to leader: the sender has opened its channels, and is waiting for admission.

    The leader waits for this message, because messages to closed channels may be lost after a failed attempt. A leader
    that has left answers with `Declined`.

    Attributes:
        followers: Rank and incarnation of each rank of the sender's replica that does not become a member itself.
    """

    policy: int
    incarnation: int
    attempt: int
    followers: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Admitted:
    """Leader to all members, and then to the restarted rank: the restarted rank is now a member.

    All ranks of a restarted replica are admitted with one message. The frame's round is the number of the admission.

    Attributes:
        order: Rank, incarnation and attempt of each member, including the sender, in the order in which they may lead.
        newcomer: Rank, incarnation and attempt of the admitted member, or of the first rank of the admitted replica.
        settle_count: Number of the sender's `settle` calls.
        followers: Rank and incarnation of each restarted rank that is not a member itself, but in a member's replica.
    """

    order: tuple[tuple[int, int, int], ...]
    newcomer: tuple[int, int, int]
    settle_count: int = 0
    followers: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class AdmissionConfirmed:
    """Member to leader: the sender counts ``newcomer`` as a member, or is that rank and has loaded the state.

    A restarted rank also sends this message to the rank that has sent it the state.

    Attributes:
        newcomer: Rank, number of restarts and attempt of the admitted rank.
    """

    newcomer: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Settling:
    """Member to leader: the sender takes no step until all members have called `settle` the same number of times.

    Attributes:
        count: Number of the sender's `settle` calls.
        progress: Counters that grow with the sender's steps. All members have the same number of counters.
    """

    count: int
    progress: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Settled:
    """Leader to members: all members have called `settle` at least ``count`` times.

    Attributes:
        least: Smallest value of each counter among the members.
    """

    count: int
    least: tuple[int, ...] = ()


MembershipMessage = Left | Abdicated | Admitted | AdmissionConfirmed | Settling | Settled
