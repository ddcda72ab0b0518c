"""Controls garbage collection and memory pages in simulations of many ranks.

Garbage is collected only at fixed points (see :class:`asyncdist.simulation.scheduler.Scheduler`) and once at the end,
because Python's automatic collections would take half of the simulation's time. With many ranks, the objects that
survive some of these collections are *frozen*: later collections skip them.

Handling a message accesses more memory pages than the processor's translation lookaside buffer holds. Simulations of
many ranks therefore allocate objects in huge pages, of 2 MiB instead of 4 KiB.

The allocating functions are C code in the module's ``.pxd`` file, used if the module is compiled
(:mod:`asyncdist.compiled`).
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Final

#: Minimum number of ranks for which huge pages save more time than their setup takes.
MANY_RANKS: Final = 256
#: Number of new objects, in total and per rank, after which Python collects garbage even between fixed points, to limit
#: memory use.
_OBJECT_COUNT_MAX: Final = 2_000_000
_OBJECT_COUNT_OF_RANK: Final = 5_000
_IS_COMPILED: Final = not __file__.endswith(".py")


@contextlib.contextmanager
def collecting_at_fixed_points(rank_count: int) -> Iterator[None]:
    """Disable automatic garbage collection until the context ends, except after very many new objects."""
    before = gc.get_threshold()
    gc.collect(0)  # resets the count of new objects
    gc.set_threshold(_OBJECT_COUNT_MAX + _OBJECT_COUNT_OF_RANK * rank_count, 50, 1000)
    try:
        if rank_count < MANY_RANKS:
            yield
        else:
            with _frozen(), _huge_pages():
                yield
    finally:
        gc.set_threshold(*before)


@contextlib.contextmanager
def _frozen() -> Iterator[None]:
    """Freeze all existing objects. When the context ends, unfreeze all objects and collect garbage."""
    had_frozen = gc.get_freeze_count() > 0
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.collect()
        if had_frozen:  # the program froze its objects before the simulation
            gc.freeze()


@contextlib.contextmanager
def _huge_pages() -> Iterator[None]:
    """Allocate the memory for Python's objects in huge pages until the context ends, if Linux grants them."""
    if not _IS_COMPILED:
        yield
        return
    begin_huge_pages()  # type: ignore[name-defined]  # noqa: F821 -- in the .pxd file
    try:
        yield
    finally:
        end_huge_pages()  # type: ignore[name-defined]  # noqa: F821 -- in the .pxd file
