"""Tests a coordinator of selective averaging that hands over to another rank while messages still arrive."""

from __future__ import annotations

from typing import Any

from support.local import worlds

from asyncdist import tags
from protocols.joining.scopes import PolicyScopes
from protocols.selective.coordinator import Coordinator
from protocols.selective.messages import Report
from protocols.selective.rounds import RoundCoordinator
from protocols.selective.selection import SelectiveRules


async def test_stopped_coordinator_names_its_successor_to_each_sender(monkeypatch: Any) -> None:
    async with worlds(3) as made:
        scopes = PolicyScopes(1, 2)
        coordinator = Coordinator(
            made[0].services, range(3), range(3), SelectiveRules(), scopes, epoch=0, model_nbytes=8
        )
        informed: list[int] = []
        heard: list[int] = []

        def on_report(core: RoundCoordinator, rank: int, *facts: Any, **times: Any) -> tuple[()]:
            heard.append(rank)
            coordinator.stop(informed.append)  # as a message would that arrives while this one is answered
            return ()

        monkeypatch.setattr(RoundCoordinator, "on_report", on_report)
        reports = [
            world.services.open_channel(Report, tag=tags.METRIC, scope=scopes.to_coordinator, name="reports", epoch=0)
            for world in made[1:]
        ]
        for _ in range(2):
            for channel in reports:
                channel.send_nowait(Report(1, 0.5, 0.01, 0.1), 0)
            made[0].services.engine.poll()
        await coordinator.serve()
        assert (heard, informed) == ([1], [2])
        reports[0].send_nowait(Report(2, 0.5, 0.01, 0.1), 0)
        made[0].services.engine.poll()
        assert informed == [2, 1], "later reports must be passed on as well"
