"""What protocols may use to read the memory of ranks on their host, whatever the transport is.

A rank that lets others read makes an :class:`AttachToken` and says where it and the memory lie; those make a
:class:`PeerProcess` of it (:mod:`asyncdist.transports.cross_memory_attach`).
"""

from __future__ import annotations

from asyncdist.messaging.services import Services
from asyncdist.transports.cross_memory_attach import AttachToken, PeerProcess

__all__ = ["AttachToken", "PeerProcess", "has_neighbours"]


def has_neighbours(services: Services) -> bool:
    """Return whether ranks are processes, which may read each other's memory where they are on one host."""
    return services.engine.transport.capabilities.shares_memory
