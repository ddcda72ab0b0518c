"""Lets protocols read the memory of other ranks on their host, on any transport.

A rank that allows reads makes an :class:`AttachToken` and sends the addresses of the token and of the memory. The
readers make a :class:`PeerProcess` from them (:mod:`asyncdist.transports.cross_memory_attach`).
"""

from __future__ import annotations

from asyncdist.messaging.services import Services
from asyncdist.transports.cross_memory_attach import AttachToken, PeerProcess

__all__ = ["AttachToken", "PeerProcess", "has_neighbours"]


def has_neighbours(services: Services) -> bool:
    """Return whether ranks are processes, which may read each other's memory if they share a host."""
    return services.engine.transport.capabilities.shares_memory
