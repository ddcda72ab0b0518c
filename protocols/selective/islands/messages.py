"""Defines the messages between islands. All are flat, as in `protocols.selective.messages`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Emigrant:
    """Announces the best member of an island, which can give its weights to a round of another island.

    The coordinator of the member's island sends it to a rank of the other island, which forwards it once to its
    coordinator.

    Attributes:
        policy: Number that the policies of all islands share.
        rank, incarnation: Rank and incarnation of the member.
        digest: Digest of the values that the members of its island have agreed on.
        is_passed_on: Whether a rank of the other island has forwarded it.
        marks: Up to two different marks of first weights, from members of this island and of islands whose emigrants
            have arrived here.
    """

    policy: int
    rank: int
    incarnation: int
    digest: str
    is_passed_on: bool = False
    marks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Invitation:
    """Invites an emigrant to be a donor in a round of another island.

    The coordinator of that island sends it. The emigrant answers with `Joined`, and all later messages use the channels
    of that island.

    Attributes:
        policy: Number that the policies of all islands share.
        to_members, to_coordinator: Scopes of that island's messages.
        epoch: Epoch of the coordinator.
    """

    policy: int
    to_members: int
    to_coordinator: int
    epoch: int
