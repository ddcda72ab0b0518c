"""Channel between the members of a policy, whose messages may be larger than a frame.

Some messages contain values of each member, or of each round in progress. With hundreds of ranks, such a message can
exceed the size of a frame (:data:`asyncdist.messaging.wire.FRAME_NBYTES_MAX`). It is then sent as several
:class:`Part` messages. Messages between two ranks arrive in order, so the receiver only has to join them.
"""

from __future__ import annotations

import logging
import sys
import typing
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec

from asyncdist import Envelope, LocalProtocolError, RankLostError
from asyncdist.messaging import wire
from asyncdist.messaging.services import Services
from asyncdist.tags import CONTROL

logger = logging.getLogger("protocols.joining.policy_channel")

M = TypeVar("M")

#: Maximum number of a message's bytes in one part. The rest of the frame is for the part's other fields.
PART_NBYTES: Final = wire.PAYLOAD_NBYTES_MAX - 64
#: Maximum number of parts of a message, which limits the memory that another rank can make this rank use.
PART_COUNT_MAX: Final = 1024


@dataclass(frozen=True, slots=True)
class Part:
    """Part of a message that is larger than a frame.

    Attributes:
        kind: Index of the message's type among the channel's types.
        index: Position of the part in the message, from 0.
        count: Number of the message's parts.
        data: The part's bytes of the encoded message.
    """

    kind: int
    index: int
    count: int
    data: bytes

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count <= PART_COUNT_MAX or self.kind < 0:
            raise ValueError(
                f"kind must be >= 0, index from 0 to count - 1, and count at most {PART_COUNT_MAX}, got kind "
                f"{self.kind}, index {self.index} and count {self.count}"
            )


class MessageListener(Protocol[M]):
    """Interface of objects that handle messages from other members."""

    def on_message(self, envelope: Envelope[M], /) -> None:
        """Handle a message. Called while arrived messages are delivered."""


class PolicyChannel(Generic[M]):
    """Sends and receives the messages of a policy's members. Messages to lost members are dropped.

    Args:
        message_types: Union of frozen dataclasses.
        scope: Number that identifies the messages of these members (:mod:`protocols.joining.scopes`).
        listener: Object that handles the received messages.
    """

    def __init__(
        self, services: Services, message_types: Any, *, scope: int, name: str, listener: MessageListener[M]
    ) -> None:
        self._name = name
        self._listener = listener
        self._kinds = typing.get_args(message_types)
        self._decoders = wire.Codec(message_types).decoders
        self._last: tuple[Any, tuple[Part, ...]] = (None, ())  # a large message is often sent to many ranks in turn
        self._received: dict[int, list[Part]] = {}  # by source: parts of a message that is not complete yet
        self._channel = services.open_channel(
            message_types | Part,
            tag=CONTROL,
            scope=scope,
            name=name,
            handler=self._on_message,
            capacity=sys.maxsize,  # a message to a member must never raise BusyError
        )

    def post(self, message: M, dest: int, number: int = 0) -> None:
        """Send a message to ``dest``, with the number of a round, unless ``dest`` is lost.

        Raises:
            LocalProtocolError: The message has a field of a wrong type, or needs more than ``PART_COUNT_MAX`` parts.
        """
        try:
            if message is not self._last[0]:
                try:
                    self._channel.send_nowait(message, dest, round=number)
                    return
                except LocalProtocolError as error:
                    if not hasattr(error, "limit_nbytes"):
                        raise
                    self._last = message, self._parts_of(message)
            for part in self._last[1]:
                self._channel.send_nowait(part, dest, round=number)
        except RankLostError as error:  # the loss is handled when the world reports it
            logger.debug("the message %s was not sent: %s", type(message).__name__, error)

    def _parts_of(self, message: M) -> tuple[Part, ...]:
        kind, data = self._kinds.index(type(message)), msgspec.msgpack.encode(message)
        count = -(-len(data) // PART_NBYTES)
        if count > PART_COUNT_MAX:
            raise LocalProtocolError(
                f"a {type(message).__name__} must take at most {PART_COUNT_MAX * PART_NBYTES} bytes, got {len(data)}"
            )
        starts = range(0, len(data), PART_NBYTES)
        return tuple(Part(kind, at // PART_NBYTES, count, data[at : at + PART_NBYTES]) for at in starts)

    def _on_message(self, envelope: Envelope[Any]) -> None:
        message, source, number = envelope
        if isinstance(message, Part):
            message = self._join(source, message)
            if message is None:
                return
        self._listener.on_message(Envelope(message, source, number))

    def _join(self, source: int, part: Part) -> Any:
        """Return the message if ``part`` is its last part, otherwise None."""
        if part.index == 0:  # a restarted rank may have sent only the first parts of an earlier message
            self._received[source] = []
        parts = self._received.pop(source, [])
        is_next = part.index == len(parts) and all((each.kind, each.count) == (part.kind, part.count) for each in parts)
        if not is_next or part.kind >= len(self._decoders):
            logger.warning("%s: rank %d sent an unexpected part of a message, which is dropped", self._name, source)
            return None
        parts.append(part)
        if len(parts) < part.count:
            self._received[source] = parts
            return None
        try:
            return self._decoders[part.kind](b"".join(each.data for each in parts))
        except ValueError as error:  # msgspec's errors are ValueErrors
            logger.warning("%s: rank %d sent an invalid message, which is dropped: %s", self._name, source, error)
            return None

    def admit(self, rank: int) -> None:
        """Allow messages to the new process of a restarted rank."""
        self._received.pop(rank, None)
        self._channel.admit(rank)

    def close(self) -> None:
        """Stop sending and receiving."""
        self._last = None, ()
        self._received.clear()
        self._channel.close()
