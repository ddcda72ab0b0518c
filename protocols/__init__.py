"""Policies for a population of training ranks, one file per algorithm, on top of :mod:`asyncdist`."""

from protocols.average_all import AverageAllPolicy
from protocols.one_sided_averaging import OneSidedSelectiveAveragingPolicy
from protocols.one_sided_core import OneSidedRules
from protocols.one_sided_statistics import Durations, OneSidedStatistics
from protocols.replay_buffer import ReplayBuffer, Sample
from protocols.replay_server import ReplayStatistics, serve_replay_buffer
from protocols.selective_averaging import AsyncSelectiveAveragingPolicy, SelectiveStatistics
from protocols.selective_coordinator import coordinate
from protocols.selective_core import SelectiveRules
from protocols.selective_rounds import CoordinatorStatistics
from protocols.spawn_policy import AverageApplied, PolicyEvent, SnapshotTaken, SpawnPolicy, StepInfo

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
    "AverageApplied",
    "CoordinatorStatistics",
    "Durations",
    "OneSidedRules",
    "OneSidedSelectiveAveragingPolicy",
    "OneSidedStatistics",
    "PolicyEvent",
    "ReplayBuffer",
    "ReplayStatistics",
    "Sample",
    "SelectiveRules",
    "SelectiveStatistics",
    "SnapshotTaken",
    "SpawnPolicy",
    "StepInfo",
    "coordinate",
    "serve_replay_buffer",
]
