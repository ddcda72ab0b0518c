"""Formats the tables that benchmarks print."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncdist.wording import aligned


@dataclass(frozen=True, slots=True)
class Table:
    """The results of a benchmark, with a title and column headings. ``str()`` returns a table."""

    title: str
    headings: tuple[str, str, str, str]
    rows: Sequence[tuple[str, str, str, str]]

    def __str__(self) -> str:
        return f"{self.title}\n{aligned([self.headings, *self.rows])}"


def compared_us(what: str, ours_us: float, rival_us: float) -> tuple[str, str, str, str]:
    """Return a table row that compares two times in microseconds."""
    return what, f"{ours_us:.2f} us", f"{rival_us:.2f} us", f"x{ours_us / rival_us:.2f}"


def compared_gb_s(what: str, ours_gb_s: float, rival_gb_s: float) -> tuple[str, str, str, str]:
    """Return a table row that compares two rates in GB/s."""
    return what, f"{ours_gb_s:.2f} GB/s", f"{rival_gb_s:.2f} GB/s", f"x{ours_gb_s / rival_gb_s:.2f}"
