"""Cuts a flat state into parts of equal size, and lends the memory in which the mean of one part is made.

A part has the same share of each tensor, so that parts are equal in bytes whatever the dtypes are. Sums are made
element by element, so the parts of a mean have the bits that the mean of whole states has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from asyncdist.tensors.flat_state import FlatBuffers, FlatState, accumulate_dtype


class Part(NamedTuple):
    """Names one of ``total`` parts of a state; ``number`` counts from 0."""

    number: int
    total: int

    def of(self, buffers: FlatBuffers) -> FlatBuffers:
        """Return this part of each tensor. It shares their memory, has no entries, and so cannot be loaded."""
        tensors = {}
        for dtype, tensor in buffers.tensors.items():
            start, stop = self.bounds(len(tensor))
            tensors[dtype] = tensor[start:stop]
        return FlatBuffers((), tensors, ())

    def bounds(self, size: int) -> tuple[int, int]:
        """Return where this part of ``size`` elements begins and ends."""
        return size * self.number // self.total, size * (self.number + 1) // self.total


class PartBuffers(NamedTuple):
    """Holds the mean of one part, and what it is made of: that part of the states of some donors.

    Attributes:
        mean: in the accumulation dtypes.
        given: of each donor, in the stored dtypes; its integer and bool tensors are the same memory for all.
    """

    mean: FlatBuffers
    given: tuple[FlatBuffers, ...]


class PartPool:
    """Reuses the memory of part buffers: as much of it as one use needs, and that of the largest one so far.

    Args:
        flat: the state that is cut.

    Attributes:
        in_use: part buffers that are lent.
        sizes: the elements of the whole state, by dtype.
    """

    def __init__(self, flat: FlatState) -> None:
        self.sizes = flat.sizes
        self._tensors: dict[tuple[str, torch.dtype], Tensor] = {}
        self.in_use = 0

    @property
    def nbytes(self) -> int:
        """The bytes that are allocated and kept."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    @torch.inference_mode(False)  # they outlive the caller's mode
    def acquire(self, part: Part, donor_count: int) -> PartBuffers:
        """Return buffers with undefined content, for a part of so many donors' states."""
        if self.in_use:  # the mean of the last round still leaves
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
        """Take buffers back.

        Args:
            is_clean: whether nothing can be written to them any more; else the next ones get new memory.
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
    """Allocate a part of that many elements of each dtype, with undefined content."""
    return FlatBuffers((), {dtype: torch.empty(size, dtype=dtype, device="cpu") for dtype, size in sizes.items()}, ())
