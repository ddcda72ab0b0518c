"""Configures the sockets of a rank's connections to its peers.

- **Probes** (TCP keepalive). A host that was unplugged, has crashed or is cut off sends nothing. Without probes, an
  idle connection to it stays open forever, and a connection with unacknowledged data for 15 minutes. Messages between
  ranks could not distinguish a dead host from a rank that is computing for ten minutes. Probes can, because the kernel
  of a live host answers them even while the process is computing.
- **Children.** gloo creates its sockets without close-on-exec. When a rank is killed, a child process would keep the
  inherited connections open, and the other ranks would notice the loss only when the child ends. Sockets are therefore
  kept from the processes that a rank starts.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import sys
from collections.abc import Iterable, Iterator
from typing import Final

#: A connection idle for `IDLE_S` seconds is probed `PROBE_COUNT` times, every `INTERVAL_S` seconds. If none of the
#: probes is answered, the connection is closed.
IDLE_S: Final = 5
INTERVAL_S: Final = 5
PROBE_COUNT: Final = 3
#: Seconds after which a connection with unacknowledged data, which is not probed, is closed. This also applies to a
#: connection whose peer process was stopped in the middle of a large message.
UNACKNOWLEDGED_S: Final = 30
#: Device and inode of each socket to close in forked children, by descriptor.
_kept: Final[dict[int, tuple[int, int]]] = {}


@contextlib.contextmanager
def configured_sockets() -> Iterator[None]:
    """Enable probes on connections that the ``with`` body makes, and keep them from children. Works only on Linux."""
    earlier = set(open_descriptors())
    yield
    made = set(open_descriptors()) - earlier
    probe_all(made)
    for descriptor in [each for each, known in list(_kept.items()) if _socket_at(each) != known]:
        _kept.pop(descriptor, None)  # the descriptor is no longer open
    for descriptor in made:
        found = _socket_at(descriptor)
        # Another thread may also have opened a socket, but not an inheritable one: Python's sockets are not.
        if found is not None and os.get_inheritable(descriptor):
            os.set_inheritable(descriptor, False)
            _kept[descriptor] = found


def probe_all(descriptors: Iterable[int]) -> None:
    """Enable probes on the connections to other hosts among ``descriptors``."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError), _opened(descriptor) as connection:
            is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM
            if is_tcp and connection.getsockname()[0] != connection.getpeername()[0]:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, INTERVAL_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBE_COUNT)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * UNACKNOWLEDGED_S)


def open_descriptors() -> list[int]:
    """Return the open descriptors of this process, or [] on systems other than Linux."""
    listed = map(int, os.listdir("/proc/self/fd")) if sys.platform == "linux" else ()
    return [each for each in listed if _status_of(each)]  # listdir's own descriptor is listed, but is already closed


def _status_of(descriptor: int) -> os.stat_result | None:
    with contextlib.suppress(OSError):
        return os.fstat(descriptor)
    return None


def _socket_at(descriptor: int) -> tuple[int, int] | None:
    """Return the device and inode of an open socket, or None."""
    found = _status_of(descriptor)
    return (found.st_dev, found.st_ino) if found is not None and stat.S_ISSOCK(found.st_mode) else None


def _opened(descriptor: int) -> socket.socket:
    """Return a socket for a duplicate of the descriptor, which stays open when the socket is closed."""
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:  # The descriptor is not a socket.
        os.close(copy)
        raise


def _close_in_child() -> None:
    """Replace the sockets by a null device. gloo may still close their numbers, so no new file must get these."""
    sockets = [descriptor for descriptor, known in _kept.items() if _socket_at(descriptor) == known]
    _kept.clear()
    if not sockets:
        return
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor in sockets:
        os.dup2(null, descriptor, inheritable=False)
    os.close(null)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
