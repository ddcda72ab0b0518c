"""Exchanges messages about coordinators, restarted ranks, and donors for other islands (groups of ranks).

All policies of a rank share one channel for these messages. The rank also answers messages about policies that it has
left.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from asyncdist import BusyError, Envelope, RankLostError, tags
from asyncdist.messaging import wire
from asyncdist.messaging.channels import Channel
from asyncdist.messaging.services import Services
from asyncdist.protocols.joining.messages import Declined, Emigrant, Invitation, Nomination, TakeOver, Waiting
from asyncdist.protocols.joining.newcomers import Ambiguous, Application, NotMember, Refusal, Request, Welcome, key_of

logger = logging.getLogger("protocols.joining.dispatcher")


SuccessionMessage: TypeAlias = Nomination | TakeOver | Declined
IslandMessage: TypeAlias = Emigrant | Invitation | Declined
NewcomerMessage: TypeAlias = Request | Waiting | Welcome | Refusal | NotMember | Ambiguous
DispatcherMessage: TypeAlias = SuccessionMessage | IslandMessage | NewcomerMessage

#: Number of policies that a rank still knows after it has left them. Older policies are assumed to have no members.
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
            on_request: Function that handles a request. Returns whether the request may still be granted.
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
        """Return the number of the newest policy with this request key that this rank has left, or 0 without one."""
        return next((policy for policy in reversed(self._left) if self._left[policy] == key), 0)

    def leave(self, policy: int) -> None:
        """Record that this rank is no longer a member of a policy. It may still coordinate it until :meth:`close`."""
        self._serving.add(policy)

    def apply(self, ranks: Sequence[int], values: Mapping[str, str], timeout_s: float, **options: Any) -> Application:
        """Return a new :class:`Application`, with these arguments, that requests this restarted rank's admission."""
        options = {"left": self.newest_left(key_of(ranks, values)), **options}
        application = Application(self._services, self, ranks, values, timeout_s, **options)
        self._applications[application.key] = application
        return application

    def end_application(self, application: Application) -> None:
        """Stop passing the answers to admission requests to ``application``."""
        self._applications.pop(application.key, None)

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
                self._pass_on(message, source)

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

    def _pass_on(self, message: SuccessionMessage | IslandMessage | Waiting, source: int) -> None:
        handler = self._policies.get(message.policy)
        if handler is not None:
            handler(message, source)
        elif message.policy in self._left and not isinstance(message, Declined):
            self.send(Declined(message.policy), source)
