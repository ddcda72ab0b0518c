"""Two transports as one. That messages arrive as they should is the conformance suite's."""

from __future__ import annotations

import re

import pytest
import torch
from support import torchrun
from support.mpi import require_mpi, run_source

import asyncdist as ad
from asyncdist.errors import RankLostError, TransportError
from asyncdist.tags import BULK_FIRST, BULK_LAST
from asyncdist.transports.cross_memory_attach import obstacle
from asyncdist.transports.local import LocalHub
from asyncdist.transports.split_plane import TwoPlaneTransport

BULK = range(BULK_FIRST, BULK_LAST + 1)


def planes(size: int, rank: int = 0) -> tuple[LocalHub, LocalHub, TwoPlaneTransport]:
    control, bulk = LocalHub(size), LocalHub(size)
    return control, bulk, TwoPlaneTransport(control.transport(rank), bulk.transport(rank), BULK)


def test_a_message_goes_by_its_tag() -> None:
    control, bulk, transport = planes(2)
    for hub, tag in ((control, BULK_FIRST - 1), (bulk, BULK_FIRST), (bulk, BULK_LAST), (control, BULK_LAST + 1)):
        buffer = bytearray(1)
        arriving = hub.transport(1).irecv(buffer, 0, tag)
        assert transport.isend(b"x", 1, tag).test()
        assert arriving.test(), tag
        assert buffer == b"x"


def test_a_rank_lost_on_either_is_lost_and_told_once() -> None:
    control, bulk, transport = planes(4)
    told: list[int] = []
    transport.set_loss_listener(told.append)
    bulk.lose(2)
    control.lose(2)
    control.lose(3)
    assert told == [2, 3]
    assert transport.lost_ranks() == {2, 3}
    with pytest.raises(RankLostError) as caught:
        transport.isend(b"", 2, BULK_FIRST).test()
    assert caught.value.rank == 2


def test_both_ring() -> None:
    control, bulk, transport = planes(2)
    rings: list[str] = []
    transport.set_doorbell(lambda: rings.append("!"))
    control.transport(1).isend(b"", 0, 1)
    bulk.transport(1).isend(b"", 0, 1)
    assert len(rings) == 2


def test_planes_that_number_the_ranks_differently_are_refused() -> None:
    with pytest.raises(TransportError, match=r"rank 1 of 3 on local \(control\), but rank 0 of 2 on local \(bulk\)"):
        TwoPlaneTransport(LocalHub(3).transport(1), LocalHub(2).transport(0), BULK)


def test_a_bulk_plane_without_room_for_the_tags_is_refused() -> None:
    with pytest.raises(TransportError, match="local takes tags up to 32767, bulk needs 40000"):
        TwoPlaneTransport(LocalHub(1).transport(0), LocalHub(1).transport(0), range(39000, 40001))


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("transport", "bulk"),
    [
        ("auto", "torch"),
        pytest.param("torch", "mpi", marks=pytest.mark.long),
        pytest.param("auto", "torch:orderly", marks=pytest.mark.long),
    ],
)
def test_messages_and_streams_on_two_planes_between_processes(transport: str, bulk: str) -> None:
    """With averages, whose streams take the bulk plane too."""
    require_mpi()
    result = run_source(
        3,
        """
        import sys
        from dataclasses import dataclass

        import torch
        from support import stand_in
        from support.mpi import report

        import asyncdist as ad
        from protocols import AsyncSelectiveAveragingPolicy

        @dataclass(frozen=True)
        class Greeting:
            sender: int

        async def main(world):
            right, left = (world.rank + 1) % 3, (world.rank - 1) % 3
            channel = world.channel(Greeting, tag=5)
            await channel.send(Greeting(world.rank), right)
            assert (await channel.receive()).message.sender == left
            sent, received = torch.full((3_000_000,), float(world.rank)), torch.zeros(3_000_000)
            sending = world.spawn(world.send_stream(sent, right))
            await world.receive_stream(received, left)
            await sending
            assert (received == left).all()
            model = torch.nn.Linear(10, 10, bias=False)
            torch.nn.init.constant_(model.weight, world.rank)
            average = 0
            policy = AsyncSelectiveAveragingPolicy(
                model, torch.optim.SGD(model.parameters(), lr=0), average_every=5, replacement_ratio=0.3,
                # One round, judged with all: the others train on when the first has left.
                quorum=1.0, threshold=0.5, cooldown=10**9,
            )
            async with policy:
                for _ in range(100_000):
                    average += bool(await policy.step(float(world.rank)))
                    if average if world.rank == 0 else 0 in world.services.gone:
                        break
            report(world.rank, [world.describe(), model.weight.unique().tolist()])

        stand_in.register()
        ad.run(main, transport=sys.argv[1], bulk=sys.argv[2], strict=True)
        """,
        transport,
        bulk,
        timeout_s=100,
    ).check()
    for rank, (description, weights) in result.reports.items():
        planes = re.fullmatch(r"control on (.*); bulk on (.*)", description)
        assert planes, description
        assert planes[1].startswith("torch" if bulk == "mpi" else "mpi")
        assert planes[2].startswith(bulk.replace(":", ": "))
        assert weights == ([1.5] if rank == 0 else [rank])


def test_a_bulk_plane_that_does_not_exist_is_named() -> None:
    async def main(world: ad.World) -> None:
        raise AssertionError("refused before anything starts")

    with pytest.raises(ValueError, match="bulk is 'nccl'; allowed are 'mpi', 'torch', and 'torch:BACKEND'"):
        ad.run(main, bulk="nccl")
    with pytest.raises(ValueError, match="bulk is 'torch:tcp'; this torch has registered gloo, nccl"):
        ad.run(main, transport="torch", bulk="torch:tcp")
    if not torch.cuda.is_available() and torch.distributed.is_nccl_available():
        with pytest.raises(ValueError, match="bulk is 'torch:nccl', which moves cuda tensors alone, and torch sees no"):
            ad.run(main, transport="torch", bulk="torch:nccl")
    with pytest.raises(ValueError, match="bulk='torch' needs a transport between processes, not 'local'"):
        ad.run(main, transport="local", bulk="torch")


def test_a_plane_that_fails_to_close_does_not_hold_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, transport = planes(2)
    closed: list[str] = []

    def refuse() -> None:
        raise TransportError("bulk is stuck")

    for how in ("close", "close_failed"):
        monkeypatch.setattr(transport._bulk, how, refuse)
        monkeypatch.setattr(transport._control, how, lambda how=how: closed.append(how))
        with pytest.raises(TransportError, match="bulk is stuck"):
            getattr(transport, how)()
    assert closed == ["close", "close_failed"]


@pytest.mark.mpi
def test_mpi_for_streams_under_torchrun_names_the_launcher() -> None:
    """Regression: it said that this was rank 1 of 2 on torch, but rank 0 of 1 on MPI."""
    require_mpi()
    source = """
        import asyncdist as ad

        async def main(world):
            raise AssertionError

        ad.run(main, bulk="mpi")
    """
    result = torchrun.run_source(2, source).check(1, 1)
    assert "WORLD_SIZE says that this is one of 2 ranks, and MPI knows of none but itself: start with" in result.stderr
    assert "asyncdist run -n 2" in result.stderr


@pytest.mark.skipif(obstacle() is not None, reason="the kernel lets no process write to another's memory")
@pytest.mark.parametrize(
    ("transport", "share"), [pytest.param("mpi", 0.5, marks=[pytest.mark.mpi, pytest.mark.long]), ("torch", 1.0)]
)
def test_large_tensors_are_partly_written_directly_on_one_host(transport: str, share: float) -> None:
    result = (run_source if transport == "mpi" else torchrun.run_source)(
        2,
        """
        import torch
        from support.mpi import report

        import asyncdist as ad
        from asyncdist.messaging.user_streams import UserStreams

        granted, original = [0], UserStreams._written_nbytes

        def noted(self, nbytes, source):
            granted.append(original(self, nbytes, source))
            return granted[-1]

        UserStreams._written_nbytes = noted

        async def main(world):
            tensor = torch.zeros(1 << 20)
            for number in range(1, 1000):
                if world.rank == 0:
                    await world.send_stream(tensor.fill_(number), 1)
                else:
                    await world.receive_stream(tensor, 0)
                    assert (tensor == number).all()
                if int(await ad.all_reduce(torch.tensor(granted[-1]))):
                    break
            report(world.rank, granted[-1])

        ad.run(main, strict=True)
        """,
    ).check()
    assert result.reports == {0: 0, 1: int(share * (4 << 20))}
