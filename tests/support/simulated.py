"""Checks the reports of simulations."""

from __future__ import annotations

from typing import Any

from asyncdist.simulation import SimReport


def check(report: SimReport[Any]) -> None:
    """Raise the exception of the first rank that an exception ended."""
    for result in report.results:
        if isinstance(result, BaseException):
            raise result
