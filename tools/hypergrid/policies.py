"""The values of ``--policy``: one for each policy whose replicas take a single rank, such as ``sparse-averaging``."""

from __future__ import annotations

import re
from typing import Any, Final

import protocols
from protocols.simple.policy import SimplePolicy

#: Simple policies by their values of --policy. They have no metric, and average as often as their defaults say.
SIMPLE: Final[dict[str, Any]] = {
    re.sub(r"(?<!^)(?=[A-Z])", "-", name.removesuffix("Policy")).lower(): kind
    for name, kind in sorted(vars(protocols).items())
    if isinstance(kind, type) and issubclass(kind, (SimplePolicy, protocols.AsyncPopulationAveragingPolicy))
}
#: All policies by their values of --policy.
POLICIES: Final[dict[str, Any]] = {
    "average-all": protocols.AverageAllPolicy,
    "diloco": protocols.DiLoCoPolicy,
    "async-diloco": protocols.AsyncDiLoCoPolicy,
    "selective-diloco": protocols.SelectiveDiLoCoPolicy,
    "evolution-strategy": protocols.EvolutionStrategyPolicy,
    **SIMPLE,
    "population-training": protocols.PopulationTrainingPolicy,
    "one-sided": protocols.OneSidedSelectiveAveragingPolicy,
    "selective": protocols.AsyncSelectiveAveragingPolicy,
}
CHOICES: Final = ("none", *POLICIES)
