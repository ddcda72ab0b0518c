"""Describes an applied mean as the result of a step."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from asyncdist.protocols.exchange.flights import Flight
from asyncdist.protocols.exchange.fragment import Fragment, Mean, mean_cosine
from asyncdist.protocols.exchange.replicas.group import Readiness
from asyncdist.protocols.joining.replicas import Replicas
from asyncdist.protocols.step_info import StepInfo


def result_of(
    fragment: Fragment, mean: Mean, ready: Readiness, replicas: Replicas, members: Collection[int]
) -> StepInfo:
    """Return a step's result, with the fields that follow from the applied mean.

    Args:
        ready: Joint report of the ranks of this rank's replica.
        members: First ranks of all replicas that take part; all members if each rank is a replica.
    """
    verdict, cosine = mean.verdict, mean.cosine
    if replicas.size > 1:
        cosine = None
        if ready.has_cosine and ready.norm is not None:
            cosine = mean_cosine(replace(verdict, norms=ready.norms), ready.norm)
    total = sum(verdict.weights)
    donors = tuple(replicas.mates(donor)[0] for donor in verdict.donors)
    return StepInfo(
        averaged_this_iteration=True,
        donors=donors,
        weights=tuple(weight / total for weight in verdict.weights),
        nbytes=fragment.layout.mean_nbytes,
        recovered=ready.trouble,
        wire_nbytes=fragment.layout.nbytes,
        outer_norm=ready.norm,
        cosine=cosine,
        unencoded_nbytes=fragment.layout.unencoded_nbytes,
        version=fragment.version,
        left_out=() if verdict.taker >= 0 else tuple(sorted(set(members) - set(donors))),
    )


def in_round(
    info: StepInfo, flight: Flight, fragment: int, fragment_count: int, iteration: int, *, has_quorum: bool
) -> StepInfo:
    """Return a step's result with the fragment, the number of its round, and the staleness of the contribution."""
    number, staleness = flight.number, 0
    if has_quorum:  # the anchor may have moved before the capture, and again before this step
        number = (info.version - 1) * fragment_count + fragment + 1
        staleness = info.version - 1 - flight.base_version
    return replace(
        info,
        round=number,
        fragment=fragment,
        fragment_count=fragment_count,
        staleness_steps=iteration - flight.captured_at,
        staleness_versions=staleness,
    )
