"""Makes the starts of one rank take turns that take a number, or enter a call that blocks until all members enter it.

A rank that is in two such starts at once could block in one of them while another rank blocks in the other one, in
MPI_Win_allocate and MPI_Comm_create_group for example, and each would wait for the other for ever. So a rank agrees to
one of them at a time, and carries it out before it agrees to the next one.

Tasks may ask for starts in another order on each rank, for example when each of them begins to train a model of its own
in a group of its own. Two ranks then wait for each other, each in the start that is behind on the other one. The starts
have an order that is the same on all ranks (:mod:`asyncdist.collectives.agreement_alone`): a rank that is in the later
one is told after a second, postpones it, and makes the earlier one first. A start that waits for a rank which is late
does not hold up the others for long: after some seconds it is postponed, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from asyncdist.collectives.agreed_start import Start
from asyncdist.collectives.agreement_alone import Postponed
from asyncdist.collectives.agreement_messages import Agreed, AgreementKey, Runs
from asyncdist.errors import StartTimeoutError
from asyncdist.messaging.services import Services


class Turns:
    """Gives the starts of one rank their turns.

    Args:
        services: of this rank.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._starts: list[Start[Any]] = []  # the first one has its turn

    @contextlib.asynccontextmanager
    async def turn(
        self, start: Start[Any], timeout_s: float, taken: Callable[[], Runs] = tuple
    ) -> AsyncIterator[Agreed]:
        """Agree with the other members when it is this start's turn, and keep it in the body.

        Args:
            start: of this rank.
            timeout_s: how long to wait for the turn and for the last member, since the start was asked for.
            taken: returns the numbers that are in use on this rank; see :meth:`Agreements.agree`.

        Raises:
            StartTimeoutError: another start of this rank has not ended in time, or some members did not come.
            AsyncdistError: as :meth:`Agreements.agree`.
        """
        self._starts.append(start)
        try:
            yield await self._agree(start, timeout_s, taken)
        finally:
            self._starts.remove(start)
            self._services.engine.recheck()

    async def _agree(self, start: Start[Any], timeout_s: float, taken: Callable[[], Runs]) -> Agreed:
        while True:
            await self._until_first(start, timeout_s)
            try:
                return await start.agree({}, timeout_s=timeout_s, taken=taken(), alone=True)
            except Postponed as postponed:
                start.check_wanted()
                self._bring_forward(postponed.behind)

    async def _until_first(self, start: Start[Any], timeout_s: float) -> None:
        starts, engine = self._starts, self._services.engine
        what = f"the turn of {start.meeting}, behind {starts[0].meeting}"
        deadline = start.meeting.began_at + timeout_s
        if not await engine.until(lambda: starts[0] is start, what, deadline=deadline):
            raise StartTimeoutError(
                f"{start.meeting}: rank {self._services.rank} waited for {timeout_s:g} s to finish "
                f"{starts[0].meeting} first",
                missing=(),
            )

    def _bring_forward(self, key: AgreementKey) -> None:
        """Give the turn to the first start with this key for all occurrences, unless it was given up meanwhile."""
        for index, start in enumerate(self._starts):
            if start.meeting.key.of_all_occurrences == key:
                self._starts.insert(0, self._starts.pop(index))
                self._services.engine.recheck()
                return
