"""Lets a rank meet all others when its world opens: they agree on versions and on the number of the job."""

from __future__ import annotations

import asyncio
import functools
import secrets
import struct
from typing import Final

import torch

from asyncdist import tags
from asyncdist._version import __version__
from asyncdist.collectives.groups import Group
from asyncdist.collectives.membership import MembershipLog
from asyncdist.collectives.nonblocking import Collectives
from asyncdist.errors import DisagreementError, RankLostError
from asyncdist.messaging import wire
from asyncdist.messaging.engine import Engine
from asyncdist.messaging.services import Services
from asyncdist.runtime.world import World
from asyncdist.transports.base import Transport

_HELLO: Final = struct.Struct("<I60s")


async def meet_all(transport: Transport, engine: Engine, loop: asyncio.AbstractEventLoop) -> World:
    """Agree on the version and on the job's nonce, unless the transport knows it.

    A rank may be lost meanwhile, where the job goes on then and the launcher has given all ranks a number.
    """
    group = Group(_everybody(transport.size), transport.rank, tags.COLLECTIVE_FIRST, transport.world_group)
    nonce = transport.job_nonce
    if nonce is None:
        collectives = Collectives(engine, transport.rank, loop.create_task, MembershipLog())
        try:
            nonce = await _exchange_hellos(transport, group, collectives)
        except RankLostError:
            if transport.launch_nonce is None or engine.failure is not None:
                raise
            nonce = transport.launch_nonce
        transport.note_met()
    return World(Services(engine, loop, nonce), loop, nonce=nonce, group=group)


@functools.lru_cache(8)
def _everybody(size: int) -> tuple[int, ...]:
    """Return all ranks, as one tuple for all ranks of a process: a simulation may have thousands."""
    return tuple(range(size))


async def _exchange_hellos(transport: Transport, group: Group, collectives: Collectives) -> int:
    """Return rank 0's nonce. Raises DisagreementError where a rank runs another version."""
    version = f"asyncdist {__version__}, frames {wire.VERSION}"
    own = secrets.randbits(32) if transport.launch_nonce is None else transport.launch_nonce
    mine = _HELLO.pack(own, version.encode()[:60])
    hellos = await collectives.all_gather(torch.frombuffer(bytearray(mine), dtype=torch.uint8), group)
    nonce = 0
    for rank, hello in enumerate(hellos):
        number, text = _HELLO.unpack(bytes(hello.numpy()))
        nonce = number if rank == 0 else nonce
        theirs = text.rstrip(b"\0").decode(errors="replace")
        if theirs != version:
            raise DisagreementError(
                f"rank {transport.rank} runs {version}, rank {rank} runs {theirs}; allowed: one version on all ranks",
                rank=rank,
            )
    return nonce
