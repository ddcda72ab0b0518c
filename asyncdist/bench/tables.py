"""Formats the tables that benchmarks print."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncdist.wording import aligned


@dataclass(frozen=True, slots=True)
class Table:
    """Holds the results of a benchmark.

    Attributes:
        title: Quantity that was measured, and number of repetitions.
        headings: Column headings: the parameter, asyncdist's value, the rival's value, and their ratio.
        rows: Cells of each row.
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
