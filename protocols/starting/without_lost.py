"""Starts a policy on the ranks that are not lost, in a job that continues when ranks are lost.

If the launcher restarts lost ranks, they join the policy later.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from asyncdist import ClosedError, DisagreementError, RankLostError, World
from asyncdist.collectives.agreement.messages import Meeting
from asyncdist.messaging.services import Services
from asyncdist.waits import WaitId, WaitKind

#: Seconds by which this rank may learn of a loss later than another rank.
_HEARD_AFTER_S: Final = 1.0


async def start_without_lost(
    services: Services, ranks: Sequence[int], start: Callable[[tuple[int, ...]], Awaitable[None]], timeout_s: float
) -> None:
    """Await ``start`` with those of ``ranks`` that are not lost; repeat it if one of them is lost meanwhile.

    Members learn of a loss at different times. A member that asked for a start with a lost rank is notified, and asks
    again. A restarted rank is not a member yet.

    Args:
        services: Services of this rank, which is not a restarted rank.
        ranks: Ranks of the policy.
        start: Starts the policy with the given ranks; all of them call it.
        timeout_s: Seconds after the beginning in which the start may be repeated.

    Raises:
        AsyncdistError: ``start`` raised it, and not because of a loss.
    """
    give_up_at = services.time() + timeout_s
    while True:
        lost = _lost(services)
        try:
            await start(tuple(rank for rank in ranks if rank not in lost))
            return
        except (RankLostError, ClosedError, DisagreementError) as error:
            has_other_reason = isinstance(error, DisagreementError) and error.facts.get("difference") != "ranks"
            if has_other_reason or services.engine.failure is not None or services.time() >= give_up_at:
                raise
            # The error may have been reported by another rank that learnt of the loss earlier.
            until = min(give_up_at, services.time() + _HEARD_AFTER_S)
            hears = functools.partial(_has_changed, services, lost)
            if not await services.engine.until(hears, WaitId(WaitKind.LOSSES), deadline=until):
                raise


def lost_members(world: World, ranks: Sequence[int], meeting: Meeting) -> tuple[int, ...]:
    """Return those of a policy's ``ranks`` without which it starts; some may have been restarted already.

    They were lost before the others agreed on the start in ``meeting``, or lost and restarted since.
    """
    met = frozenset(meeting.ranks)
    absent = (rank for rank in ranks if rank not in met)
    return (*world.agreements.incarnations.replaced(meeting.key), *absent)


def _has_changed(services: Services, lost: frozenset[int]) -> bool:
    return _lost(services) != lost


def _lost(services: Services) -> frozenset[int]:
    return frozenset(services.gone - services.left).union(services.restarted)
