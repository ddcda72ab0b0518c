"""Counts one rank's progress in an asynchronous DiLoCo policy, and computes its statistics and step results."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

from asyncdist.protocols.async_diloco.arrivals import ArrivalWeighting, weight_of
from asyncdist.protocols.async_diloco.messages import Applied, Arrived
from asyncdist.protocols.async_diloco.server import Server
from asyncdist.protocols.journal import Journal, format_table
from asyncdist.protocols.step_info import Contributed, StepInfo
from asyncdist.wording import size_in_words


@dataclass(slots=True)
class Progress:
    """Counts one rank's training steps and tokens since its last contribution.

    Attributes:
        wanted: Number of steps after which the next contribution is made.
        captured_at: Iteration of the last contribution.
        is_waiting: Whether the rank is waiting for an anchor that contains its last contribution.
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
        """True if the rank has taken enough steps for its next contribution."""
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


@dataclass(frozen=True, slots=True)
class AsyncDiLoCoStatistics:
    """Counts one rank's steps and contributions.

    Attributes:
        version: Version of the anchor (common weights) from which this rank trains.
        average_count: Number of anchors that this rank has applied.
        postponed_count: Number of steps in which a contribution was due while the last one was unanswered.
        waited_s: Seconds that steps have spent waiting for anchors and applying them.
        sent_nbytes: Total encoded size in bytes of this rank's contributions.
        applied_count: As the leader, number of contributions applied to the anchor.
        mean_staleness: As the leader, mean staleness, in versions, of the applied contributions.
        mean_grace_s: As the leader, mean seconds per version spent waiting for contributions after the quorum.
        lost_outer_state_count: Number of times that this rank became the leader with an outer optimizer's state older
            than the anchor.
        merge_count: As the server of an island, number of merges of the global anchor.
        lost_progress_count: Number of times that this rank became the server of its island without the island's newest
            state, so progress since the last merge was not contributed.
        global_count: As the global server, number of applied contributions from islands.
        global_version: Version of the newest global anchor that this rank has received; 0 without islands.
    """

    iteration: int
    version: int
    contribution_count: int
    average_count: int
    postponed_count: int
    waited_s: float
    sent_nbytes: int
    applied_count: int
    mean_staleness: float
    mean_grace_s: float
    lost_outer_state_count: int
    merge_count: int = 0
    lost_progress_count: int = 0
    global_count: int = 0
    global_version: int = 0
    title: str = ""

    def __str__(self) -> str:
        """Return a table of the counts."""
        rows: list[tuple[str, object]] = [
            ("iteration", self.iteration),
            ("version", self.version),
            ("contributions", self.contribution_count),
            ("anchors applied", self.average_count),
            ("time spent on anchors", f"{self.waited_s:.2f} s"),
            ("contributed", size_in_words(self.sent_nbytes)),
        ]
        if self.applied_count:
            rows += [
                ("applied as leader", self.applied_count),
                ("mean staleness", f"{self.mean_staleness:.2f} versions"),
            ]
        if self.mean_grace_s:
            rows.append(("mean grace period", f"{self.mean_grace_s:.2f} s"))
        if self.lost_outer_state_count:
            rows.append(("outer states lost", self.lost_outer_state_count))
        if self.merge_count:
            rows += [("merges", self.merge_count), ("global version", self.global_version)]
        if self.global_count:
            rows.append(("applied as global server", self.global_count))
        if self.lost_progress_count:
            rows.append(("progress of an island lost", self.lost_progress_count))
        return format_table(self.title, rows)


def statistics_of(
    journal: Journal, progress: Progress, server: Server | None, iteration: int, version: int
) -> AsyncDiLoCoStatistics:
    """Return a rank's statistics. ``server`` is None if the rank does not lead."""
    counts = journal.averages
    count, staleness, losses, grace_s = 0, 0, 0, 0.0
    if server is not None:
        count, staleness, losses = server.applied_count, server.staleness_sum, server.lost_outer_state_count
        grace_s = server.grace_sum_s / max(1, server.version_count)
    return AsyncDiLoCoStatistics(
        iteration=iteration,
        version=version,
        contribution_count=progress.contribution_count,
        average_count=counts.applied_count,
        postponed_count=progress.postponed_count,
        waited_s=counts.waited_s,
        sent_nbytes=counts.wire_nbytes,
        applied_count=count,
        mean_staleness=staleness / max(1, count),
        mean_grace_s=grace_s,
        lost_outer_state_count=losses,
        title=journal.title(),
    )


def result_of(report: Applied) -> StepInfo:
    """Return the result of a step that applies an anchor, with the fields that the leader's report defines."""
    total = sum(report.weights)
    return StepInfo(
        averaged_this_iteration=True,
        round=report.version,
        donors=report.donors,
        weights=tuple(weight / total for weight in report.weights),
        fragment=0,
        outer_norm=None if math.isnan(report.norm) else report.norm,
        cosine=None if math.isnan(report.cosine) else report.cosine,
        fragment_count=1,
        version=report.version,
        staleness_versions=report.staleness,
        grace_s=report.grace_s,
    )
