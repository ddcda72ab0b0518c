"""Keeps the state of one fragment of DiLoCo on one rank: its anchor, outer optimizer and encoding error.

For policies without an anchor, see :mod:`protocols.exchange.fragment`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from asyncdist.protocols.diloco.outer_step import OuterFactory, OuterStep
from asyncdist.protocols.diloco.radial import radial_mean_into
from asyncdist.protocols.exchange.fragment import Fragment, Mean, mean_cosine
from asyncdist.protocols.exchange.layout.copies import Encoder, as_written, gather, norm_of, scatter
from asyncdist.protocols.exchange.layout.wire_layout import Scratch, Slice, WireLayout
from asyncdist.protocols.exchange.messages import Verdict


class FragmentState(Fragment):
    """Keeps a model fragment's anchor, outer optimizer and encoding errors on one rank.

    Without an outer optimizer, there is no anchor.

    Args:
        factory: Factory of the outer optimizer; None to average the weights themselves.
        decay: Decay of the error feedback; None for no error feedback.
        tensors: The model's tensors, from which the anchor is copied.
        scratch: Memory for decoded differences, shared by all fragments of a policy.
        mixing: Share of the rank's own parameters that it keeps when a mean is applied.
        keeps_captured: Whether to keep the captured parameters, so that a late mean can be applied.
        keeps_base: Whether the anchor may move before a late rank has captured its contribution. The difference is then
            measured from the *base*, a copy of the anchor from which the rank has trained.
    """

    _keeps_rest: ClassVar[bool] = False  # whether the anchor lacks a part of the last mean, as with eager outer steps

    def __init__(
        self,
        layout: WireLayout,
        factory: OuterFactory | None,
        decay: float | None,
        tensors: Sequence[Tensor],
        scratch: Scratch,
        *,
        mixing: float = 0.0,
        keeps_captured: bool = False,
        keeps_base: bool = False,
    ) -> None:
        super().__init__(layout)
        self._scratch = scratch
        self._keeps_base = keeps_base
        self._base: list[Tensor] = []  # empty while the rank trains from the newest anchor
        self._is_in_flight = False  # from the contribution until its mean is applied
        self._mixing = mixing
        self._captured = [vector.new_flat() for vector in layout.stepped] if keeps_captured else []
        for vector, captured in zip(layout.stepped, self._captured, strict=bool(self._captured)):
            gather(vector, tensors, captured)  # needed if the mean of a loaded contribution is still missing
        self._outer: OuterStep | None = None
        self._encoder = Encoder(layout, decay, scratch)
        if factory is not None:
            anchors = [vector.new_flat() for vector in layout.stepped]
            for vector, anchor in zip(layout.stepped, anchors, strict=True):
                gather(vector, tensors, anchor)
            self._outer = OuterStep(factory, anchors)

    @torch.no_grad()
    def capture(self, tensors: Sequence[Tensor], encoded: Sequence[Tensor]) -> float:
        """Write this rank's contribution into ``encoded``, one tensor for each vector, and return its L2 norm.

        If the norm is not finite, the contribution must not be used. The encoding errors are then unchanged.
        """
        for vector, captured in zip(self.layout.stepped, self._captured, strict=bool(self._captured)):
            gather(vector, tensors, captured)
        norm = self._encoder.encode(tensors, encoded, self.bases)
        self._base, self._is_in_flight = [], True
        return norm

    def combine(
        self, each: Slice, number: int, parts: Sequence[Tensor], weights: Sequence[float], into: Tensor
    ) -> None:
        """Write the mean of the donors' encoded slices into ``into``.

        Pieces that are whole tensors get the radial mean.
        """
        if number in each.whole:
            self.layout.average(each, number, parts, weights, into, radial_mean_into)
        else:
            self.layout.average(each, number, parts, weights, into)

    @property
    def has_outer_step(self) -> bool:
        """True with an outer optimizer. See :attr:`Fragment.has_outer_step`."""
        return self._outer is not None

    @torch.no_grad()
    def merge(self, verdict: Verdict, encoded: Sequence[Sequence[Tensor]]) -> None:
        """Decode the donors' mean, move the anchor, and keep the other values until they are applied."""
        norm = cosine = None
        self._values = {}
        differences: list[Tensor] = []
        for place, (vector, parts) in enumerate(zip(self.layout.vectors, encoded, strict=bool(encoded))):
            if self._outer is not None and vector.role == "stepped":
                differences += vector.decoded_parts(parts, self._scratch)
            else:
                (self._values[place],) = vector.decoded_parts(parts, Scratch())
        if self._outer is not None and encoded:
            norm = math.hypot(*map(norm_of, differences))
            # mean_cosine() compares the norms of the ranks' differences with the norm of their mean. It cannot be used
            # if values other than these differences were sent, or if they were not combined by a mean.
            is_other = bool(self._encoder.residuals) or self.layout.codec.name == "topk" or not self.layout.is_cut
            cosine = None if is_other else mean_cosine(verdict, norm)
            self._keep_base()
            self._take(differences)
        self.version += 1
        self.mean = Mean(verdict, norm, cosine)

    def _take(self, differences: Sequence[Tensor]) -> None:
        """Move the anchors by their mean differences, which are given in consecutive parts."""
        assert self._outer is not None, "states have no anchor"
        self._outer.step(differences)

    def _keep_base(self) -> None:
        """Copy the anchor, which is about to move, if this rank's next difference is still measured from it."""
        if self._keeps_base and not self._base and not self._is_in_flight:
            self._base = [anchor.clone() for anchor in self.anchors]

    @torch.no_grad()
    def apply(self, tensors: Sequence[Tensor], *, is_late: bool, is_whole: bool) -> None:
        """Write the last mean into the model's tensors. See :meth:`Fragment.apply`.

        Parameters become ``mixing`` * own + (1 - ``mixing``) * new, or in a late step own + (new - captured), which
        keeps the rank's progress since its contribution. New values are the anchor's if there is an anchor, otherwise
        the mean's. Sums are computed in the vector's dtype.
        """
        mixing, keeps_progress = 0.0 if is_whole else self._mixing, is_late and not is_whole
        anchors, all_captured = iter(self.anchors), iter(self._captured)
        for place, vector in enumerate(self.layout.vectors):
            is_stepped = vector.role == "stepped"
            new = next(anchors, None) if is_stepped else None
            captured = next(all_captured, None) if is_stepped else None
            if new is None:
                if place not in self._values:
                    continue  # no donor was finite, so the rank keeps its own values
                new = self._values[place]
            if is_stepped and (mixing or keeps_progress):
                own = torch.empty_like(new)
                gather(vector, tensors, own)
                if keeps_progress and captured is not None:
                    new = own.sub_(captured.sub_(as_written(vector, new, tensors)))
                else:
                    new = own.mul_(mixing).add_(new * (1.0 - mixing))
            scatter(vector, new, tensors)
        self._values = {}
        self._base, self._is_in_flight, self.applied_version = [], False, self.version

    @torch.no_grad()
    def restore(self, tensors: Sequence[Tensor]) -> None:
        """Write the anchor (common weights) into the model's parameters. Do nothing without an outer optimizer."""
        for vector, anchor in zip(self.layout.stepped, self.anchors, strict=bool(self.anchors)):
            scatter(vector, anchor, tensors)

    @torch.no_grad()
    def begin_again(self, tensors: Sequence[Tensor]) -> None:
        """Write the anchor into the model's parameters, and measure the rank's progress from the anchor again."""
        self.restore(tensors)
        self._base = []
        for vector, captured, anchor in zip(self.layout.stepped, self._captured, self.anchors, strict=False):
            captured.copy_(as_written(vector, anchor, tensors))

    @property
    def bases(self) -> tuple[Tensor, ...]:
        """Flat tensors from which the next difference is measured: the base, or the anchor if there is no base."""
        return tuple(self._base) or self.anchors

    @property
    def anchors(self) -> tuple[Tensor, ...]:
        """The anchor as flat tensors. Empty without an outer optimizer."""
        return () if self._outer is None else self._outer.anchors

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of this rank's whole state, including its encoding errors."""
        outer = self._outer
        return {
            **super().state_dict(),
            "names": self.layout.checksum_of_names(),
            "captured": [flat.clone() for flat in self._captured],
            "base": [flat.clone() for flat in self._base],
            "is_in_flight": self._is_in_flight,
            "anchors": [] if outer is None else [anchor.clone() for anchor in outer.anchors],
            "outer": None if outer is None else outer.state_dict(),
            "residuals": [each.clone() for each in self._encoder.residuals],
        }

    def shared_state(self) -> dict[str, Any]:
        """Return the last mean, the anchor and the outer optimizer's state, for a rank that has missed rounds."""
        assert self._outer is not None, "members can be behind only with an outer optimizer"
        anchors = [anchor.clone() for anchor in self._outer.anchors]
        return {**super().shared_state(), "anchors": anchors, "outer": self._outer.state_dict()}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        """Load another rank's :meth:`shared_state`. The model's buffers are unchanged."""
        assert self._outer is not None, "members can be behind only with an outer optimizer"
        self._keep_base()
        super().load_shared_state(state)
        for anchor, given in zip(self.anchors, state["anchors"], strict=True):
            anchor.copy_(given)
        self._outer.load_state_dict(state["outer"])

    def forget_own(self) -> None:
        """Set the encoding errors to zero, because a state copied from another rank contains that rank's errors."""
        for each in self._encoder.residuals:
            each.zero_()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a result of :meth:`state_dict` of a fragment with the same layout and options."""
        self.layout.check_names(state)
        if ("rest" in state) != self._keeps_rest:
            raise ValueError(
                f"eager must be {not self._keeps_rest}, as in the run that saved the state, got {self._keeps_rest}"
            )
        anchors, residuals = list(state["anchors"]), self._encoder.residuals
        own_anchors = self.anchors
        shapes = [anchor.shape for anchor in anchors], [each.shape for each in state["residuals"]]
        if shapes != ([anchor.shape for anchor in own_anchors], [each.shape for each in residuals]):
            raise ValueError(
                "the state's anchors and residuals must have the shapes of this policy's; use the model, "
                "outer_optimizer, fragments and error_feedback of the run that saved it, with error_feedback or "
                "merge='radial' also its wire, and with a lossy wire its merge"
            )
        super().load_state_dict(state)
        self._base = [flat.clone() for flat in state["base"]]
        self._is_in_flight = state["is_in_flight"]
        # Either list is empty if the option ``late`` has changed since the state was saved.
        for flat, saved in zip(self._captured, state["captured"], strict=False):
            flat.copy_(saved)
        for anchor, saved in zip(own_anchors, anchors, strict=True):
            anchor.copy_(saved)
        for each, saved in zip(residuals, state["residuals"], strict=True):
            each.copy_(saved)
        if self._outer is not None:
            self._outer.load_state_dict(state["outer"])
