"""Computes a worker's contributions: differences between the anchor, from which it trains, and its weights.

A *block* is memory with one tensor for each vector of the model. The leader sends its anchor as a block, which becomes
the worker's anchor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, TypeAlias

import torch
from torch import Tensor

from asyncdist import RemoteProtocolError
from asyncdist.protocols.exchange.layout.copies import Encoder, as_written, gather, scatter
from asyncdist.protocols.exchange.layout.wire_layout import WireLayout
from asyncdist.protocols.joining.state_transfer import state_nbytes_max
from asyncdist.tensors.byte_views import new_memory
from asyncdist.tensors.codecs import Codec, find_codec
from asyncdist.tensors.flat_state import Entry

#: Memory for all vectors of a model, and a view of each vector.
Block: TypeAlias = tuple[Tensor, list[Tensor]]


class Layouts:
    """Describes how contributions and anchors (common weights) are laid out in memory.

    Attributes:
        wire: Layout of contributions, with encoded vectors.
        exact: Layout of anchors, with the same vectors unencoded.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        parameters: set[str],
        owner_count: int,
        codec: Codec,
        divisible: Set[str] | None = None,
    ) -> None:
        chosen = range(len(entries))
        self.wire = WireLayout(entries, chosen, parameters, owner_count, codec)
        self.exact = WireLayout(entries, chosen, parameters, owner_count, find_codec("float32"), divisible)

    def new_block(self) -> Block:
        """Allocate memory for an anchor (common weights)."""
        memory = new_memory(self.exact.memory_nbytes())
        return memory, self.exact.encoded_in(memory)

    def new_contribution(self) -> Block:
        """Allocate memory for an encoded contribution."""
        memory = new_memory(self.wire.memory_nbytes())
        return memory, self.wire.encoded_in(memory)

    def new_outer(self, nbytes: int, source: int) -> Tensor:
        """Allocate memory for the outer optimizer's state that rank ``source`` offers.

        Raises:
            RemoteProtocolError: ``nbytes`` is not a possible size of the state.
        """
        limit = state_nbytes_max(self.exact.nbytes)
        if not 0 < nbytes <= limit:
            raise RemoteProtocolError(
                f"the outer optimizer's state of rank {source} must have from 1 to {limit} bytes, got {nbytes}",
                rank=source,
            )
        return new_memory(nbytes)

    def loaded_anchor(self, values: Sequence[Tensor]) -> Block:
        """Copy values of an anchor into a new block. Raise ValueError if they have other shapes."""
        block = self.new_block()
        copy_all(values, block[1])
        return block

    def stepped(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Return the parameter vectors among ``values``, which the outer optimizer moves."""
        return [value for vector, value in zip(self.exact.vectors, values, strict=True) if vector.role == "stepped"]

    def block_of(self, tensors: Sequence[Tensor]) -> Block:
        """Copy the model's tensors into a new block."""
        block = self.new_block()
        for vector, value in zip(self.exact.vectors, block[1], strict=True):
            gather(vector, tensors, value)
        return block


class Captures:
    """Computes a worker's contributions, and writes anchors into its model.

    Args:
        decay: Decay of the error feedback; None without error feedback.
    """

    def __init__(self, layouts: Layouts, decay: float | None) -> None:
        self._layouts = layouts
        self._captured = [vector.new_flat() for vector in layouts.exact.stepped]
        self._encoder = Encoder(layouts.wire, decay)

    @torch.no_grad()
    def capture(self, base: Block, tensors: Sequence[Tensor], encoded: Sequence[Tensor]) -> float:
        """Write this worker's contribution into ``encoded``, one tensor for each vector, and return its L2 norm.

        If the norm is not finite, the contribution must not be used. The encoding errors are then unchanged.

        Args:
            base: The anchor from which the differences are measured.
        """
        for vector, captured in zip(self._layouts.exact.stepped, self._captured, strict=True):
            gather(vector, tensors, captured)
        return self._encoder.encode(tensors, encoded, self._layouts.stepped(base[1]))

    @torch.no_grad()
    def apply(self, anchor: Block, tensors: Sequence[Tensor], *, keeps_progress: bool) -> None:
        """Write an anchor (common weights) into the model.

        Args:
            keeps_progress: Whether parameters become own + (new - captured), to keep the progress since the
                contribution was captured.
        """
        captured = iter(self._captured)
        for vector, new in zip(self._layouts.exact.vectors, anchor[1], strict=True):
            if vector.role == "stepped" and keeps_progress:
                own = torch.empty_like(new)
                gather(vector, tensors, own)
                scatter(vector, own.sub_(next(captured).sub_(as_written(vector, new, tensors))), tensors)
            else:
                scatter(vector, new, tensors)

    @torch.no_grad()
    def restore(self, anchor: Block, tensors: Sequence[Tensor]) -> None:
        """Write only the parameters of an anchor (common weights) into the model."""
        for vector, value in zip(self._layouts.exact.vectors, anchor[1], strict=True):
            if vector.role == "stepped":
                scatter(vector, value, tensors)

    def clear_residuals(self) -> None:
        """Set the encoding errors to zero, because the copied state contains another worker's errors."""
        for each in self._encoder.residuals:
            each.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the parameters of the last contribution, and of the encoding errors."""
        return {
            "names": self._layouts.exact.checksum_of_names(),
            "captured": [flat.clone() for flat in self._captured],
            "residuals": [each.clone() for each in self._encoder.residuals],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a result of :meth:`state_dict` of a worker with the same layout and options."""
        self._layouts.exact.check_names(state)
        copy_all(state["captured"], self._captured)
        copy_all(state["residuals"], self._encoder.residuals)


def copy_all(saved: Sequence[Tensor], own: Sequence[Tensor]) -> None:
    """Copy each tensor of ``saved`` into the tensor of ``own`` at the same index.

    Raises:
        ValueError: The tensors have unexpected shapes.
    """
    if [each.shape for each in saved] != [each.shape for each in own]:
        raise ValueError(
            "the state's anchor and residuals must have the shapes of this policy's; use the model, wire and "
            "error_feedback of the run that saved it"
        )
    for tensor, value in zip(own, saved, strict=True):
        tensor.copy_(value)
