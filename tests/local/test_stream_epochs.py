"""Tests that requests for snapshots are answered in any epoch, because the replacer waits for each answer."""

from __future__ import annotations

from typing import Any

from support.local import worlds

from asyncdist.messaging.streams import Grant
from protocols.joining.scopes import PolicyScopes
from protocols.parameter_stream.server import SnapshotServer
from protocols.selective.roles.member_channels import MemberChannels


async def test_requests_of_an_earlier_epoch_get_the_abort(monkeypatch: Any) -> None:
    async with worlds(2) as made:
        refused: list[tuple[int, int]] = []
        monkeypatch.setattr(SnapshotServer, "_refuse", lambda server, key: refused.append(key))
        scopes = PolicyScopes.__new__(PolicyScopes)
        scopes.policy, scopes.to_members, scopes.to_coordinator = 1, 2, 3
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
