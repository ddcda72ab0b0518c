"""Keeps the history of one rank's weights: the hyperparameters and ranks that have trained them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

#: Number of entries that are kept in addition to the first, since the history is sent with the weights.
_COUNT_MAX: Final = 999


@dataclass(frozen=True, slots=True)
class LineageEntry:
    """Hyperparameters with which a rank's current weights were trained from some iteration.

    Attributes:
        iteration: Iteration at which ``rank`` began to train with these hyperparameters.
        round: Round in which the rank copied the weights of ``donor``; 0 for the first entry.
        donor: Rank whose weights were copied; -1 for the first entry.
    """

    iteration: int
    rank: int
    round: int
    donor: int
    hyperparameters: Mapping[str, Any] = field(hash=False)


class Lineage:
    """Immutable history of one rank's weights, oldest entry first.

    If there are too many entries, it keeps the first and the newest.
    """

    def __init__(self, entries: Sequence[LineageEntry] = ()) -> None:
        self.entries = tuple(entries)

    def add(self, entry: LineageEntry) -> Lineage:
        """Return a history with one more entry."""
        entries = (*self.entries, entry)
        return Lineage(entries if len(entries) <= _COUNT_MAX + 1 else (entries[0], *entries[-_COUNT_MAX:]))

    def packed(self) -> str:
        """Return the history as a string that :meth:`unpacked` reads."""
        rows = [[e.iteration, e.rank, e.round, e.donor, dict(e.hyperparameters)] for e in self.entries]
        return json.dumps(rows)

    @classmethod
    def unpacked(cls, text: str) -> Lineage:
        """Return the history that :meth:`packed` has packed.

        Raises:
            TypeError, ValueError: The string has another format.
        """
        rows = json.loads(text)
        return cls([LineageEntry(int(i), int(rank), int(r), int(d), dict(values)) for i, rank, r, d, values in rows])
