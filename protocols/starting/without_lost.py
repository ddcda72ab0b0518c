"""Starts a policy without lost ranks. If the launcher restarts lost ranks, they join the policy later."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from asyncdist import ClosedError, DisagreementError, RankLostError, World
from asyncdist.collectives.agreement.messages import Meeting
from asyncdist.messaging.services import Services
from asyncdist.waits import WaitId, WaitKind

#: Maximum number of seconds between the times at which two ranks notice the same loss.
_NOTICED_AFTER_S: Final = 1.0


async def start_without_lost(
    services: Services, ranks: Sequence[int], start: Callable[[tuple[int, ...]], Awaitable[None]], timeout_s: float
) -> None:
    """Start a policy without lost ranks. Retry the start without a rank that is lost meanwhile.

    Members notice a loss at different times, so their first attempts may include different ranks and fail. Restarted
    ranks are not included.

    Args:
        services: Services of this rank, which is not a restarted rank.
        start: Function that starts the policy with the given ranks; called on all of these ranks.
        timeout_s: Seconds after the first attempt during which the start is retried.

    Raises:
        AsyncdistError: ``start`` has failed, and no further loss explains the failure.
    """
    give_up_at = services.time() + timeout_s
    while True:
        lost = _lost(services)
        try:
            await start(tuple(ranks) if not lost else tuple(rank for rank in ranks if rank not in lost))
            return
        except (RankLostError, ClosedError, DisagreementError) as error:
            has_other_reason = isinstance(error, DisagreementError) and error.facts.get("difference") != "ranks"
            if has_other_reason or services.engine.failure is not None or services.time() >= give_up_at:
                raise
            # Another rank may have noticed a loss that this rank has not noticed yet.
            until = min(give_up_at, services.time() + _NOTICED_AFTER_S)
            has_changed = functools.partial(_has_changed, services, lost)
            if not await services.engine.until(has_changed, WaitId(WaitKind.LOSSES), deadline=until):
                raise


def lost_members(world: World, ranks: Sequence[int], meeting: Meeting) -> tuple[int, ...]:
    """Return the members of a policy that do not take part in its start, because they were lost or restarted."""
    replaced = world.agreements.incarnations.replaced(meeting.key)
    if meeting.ranks == ranks:
        return tuple(replaced)
    met = frozenset(meeting.ranks)
    return (*replaced, *(rank for rank in ranks if rank not in met))


def _has_changed(services: Services, lost: frozenset[int]) -> bool:
    return _lost(services) != lost


def _lost(services: Services) -> frozenset[int]:
    return frozenset(services.gone - services.left).union(services.restarted)
