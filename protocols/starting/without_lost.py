"""Starts a policy on the ranks that live, in a job that goes on when ranks are lost.

Where its launcher starts lost ranks again, they join the policy then.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from asyncdist import ClosedError, DisagreementError, RankLostError, World
from asyncdist.collectives.agreement.messages import Meeting
from asyncdist.messaging.services import Services
from asyncdist.waits import WaitId, WaitKind

#: How much later than another rank this one may hear of a loss.
_HEARD_AFTER_S: Final = 1.0


async def start_without_lost(
    services: Services, ranks: Sequence[int], start: Callable[[tuple[int, ...]], Awaitable[None]], timeout_s: float
) -> None:
    """Await ``start`` with those of ``ranks`` that were not lost, once more when one of them is lost meanwhile.

    Members hear of a loss at different times. One that has asked for a start with a rank that is lost hears so, and
    asks again. A new process in the place of a lost one is no member yet.

    Args:
        services: of this rank, which was not started again.
        ranks: of the policy.
        start: starts with these; all of them call it.
        timeout_s: how long after the beginning it may still ask again.

    Raises:
        AsyncdistError: as ``start``, where no loss is the reason.
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
            # What ended it may have been told by another rank, which has heard of the loss earlier.
            until = min(give_up_at, services.time() + _HEARD_AFTER_S)
            hears = functools.partial(_has_changed, services, lost)
            if not await services.engine.until(hears, WaitId(WaitKind.LOSSES), deadline=until):
                raise


def lost_members(world: World, ranks: Sequence[int], meeting: Meeting) -> tuple[int, ...]:
    """Return those of a policy's ``ranks`` without which it starts, though some may have a new process already.

    They were lost before the others agreed on the start in ``meeting``; or since, and replaced.
    """
    met = frozenset(meeting.ranks)
    absent = (rank for rank in ranks if rank not in met)
    return (*world.agreements.incarnations.replaced(meeting.key), *absent)


def _has_changed(services: Services, lost: frozenset[int]) -> bool:
    return _lost(services) != lost


def _lost(services: Services) -> frozenset[int]:
    return frozenset(services.gone - services.left).union(services.restarted)
