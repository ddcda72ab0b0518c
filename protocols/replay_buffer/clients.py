"""Records the clients of a replay buffer's server, and detects whether all clients are waiting for each other.

If a client opens a buffer whose server has closed, it is kept for the next server of the same name.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from asyncdist import Envelope
from asyncdist.messaging.outbound_streams import OutboundStream
from asyncdist.messaging.services import Services
from asyncdist.protocols.replay_buffer.messages import Add, Draw, Left, Open, ReplayMessage, Update, refuse_grant

#: Maximum number of clients that a warning lists.
_NAMED_COUNT_MAX: Final = 8


@dataclass(slots=True, eq=False)
class Client:
    """State of one client on the server, with its unanswered requests and its streams.

    A rank that enters the buffer again gets a new record.
    """

    rank: int
    entry: int = -1
    is_open: bool = False
    is_done: bool = False
    is_leaving: bool = False
    is_refused: bool = False
    has_declared: bool = False
    layout_sent: bool = False
    answers: list[tuple[int, float | None]] = field(default_factory=list)
    draws: deque[Draw] = field(default_factory=deque)
    large: deque[Add | Update] = field(default_factory=deque)
    is_receiving: bool = False
    outgoing: dict[int, npt.NDArray[np.uint8]] = field(default_factory=dict)
    streams: dict[int, OutboundStream] = field(default_factory=dict)
    last_message_at: float = -math.inf


class EarlyClients:
    """Stores the clients that have opened a buffer after its server on this rank had closed, for the next server."""

    def __init__(self, services: Services) -> None:
        self._services = services
        # Each client's ``Open`` message, and how often its rank had been restarted by then, by buffer name and rank.
        self._opens: dict[str, dict[int, tuple[Envelope[ReplayMessage], int]]] = {}

    def on_message(self, name: str, envelope: Envelope[ReplayMessage]) -> None:
        """Handle a message for the closed server of the buffer ``name``."""
        source = envelope.source
        if isinstance(envelope.message, Open):
            self._opens.setdefault(name, {})[source] = envelope, self._services.restarted.get(source, 0)
        elif isinstance(envelope.message, Left):
            self._opens.get(name, {}).pop(source, None)
        refuse_grant(self._services, envelope)

    def take(self, name: str) -> list[Envelope[ReplayMessage]]:
        """Remove the ``Open`` messages for the buffer ``name``, and return those whose senders are not lost."""
        gone, restarted = self._services.gone, self._services.restarted
        return [
            envelope
            for source, (envelope, count) in self._opens.pop(name, {}).items()
            if source not in gone and restarted.get(source, 0) == count
        ]


def may_add_more(clients: Collection[Client]) -> bool:
    """Return whether any client is expected to add items.

    A client that has added items is expected to add more until it leaves, because one of its tasks may add while
    another is waiting in a draw. A client that has only drawn is expected to add items only if it has no waiting draw,
    or if there are several clients and none has left.
    """
    some_have_left = len(clients) == 1 or any(client.is_done for client in clients)

    def may_begin(client: Client) -> bool:
        if client.is_done or client.is_leaving or client.is_refused:
            return False
        return client.has_declared or not client.draws or not some_have_left

    return any(client.large or client.is_receiving or may_begin(client) for client in clients)


def all_wait_to_draw(clients: Collection[Client], size: int) -> bool:
    """Return whether each remaining client is waiting to draw more than ``size`` items, the number in the buffer."""
    one_waits = False
    for client in clients:
        waits = any(draw.waits and draw.count > size for draw in client.draws)
        is_busy = client.large or client.is_receiving or client.outgoing or client.streams
        if is_busy or not (waits or client.is_leaving or client.is_done or client.is_refused):
            return False
        one_waits = one_waits or waits
    return one_waits


def describe_draws(clients: Collection[Client], size: int) -> str:
    """Return text for a warning: the clients waiting to draw more than ``size`` items, and how many each wants."""
    asked = {
        client.rank: [str(draw.count) for draw in client.draws if draw.waits and draw.count > size]
        for client in clients
    }
    waiting = [f"rank {rank} for {' and '.join(counts)}" for rank, counts in asked.items() if counts]
    more = f", and {len(waiting) - _NAMED_COUNT_MAX} more" if len(waiting) > _NAMED_COUNT_MAX else ""
    return f"{', '.join(waiting[:_NAMED_COUNT_MAX])}{more}"
