"""Keeps the history of the weights of one rank: which hyperparameters they were trained with, on which ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

#: Number of entries that are kept, besides the first; the history travels with the weights.
_COUNT_MAX: Final = 999


@dataclass(frozen=True, slots=True)
class LineageEntry:
    """Hyperparameters with which a rank's current weights were trained, from one iteration on.

    Attributes:
        iteration: Iteration of ``rank`` at which it began to train with these hyperparameters.
        rank: Rank that trained.
        round: Round in which the rank copied the weights of ``donor``; 0 for the first entry.
        donor: Rank whose weights were copied; -1 for the first entry.
        hyperparameters: Values by name.
    """

    iteration: int
    rank: int
    round: int
    donor: int
    hyperparameters: Mapping[str, Any] = field(hash=False)


class Lineage:
    """Collects the entries, oldest first; if there are too many, keeps the first and the newest entries."""

    def __init__(self, entries: Sequence[LineageEntry] = ()) -> None:
        self.entries = tuple(entries)

    def add(self, entry: LineageEntry) -> Lineage:
        """Return a history with one more entry."""
        entries = (*self.entries, entry)
        return Lineage(entries if len(entries) <= _COUNT_MAX + 1 else (entries[0], *entries[-_COUNT_MAX:]))

    def packed(self) -> str:
        """Return the history as a string, for :meth:`unpacked`."""
        rows = [[e.iteration, e.rank, e.round, e.donor, dict(e.hyperparameters)] for e in self.entries]
        return json.dumps(rows)

    @classmethod
    def unpacked(cls, text: str) -> Lineage:
        """Return the history encoded in ``text`` by :meth:`packed`.

        Raises:
            TypeError, ValueError: The text has another format.
        """
        rows = json.loads(text)
        return cls([LineageEntry(int(i), int(rank), int(r), int(d), dict(values)) for i, rank, r, d, values in rows])
