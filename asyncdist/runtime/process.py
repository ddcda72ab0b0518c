"""Prepares a rank's process: limits torch's threads, and reduces the work of the garbage collector."""

from __future__ import annotations

import atexit
import functools
import gc
import sys
from typing import Final

import torch

from asyncdist.launchers import detection

#: Modules built with nanobind, which prints all its objects that still exist at the interpreter's exit. GPU builds of
#: torch import triton.
_COUNT_AT_THE_END: Final = ("triton", "jaxlib")


def limit_threads() -> None:
    """Limit torch to this rank's share of the host's cores. By default, every rank would use all cores."""
    threads = detection.threads_per_rank()
    if threads is not None:
        torch.set_num_threads(threads)


@functools.cache  # counting frozen objects takes time in proportion to their number
def spare_collections() -> None:
    """Exclude all existing objects, of which torch makes some 170,000, from garbage collection, once per process.

    These objects live as long as the process. Visiting them in full collections took a quarter of an idle rank's time.
    """
    if gc.get_freeze_count() == 0:
        gc.freeze()
        atexit.register(_end)


def _end() -> None:
    """Make frozen objects collectable at exit if a loaded library would otherwise report them as leaks."""
    if any(name in sys.modules for name in _COUNT_AT_THE_END):
        gc.unfreeze()
