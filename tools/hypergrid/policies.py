"""The values of ``--policy``, among them one for each exported simple policy: ``sparse-averaging``."""

from __future__ import annotations

import re
from typing import Any, Final

import protocols
from protocols.simple.policy import SimplePolicy

#: Simple policies by their values of ``--policy``.
SIMPLE: Final[dict[str, Any]] = {
    re.sub(r"(?<!^)(?=[A-Z])", "-", name.removesuffix("Policy")).lower(): kind
    for name, kind in sorted(vars(protocols).items())
    if isinstance(kind, type) and issubclass(kind, (SimplePolicy, protocols.AsyncPopulationAveragingPolicy))
}
CHOICES: Final = (
    "none",
    "average-all",
    "diloco",
    "async-diloco",
    "selective-diloco",
    "evolution-strategy",
    *SIMPLE,
    "population-training",
    "selective",
)
