"""Defines the messages between islands that make the best rank of one island a donor in another."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Emigrant:
    """Announces the best member of an island, which can be a donor in another island.

    The coordinator of the member's island sends this message to a rank of the other island. That rank forwards it once,
    to its coordinator.

    Attributes:
        digest: Digest of the class, name, model and options of the policy.
        is_passed_on: Whether a rank of the other island has forwarded this message.
        marks: Up to two different checksums of initial weights that the sender's island knows.
    """

    policy: int
    rank: int
    incarnation: int
    digest: str
    is_passed_on: bool = False
    marks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Invitation:
    """Invites an announced rank of another island to be a donor in the sender's island.

    The sender is the coordinator of its island. The invited rank answers with `Joined`, and all later messages use the
    channels of the sender's island.
    """

    policy: int
    to_members: int
    to_coordinator: int
    epoch: int
