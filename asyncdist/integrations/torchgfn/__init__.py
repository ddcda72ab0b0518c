"""Replaces the distributed parts of torchgfn's training scripts, with the same names and calls.

Only the imports of a script change::

    from asyncdist.integrations.torchgfn import (  # instead of torchgfn's own modules
        AsyncSelectiveAveragingPolicy, DistributedContext, barrier, initialize_distributed_compute,
    )

The script remains blocking code, started by ``asyncdist run``, ``mpirun`` or ``torchrun``. The modules:

- :mod:`asyncdist.integrations.torchgfn.policies`: averaging policies, called in each iteration.
- :mod:`asyncdist.integrations.torchgfn.roles`: roles of ranks, groups and collective calls.
- :mod:`asyncdist.integrations.torchgfn.buffers`: replay buffers on separate ranks. Only this module needs torchgfn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from asyncdist.integrations.torchgfn.policies import (
    AsyncSelectiveAveragingPolicy as AsyncSelectiveAveragingPolicy,
    AsyncSelectiveAveragingPolicympi4pyFast as AsyncSelectiveAveragingPolicympi4pyFast,
    AsyncSelectiveAveragingPolicympi4pyGeneral as AsyncSelectiveAveragingPolicympi4pyGeneral,
    AverageAllPolicy as AverageAllPolicy,
    AverageAllPolicympi4py as AverageAllPolicympi4py,
)
from asyncdist.integrations.torchgfn.roles import (
    DistributedContext as DistributedContext,
    DistributedContextmpi4py as DistributedContextmpi4py,
    average_gradients as average_gradients,
    average_models as average_models,
    barrier as barrier,
    broadcast as broadcast,
    gather_distributed_data as gather_distributed_data,
    initialize_distributed_compute as initialize_distributed_compute,
    initialize_distributed_compute_mpi4py as initialize_distributed_compute_mpi4py,
    report_load_imbalance as report_load_imbalance,
    report_time_info as report_time_info,
)

if TYPE_CHECKING:
    from asyncdist.integrations.torchgfn.buffers import (
        ContainerUnion as ContainerUnion,
        NormBasedDiversePrioritizedReplayBuffer as NormBasedDiversePrioritizedReplayBuffer,
        ReplayBuffer as ReplayBuffer,
        ReplayBufferManager as ReplayBufferManager,
    )

_OF_BUFFERS: Final = frozenset(
    ("ContainerUnion", "NormBasedDiversePrioritizedReplayBuffer", "ReplayBuffer", "ReplayBufferManager")
)


def __getattr__(name: str) -> Any:
    """Import the replay buffers on first use. Only they need torchgfn, whose import takes seconds."""
    if name not in _OF_BUFFERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from asyncdist.integrations.torchgfn import buffers

    return getattr(buffers, name)
