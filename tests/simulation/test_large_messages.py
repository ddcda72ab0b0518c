"""Tests messages between the members of a policy that are larger than a frame."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass

import pytest
import torch
from support.seeds import in_ci
from torch import nn

import asyncdist as ad
from asyncdist import Envelope
from asyncdist.messaging import wire
from asyncdist.protocols.exchange.messages import RoundState
from asyncdist.protocols.exchange.rounds import MemberRound
from asyncdist.protocols.joining import policy_channel
from asyncdist.protocols.joining.policy_channel import PART_NBYTES, Part, PolicyChannel
from asyncdist.simulation import Compute, Kill
from protocols import DiLoCoPolicy, EvolutionStrategyPolicy


@dataclass(frozen=True, slots=True)
class Words:
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Block:
    data: bytes


class Listener:
    def __init__(self, received: list[Envelope[Words | Block]]) -> None:
        self.on_message = received.append


def opened(world: ad.World, received: list[Envelope[Words | Block]]) -> PolicyChannel[Words | Block]:
    return PolicyChannel(world.services, Words | Block, scope=7, name="words", listener=Listener(received))


async def until_received(world: ad.World, received: list[Envelope[Words | Block]], count: int) -> None:
    while len(received) < count:
        await world.sleep(0.001)


LARGEST = wire.PAYLOAD_NBYTES_MAX


@pytest.mark.parametrize("nbytes", [0, LARGEST - 64, LARGEST - 8, LARGEST, 2 * PART_NBYTES, 10 * PART_NBYTES + 1])
def test_messages_of_all_sizes_arrive_in_order(nbytes: int) -> None:
    sent = (Block(b"x" * nbytes), Words(("a", "b")), Words(("word",) * (nbytes // 5)), Block(b""))

    async def main(world: ad.World) -> list[tuple[Words | Block, int, int]]:
        received: list[Envelope[Words | Block]] = []
        channel = opened(world, received)
        await ad.barrier()
        for dest in {0, 1, 2} - {world.rank}:
            for number, message in enumerate(sent):
                channel.post(message, dest, number)
        await until_received(world, received, 2 * len(sent))
        channel.close()
        return sorted(((each.message, each.source, each.round) for each in received), key=lambda each: each[1])

    results = ad.simulate(main, ranks=3, strict=True).results
    for rank, found in enumerate(results):
        others = sorted({0, 1, 2} - {rank})
        assert found == [(message, source, number) for source in others for number, message in enumerate(sent)]


def test_a_message_with_too_many_parts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_channel, "PART_COUNT_MAX", 2)

    async def main(world: ad.World) -> None:
        opened(world, []).post(Block(bytes(3 * PART_NBYTES)), 1 - world.rank)

    with pytest.raises(ad.LocalProtocolError, match=f"a Block must take at most {2 * PART_NBYTES} bytes"):
        ad.simulate(main, ranks=2)


PARTS = {
    "without the first": [Part(1, 1, 2, b"b")],
    "another count": [Part(1, 0, 2, b"a"), Part(1, 1, 3, b"b")],
    "another kind": [Part(1, 0, 2, b"a"), Part(0, 1, 2, b"b")],
    "a part twice": [Part(1, 0, 3, b"a"), Part(1, 0, 3, b"a"), Part(1, 2, 3, b"b")],
    "an unknown kind": [Part(2, 0, 1, b"a")],
    "no message": [Part(1, 0, 2, b"a"), Part(1, 1, 2, b"b")],
}


@pytest.mark.parametrize("kind", PARTS)
def test_false_parts_are_dropped_with_a_warning(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main(world: ad.World) -> list[Words | Block]:
        received: list[Envelope[Words | Block]] = []
        channel = opened(world, received)
        await ad.barrier()
        if world.rank == 0:
            for part in PARTS[kind]:
                channel._channel.send_nowait(part, 1)
            channel.post(Block(bytes(LARGEST)), 1)
        else:
            await until_received(world, received, 1)
        assert not channel._received
        return [each.message for each in received]

    with caplog.at_level(logging.WARNING):
        results = ad.simulate(main, ranks=2, strict=True).results
    assert results == ([], [Block(bytes(LARGEST))])
    assert "words: rank 0 sent an" in caplog.text and "which is dropped" in caplog.text


def test_a_restarted_rank_begins_a_message_anew() -> None:
    received: list[Envelope[Words | Block]] = []

    async def main(world: ad.World) -> None:
        channel = opened(world, received)
        await ad.barrier()
        if world.rank == 0:
            channel._channel.send_nowait(Part(1, 0, 2, b"of an earlier process"), 1)
            channel.post(Block(bytes(LARGEST)), 1)
        else:
            await until_received(world, received, 1)

    ad.simulate(main, ranks=2, strict=True)
    assert [each.message for each in received] == [Block(bytes(LARGEST))]


@pytest.mark.parametrize(("ranks", "pairs"), in_ci([(2, 1900), (4, 910)], (2, 1900)))
def test_an_evolution_strategy_with_many_pairs_makes_rounds(ranks: int, pairs: int) -> None:
    """Regression: the leader's decision was larger than a frame, and all ranks waited forever."""

    async def main(world: ad.World) -> int:
        torch.manual_seed(0)
        model = nn.Linear(2, 1, bias=False)

        def loss() -> float:
            with torch.no_grad():
                return float((model.weight.sum() - 1) ** 2)

        async with EvolutionStrategyPolicy(model, torch.optim.SGD(model.parameters(), lr=0.1), pairs=pairs) as policy:
            await policy.step(loss=loss)
            return (await policy.step(loss=loss)).round  # a rank that leaves would hide the lost decision of one round

    assert ad.simulate(main, ranks=ranks, seed=1).results == (2,) * ranks


@pytest.mark.parametrize("at_s", in_ci([0.0101, 0.0115, 0.0125], 0.0115))
def test_reports_after_a_loss_may_be_larger_than_a_frame(at_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: with 400 ranks and 12 fragments, the report of the rounds was not sent, and all ranks waited."""
    of_few_ranks = MemberRound.round_state

    def of_many_ranks(self: MemberRound) -> RoundState:
        state = of_few_ranks(self)
        return dataclasses.replace(state, late=tuple(range(1000, 3700))) if state.has_merged else state

    monkeypatch.setattr(MemberRound, "round_state", of_many_ranks)
    count = 12

    async def main(world: ad.World) -> int:
        model = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(count)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"average_every": count, "fragments": count, "fragment_pattern": "balanced", "warmup_steps": 1000}
        async with DiLoCoPolicy(model, optimizer, **options) as policy:
            for _ in range(4):
                await policy.step()
        return policy.iteration

    faults = [Kill(0, at_s=at_s)]
    results = ad.simulate(main, ranks=4, seed=1, compute=Compute(step_s=0.01), until_s=100.0, faults=faults).results
    assert results == (None, 4, 4, 4)
