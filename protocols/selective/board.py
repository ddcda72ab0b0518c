"""Carries the messages about a policy's coordinator, its newcomers and its emigrants.

One channel carries these messages for all policies of a rank. A rank may be nominated, or notified of a new
coordinator, after it has left the policy. It then answers that it has left, for which it keeps the number of each such
policy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from asyncdist import BusyError, Envelope, RankLostError, tags
from asyncdist.messaging import wire
from asyncdist.messaging.channels import Channel
from asyncdist.messaging.services import Services
from asyncdist.protocols.selective.islands.messages import Emigrant, Invitation
from asyncdist.protocols.selective.joining.newcomers import Ambiguous, Application, Over, Refusal, Request, Welcome

logger = logging.getLogger("protocols.selective.board")


@dataclass(frozen=True, slots=True)
class Nomination:
    """Nominates a rank to coordinate: the coordinator of epoch ``epoch``, the newest that the sender knows, is gone."""

    policy: int
    epoch: int


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Notifies a member of an epoch's coordinator, with the number of restarts of the coordinator's rank."""

    policy: int
    epoch: int
    coordinator: int
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class Declined:
    """Answers that this rank has left the policy."""

    policy: int


SuccessionMessage: TypeAlias = Nomination | TakeOver | Declined
IslandMessage: TypeAlias = Emigrant | Invitation | Declined
BoardMessage: TypeAlias = SuccessionMessage | IslandMessage | Request | Welcome | Refusal | Over | Ambiguous

#: Number of policies that a rank remembers to have left; older ones no longer have members.
LEFT_COUNT_MAX: Final = 1024


class Board:
    """Passes messages to the policies of one rank, and answers for the policies that it has left. Each rank has one."""

    def __init__(self, services: Services) -> None:
        self._policies: dict[int, Callable[[Any, int], None]] = {}
        self._left: dict[int, int | None] = {}  # oldest first, with the key of requests
        self._askable: dict[int, tuple[int, Callable[[Request, int], bool]]] = {}  # by policy, with the key of requests
        self._serving: set[int] = set()  # policies that this rank has left and may coordinate
        self._applications: dict[int, Application] = {}  # by the key of requests
        self._loop = services.engine.loop
        self._channel: Channel[BoardMessage] = services.open_channel(
            BoardMessage,
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
        """Call ``handler(message, source)`` for the messages about a policy, or between its islands.

        Args:
            policy: Number of the policy.
            handler: Handles the messages.
            key: Key of requests for admission to the policy; None if it takes no requests.
            on_request: Handles a request, and returns whether it may be granted, now or later.
        """
        self._policies[policy] = handler
        if key is not None:
            self._askable[policy] = key, on_request

    def close(self, policy: int) -> None:
        """From now on, answer that this rank has left the policy."""
        del self._policies[policy]
        self._left[policy] = self._askable.pop(policy, (None,))[0]
        self._serving.discard(policy)
        if len(self._left) > LEFT_COUNT_MAX:
            del self._left[next(iter(self._left))]

    def newest_left(self, key: int) -> int:
        """Return the newest policy with this key of requests that this rank has left; 0 if there is none."""
        return next((policy for policy in reversed(self._left) if self._left[policy] == key), 0)

    def leave(self, policy: int) -> None:
        """Note that this rank has left a policy; it may still coordinate it until :meth:`close`."""
        self._serving.add(policy)

    def apply(self, application: Application) -> None:
        """Pass the answers to this rank's requests to ``application``."""
        self._applications[application.key] = application

    def end_application(self, application: Application) -> None:
        """Drop later answers to this application."""
        self._applications.pop(application.key, None)

    def send(self, message: BoardMessage, dest: int) -> None:
        """Send a message, unless ``dest`` cannot be reached; senders repeat messages that are lost."""
        try:
            self._channel.send_nowait(message, dest)
        except (RankLostError, BusyError) as error:
            logger.debug("%s to rank %d: %s", type(message).__name__, dest, error)

    def _on_message(self, envelope: Envelope[Any]) -> None:
        """Handle a message in the loop's next turn, since a policy may be carrying out instructions during a pass."""
        self._loop.call_soon(self._handle, envelope.message, envelope.source)

    def _handle(self, message: BoardMessage, source: int) -> None:
        match message:
            case Request():
                self._ask(message, source)
            case Welcome() | Refusal() | Over() | Ambiguous():
                if message.key in self._applications:
                    self._applications[message.key].on_message(message, source)
            case _:
                self._tell(message, source)

    def _ask(self, request: Request, source: int) -> None:
        same = [policy for policy, (key, _) in self._askable.items() if key == request.key]
        asked = [policy for policy in same if policy != request.left]
        count = sum(policy not in self._serving for policy in asked)
        if count > 1:
            self.send(Ambiguous(request.key, count), source)
            return
        hopes = [self._askable[policy][1](request, source) for policy in asked]
        waits = request.key in self._applications
        if not any(hopes) and (waits or same or request.key in self._left.values()):
            self.send(Over(request.key, has_ended=not waits), source)

    def _tell(self, message: SuccessionMessage | IslandMessage, source: int) -> None:
        handler = self._policies.get(message.policy)
        if handler is not None:
            handler(message, source)
        elif message.policy in self._left and not isinstance(message, Declined):
            self.send(Declined(message.policy), source)
