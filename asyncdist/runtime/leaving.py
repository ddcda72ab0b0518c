"""Ends a rank cleanly. Notifies the other ranks that ``main`` has returned, and waits until all ranks have ended.

Background services, such as a coordinator, run until all ranks have ended, because other ranks may still need them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

from asyncdist.errors import LocalProtocolError
from asyncdist.runtime.departing.departures import Stage
from asyncdist.runtime.failing.failure import all_others_in
from asyncdist.runtime.world import World
from asyncdist.transports.base import Transport
from asyncdist.waits import WaitId, WaitKind

logger = logging.getLogger("asyncdist.runtime.leaving")

#: Maximum seconds to wait for this rank's outstanding requests.
_FLUSH_S: Final = 5.0
#: Seconds to wait for the other ranks' last messages after ``main`` has returned on all of them.
_FINALIZE_S: Final = 60.0


async def leave(world: World, transport: Transport) -> list[str]:
    """End this rank together with the others. Return descriptions of unread messages, unfinished tasks and the like."""
    services, engine = world.services, world.services.engine
    world.peers.leave()
    world.refuse_streams()
    given_up = world.give_up_requests()
    await engine.until(lambda: services.task_count == 0, WaitId(WaitKind.OWN_SERVICES))
    # Wait until the user's messages have left. A receiver whose ``main`` has returned receives and drops them.
    is_nobody_in_main = _have_all_left(world, transport)
    await engine.until(lambda: not services.is_sending or is_nobody_in_main(), WaitId(WaitKind.OWN_MESSAGES))
    await _flush(world)
    await _last_barrier(world, transport)
    await _flush(world)
    leftovers = given_up + services.leftovers(world.peers.attendance.spoiled_tags)
    world.close()
    await _flush(world)
    return leftovers


async def _last_barrier(world: World, transport: Transport) -> None:
    engine, own_group, announcements = world.services.engine, transport.end_group, world.peers.announcements
    if own_group is not None:
        if announcements is not None:  # Wait until no rank sends along the tree.
            await engine.until(_have_all_left(world, transport), WaitId(WaitKind.OTHERS_LEFT))
            await _flush(world)
        await engine.wait(own_group.barrier(), WaitId(WaitKind.OTHERS_ENDED))
        return
    world.peers.finalize()
    if announcements is not None:
        await engine.until(lambda: announcements.departures.stage >= Stage.ENDED, WaitId(WaitKind.OTHERS_ENDED))
        end_at = engine.loop.time() + _FLUSH_S
        await engine.until(lambda: announcements.departures.is_over, WaitId(WaitKind.END_KNOWN), deadline=end_at)
        return
    answered, left = world.peers.answered, world.services.left
    await engine.until(all_others_in(world, transport, answered, left), WaitId(WaitKind.OTHERS_ENDED))
    # The other ranks are about to end. The wait is bounded, because a corrupted Finalize message may have been dropped.
    have_answered, end_at = all_others_in(world, transport, answered), engine.loop.time() + _FINALIZE_S
    await engine.until(have_answered, WaitId(WaitKind.FINALIZE_MESSAGES), deadline=end_at)


def _have_all_left(world: World, transport: Transport) -> Callable[[], bool]:
    announcements = world.peers.announcements
    if announcements is not None:
        return lambda: announcements.departures.stage >= Stage.LEFT
    return all_others_in(world, transport, world.services.left, world.peers.answered)


async def _flush(world: World) -> None:
    """Wait, for a limited time, until this rank has no outstanding request and no running background service."""
    services, deadline = world.services, world.time() + _FLUSH_S
    engine, what = services.engine, WaitId(WaitKind.OWN_REQUESTS)
    await engine.until(lambda: engine.is_idle and services.task_count == 0, what, deadline=deadline)


def report_leftovers(world: World, leftovers: Sequence[str], *, strict: bool) -> None:
    """Log the descriptions that :func:`leave` has returned.

    If ``strict``, raise LocalProtocolError with them instead.
    """
    if leftovers:
        text = f"rank {world.rank} ended with {'; '.join(leftovers)}"
        if strict:
            raise LocalProtocolError(text)
        logger.warning("%s", text)
