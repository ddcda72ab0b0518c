"""Divides a model's weights into parts of equal size, and provides the memory in which one part is averaged.

A part contains the same fraction of each tensor, so that all parts have equal sizes. Sums are elementwise, so the
concatenated means of all parts are bitwise equal to the mean of all weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from asyncdist.tensors.flat_state import FlatBuffers, FlatState, accumulate_dtype


class Part(NamedTuple):
    """Part ``number``, from 0, of the ``total`` equal parts of a model's weights."""

    number: int
    total: int

    def of(self, buffers: FlatBuffers) -> FlatBuffers:
        """Return views of this part of each tensor, without the metadata for loading them into a module."""
        tensors = {}
        for dtype, tensor in buffers.tensors.items():
            start, stop = self.bounds(len(tensor))
            tensors[dtype] = tensor[start:stop]
        return FlatBuffers((), tensors, ())

    def bounds(self, size: int) -> tuple[int, int]:
        """Return the start and stop indices of this part in a tensor of ``size`` elements."""
        return size * self.number // self.total, size * (self.number + 1) // self.total


class PartBuffers(NamedTuple):
    """Memory for one part of each donor's weights, and for the mean of this part.

    Attributes:
        given: Memory for the part of each donor's state, in the stored dtypes. All donors share the memory for integer
            and bool tensors.
    """

    mean: FlatBuffers
    given: tuple[FlatBuffers, ...]


class PartPool:
    """Provides the memory in which one part is received and averaged, and reuses it in later rounds."""

    def __init__(self, flat: FlatState) -> None:
        self.sizes = flat.sizes
        self._tensors: dict[tuple[str, torch.dtype], Tensor] = {}
        self.in_use = 0

    @torch.inference_mode(False)  # the tensors are used after the caller's inference mode has ended
    def acquire(self, part: Part, donor_count: int) -> PartBuffers:
        """Return uninitialised buffers for one part of the weights of ``donor_count`` donors."""
        if self.in_use:  # the previous round's mean is still being sent from this memory
            self._tensors = {}
        self.in_use += 1
        sizes = {dtype: stop - start for dtype, size in self.sizes.items() for start, stop in [part.bounds(size)]}
        mean = {dtype: self._take("mean", accumulate_dtype(dtype), size, dtype) for dtype, size in sizes.items()}
        given: list[dict[torch.dtype, Tensor]] = [{} for _ in range(donor_count)]
        for dtype, size in sizes.items():
            is_averaged = dtype.is_floating_point or dtype.is_complex
            memory = self._take("given", dtype, size * (donor_count if is_averaged else 1), dtype)
            for place, tensors in enumerate(given):
                tensors[dtype] = memory[place * size : (place + 1) * size] if is_averaged else memory
        return PartBuffers(FlatBuffers((), mean, ()), tuple(FlatBuffers((), tensors, ()) for tensors in given))

    def release(self, *, is_clean: bool) -> None:
        """Return the buffers of a round to the pool.

        Unless ``is_clean``, chunks may still arrive in their memory, so it is not reused.
        """
        self.in_use -= 1
        if not is_clean:
            self._tensors = {}

    def _take(self, use: str, dtype: torch.dtype, count: int, stored: torch.dtype) -> Tensor:
        found = self._tensors.get((use, stored))
        if found is None or len(found) < count:
            found = self._tensors[use, stored] = torch.empty(count, dtype=dtype, device="cpu")
        return found[:count]


@torch.inference_mode(False)
def new_part(sizes: Mapping[torch.dtype, int]) -> FlatBuffers:
    """Allocate uninitialised memory for one part, with the given number of elements of each dtype."""
    return FlatBuffers((), {dtype: torch.empty(size, dtype=dtype, device="cpu") for dtype, size in sizes.items()}, ())
