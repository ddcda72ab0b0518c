"""Tests the errors of wrong replicas under DiLoCo: sizes, wrappers, and ranks that do not train together."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from typing import Any

import pytest
import torch
from support.facts import naming
from support.torch_groups import pretend_initialized
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import asyncdist as ad
from protocols import DiLoCoPolicy


class Wrapped(nn.parallel.DistributedDataParallel):
    """DDP without communication, over these ranks."""

    def __init__(self, module: nn.Module, ranks: list[int]) -> None:
        nn.Module.__init__(self)
        self.module, self.process_group = module, ranks


def policy(model: nn.Module, **options: Any) -> DiLoCoPolicy:
    return DiLoCoPolicy(model, torch.optim.SGD(model.parameters(), lr=0.0), average_every=2, **options)


def start(ranks: int = 4, steps: int = 2, drift: Any = lambda rank: 0.0, **options: Any) -> None:
    """Train on some ranks, each of which moves its weights by ``drift(rank)`` in each step."""

    async def main(world: ad.World) -> None:
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        async with policy(model, **options) as own:
            for _ in range(steps):
                with torch.no_grad():
                    model.weight += drift(world.rank)
                await own.step()

    ad.run_local(main, ranks=ranks)


def test_the_number_of_ranks_is_a_multiple_of_the_size() -> None:
    with pytest.raises(ValueError, match=naming("replica_size", "a divisor of the number of ranks (4)", "3")):
        start(replica_size=3)
    with pytest.raises(ValueError, match=naming("replica_size", "0")):
        start(replica_size=0)


def test_ranks_with_different_replica_sizes_do_not_start() -> None:
    async def main(world: ad.World) -> None:
        async with policy(nn.Linear(2, 2), replica_size=2 if world.rank else 4):
            pass

    with pytest.raises(ad.DisagreementError, match="replica_size"):
        ad.run_local(main, ranks=4)


def test_a_model_under_ddp_needs_a_replica_size() -> None:
    with pytest.raises(ValueError, match=naming("DistributedDataParallel", "replica_size")):
        policy(Wrapped(nn.Linear(2, 2), [0, 1]))


def test_a_trainers_fsdp_around_the_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: only FSDP inside the model was noticed, and not that of a trainer, around the model."""

    class Sharded(FullyShardedDataParallel):
        def __init__(self, module: nn.Module) -> None:
            nn.Module.__init__(self)
            self.module = module

    async def main(world: ad.World) -> None:
        model = nn.Linear(2, 2)
        wrapper = Sharded(model)
        async with policy(model, replica_size=2):
            assert wrapper

    pretend_initialized(monkeypatch)
    with pytest.raises(ValueError, match=r"must not be wrapped in FullyShardedDataParallel: .*fully_shard"):
        ad.run_local(main, ranks=2)


@pytest.mark.long  # as with ReplicaAveragingPolicy
def test_ddp_over_ranks_outside_the_replica_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_initialized(monkeypatch)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: ad.current_world().rank)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", list)

    async def main(world: ad.World) -> None:
        wrapped = Wrapped(nn.Linear(2, 2), [0, 1, 2, 3])
        async with policy(wrapped, replica_size=2):
            assert wrapped.module

    with pytest.raises(ValueError, match=r"DDP must synchronise the ranks \[(0, 1|2, 3)\].*got \[0, 1, 2, 3\]"):
        ad.run_local(main, ranks=4)


def test_replicas_whose_ranks_train_apart_are_refused() -> None:
    """Without DDP each rank of a replica would get other gradients, and their parts would not fit together."""
    with pytest.raises(ValueError, match=naming("ranks 0, 1 differ", "DistributedDataParallel", "replica_size=1")):
        start(drift=lambda rank: rank % 2, ranks=2, replica_size=2)
    start(drift=lambda rank: rank // 2, replica_size=2)


def test_a_rank_that_leaves_before_its_mates_is_named() -> None:
    async def main(world: ad.World) -> str:
        model = nn.Linear(2, 2)
        with torch.no_grad():
            model.weight.zero_()
            model.bias.zero_()
        try:
            async with policy(model, replica_size=2, drain_timeout_s=1.0) as own:
                for _ in range(2 if world.rank == 3 else 4):
                    await own.step()
        except ad.AsyncdistError as error:
            return str(error)
        return ""

    said = ad.run_local(main, ranks=4)
    assert "same number of steps" in said[2] and "rank 3" in said[2] and said[0] == said[1] == said[3] == ""


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_replica_alone_makes_outer_steps(ranks: int) -> None:
    """Both rounds' differences are -1: the anchor moves by 0.5 * 1, and then, with momentum, by 0.5 * 1.5."""

    async def main(world: ad.World) -> list[float]:
        model, found = nn.Linear(1, 1, bias=False), []
        nn.init.zeros_(model.weight)
        outer = functools.partial(torch.optim.SGD, lr=0.5, momentum=0.5)
        async with policy(model, replica_size=2, outer_optimizer=outer) as own:
            for _ in range(4):
                with torch.no_grad():
                    model.weight += 0.5
                await own.step()
                found.append(model.weight.item())
        return found

    assert ad.run_local(main, ranks=ranks) == [[0.5, 0.5, 1.0, 1.25]] * ranks


def test_a_cancelled_step_ends_the_replica() -> None:
    """Its ranks may differ afterwards, so no step is possible."""
    has_tried = asyncio.Event()

    async def main(world: ad.World) -> str:
        said, model = "", nn.Linear(2, 2)
        with torch.no_grad():
            model.weight.zero_()
            model.bias.zero_()
        with contextlib.suppress(ad.AsyncdistError):
            async with policy(model, replica_size=2, drain_timeout_s=0.1) as own:
                await own.step()
                if world.rank == 0:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0.01):  # the other ranks make no second step
                            await own.step()
                    try:
                        await own.step()
                    except ad.ClosedError as error:
                        said = str(error)
                    has_tried.set()
                await has_tried.wait()
        return said

    assert "an earlier step was cancelled" in ad.run_local(main, ranks=4)[0]
