"""Runs the populations of ``scenarios.py`` with ranks that read each other's memory, like processes of one host.

Simulated ranks are in one process, which may read its own memory. So the same plans run once more, faults included,
with all checks of ``scenarios.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from asyncdist.simulation import Fault, SimReport
from asyncdist.simulation.transport import SimTransport
from protocols.parameter_stream import neighbours
from simulation import scenarios


@contextmanager
def shared_memory() -> Iterator[None]:
    """Let simulated ranks read each other's memory, even for small models."""
    init = SimTransport.__init__

    def as_a_process(self: SimTransport, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.capabilities = dataclasses.replace(self.capabilities, shares_memory=True)

    with (
        mock.patch.object(SimTransport, "__init__", as_a_process),
        mock.patch.object(neighbours, "READ_NBYTES_MIN", 1),
    ):
        yield


def scenario(seed: int, faults: Sequence[Fault] | None = None) -> SimReport:
    """Run :func:`simulation.scenarios.scenario` with snapshots that are read from memory."""
    with shared_memory():
        return scenarios.scenario(seed, faults)
