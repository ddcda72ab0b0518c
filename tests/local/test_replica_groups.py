"""Tests that DDP over ranks outside a replica is refused, however torch.distributed numbers the ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scripts.population import sgd
from support.facts import naming
from support.torch_groups import pretend_initialized
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import asyncdist as ad
from protocols import ReplicaAveragingPolicy
from protocols.wrappers import check_not_wrapped


class Wrapped(nn.parallel.DistributedDataParallel):
    """DDP without communication, over these ranks."""

    def __init__(self, module: nn.Module, ranks: list[int] | None) -> None:
        nn.Module.__init__(self)
        self.module, self.process_group = module, ranks


def start(
    monkeypatch: pytest.MonkeyPatch,
    groups: list[list[int] | None],
    size: int = 4,
    outer: Any = None,
    order: tuple[int, ...] = (0, 1, 2, 3),
    **options: Any,
) -> None:
    """Start a policy on four ranks with DDP over ``groups``; torch.distributed has ``size`` ranks.

    If ``outer`` is given, all policies get the model that it makes from DDP. The policy's group has the ranks in
    ``order``.
    """
    pretend_initialized(monkeypatch)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: ad.current_world().rank % size)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: size)
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", list)

    async def main(world: ad.World) -> None:
        model = nn.Linear(2, 2)
        wrapped = Wrapped(model, groups[world.rank])
        # if DDP was created on the module inside, the policy must recognise this module
        given = wrapped if world.rank % 2 else model
        given = given if outer is None else outer(wrapped)
        given_options = {"replica_size": 2, "average_every": 2, "group": await ad.new_group(order), **options}
        async with ReplicaAveragingPolicy(given, sgd(model), **given_options) as policy:
            await policy.step(1.0)
        assert wrapped.module is model

    ad.run_local(main, ranks=4)


@pytest.mark.long
@pytest.mark.parametrize("given", [[[0, 1], [1, 0], [2, 3], [2, 3]], [None] * 4])
def test_the_groups_of_the_replicas_are_right(given: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    start(monkeypatch, given)


def test_ranks_of_the_policys_group_may_be_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: DDP over ranks 2 and 3 was refused, because the replica's ranks were ``[3, 2]``."""
    start(monkeypatch, [[0, 1], [0, 1], [2, 3], [2, 3]], order=(3, 2, 1, 0))


@pytest.mark.long
def test_ddp_over_all_ranks_is_refused_with_both_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: DDP silently mixed the gradients of two replicas whose weights differed."""
    told = r"DDP must synchronise the ranks \[(0, 1|2, 3)\] of this rank's replica, got \[0, 1, 2, 3\]"
    with pytest.raises(ValueError, match=told):
        start(monkeypatch, [[0, 1, 2, 3]] * 4)


@pytest.mark.parametrize(
    "outer",
    [
        pytest.param(lambda wrapped: torch.compile(wrapped), id="compiled", marks=pytest.mark.long),
        pytest.param(lambda wrapped: nn.ModuleDict({"net": wrapped}), id="one of several"),
    ],
)
def test_ddp_inside_the_model_of_a_replica(outer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: torch.compile(DDP(model)) was refused, as if each rank had been a replica of its own."""
    start(monkeypatch, [[0, 1], [0, 1], [2, 3], [2, 3]], outer=outer)
    with pytest.raises(ValueError, match="DDP must synchronise the ranks"):
        start(monkeypatch, [[0, 1, 2, 3]] * 4, outer=outer)


def test_fsdp_of_a_replica_is_refused_with_the_alternatives() -> None:
    class Flat(FullyShardedDataParallel):
        """FSDP without the process group that it usually needs."""

        def __init__(self, module: nn.Module) -> None:
            nn.Module.__init__(self)
            self._fsdp_wrapped_module = module

    with pytest.raises(ValueError, match="model of a replica must not be wrapped in FullyShardedDataParallel: wrap it"):
        check_not_wrapped(Flat(nn.Linear(2, 2)), keeps_replicas=True)


@pytest.mark.long
def test_a_group_of_other_ranks_of_the_same_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=naming([0, 2], [0, 1])):
        start(monkeypatch, [[0, 2], [1, 3], [0, 2], [1, 3]])


@pytest.mark.long
def test_ranks_that_are_right_do_not_wait_for_one_that_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=naming([1, 3], [2, 3])):
        start(monkeypatch, [[0, 1], [0, 1], [2, 3], [1, 3]], start_timeout_s=50.0)


@pytest.mark.long
def test_replicas_with_own_process_groups_compare_rank_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start(monkeypatch, [[0, 1]] * 4, size=2)
    with pytest.raises(ValueError, match=r"got 1 ranks: \[0\] as torch.distributed numbers them"):
        start(monkeypatch, [[0]] * 4, size=2)
