"""Describes an applied mean as the result of a step."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from asyncdist.protocols.exchange.fragment import Fragment, Mean, mean_cosine
from asyncdist.protocols.exchange.replicas.group import Readiness
from asyncdist.protocols.joining.replicas import Replicas
from asyncdist.protocols.step_info import StepInfo


def result_of(
    fragment: Fragment, mean: Mean, ready: Readiness, replicas: Replicas, members: Collection[int]
) -> StepInfo:
    """Return the part of a step's result that follows from the mean that it applies.

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
        staleness_versions=0,  # a fragment is captured again only after its mean was applied
        left_out=() if verdict.taker >= 0 else tuple(sorted(set(members) - set(donors))),
    )
