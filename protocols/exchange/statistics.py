"""Defines the counts of one member of an exchange-based policy, and the results of steps that apply a mean."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from asyncdist.protocols.exchange.counts import AverageCounts
from asyncdist.protocols.exchange.fragment import Fragment, Mean, mean_cosine
from asyncdist.protocols.exchange.replicas.group import Readiness
from asyncdist.protocols.joining.replica_layout import Replicas
from asyncdist.protocols.journal import format_table
from asyncdist.protocols.step_info import StepInfo
from asyncdist.wording import plural, size_in_words

#: Reason why a round leaves the weights unchanged.
_NO_DONOR: Final = "no rank had a usable contribution"


@dataclass(frozen=True, slots=True)
class ExchangeStatistics:
    """Counts one member's steps, contributions and averages. The mappings are copies.

    Attributes:
        iteration: Number of steps, including steps before a resume.
        average_count: Number of averages applied since the policy was started or resumed. Each fragment's average is
            counted separately.
        waited_s: Total seconds that steps have spent waiting for averages.
        sent_nbytes: Total encoded size in bytes of this member's contributions.
        title: Name of the policy and of this rank.
        unencoded_nbytes: Total size in bytes of the same contributions with ``wire="float32"``.
        contribution_count: Number of this member's contributions, including contributions in flight.
        waited_max_s: Longest wait for an average in seconds.
        versions: Number of averages of each fragment, by fragment.
        donated: Number of applied averages that contain a rank's contribution, by rank.
        left_out: Number of applied averages without a member's contribution, by rank.
        outer_norm: L2 norm of the last mean difference, or None without an outer optimizer and before the first
            average.
        cosine: Mean cosine between pairs of ranks' differences in the last average, or None if unknown.
    """

    iteration: int
    average_count: int
    waited_s: float
    sent_nbytes: int
    title: str = ""
    unencoded_nbytes: int = 0
    contribution_count: int = 0
    waited_max_s: float = 0.0
    versions: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))
    donated: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))
    left_out: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))
    outer_norm: float | None = None
    cosine: float | None = None

    def __str__(self) -> str:
        """Return a table of the counts."""
        rows: list[tuple[str, object]] = [
            ("iteration", self.iteration),
            ("averages applied", self.average_count),
        ]
        if len(self.versions) > 1:
            rows.append(("averages by fragment", _by_number(self.versions)))
        rows.append(("waited for averages", f"{self.waited_s:.2f} s, at most {self.waited_max_s:.2f} s"))
        contributed = f"{plural(self.contribution_count, 'time')}, {size_in_words(self.sent_nbytes)}"
        if self.sent_nbytes != self.unencoded_nbytes:
            contributed += f" ({size_in_words(self.unencoded_nbytes)} as float32)"
        rows.append(("contributed", contributed))
        if self.donated:
            rows.append(("averages with rank", _by_number(self.donated)))
        if self.left_out:
            rows.append(("averages without rank", _by_number(self.left_out)))
        if self.outer_norm is not None:
            rows.append(("last outer norm", f"{self.outer_norm:.4g}"))
        if self.cosine is not None:
            rows.append(("last cosine", f"{self.cosine:.3f}"))
        return format_table(self.title, rows)


def statistics_of(counts: AverageCounts, iteration: int, title: str) -> ExchangeStatistics:
    """Return a member's statistics from its journal's counts."""
    return ExchangeStatistics(
        iteration=iteration,
        average_count=counts.applied_count,
        waited_s=counts.waited_s,
        sent_nbytes=counts.wire_nbytes,
        title=title,
        unencoded_nbytes=counts.unencoded_nbytes,
        contribution_count=counts.contribution_count,
        waited_max_s=counts.waited_max_s,
        versions=dict(counts.versions),
        donated=dict(counts.donated),
        left_out=dict(counts.left_out),
        outer_norm=counts.latest.outer_norm,
        cosine=counts.latest.cosine,
    )


def _by_number(counts: Mapping[int, int]) -> str:
    return ", ".join(f"{number}: {count:,}" for number, count in sorted(counts.items()))


def result_of(
    fragment: Fragment, mean: Mean, ready: Readiness, replicas: Replicas, members: Collection[int]
) -> StepInfo:
    """Return the result of a step that has applied a mean, without the fields that the policy alone knows.

    Args:
        ready: Joint report of the ranks of this rank's replica.
        members: First ranks of all replicas that take part. If each rank is a replica, all members.
    """
    verdict, cosine = mean.verdict, mean.cosine
    if replicas.size > 1:
        cosine = None
        if ready.has_cosine and ready.norm is not None:
            cosine = mean_cosine(replace(verdict, norms=ready.norms), ready.norm)
    total = sum(verdict.weights)
    donors = tuple(replicas.replica_ranks(donor)[0] for donor in verdict.donors)
    has_changed = bool(donors or fragment.has_outer_step or (ready.nonfinite and fragment.anchors))
    return StepInfo(
        averaged_this_iteration=has_changed,
        abandoned="" if has_changed else _NO_DONOR,
        donors=donors,
        weights=tuple(weight / total for weight in verdict.weights),
        nbytes=fragment.layout.mean_nbytes if donors else 0,
        recovered=ready.nonfinite,
        wire_nbytes=fragment.layout.nbytes,
        outer_norm=ready.norm,
        cosine=cosine,
        unencoded_nbytes=fragment.layout.unencoded_nbytes,
        version=fragment.version,
        left_out=() if verdict.receiver >= 0 else tuple(sorted(set(members) - set(donors))),
    )
