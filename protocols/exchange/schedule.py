"""Determines the steps in which fragments are contributed and their means applied. All functions are pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Schedule:
    """Defines the steps, counted from 0, in which a rank contributes the fragments (parts) of its model.

    During the warm-up, all fragments are due in each step, and are applied in the same step. Afterwards each fragment
    is due every ``every`` steps, and the fragments follow each other at equal distances. The last (or only) fragment is
    due in step i if ``(i + 1 - warmup_steps) % every == 0``. The fragments are therefore due in turn, beginning with
    fragment 0, so that round numbers never decrease.
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
