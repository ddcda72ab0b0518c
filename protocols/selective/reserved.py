"""Coordinates a policy on a reserved rank, which is not a member and does not train."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from asyncdist import World, validation
from asyncdist.protocols.joining.scopes import PolicyScopes
from asyncdist.protocols.journal import Journal
from asyncdist.protocols.policy import START
from asyncdist.protocols.selective.leadership import Leadership
from asyncdist.protocols.selective.selection import SelectiveRules
from asyncdist.protocols.selective.statistics import CoordinatorStatistics
from asyncdist.protocols.selective.succession import Succession
from asyncdist.protocols.starting.differences import explaining_conflicts
from asyncdist.runtime.world import world_to_await


async def coordinate(
    members: Sequence[int], *, world: World | None = None, start_timeout_s: float = 60.0
) -> CoordinatorStatistics:
    """Coordinate one policy on a reserved rank, which is not a member and does not train.

    The members pass this rank as ``coordinator=`` to their policy, and a group without this rank as ``group=``, such as
    ``await ad.new_group(members)``. The call returns when all members have left, or when a member has taken over
    because this rank did not answer.

    Args:
        members: Ranks of the policy's group, in the group's order.
        world: World of the policy; the current world by default.
        start_timeout_s: Seconds to wait at the start for the last member.

    Returns:
        Counts of the coordinator's reports, decisions and rounds.

    Raises:
        TypeError, ValueError: ``members`` is not a list of distinct ranks, is empty or contains this rank; or the
            timeout is out of range.
        StartTimeoutError: A member has not arrived in time.
        DisagreementError: The ranks have passed different arguments.

    **Cancellation**: The members are notified and log a warning, and one of them takes over.
    """
    world = world_to_await(world)
    _check_members(members, world)
    validation.seconds("start_timeout_s", start_timeout_s)
    ranks = (*members, world.rank)
    meeting = world.agreements.next_request(ranks, START, world.rank)
    with explaining_conflicts(world.agreements, meeting):
        agreed = await world.agreements.meet(meeting, {}, timeout_s=start_timeout_s)
    options = {
        key.removeprefix("option "): json.loads(value)
        for key, value in agreed.values.items()
        if key.startswith("option ")
    }
    rules = SelectiveRules(**{entry.name: options[entry.name] for entry in fields(SelectiveRules)})
    scopes = PolicyScopes(ranks, agreed)
    journal = Journal("")
    journal.begin_reserved(world.services)
    leadership = Leadership(
        world.services,
        Succession(world.rank, members, world.rank),
        members,
        rules,
        scopes,
        model_nbytes=int(options["model_nbytes"]),
        roles=None,
        journal=journal,
    )
    leadership.begin()
    return await leadership.serve_reserved()


def _check_members(members: Any, world: World) -> None:
    others = f"a list of distinct ranks from 0 to {world.size - 1} without this rank, {world.rank}"
    if isinstance(members, str) or not isinstance(members, Sequence):
        validation.refuse("members", members, others, TypeError)
    wrong = [rank for rank in members if type(rank) is not int or not 0 <= rank < world.size or rank == world.rank]
    if wrong or not members or len(set(members)) != len(members):
        validation.refuse("members", members, others)
