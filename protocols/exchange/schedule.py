"""Determines the steps in which parts of the model (fragments) are averaged, and tracks this on one member.

A fragment is *due* from the step that the schedule names until it is contributed. It is then *in flight* until its mean
is applied. Members that have taken the same number of steps have the same state, except with ``skips_late``. If a saved
run is resumed with other options, :meth:`PendingRounds.catch_up` makes the states equal again. This module does not
wait, send messages or read a clock.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Final, NamedTuple

_LEAD_MIN: Final = -(1 << 30)  # makes all results of PendingRounds.mark negative


@dataclass(frozen=True, slots=True)
class Schedule:
    """Defines the steps, counted from 0, in which a rank contributes the fragments (parts) of its model.

    During the warm-up, all fragments are due in each step, and are applied in the same step. Afterwards each fragment
    is due every ``every`` steps, and the fragments follow each other at equal distances. The last (or only) fragment is
    due in step i if ``(i + 1 - warmup_steps) % every == 0``. The fragments are therefore due in turn, beginning with
    fragment 0, so round numbers never decrease.
    """

    every: int
    fragment_count: int
    overlap_steps: int
    warmup_steps: int

    def due(self, step: int) -> tuple[int, ...]:
        """Return the model fragments that are contributed in ``step``."""
        if step < self.warmup_steps:
            return tuple(range(self.fragment_count))
        place, count = (step + 1 - self.warmup_steps) % self.every, self.fragment_count
        return tuple(number for number in range(count) if (number + 1) * self.every // count % self.every == place)

    def due_count(self, fragment: int, step: int) -> int:
        """Return the number of steps before ``step`` in which a model fragment is due."""
        place = 0 if self.fragment_count == 1 else (fragment + 1) * self.every // self.fragment_count % self.every
        regular_count = max(0, step - self.warmup_steps)
        return min(step, self.warmup_steps) + (regular_count + (self.every - place) % self.every) // self.every

    def applied_at(self, step: int) -> int:
        """Return the step in which the mean of a contribution that is made in ``step`` is applied."""
        return step if step < self.warmup_steps else step + self.overlap_steps


class PendingRound(NamedTuple):
    """Records an averaging round to which this member has contributed, but whose mean it has not applied yet.

    Attributes:
        base_version: Number of the fragment's means that this member had applied before the contribution.
        waits: Whether the member waits for the mean in the step of the contribution, because it had missed means. It
            sends its contribution while it waits, because sending during training would take several of its slow steps.
    """

    number: int
    captured_at: int
    applied_at: int
    base_version: int = 0
    waits: bool = False


class PendingRounds:
    """Tracks which model fragments one member must contribute, and which means it must apply.

    Args:
        schedule: Steps in which the fragments are due.
        skips_late: Whether a step skips a mean that is due but has not arrived. A fragment is then contributed again
            only after its mean was applied.

    Attributes:
        is_overlapped: Whether a contribution's mean is applied in a later step.
        in_any_order: Whether the order in which fragments are contributed may differ from the order of the round
            numbers.
        in_flight: Rounds to which this member has contributed but whose means it has not applied, by fragment.
    """

    def __init__(self, schedule: Schedule, *, skips_late: bool = False) -> None:
        self._schedule = schedule
        self.in_any_order = False
        self.skips_late = skips_late
        self.is_overlapped = schedule.overlap_steps > 0
        self.in_flight: dict[int, PendingRound] = {}
        self._captured = [0] * schedule.fragment_count  # by fragment: number of contributions
        self._uncontributed: list[int] = []  # due fragments, in the order in which they will be contributed
        self._saved_order: tuple[int, ...] = ()  # result of _order() when a loaded state was saved
        self._catches_up = False  # whether members have resumed with different rounds; False from the next step on
        self._overdue_count = 0  # number of due fragments whose means are applied in the step that contributes them

    def note_step(self, step: int) -> None:
        """Record that the model fragments scheduled for ``step`` must be contributed."""
        self._catches_up = False
        for fragment in self._schedule.due(step):
            if self._is_in_turn(fragment) and not (self.skips_late and fragment in self._uncontributed):
                self._uncontributed.append(fragment)

    def drop_uncontributed(self) -> None:
        """Drop all model fragments that are due but not contributed."""
        self._uncontributed.clear()

    def can_begin(self) -> bool:
        """Return whether a model fragment is due and can be contributed now."""
        return bool(self._uncontributed) and self._uncontributed[0] not in self.in_flight

    def next(self) -> tuple[int, int]:
        """Return the next model fragment to contribute, and the number of its round. Requires :meth:`can_begin`."""
        assert self.can_begin(), "no fragment can be captured"
        fragment = self._uncontributed[0]
        return fragment, self._captured[fragment] * len(self._captured) + fragment + 1

    def last_number(self) -> int:
        """Return the number of the last round to which this member has contributed, or 0 before the first."""
        count = len(self._captured)
        return max((each - 1) * count + place + 1 if each else 0 for place, each in enumerate(self._captured))

    def begin(self, step: int, base_version: int = 0, *, waits: bool = False) -> tuple[int, int]:
        """Record that the next due fragment is contributed in ``step``. Return the fragment and its round's number."""
        fragment, number = self.next()
        del self._uncontributed[0]
        self._captured[fragment] += 1
        is_immediate, self._overdue_count = waits or self._overdue_count > 0, max(0, self._overdue_count - 1)
        applied_at = step if is_immediate else self._schedule.applied_at(step)
        self.in_flight[fragment] = PendingRound(number, step, applied_at, base_version, waits)
        return fragment, number

    def skip_to(self, number: int) -> None:
        """Skip a model fragment's rounds before round ``number``, which have already been decided."""
        count = len(self._captured)
        self._captured[(number - 1) % count] = (number - 1) // count

    def move(self, fragment: int, number: int) -> PendingRound:
        """Record that a model fragment's contribution counts in round ``number``. Return its changed record."""
        self.in_flight[fragment] = pending = self.in_flight[fragment]._replace(number=number)
        self._captured[fragment] = (number - 1) // len(self._captured) + 1
        return pending

    def due_means(self, step: int) -> list[tuple[int, PendingRound]]:
        """Return the contributed model fragments whose means ``step`` should apply, each with its record."""
        return sorted(each for each in self.in_flight.items() if each[1].applied_at <= step)

    def end(self, fragment: int) -> None:
        """Record that a model fragment's mean was applied."""
        del self.in_flight[fragment]

    def _is_in_turn(self, fragment: int) -> bool:
        """Return whether a fragment's next round is the first round that is neither contributed to nor due.

        Rounds end in the order of their numbers, so members must contribute in this order. Fragments can be due in
        another order if their means are late, or if training was resumed with another schedule.
        """
        if self.in_any_order:
            return fragment not in self._uncontributed
        counts = [count + self._uncontributed.count(each) for each, count in enumerate(self._captured)]
        return fragment == counts.index(min(counts))

    # -- ranks that resume with different rounds ----------------------------------------------------------------------

    def step_to_agree(self, step: int) -> str:
        """Return the step in which all members must resume, or "" if each may resume in its own step.

        Each member's due rounds depend on its own step number. If the order of the rounds changed while step numbers
        differed, a member could wait for rounds to which the others contribute much later or never.
        """
        is_same = self._saved_order in ((), self._order())
        return "" if is_same or self.skips_late or self.in_any_order else str(step)

    def _order(self) -> tuple[int, ...]:
        """Return all that determines in which steps members contribute to which rounds, as integers."""
        return (*astuple(self._schedule), int(self.skips_late), int(self.in_any_order))

    def mark(self, step: int) -> int:
        """Return a negative number that is equal on members that will be due for the same rounds in the same steps.

        In a resumed run, the numbers differ if the ranks saved their states in different rounds, as with
        ``late="skip"``.

        Args:
            step: Next step of this member.
        """
        leads = self._leads(step)
        late = [(each, pending.applied_at) for each, pending in self.in_flight.items() if not self._is_on_time(pending)]
        checksum = zlib.crc32(repr((self._captured, self._uncontributed, leads, sorted(late))).encode())
        return -((max(leads) - _LEAD_MIN) << 32 | checksum)

    def catch_up(self, step: int, marks: Sequence[int]) -> None:
        """Make this member due for the same rounds in the same steps as all other members, if it is not yet.

        In its next step, each member then contributes to all rounds up to the newest one, and applies their means. No
        member waits for a round to which another member would contribute much later or never.

        Args:
            marks: Distinct results of the members' :meth:`mark`, including the smallest.
        """
        if len(marks) < 2 or min(marks) >= 0:  # marks from 0 are checksums of the first weights
            return
        lead, leads = (-min(marks) >> 32) + _LEAD_MIN, self._leads(step)
        count = len(leads)
        missing = [
            (self._captured[fragment] + number) * count + fragment
            for fragment, own in enumerate(leads)
            for number in range(self._uncontributed.count(fragment) + lead - own)
        ]
        self._uncontributed = [number % count for number in sorted(missing)]
        self._catches_up, self._overdue_count = True, len(missing)
        for fragment, pending in self.in_flight.items():
            self.in_flight[fragment] = pending._replace(applied_at=min(step, pending.applied_at))

    @property
    def may_differ(self) -> bool:
        """Whether members that have taken the same number of steps may have contributed to different rounds."""
        return self.skips_late or self._catches_up

    def _leads(self, step: int) -> list[int]:
        """Return, by fragment, the number of contributions made or due, minus those that were due before ``step``."""
        return [
            count + self._uncontributed.count(fragment) - self._schedule.due_count(fragment, step)
            for fragment, count in enumerate(self._captured)
        ]

    def _is_on_time(self, pending: PendingRound) -> bool:
        fragment = (pending.number - 1) % len(self._captured)
        is_due = fragment in self._schedule.due(pending.captured_at)
        return is_due and pending.applied_at == self._schedule.applied_at(pending.captured_at)

    @property
    def captured(self) -> tuple[int, ...]:
        """Number of this member's contributions by model fragment."""
        return tuple(self._captured)

    def state(self) -> dict[str, Any]:
        """Return the number of contributions by fragment, the due fragments and the schedule, for a checkpoint."""
        return {
            "captured": list(self._captured),
            "owed": list(self._uncontributed),
            "schedule": list(self._order()),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state`."""
        self._captured, self._uncontributed = list(state["captured"]), list(state["owed"])
        self._saved_order = tuple(map(int, state.get("schedule", ())))
        self._catches_up, self._overdue_count = False, 0
