"""Admits restarted ranks (*newcomers*) to a running policy, with the whole state of the policy's leader.

A newcomer finds the policy through the dispatcher that all policies of a rank share
(:mod:`protocols.joining.dispatcher`). The leader copies its state inside its next ``step``, and admits the newcomer at
the same moment. The newcomer's first round is therefore the round after this state. Newcomers are admitted one at a
time.

If replicas have several ranks, a restarted replica is admitted as a whole, once all its ranks are waiting. Each of its
ranks gets the state of its counterpart in the leader's replica. The ranks of that replica copy their states at the end
of the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import starmap
from typing import Any

import torch

from asyncdist import AsyncdistError, RankLostError, StartTimeoutError
from asyncdist.messaging.services import Services
from asyncdist.messaging.streams import StreamAborted
from asyncdist.protocols.joining.dispatcher import (
    ASK_AGAIN_S,
    PolicyDispatcher,
    Refusal,
    Request,
    Welcome,
    digest_of,
    key_of,
)
from asyncdist.protocols.joining.membership import Membership
from asyncdist.protocols.joining.messages import Declined, Waiting
from asyncdist.protocols.joining.scopes import PolicyScopes
from asyncdist.protocols.joining.state_transfer import StateTransfer, copied, state_nbytes_max, unpacked
from asyncdist.waits import WaitId, WaitKind


class Admission:
    """Answers restarted ranks' requests for admission to a policy, and admits them if this rank leads the policy.

    Args:
        values: Values that must be equal on all members and on restarted ranks, by name.
    """

    def __init__(
        self,
        services: Services,
        membership: Membership,
        scopes: PolicyScopes,
        ranks: Sequence[int],
        values: Mapping[str, str],
    ) -> None:
        self._services = services
        self._membership = membership
        self._scopes = scopes
        self._ranks = tuple(ranks)
        self._values = dict(values)
        self._requests: dict[int, Request] = {}  # by rank: newest request, answered if this rank becomes the leader
        self._applicants: dict[int, tuple[int, int]] = {}  # by rank to admit: number of restarts, and attempt
        self._waiting: dict[int, tuple[int, int]] = {}  # by rank with open channels: number of restarts, and attempt
        # By waiting rank: rank and incarnation of each rank of its replica that does not become a member itself.
        self._followers: dict[int, tuple[tuple[int, int], ...]] = {}
        self._has_declined = False  # whether the leader that this restarted rank has asked has left
        membership.call_when_leading(self._answer_kept)
        self._dispatcher = services.shared(PolicyDispatcher)
        self._dispatcher.open(scopes.policy, self._on_message, key_of(ranks, values), self._on_request)
        self._states = StateTransfer(services, scopes.policy)

    @property
    def is_asked(self) -> bool:
        """True if this rank leads the policy, and can now admit a restarted rank that is waiting."""
        return bool(self._applicants) and self._membership.can_admit and bool(self._next())

    def _next(self) -> list[tuple[int, int, int]]:
        """Return the rank, incarnation and attempt of each rank of the next replica of which all ranks are waiting."""
        found, waiting = self._applicants, self._waiting
        for ranks in map(self._membership.member_ranks, sorted(found)):
            are_waiting = all(rank in found and waiting.get(rank) == found[rank] for rank in ranks)
            if are_waiting and all(starmap(self._membership.is_connected, self._followers.get(ranks[0], ()))):
                return [(rank, *found[rank]) for rank in ranks]
        return []

    def admit(self, state: Callable[[], Mapping[str, Any]]) -> int:
        """Admit the next restarted replica of which no rank is lost. Offer it this rank's present ``state()``.

        If the state cannot be copied, no rank is admitted. The restarted rank then fails at its timeout. A replica of
        several ranks has no timeout, so it is admitted, and its requests for the state are answered with an abort.

        Returns:
            The number of the admission, or 0 if no rank was admitted.
        """
        gone, restarted = self._services.gone, self._services.restarted
        while newcomers := self._next():
            for rank, *_ in newcomers:
                del self._applicants[rank]
            if all(rank not in gone and restarted.get(rank, 0) == incarnation for rank, incarnation, _ in newcomers):
                data = copied(state)
                if data is None and self._membership.replicas.size == 1:
                    continue
                for rank, *_ in newcomers:
                    self._states.admit(rank)
                followers = self._followers.get(newcomers[0][0], ())
                number = self._membership.admit(newcomers, self._states.withdraw, followers)
                if data is not None:
                    self._states.offer(number, data)
                return number
        return 0

    async def offer_state(self, number: int, state: Callable[[], Mapping[str, Any]]) -> None:
        """As a rank of the leader's replica, offer the present ``state()`` to the rank of admission ``number``."""
        if await self._membership.wait_for_admission(number):
            data = copied(state)
            if data is not None:  # otherwise the restarted rank's request is aborted
                self._states.offer(number, data)
            self._membership.confirm_admission(self._states.withdraw)

    async def take_state(self, nbytes: int, timeout_s: float, deadline: float | None) -> Any:
        """Wait until the leader has admitted this restarted rank, and return the state that a member has sent.

        Args:
            nbytes: Size of the model in bytes, which limits the size of the state.
            timeout_s: Time limit of the start in seconds. It also limits the time between two parts of the state.
            deadline: End of the time limit for the admission. None to wait without limit.

        Raises:
            StartTimeoutError: The leader did not admit this rank before the deadline, or stopped sending its state.
            RankLostError: The leader was lost or has left, or another rank of this rank's replica was lost.
        """
        membership, leader = self._membership, self._membership.leader
        services, wait = self._services, WaitId(WaitKind.POLICY_ADMISSION)

        def has_news() -> bool:
            return has_left() or (membership.admission > 0 and membership.is_reachable(membership.donor))

        def has_left() -> bool:
            is_over = self._has_declined or membership.is_broken
            return is_over or leader in services.gone or leader not in membership.members()

        while not has_news():
            if deadline is not None and services.time() >= deadline:
                raise StartTimeoutError(
                    f"rank {leader} did not admit this rank within {timeout_s:g} s; it admits ranks only inside "
                    "step(), so pass a start_timeout_s above the longest time between two of its steps",
                    missing=(),
                )
            self._dispatcher.send(
                Waiting(self._scopes.policy, *membership.identity[1:], membership.own_followers()), leader
            )
            ask_again_at = services.time() + ASK_AGAIN_S
            until = ask_again_at if deadline is None else min(deadline, ask_again_at)
            await services.engine.until(has_news, wait, deadline=until)
        if membership.is_broken:
            raise RankLostError("another rank of this rank's replica is lost", rank=services.rank)
        if has_left():
            raise RankLostError(f"rank {leader} left before it sent its state", rank=leader)

        def next_deadline() -> float:
            return services.time() + timeout_s

        donor, number, limit = membership.donor, membership.admission, state_nbytes_max(nbytes)
        try:
            data: torch.Tensor = await self._states.take(donor, number, nbytes_max=limit, deadline=next_deadline)
        except TimeoutError as error:
            raise StartTimeoutError(
                f"rank {donor} sent no part of its state for {timeout_s:g} s; check the network, or pass a larger "
                "start_timeout_s",
                missing=(),
            ) from error
        except AsyncdistError as error:
            if isinstance(error, StreamAborted):  # the leader's Left message has another tag and may arrive later
                await services.engine.until(has_left, wait, deadline=next_deadline())
            if not has_left():
                raise
            raise RankLostError(f"rank {leader} left while it admitted this rank", rank=leader) from error
        return unpacked(data)

    def close(self) -> None:
        """Stop answering requests, and reject the restarted ranks that are waiting for admission."""
        self._dispatcher.close(self._scopes.policy)
        for rank in self._applicants.keys() - self._services.gone:
            self._dispatcher.send(Declined(self._scopes.policy), rank)
        self._states.close()

    def _on_message(self, message: Any, source: int) -> None:
        match message:
            case Waiting(_, incarnation, attempt, followers):
                self._waiting[source], self._followers[source] = (incarnation, attempt), followers
            case Declined() if source == self._membership.leader:
                self._has_declined = True
                self._services.engine.recheck()

    def _on_request(self, request: Request, source: int) -> bool:
        """Answer an admission request if this rank leads. Return whether the request may still be granted."""
        if source not in self._ranks:
            return True
        if not self._membership.leads:
            self._requests[source] = request
            return self._membership.leader not in self._services.gone
        self._answer(request, source)
        return True

    def _answer_kept(self) -> None:
        """Answer the admission requests that arrived before this rank became the leader.

        Without these answers, the restarted ranks would repeat their requests only after some time.
        """
        requests, self._requests = self._requests, {}
        for rank, request in requests.items():
            if rank not in self._services.gone:
                self._answer(request, rank)

    def _answer(self, request: Request, source: int) -> None:
        membership, scopes = self._membership, self._scopes
        if request.digest != digest_of(self._ranks, self._values):
            self._dispatcher.send(Refusal(request.key, tuple(self._values.items())), source)
        elif membership.drop_earlier_process(source, request.incarnation, request.attempt):
            members = tuple((rank, self._services.restarted.get(rank, 0)) for rank in membership.members())
            facts = scopes.policy, scopes.to_members, scopes.to_coordinator, 0, members
            self._dispatcher.send(Welcome(request.key, *facts), source)
            self._applicants[source] = request.incarnation, request.attempt
