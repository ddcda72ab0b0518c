"""Judges, on a member, whether the coordinator that it reports to attends to its task.

A coordinator answers at the safe points of its rank. Where that rank's steps are long, where it does something else, or
where its host has no connection any more, rounds wait for it although nothing says that it is lost. So the first
members of the succession ask with each report for an answer, and one of them takes over when it is missing, or when
most answers come so late that rounds are lost by it. No clock of another rank is read, and no fixed time is the
measure: an answer is late by the steps and reports of the member that waits for it. That is the idea of an adaptive
failure detector (Hayashibara et al. 2004), with missed rounds in place of a probability. A false suspicion costs the
round under way, and no more: the coordinator that was suspected becomes a member.
"""

from collections import deque
from typing import Final

from protocols.selective.waiting import NOISE_S

#: So many members ask for answers. More than one: the first may be lost, or have long steps, at the same time.
WATCHER_COUNT: Final = 3
#: Reports in a row, and the seconds, without an answer after which the first of them takes over; the next ones wait
#: for a multiple of it. Rounds are lost from the second report on; processes that share cores are away for a while.
MISSED_REPORT_COUNT: Final = 3
SILENT_S: Final = 1.0
#: An answer is late if it took so many steps of this rank: one passes here and one there where steps are equally long.
LATE_STEPS: Final = 3.0
#: A round needs so many answers of the coordinator: the assignment, the freeze, and the end.
_ROUND_ANSWER_COUNT: Final = 3
_RECENT_COUNT: Final = 8
_LATE_COUNT: Final = 6  # of the recent answers


class Watch:
    """Remembers when one member asked the coordinator for an answer, and how long the latest answers took."""

    def __init__(self) -> None:
        self._asked_at: float | None = None  # of the first report since the last answer
        self._missed_count = 0  # later reports than that one
        self._step_s = self._interval_s = 0.0
        self._late: deque[bool] = deque(maxlen=_RECENT_COUNT)

    def begin(self) -> None:
        """Forget all: another rank coordinates."""
        self._asked_at = None
        self._missed_count = 0
        self._late.clear()

    def on_report(self, step_s: float, interval_s: float, now: float) -> None:
        """Note a report that asks for an answer, and how long this rank's steps and the time between reports are."""
        self._step_s, self._interval_s = step_s, interval_s
        if self._asked_at is None:
            self._asked_at, self._missed_count = now, 0
        else:
            self._missed_count += 1

    def on_answer(self, now: float) -> None:
        """Note that the coordinator has read a report."""
        if self._asked_at is None:
            return
        took_s, self._asked_at = now - self._asked_at, None
        is_long = took_s > max(NOISE_S, LATE_STEPS * self._step_s)
        self._late.append(is_long and _ROUND_ANSWER_COUNT * took_s > self._interval_s)

    def suspicion(self, place: int, now: float) -> str | None:
        """Return why this rank is to take over, as "has not answered for 2.1 s", or None.

        Args:
            place: This rank's place among the watchers, from 0.
            now: Seconds, by the clock of the other calls.
        """
        silent_s = now - self._asked_at if self._asked_at is not None else 0.0
        if silent_s >= SILENT_S * (1 + place) and self._missed_count >= MISSED_REPORT_COUNT * (1 + place):
            return f"has not answered for {silent_s:.2g} s"
        return "answers too late" if sum(self._late) >= _LATE_COUNT else None
