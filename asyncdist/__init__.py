"""asyncdist: an asyncio message-passing runtime for distributed PyTorch training.

One event loop per rank drives tag-multiplexed protocols over polled nonblocking requests. A training loop is a
coroutine, ``async def train(world)``, started by :func:`run`; policies from the package ``protocols`` are awaited
inside it.
"""

from asyncdist import launch
from asyncdist._version import __version__
from asyncdist.api import all_gather, all_reduce, all_to_all, barrier, broadcast, gather, new_group
from asyncdist.channels import Channel, ChannelStatistics, Envelope
from asyncdist.errors import (
    AsyncdistError,
    BusyError,
    ClosedError,
    DeadlockError,
    DisagreementError,
    LocalProtocolError,
    RankLostError,
    RemoteProtocolError,
    StartTimeoutError,
    TransportError,
    TruncationError,
)
from asyncdist.groups import Group
from asyncdist.runtime import open_world, run, run_local
from asyncdist.simulation import SimReport, simulate
from asyncdist.world import World, WorldStatistics, current_world

launch.explain_shadowing()

__all__ = [
    "AsyncdistError",
    "BusyError",
    "Channel",
    "ChannelStatistics",
    "ClosedError",
    "DeadlockError",
    "DisagreementError",
    "Envelope",
    "Group",
    "LocalProtocolError",
    "RankLostError",
    "RemoteProtocolError",
    "SimReport",
    "StartTimeoutError",
    "TransportError",
    "TruncationError",
    "World",
    "WorldStatistics",
    "__version__",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "current_world",
    "gather",
    "new_group",
    "open_world",
    "run",
    "run_local",
    "simulate",
]
