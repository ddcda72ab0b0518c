"""Keeps the memory of simulations of many ranks bounded, and quick to reach.

Thousands of ranks are millions of Python objects that live to the end. Looking through them as often as Python's
garbage collector does takes half of the time, so it runs at fixed points alone (those of
:class:`asyncdist.simulation.scheduler.Scheduler`). What such a simulation leaves behind would stay until Python next
looks through all objects, which may be never, so this is done at its end. And each message touches many pages of
memory, more than whose addresses a processor keeps: in pages of 2 MiB in place of 4 KiB, 1,000 ranks exchange messages
nearly twice as fast.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Iterator
from typing import Final

#: Objects made since the last fixed point that make Python collect all the same, lest memory run out before the next.
_OBJECT_COUNT_MAX: Final = 2_000_000
#: From so many ranks on, a second spent on memory is won back.
MANY_RANKS: Final = 256
#: Of ``madvise``: let the kernel use huge pages for a range, and move what is there into such pages now.
_MADV_HUGEPAGE: Final = 14
_MADV_COLLAPSE: Final = 25
_HUGE_PAGE_NBYTES: Final = 2 << 20


@contextlib.contextmanager
def collecting_at_fixed_points(rank_count: int) -> Iterator[None]:
    """Let Python collect no garbage by itself until the context ends, unless very many objects are made at a time."""
    before = gc.get_threshold()
    gc.collect(0)  # what counts is what is made from now on
    gc.set_threshold(_OBJECT_COUNT_MAX, 50, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if rank_count >= MANY_RANKS:
            gc.collect()


def use_huge_pages() -> int:
    """Move this process's heap into huge pages, where Linux can; returns the number of bytes that it was asked to move.

    Where it cannot, or may not, nothing happens: it is a matter of speed alone.
    """
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
    """Return where the private memory of this process is that belongs to no file, and is not main's stack."""
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            addresses, rights, _, _, inode, *name = line.split(maxsplit=5)
            if rights.startswith("rw-p") and inode == "0" and (not name or name[0].strip() == "[heap]"):
                begin, end = addresses.split("-")
                yield int(begin, 16), int(end, 16)
