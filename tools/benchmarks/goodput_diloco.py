"""Trains ranks that fail with DiLoCo and its variants, for the benchmark ``goodput``.

A step of a rank counts from the moment when its effect is in the anchor: when an average that contains the rank's
contribution has been applied, by this rank or by another one. Steps since the last such contribution are lost with the
rank. The other ranks continue, and a new process takes the rank's place, with the anchor of a living rank.

- DiLoCo: each round waits for all living ranks.
- DiLoCo, quorum: a round needs half of the ranks; no rank waits.
- async: a contribution is applied when it arrives (``quorum=1``).
- async, grace: in addition, the leader waits for further contributions, for a part of two steps (Decoupled DiLoCo).
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

import torch
from harness import optimizer_of
from torch import nn

import asyncdist as ad
from protocols import AsyncDiLoCoPolicy, AverageApplied, Contributed, DiLoCoPolicy, PolicyEvent

AVERAGE_EVERY: Final = 10

Make = Callable[..., AbstractAsyncContextManager[Any]]


def _diloco(model: nn.Module, optimizer: torch.optim.Optimizer, rank_count: int, **options: Any) -> Any:
    del rank_count
    return DiLoCoPolicy(model, optimizer, average_every=AVERAGE_EVERY, **options)


def _quorum(model: nn.Module, optimizer: torch.optim.Optimizer, rank_count: int, **options: Any) -> Any:
    quorum = (rank_count + 1) // 2
    return DiLoCoPolicy(model, optimizer, average_every=AVERAGE_EVERY, quorum=quorum, late="skip", **options)


def _async(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank_count: int, *, grace_steps: float = 0.0, **options: Any
) -> Any:
    del rank_count
    return AsyncDiLoCoPolicy(model, optimizer, average_every=AVERAGE_EVERY, grace_steps=grace_steps, **options)


#: Functions that make a policy of a model, an optimizer and the number of ranks.
MAKERS: Final[dict[str, Make]] = {
    "DiLoCo": _diloco,
    "DiLoCo, quorum": _quorum,
    "async": _async,
    "async, grace": functools.partial(_async, grace_steps=2.0),
}


async def train(
    world: ad.World, lives: list[list[Any]], ends_at_s: float, begins_at_s: float, work: Any, kind: str
) -> None:
    """Be one process of a rank until the virtual time is over, or until the process is killed.

    Args:
        lives: Works of each rank's processes, the newest last.
        ends_at_s: Virtual time at which the training ends.
        begins_at_s: Virtual time at which the first processes begin to train.
        work: Counts of this process, in which its steps are counted.
        kind: Name of the policy.
    """
    lives[world.rank].append(work)
    first = 0

    def note(event: PolicyEvent) -> None:
        if isinstance(event, Contributed):
            work.given = (event.round, event.iteration + 1 - first)
        elif isinstance(event, AverageApplied):
            for other in itertools.chain.from_iterable(lives[donor] for donor in event.donors):
                if other is work or other.given[0] == event.round:
                    other.kept = max(other.kept, other.given[1])

    torch.manual_seed(0)  # equal first weights on all ranks
    model = nn.Linear(4, 4)
    policy = MAKERS[kind](model, optimizer_of(model), world.size, on_event=note)
    try:
        async with policy as policy:
            first = policy.iteration  # a new process continues its donor's count
            if not world.incarnation:
                await asyncio.sleep(begins_at_s - world.time())
            while world.time() < ends_at_s - 0.5:
                await policy.step()
                work.made += 1
            await asyncio.sleep(max(0.0, ends_at_s - world.time()))
    except (ad.ClosedError, ad.RankLostError, ad.StartTimeoutError):
        if world.time() < ends_at_s - AVERAGE_EVERY:
            raise  # later than that, other ranks have left before the last round
