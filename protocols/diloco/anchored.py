"""Base class of policies with an *anchor*, common weights from which all ranks train.

Between two rounds each rank's own weights have drifted away from the anchor. :meth:`AnchoredPolicy.anchor_weights` puts
the anchor into the model for a while, so that it can be validated or exported.
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
    """Base class of policies that have an anchor: common weights, such as those from which DiLoCo's ranks train."""

    @contextlib.asynccontextmanager
    async def anchor_weights(self) -> AsyncIterator[None]:
        """Put the anchor into the model in an ``async with`` block, and this rank's own weights back at its end.

        ::

            async with DiLoCoPolicy(model, optimizer, average_every=100) as policy:
                for batch in data:
                    train_step(model, optimizer, batch)
                    await policy.step()
                async with policy.anchor_weights():
                    held_out_loss = model(torch.ones(4, 2)).square().mean().item()

        At the end of the block, even after an exception, parameters and buffers have the same bits as before, and
        training continues as if the block had not been there. The optimizer is not changed. Do not train the model in
        the block. A schedule-free optimizer has the same mode after the block as before it. Its ``eval()`` in the block
        would mix the anchor with this rank's own iterate z.

        The block sends and receives nothing. It shows the newest anchor that this rank has: for each fragment, the
        anchor after its last merged round. With overlap, a quorum or asynchronous rounds, another rank may have a newer
        anchor. One rank may enter the block alone. With ``replica_size``, all ranks of a replica enter it together.
        Under `fully_shard` the model contains this rank's shards of the anchor.

        Raises:
            BusyError: A step, a save, ``world.compute`` or another such block is in progress. In the block, ``step``,
                ``settle`` and :func:`asyncdist.save_population` raise this error.
            ClosedError: The call is outside the policy's ``async with`` block, or a rank of the replica has left.
            LocalProtocolError: The policy has no anchor that is equal on all ranks.

        **Cancellation**: the model has its own weights again. If the ranks of a replica were exchanging their parts,
        later steps of the replica raise ClosedError.
        """
        self._check_can("anchor_weights()")
        self._check_common()
        self._reshard()
        tensors = self._tensors()
        self._stage = "lent"
        try:
            with restored(tensors), kept_mode(self.optimizer):
                try:
                    await self._write_anchor(tensors)
                    yield
                finally:
                    self._reshard()  # a forward pass has gathered parameters of the anchor
        finally:
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
    """Restore the tensors at the end, from copies in host memory."""
    saved = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, own in zip(tensors, saved, strict=True):
                tensor.copy_(own)
