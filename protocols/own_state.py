"""Decides what of a rank's own state is given to others, and what is kept when an average replaces it.

A rank that takes an average keeps a part of its weights (``momentum``) and its optimizer's state, if they are finite:
Adam's moments that have become NaN would spoil every average in the next step.
"""

from __future__ import annotations

import logging

import torch

from asyncdist.protocols.options import AveragingOptions, ModelBuilder
from asyncdist.tensors.flat_state import FlatBuffers, FlatState, first_difference
from asyncdist.tensors.infinities import KnownInfinities, all_finite
from asyncdist.tensors.optimizers.reset import reset_optimizer_state
from asyncdist.tensors.optimizers.weights import OptimizerWeights

logger = logging.getLogger("protocols.own_state")


class OwnState:
    """Holds one rank's model and optimizer, and replaces their state.

    Args:
        flat: the model's state.
        weights: the model's optimizer, with the weights that it keeps.
        options: how weights are replaced: ``momentum``, ``resets_optimizer``, and ``model_builder`` for fresh weights.

    Raises:
        ValueError: ``model_builder`` makes a model of another layout; the first difference is named.
    """

    def __init__(self, flat: FlatState, weights: OptimizerWeights, options: AveragingOptions) -> None:
        self._flat = flat
        self._weights = weights
        self._momentum = float(options.momentum)
        self._resets_optimizer = options.resets_optimizer
        self._model_builder = options.model_builder if options.makes_fresh_weights else None
        self._known: KnownInfinities | None = None
        self._has_warned = False
        if self._model_builder is not None:
            devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
            with torch.random.fork_rng(devices):  # training draws what it would draw without this look
                self._build(self._model_builder)

    def begin(self) -> None:
        """Remember which infinities belong to the model; the policy starts."""
        self._known = KnownInfinities(self._flat)

    def may_be_given(self, snapshot: FlatBuffers) -> bool:
        """Tell whether others may average this snapshot. The first time that they may not, warn and name the entry."""
        self._weights.look()
        name = self._infinities.unsound_entry(snapshot)
        if name is not None and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%r holds values that are not finite: this rank gives its weights to no other while that is so. "
                "(Infinities that a buffer or a frozen parameter holds from the policy's start on are no obstacle.)",
                name,
            )
        return name is None

    def unsound_entry(self, mean: FlatBuffers) -> str | None:
        """Name an entry of a mean that holds what is neither finite nor known here."""
        return self._infinities.unsound_entry(mean)

    def trouble(self) -> str:
        """Say what of this rank's own is not finite, if some of it is to be kept; "" if nothing is."""
        keeps_state = not self._resets_optimizer and bool(self._weights.optimizer.state)
        if (self._momentum or keeps_state) and (name := self._infinities.unsound_entry_of_model()) is not None:
            return f"{name!r} was not finite"
        if keeps_state and not all_finite(dict(self._weights.optimizer.state)):
            return "the optimizer's state was not finite"
        return ""

    def take(self, average: FlatBuffers, trouble: str | None = None) -> str:
        """Put an average in place of the weights.

        Args:
            average: it.
            trouble: what :meth:`trouble` has said, of this rank or of another one that holds a part of the model; None
                to look now.

        Returns:
            Which part of this rank's own state was not finite. Then neither a part of the weights nor the optimizer's
            state was kept, whatever the options say. "" if all was finite.
        """
        trouble = self.trouble() if trouble is None else trouble
        self.load(average, momentum=0.0 if trouble else self._momentum)
        if self._resets_optimizer or trouble:
            reset_optimizer_state(self._weights.optimizer)
        return trouble

    def load(self, buffers: FlatBuffers, *, momentum: float = 0.0) -> None:
        """Write a state into the model; the weights in the optimizer follow. The rest of its state stays."""
        with self._weights.following():
            self._flat.load(buffers, momentum=momentum)

    def take_fresh(self) -> None:
        """Put what ``model_builder`` makes in place of the weights, and clear the optimizer's state."""
        assert self._model_builder is not None, "reset_weights without model_builder was refused at the start"
        fresh = self._build(self._model_builder)
        buffers = fresh.new_buffers()
        fresh.snapshot(buffers)
        self.load(buffers)
        reset_optimizer_state(self._weights.optimizer)

    @property
    def _infinities(self) -> KnownInfinities:
        assert self._known is not None, "a policy that has not started"
        return self._known

    def _build(self, model_builder: ModelBuilder) -> FlatState:
        built = model_builder()
        model = built[0] if isinstance(built, tuple) else built
        fresh = FlatState(model, trained_only=self._flat.trained_only)
        difference = first_difference(self._flat.fingerprint, fresh.fingerprint)
        if difference is not None:
            raise ValueError(f"model_builder made another model than the policy's (here), {difference}")
        return fresh
