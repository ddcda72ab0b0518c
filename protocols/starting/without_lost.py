"""Starts a policy without lost ranks. If the launcher restarts lost ranks, they join the policy later."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from asyncdist import ClosedError, DisagreementError, RankLostError, World
from asyncdist.collectives.agreement.messages import Meeting
from asyncdist.messaging.services import Services
from asyncdist.waits import WaitId, WaitKind

#: Maximum number of seconds between the times at which two ranks notice the same loss. On torch, the probes of the
#: connections to a lost host fail after 25 to 35 s.
_NOTICED_WITHIN_S: Final = 15.0
#: Seconds between a failed attempt and the next one, unless this rank notices a loss meanwhile.
_RETRY_S: Final = 1.0


async def start_without_lost(
    services: Services, ranks: Sequence[int], start: Callable[[tuple[int, ...]], Awaitable[None]], timeout_s: float
) -> None:
    """Start a policy without lost ranks. Retry the start without a rank that is lost meanwhile.

    Members notice a loss at different times. Until all of them have noticed it, their attempts include different ranks
    and fail. Restarted ranks are not included.

    Args:
        services: Services of this rank, which is not a restarted rank.
        start: Function that starts the policy with the given ranks; called on all of these ranks.
        timeout_s: Seconds after the first attempt during which the start is retried.

    Raises:
        AsyncdistError: ``start`` has failed, and no further loss explains the failure.
    """
    give_up_at = until = services.time() + timeout_s
    failed_with: frozenset[int] | None = None  # ranks that were lost in the last failed attempt
    while True:
        lost = _lost(services)
        try:
            await start(tuple(ranks) if not lost else tuple(rank for rank in ranks if rank not in lost))
            return
        except (RankLostError, ClosedError, DisagreementError) as error:
            has_other_reason = isinstance(error, DisagreementError) and error.facts.get("difference") != "ranks"
            now = services.time()
            if lost != failed_with:
                failed_with, until = lost, min(give_up_at, now + _NOTICED_WITHIN_S)
            if has_other_reason or services.engine.failure is not None or now >= until:
                raise
            has_changed = functools.partial(_has_changed, services, lost)
            retry_at = min(until, now + _RETRY_S)
            is_noticed = await services.engine.until(has_changed, WaitId(WaitKind.LOSSES), deadline=retry_at)
            # Another rank may have noticed a loss that this rank has not noticed yet, or the reverse. If no rank is
            # lost, a disagreement about the ranks is an error of the script.
            is_due_to_loss = isinstance(error, RankLostError) or (isinstance(error, DisagreementError) and lost)
            if not is_noticed and not is_due_to_loss:
                raise


def lost_members(world: World, ranks: Sequence[int], meeting: Meeting) -> tuple[int, ...]:
    """Return the members of a policy that do not take part in its start, because they were lost or restarted."""
    replaced = world.agreements.absences.replaced(meeting.key)
    if meeting.ranks == ranks:
        return tuple(replaced)
    met = frozenset(meeting.ranks)
    return (*replaced, *(rank for rank in ranks if rank not in met))


def _has_changed(services: Services, lost: frozenset[int]) -> bool:
    return _lost(services) != lost


def _lost(services: Services) -> frozenset[int]:
    return frozenset(services.gone - services.left).union(services.restarted)
