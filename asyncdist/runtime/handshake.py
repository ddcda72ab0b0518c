"""Opens a world: all ranks compare versions, agree on the job's nonce, and exchange their host names."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import secrets
import struct
from collections.abc import Hashable, Sequence
from typing import Final

import torch

from asyncdist import tags
from asyncdist._version import describe_version
from asyncdist.collectives.collectives import Collectives
from asyncdist.collectives.groups import Group
from asyncdist.collectives.membership import MembershipLog
from asyncdist.errors import DisagreementError, RankLostError
from asyncdist.messaging.engine import Engine
from asyncdist.messaging.services import Services
from asyncdist.runtime.world import World
from asyncdist.transports.base import Transport

logger = logging.getLogger("asyncdist.runtime.handshake")

#: Handshake message: the number that the sender proposes for the job, the digest of its host name, and its version.
_HELLO: Final = struct.Struct("<I8s52s")
_HOST_NBYTES: Final = 8
_VERSION_NBYTES: Final = 52


async def complete_handshake(transport: Transport, engine: Engine, loop: asyncio.AbstractEventLoop) -> World:
    """Perform the handshake with all other ranks, and return this rank's world.

    If the transport does not provide the number that identifies the job (the nonce), the ranks agree on a number.
    """
    group = Group(_everybody(transport.size), transport.rank, tags.COLLECTIVE_FIRST, transport.world_group)
    nonce, hosts = transport.job_nonce, transport.hosts
    if nonce is None:
        collectives = Collectives(engine, transport.rank, loop.create_task, MembershipLog())
        try:
            nonce, hosts = await _exchange_hellos(transport, group, collectives)
        except RankLostError:
            if transport.launch_nonce is None or engine.failure is not None:
                raise
            nonce = transport.launch_nonce
        transport.note_handshake()
    if transport.trusts_network and transport.rank == 0:
        logger.warning(
            "this job %s, so its ranks trust every process that can reach their ports: set ASYNCDIST_JOB_SECRET_FILE "
            "on all hosts to a file of mode 0600 (docs/trust.md)",
            "has no secret" if hosts is None else "runs on several hosts without a secret",
        )
    services = Services(engine, loop, nonce)
    services.hosts = hosts
    return World(services, loop, nonce=nonce, group=group)


def first_ranks(hosts: Sequence[Hashable]) -> tuple[int, ...] | None:
    """Return, for each rank, the lowest rank on the same host, or None if all ranks share one host."""
    firsts: dict[Hashable, int] = {}
    found = tuple(firsts.setdefault(host, rank) for rank, host in enumerate(hosts))
    return found if len(firsts) > 1 else None


@functools.lru_cache(8)
def _everybody(size: int) -> tuple[int, ...]:
    """Return all ranks. The result is cached, because a simulation may have thousands of ranks in one process."""
    return tuple(range(size))


async def _exchange_hellos(
    transport: Transport, group: Group, collectives: Collectives
) -> tuple[int, tuple[int, ...] | None]:
    """Check that all versions are equal. Return the job's nonce, and the lowest rank on the host of each rank."""
    version = describe_version()
    own = secrets.randbits(32) if transport.launch_nonce is None else transport.launch_nonce
    host = hashlib.sha256(transport.hostname.encode(errors="surrogateescape")).digest()[:_HOST_NBYTES]
    mine = _HELLO.pack(own, host, version.encode()[:_VERSION_NBYTES])
    hellos = await collectives.all_gather(torch.frombuffer(bytearray(mine), dtype=torch.uint8), group)
    nonce, hosts = 0, []
    for rank, hello in enumerate(hellos):
        number, host, text = _HELLO.unpack(bytes(hello.numpy()))
        hosts.append(host)
        nonce = number if rank == 0 else nonce
        theirs = text.rstrip(b"\0").decode(errors="replace")
        if theirs != version:
            raise DisagreementError(
                f"all ranks must run the same version, but rank {transport.rank} runs {version} and rank {rank} runs "
                f"{theirs}",
                rank=rank,
            )
    return nonce, first_ranks(hosts)
