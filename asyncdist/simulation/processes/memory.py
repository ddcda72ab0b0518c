"""Controls garbage collection and huge memory pages in simulations of many ranks.

Garbage is collected only at fixed points (see :class:`asyncdist.simulation.scheduler.Scheduler`) and once at the end,
because Python's automatic collections would take half of the time. With pages of 2 MiB instead of 4 KiB, 1,000 ranks
exchange messages nearly twice as fast, because each message accesses more memory pages than the processor's translation
lookaside buffer holds.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Iterator
from typing import Final

#: Number of new objects after which Python collects garbage even between fixed points, to limit memory use.
_OBJECT_COUNT_MAX: Final = 2_000_000
#: Minimum number of ranks for which huge pages save more time than their setup takes.
MANY_RANKS: Final = 256
#: Argument of ``madvise`` that allows huge pages in an address range.
_MADV_HUGEPAGE: Final = 14
_MADV_COLLAPSE: Final = 25
_HUGE_PAGE_NBYTES: Final = 2 << 20


@contextlib.contextmanager
def collecting_at_fixed_points(rank_count: int) -> Iterator[None]:
    """Disable automatic garbage collection until the context ends, except after very many new objects."""
    before = gc.get_threshold()
    gc.collect(0)  # resets the count of new objects
    gc.set_threshold(_OBJECT_COUNT_MAX, 50, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if rank_count >= MANY_RANKS:
            gc.collect()


def use_huge_pages() -> int:
    """Ask Linux to move this process's heap into huge pages; return the number of bytes requested, 0 if refused."""
    if not sys.platform.startswith("linux"):
        return 0
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int
    moved_nbytes = 0
    for begin, end in _anonymous_regions():
        begin = -(-begin // _HUGE_PAGE_NBYTES) * _HUGE_PAGE_NBYTES
        nbytes = (end - begin) // _HUGE_PAGE_NBYTES * _HUGE_PAGE_NBYTES
        if nbytes > 0 and madvise(begin, nbytes, _MADV_HUGEPAGE) == 0 == madvise(begin, nbytes, _MADV_COLLAPSE):
            moved_nbytes += nbytes
    return moved_nbytes


def _anonymous_regions() -> Iterator[tuple[int, int]]:
    """Yield the address ranges of this process's anonymous private memory, except the main stack."""
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            addresses, rights, _, _, inode, *name = line.split(maxsplit=5)
            if rights.startswith("rw-p") and inode == "0" and (not name or name[0].strip() == "[heap]"):
                begin, end = addresses.split("-")
                yield int(begin, 16), int(end, 16)
