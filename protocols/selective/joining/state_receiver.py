"""Receives a member's whole state on a restarted rank, with retries until the coordinator has admitted the rank."""

from __future__ import annotations

from asyncdist import AsyncdistError
from asyncdist.protocols.joining.dispatcher import Application
from asyncdist.protocols.joining.state_transfer import (
    StateSizeError,
    StateTransfer,
    WholeState,
    state_nbytes_max,
    unpacked,
)
from asyncdist.protocols.journal import Journal
from asyncdist.protocols.selective.leadership import Leadership
from asyncdist.protocols.selective.member import RoundMember, State
from asyncdist.protocols.selective.roles.member_roles import MemberRoles


class StateReceiver:
    """Makes a restarted rank a member after the coordinator has answered its admission request."""

    def __init__(
        self,
        member: RoundMember,
        roles: MemberRoles,
        states: StateTransfer,
        whole: WholeState,
        journal: Journal,
        *,
        model_nbytes: int,
    ) -> None:
        self._member = member
        self._roles = roles
        self._states = states
        self._whole = whole
        self._journal = journal
        self._nbytes_max = state_nbytes_max(model_nbytes)

    async def complete(self, application: Application, leadership: Leadership) -> None:
        """Repeat the admission request and receive members' states until this rank is admitted."""
        while self._member.is_joining:
            await application.until(self._has_news)
            welcome = application.take_welcome()
            if welcome is not None:
                leadership.note_welcome(*welcome)
            if self._member.state is State.COMPLETE:
                await self._take_state()
                application.note_round()

    def _has_news(self) -> bool:
        return not self._member.is_joining or self._member.state is State.COMPLETE

    async def _take_state(self) -> None:
        exchange, number = self._roles.replacer.exchange, self._member.round
        assert exchange is not None, f"round {number} is complete without an exchange"
        try:
            state = await self._states.take(
                exchange.donor, number, nbytes_max=self._nbytes_max, deadline=lambda: exchange.deadline
            )
            parts = unpacked(state)
        except StateSizeError:
            raise
        except (AsyncdistError, TimeoutError) as error:
            self._roles.abandon(number, f"the state of a member did not arrive: {error}")
            return
        if self._roles.replacer.exchange is not exchange or exchange.average is None:
            return  # the round has ended, so its weights are no longer available
        iteration = self._whole.restore_whole_state(parts)
        self._roles.take_whole_state(exchange, iteration)
        self._journal.note_joined(number, iteration, exchange.donor)
