"""Prepares a rank's process: limits torch's threads, and reduces the work of the garbage collector."""

from __future__ import annotations

import atexit
import gc
import sys
from typing import Final

import torch

from asyncdist import environment

#: Modules built with nanobind, which prints every object that still exists when the interpreter exits. GPU builds of
#: torch import triton.
_COUNT_AT_THE_END: Final = ("triton", "jaxlib")


def limit_threads() -> None:
    """Limit torch to this rank's share of the host's cores, since by default every rank would use all cores."""
    threads = environment.threads_per_rank()
    if threads is not None:
        torch.set_num_threads(threads)


def spare_collections() -> None:
    """Exclude all existing objects, some 170,000 of torch, from garbage collection, once per process.

    These objects live as long as the process. Visiting them in full collections took a quarter of an idle rank's time.
    """
    if gc.get_freeze_count() == 0:
        gc.freeze()
        atexit.register(_end)


def _end() -> None:
    """Make frozen objects collectable at exit if a loaded library would otherwise print them as leaks."""
    if any(name in sys.modules for name in _COUNT_AT_THE_END):
        gc.unfreeze()
