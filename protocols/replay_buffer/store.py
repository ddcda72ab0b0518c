"""Stores a replay buffer's items and samples from them. It sends no messages.

An **item** is one row of a batch: the elements of all its tensors at one index of the leading dimension. Items are
stored as rows of bytes, so that adding or sampling a batch needs one copy. Sampling is with replacement: uniform, or in
proportion to priority^alpha with importance weights (Schaul et al., "Prioritized Experience Replay", ICLR 2016).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from asyncdist.tensors.byte_views import byte_view, check_dense, to_host

Batch: TypeAlias = torch.Tensor | Mapping[str, torch.Tensor] | Sequence[torch.Tensor]
Rows: TypeAlias = npt.NDArray[np.uint8]
Form: TypeAlias = Literal["tensor", "dict", "tuple"]
FORMS: Final[dict[str, Form]] = {"tensor": "tensor", "dict": "dict", "tuple": "tuple"}

#: Number of priorities in each block. The sum of a changed block is recomputed from scratch, so rounding errors do not
#: add up.
_BLOCK: Final = 512
#: Number of prioritised draws that are computed at a time. Each may need a copy of another block.
_DRAW_COUNT: Final = 1024


@dataclass(frozen=True, slots=True)
class Field:
    """Describes one tensor of an item: its name, dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return dtype_of(self.dtype).itemsize * math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.name or 'the tensor'}: {self.dtype} {self.shape}"


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Defines how an item is stored as a row of bytes, and converts batches to rows and back.

    Attributes:
        fields: Tensors in the order of the first batch, named by index for a tuple. In a row, a dict's fields are
            sorted by name, so that dicts with equal keys have the same layout.
    """

    form: Form
    fields: tuple[Field, ...]

    @classmethod
    def of(cls, batch: Batch) -> RowLayout:
        """Return the layout of ``batch``.

        Raises:
            TypeError: The batch has none of the three forms, or contains objects other than dense CPU tensors.
            ValueError: The batch has no tensors, or its tensors have different leading dimensions.
        """
        form, parts = _parts(batch)
        if not parts:
            raise ValueError("batch must have at least one tensor, got no tensor")
        lengths = set()
        for name, tensor in parts.items():
            check_dense(tensor, f"batch{_index_text(name)}")
            if tensor.device.type != "cpu":
                raise TypeError(f"batch{_index_text(name)} must be in CPU memory, got a tensor on {tensor.device}")
            if tensor.ndim == 0:
                raise ValueError(
                    f"batch{_index_text(name)} must have a leading dimension with one row for each item, got a tensor "
                    "without dimensions"
                )
            lengths.add(tensor.shape[0])
        if len(lengths) > 1:
            sizes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in parts.items())
            raise ValueError(f"the tensors of a batch must have the same leading dimension, got {sizes}")
        fields = tuple(
            Field(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape[1:]))
            for name, tensor in parts.items()
        )
        return cls(form, fields)

    @property
    def nbytes(self) -> int:
        """Size of one item in bytes."""
        return sum(field.nbytes for field in self.fields)

    def fits(self, batch: Batch) -> bool:
        """Return whether ``batch`` has this layout. This is four times as fast as a comparison with :meth:`of`."""
        form, parts = _parts(batch)
        if form != self.form or len(parts) != len(self.fields):
            return False
        lengths = set()
        for field in self.fields:
            tensor = parts.get(field.name)
            if not (
                isinstance(tensor, torch.Tensor)
                and tensor.dtype is dtype_of(field.dtype)
                and tensor.layout == torch.strided
                and not tensor.is_nested
                and tensor.is_cpu
                and tensor.ndim
                and tensor.shape[1:] == field.shape
            ):
                return False
            lengths.add(tensor.shape[0])
        return len(lengths) == 1

    def pack(self, batch: Batch) -> Rows:
        """Convert a batch of this layout to rows of bytes, a uint8 array of shape (items, ``nbytes``)."""
        columns = []
        parts = _parts(batch)[1]
        for field in self._fields_in_order():
            tensor = parts[field.name]
            count = tensor.shape[0]
            if tensor.numel():
                columns.append(_rows_of(to_host(tensor)))
            else:
                columns.append(np.empty((count, field.nbytes), np.uint8))
        return columns[0] if len(columns) == 1 else np.concatenate(columns, axis=1)

    def unpack(self, rows: Rows) -> Batch:
        """Convert rows of bytes to a batch of new tensors."""
        parts, start = {}, 0
        for field in self._fields_in_order():
            tensor = torch.empty((len(rows), *field.shape), dtype=dtype_of(field.dtype), device="cpu")
            if tensor.numel():
                _rows_of(tensor)[...] = rows[:, start : start + field.nbytes]
            start += field.nbytes
            parts[field.name] = tensor
        if self.form == "tensor":
            return next(iter(parts.values()))
        if self.form == "tuple":
            return tuple(parts.values())
        return {field.name: parts[field.name] for field in self.fields}

    def _fields_in_order(self) -> Sequence[Field]:
        return sorted(self.fields, key=lambda field: field.name) if self.form == "dict" else self.fields

    def difference(self, other: RowLayout) -> str | None:
        """Return a description of the first difference from another layout, or None if the layouts are equal."""
        if self.form != other.form:
            return f"a batch is a {other.form} here and a {self.form} there"
        theirs = {field.name: field for field in other.fields}
        for field in self.fields:
            if field.name not in theirs:
                return f"{field.name!r} is missing"
            if theirs[field.name] != field:
                return f"{theirs[field.name]} here and {field} there"
        extra = [field.name for field in other.fields if field.name not in {mine.name for mine in self.fields}]
        if extra:
            return f"{extra[0]!r} is unknown there"
        return None


def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype with this name. Raise ValueError if there is none."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"the dtype must be a dtype of torch, got {name!r:.80}")
    return found


def _parts(batch: Any) -> tuple[Form, dict[str, Any]]:
    if isinstance(batch, torch.Tensor):
        return "tensor", {"": batch}
    if isinstance(batch, Mapping):
        wrong = [name for name in batch if not isinstance(name, str)]
        if wrong:
            raise TypeError(f"the keys of batch must be strings, got {wrong[0]!r:.80}")
        return "dict", dict(batch)
    if isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        return "tuple", {str(index): tensor for index, tensor in enumerate(batch)}
    raise TypeError(
        "batch must be a tensor, a tuple of tensors, or a dict that maps names to tensors, got a "
        f"{type(batch).__name__}"
    )


def _index_text(name: str) -> str:
    return f"[{name!r}]" if name else ""


def _rows_of(tensor: torch.Tensor) -> Rows:
    """Return the bytes of a non-empty contiguous tensor as an array with one row for each item."""
    return np.frombuffer(byte_view(tensor), np.uint8).reshape(tensor.shape[0], -1)


@dataclass(frozen=True, slots=True)
class Drawn:
    """Items sampled from a store.

    Attributes:
        ids: int64 array of shape (n,) that identifies the items for ``update_priorities``.
        weights: float64 array of shape (n,) with importance weights, at most 1; all 1 if sampling is uniform.
        rows: uint8 array of shape (n, bytes of an item) with the items.
    """

    ids: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float64]
    rows: Rows


class ReplayStore:
    """Stores a limited number of items and samples from them. If the store is full, new items replace the oldest.

    Args:
        alpha: Exponent of the priorities, >= 0 (0 ignores them); None for uniform sampling without priorities.
    """

    def __init__(self, capacity: int, *, alpha: float | None, seed: int) -> None:
        self.capacity = capacity
        self.alpha = alpha
        self.added_count = 0
        self._random = np.random.default_rng(seed)
        self._rows: Rows | None = None
        self._priorities = _Priorities(capacity) if alpha is not None else None
        self._largest = 1.0

    @property
    def size(self) -> int:
        """Number of items in the store."""
        return min(self.added_count, self.capacity)

    @property
    def evicted_count(self) -> int:
        """Number of old items that were replaced with new ones."""
        return self.added_count - self.size

    def add(self, rows: Rows, priorities: npt.NDArray[np.float64] | None = None) -> None:
        """Store items.

        Args:
            rows: Items, with shape (n, bytes of an item). If n > ``capacity``, only the last ``capacity`` are stored.
            priorities: float64 array of shape (n,), finite and not negative. By default, each item gets the largest
                priority that the store has had, so that it is sampled soon.

        Raises:
            ValueError: A priority is so large that sums of powers would overflow. No item is stored.
        """
        if not len(rows):
            return
        powers = None if self._priorities is None or priorities is None else self._powers(priorities)
        if self._rows is None:
            self._rows = np.zeros((self.capacity, rows.shape[1]), np.uint8)
        first = self.added_count
        self.added_count += len(rows)
        start, skipped = first % self.capacity, max(0, len(rows) - self.capacity)
        places = np.arange(first + skipped, self.added_count) % self.capacity
        if start + len(rows) <= self.capacity:
            self._rows[start : start + len(rows)] = rows
        else:
            self._rows[places] = rows[skipped:]
        if self._priorities is not None:
            if powers is None:
                self._priorities.set(places, self._largest)
            else:
                self._set_priorities(places, powers[skipped:])

    def sample(self, n: int, *, beta: float = 0.4) -> Drawn:
        """Sample ``n`` items with replacement. The store must not be empty.

        Args:
            beta: Exponent of the importance weights, from 0 (no bias correction) to 1 (full correction).
        """
        assert self._rows is not None and self.size, "cannot draw from an empty store"
        if self._priorities is None:
            places = self._random.integers(self.size, size=n)
            weights = np.ones(n)
        else:
            places = self._priorities.draw(self._random.random(n))
            weights = self._weights(places, beta)
        newest = self.added_count - 1
        ids = newest - (newest - places) % self.capacity
        return Drawn(ids, weights, self._rows[places])

    def update(self, ids: npt.NDArray[np.int64], priorities: npt.NDArray[np.float64]) -> int:
        """Set the priorities of items, and return the number of given items that are no longer in the store.

        Args:
            ids: int64 array of shape (n,), from :meth:`sample`.
            priorities: float64 array of shape (n,), finite and not negative.

        Raises:
            ValueError: A priority is so large that sums of powers would overflow. No priority is changed.
        """
        known = (ids >= self.evicted_count) & (ids < self.added_count)
        if self._priorities is not None:
            self._set_priorities(ids[known] % self.capacity, self._powers(priorities[known]))
        return int(len(ids) - known.sum())

    def _powers(self, priorities: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return priority^alpha for each priority. Raise ValueError if the sum over a full store could overflow."""
        assert self.alpha is not None, "uniform sampling has no priorities"
        with np.errstate(over="ignore"):
            powers = np.power(priorities, self.alpha)
        too_large = priorities[powers > np.finfo(np.float64).max / (2 * self.capacity)]
        if len(too_large):
            raise ValueError(
                f"each priority must be small enough that the sum of {self.capacity} priorities raised to "
                f"alpha={self.alpha} is finite, got {float(too_large[0])!r}"
            )
        return np.asarray(powers, np.float64)

    def _set_priorities(self, places: npt.NDArray[np.int64], powers: npt.NDArray[np.float64]) -> None:
        assert self._priorities is not None, "uniform sampling has no priorities"
        if len(places):
            self._largest = max(self._largest, float(powers.max()))
            self._priorities.set(places, powers)

    def _weights(self, places: npt.NDArray[np.int64], beta: float) -> npt.NDArray[np.float64]:
        """Return the importance weights (size * probability)^-beta, divided by the largest weight in the store."""
        assert self._priorities is not None
        smallest = self._priorities.smallest()
        return np.asarray((smallest / self._priorities.of(places)) ** beta, np.float64)


class _Priorities:
    """Array of priorities. Samples indices in proportion to their priorities."""

    def __init__(self, capacity: int) -> None:
        block_count = -(-capacity // _BLOCK)
        self._values = np.zeros((block_count, _BLOCK))
        self._flat = self._values.reshape(-1)
        self._sums = np.zeros(block_count)
        self._smallest = np.full(block_count, np.inf)

    def of(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        return self._flat[places]

    def set(self, places: npt.NDArray[np.int64], values: Any) -> None:
        self._flat[places] = values
        blocks = np.unique(places // _BLOCK)
        changed = self._values[blocks]
        self._sums[blocks] = changed.sum(axis=1)
        self._smallest[blocks] = np.where(changed > 0, changed, np.inf).min(axis=1)

    def smallest(self) -> float:
        return float(self._smallest.min())

    def draw(self, at: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """Return the indices at which the cumulative sum of the priorities exceeds the fractions ``at`` of the total.

        Raises:
            ValueError: The total is 0.
        """
        bounds = np.cumsum(self._sums)
        if not bounds[-1] > 0:
            raise ValueError("at least one priority must be > 0, got only zeros")
        wanted = at * bounds[-1]
        blocks = np.minimum(np.searchsorted(bounds, wanted, side="right"), np.flatnonzero(self._sums)[-1])
        # The previous blocks' exact total is subtracted: a smaller number could select an index whose priority is 0.
        rest = wanted - np.concatenate(([0.0], bounds))[blocks]
        parts = [slice(begin, begin + _DRAW_COUNT) for begin in range(0, max(1, len(at)), _DRAW_COUNT)]
        columns = [self._search(blocks[part], rest[part]) for part in parts]
        return np.asarray(blocks * _BLOCK + np.concatenate(columns), np.int64)

    def _search(self, blocks: npt.NDArray[np.int64], rest: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """Return the columns at which the cumulative sums of these blocks exceed ``rest``."""
        distinct, rows = np.unique(blocks, return_inverse=True)
        values = self._values[distinct]
        inside = np.cumsum(values, axis=1)
        columns = np.zeros(len(rows), np.int64)
        step = _BLOCK
        while step > 1:  # binary search, for all draws at once
            step //= 2
            columns += step * (inside[rows, columns + step - 1] <= rest)
        columns += inside[rows, columns] <= rest
        # Rounding may lead past the end of the block. The right index is then the last one with a priority above 0.
        last = _BLOCK - 1 - (values[:, ::-1] > 0).argmax(axis=1)
        return np.minimum(columns, last[rows])
