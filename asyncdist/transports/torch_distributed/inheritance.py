"""Keeps gloo's connections from the processes that a rank starts.

gloo creates its sockets without close-on-exec. When a rank is killed, a child process keeps the inherited connections
open. The other ranks would notice the loss only when the child ends.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from typing import Final

from asyncdist.transports.torch_distributed import keepalive

#: Device and inode of each socket to close in forked children, by descriptor.
_kept: Final[dict[int, tuple[int, int]]] = {}


@contextlib.contextmanager
def kept_from_children() -> Iterator[None]:
    """Keep the sockets that the body of ``with`` makes from child processes. Works only on Linux."""
    earlier = set(keepalive.open_descriptors())
    yield
    for descriptor in [each for each, known in list(_kept.items()) if _socket_at(each) != known]:
        _kept.pop(descriptor, None)  # no longer open
    for descriptor in set(keepalive.open_descriptors()) - earlier:
        found = _socket_at(descriptor)
        # Another thread may have opened a socket, too. Python's sockets are not inheritable.
        if found is not None and os.get_inheritable(descriptor):
            os.set_inheritable(descriptor, False)
            _kept[descriptor] = found


def _socket_at(descriptor: int) -> tuple[int, int] | None:
    """Return the device and inode of an open socket, or None."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return (found.st_dev, found.st_ino) if stat.S_ISSOCK(found.st_mode) else None


def _close_in_child() -> None:
    """Replace the sockets by a null device. gloo may still close the descriptors, so others must not get them."""
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
