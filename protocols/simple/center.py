"""Keeps the center of EASGD, to which all ranks are pulled, and which is pulled to all ranks.

Each rank computes the center from the round's mean, so that the center is equal on all ranks and is never sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from asyncdist.protocols.exchange.layout.copies import gather, scatter
from asyncdist.protocols.exchange.layout.wire_layout import WireLayout
from asyncdist.protocols.exchange.messages import Verdict
from asyncdist.protocols.simple.policy import RuleFragment
from asyncdist.protocols.simple.rule import Rule


class CenterFragment(RuleFragment):
    """Pulls the model's parameters to a center instead of to the mean.

    Args:
        tensors: The model's tensors, from which the first center is copied.
        pull: Fraction of the distance between a rank and the center by which each moves towards the other.
    """

    def __init__(self, layout: WireLayout, rule: Rule, tensors: Sequence[Tensor], pull: float) -> None:
        super().__init__(layout, rule, None)
        self._pull = pull
        self._centers = {place: each.new_flat() for place, each in enumerate(layout.vectors) if each.role == "stepped"}
        for place, center in self._centers.items():
            gather(layout.vectors[place], tensors, center)

    @property
    def anchors(self) -> tuple[Tensor, ...]:
        """Center to which all ranks are pulled, as one flat tensor per dtype."""
        return tuple(self._centers.values())

    @torch.no_grad()
    def merge(self, verdict: Verdict, encoded: Sequence[Sequence[Tensor]]) -> None:
        """Move the center towards the mean of the contributing ranks. This rank will be pulled to the old center."""
        super().merge(verdict, encoded)
        rate = self._pull * len(verdict.donors)
        for place in self._centers.keys() & self._values.keys():
            center, mean = self._centers[place], self._values[place]
            self._values[place] = center
            self._centers[place] = (mean - center).mul_(rate).add_(center)

    @torch.no_grad()
    def restore(self, tensors: Sequence[Tensor]) -> None:
        """Write the center into the model's parameters."""
        for place, center in self._centers.items():
            scatter(self.layout.vectors[place], center, tensors)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the fragment's state, including the center."""
        names = self.layout.checksum_of_names()
        return {**super().state_dict(), "names": names, "center": [each.clone() for each in self.anchors]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a result of :meth:`state_dict`, including the center."""
        self.layout.check_names(state)
        super().load_state_dict(state)
        self._load_center(state)

    def shared_state(self) -> dict[str, Any]:
        """Return a copy of the state that is equal on all ranks, including the center."""
        return {**super().shared_state(), "center": [each.clone() for each in self.anchors]}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        """Load the :meth:`shared_state` of another rank."""
        super().load_shared_state(state)
        self._load_center(state)

    @torch.no_grad()
    def _load_center(self, state: Mapping[str, Any]) -> None:
        if [each.shape for each in state["center"]] != [each.shape for each in self.anchors]:
            raise ValueError("the state's center must have the sizes of this model's parameters")
        for center, saved in zip(self.anchors, state["center"], strict=True):
            center.copy_(saved)
