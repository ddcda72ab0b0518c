"""Takes a member's whole state at a newcomer, until the coordinator says that it is admitted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from asyncdist import AsyncdistError
from asyncdist.messaging.services import Services
from asyncdist.protocols.selective.joining.newcomers import Application, Welcome
from asyncdist.protocols.selective.joining.state_transfer import StateTransfer, unpacked
from asyncdist.protocols.selective.member import Instructions, RoundMember, State
from asyncdist.protocols.selective.roles.replacer import Replacer

#: A newcomer takes a state of so many bytes, and so many times its model's.
_STATE_NBYTES_MAX: Final = 64 << 20
_STATE_MODEL_COUNT_MAX: Final = 16


class Arrival:
    """Makes one newcomer, which has been welcomed, a member.

    Args:
        services: of this rank.
        member: decides.
        carry_out: does what ``member`` answers.
        replacer: takes the weights.
        states: takes the rest.
        model_nbytes: bounds what a donor may give.
        restore: puts the rest in place, and returns the iteration from which this rank goes on.
        note_joined: called with the round, this iteration and the member whose state it is.
    """

    def __init__(
        self,
        services: Services,
        member: RoundMember,
        carry_out: Callable[[Instructions], None],
        *,
        replacer: Replacer,
        states: StateTransfer,
        model_nbytes: int,
        restore: Callable[[Mapping[str, Any]], int],
        note_joined: Callable[[int, int, int], None],
    ) -> None:
        self._services = services
        self._member = member
        self._carry_out = carry_out
        self._replacer = replacer
        self._states = states
        self._nbytes_max = _STATE_NBYTES_MAX + _STATE_MODEL_COUNT_MAX * model_nbytes
        self._restore = restore
        self._note_joined = note_joined

    async def complete(
        self,
        application: Application,
        note_welcome: Callable[[Welcome, int], None],
        is_admitted: Callable[[], bool],
    ) -> None:
        """Ask, and take the state whenever a round gives one, until this rank is admitted.

        Args:
            application: asks, again and again.
            note_welcome: called with each further welcome, and who sent it: another rank may coordinate meanwhile.
            is_admitted: whether the coordinator has said that this rank counts.

        Raises:
            AsyncdistError: as :meth:`Application.until`.
        """
        while not is_admitted():
            await application.until(lambda: is_admitted() or self._member.state is State.COMPLETE)
            welcome = application.take_welcome()
            if welcome is not None:
                note_welcome(*welcome)
            if self._member.state is State.COMPLETE:
                await self._take_state()
                application.note_round()

    async def _take_state(self) -> None:
        """Take the rest of the state whose weights have come, and put all of it in place."""
        exchange, number = self._replacer.exchange, self._member.round
        assert exchange is not None, f"round {number} is complete without an exchange"
        try:
            state = await self._states.take(
                exchange.donor, number, nbytes_max=self._nbytes_max, deadline=exchange.deadline
            )
            parts = unpacked(state)
        except (AsyncdistError, TimeoutError) as error:
            self._carry_out(self._member.on_refused(number, f"the state of a member did not come: {error}"))
            return
        if self._replacer.exchange is not exchange or exchange.average is None:
            return  # the round has ended meanwhile
        self._member.on_step()
        iteration = self._restore(parts)
        self._replacer.load(exchange)
        self._note_joined(number, iteration, exchange.donor)
        self._carry_out(self._member.on_applied(iteration))
