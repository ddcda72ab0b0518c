"""Tests which ranks an agreement never waits for, and that operations which no rank withdraws from take no memory."""

from __future__ import annotations

from asyncdist.collectives.agreement.absences import Absences
from asyncdist.collectives.agreement.messages import AgreementKey, Meeting


def test_only_a_withdrawal_is_stored() -> None:
    """Regression: each operation was stored. After 4096 of them, withdrawals were refused, and ranks waited."""
    absences = Absences(0, 0)
    keys = [AgreementKey.of(f"operation {number}", range(3)) for number in range(5)]
    meetings = [Meeting(key, (0, 1, 2), 0, 0.0) for key in keys]
    assert [*map(absences.of, meetings)] == [()] * 5 and not absences.withdrawn
    absences.withdrawn[keys[3].of_all_occurrences] = {2}
    assert [*map(absences.of, meetings)] == [(), (), (), (2,), ()]
    absences.gone.add(1)
    assert [*map(absences.of, meetings)] == [(1,), (1,), (1,), (1, 2), (1,)]
