"""Tests that requests for snapshots are always answered, because the replacer waits for each answer."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from support.local import worlds

from asyncdist import ClosedError
from asyncdist.messaging.streams import Grant, StreamAborted
from protocols.joining.scopes import PolicyScopes
from protocols.parameter_stream import neighbours
from protocols.parameter_stream.messages import Location
from protocols.parameter_stream.server import SnapshotServer
from protocols.selective.roles.member_channels import MemberChannels


async def test_requests_of_an_earlier_epoch_get_the_abort(monkeypatch: Any) -> None:
    async with worlds(2) as made:
        refused: list[tuple[int, int]] = []
        monkeypatch.setattr(SnapshotServer, "_refuse", lambda server, key: refused.append(key))
        scopes = PolicyScopes(to_members=2, to_coordinator=3, policy=1)
        donor, replacer = (MemberChannels(world.services, scopes) for world in made)

        def ask(slot: int) -> None:
            replacer.server.channel.send_nowait(Grant(slot, 64, 64), 0, round=5)
            made[0].services.engine.poll()

        ask(1)
        assert not refused, "the request must wait for the snapshot of a later round"
        donor.enter_epoch(1)
        assert refused == [(1, 1)], "the request must be refused, since its round will not take place"
        ask(2)
        assert refused == [(1, 1), (1, 2)], "a request of the earlier epoch must be refused"
        replacer.enter_epoch(1)
        ask(3)
        assert refused == [(1, 1), (1, 2)], "the request must wait, since round 5 of this epoch may take place"


async def test_a_closed_server_answers_a_request_for_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the answer was not sent, since the channel was closed, so the replacer waited for its deadline."""
    monkeypatch.setattr(neighbours, "READ_NBYTES_MIN", 1)
    async with worlds(2) as made:
        for world in made:
            transport: Any = world.services.engine.transport
            transport.capabilities = dataclasses.replace(transport.capabilities, shares_memory=True)
        donor, replacer = (SnapshotServer(world.services, 77) for world in made)
        replacer.neighbours._readable.add(0)

        async def ask() -> None:
            replacer.neighbours._readable.add(0)
            reading = replacer.neighbours.ask(0, 100, round=1)
            assert reading is not None
            with pytest.raises(StreamAborted):
                await reading.located(deadline=made[1].time() + 1.0)

        donor.close()
        await ask()
        await ask()
        SnapshotServer(made[0].services, 77).end_rounds(math.inf)
        await ask()  # the messages of the new server continue the numbers of the closed one
        with pytest.raises(ClosedError):
            donor.channel.answer_nowait(Location(-1), 1)
        donor.channel.close()
        with pytest.raises(ClosedError):
            donor.channel.send_nowait(Location(-1), 1)
