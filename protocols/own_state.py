"""Checks whether a rank's state may be sent to other ranks, and replaces its weights with an average.

A replaced rank keeps a share of its own weights (``momentum``) and its optimizer's state only if they are finite. NaN
moments in Adam, for example, would make the new weights NaN in the next step.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Iterator

import numpy as np
import torch

from asyncdist.protocols.options import AveragingOptions, ModelBuilder
from asyncdist.tensors.flat_state import FlatBuffers, FlatState, first_difference
from asyncdist.tensors.infinities import KnownInfinities, all_finite
from asyncdist.tensors.optimizers.reset import reset_optimizer_state
from asyncdist.tensors.optimizers.weights import OptimizerWeights

logger = logging.getLogger("protocols.own_state")


class OwnState:
    """Checks and replaces the state of one rank's model and optimizer.

    Raises:
        ValueError: ``model_builder`` returns a model with a different layout; the message names the first difference.
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
            with _unchanged_random_numbers():
                self._build(self._model_builder)

    def begin(self) -> None:
        """Record, at the policy's start, which infinite values belong to the model, such as in masks."""
        self._known = KnownInfinities(self._flat)

    def can_be_sent(self, snapshot: FlatBuffers) -> bool:
        """Return whether a snapshot may be sent to other ranks, i.e. has no unexpected NaN or infinity.

        The first unsound snapshot is logged with the name of an entry.
        """
        self._weights.look()
        name = self._infinities.unsound_entry(snapshot)
        if name is not None and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%r contains NaN or infinite values, so this rank is not a donor until all of its values are finite. "
                "(Infinities that a buffer or a frozen parameter contained at the policy's start are allowed.)",
                name,
            )
        return name is None

    def unsound_entry(self, mean: FlatBuffers) -> str | None:
        """Return the name of an entry of ``mean`` that has an unexpected NaN or infinity, or None."""
        return self._infinities.unsound_entry(mean)

    def describe_nonfinite(self) -> str:
        """Describe non-finite values in the state that this rank would keep with an average, or return ""."""
        keeps_state = not self._resets_optimizer and bool(self._weights.optimizer.state)
        if (self._momentum or keeps_state) and (name := self._infinities.unsound_entry_of_model()) is not None:
            return f"{name!r} was not finite"
        if keeps_state and not all_finite(dict(self._weights.optimizer.state)):
            return "the optimizer's state was not finite"
        return ""

    def adopt_average(self, average: FlatBuffers, nonfinite: str | None = None, momentum: float | None = None) -> str:
        """Replace the weights with an average.

        Args:
            nonfinite: Result of :meth:`describe_nonfinite` on a rank of this replica; None to call it now.
            momentum: Share of the own weights; None for the value of the option.

        Returns:
            Description of the non-finite state, or "". If the state was not finite, momentum is ignored and the
            optimizer's state is reset.
        """
        nonfinite = self.describe_nonfinite() if nonfinite is None else nonfinite
        kept = self._momentum if momentum is None else momentum
        self.load(average, momentum=0.0 if nonfinite else kept)
        if self._resets_optimizer or nonfinite:
            reset_optimizer_state(self._weights.optimizer)
        return nonfinite

    def load(self, buffers: FlatBuffers, *, momentum: float = 0.0, has_new_state: bool = False) -> None:
        """Write weights into the model, and update the copies of weights in the optimizer's state.

        If ``has_new_state``, the optimizer's state was already replaced, and belongs to the weights.
        """
        with self._weights.following(has_new_state=has_new_state):
            self._flat.load(buffers, momentum=momentum)

    def take_fresh(self) -> None:
        """Replace the weights with those of a new model from ``model_builder``, and clear the optimizer's state."""
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
            raise ValueError(
                f"model_builder must return a model with the same layout as the policy's model (here), but {difference}"
            )
        return fresh


@contextlib.contextmanager
def _unchanged_random_numbers() -> Iterator[None]:
    """Restore the states of all generators of random numbers when the block ends."""
    # All GPUs are listed, because the model need not be on the current one.
    devices = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)  # type: ignore[no-untyped-call]
    pythons, numpys = random.getstate(), np.random.get_state(legacy=False)
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(pythons)
        np.random.set_state(numpys)
