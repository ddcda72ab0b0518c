"""Tests that ``on_event`` reports a rank's rounds to this rank, inside ``step`` and in order."""

from __future__ import annotations

from typing import Any

from scripts.population import Mixed, sgd
from support.local import run
from support.policies import Lockstep

import asyncdist as ad
from protocols import (
    AsyncSelectiveAveragingPolicy,
    AverageApplied,
    PolicyEvent,
    RoleAssigned,
    RoundEnded,
    SnapshotTaken,
)


def test_donors_and_replacers_observe_a_round_from_start_to_end() -> None:
    lockstep = Lockstep(3)

    async def main(world: ad.World) -> list[PolicyEvent]:
        model, told, is_in_step = Mixed(float(world.rank)), [], False

        def on_event(event: PolicyEvent) -> None:
            assert is_in_step, f"{event} was reported outside step()"
            told.append(event)

        policy = AsyncSelectiveAveragingPolicy(
            model, sgd(model), average_every=2, replacement_ratio=0.3, quorum=1.0, grace_s=30.0, on_event=on_event
        )
        async with policy:
            async for _ in lockstep.steps(60):
                is_in_step = True
                await policy.step(float(world.rank))
                is_in_step = False
        return told

    replacer, *donors = run(main, 3)
    rounds = [event.round for event in replacer if isinstance(event, AverageApplied)]
    assert rounds[:3] == [1, 2, 3]
    for number in rounds[:-1]:
        assert kinds(replacer, number) == [RoleAssigned, AverageApplied]
        for told in donors:
            assert kinds(told, number) == [RoleAssigned, SnapshotTaken, RoundEnded]
            assert RoleAssigned(number, "donor", (1, 2), (0,)) in told
            assert any(isinstance(event, RoundEnded) and event.round == number and event.reason for event in told)
        assert RoleAssigned(number, "replacer", (1, 2), (0,)) in replacer


def kinds(told: list[Any], number: int) -> list[type]:
    """Return the types of one round's events, in order."""
    return [type(event) for event in told if event.round == number]
