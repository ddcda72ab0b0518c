"""Tells values that are not finite and belong to a model from those of a rank that has diverged.

An attention mask may hold -inf, in a buffer or in a frozen parameter, from the first step to the last. Averaging keeps
it: the mean of equal infinities is that infinity. So the infinities that such entries hold when a policy starts are
known, and everything else that is not finite is unsound: NaN, an infinity in a trained parameter, an infinity that has
come, gone or moved since.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from asyncdist.tensors.flat_state import Entry, FlatBuffers, FlatState, is_finite
from asyncdist.tensors.model_tensors import local_part


class KnownInfinities:
    """Holds the infinities of a model's buffers and frozen parameters, as they are now.

    Args:
        state: of the model.
    """

    def __init__(self, state: FlatState) -> None:
        self._state = state
        self._layout = state.new_buffers(device="meta")
        trained = state.trained()  # a shard does not say so itself
        self._known = {
            entry.names: _infinities(tensor)
            for entry, tensor in self._own()
            if entry.averaged and entry.names[0] not in trained and not is_finite(tensor) and not tensor.isnan().any()
        }

    def unsound_entry(self, buffers: FlatBuffers) -> str | None:
        """Name an averaged entry of a snapshot, or of a mean, with a value that is neither finite nor known."""
        if all(is_finite(tensor) for tensor in buffers.averaged().values()):
            return None  # nearly always, and quicker than entry by entry
        return self._first_unsound(zip(buffers.entries, buffers.views, strict=True))

    def unsound_entry_of_model(self) -> str | None:
        """Name an averaged entry of the model, as it is now, with a value that is neither finite nor known."""
        return self._first_unsound(self._own())

    def _own(self) -> Iterable[tuple[Entry, Tensor]]:
        return zip(self._state.entries, self._state.tensors(self._layout), strict=True)

    def _first_unsound(self, pairs: Iterable[tuple[Entry, Tensor]]) -> str | None:
        for entry, tensor in pairs:
            if not entry.averaged or is_finite(tensor):
                continue
            known = self._known.get(entry.names)
            if known is None or tensor.isnan().any() or not torch.equal(_infinities(tensor), known):
                return entry.names[0]
        return None


def all_finite(values: Any) -> bool:
    """Tell whether all tensors in nested mappings, sequences and sets are finite, such as an optimizer's state.

    Anything that is not a tensor passes. Momentum of a sparse gradient is a sparse tensor: what it stores is looked at.
    """
    if isinstance(values, Tensor):
        values = local_part(values)  # torch would look at all parts of a DTensor, together with the other ranks
        if is_traceable_wrapper_subclass(values):  # as of 8-bit optimizers, which compute little on the whole of it
            return all(all_finite(getattr(values, name)) for name in values.__tensor_flatten__()[0])
        if not (values.is_floating_point() or values.is_complex()) or values.is_meta:
            return True
        return all(map(is_finite, _stored(values)))
    if isinstance(values, Mapping):
        return all(map(all_finite, values.values()))
    return not isinstance(values, (list, tuple, deque, Set)) or all(map(all_finite, values))


def _stored(tensor: Tensor) -> Sequence[Tensor]:
    """Return dense tensors with all that a tensor stores."""
    if tensor.is_nested:
        return torch.unbind(tensor)
    if tensor.layout == torch.strided:
        return [tensor]
    if tensor.layout == torch.sparse_coo:
        return [tensor._values()]
    return [tensor.to_dense() if tensor.is_mkldnn else tensor.values()]


@torch.no_grad()
def _infinities(tensor: Tensor) -> Tensor:
    """Return the infinite values, and zeros in place of the others."""
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    wide = real.detach().to(device="cpu", dtype=torch.float32 if real.itemsize < 4 else real.dtype)
    return torch.where(wide.isinf(), wide, 0.0)
