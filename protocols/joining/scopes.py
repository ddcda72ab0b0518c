"""Defines a policy's scopes: numbers that separate its messages from other policies' messages."""

from __future__ import annotations

from collections.abc import Mapping

from asyncdist.collectives.agreement.messages import Agreed
from asyncdist.messaging import wire
from asyncdist.protocols.joining.dispatcher import Welcome


class PolicyScopes:
    """Numbers that separate a policy's messages from other policies' messages. Equal on all ranks of the policy.

    Args:
        population: Name that the policies of all islands share.

    Attributes:
        to_members, to_coordinator: Numbers for messages to the members and to the coordinator.
        between: Number that the policies of all islands share.
        values: Class, name, model and options of the policy, on which all members agree.
        marks: Up to two different checksums of the members' initial weights; one checksum if all weights are equal.
    """

    def __init__(self, ranks: tuple[int, ...], agreed: Agreed, population: str = "") -> None:
        self.policy = wire.scope_of(ranks, "policy", agreed.time)
        self.to_members = wire.scope_of(ranks, "members of a policy", agreed.time)
        self.to_coordinator = wire.scope_of(ranks, "coordinator of a policy", agreed.time)
        self.between = wire.scope_of((), f"islands of {population}", agreed.time)
        self.values = dict(agreed.values)
        self.marks = agreed.marks

    def of_part(self, name: str) -> PolicyScopes:
        """Return scopes (channel numbers) for messages among a subset of the policy's ranks."""
        found = PolicyScopes.of_numbers(
            wire.scope_of((), f"members of {name}", self.to_members),
            wire.scope_of((), f"coordinator of {name}", self.to_coordinator),
        )
        found.policy = wire.scope_of((), name, self.policy)
        return found

    @classmethod
    def of_running(cls, welcome: Welcome, values: Mapping[str, str]) -> PolicyScopes:
        """Return the scopes of a running policy, as sent by its coordinator to this restarted rank."""
        scopes = cls.__new__(cls)
        scopes.policy, scopes.values = welcome.policy, dict(values)
        scopes.to_members, scopes.to_coordinator = welcome.to_members, welcome.to_coordinator
        scopes.between, scopes.marks = welcome.between, ()
        return scopes

    @classmethod
    def of_numbers(cls, to_members: int, to_coordinator: int) -> PolicyScopes:
        """Return scopes with these numbers, for messages to another island or among a subset of the ranks."""
        scopes = cls.__new__(cls)
        scopes.policy = scopes.between = 0
        scopes.values, scopes.marks = {}, ()
        scopes.to_members, scopes.to_coordinator = to_members, to_coordinator
        return scopes
