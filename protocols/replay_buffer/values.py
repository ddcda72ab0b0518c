"""Defines a replay buffer's samples and statistics, and checks arguments that users pass."""

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
    """Items sampled from a replay buffer, with replacement.

    Attributes:
        batch: Batch of the same form as added batches; each tensor has shape (n, ...) and its own memory.
        ids: int64 tensor of shape (n,) that identifies the items for :meth:`ReplayBuffer.update_priorities`.
        weights: float64 tensor of shape (n,) with importance weights, at most 1; all 1 if sampling is uniform.
    """

    batch: Batch
    ids: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True, slots=True)
class ReplayStatistics:
    """Counts of the items in a replay buffer.

    Attributes:
        added: Number of added items, by client.
        drawn: Number of sampled items, by client.
        size: Number of items in the buffer.
        evicted_count: Number of old items that were replaced with new ones.
        stale_update_count: Number of new priorities for items that were no longer in the buffer.
    """

    added: dict[int, int]
    drawn: dict[int, int]
    size: int
    evicted_count: int
    stale_update_count: int


def as_ids(ids: Any) -> npt.NDArray[np.int64]:
    """Convert a user's ids to an int64 array of shape (n,). Raise TypeError or ValueError if they are invalid."""
    given = _as_numbers("ids", ids, "integers from Sample.ids")
    if given.size and given.dtype.kind not in "iu":
        raise ValueError(f"ids must be integers from Sample.ids, got {ids!r:.80}")
    return np.ascontiguousarray(given.astype(np.int64)).reshape(-1)


def _as_numbers(name: str, values: Any, allowed: str) -> npt.NDArray[Any]:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        values = values.to(torch.float64) if values.is_floating_point() else values  # NumPy has no bfloat16
    try:
        found = np.asarray(values)
    except (TypeError, ValueError):
        found = np.asarray("")
    if found.dtype.kind not in "biuf":
        raise TypeError(f"{name} must be {allowed}, got {values!r:.80}")
    return found


def as_priorities(values: torch.Tensor | Sequence[float], count: int, is_prioritized: bool) -> npt.NDArray[np.float64]:
    """Convert a user's ``count`` priorities to a float64 array. Raise TypeError or ValueError if they are invalid."""
    if not is_prioritized:
        raise ValueError(
            "priorities must be None for a buffer with uniform sampling; pass prioritized=True to serve_replay_buffer"
        )
    given = _as_numbers("priorities", values, "one number for each item")
    found = np.ascontiguousarray(given.astype(np.float64)).reshape(-1)
    if len(found) != count:
        raise ValueError(f"priorities must be one number for each item, got {len(found)} for {count} items")
    wrong = found[~(np.isfinite(found) & (found >= 0))]
    if len(wrong):
        raise ValueError(f"each priority must be >= 0 and finite, got {float(wrong[0])!r}")
    return found


def check_clients(clients: Any, world: World) -> None:
    """Raise TypeError or ValueError if ``clients`` is not a non-empty list of distinct ranks."""
    allowed = f"a list of distinct ranks from 0 to {world.size - 1}"
    if isinstance(clients, str) or not isinstance(clients, Sequence):
        raise TypeError(f"clients must be {allowed}, got {clients!r:.80}")
    if not clients:
        raise ValueError("clients must have at least one rank, got none")
    wrong = [rank for rank in clients if type(rank) is not int or not 0 <= rank < world.size]
    if wrong or len(set(clients)) != len(clients):
        raise ValueError(f"clients must be {allowed}, got {list(clients)}")


def check_options(
    capacity: Any, prioritized: Any, alpha: Any, score: Any, in_flight_max: Any, seed: Any, name: Any
) -> None:
    """Raise TypeError or ValueError if an argument of ``serve_replay_buffer`` is invalid."""
    validation.count("capacity", capacity)
    validation.count("in_flight_max", in_flight_max)
    validation.count("seed", seed, least=0)
    if type(prioritized) is not bool:
        validation.refuse("prioritized", prioritized, "True or False", TypeError)
    validation.real("alpha", alpha, ">= 0 and finite", low=0.0)
    if score is not None and not callable(score):
        validation.refuse("score", score, "None or a function that takes a batch", TypeError)
    if not isinstance(name, str):
        validation.refuse("name", name, "a string", TypeError)
