"""Checks the arguments of users of a replay buffer, and defines its results: samples and statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from asyncdist import World, validation
from asyncdist.protocols.replay_buffer.store import Batch


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Holds items that were drawn from a replay buffer, with replacement.

    Attributes:
        batch: Batch of the same form as added batches; each tensor has shape (n, ...) and its own memory.
        ids: int64 tensor of shape (n,) that identifies the items for :meth:`ReplayBuffer.update_priorities`.
        weights: float64 tensor of shape (n,): importance weights, at most 1; all 1 if sampling is uniform.
    """

    batch: Batch
    ids: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True, slots=True)
class ReplayStatistics:
    """Counts the items of a buffer.

    Attributes:
        added: Number of added items, by client.
        drawn: Number of drawn items, by client.
        size: Number of items that the buffer holds.
        evicted_count: Number of items that were dropped for new ones.
        stale_update_count: Number of new priorities for items that were no longer held.
    """

    added: dict[int, int]
    drawn: dict[int, int]
    size: int
    evicted_count: int
    stale_update_count: int


def as_ids(ids: Any) -> npt.NDArray[np.int64]:
    """Convert ids given by a user; raise TypeError or ValueError for invalid values."""
    given = _as_numbers("ids", ids, "integers, as in Sample.ids")
    if given.size and given.dtype.kind not in "iu":
        raise ValueError(f"ids is {ids!r:.80}; allowed: integers, as in Sample.ids")
    return np.ascontiguousarray(given.astype(np.int64)).reshape(-1)


def _as_numbers(name: str, values: Any, allowed: str) -> npt.NDArray[Any]:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        values = values.to(torch.float64) if values.is_floating_point() else values  # numpy has no bfloat16
    try:
        found = np.asarray(values)
    except (TypeError, ValueError):
        found = np.asarray("")
    if found.dtype.kind not in "biuf":
        raise TypeError(f"{name} is {values!r:.80}; allowed: {allowed}")
    return found


def as_priorities(values: torch.Tensor | Sequence[float], count: int, is_prioritized: bool) -> npt.NDArray[np.float64]:
    """Convert ``count`` priorities given by a user; raise TypeError or ValueError for invalid values."""
    if not is_prioritized:
        raise ValueError("priorities were given; this buffer draws uniformly (serve it with prioritized=True)")
    given = _as_numbers("priorities", values, "numbers, one for each item")
    found = np.ascontiguousarray(given.astype(np.float64)).reshape(-1)
    if len(found) != count:
        raise ValueError(f"priorities must be one number for each item, got {len(found)} for {count} items")
    wrong = found[~(np.isfinite(found) & (found >= 0))]
    if len(wrong):
        raise ValueError(f"a priority is {float(wrong[0])!r}; allowed: finite numbers from 0")
    return found


def check_clients(clients: Any, world: World) -> None:
    """Raise TypeError or ValueError unless ``clients`` is a list of distinct ranks."""
    allowed = f"allowed: ranks from 0 to {world.size - 1}, each once"
    if isinstance(clients, str) or not isinstance(clients, Sequence):
        raise TypeError(f"clients is {clients!r:.80}; {allowed}")
    if not clients:
        raise ValueError("clients is empty; a replay buffer needs at least one")
    wrong = [rank for rank in clients if type(rank) is not int or not 0 <= rank < world.size]
    if wrong or len(set(clients)) != len(clients):
        raise ValueError(f"clients is {list(clients)}; {allowed}")


def check_options(
    capacity: Any, prioritized: Any, alpha: Any, score: Any, in_flight_max: Any, seed: Any, name: Any
) -> None:
    """Raise TypeError or ValueError for the first argument of ``serve_replay_buffer`` that is out of range."""
    validation.count("capacity", capacity)
    validation.count("in_flight_max", in_flight_max)
    validation.count("seed", seed, least=0)
    if type(prioritized) is not bool:
        validation.refuse("prioritized", prioritized, "True, False", TypeError)
    validation.real("alpha", alpha, "a finite number of 0 or more", low=0.0)
    if score is not None and not callable(score):
        validation.refuse("score", score, "a function of a batch, or None", TypeError)
    if not isinstance(name, str):
        validation.refuse("name", name, "a string", TypeError)
