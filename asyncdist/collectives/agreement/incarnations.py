"""Tells what ranks agree on before and after one of them was started again.

Such a rank counts its starts from 1. So what it starts with others is another subject than what they have started with
the process before, and a meeting in which that one was to take part cannot take place any more.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from asyncdist.collectives.agreement.messages import AgreementKey, Losses

_QUALIFIED: Final = re.compile(r" \(restarted: ([0-9. ]+)\)$")


class Incarnations:
    """Keeps how often ranks have been started again, as far as this rank knows.

    Args:
        rank: this rank.
        incarnation: its own.
    """

    def __init__(self, rank: int, incarnation: int) -> None:
        self._known: dict[int, int] = {rank: incarnation} if incarnation else {}

    def note(self, rank: int, incarnation: int) -> None:
        """Note that a new process has the place of ``rank``."""
        if incarnation:
            self._known[rank] = incarnation

    def qualified(self, subject: str, ranks: Sequence[int]) -> str:
        """Return the subject with the incarnations of members that have been started again."""
        words = [f"{rank}.{self._known[rank]}" for rank in sorted(self._known) if rank in ranks] if self._known else ()
        return f"{subject} (restarted: {' '.join(words)})" if words else subject

    def key_of(self, subject: str, ranks: Sequence[int]) -> AgreementKey:
        """Return the key for all occurrences, among the processes that are there now."""
        return AgreementKey.of(self.qualified(subject, ranks), ranks)

    def replaced(self, key: AgreementKey) -> tuple[int, ...]:
        """Return the members in whose place there is another process than the one that was to meet."""
        if not self._known:
            return ()
        found = _QUALIFIED.search(key.subject)
        words = found[1].split() if found else []
        members = (rank for rank in sorted(self._known) if key.has_member(rank))
        return tuple(rank for rank in members if f"{rank}.{self._known[rank]}" not in words)

    def losses(self, lost: Iterable[int]) -> Losses:
        """Return lost ranks, each with its incarnation."""
        return tuple((rank, self._known.get(rank, 0)) for rank in sorted(lost))
