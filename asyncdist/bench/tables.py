"""Makes the tables that benchmarks print, of the times that they have taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncdist.wording import aligned


@dataclass(frozen=True, slots=True)
class Table:
    """Holds what a benchmark has found.

    Attributes:
        title: what was measured, and how often.
        headings: of the columns: what varies, ours, the rival, and how many times the rival's value ours is.
        rows: their cells.
    """

    title: str
    headings: tuple[str, str, str, str]
    rows: Sequence[tuple[str, str, str, str]]

    def __str__(self) -> str:
        return f"{self.title}\n{aligned([self.headings, *self.rows])}"


def compared_us(what: str, ours_us: float, rival_us: float) -> tuple[str, str, str, str]:
    """Make a row of two times in microseconds."""
    return what, f"{ours_us:.2f} us", f"{rival_us:.2f} us", f"x{ours_us / rival_us:.2f}"


def compared_gb_s(what: str, ours_gb_s: float, rival_gb_s: float) -> tuple[str, str, str, str]:
    """Make a row of two rates in GB/s."""
    return what, f"{ours_gb_s:.2f} GB/s", f"{rival_gb_s:.2f} GB/s", f"x{ours_gb_s / rival_gb_s:.2f}"
