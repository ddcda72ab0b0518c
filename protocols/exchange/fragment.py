"""Keeps one member's state of a fragment, a separately averaged part of the model.

The state is the number of completed rounds, and the last mean until it is applied. A :class:`Fragment` averages the
weights themselves. Subclasses send other values or apply the mean differently. Only :meth:`Fragment.apply`, called
inside ``step``, changes the model's weights.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from asyncdist.protocols.exchange.layout.copies import Encoder, scatter
from asyncdist.protocols.exchange.layout.wire_layout import Slice, WireLayout
from asyncdist.protocols.exchange.messages import Verdict
from asyncdist.protocols.exchange.schedule import PendingRound, PendingRounds
from asyncdist.tensors.byte_views import byte_view

#: Names of the entries of a policy's saved state that belong to the exchange.
ENTRIES: Final = (
    *("fragments", "captured", "owed", "schedule", "in_flight"),
    *("replica_size", "replica_index", "contributions"),
)


@dataclass(frozen=True, slots=True)
class Mean:
    """Describes the last mean that this member has received for a fragment, a separately averaged part of the model.

    Attributes:
        norm: L2 norm of the mean difference from the anchor (reference weights), or None if weights are averaged.
        cosine: Mean cosine between pairs of donors' differences, or None if unknown, for example with top-k.
    """

    verdict: Verdict
    norm: float | None = None
    cosine: float | None = None


class Fragment:
    """Keeps the state of one part of the model. This base class averages the weights themselves.

    Attributes:
        version: Number of rounds whose mean this member has received.
        applied_version: Version of the last applied mean.
        mean: Description of the last received mean, or None before the first.
        is_frequent: Whether to reuse the memory of a round in later rounds.
    """

    is_frequent = True

    def __init__(self, layout: WireLayout) -> None:
        self.layout = layout
        self.version = self.applied_version = 0
        self.mean: Mean | None = None
        self._values: dict[int, Tensor] = {}  # by vector: values of the last mean, until they are applied

    @property
    def holds_mean(self) -> bool:
        """True if :meth:`apply` still needs the memory of the last mean."""
        return bool(self._values)

    @property
    def measured_entries(self) -> frozenset[int]:
        """Indices of the model's entries whose elements are all included in the norm of a contribution."""
        return self.layout.stepped_entries

    @property
    def has_outer_step(self) -> bool:
        """True if :meth:`merge` moves reference weights (an anchor) with an outer optimizer.

        It then accepts the mean of parameters in slices, and needs it only during the call. :meth:`apply` writes the
        anchor even after a round without donors.
        """
        return False

    @property
    def anchors(self) -> tuple[Tensor, ...]:
        """Reference weights as flat tensors, equal on all members at the start. Empty without an anchor."""
        return ()

    @property
    def bases(self) -> tuple[Tensor, ...]:
        """Reference weights from which the next contribution is measured, as flat tensors. Empty without an anchor."""
        return self.anchors

    @torch.no_grad()
    def capture(self, tensors: Sequence[Tensor], encoded: Sequence[Tensor]) -> float:
        """Write this member's contribution into ``encoded``, one tensor per vector, and return its L2 norm.

        If the norm is not finite, the contribution is not used.
        """
        return Encoder(self.layout).encode(tensors, encoded)

    def takes(self, number: int) -> bool:
        """Return whether this member uses the mean of averaging round ``number``."""
        del number
        return True

    def advance(self, donor_count: int) -> None:
        """Move the reference weights (anchor) after a contribution, before its mean is known. By default, do nothing.

        Args:
            donor_count: Number of ranks that contribute to the round, or 0 if this rank's contribution is not used.
        """

    def combine(
        self, each: Slice, number: int, parts: Sequence[Tensor], weights: Sequence[float], into: Tensor
    ) -> None:
        """Write the weighted mean of the donors' encoded slices into ``into``.

        Subclasses may combine the slices differently.
        """
        self.layout.average(each, number, parts, weights, into)

    @torch.no_grad()
    def merge(self, verdict: Verdict, encoded: Sequence[Sequence[Tensor]]) -> None:
        """Decode the mean of all donors' contributions, and keep it until it is applied.

        Args:
            encoded: Consecutive parts of each vector's mean: the whole vector or, if :attr:`has_outer_step`, the slices
                of a stepped vector.
        """
        self._values = {
            place: self.layout.vectors[place].decoded(each, of_mean=True) for place, (each,) in enumerate(encoded)
        }
        self.version += 1
        self.mean = Mean(verdict)

    @torch.no_grad()
    def apply(self, tensors: Sequence[Tensor], *, is_late: bool, is_whole: bool) -> None:
        """Write the last received mean into the model's tensors.

        Args:
            is_late: Whether the rank has trained since the step in which the mean was due.
            is_whole: Whether the mean replaces all of this rank's weights, for example because they are not finite.
        """
        del is_late, is_whole
        for place, values in self._values.items():
            scatter(self.layout.vectors[place], values, tensors)
        self._note_applied()

    def _note_applied(self) -> None:
        """Drop the values of the mean that was applied, and record its version."""
        self._values, self.applied_version = {}, self.version

    def restore(self, tensors: Sequence[Tensor]) -> None:
        """Write the reference weights (anchor) into the model's parameters. Do nothing if the fragment has none."""

    def begin_again(self, tensors: Sequence[Tensor]) -> None:
        """Write the reference weights (anchor) into the model, so that training continues from them."""
        self.restore(tensors)

    def forget_own(self) -> None:
        """Drop state that concerns only the rank whose whole state this rank has just loaded."""

    def state_dict(self) -> dict[str, Any]:
        """Return the fragment's state with cloned tensors. A mean that has not been applied yet is omitted."""
        return {"version": self.version, "applied_version": self.applied_version}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a result of :meth:`state_dict` of a fragment with the same layout and options.

        Raises:
            ValueError: The state is from a fragment with another layout or other options.
        """
        self.version, self.mean, self._values = state["version"], None, {}
        self.applied_version = state["applied_version"]

    def shared_state(self) -> dict[str, Any]:
        """Return the state for a member that has missed means. Equal on all members with equal versions."""
        mean = None if self.mean is None else {**self.pending(), "values": {}}
        return {"version": self.version, "mean": mean}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        """Load another member's :meth:`shared_state`."""
        self.version, self._values = state["version"], {}
        self.mean = Mean(Verdict(1, (), (), ()))
        if state["mean"] is not None:
            self.restore_pending(state["mean"])

    def count_lost(self, version: int) -> None:
        """Count the first ``version`` rounds as completed, because all members that had their results are lost."""
        self.version, self._values = version, {}
        self.mean = Mean(Verdict(1, (), (), ()))

    def pending(self) -> dict[str, Any]:
        """Return a copy of the mean that was received but not applied."""
        assert self.mean is not None, "there is no mean"
        verdict = self.mean.verdict
        return {
            "values": {place: values.clone() for place, values in self._values.items()},
            "donors": verdict.donors,
            "weights": verdict.weights,
            "norms": verdict.norms,
            "scores": verdict.scores,
            "late": verdict.late,
            "norm": self.mean.norm,
            "cosine": self.mean.cosine,
        }

    def restore_pending(self, state: Mapping[str, Any]) -> None:
        """Restore an unapplied mean from a result of :meth:`pending`."""
        self._values = {place: values.clone() for place, values in state["values"].items()}
        names = "donors", "weights", "norms", "scores", "late"
        donors, weights, norms, scores, late = (tuple(state[name]) for name in names)
        verdict = Verdict(1, donors, weights, norms, scores=tuple(map(tuple, scores)), late=late)
        self.mean = Mean(verdict, state["norm"], state["cosine"])


def state_of(
    fragments: Sequence[Fragment],
    pending_rounds: PendingRounds,
    in_flight: Mapping[int, PendingRound],
    arrived: Collection[int],
) -> dict[str, Any]:
    """Return the state of all fragments and of the rounds whose means are not applied, with cloned tensors.

    Args:
        in_flight: Rounds to which this member has contributed but whose means it has not applied, by fragment.
        arrived: Fragments whose means were received but not applied.
    """
    return {
        "fragments": [fragment.state_dict() for fragment in fragments],
        **pending_rounds.state(),
        "in_flight": [
            (fragment, *pending_round, fragments[fragment].pending() if fragment in arrived else None)
            for fragment, pending_round in in_flight.items()
        ],
    }


def restore(state: Mapping[str, Any], fragments: Sequence[Fragment], pending_rounds: PendingRounds) -> None:
    """Load the fragments and their unapplied rounds from a result of :func:`state_of`."""
    pending_rounds.in_flight.clear()  # a restarted rank may have loaded its own checkpoint first
    for fragment, saved in zip(fragments, state["fragments"], strict=False):
        fragment.load_state_dict(saved)
    for place, *pending_round, pending in state["in_flight"]:
        pending_rounds.in_flight[place] = PendingRound(*pending_round)
        if pending is not None:
            fragments[place].restore_pending(pending)


def checksum_of_anchors(fragments: Iterable[Fragment]) -> int:
    """Return a checksum of the reference weights (anchors) of all fragments."""
    checksum = 0
    for anchor in (anchor for fragment in fragments for anchor in fragment.anchors):
        checksum = zlib.crc32(byte_view(anchor), checksum)
    return checksum


def mean_cosine(verdict: Verdict, norm: float) -> float | None:
    """Return the mean cosine between pairs of donors' contributions, from their norms and the norm of their mean.

    None if there are fewer than two donors, if all contributions are zero, or if a norm is too large.

    If v is the sum of all weighted contributions, |v|^2 is the sum of the products of all pairs of contributions.
    """
    lengths = [weight * own for weight, own in zip(verdict.weights, verdict.norms, strict=True)]
    longest = max(map(abs, lengths), default=0.0)
    if len(lengths) < 2 or not longest:
        return None
    whole, lengths = sum(verdict.weights) * norm / longest, [length / longest for length in lengths]
    squares = math.fsum(length * length for length in lengths)
    products = math.fsum(lengths) ** 2 - squares
    cosine = (whole * whole - squares) / products if products else math.nan
    return cosine if math.isfinite(cosine) else None
