"""Distinguishes infinities that belong to a model from non-finite values of a rank that has diverged.

Buffers and frozen parameters, such as attention masks, may contain -inf permanently. The infinities that they contain
when a policy starts are called *known*. NaNs, infinities in trained parameters, and any later change to the infinities
in buffers and frozen parameters are called *unsound*.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from asyncdist.tensors.flat_state import Entry, FlatBuffers, FlatState, is_finite
from asyncdist.tensors.model_tensors import local_part
from asyncdist.tensors.optimizers.wrapped import wrapped_optimizers


class KnownInfinities:
    """Records the infinities in a model's buffers and frozen parameters, to detect new non-finite values later."""

    def __init__(self, state: FlatState) -> None:
        self._state = state
        trained = state.trained()  # names of trained entries, because a shard's own requires_grad is False
        self._known = {
            entry.names: _infinities(tensor)
            for entry, tensor in self._own()
            if entry.averaged and entry.names[0] not in trained and not is_finite(tensor) and not tensor.isnan().any()
        }

    def unsound_entry(self, buffers: FlatBuffers) -> str | None:
        """Return the name of the first averaged entry in ``buffers`` with a NaN or an unexpected infinity, or None."""
        if all(is_finite(tensor) for tensor in buffers.averaged().values()):
            return None  # testing one flat tensor per dtype is faster than testing each entry
        return self._first_unsound(zip(buffers.entries, buffers.views, strict=True))

    def unsound_entry_of_model(self, skipped: Collection[int] = ()) -> str | None:
        """Return the name of the model's first averaged entry with a NaN or an unexpected infinity, or None.

        The entries with the indices ``skipped`` are not checked.
        """
        return self._first_unsound(pair for index, pair in enumerate(self._own()) if index not in skipped)

    def without(self, names: Collection[str]) -> set[str]:
        """Return the given names, except names of entries that contained infinities when the policy started."""
        return set(names).difference(*self._known)

    def _own(self) -> Iterable[tuple[Entry, Tensor]]:
        return zip(self._state.entries, self._state.own_tensors(), strict=True)

    def _first_unsound(self, pairs: Iterable[tuple[Entry, Tensor]]) -> str | None:
        for entry, tensor in pairs:
            if not entry.averaged or is_finite(tensor):
                continue
            known = self._known.get(entry.names)
            if known is None or tensor.isnan().any() or not torch.equal(_infinities(tensor), known):
                return entry.names[0]
        return None


def describe_nonfinite(known: KnownInfinities | None, optimizer: torch.optim.Optimizer | None) -> str:
    """Describe the part of a model or optimizer that has unexpectedly become non-finite. Return "" if there is none.

    Args:
        known: The model and its known infinities, or None to skip the model.
        optimizer: The optimizer whose state is checked, together with the optimizers that it wraps, or None to skip it.
    """
    name = None if known is None else known.unsound_entry_of_model()
    if name is not None:
        return f"{name!r} was not finite"
    optimizers = () if optimizer is None else wrapped_optimizers(optimizer)
    if not all(all_finite(dict(each.state)) for each in optimizers):
        return "the optimizer's state was not finite"
    return ""


def all_finite(values: Any) -> bool:
    """Return whether all tensors in nested mappings, sequences and sets, such as an optimizer's state, are finite."""
    if isinstance(values, Tensor):
        values = local_part(values)  # with a DTensor, torch would communicate with the other ranks
        # The states of 8-bit optimizers are such wrapper tensors, which support few operations.
        if is_traceable_wrapper_subclass(values):
            return all(all_finite(getattr(values, name)) for name in values.__tensor_flatten__()[0])
        if not (values.is_floating_point() or values.is_complex()) or values.is_meta:
            return True
        return all(map(is_finite, _stored(values)))
    if isinstance(values, Mapping):
        return all(map(all_finite, values.values()))
    return not isinstance(values, (list, tuple, deque, Set)) or all(map(all_finite, values))


def _stored(tensor: Tensor) -> Sequence[Tensor]:
    """Return dense tensors that together contain all values stored in ``tensor``."""
    if tensor.is_nested:
        return torch.unbind(tensor)
    if tensor.layout == torch.strided:
        return [tensor]
    if tensor.layout == torch.sparse_coo:
        return [tensor._values()]
    return [tensor.to_dense() if tensor.is_mkldnn else tensor.values()]


@torch.no_grad()
def _infinities(tensor: Tensor) -> Tensor:
    """Return a copy on the CPU in which all values except infinities are zero."""
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    wide = real.detach().to(device="cpu", dtype=torch.float32 if real.itemsize < 4 else real.dtype)
    return torch.where(wide.isinf(), wide, 0.0)
