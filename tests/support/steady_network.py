"""Simulations with exact durations, so that a fault's delay can be read from the clock."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from asyncdist.simulation import Fault, Link, Network, SimReport, simulate

STEADY = Network(
    link=Link(latency_s=1.0, bandwidth_nbytes_per_s=1e12),
    cross_link=Link(latency_s=1.0, bandwidth_nbytes_per_s=1e12),
    loss_detection_s=0.5,
    eager_nbytes=1000,
)

#: Duration of turns of the loop and transfers of a few bytes.
CLOSE_S = 1e-3


@dataclass(frozen=True, slots=True)
class Number:
    """A message with a number."""

    value: int


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the expected warnings: lost coordinators, dropped frames."""
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def run(main: Any, *args: Any, ranks: int = 2, faults: list[Fault], **options: Any) -> SimReport[Any]:
    """Simulate on a steady network; every fault must have fired."""
    with quiet():
        report = simulate(main, *args, ranks=ranks, faults=faults, network=STEADY, **options)
    report.check_faults()
    return report
