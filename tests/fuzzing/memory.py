"""Checks whether memory grows during a long fuzz."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

#: Largest memory that may be allocated at once while some frames or messages are read: a frame of 64 KiB may contain
#: 65,000 small values.
PEAK_NBYTES_MAX: Final = 16 << 20
#: Largest growth of the process after the first tenth of the run.
GROWTH_NBYTES_MAX: Final = 24 << 20
GROWTH_BLOCKS_MAX: Final = 20_000


@dataclass(frozen=True, slots=True)
class Look:
    """A measurement of this process's memory.

    Attributes:
        resident_nbytes: Resident size of the process in bytes; 0 if the system does not report it.
        blocks: Number of blocks that Python has allocated.
    """

    resident_nbytes: int
    blocks: int

    def __str__(self) -> str:
        return f"{self.resident_nbytes / 2**20:.1f} MiB resident, {self.blocks:,} blocks"


def look() -> Look:
    """Measure the memory after a garbage collection."""
    gc.collect()
    try:
        resident_nbytes = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    except FileNotFoundError:
        resident_nbytes = 0
    return Look(resident_nbytes, sys.getallocatedblocks())


def check_flat(before: Look, after: Look) -> None:
    """Raise AssertionError if memory has grown."""
    assert after.resident_nbytes - before.resident_nbytes <= GROWTH_NBYTES_MAX, (
        f"resident memory grew from {before} to {after}"
    )
    assert after.blocks - before.blocks <= GROWTH_BLOCKS_MAX, f"the number of blocks grew from {before} to {after}"


@contextmanager
def bounded_peak() -> Iterator[None]:
    """Check that the body allocates little memory at once; otherwise raise AssertionError."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        yield
        peak_nbytes = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert peak_nbytes <= PEAK_NBYTES_MAX, f"{peak_nbytes:,} bytes were allocated at once"
