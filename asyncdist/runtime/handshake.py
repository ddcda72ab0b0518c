"""Lets a rank meet all others when its world opens: they agree on versions and on the number of the job.

They also learn who is on which host, for what lies together there.
"""

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
from asyncdist._version import __version__
from asyncdist.collectives.collectives import Collectives
from asyncdist.collectives.groups import Group
from asyncdist.collectives.membership import MembershipLog
from asyncdist.errors import DisagreementError, RankLostError
from asyncdist.messaging import wire
from asyncdist.messaging.engine import Engine
from asyncdist.messaging.services import Services
from asyncdist.runtime.world import World
from asyncdist.transports.base import Transport

logger = logging.getLogger("asyncdist.runtime.handshake")

#: The sender's number for the job, its host's digest and its version.
_HELLO: Final = struct.Struct("<I8s52s")
_HOST_NBYTES: Final = 8
_VERSION_NBYTES: Final = 52


async def meet_all(transport: Transport, engine: Engine, loop: asyncio.AbstractEventLoop) -> World:
    """Agree on the version and on the job's nonce, unless the transport knows it.

    A rank may be lost meanwhile, where the job goes on then and the launcher has given all ranks a number.
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
        transport.note_met()
    if transport.trusts_network and transport.rank == 0:
        logger.warning(
            "this job %s, so its ranks believe whoever reaches their ports: set ASYNCDIST_JOB_SECRET_FILE on all hosts "
            "to a file of mode 0600 (docs/trust.md)",
            "has no secret" if hosts is None else "runs on several hosts without a secret",
        )
    services = Services(engine, loop, nonce)
    services.hosts = hosts
    return World(services, loop, nonce=nonce, group=group)


def first_ranks(hosts: Sequence[Hashable]) -> tuple[int, ...] | None:
    """Return for each rank the first one on its host, of which a name is given; None where all are on one host."""
    firsts: dict[Hashable, int] = {}
    found = tuple(firsts.setdefault(host, rank) for rank, host in enumerate(hosts))
    return found if len(firsts) > 1 else None


@functools.lru_cache(8)
def _everybody(size: int) -> tuple[int, ...]:
    """Return all ranks, as one tuple for all ranks of a process: a simulation may have thousands."""
    return tuple(range(size))


async def _exchange_hellos(
    transport: Transport, group: Group, collectives: Collectives
) -> tuple[int, tuple[int, ...] | None]:
    """Return rank 0's nonce, and who is on which host. Raises DisagreementError where a rank runs another version."""
    version = f"asyncdist {__version__}, frames {wire.VERSION}"
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
                f"rank {transport.rank} runs {version}, rank {rank} runs {theirs}; allowed: one version on all ranks",
                rank=rank,
            )
    return nonce, first_ranks(hosts)
