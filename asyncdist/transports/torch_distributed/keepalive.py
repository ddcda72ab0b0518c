"""Has the kernel look whether the hosts of peers are still there.

A process that ends closes its connections, and its peers hear of it at once. A host that is unplugged, crashes or is
cut off says nothing: without probes a connection to it stays open for ever while nothing is sent, and for a quarter of
an hour once something is. Messages between ranks could not tell such a host from a rank in a step of ten minutes. The
kernel can: that of a living host acknowledges for a process that computes, and for one that is stopped.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterable, Iterator
from typing import Final

#: A connection on which nothing has come for `IDLE_S` is probed so often; the host is gone if none is acknowledged.
IDLE_S: Final = 5
INTERVAL_S: Final = 5
PROBE_COUNT: Final = 3
#: The same where data is under way, which is not probed. It is given up also where the peer takes none of it for so
#: long, as a process that is stopped in the middle of a large message.
UNACKNOWLEDGED_S: Final = 30


@contextlib.contextmanager
def probed_connections() -> Iterator[None]:
    """Have the connections to other hosts that are made in the block probed. On Linux; elsewhere it does nothing."""
    earlier = set(_descriptors())
    yield
    probe_all(set(_descriptors()) - earlier)


def probe_all(descriptors: Iterable[int] | None = None) -> None:
    """Have connections to other hosts probed: all of this process, or those among these descriptors."""
    for descriptor in _descriptors() if descriptors is None else descriptors:
        with contextlib.suppress(OSError), _opened(descriptor) as connection:
            if _is_to_another_host(connection):
                probe(connection)


def probe(connection: socket.socket) -> None:
    """Have one connection probed."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBE_COUNT)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * UNACKNOWLEDGED_S)


def _descriptors() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd")] if sys.platform == "linux" else []


def _opened(descriptor: int) -> socket.socket:
    """Return a socket of our own over the same connection: the library's descriptor stays the library's."""
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:  # no socket
        os.close(copy)
        raise


def _is_to_another_host(connection: socket.socket) -> bool:
    is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM
    return is_tcp and connection.getsockname()[0] != connection.getpeername()[0]
