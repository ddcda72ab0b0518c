"""What a member of selective averaging reports about itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from protocols.selective.rounds import CoordinatorStatistics


@dataclass(frozen=True, slots=True)
class SelectiveStatistics:
    """Counts what a member has done so far.

    Attributes:
        iteration: steps taken.
        report_count: metrics sent.
        nonfinite_metric_count: how many of these were NaN or infinite.
        snapshot_count: snapshots taken as a donor.
        replacement_count: rounds applied.
        abandoned: rounds given up as a replacer, by reason.
        declined: roles refused, by reason.
        unapplied_count: averages that were complete when the policy ended, or was told to forget them.
        last_round: the newest round this rank was named in.
        sent_nbytes: bytes streamed as a donor.
        received_nbytes: bytes streamed as a replacer, abandoned rounds included.
        coordinator: on the coordinator's rank what it has decided, else None.
    """

    iteration: int
    report_count: int
    nonfinite_metric_count: int
    snapshot_count: int
    replacement_count: int
    abandoned: Mapping[str, int]
    declined: Mapping[str, int]
    unapplied_count: int
    last_round: int
    sent_nbytes: int
    received_nbytes: int
    coordinator: CoordinatorStatistics | None
