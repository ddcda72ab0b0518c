"""Defines what the coordinator keeps about its members and about the round under way."""

import math
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from protocols.selective.messages import ControlMessage
from protocols.selective.rules import Decision

_STEP_TIME_LIMIT_S: Final = 3600.0  # a longer reported step is not believed: every deadline stays finite


class Send(NamedTuple):  # a frozen dataclass takes twice as long to make, and there are twenty in a round
    """One message that the coordinator's coroutine has to send; `round` goes into the frame header."""

    dest: int
    round: int
    message: ControlMessage


class ReportRecord(NamedTuple):  # a frozen dataclass takes a microsecond, once for each report
    """Holds a member's newest report, and when it came."""

    iteration: int
    value: float
    step_time_s: float
    received_at: float


@dataclass(slots=True)
class Member:
    """Holds what the coordinator knows about one rank. `fresh`: it has reported since the last decision."""

    joined: bool
    live: bool = True
    report: ReportRecord | None = None
    fresh: bool = False
    applied_iteration: int | None = None
    report_count: int = 0
    applied_count: int = 0
    decline_count: int = 0


@dataclass(slots=True)
class Round:
    """Tracks the round under way. The sets say which ranks still owe an answer; `released` have had their `End`."""

    number: int
    decision: Decision
    judged: dict[int, ReportRecord]
    deadline: float
    waiting_donors: set[int]
    waiting_replacers: set[int]
    ready: dict[int, int] = field(default_factory=dict)
    released: set[int] = field(default_factory=set)
    frozen: bool = False

    @property
    def named(self) -> list[int]:
        """Ranks with a role in it, ascending."""
        return sorted(self.decision.donors + self.decision.replacers)


def step_s(report: ReportRecord) -> float:
    """Return a step time that deadlines can be made of: a report may claim anything."""
    step_s = report.step_time_s
    return min(step_s, _STEP_TIME_LIMIT_S) if math.isfinite(step_s) and step_s > 0 else 0.0
