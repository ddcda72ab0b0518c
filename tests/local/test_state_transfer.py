"""Tests the state that a new rank receives in addition to the weights, and the answer of a donor that has no state."""

from __future__ import annotations

import math

import pytest
import torch
from support.local import worlds

import asyncdist as ad
from asyncdist.messaging.streams import StreamAborted
from protocols.joining.state_transfer import StateTransfer, packed, unpacked

SCOPE = 78
STATE = {"step": 5, "moments": torch.arange(2_000_000.0)}  # two chunks


async def test_state_is_taken_in_its_round_and_ended_donors_answer() -> None:
    async with worlds(2) as (first, second):
        donor, newcomer = StateTransfer(first.services, SCOPE), StateTransfer(second.services, SCOPE)

        async def take(round: int, nbytes_max: int = 1 << 30) -> torch.Tensor:
            return await newcomer.take(0, round, nbytes_max=nbytes_max, deadline=lambda: math.inf)

        donor.offer(3, packed(STATE))
        taken = unpacked(await take(3))
        assert taken["step"] == 5 and torch.equal(taken["moments"], STATE["moments"])
        with pytest.raises(StreamAborted):
            await take(4)
        with pytest.raises(
            ad.RemoteProtocolError, match=r"the state of rank 0 must have .* at most 1048576 bytes, got 8000"
        ):
            await take(3, nbytes_max=1 << 20)
        donor.close()
        with pytest.raises(StreamAborted):
            await take(3)
        newcomer.close()
        assert not second.services.slots.discarding_count
