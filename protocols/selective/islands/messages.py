"""Defines the messages that travel between islands. As in `protocols.selective.messages`, every one is flat."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Emigrant:
    """Coordinator to a rank of another island: the best member here, which can give its weights to a round there.

    That rank passes it on to its coordinator, once.

    Attributes:
        policy: The number that the policies of all islands have in common.
        rank, incarnation: Of that member.
        digest: Of what the members here have agreed in.
        is_passed_on: Whether a rank of the other island has passed it on.
        marks: Up to two different numbers with which members here, and of islands whose emigrants have arrived here,
            have marked their first weights.
    """

    policy: int
    rank: int
    incarnation: int
    digest: str
    is_passed_on: bool = False
    marks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Invitation:
    """Coordinator to an emigrant: it may be a donor of a round of that coordinator's island.

    It answers with `Joined`, over the channels of that island, as all does that follows.

    Attributes:
        policy: As in `Emigrant`.
        to_members, to_coordinator: Scopes of that island's messages.
        epoch: Of its coordinator.
    """

    policy: int
    to_members: int
    to_coordinator: int
    epoch: int
