"""Divides the entries of a model's flat state into fragments, which are exchanged in different steps.

Each entry belongs to exactly one fragment, and no fragment is empty. The division depends only on the entries' names,
shapes and dtypes, so it is equal on all ranks. Tied weights are one entry with several names, which the outer optimizer
moves once per round.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, TypeAlias

from asyncdist.tensors.compiled_names import plain_name
from asyncdist.tensors.flat_state import Entry
from asyncdist.tensors.optimizers.weights import STATE_PREFIX

#: Division of the entries: by layers, by sizes, or by a list of names of tensors or modules for each fragment.
FragmentPattern: TypeAlias = Literal["strided", "balanced"] | Sequence[Sequence[str]]

logger = logging.getLogger("protocols.diloco")


def fragments_of(entries: Sequence[Entry], count: int, pattern: FragmentPattern) -> tuple[tuple[int, ...], ...]:
    """Return, for each fragment, the indices of its entries in ascending order.

    Args:
        count: Number of fragments.
        pattern: One of:

            - ``"strided"``: Layer i goes to fragment i modulo ``count``, as in Streaming DiLoCo. Layers are numbered
              0, 1, 2, ... in ascending order of the first number in an entry's name, such as 3 in
              ``"h.3.attn.weight"``. Entries without a number, such as embeddings and the head, go to fragment 0.
            - ``"balanced"``: The entries, in descending order of their bytes, each go to the fragment with the fewest
              bytes. Entries of equal size are ordered by name.
            - One list for each fragment, with names of modules, parameters and buffers. A module's name stands for all
              of its entries.

    Raises:
        ValueError: The model has fewer than ``count`` layers or tensors, or the lists do not name each entry once.
    """
    if count > len(entries):
        raise ValueError(f"fragments must be at most the number of the model's tensors, {len(entries)}, got {count}")
    if pattern == "strided":
        return _strided(entries, count)
    return _balanced(entries, count) if pattern == "balanced" else _listed(entries, count, pattern)


def _strided(entries: Sequence[Entry], count: int) -> tuple[tuple[int, ...], ...]:
    layers = [_layer(entry) for entry in entries]
    ranks = {layer: rank for rank, layer in enumerate(sorted({layer for layer in layers if layer is not None}))}
    if count > max(1, len(ranks)):
        raise ValueError(
            f"fragments must be at most the number of the model's layers, {len(ranks)}, got {count}; "
            "fragment_pattern='balanced' allows as many fragments as the model has tensors"
        )
    return _gathered([0 if layer is None else ranks[layer] % count for layer in layers], count)


def _balanced(entries: Sequence[Entry], count: int) -> tuple[tuple[int, ...], ...]:
    sizes = [math.prod(entry.shape) * entry.dtype.itemsize for entry in entries]
    order = sorted(range(len(entries)), key=lambda index: (-sizes[index], entries[index].names))
    filled = [(0, 0, fragment) for fragment in range(count)]  # size in bytes, number of entries, number of the fragment
    chosen = [0] * len(entries)
    for index in order:
        nbytes, entry_count, fragment = min(filled)
        filled[fragment] = (nbytes + sizes[index], entry_count + 1, fragment)
        chosen[index] = fragment
    return _gathered(chosen, count)


def _listed(entries: Sequence[Entry], count: int, lists: Sequence[Sequence[str]]) -> tuple[tuple[int, ...], ...]:
    if len(lists) != count:
        raise ValueError(
            f"fragment_pattern must have one list for each of the fragments ({count}), got {len(lists)} lists"
        )
    listed: dict[str, set[int]] = {}
    for place, names in enumerate(lists):
        for name in names:
            for given in (name, plain_name(name)):
                listed.setdefault(given, set()).add(place)
    places = [_listed_place(entry, listed) for entry in entries]
    empty = sorted(set(range(count)) - set(places))
    if empty:
        raise ValueError(
            f"fragment_pattern must name at least one tensor for each fragment, but list {empty[0]} has no name of a "
            f"module or parameter of the model: {list(lists[empty[0]])}"
        )
    return _gathered(places, count)


def _listed_place(entry: Entry, listed: Mapping[str, set[int]]) -> int:
    found: dict[int, str] = {}
    for name in entry.names:
        for enclosing in _enclosing_names(name.removeprefix(STATE_PREFIX)):
            for place in listed.get(enclosing, ()):
                found.setdefault(place, name)
    if not found:
        raise ValueError(f"fragment_pattern must name each of the model's tensors, but no list has {entry.names[0]!r}")
    if len(found) > 1:
        (one, first), (two, second) = sorted(found.items())[:2]
        if first == second:
            raise ValueError(f"fragment_pattern must name each tensor once, but {first!r} is in lists {one} and {two}")
        raise ValueError(
            f"fragment_pattern must have tied weights in one list, but fragments {one} and {two} share the storage of "
            f"{first!r} and {second!r}"
        )
    return next(iter(found))


def _enclosing_names(name: str) -> Iterator[str]:
    """Yield the names of a tensor and of all modules around it, with and without the wrappers of `torch.compile`."""
    for known in {name, plain_name(name)}:
        parts = known.split(".")
        for length in range(1, len(parts) + 1):
            yield ".".join(parts[:length])


def warn_of_iterates(entries: Sequence[Entry], options: str) -> None:
    """Log a warning if entries include the z of a schedule-free optimizer, which loses progress under these options.

    The mean of z is older than the rank's z, and replaces it like a buffer, while parameters keep the progress made
    since then.
    """
    if any(name.startswith(STATE_PREFIX) for entry in entries for name in entry.names):
        logger.warning(
            "with %s, each average undoes a part of the progress of the schedule-free optimizer's z. Use DiLoCoPolicy "
            'with late="wait" and without eager, or another optimizer',
            options,
        )


def _layer(entry: Entry) -> int | None:
    parts = entry.names[0].removeprefix(STATE_PREFIX).split(".")
    return next((int(part) for part in parts if part.isdecimal()), None)


def _gathered(chosen: Sequence[int], count: int) -> tuple[tuple[int, ...], ...]:
    """Return the indices of each fragment's entries, given the fragment of each entry."""
    return tuple(tuple(i for i, each in enumerate(chosen) if each == fragment) for fragment in range(count))
