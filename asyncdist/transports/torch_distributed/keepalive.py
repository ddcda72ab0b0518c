"""Makes the kernel probe whether the hosts of peers are still alive (TCP keepalive).

A host that is unplugged, crashes or is cut off no longer sends anything. Without probes, an idle connection to it stays
open forever, and a connection with unacknowledged data for 15 minutes. Messages between ranks could not distinguish a
dead host from a rank that computes for ten minutes. Probes can distinguish these cases, because the kernel of a live
host answers them even while the process computes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterable, Iterator
from typing import Final

#: A connection idle for `IDLE_S` seconds is probed `PROBE_COUNT` times, every `INTERVAL_S` seconds. If no probe is
#: answered, the connection is closed.
IDLE_S: Final = 5
INTERVAL_S: Final = 5
PROBE_COUNT: Final = 3
#: Seconds after which a connection with unacknowledged data, which is not probed, is closed. This also closes the
#: connection to a process that is stopped in the middle of a large message.
UNACKNOWLEDGED_S: Final = 30


@contextlib.contextmanager
def probed_connections() -> Iterator[None]:
    """Enable probes on the connections to other hosts that the body of ``with`` makes. Works only on Linux."""
    earlier = set(open_descriptors())
    yield
    probe_all(set(open_descriptors()) - earlier)


def probe_all(descriptors: Iterable[int] | None = None) -> None:
    """Enable probes on connections to other hosts, among ``descriptors`` or all descriptors of this process."""
    for descriptor in open_descriptors() if descriptors is None else descriptors:
        with contextlib.suppress(OSError), _opened(descriptor) as connection:
            if _is_to_another_host(connection):
                probe(connection)


def probe(connection: socket.socket) -> None:
    """Enable probes on one connection."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBE_COUNT)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * UNACKNOWLEDGED_S)


def open_descriptors() -> list[int]:
    """Return the open descriptors of this process, or [] on systems other than Linux."""
    listed = map(int, os.listdir("/proc/self/fd")) if sys.platform == "linux" else ()
    return [each for each in listed if _is_open(each)]  # listdir's own descriptor is listed, but is already closed


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _opened(descriptor: int) -> socket.socket:
    """Return a socket for a duplicate of the descriptor, which stays open when the socket is closed."""
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:  # The descriptor is not a socket.
        os.close(copy)
        raise


def _is_to_another_host(connection: socket.socket) -> bool:
    is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM
    return is_tcp and connection.getsockname()[0] != connection.getpeername()[0]
