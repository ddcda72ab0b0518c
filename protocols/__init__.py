"""Policies for a population of training ranks, one file or folder for each algorithm, on top of :mod:`asyncdist`."""

from protocols.average_all import AverageAllPolicy, AverageAllStatistics
from protocols.one_sided.policy import OneSidedSelectiveAveragingPolicy
from protocols.one_sided.rules import OneSidedRules
from protocols.one_sided.statistics import Durations, OneSidedStatistics
from protocols.policy import SpawnPolicy
from protocols.replay.client import ReplayBuffer
from protocols.replay.server import serve_replay_buffer
from protocols.replay.values import ReplayStatistics, Sample
from protocols.replicas.policy import ReplicaAveragingPolicy
from protocols.selective.policy import AsyncSelectiveAveragingPolicy
from protocols.selective.reserved import coordinate
from protocols.selective.rules import SelectiveRules
from protocols.selective.statistics import CoordinatorStatistics, SelectiveStatistics
from protocols.step_info import (
    AverageApplied,
    CoordinatorChanged,
    PolicyEvent,
    RoleAssigned,
    RoundAbandoned,
    RoundEnded,
    SnapshotTaken,
    StepInfo,
)

#: Other names of the same, as torchgfn has them.
AverageAllPolicympi4py = AverageAllPolicy
AsyncSelectiveAveragingPolicympi4pyFast = OneSidedSelectiveAveragingPolicy
AsyncSelectiveAveragingPolicympi4pyGeneral = OneSidedSelectiveAveragingPolicy

__all__ = [
    "AsyncSelectiveAveragingPolicy",
    "AsyncSelectiveAveragingPolicympi4pyFast",
    "AsyncSelectiveAveragingPolicympi4pyGeneral",
    "AverageAllPolicy",
    "AverageAllPolicympi4py",
    "AverageAllStatistics",
    "AverageApplied",
    "CoordinatorChanged",
    "CoordinatorStatistics",
    "Durations",
    "OneSidedRules",
    "OneSidedSelectiveAveragingPolicy",
    "OneSidedStatistics",
    "PolicyEvent",
    "ReplayBuffer",
    "ReplayStatistics",
    "ReplicaAveragingPolicy",
    "RoleAssigned",
    "RoundAbandoned",
    "RoundEnded",
    "Sample",
    "SelectiveRules",
    "SelectiveStatistics",
    "SnapshotTaken",
    "SpawnPolicy",
    "StepInfo",
    "coordinate",
    "serve_replay_buffer",
]
