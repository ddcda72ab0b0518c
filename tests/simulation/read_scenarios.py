"""The populations of ``scenarios.py``, whose ranks read each other's snapshots in memory, as processes of one host do.

Simulated ranks are one process, which may read its own memory. So the same plans are carried out once more, with faults
and all, and everything is checked that is checked there.
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
    """Let simulated ranks read each other's memory, also for small models."""
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
    """As :func:`simulation.scenarios.scenario`, in which snapshots are read."""
    with shared_memory():
        return scenarios.scenario(seed, faults)
