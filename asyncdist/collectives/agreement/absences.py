"""Records which ranks have left, are lost or were restarted, and therefore cannot join an agreement.

A restarted rank counts its starts of each operation from 1 again. The names of operations in its agreements therefore
include its incarnation, the number of its restarts. An agreement with the previous process can no longer succeed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from asyncdist.collectives.agreement.messages import AgreementKey, Losses, Meeting
from asyncdist.transports.rank_sets import RankSet

_QUALIFIED: Final = re.compile(r" \(restarted: ([0-9. ]+)\)$")


class Absences:
    """Records which ranks are absent, and which collective operations each rank will never start.

    Attributes:
        gone: Ranks that have left the world or are lost.
        withdrawn: Ranks that never start an operation again, by operation.
    """

    def __init__(self, rank: int, incarnation: int) -> None:
        self._incarnations: dict[int, int] = {rank: incarnation} if incarnation else {}  # of the restarted ranks
        self.gone = RankSet()
        self.lost: set[int] = set()
        self.withdrawn: dict[AgreementKey, set[int]] = {}

    def on_gone(self, ranks: RankSet, *, is_lost: bool) -> None:
        """Record that ranks have left or are lost."""
        self.gone |= ranks
        self.lost.update(ranks if is_lost else ())

    def on_returned(self, rank: int, incarnation: int) -> None:
        """Record that ``rank`` has been restarted ``incarnation`` times."""
        if incarnation:
            self._incarnations[rank] = incarnation
        self.gone.discard(rank)
        self.lost.discard(rank)

    # -- names of operations ----------------------------------------------------------------------------------------

    def key_of(self, subject: str, ranks: Sequence[int]) -> AgreementKey:
        """Return the key for all starts of the operation ``subject`` by the current processes of ``ranks``."""
        known = self._incarnations
        words = [f"{rank}.{known[rank]}" for rank in sorted(known) if rank in ranks] if known else ()
        return AgreementKey.of(f"{subject} (restarted: {' '.join(words)})" if words else subject, ranks)

    def replaced(self, key: AgreementKey) -> tuple[int, ...]:
        """Return the members of agreement ``key`` that have been restarted since the key was made."""
        if not self._incarnations:
            return ()
        named = _named(key)
        members = (rank for rank in sorted(self._incarnations) if key.has_member(rank))
        return tuple(rank for rank in members if self._incarnations[rank] > named.get(rank, 0))

    def losses(self, lost: Iterable[int]) -> Losses:
        """Return each lost rank, paired with the number of restarts of its lost process."""
        return tuple((rank, self._incarnations.get(rank, 0)) for rank in sorted(lost))

    # -- agreements -------------------------------------------------------------------------------------------------

    def of(self, meeting: Meeting) -> tuple[int, ...]:
        """Return the members that will never join ``meeting``, in order, then the lost ranks in its ``bound_to``."""
        sets = self.gone, self._withdrawn_of(meeting.key), self.replaced(meeting.key)
        if not any(sets):
            return ()
        absent = tuple(rank for rank in meeting.ranks if any(rank in each for each in sets))
        return absent + self.lost_bound_ranks(meeting)

    def lost_bound_ranks(self, meeting: Meeting) -> tuple[int, ...]:
        """Return the lost ranks of the meeting's ``bound_to``."""
        return tuple(rank for rank in meeting.bound_to if rank in self.lost)

    def lost_to(self, key: AgreementKey) -> set[int]:
        """Return the lost ranks, and the members of agreement ``key`` that were restarted after it was requested."""
        return self.lost.union(self.replaced(key))

    def gone_members(self, key: AgreementKey) -> tuple[int, ...]:
        """Return the members of agreement ``key`` that have left or are lost, in ascending order.

        If a process was lost, agreements of a later process of its rank are not affected, even if this rank does not
        know of the restart yet.
        """
        found = {*filter(key.has_member, self.gone), *self.replaced(key)}
        if not found:
            return ()
        known = self._incarnations
        return tuple(sorted(found - {rank for rank, number in _named(key).items() if number > known.get(rank, 0)}))

    def may_join(self, key: AgreementKey, ranks: Iterable[int]) -> set[int]:
        """Return the members of ``ranks`` that may still join agreement ``key``."""
        withdrawn = self._withdrawn_of(key)
        return {rank for rank in ranks if rank not in self.gone and rank not in withdrawn}

    def _withdrawn_of(self, key: AgreementKey) -> Collection[int]:
        return self.withdrawn.get(key.of_all_occurrences, ()) if self.withdrawn else ()


def _named(key: AgreementKey) -> dict[int, int]:
    """Return the number of restarts of each restarted member, as listed in the subject of ``key``."""
    found = _QUALIFIED.search(key.subject)
    words = (word.split(".") for word in found[1].split()) if found else ()
    return {int(rank): int(incarnation) for rank, incarnation in words}
