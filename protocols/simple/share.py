"""Selects a share of a model's parameters for each round of an exchange: the values at random indices.

The exchange handles a share like a model with one tensor of chosen values per dtype. Floating buffers are exchanged
whole, and integers are copied from the first donor.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from asyncdist.protocols.exchange.layout.wire_layout import Vector, WireLayout
from asyncdist.protocols.simple.rule import Rule
from asyncdist.tensors.flat_state import Entry


class Share:
    """Reads and writes a model's values at the indices that a rule chooses.

    Args:
        whole, entries: Layout and entries of the whole model.
        rule: Rule that chooses the indices.

    Attributes:
        entries: Entries to exchange: the chosen values of each dtype, and all entries that are not parameters.
        parameters: Names of the entries that contain chosen values.
    """

    def __init__(self, whole: WireLayout, entries: Sequence[Entry], rule: Rule) -> None:
        self._rule = rule
        self._kept: dict[Vector, tuple[int, Tensor]] = {}  # by vector: number and indices of the last round
        self._vectors = whole.stepped
        self._others = [index for each in whole.vectors if each.role != "stepped" for index, *_ in each.places]
        self._bounds = [
            torch.tensor([*(first for _, first, _ in each.places), each.count], device="cpu") for each in whole.stepped
        ]
        names = [f"the chosen values of {each.dtype}" for each in whole.stepped]
        shapes = [(len(self._chosen(1, each)),) for each in whole.stepped]
        self.parameters = set(names)
        self.entries = [
            *(
                Entry((name,), shape, vector.dtype, averaged=True, offset=0)
                for name, shape, vector in zip(names, shapes, whole.stepped, strict=True)
            ),
            *(entries[index] for index in self._others),
        ]

    def _chosen(self, round: int, vector: Vector) -> Tensor:
        kept = self._kept.get(vector)
        if kept is not None and kept[0] == round:  # drawn when the contribution was made
            return kept[1]
        chosen = self._rule.chosen(round, vector.count)
        assert chosen is not None, "a rule that exchanges all values needs no share"
        self._kept[vector] = round, chosen
        return chosen

    def take(self, tensors: Sequence[Tensor], round: int) -> list[Tensor]:
        """Return the tensors to exchange: copies of the chosen values, and the model's buffers."""
        picked = []
        for vector, bounds in zip(self._vectors, self._bounds, strict=True):
            chosen = self._chosen(round, vector)
            values = torch.empty(len(chosen), dtype=vector.dtype, device="cpu")
            for (index, first, _), begin, end in _parts(vector, bounds, chosen):
                flat = _flat(tensors[index])
                values[begin:end] = flat[(chosen[begin:end] - first).to(flat.device)].to(values)
            picked.append(values)
        return [*picked, *(tensors[index] for index in self._others)]

    def put(self, picked: Sequence[Tensor], tensors: Sequence[Tensor], round: int) -> None:
        """Write exchanged values into the model's tensors, rounding each value once to the tensor's dtype."""
        for vector, bounds, values in zip(self._vectors, self._bounds, picked, strict=False):
            chosen = self._chosen(round, vector)
            for (index, first, _), begin, end in _parts(vector, bounds, chosen):
                flat = _flat(tensors[index])
                flat[(chosen[begin:end] - first).to(flat.device)] = values[begin:end].to(flat)
                if flat.untyped_storage().data_ptr() != tensors[index].untyped_storage().data_ptr():
                    tensors[index].copy_(_shaped(flat, tensors[index]))


def _parts(vector: Vector, bounds: Tensor, chosen: Tensor) -> list[tuple[tuple[int, int, int], int, int]]:
    """Return the place in ``vector`` of each tensor with chosen values, and the range of its values in ``chosen``."""
    cuts = torch.searchsorted(chosen, bounds).tolist()
    parts = zip(vector.places, pairwise(cuts), strict=True)
    return [(place, begin, end) for place, (begin, end) in parts if begin < end]


def _flat(tensor: Tensor) -> Tensor:
    """Return a tensor's real values in one dimension, as a view if the tensor is contiguous."""
    real = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    return real.reshape(-1)


def _shaped(flat: Tensor, tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return torch.view_as_complex(flat.view(*tensor.shape, 2))
    return flat.view(tensor.shape)
