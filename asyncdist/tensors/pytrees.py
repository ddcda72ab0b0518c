"""Describes and compares trees of tensors, and packs their leaves into one flat tensor per dtype.

A tree is a pytree of `optree`: a tensor, or a dict, list, tuple, named tuple or registered dataclass of trees. optree
sorts the keys of dicts, so if all ranks have equal outlines, their flat tensors have equal layouts.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final, TypeAlias

import optree
import torch
from torch import Tensor

from asyncdist.tensors.byte_views import dtype_name, oddity_of

#: A leaf's dtype and shape, or a description such as "an int" for a leaf that cannot be sent.
Kind: TypeAlias = tuple[torch.dtype, tuple[int, ...]] | str

#: A tree's nodes and leaves in order. Each is a pair of its path and a description.
Lines: TypeAlias = tuple[tuple[str, str], ...]

_CACHED_COUNT: Final = 64  # number of cached outlines; most programs repeatedly reduce a few different trees


@dataclass(frozen=True, slots=True)
class Outline:
    """Describes the structure of a tree and the kinds of its leaves, without their values."""

    spec: optree.PyTreeSpec
    kinds: tuple[Kind, ...]

    @property
    def lines(self) -> Lines:
        """Path and description of each node and leaf, parents first."""
        return _lines(self.spec, self.kinds)

    @property
    def digest(self) -> str:
        """SHA-256 digest of the lines, in hexadecimal."""
        return _digest(self.spec, self.kinds)

    def first_leaf(self, is_wrong: Callable[[Kind], bool], name: str = "tree") -> tuple[str, str] | None:
        """Return the path and description of the first leaf for which ``is_wrong`` returns true, or None."""
        for index, kind in enumerate(self.kinds):
            if is_wrong(kind):
                return leaf_paths(self.spec, name)[index], _describe_kind(kind)
        return None


def outline(tree: Any) -> tuple[list[Any], Outline]:
    """Return a tree's leaves, which need not be tensors, and its outline (structure, shapes and dtypes)."""
    leaves, spec = optree.tree_flatten(tree)
    return leaves, Outline(spec, tuple(_kind(leaf) for leaf in leaves))


def flatten_tensors(tree: Any, name: str) -> tuple[list[Tensor], optree.PyTreeSpec]:
    """Return the leaves and the structure of a tree. Raise TypeError if a leaf is not a dense tensor."""
    leaves, found = outline(tree)
    wrong = found.first_leaf(is_foreign, name)
    if wrong is not None:
        raise TypeError(f"{wrong[0]} must be a dense tensor, got {wrong[1]}")
    return leaves, found.spec


def is_foreign(kind: Kind) -> bool:
    """Return whether a leaf cannot be sent, because it is not a dense tensor."""
    return isinstance(kind, str)


def leaf_paths(spec: optree.PyTreeSpec, name: str) -> list[str]:
    """Return the path of each leaf of the tree, with ``name`` as its first part."""
    return [path for path, node in _walk(spec, name) if node is None]


def lines_to_text(lines: Lines) -> str:
    """Return the lines as JSON without line breaks, to be sent in a message."""
    return json.dumps(lines, separators=(",", ":"))


def lines_from_text(text: str) -> Lines:
    """Return the lines that :func:`lines_to_text` wrote as JSON. Raise ValueError for any other string."""
    try:
        lines = tuple((str(path), str(what)) for path, what in json.loads(text))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the text must be the JSON of a tree, got {text[:80]!r}") from error
    if len(dict(lines)) < len(lines):
        raise ValueError(f"each path of a tree must occur once, got {text[:80]!r}")
    return lines


def first_difference(lines: Sequence[Lines], ranks: Sequence[int]) -> tuple[str, str]:
    """Return the first path at which a rank's tree differs from the first rank's, and describe the difference.

    ``lines`` has the lines of each rank's tree. At least one tree must differ from the first.
    """
    first = lines[0]
    rank, other = next((r, found) for r, found in zip(ranks, lines, strict=True) if found != first)
    here, there = dict(first), dict(other)
    pairs = zip_longest(first, other)
    mine, theirs = next((mine, theirs) for mine, theirs in pairs if mine != theirs)
    if theirs is not None and theirs[0] not in here:
        return theirs[0], f"{theirs[0]} exists on rank {rank} and not on rank {ranks[0]}"
    assert mine is not None, (first, other)
    if mine[0] not in there:
        return mine[0], f"{mine[0]} exists on rank {ranks[0]} and not on rank {rank}"
    return mine[0], f"{mine[0]} is {mine[1]} on rank {ranks[0]} and {there[mine[0]]} on rank {rank}"


# -- leaves as flat tensors -------------------------------------------------------------------------------------------


def pack(leaves: Sequence[Tensor]) -> dict[torch.dtype, Tensor]:
    """Return one contiguous 1-D CPU tensor per dtype, with copies of the leaves' values."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for leaf in leaves:
        groups.setdefault(leaf.dtype, []).append(leaf.detach().reshape(-1))
    return {dtype: _joined(parts) for dtype, parts in groups.items()}


def _joined(parts: list[Tensor]) -> Tensor:
    if len({part.device for part in parts}) > 1:
        parts = [part.to("cpu") for part in parts]
    return torch.cat(parts).to("cpu")  # one transfer if all leaves are on one device


def unpack(flats: dict[torch.dtype, Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    """Split flat tensors from ``pack(leaves)`` into one tensor per leaf, with the leaf's shape and device.

    The returned CPU tensors are views of the flat tensors. If a flat tensor has the shape [m, n], the views of it have
    an additional leading dimension m. A flat tensor's dtype may differ from its key.
    """
    offsets = dict.fromkeys(flats, 0)
    found = []
    for leaf in leaves:
        flat, start, count = flats[leaf.dtype], offsets[leaf.dtype], leaf.numel()
        offsets[leaf.dtype] = start + count
        piece = flat.narrow(-1, start, count)
        found.append(piece.reshape((*flat.shape[:-1], *leaf.shape)).to(leaf.device))
    return found


# -- descriptions -----------------------------------------------------------------------------------------------------


def _kind(leaf: Any) -> Kind:
    if not isinstance(leaf, Tensor):
        name = type(leaf).__qualname__
        return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
    return oddity_of(leaf) or (leaf.dtype, tuple(leaf.shape))


def _describe_kind(kind: Kind) -> str:
    if isinstance(kind, str):
        return kind
    dtype, shape = kind
    return f"{dtype_name(dtype)} of shape {list(shape)}"


def _walk(spec: optree.PyTreeSpec, path: str) -> Iterator[tuple[str, str | None]]:
    """Yield (path, type description) for each inner node and (path, None) for each leaf, parents first."""
    if spec.is_leaf():
        yield path, None
        return
    kind = spec.type or type(None)
    yield path, "None" if kind is type(None) else f"a {kind.__qualname__}"
    names = getattr(kind, "_fields", None)
    for entry, child in zip(spec.entries(), spec.children(), strict=True):
        step = f".{names[entry]}" if names and isinstance(entry, int) else f"[{entry!r}]"
        yield from _walk(child, path + step)


@functools.lru_cache(_CACHED_COUNT)
def _lines(spec: optree.PyTreeSpec, kinds: tuple[Kind, ...]) -> Lines:
    leaves = iter(kinds)
    return tuple((path, _describe_kind(next(leaves)) if node is None else node) for path, node in _walk(spec, "tree"))


@functools.lru_cache(_CACHED_COUNT)
def _digest(spec: optree.PyTreeSpec, kinds: tuple[Kind, ...]) -> str:
    return hashlib.sha256(lines_to_text(_lines(spec, kinds)).encode()).hexdigest()
