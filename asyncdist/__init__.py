"""asyncdist: an asyncio message-passing runtime for distributed PyTorch training.

One event loop per rank drives tag-multiplexed protocols over polled nonblocking requests. A training loop is a
coroutine, ``async def train(world)``, started by :func:`run`; policies from the package ``protocols`` are awaited
inside it.

A name is imported on its first use (PEP 562): importing torch takes a second or more, which ``asyncdist run``, a test
session's start and ``--help`` have no use for.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any, Final

from asyncdist import launch
from asyncdist._version import __version__
from asyncdist.errors import (
    AsyncdistError,
    BusyError,
    ClosedError,
    DeadlockError,
    DisagreementError,
    LocalProtocolError,
    RankLostError,
    RemoteError,
    RemoteProtocolError,
    StartTimeoutError,
    TransportError,
    TruncationError,
)

if TYPE_CHECKING:
    from asyncdist.api import all_gather, all_reduce, all_to_all, barrier, broadcast, gather, new_group
    from asyncdist.averaging import average_gradients, average_models
    from asyncdist.channels import Channel, ChannelStatistics, Envelope
    from asyncdist.everyday import (
        compute_and_broadcast,
        gather_from_all_ranks,
        gather_scalar_from_all_ranks,
        is_distributed,
        is_main_process,
        reduce_and_broadcast,
        zero_first,
        zero_only,
    )
    from asyncdist.gathering import gather_distributed_data
    from asyncdist.groups import Group
    from asyncdist.roles import (
        DistributedContext,
        DistributedContextmpi4py,
        RankLayout,
        initialize_distributed_compute,
        initialize_distributed_compute_mpi4py,
    )
    from asyncdist.runtime import open_world, run, run_local
    from asyncdist.simulation.explore import explore
    from asyncdist.simulation.simulate import SimReport, simulate
    from asyncdist.timing_report import report_load_imbalance, report_time_info
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
    "DistributedContext",
    "DistributedContextmpi4py",
    "Envelope",
    "Group",
    "LocalProtocolError",
    "RankLayout",
    "RankLostError",
    "RemoteError",
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
    "average_gradients",
    "average_models",
    "barrier",
    "broadcast",
    "compute_and_broadcast",
    "current_world",
    "explore",
    "gather",
    "gather_distributed_data",
    "gather_from_all_ranks",
    "gather_scalar_from_all_ranks",
    "initialize_distributed_compute",
    "initialize_distributed_compute_mpi4py",
    "is_distributed",
    "is_main_process",
    "new_group",
    "open_world",
    "reduce_and_broadcast",
    "report_load_imbalance",
    "report_time_info",
    "run",
    "run_local",
    "simulate",
    "zero_first",
    "zero_only",
]

#: Where the names are that wait for their first use; the same as above, for those who run.
_NAMES: Final = {
    "api": ("all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "gather", "new_group"),
    "averaging": ("average_gradients", "average_models"),
    "everyday": (
        "compute_and_broadcast",
        "gather_from_all_ranks",
        "gather_scalar_from_all_ranks",
        "is_distributed",
        "is_main_process",
        "reduce_and_broadcast",
        "zero_first",
        "zero_only",
    ),
    "gathering": ("gather_distributed_data",),
    "roles": (
        "DistributedContext",
        "DistributedContextmpi4py",
        "RankLayout",
        "initialize_distributed_compute",
        "initialize_distributed_compute_mpi4py",
    ),
    "timing_report": ("report_load_imbalance", "report_time_info"),
    "channels": ("Channel", "ChannelStatistics", "Envelope"),
    "groups": ("Group",),
    "runtime": ("open_world", "run", "run_local"),
    "simulation.explore": ("explore",),
    "simulation.simulate": ("SimReport", "simulate"),
    "world": ("World", "WorldStatistics", "current_world"),
}
_HOMES: Final = {name: home for home, names in _NAMES.items() for name in names}

if not TYPE_CHECKING:  # a checker that saw it would let any name pass

    def __getattr__(name: str) -> Any:
        """A name of ``__all__``, or a module of the package."""
        home = _HOMES.get(name)
        if home is not None:
            value = getattr(importlib.import_module(f"asyncdist.{home}"), name)
            globals()[name] = value
            return value
        if not name.startswith("_") and importlib.util.find_spec(f"asyncdist.{name}") is not None:
            return importlib.import_module(f"asyncdist.{name}")
        raise AttributeError(f"module 'asyncdist' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
