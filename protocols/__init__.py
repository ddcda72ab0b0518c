"""Policies for populations of training ranks and replay buffers, built on :mod:`asyncdist`."""

import sys

from asyncdist.protocols.async_diloco.corrections import CGAD, HeLoCo, StalenessWeight
from asyncdist.protocols.async_diloco.delayed_nesterov import DelayedNesterov
from asyncdist.protocols.async_diloco.policy import AsyncDiLoCoPolicy
from asyncdist.protocols.async_diloco.statistics import AsyncDiLoCoStatistics
from asyncdist.protocols.average_all import AverageAllPolicy, AverageAllStatistics
from asyncdist.protocols.diloco.outer_optimizers import FedAdagrad, FedAdam, FedYogi
from asyncdist.protocols.diloco.policy import DiLoCoPolicy
from asyncdist.protocols.evolution.policy import EvolutionStrategyPolicy
from asyncdist.protocols.exchange.statistics import ExchangeStatistics
from asyncdist.protocols.one_sided.policy import OneSidedSelectiveAveragingPolicy
from asyncdist.protocols.one_sided.population_averaging import AsyncPopulationAveragingPolicy
from asyncdist.protocols.one_sided.selection import OneSidedRules
from asyncdist.protocols.one_sided.statistics import Durations, OneSidedStatistics, PullStatistics
from asyncdist.protocols.policy import SpawnPolicy
from asyncdist.protocols.population_training.bayesian import BayesianExplore
from asyncdist.protocols.population_training.exploring import LineageEntry
from asyncdist.protocols.population_training.hyperparameters import Choice, Range
from asyncdist.protocols.population_training.policy import PopulationTrainingPolicy
from asyncdist.protocols.replay_buffer.client import ReplayBuffer
from asyncdist.protocols.replay_buffer.server import serve_replay_buffer
from asyncdist.protocols.replay_buffer.values import ReplayStatistics, Sample
from asyncdist.protocols.replica_averaging.policy import ReplicaAveragingPolicy
from asyncdist.protocols.selective.leadership import coordinate
from asyncdist.protocols.selective.policy import AsyncSelectiveAveragingPolicy
from asyncdist.protocols.selective.selection import SelectiveRules
from asyncdist.protocols.selective.statistics import CoordinatorStatistics, SelectiveStatistics
from asyncdist.protocols.selective_diloco.policy import SelectiveDiLoCoPolicy
from asyncdist.protocols.simple.gossip import GossipPolicy
from asyncdist.protocols.simple.population_averaging import PopulationAveragingPolicy
from asyncdist.protocols.simple.sparse_averaging import SparseAveragingPolicy
from asyncdist.protocols.step_info import (
    AverageApplied,
    Contributed,
    CoordinatorChanged,
    PolicyEvent,
    RoleAssigned,
    RoundAbandoned,
    RoundEnded,
    SnapshotTaken,
    StepInfo,
)
from asyncdist.tensors.codecs import TopK

#: Aliases with torchgfn's names, for code ported from torchgfn.
AverageAllPolicympi4py = AverageAllPolicy
AsyncSelectiveAveragingPolicympi4pyFast = OneSidedSelectiveAveragingPolicy
AsyncSelectiveAveragingPolicympi4pyGeneral = OneSidedSelectiveAveragingPolicy

__all__ = [
    "CGAD",
    "AsyncDiLoCoPolicy",
    "AsyncDiLoCoStatistics",
    "AsyncPopulationAveragingPolicy",
    "AsyncSelectiveAveragingPolicy",
    "AsyncSelectiveAveragingPolicympi4pyFast",
    "AsyncSelectiveAveragingPolicympi4pyGeneral",
    "AverageAllPolicy",
    "AverageAllPolicympi4py",
    "AverageAllStatistics",
    "AverageApplied",
    "BayesianExplore",
    "Choice",
    "Contributed",
    "CoordinatorChanged",
    "CoordinatorStatistics",
    "DelayedNesterov",
    "DiLoCoPolicy",
    "Durations",
    "EvolutionStrategyPolicy",
    "ExchangeStatistics",
    "FedAdagrad",
    "FedAdam",
    "FedYogi",
    "GossipPolicy",
    "HeLoCo",
    "LineageEntry",
    "OneSidedRules",
    "OneSidedSelectiveAveragingPolicy",
    "OneSidedStatistics",
    "PolicyEvent",
    "PopulationAveragingPolicy",
    "PopulationTrainingPolicy",
    "PullStatistics",
    "Range",
    "ReplayBuffer",
    "ReplayStatistics",
    "ReplicaAveragingPolicy",
    "RoleAssigned",
    "RoundAbandoned",
    "RoundEnded",
    "Sample",
    "SelectiveDiLoCoPolicy",
    "SelectiveRules",
    "SelectiveStatistics",
    "SnapshotTaken",
    "SparseAveragingPolicy",
    "SpawnPolicy",
    "StalenessWeight",
    "StepInfo",
    "TopK",
    "coordinate",
    "serve_replay_buffer",
]

if __name__ == "protocols":  # makes this package the same module as asyncdist.protocols
    sys.modules[__name__] = sys.modules["asyncdist.protocols"]
