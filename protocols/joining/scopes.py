"""Defines a policy's scopes: numbers that separate its messages from other policies' messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from asyncdist.collectives.agreement.messages import Agreed
from asyncdist.messaging import wire
from asyncdist.protocols.joining.dispatcher import Welcome


@dataclass(frozen=True, slots=True)
class PolicyScopes:
    """Numbers that separate a policy's messages from other policies' messages. Equal on all ranks of the policy.

    Attributes:
        to_members, to_coordinator: Numbers for messages to the members and to the coordinator.
        policy: Number of the policy; 0 if it is not needed.
        between: Number that the policies of all islands share.
        values: Class, name, model and options of the policy, on which all members agree.
        marks: Up to two different checksums of the members' initial weights; one checksum if all weights are equal.
    """

    to_members: int
    to_coordinator: int
    policy: int = 0
    between: int = 0
    values: Mapping[str, str] = field(default_factory=dict)
    marks: tuple[int, ...] = ()

    @classmethod
    def of_start(cls, ranks: tuple[int, ...], agreed: Agreed, population: str = "") -> PolicyScopes:
        """Return the scopes of a policy that starts on these ranks. Islands have the name ``population`` in common."""
        return cls(
            wire.scope_of(ranks, "members of a policy", agreed.time),
            wire.scope_of(ranks, "coordinator of a policy", agreed.time),
            wire.scope_of(ranks, "policy", agreed.time),
            wire.scope_of((), f"islands of {population}", agreed.time),
            dict(agreed.values),
            agreed.marks,
        )

    def of_part(self, name: str) -> PolicyScopes:
        """Return scopes (channel numbers) for messages among a subset of the policy's ranks."""
        return PolicyScopes(
            wire.scope_of((), f"members of {name}", self.to_members),
            wire.scope_of((), f"coordinator of {name}", self.to_coordinator),
            wire.scope_of((), name, self.policy),
        )

    @classmethod
    def of_running(cls, welcome: Welcome, values: Mapping[str, str]) -> PolicyScopes:
        """Return the scopes of a running policy, as sent by its coordinator to this restarted rank."""
        return cls(welcome.to_members, welcome.to_coordinator, welcome.policy, welcome.between, dict(values))
