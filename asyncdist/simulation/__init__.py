"""Simulates many ranks in one process and in virtual time. A seed determines how the ranks interleave."""

from asyncdist import compiled

__path__[:0] = compiled.search_path("simulation")  # before any submodule is imported

from asyncdist.simulation.arguments import Compute
from asyncdist.simulation.distributions import Duration, Exponential, LogNormal, Uniform
from asyncdist.simulation.exploration.explore import ExploreReport, Failure, Scenario, explore
from asyncdist.simulation.faults import (
    Corrupt,
    Delay,
    Fault,
    Interrupt,
    Join,
    Kill,
    Partition,
    Restart,
    SlowLink,
    SlowRank,
    Stall,
)
from asyncdist.simulation.links import Link, Network
from asyncdist.simulation.replay.comparison import DivergenceError
from asyncdist.simulation.replay.replay import Replayed, replay
from asyncdist.simulation.replay.script import replay_script
from asyncdist.simulation.report import SimReport
from asyncdist.simulation.simulate import simulate
from asyncdist.simulation.trace import TraceEvent

__all__ = [
    "Compute",
    "Corrupt",
    "Delay",
    "DivergenceError",
    "Duration",
    "ExploreReport",
    "Exponential",
    "Failure",
    "Fault",
    "Interrupt",
    "Join",
    "Kill",
    "Link",
    "LogNormal",
    "Network",
    "Partition",
    "Replayed",
    "Restart",
    "Scenario",
    "SimReport",
    "SlowLink",
    "SlowRank",
    "Stall",
    "TraceEvent",
    "Uniform",
    "explore",
    "replay",
    "replay_script",
    "simulate",
]
