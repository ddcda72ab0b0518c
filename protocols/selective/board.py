"""Carries the messages by which ranks say who coordinates a policy, who asks to be admitted, and who emigrates.

Those of all policies of a rank travel on one channel. A rank may be nominated, or told of a new coordinator, after it
has left the policy: it answers that it has, for which it keeps a number for each policy that it has left.
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
    """Tells a rank that the coordinator of a policy is gone, and that it is the next; ``epoch`` is the last known."""

    policy: int
    epoch: int


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Tells a member which rank coordinates in an epoch, and how often that one has been started again."""

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

#: Policies that a rank remembers to have left: those of long ago have no members any more.
LEFT_COUNT_MAX: Final = 1024


class Board:
    """Hands the messages about coordinators to the policies of one rank, and answers for those that it has left.

    There is one for each rank.
    """

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
            policy: its number.
            handler: takes them.
            key: of requests to be admitted to it; None where nobody asks for that.
            on_request: takes these, and returns whether they may be granted, now or later.
        """
        self._policies[policy] = handler
        if key is not None:
            self._askable[policy] = key, on_request

    def close(self, policy: int) -> None:
        """Answer from now on that this rank has left the policy."""
        del self._policies[policy]
        self._left[policy] = self._askable.pop(policy, (None,))[0]
        self._serving.discard(policy)
        if len(self._left) > LEFT_COUNT_MAX:
            del self._left[next(iter(self._left))]

    def newest_left(self, key: int) -> int:
        """Return the newest policy with this key of requests that this rank has left, or 0."""
        return next((policy for policy in reversed(self._left) if self._left[policy] == key), 0)

    def leave(self, policy: int) -> None:
        """Note that this rank has left a policy; it may coordinate it for the others until :meth:`close`."""
        self._serving.add(policy)

    def apply(self, application: Application) -> None:
        """Hand the answers to a request of this rank to ``application``."""
        self._applications[application.key] = application

    def end_application(self, application: Application) -> None:
        """Drop further answers."""
        self._applications.pop(application.key, None)

    def send(self, message: BoardMessage, dest: int) -> None:
        """Send, unless ``dest`` cannot be reached; what is not heard is asked for again."""
        try:
            self._channel.send_nowait(message, dest)
        except (RankLostError, BusyError) as error:
            logger.debug("%s to rank %d: %s", type(message).__name__, dest, error)

    def _on_message(self, envelope: Envelope[Any]) -> None:
        """Take a message in the loop's next turn: a pass may run while a policy carries out what it was told."""
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
