"""Exchanges messages about coordinators, restarted ranks, and donors for other islands (groups of ranks).

All policies of a rank share one channel for these messages. The rank also answers messages about policies that it has
left. A restarted rank (a *newcomer*) sends its request for admission to all live ranks until it is admitted, since the
coordinator may change. The coordinator compares the newcomer's policy (class, name, model and options) with its own. It
answers with the scopes (channel numbers) for messages between the newcomer and the members.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from asyncdist import (
    AsyncdistError,
    BusyError,
    ClosedError,
    DisagreementError,
    Envelope,
    LateError,
    RankLostError,
    StartTimeoutError,
    tags,
)
from asyncdist.messaging import wire
from asyncdist.messaging.channels import Channel
from asyncdist.messaging.services import Services
from asyncdist.protocols.joining.messages import Declined, Emigrant, Invitation, Nomination, TakeOver, Waiting
from asyncdist.waits import WaitId, WaitKind

logger = logging.getLogger("protocols.joining.dispatcher")

#: Minimum number of seconds between two requests of a newcomer. Slow answers lengthen this interval.
ASK_AGAIN_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Request:
    """Restarted rank to all ranks: requests admission to a running policy.

    The message is short, since every restarted rank sends it to every rank.

    Attributes:
        key: Number that identifies all policies of this class and name on these ranks.
        digest: Digest of the policy's class, name, model and options on the sender.
        left: Number of the policy that the sender's process has left and must not rejoin, or 0 if there is none.
        attempt: Number of the sender's attempt to join. If the leader is lost before admission, a new attempt begins.
    """

    key: int
    incarnation: int
    digest: str
    left: int = 0
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Welcome:
    """Coordinator to restarted rank: the receiver will be admitted between two rounds, and must use these channels.

    Attributes:
        members: Ranks and incarnations of the present members. Only these members may become the coordinator.
        between: Number that the policies of all islands share.
    """

    key: int
    policy: int
    to_members: int
    to_coordinator: int
    epoch: int
    members: tuple[tuple[int, int], ...]
    between: int = 0


@dataclass(frozen=True, slots=True)
class Refusal:
    """Coordinator to restarted rank: the running policy has a different model or options, listed in ``values``."""

    key: int
    values: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class NotMember:
    """Answer to an admission request: the sender also awaits admission or, if ``has_ended``, has left the policy."""

    key: int
    has_ended: bool


@dataclass(frozen=True, slots=True)
class Ambiguous:
    """Answer to an admission request: the sender is in ``count`` policies with the same class, name and ranks."""

    key: int
    count: int


Answer: TypeAlias = Welcome | Refusal | NotMember | Ambiguous


def key_of(ranks: Sequence[int], values: Mapping[str, str]) -> int:
    """Return the key of admission requests, equal for all policies with this class and name on these ranks."""
    return wire.scope_of(ranks, f"{values.get('class')} {values.get('name')}", 0)


def digest_of(ranks: Sequence[int], values: Mapping[str, str]) -> str:
    """Return a digest of a policy's ranks, class, name, model and options."""
    return hashlib.sha256(repr((tuple(ranks), sorted(values.items()))).encode()).hexdigest()[:16]


class Application:
    """Sends a restarted rank's admission requests, and evaluates the answers.

    Args:
        timeout_s: Seconds to wait for each answer of the coordinator.
        left: Number of the policy with this class and name that this process has left, or 0 if there is none.
        replica_ranks: Ranks of this rank's replica. They were restarted as well, so they are not asked.
    """

    def __init__(
        self,
        services: Services,
        dispatcher: PolicyDispatcher,
        ranks: Sequence[int],
        values: Mapping[str, str],
        timeout_s: float,
        *,
        left: int = 0,
        attempt: int = 0,
        replica_ranks: Sequence[int] = (),
    ) -> None:
        self.key = key_of(ranks, values)
        self._request = Request(self.key, services.incarnation, digest_of(ranks, values), left, attempt)
        self._values = values
        self._ranks = [rank for rank in ranks if rank != services.rank and rank not in replica_ranks]
        self._services = services
        self._dispatcher = dispatcher
        self._timeout_s = timeout_s
        self._deadline = services.time() + timeout_s
        # By rank whose answer to the newest request was NotMember: whether it has left the policy.
        self._not_members: dict[int, bool] = {}
        self._not_members_before: dict[int, bool] = {}  # the same for the request before the newest
        self._asked: set[int] = set()
        self._seen: set[int] = set()
        self._began_at = self._ask_again_at = services.time()
        self._answer_s: float | None = None  # seconds from the first request to the first answer
        self._welcome: tuple[Welcome, int] | None = None
        self._policy: int | None = None  # number of the policy whose coordinator has answered
        self._error: AsyncdistError | None = None

    def _others(self) -> list[int]:
        return [rank for rank in self._ranks if rank not in self._services.gone]

    def on_message(self, message: Answer, source: int) -> None:
        """Handle an answer to this rank's admission request."""
        if self._answer_s is None:
            self._answer_s = self._services.time() - self._began_at
        match message:
            case Welcome() if self._policy in (None, message.policy):  # answers about a later policy are ignored
                self._welcome = message, source
                self._deadline = self._services.time() + self._timeout_s
            case NotMember(_, has_ended):
                self._not_members[source] = has_ended or self._not_members.get(source, False)
            case Ambiguous(_, count):
                text = (
                    f"rank {source} is in {count} policies of this class and name, so it is unknown which of them this "
                    "rank rejoins; give each policy a different name="
                )
                self._error = DisagreementError(text, difference="name")
            case Refusal(_, values):
                name, there = next(
                    (item for item in values if self._values.get(item[0]) != item[1]), ("group", "other")
                )
                mine = self._values.get(name)
                text = (
                    f"{name} must be equal on all members: it is {mine} on this rank and {there} in the running policy "
                    f"(reported by rank {source})"
                )
                self._error = DisagreementError(text, difference=name)
        self._services.engine.recheck()

    def note_round(self) -> None:
        """Restart the timeout, because this rank has completed an attempt to receive a member's state."""
        self._deadline = self._services.time() + self._timeout_s

    async def welcomed(self) -> tuple[Welcome, int]:
        """Send requests until a coordinator has answered. Return the answer and the coordinator's rank."""
        await self.until(lambda: False)
        welcome = self.take_welcome()
        assert welcome is not None, "there is no answer"
        return welcome

    def take_welcome(self) -> tuple[Welcome, int] | None:
        """Remove the newest answer and return it with the coordinator's rank, or None if there is no answer."""
        welcome, self._welcome = self._welcome, None
        if welcome is not None:
            self._policy = welcome[0].policy
        return welcome

    def _ask(self) -> None:
        now, others = self._services.time(), self._others()
        if now >= self._ask_again_at:
            waited_s = now - self._began_at if self._answer_s is None else 2 * self._answer_s
            self._ask_again_at = now + max(ASK_AGAIN_S, min(waited_s, self._timeout_s / 2))
            self._asked.clear()
            self._not_members_before, self._not_members = self._not_members, {}
        self._asked.intersection_update(others)
        self._not_members = {rank: self._not_members[rank] for rank in others if rank in self._not_members}
        for rank in others:
            if rank not in self._asked:
                self._asked.add(rank)
                self._dispatcher.send(self._request, rank)

    async def until(self, is_over: Callable[[], bool]) -> None:
        """Send requests until ``is_over`` returns True or a coordinator has answered.

        Raises:
            DisagreementError: The class, name, model or an option differs, or several policies have this class and
                name.
            LateError: All other ranks have left the world, or have left the policy and started no new policy before
                the timeout.
            ClosedError: All other ranks were restarted as well.
            StartTimeoutError: No coordinator has answered before the timeout.
            RankLostError: No other rank is left.
        """
        services = self._services
        while not is_over() and self._welcome is None:
            self._ask()

            def has_news() -> bool:
                is_answered = self._welcome is not None or self._error is not None
                return is_answered or is_over() or not self._asked.issuperset(self._others())

            until = min(self._ask_again_at, self._deadline)
            await services.engine.until(has_news, WaitId(WaitKind.POLICY_ADMISSION), deadline=until)
            if self._error is not None:
                raise self._error
            if is_over() or self._welcome is not None:
                return
            self._seen |= {rank for rank in self._ranks if not services.is_unmet(rank)} | services.left_world()
            is_time_up = services.time() >= self._deadline
            # The policy may run on ranks that have connected since the last request, or that have not connected yet.
            others = self._others()
            are_not_members = self._not_members.keys() >= set(others)
            is_running_nowhere = are_not_members and self._seen.issuperset(self._ranks)
            have_left = any(self._not_members.values())
            if self._policy is None and any(self._not_members.get(rank) for rank in others):
                is_running_nowhere = False  # ranks that have left this policy may still start the next policy
            if not (is_running_nowhere or is_time_up):
                continue
            if is_time_up:  # the newest request may have been sent too recently for an answer
                are_not_members = (self._not_members | self._not_members_before).keys() >= set(others)
                have_left = have_left or any(self._not_members_before.values())
            if are_not_members and (have_left or services.left_world().intersection(self._ranks)):
                raise LateError("this rank comes too late: no other rank is still in this policy")
            if is_running_nowhere or (are_not_members and others):
                raise ClosedError(
                    "no other rank is still in this policy: all are lost or restarted; start all ranks again"
                )
            if not others:
                raise RankLostError(
                    "all other ranks of this policy are lost; start all ranks again", rank=self._ranks[0]
                )
            raise StartTimeoutError(
                f"this rank was not admitted: no coordinator of its policy answered within {self._timeout_s:g} s; "
                "check that the other ranks are in this policy, and pass a start_timeout_s above their longest step",
                missing=(),
            )


SuccessionMessage: TypeAlias = Nomination | TakeOver | Declined
IslandMessage: TypeAlias = Emigrant | Invitation | Declined
DispatcherMessage: TypeAlias = SuccessionMessage | IslandMessage | Request | Waiting | Answer

#: Number of policies that a rank remembers after it has left them. Older policies are assumed to have no members.
LEFT_COUNT_MAX: Final = 1024


class PolicyDispatcher:
    """Passes messages about coordinators to this rank's policies, and answers messages about policies it has left.

    Each rank has one dispatcher.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._policies: dict[int, Callable[[Any, int], None]] = {}
        self._left: dict[int, int | None] = {}  # request keys of the policies this rank has left, oldest first
        self._askable: dict[int, tuple[int, Callable[[Request, int], bool]]] = {}  # by policy: request key and handler
        self._serving: set[int] = set()  # policies that this rank has left but may still coordinate
        self._applications: dict[int, Application] = {}  # by request key: this rank's applications for admission
        self._loop = services.engine.loop
        self._channel: Channel[DispatcherMessage] = services.open_channel(
            DispatcherMessage,
            tag=tags.CONTROL,
            scope=wire.scope_of((), "coordinators of policies", 0),
            name="succession",
            handler=self._on_message,
        )

    def open(
        self,
        policy: int,
        handler: Callable[[Any, int], None],
        key: int | None = None,
        on_request: Callable[[Request, int], bool] = lambda *_: False,
    ) -> None:
        """Call ``handler(message, source)`` for each later message about a policy.

        Args:
            policy: Number of the policy, or the number that the policies of all islands share.
            key: Key of admission requests to the policy, or None if the policy accepts no requests.
            on_request: Function that handles a request, and returns whether the request may still be granted.
        """
        self._policies[policy] = handler
        if key is not None:
            self._askable[policy] = key, on_request

    def close(self, policy: int) -> None:
        """Answer messages about a policy with ``Declined`` from now on, instead of passing them on."""
        del self._policies[policy]
        self._left[policy] = self._askable.pop(policy, (None,))[0]
        self._serving.discard(policy)
        if len(self._left) > LEFT_COUNT_MAX:
            del self._left[next(iter(self._left))]

    def newest_left(self, key: int) -> int:
        """Return the number of the newest policy with this request key that this rank has left, or 0."""
        return next((policy for policy in reversed(self._left) if self._left[policy] == key), 0)

    def leave(self, policy: int) -> None:
        """Record that this rank is no longer a member of a policy. It may still coordinate until :meth:`close`."""
        self._serving.add(policy)

    @contextlib.contextmanager
    def applying(
        self,
        ranks: Sequence[int],
        values: Mapping[str, str],
        timeout_s: float,
        *,
        left: int | None = None,
        attempt: int = 0,
        replica_ranks: Sequence[int] = (),
    ) -> Iterator[Application]:
        """In the body, pass answers to a new :class:`Application`, which requests this restarted rank's admission.

        Args:
            left: See :class:`Application`; None for the policy that was left last.
        """
        key = key_of(ranks, values)
        left = self.newest_left(key) if left is None else left
        facts = self._services, self, ranks, values, timeout_s
        application = Application(*facts, left=left, attempt=attempt, replica_ranks=replica_ranks)
        self._applications[key] = application
        try:
            yield application
        finally:
            self._applications.pop(key, None)

    def send(self, message: DispatcherMessage, dest: int) -> None:
        """Send a message, or drop it if ``dest`` cannot be reached. Callers repeat lost messages."""
        try:
            self._channel.send_nowait(message, dest)
        except (RankLostError, BusyError) as error:
            logger.debug("%s to rank %d: %s", type(message).__name__, dest, error)

    def _on_message(self, envelope: Envelope[Any]) -> None:
        """Schedule the handling of a message for the next iteration of the event loop.

        A policy may be executing its coordinator's instructions at this moment.
        """
        self._loop.call_soon(self._handle, envelope.message, envelope.source)

    def _handle(self, message: DispatcherMessage, source: int) -> None:
        match message:
            case Request():
                self._handle_request(message, source)
            case Welcome() | Refusal() | NotMember() | Ambiguous():
                if message.key in self._applications:
                    self._applications[message.key].on_message(message, source)
            case _:
                handler = self._policies.get(message.policy)
                if handler is not None:
                    handler(message, source)
                elif message.policy in self._left and not isinstance(message, Declined):
                    self.send(Declined(message.policy), source)

    def _handle_request(self, request: Request, source: int) -> None:
        same = [policy for policy, (key, _) in self._askable.items() if key == request.key]
        asked = [policy for policy in same if policy != request.left]
        count = sum(policy not in self._serving for policy in asked)
        if count > 1:
            self.send(Ambiguous(request.key, count), source)
            return
        may_be_granted = [self._askable[policy][1](request, source) for policy in asked]
        waits = request.key in self._applications
        if not any(may_be_granted) and (waits or same or request.key in self._left.values()):
            self.send(NotMember(request.key, has_ended=not waits), source)
