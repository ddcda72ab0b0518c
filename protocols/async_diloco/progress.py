"""Counts one rank's training steps and tokens between two contributions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

from asyncdist.protocols.async_diloco.arrivals import ArrivalWeighting, weight_of
from asyncdist.protocols.async_diloco.messages import Arrived
from asyncdist.protocols.step_info import Contributed


@dataclass(slots=True)
class Progress:
    """Counts one rank's training steps and tokens since its last contribution.

    Attributes:
        wanted: Number of steps after which the next contribution is made.
        captured_at: Iteration of the last contribution.
        is_waiting: Whether the rank waits for an anchor that contains its last contribution.
        reported: Report on the last contribution; None before the first.
        contribution_count: Number of contributions that this process has made.
        postponed_count: Number of steps in which a contribution was due while the last one was unanswered.
    """

    wanted: int
    steps: int = 0
    tokens: float = 0.0
    captured_at: int = 0
    is_waiting: bool = False
    reported: Arrived | None = None
    contribution_count: int = 0
    postponed_count: int = 0

    @property
    def is_due(self) -> bool:
        """True if the rank has made enough steps for its next contribution."""
        return self.steps >= self.wanted

    @property
    def was_sound(self) -> bool:
        """True if the last contribution was finite, so that the leader has used it."""
        return self.reported is not None and math.isfinite(self.reported.norm)

    def note_captured(self, report: Arrived | None, iteration: int) -> None:
        """Record that a contribution was made, and restart the counts of steps and tokens."""
        self.reported, self.is_waiting, self.captured_at = report, True, iteration
        self.restart()
        self.contribution_count += 1

    def restart(self) -> None:
        """Restart the counts of steps and tokens, because the progress is contributed or lost."""
        self.steps, self.tokens = 0, 0.0

    def contributed(self, number: int, weights: ArrivalWeighting, nbytes: int, unencoded_nbytes: int) -> Contributed:
        """Return the user's event for the last contribution, which counts in round ``number``."""
        own = self.reported
        assert own is not None, "an anchor is applied after a contribution"
        weight = weight_of(own.tokens, own.steps, weights)
        return Contributed(number, 0, self.captured_at, own.base_version, weight, own.norm, nbytes, unencoded_nbytes)

    def state(self) -> dict[str, Any]:
        """Return the counts and the report on the last contribution as a dict for checkpoints."""
        counts = self.steps, self.wanted, self.tokens, self.captured_at, self.is_waiting
        return {"counts": counts, "reported": None if self.reported is None else astuple(self.reported)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue with a saved :meth:`state`."""
        self.steps, self.wanted, self.tokens, self.captured_at, self.is_waiting = state["counts"]
        if state["reported"] is not None:
            self.reported = Arrived(*state["reported"])
