"""Copies a model's tensors into one flat tensor and back, piece by piece.

Each piece is copied just before it is sent and just after it was reduced, while it is in the CPU's cache.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors  # This function creates 200 views in half the time of a loop.

from asyncdist.host_memory.shared_memory import SharedMemory


class Bucket:
    """Copies tensors to and from one flat tensor.

    Args:
        flat: 1-D tensor of the tensors' dtype or a wider dtype.
        pairs: Pairs of a tensor, in any memory layout and on any device, and its view of ``flat``. There are no gaps
            between the views.
        memory: Memory that the host's ranks share and that begins with ``flat``, or None if ``flat`` is not shared.
    """

    def __init__(
        self, flat: Tensor, pairs: Sequence[tuple[Tensor, Tensor]], memory: SharedMemory | None = None
    ) -> None:
        self.flat = flat
        self.memory = memory
        self._sizes = [view.numel() for _, view in pairs]
        if not all(self._sizes):  # empty tensors need no copy
            pairs = [pair for pair, size in zip(pairs, self._sizes, strict=True) if size]
            self._sizes = [size for size in self._sizes if size]
        self._tensors = [tensor for tensor, _ in pairs]
        self._views = [view for _, view in pairs]
        # Autograd may return conjugated gradients of complex parameters, and _foreach_copy_ rejects conjugated tensors.
        self._are_lazy = any(tensor.is_conj() or tensor.is_neg() for tensor in self._tensors)
        self._starts = [0, *itertools.accumulate(self._sizes)]
        self._copied_in_count = self._copied_out_count = 0
        self._is_rolled_back = False
        self._rest: Tensor | None = None

    @torch.no_grad()
    def copy_in(self, start: int, end: int) -> None:
        """Copy the elements from ``start`` to ``end`` into the flat tensor, except those already copied."""
        start = max(start, self._copied_in_count)
        if start >= end:
            return
        low, high = self._whole(start, end)
        if low < high:
            self._copy(self._views[low:high], self._tensors[low:high])
        for index, first, last in self._cut(start, end):
            tensor, view = self._tensors[index], self._views[index]
            if tensor.is_contiguous():
                view.view(-1)[first:last].copy_(tensor.view(-1)[first:last])
            elif first == 0:  # the whole tensor is copied with its first piece
                view.copy_(tensor)
        self._copied_in_count = end

    @torch.no_grad()
    def copy_out(self, start: int, values: Tensor) -> None:
        """Write 1-D ``values`` into the tensors, starting at offset ``start``, without changing the flat tensor.

        Offsets must be passed in ascending order. A non-contiguous tensor is written when its last values arrive.
        """
        if self._is_rolled_back:
            return
        end = start + len(values)
        low, high = self._whole(start, end)
        if low < high:
            inside = values[self._starts[low] - start : self._starts[high] - start]
            shaped = _unflatten_dense_tensors(inside, self._views[low:high])  # type: ignore[no-untyped-call]
            self._copy(self._tensors[low:high], shaped)
        for index, first, last in self._cut(start, end):
            at = self._starts[index] - start
            self._store_part(self._tensors[index], first, values[at + first : at + last])
        self._copied_out_count = end

    @torch.no_grad()
    def rollback(self) -> None:
        """Restore the tensors' values from before the first :meth:`copy_out`. Later calls of both methods do nothing.

        Elements that are not in the flat tensor yet are first copied into it, because the other ranks still need them.
        """
        if self._is_rolled_back:
            return
        self.copy_in(self._copied_in_count, len(self.flat))
        self._is_rolled_back = True
        touched = bisect.bisect_left(self._starts, self._copied_out_count)  # number of tensors that have been written
        if touched:
            self._copy(self._tensors[:touched], self._views[:touched])

    def _copy(self, into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        if self._are_lazy:
            for tensor, value in zip(into, values, strict=True):
                tensor.copy_(value)
        else:
            torch._foreach_copy_(list(into), list(values))

    def _store_part(self, tensor: Tensor, first: int, part: Tensor) -> None:
        if tensor.is_contiguous():
            tensor.view(-1)[first : first + len(part)].copy_(part)
            return
        if first == 0:
            self._rest = torch.empty(tensor.numel(), dtype=part.dtype, device="cpu")
        assert self._rest is not None, "parts come in order"
        self._rest[first : first + len(part)] = part
        if first + len(part) == tensor.numel():
            tensor.copy_(self._rest.view(tensor.shape))
            self._rest = None

    def _whole(self, start: int, end: int) -> tuple[int, int]:
        """Return the half-open range of the indices of tensors that lie entirely between two offsets."""
        return bisect.bisect_left(self._starts, start), bisect.bisect_right(self._starts, end) - 1

    def _cut(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield (index, first element, end element) for each of at most two tensors that lie partly in the range."""
        low, high = self._whole(start, end)
        if self._starts[low] > start:
            first = self._starts[low - 1]
            yield low - 1, start - first, min(end, self._starts[low]) - first
        if low <= high < len(self._tensors) and self._starts[high] < end:
            yield high, 0, end - self._starts[high]
