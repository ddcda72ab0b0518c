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

from asyncdist import compiled, environment
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
    StallError,
    StartTimeoutError,
    TimeLimitError,
    TransportError,
    TruncationError,
)

__path__[:0] = compiled.search_path()  # nothing above imports a module that may be there

if TYPE_CHECKING:
    from asyncdist.collectives.groups import Group
    from asyncdist.functional.averaging import average_gradients, average_models
    from asyncdist.functional.collectives import (
        all_gather,
        all_reduce,
        all_to_all,
        barrier,
        broadcast,
        gather,
        new_group,
    )
    from asyncdist.functional.load_balance import report_load_imbalance, report_time_info
    from asyncdist.functional.main_process import (
        compute_and_broadcast,
        gather_from_all_ranks,
        gather_scalar_from_all_ranks,
        is_distributed,
        is_main_process,
        reduce_and_broadcast,
        zero_first,
        zero_only,
    )
    from asyncdist.functional.parallel_groups import (
        ParallelGroups,
        ParallelLayout,
        new_parallel_groups,
        parallel_groups,
    )
    from asyncdist.functional.ragged_gather import gather_distributed_data
    from asyncdist.functional.rank_layout import (
        DistributedContext,
        DistributedContextmpi4py,
        RankLayout,
        initialize_distributed_compute,
        initialize_distributed_compute_mpi4py,
    )
    from asyncdist.launch.config import MultiprocessConfig
    from asyncdist.launch.process_groups import (
        default_backend,
        get_distributed_backend,
        init_dist,
        init_parallel_groups,
        init_process_group_from_backend,
        set_distributed_backend,
    )
    from asyncdist.launch.spawn import init_and_run, launch_subprocesses
    from asyncdist.messaging.channels import Channel, ChannelStatistics, Envelope
    from asyncdist.runtime.run import open_world, run, run_local
    from asyncdist.runtime.world import World, WorldStatistics, current_world
    from asyncdist.simulation.explore import explore
    from asyncdist.simulation.simulate import SimReport, simulate
    from asyncdist.spmd.gradient_update import agent_gradient_update, gradient_update
    from asyncdist.spmd.mesh import DP_AXIS_NAME, POP_AXIS_NAME, Mesh, new_mesh
    from asyncdist.spmd.shard_map import shmap_map, shmap_vmap
    from asyncdist.spmd.sharding import (
        Sharding,
        get_global_ranks,
        get_process_id,
        is_dist_initialized,
        split_key_to_devices,
        tree_device_put,
    )
    from asyncdist.spmd.tree_collectives import pmax, pmean, pmin, psum

environment.explain_shadowing()

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
    "DistributedContext",
    "DistributedContextmpi4py",
    "Envelope",
    "Group",
    "LocalProtocolError",
    "Mesh",
    "MultiprocessConfig",
    "ParallelGroups",
    "ParallelLayout",
    "RankLayout",
    "RankLostError",
    "RemoteError",
    "RemoteProtocolError",
    "Sharding",
    "SimReport",
    "StallError",
    "StartTimeoutError",
    "TimeLimitError",
    "TransportError",
    "TruncationError",
    "World",
    "WorldStatistics",
    "__version__",
    "agent_gradient_update",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "average_gradients",
    "average_models",
    "barrier",
    "broadcast",
    "compute_and_broadcast",
    "current_world",
    "default_backend",
    "explore",
    "gather",
    "gather_distributed_data",
    "gather_from_all_ranks",
    "gather_scalar_from_all_ranks",
    "get_distributed_backend",
    "get_global_ranks",
    "get_process_id",
    "gradient_update",
    "init_and_run",
    "init_dist",
    "init_parallel_groups",
    "init_process_group_from_backend",
    "initialize_distributed_compute",
    "initialize_distributed_compute_mpi4py",
    "is_dist_initialized",
    "is_distributed",
    "is_main_process",
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
    "reduce_and_broadcast",
    "report_load_imbalance",
    "report_time_info",
    "run",
    "run_local",
    "set_distributed_backend",
    "shmap_map",
    "shmap_vmap",
    "simulate",
    "split_key_to_devices",
    "tree_device_put",
    "zero_first",
    "zero_only",
]

#: Where the names are that wait for their first use; the same as above, for those who run.
_NAMES: Final = {
    "functional.collectives": ("all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "gather", "new_group"),
    "functional.averaging": ("average_gradients", "average_models"),
    "messaging.channels": ("Channel", "ChannelStatistics", "Envelope"),
    "functional.main_process": (
        "compute_and_broadcast",
        "gather_from_all_ranks",
        "gather_scalar_from_all_ranks",
        "is_distributed",
        "is_main_process",
        "reduce_and_broadcast",
        "zero_first",
        "zero_only",
    ),
    "functional.ragged_gather": ("gather_distributed_data",),
    "spmd.gradient_update": ("agent_gradient_update", "gradient_update"),
    "collectives.groups": ("Group",),
    "spmd.mesh": ("DP_AXIS_NAME", "Mesh", "POP_AXIS_NAME", "new_mesh"),
    "functional.parallel_groups": ("ParallelGroups", "ParallelLayout", "new_parallel_groups", "parallel_groups"),
    "spmd.sharding": (
        "Sharding",
        "get_global_ranks",
        "get_process_id",
        "is_dist_initialized",
        "split_key_to_devices",
        "tree_device_put",
    ),
    "spmd.tree_collectives": ("pmax", "pmean", "pmin", "psum"),
    "launch.process_groups": (
        "default_backend",
        "get_distributed_backend",
        "init_dist",
        "init_parallel_groups",
        "init_process_group_from_backend",
        "set_distributed_backend",
    ),
    "functional.rank_layout": (
        "DistributedContext",
        "DistributedContextmpi4py",
        "RankLayout",
        "initialize_distributed_compute",
        "initialize_distributed_compute_mpi4py",
    ),
    "runtime.run": ("open_world", "run", "run_local"),
    "spmd.shard_map": ("shmap_map", "shmap_vmap"),
    "simulation.explore": ("explore",),
    "simulation.simulate": ("SimReport", "simulate"),
    "launch.config": ("MultiprocessConfig",),
    "launch.spawn": ("init_and_run", "launch_subprocesses"),
    "functional.load_balance": ("report_load_imbalance", "report_time_info"),
    "runtime.world": ("World", "WorldStatistics", "current_world"),
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
