"""Ends a rank as a lost rank if it fails because another rank of its replica was lost.

The ranks of a replica (its *mates*) train one model together. A rank that has lost a mate cannot continue. It usually
fails with an error of the library inside the replica, such as gloo's error in DDP. Normally, such an error ends the
whole job. The other replicas could continue, however, so the rank kills itself by SIGKILL. All launchers and transports
report this end as a loss.
"""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Final

from asyncdist import rank_program
from asyncdist.messaging.services import Services
from asyncdist.waits import WaitId, WaitKind

#: Seconds that a failing rank waits for a notice that another rank of its replica is lost.
_HEAR_MATE_S: Final = 2.0


class ReplicaMates:
    """The other ranks that train this rank's replica of the model.

    Attributes:
        ranks: Ranks without which this rank cannot continue. Empty outside a policy of replicas.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self.ranks: frozenset[int] = frozenset()

    def lost(self) -> list[int]:
        """Return the ranks of the replica that are lost and have not left."""
        services = self._services
        return sorted(rank for rank in self.ranks if rank in services.gone and rank not in services.left)

    async def lost_soon(self) -> list[int]:
        """Return the lost ranks of the replica. First wait for a loss that may not have been reported yet.

        Return an empty list immediately if the replica has no other ranks, or if the transport does not survive losses.
        """
        services, engine = self._services, self._services.engine
        if not self.ranks or not services.survives_loss or engine.transport.capabilities.shares_process:
            return []
        wait, deadline = WaitId(WaitKind.PEER_FAILURE), engine.loop.time() + _HEAR_MATE_S
        try:
            await engine.until(lambda: bool(self.lost()) or engine.failure is not None, wait, deadline=deadline)
        except Exception:
            if engine.failure is None:
                raise
        except asyncio.CancelledError:  # A signal ends this rank.
            return []
        return [] if engine.failure is not None else self.lost()


def end_as_lost() -> None:
    """Kill this process by SIGKILL, so that launchers and transports report the rank as lost."""
    try:
        rank_program.flush_output()
    finally:  # A signal handler may raise.
        os.kill(os.getpid(), signal.SIGKILL)
