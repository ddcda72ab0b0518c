"""Holds the numbers that separate the messages of one policy from those of all others."""

from __future__ import annotations

from collections.abc import Mapping

from asyncdist.collectives.agreement.messages import Agreed
from asyncdist.messaging import wire
from asyncdist.protocols.selective.joining.newcomers import Welcome


class PolicyScopes:
    """Holds the scopes of one policy, equal on all of its ranks.

    Args:
        ranks: The ranks that agreed to start the policy, in the order of the agreement.
        agreed: The result of the agreement.
        population: A name that the policies of all islands have in common.

    Attributes:
        policy: The number of the policy.
        to_members, to_coordinator: The scopes of messages to the members, and to the coordinator.
        between: The number that the policies of all islands have in common.
        values: The values that all members agree in.
        marks: Up to two different numbers with which members have marked their first weights.
    """

    def __init__(self, ranks: tuple[int, ...], agreed: Agreed, population: str = "") -> None:
        self.policy = wire.scope_of(ranks, "policy", agreed.time)
        self.to_members = wire.scope_of(ranks, "members of a policy", agreed.time)
        self.to_coordinator = wire.scope_of(ranks, "coordinator of a policy", agreed.time)
        self.between = wire.scope_of((), f"islands of {population}", agreed.time)
        self.values = dict(agreed.values)
        self.marks = agreed.marks

    @classmethod
    def of_running(cls, welcome: Welcome, values: Mapping[str, str]) -> PolicyScopes:
        """Return the scopes of a policy that runs on other ranks, and has welcomed this rank."""
        scopes = cls.__new__(cls)
        scopes.policy, scopes.values = welcome.policy, dict(values)
        scopes.to_members, scopes.to_coordinator = welcome.to_members, welcome.to_coordinator
        scopes.between, scopes.marks = welcome.between, ()
        return scopes

    @classmethod
    def elsewhere(cls, to_members: int, to_coordinator: int) -> PolicyScopes:
        """Return the scopes of another island's messages."""
        scopes = cls.__new__(cls)
        scopes.policy = scopes.between = 0
        scopes.values, scopes.marks = {}, ()
        scopes.to_members, scopes.to_coordinator = to_members, to_coordinator
        return scopes
