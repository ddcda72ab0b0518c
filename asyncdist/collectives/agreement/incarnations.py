"""Distinguishes the agreements of a restarted rank from the agreements of its previous process.

A restarted rank counts its starts of each operation from 1 again. The names of operations in its agreements therefore
include its incarnation, the number of its restarts. An agreement with the previous process can no longer succeed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from asyncdist.collectives.agreement.messages import AgreementKey, Losses

_QUALIFIED: Final = re.compile(r" \(restarted: ([0-9. ]+)\)$")


class Incarnations:
    """Records the incarnation (number of restarts) of each rank that is known to have restarted."""

    def __init__(self, rank: int, incarnation: int) -> None:
        self._known: dict[int, int] = {rank: incarnation} if incarnation else {}

    def note(self, rank: int, incarnation: int) -> None:
        """Record that ``rank`` has been restarted ``incarnation`` times."""
        if incarnation:
            self._known[rank] = incarnation

    def qualified(self, subject: str, ranks: Sequence[int]) -> str:
        """Append to the operation's name the number of restarts of each member that has been restarted."""
        words = [f"{rank}.{self._known[rank]}" for rank in sorted(self._known) if rank in ranks] if self._known else ()
        return f"{subject} (restarted: {' '.join(words)})" if words else subject

    def key_of(self, subject: str, ranks: Sequence[int]) -> AgreementKey:
        """Return the key for all starts of the operation ``subject`` by the current processes of ``ranks``."""
        return AgreementKey.of(self.qualified(subject, ranks), ranks)

    def replaced(self, key: AgreementKey) -> tuple[int, ...]:
        """Return the members of agreement ``key`` that have been restarted since the key was made."""
        if not self._known:
            return ()
        named = _named(key)
        members = (rank for rank in sorted(self._known) if key.has_member(rank))
        return tuple(rank for rank in members if self._known[rank] > named.get(rank, 0))

    def unmet(self, key: AgreementKey) -> set[int]:
        """Return the members of agreement ``key`` whose restart is not yet known to this rank."""
        return {rank for rank, incarnation in _named(key).items() if incarnation > self._known.get(rank, 0)}

    def losses(self, lost: Iterable[int]) -> Losses:
        """Return pairs of each lost rank and the number of restarts of its lost process."""
        return tuple((rank, self._known.get(rank, 0)) for rank in sorted(lost))


def _named(key: AgreementKey) -> dict[int, int]:
    """Return the number of restarts of each restarted member that the subject of ``key`` lists."""
    found = _QUALIFIED.search(key.subject)
    words = (word.split(".") for word in found[1].split()) if found else ()
    return {int(rank): int(incarnation) for rank, incarnation in words}
