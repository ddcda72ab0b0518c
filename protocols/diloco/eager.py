"""Eager outer steps: an anchor moves by the rank's own new difference and the other ranks' previous differences.

With k ranks, rank i's anchor takes the outer step of round t with the gradient (Kale et al., 2502.12996)

    D_i(t) / k + [D(t - 1) - D_i(t - 1) / k]

No rank waits for the mean D(t), which is in flight until round t + 1. Each rank's share of a mean is applied once, but
a rank applies its own share one round before the other ranks' shares. The anchors therefore differ between the ranks.
:class:`AnchorMean` makes them equal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from asyncdist.protocols.diloco.fragment_state import FragmentState
from asyncdist.protocols.diloco.outer_step import OuterFactory
from asyncdist.protocols.exchange.fragment import Fragment
from asyncdist.protocols.exchange.layout.copies import gather, norm_of, scatter, subtract, values_of, write
from asyncdist.protocols.exchange.layout.wire_layout import Scratch, WireLayout
from asyncdist.protocols.exchange.messages import Verdict


class EagerFragment(FragmentState):
    """Keeps the state of a fragment whose anchor moves before the round's mean arrives (eager outer steps).

    The *rest* is the part of the previous round's mean that the anchor does not contain yet, D(t - 1) - D_i(t - 1) / k.
    Until the mean arrives, the rest is -D_i(t - 1) / k. A rank that joins takes both the anchor and the rest from the
    leader.

    Args:
        factory, decay, tensors, scratch, mixing: See :class:`FragmentState`.
    """

    _keeps_rest: ClassVar[bool] = True

    def __init__(
        self,
        layout: WireLayout,
        factory: OuterFactory,
        decay: float | None,
        tensors: Sequence[Tensor],
        scratch: Scratch,
        *,
        mixing: float = 0.0,
    ) -> None:
        super().__init__(layout, factory, decay, tensors, scratch, mixing=mixing)
        self._rest = [vector.new_flat() for vector in layout.stepped]
        self._own: list[Tensor] = []  # this rank's difference; empty after the outer step

    @property
    def holds_mean(self) -> bool:
        """False, because :meth:`merge` copies the values that :meth:`apply` needs."""
        return False

    @torch.no_grad()
    def capture(self, tensors: Sequence[Tensor], encoded: Sequence[Tensor]) -> float:
        """Write this member's contribution into ``encoded``, and store its difference for :meth:`advance`."""
        self._own = [vector.new_flat() for vector in self.layout.stepped]
        for vector, anchor, own in zip(self.layout.stepped, self.anchors, self._own, strict=True):
            subtract(vector, anchor, tensors, own)
        return super().capture(tensors, encoded)

    @torch.no_grad()
    def advance(self, donor_count: int) -> None:
        """Move the anchor by an outer step with this rank's share of the new mean and the rest of the previous mean.

        Args:
            donor_count: Number of ranks that contribute to the new mean; 0 if this rank's contribution is not used. The
                gradient is then the rest alone, and no step is taken if the rest is zero.
        """
        if donor_count:
            for rest, own in zip(self._rest, self._own, strict=True):
                rest.add_(own.div_(donor_count))
        if donor_count or any(rest.any() for rest in self._rest):
            super()._take(self._rest)
        for place, rest in enumerate(self._rest):
            if donor_count:
                torch.neg(self._own[place], out=rest)
            else:
                rest.zero_()
        self._own = []

    def _take(self, differences: Sequence[Tensor]) -> None:
        parts = iter(differences)
        for rest in self._rest:
            place = 0
            while place < len(rest):
                part = next(parts)
                rest[place : place + len(part)] += part
                place += len(part)

    @torch.no_grad()
    def merge(self, verdict: Verdict, encoded: Sequence[Sequence[Tensor]]) -> None:
        """Add the mean of all contributions to the part that the anchor does not contain yet.

        Keep the mean of the buffers until it is applied.
        """
        super().merge(verdict, encoded)
        self._values = {place: values.clone() for place, values in self._values.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the fragment's state, with the part of the last mean that the anchor does not contain yet."""
        return {**super().state_dict(), "rest": [rest.clone() for rest in self._rest]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a result of :meth:`state_dict` of an eager fragment with the same layout and options."""
        super().load_state_dict(state)
        for rest, saved in zip(self._rest, state["rest"], strict=True):
            rest.copy_(saved)


class AnchorMean(Fragment):
    """Replaces one model fragment's anchors (common weights) by their mean over the ranks, in a separate round.

    Each rank shifts its parameters by the change of its anchor, so it keeps its own progress. Floating buffers are
    averaged too. The outer optimizer's state is unchanged, as is the part of the last mean that the anchor does not
    contain.

    Attributes:
        number: Number of the exchange's round whose mean this rank expects; 0 if none.
    """

    is_frequent = False

    def __init__(self, fragment: EagerFragment) -> None:
        super().__init__(fragment.layout.exact())
        self._fragment = fragment
        self.number = 0

    @torch.no_grad()
    def capture(self, tensors: Sequence[Tensor], encoded: Sequence[Tensor]) -> float:
        """Write this member's anchor and buffers into ``encoded``, and return the L2 norm of the anchor."""
        anchors = iter(zip(self._fragment.layout.stepped, self._fragment.anchors, strict=True))
        norm = 0.0
        for vector, flat in zip(self.layout.vectors, encoded, strict=True):
            if vector.role != "stepped":
                gather(vector, tensors, flat)
                continue
            source, anchor = next(anchors)
            for (_, first, end), (_, begin, stop) in zip(vector.places, source.places, strict=True):
                flat[first:end].copy_(anchor[begin:stop])
            norm = math.hypot(norm, norm_of(flat))
        return norm

    def takes(self, number: int) -> bool:
        """Return whether this rank expects the mean of round ``number``.

        A rank that continues while other ranks end ignores their mean, which may arrive late.
        """
        return number == self.number

    @torch.no_grad()
    def apply(self, tensors: Sequence[Tensor], *, is_late: bool = False, is_whole: bool = False) -> None:
        """Replace the anchor by the mean, and shift the parameters by the change. Without donors, do nothing."""
        del is_late, is_whole
        anchors = iter(zip(self._fragment.layout.stepped, self._fragment.anchors, strict=True))
        for place, values in self._values.items():
            vector = self.layout.vectors[place]
            if vector.role != "stepped":
                scatter(vector, values, tensors)
                continue
            source, anchor = next(anchors)
            for (index, first, end), (_, begin, stop) in zip(vector.places, source.places, strict=True):
                own, new = anchor[begin:stop], values[first:end]
                current = values_of(vector, tensors[index])
                # Both anchors are rounded like the parameter, so that a rank without progress gets the rounded mean.
                progress = current.to(own) - own.to(current).to(own)
                write(vector, new + progress, tensors[index])
                own.copy_(new)
        self._values = {}
        self.number = 0
