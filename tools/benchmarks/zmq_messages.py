"""Messages between two processes of a host over pyzmq, a rival of the benchmarks if it is installed."""

from __future__ import annotations

import struct
from typing import Any

_NUMBER = struct.Struct("d")


class End:
    """One end of a connection over which numbers are sent."""

    def __init__(self, context: Any, socket: Any) -> None:
        self._context = context
        self._socket = socket

    async def send(self, number: float) -> None:
        """Send a number to the other end."""
        await self._socket.send(_NUMBER.pack(number))

    async def receive(self) -> float:
        """Wait for a number."""
        number: float = _NUMBER.unpack(await self._socket.recv())[0]
        return number

    def close(self) -> None:
        """Close the connection."""
        self._socket.close(linger=0)
        self._context.term()


def connect(address: str, *, listens: bool) -> End | None:
    """Return the receiving end, if ``listens`` is true, or the sending end; None if pyzmq is not installed."""
    try:
        import zmq
        import zmq.asyncio
    except ImportError:
        return None
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.PULL if listens else zmq.PUSH)
    if listens:
        socket.bind(address)
    else:
        socket.connect(address)
    return End(context, socket)
