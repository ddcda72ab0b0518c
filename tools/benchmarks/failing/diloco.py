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

from torch import nn, optim

import asyncdist as ad
from failing.training import until_start
from failing.work import AVERAGE_EVERY, Job
from protocols import AsyncDiLoCoPolicy, AverageApplied, Contributed, DiLoCoPolicy, PolicyEvent

#: Outer optimizer at a quarter of DiLoCo's usual rate. At the usual rate, models diverge if ranks have two speeds.
QUORUM_OUTER: Final = functools.partial(optim.SGD, lr=0.175, momentum=0.9, nesterov=True)
#: Seconds in which a new process must be admitted. If many ranks fail, rounds that wait for all ranks take minutes.
START_TIMEOUT_S: Final = 600.0
Make = Callable[..., AbstractAsyncContextManager[Any]]


def _diloco(model: nn.Module, optimizer: optim.Optimizer, rank_count: int, **options: Any) -> Any:
    del rank_count
    return DiLoCoPolicy(model, optimizer, average_every=AVERAGE_EVERY, **options)


def _quorum(model: nn.Module, optimizer: optim.Optimizer, rank_count: int, **options: Any) -> Any:
    return DiLoCoPolicy(
        model,
        optimizer,
        average_every=AVERAGE_EVERY,
        quorum=(rank_count + 1) // 2,
        late="skip",
        outer_optimizer=QUORUM_OUTER,
        **options,
    )


def _async(
    model: nn.Module, optimizer: optim.Optimizer, rank_count: int, *, grace_steps: float = 0.0, **options: Any
) -> Any:
    del rank_count
    return AsyncDiLoCoPolicy(model, optimizer, average_every=AVERAGE_EVERY, grace_steps=grace_steps, **options)


#: Functions that make a policy from a model, an optimizer and the number of ranks.
MAKERS: Final[dict[str, Make]] = {
    "DiLoCo": _diloco,
    "DiLoCo, quorum": _quorum,
    "async": _async,
    "async, grace": functools.partial(_async, grace_steps=2.0),
}


async def train(world: ad.World, job: Job, kind: str) -> None:
    """Run one process of a rank until the virtual time is over or the process is killed.

    Args:
        kind: Name of the policy.
    """
    work, student = job.begin(world)
    first = version = 0

    def note(event: PolicyEvent) -> None:
        if isinstance(event, Contributed):
            work.given = (event.round, event.iteration + 1 - first)
        elif isinstance(event, AverageApplied):
            for other in itertools.chain.from_iterable(job.lives[donor] for donor in event.donors):
                if other is work or other.given[0] == event.round:
                    other.kept = max(other.kept, other.given[1])

    options = {"on_event": note, "start_timeout_s": START_TIMEOUT_S}
    policy = MAKERS[kind](student.model, student.optimizer, world.size, **options)
    try:
        async with policy as policy:
            first = policy.iteration  # a new process continues its donor's count
            if not world.incarnation:
                await until_start(world)
            while world.time() < job.ends_at_s - 0.5:
                student.step()
                info = await policy.step()
                version = info.round if info else version
                work.made += 1
            async with policy.anchor_weights():
                work.offered = version, student.loss()
            await asyncio.sleep(max(0.0, job.ends_at_s - world.time()))
    except (ad.ClosedError, ad.RankLostError, ad.StartTimeoutError):
        if world.time() < job.ends_at_s - AVERAGE_EVERY:
            raise  # near the end, other ranks may leave before the last round
