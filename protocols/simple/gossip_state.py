"""Keeps the state of gossip on one rank: its mass for push-sum, or the anchor and momentum of its outer step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asyncdist.protocols.exchange.layout.copies import as_written, gather, norm_of
from asyncdist.protocols.exchange.layout.wire_layout import WireLayout
from asyncdist.protocols.simple.policy import RuleFragment
from asyncdist.protocols.simple.rule import Rule


@dataclass(frozen=True, slots=True)
class OuterStep:
    """Options of a rank's outer step towards its partners' mean."""

    lr: float
    momentum: float
    nesterov: bool


class GossipFragment(RuleFragment):
    """Keeps gossip's state for the whole model: a mass for push-sum, or the anchor and momentum of an outer step.

    Args:
        tensors: The model's tensors, from which the first anchor is copied.
        outer: Outer step; None for push-sum.

    Attributes:
        mass: This rank's push-sum weight w; 1 without push-sum.
    """

    def __init__(self, layout: WireLayout, rule: Rule, tensors: Sequence[Tensor], outer: OuterStep | None) -> None:
        super().__init__(layout, rule, None)
        self._outer = outer
        self.mass = 1.0
        self._anchors: dict[int, Tensor] = {}  # by index of the vector: parameters after the last round
        self._momenta: dict[int, Tensor] = {}  # by index of the vector; with Nesterov, the last contribution
        for place, vector in enumerate(layout.vectors):
            if vector.role == "stepped":
                self._anchors[place] = vector.new_flat()
                gather(vector, tensors, self._anchors[place])
                if outer is not None:
                    first = self._anchors[place] if outer.nesterov else vector.new_flat()
                    self._momenta[place] = first.clone()

    @torch.no_grad()
    def capture(self, tensors: Sequence[Tensor], encoded: Sequence[Tensor]) -> float:
        """Write this member's contribution into ``encoded``, and return its L2 norm."""
        norm = 0.0
        for place, (vector, into) in enumerate(zip(self.layout.vectors, encoded, strict=True)):
            self._gather(place, tensors, into)
            if vector.role == "stepped":
                norm = math.hypot(norm, norm_of(into))
        return norm

    def _gather(self, place: int, tensors: Sequence[Tensor], into: Tensor) -> None:
        """Write this rank's contribution of one vector: anchor + factor * (weights - anchor).

        The weights are compared with the anchor in their own dtype, from which they were trained.

        With push-sum, the contribution is x / w, which counts with the weight w (the mass). The factor 1 / w makes
        training move x by as much as the weights.
        """
        vector, anchor = self.layout.vectors[place], self._anchors.get(place)
        gather(vector, tensors, into)
        if anchor is None:
            return
        start = as_written(vector, anchor, tensors)
        if start is not anchor:
            into.add_(anchor - start)
        if self._outer is None:
            if self.mass != 1.0:
                into.sub_(anchor).div_(self.mass).add_(anchor)
        elif self._outer.nesterov and self._outer.lr != 1.0:
            into.sub_(anchor).mul_(self._outer.lr).add_(anchor)

    @torch.no_grad()
    def apply(self, tensors: Sequence[Tensor], *, is_late: bool, is_whole: bool) -> None:
        """Move the anchors to or towards the partners' mean, and write the anchors into the model."""
        if self._values and self.mean is not None and self._outer is None:
            self.mass = sum(self.mean.verdict.weights)
        for place, mean in self._values.items():
            if place in self._anchors:
                self._values[place] = self._moved(place, mean, tensors, is_whole)
        super().apply(tensors, is_late=is_late, is_whole=is_whole)

    def _moved(self, place: int, mean: Tensor, tensors: Sequence[Tensor], is_whole: bool) -> Tensor:
        anchor, outer = self._anchors[place], self._outer
        if outer is None or is_whole:
            anchor.copy_(mean)
            if outer is not None:
                self._momenta[place].copy_(mean) if outer.nesterov else self._momenta[place].zero_()
            return anchor
        momentum = self._momenta[place]
        if outer.nesterov:
            sent = torch.empty_like(mean)
            self._gather(place, tensors, sent)
            anchor.copy_(mean).add_((sent - momentum).mul_(outer.momentum))
            momentum.copy_(sent)
        else:
            momentum.mul_(outer.momentum).add_((mean - anchor).mul_(outer.lr))
            anchor.add_(momentum)
        return anchor

    def forget_own(self) -> None:
        """Reset the mass to 1 after loading another rank's state."""
        self.mass = 1.0

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state, without a mean that is not applied yet."""
        kept = {
            "names": self.layout.checksum_of_names(),
            "anchors": {place: each.clone() for place, each in self._anchors.items()},
            "momenta": {place: each.clone() for place, each in self._momenta.items()},
        }
        return {**super().state_dict(), "mass": self.mass, "nesterov": self._is_nesterov, **kept}

    @property
    def _is_nesterov(self) -> bool:
        return self._outer is not None and self._outer.nesterov

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a :meth:`state_dict` of the same layout and options.

        Raises:
            ValueError: The state belongs to a policy with another outer step, or to push-sum.
        """
        self.layout.check_names(state)
        super().load_state_dict(state)
        if state["nesterov"] != self._is_nesterov:  # with Nesterov, the saved momenta are contributions
            raise ValueError(
                f"the state must have been saved by a policy with nesterov={self._is_nesterov}, got the opposite"
            )
        for name, kept in (("anchors", self._anchors), ("momenta", self._momenta)):
            saved = state.get(name, {})
            if {place: each.shape for place, each in saved.items()} != {
                place: each.shape for place, each in kept.items()
            }:
                raise ValueError(
                    "the state must have been saved by a policy with the same outer_lr, outer_momentum and push_sum"
                )
            for place, each in saved.items():
                kept[place].copy_(each)
        self.mass = state["mass"]
