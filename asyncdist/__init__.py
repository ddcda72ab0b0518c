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
    RemoteProtocolError,
    StartTimeoutError,
    TransportError,
    TruncationError,
)

if TYPE_CHECKING:
    from asyncdist.api import all_gather, all_reduce, all_to_all, barrier, broadcast, gather, new_group
    from asyncdist.channels import Channel, ChannelStatistics, Envelope
    from asyncdist.gradients import agent_gradient_update, gradient_update
    from asyncdist.groups import Group
    from asyncdist.mesh import DP_AXIS_NAME, POP_AXIS_NAME, Mesh, new_mesh
    from asyncdist.parallel import ParallelGroups, ParallelLayout, new_parallel_groups, parallel_groups
    from asyncdist.placement import (
        Sharding,
        get_global_ranks,
        get_process_id,
        is_dist_initialized,
        split_key_to_devices,
        tree_device_put,
    )
    from asyncdist.population import pmax, pmean, pmin, psum
    from asyncdist.process_groups import (
        default_backend,
        get_distributed_backend,
        init_dist,
        init_parallel_groups,
        init_process_group_from_backend,
        set_distributed_backend,
    )
    from asyncdist.runtime import open_world, run, run_local
    from asyncdist.shards import shmap_map, shmap_vmap
    from asyncdist.simulation.explore import explore
    from asyncdist.simulation.simulate import SimReport, simulate
    from asyncdist.subprocesses import MultiprocessConfig, init_and_run, launch_subprocesses
    from asyncdist.world import World, WorldStatistics, current_world

launch.explain_shadowing()

__all__ = [
    "DP_AXIS_NAME",
    "POP_AXIS_NAME",
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
    "Mesh",
    "MultiprocessConfig",
    "ParallelGroups",
    "ParallelLayout",
    "RankLostError",
    "RemoteProtocolError",
    "Sharding",
    "SimReport",
    "StartTimeoutError",
    "TransportError",
    "TruncationError",
    "World",
    "WorldStatistics",
    "__version__",
    "agent_gradient_update",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "current_world",
    "default_backend",
    "explore",
    "gather",
    "get_distributed_backend",
    "get_global_ranks",
    "get_process_id",
    "gradient_update",
    "init_and_run",
    "init_dist",
    "init_parallel_groups",
    "init_process_group_from_backend",
    "is_dist_initialized",
    "launch_subprocesses",
    "new_group",
    "new_mesh",
    "new_parallel_groups",
    "open_world",
    "parallel_groups",
    "pmax",
    "pmean",
    "pmin",
    "psum",
    "run",
    "run_local",
    "set_distributed_backend",
    "shmap_map",
    "shmap_vmap",
    "simulate",
    "split_key_to_devices",
    "tree_device_put",
]

#: Where the names are that wait for their first use; the same as above, for those who run.
_NAMES: Final = {
    "api": ("all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "gather", "new_group"),
    "channels": ("Channel", "ChannelStatistics", "Envelope"),
    "gradients": ("agent_gradient_update", "gradient_update"),
    "groups": ("Group",),
    "parallel": ("ParallelGroups", "ParallelLayout", "new_parallel_groups", "parallel_groups"),
    "process_groups": (
        "default_backend",
        "get_distributed_backend",
        "init_dist",
        "init_parallel_groups",
        "init_process_group_from_backend",
        "set_distributed_backend",
    ),
    "mesh": ("DP_AXIS_NAME", "POP_AXIS_NAME", "Mesh", "new_mesh"),
    "placement": (
        "Sharding",
        "get_global_ranks",
        "get_process_id",
        "is_dist_initialized",
        "split_key_to_devices",
        "tree_device_put",
    ),
    "population": ("pmax", "pmean", "pmin", "psum"),
    "runtime": ("open_world", "run", "run_local"),
    "shards": ("shmap_map", "shmap_vmap"),
    "simulation.explore": ("explore",),
    "simulation.simulate": ("SimReport", "simulate"),
    "subprocesses": ("MultiprocessConfig", "init_and_run", "launch_subprocesses"),
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
