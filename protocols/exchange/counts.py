"""Counts one rank's contributions to averages, and the averages that it has applied.

A policy's journal updates these counts, whether or not the policy has rounds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from asyncdist.protocols.step_info import NOTHING, Contributed, StepInfo


@dataclass(slots=True)
class AverageCounts:
    """Counts one rank's contributions and applied averages; see also :class:`ExchangeStatistics`.

    Attributes:
        wire_nbytes: Total encoded size of the contributions in bytes.
        applied_count: Number of applied averages. Each fragment's average is counted separately.
        latest: Result of the step that applied the last average.
    """

    contribution_count: int = 0
    wire_nbytes: int = 0
    unencoded_nbytes: int = 0
    applied_count: int = 0
    waited_s: float = 0.0
    waited_max_s: float = 0.0
    donated: Counter[int] = field(default_factory=Counter)
    left_out: Counter[int] = field(default_factory=Counter)
    versions: dict[int, int] = field(default_factory=dict)
    latest: StepInfo = NOTHING

    def note_contributed(self, event: Contributed) -> None:
        """Count a contribution of this rank and its bytes."""
        self.contribution_count += 1
        self.wire_nbytes += event.wire_nbytes
        self.unencoded_nbytes += event.unencoded_nbytes

    def note_applied(self, info: StepInfo) -> None:
        """Count an average that was applied to the model."""
        self.applied_count += 1
        self.waited_s += info.waited_s
        self.waited_max_s = max(self.waited_max_s, info.waited_s)
        self.donated.update(info.donors)
        self.left_out.update(info.left_out)
        self.versions[info.fragment] = info.version
        self.latest = info

    def counters(self) -> dict[str, Any]:
        """Return the fields of :class:`asyncdist.live.counters.PolicyCounters` that describe averages."""
        latest = self.latest
        if not self.contribution_count and not self.applied_count:
            return {}
        return {
            "fragment": latest.fragment if latest else None,
            "staleness_versions": latest.staleness_versions,
            "wire_nbytes": self.wire_nbytes,
            "unencoded_nbytes": self.unencoded_nbytes,
            "outer_norm": latest.outer_norm,
            "cosine": latest.cosine,
            "waited_for_averages_s": self.waited_s,
        }
