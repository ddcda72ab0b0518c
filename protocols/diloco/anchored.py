"""Base class of policies with an *anchor*: common weights from which all ranks train.

Between two rounds, each rank's own weights drift away from the anchor.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence

import torch
from torch import Tensor

from asyncdist.protocols.joining.replicated import ReplicatedPolicy
from asyncdist.tensors.optimizers.weights import kept_mode


class AnchoredPolicy(ReplicatedPolicy):
    """Base class of policies with an anchor: weights common to all ranks, from which each rank trains alone."""

    @contextlib.asynccontextmanager
    async def anchor_weights(self) -> AsyncIterator[None]:
        """Put the anchor into the model for the duration of an ``async with`` block, then restore this rank's weights.

        ::

            async with DiLoCoPolicy(model, optimizer, average_every=100) as policy:
                for batch in data:
                    train_step(model, optimizer, batch)
                    await policy.step()
                async with policy.anchor_weights():
                    held_out_loss = model(torch.ones(4, 2)).square().mean().item()

        Parameters and buffers are restored bit for bit, even after an exception. The optimizer is not changed. Do not
        train the model in the block. A schedule-free optimizer keeps its mode. Do not call its ``eval()`` in the block:
        that would mix the anchor with this rank's own iterate z.

        No messages are sent. The block uses the newest anchor that this rank has merged. With overlap, a quorum or
        asynchronous rounds, another rank may have a newer anchor. One rank may enter the block alone. With
        ``replica_size``, all ranks of a replica must enter it together. Under `fully_shard` the model contains this
        rank's shards of the anchor.

        Raises:
            BusyError: A step, a save, ``world.compute`` or another such block is in progress. In the block, ``step``,
                ``settle`` and :func:`asyncdist.save_population` raise this error.
            ClosedError: The policy is not open, or a rank of the replica has left.
            LocalProtocolError: The policy has no anchor that is equal on all ranks.

        **Cancellation** restores the rank's own weights. If it interrupts an exchange between the ranks of a replica,
        later steps of the replica raise ClosedError.
        """
        self._check_can("anchor_weights()")
        self._check_common()
        self._reshard()
        tensors = self._tensors()
        self._stage = "evaluating"
        try:
            with restored(tensors), kept_mode(self.optimizer):
                try:
                    await self._write_anchor(tensors)
                    yield
                finally:
                    self._reshard()  # a forward pass may have gathered the anchor's parameters
        finally:
            if self._stage == "evaluating":  # the policy may have been left in the block
                self._stage = "open"

    @abc.abstractmethod
    def _tensors(self) -> Sequence[Tensor]:
        """Return the tensors that :meth:`_write_anchor` changes."""

    def _check_common(self) -> None:
        """Raise LocalProtocolError if there is no anchor that is equal on all ranks."""

    @abc.abstractmethod
    async def _write_anchor(self, tensors: Sequence[Tensor]) -> None:
        """Write the anchor into the model, together with the other ranks of the replica."""


@contextlib.contextmanager
def restored(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Restore the tensors' values at the end of the block, from copies in host memory."""
    saved = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, own in zip(tensors, saved, strict=True):
                tensor.copy_(own)
