"""Prepares the process of a rank: limits the threads of torch, and relieves the garbage collector."""

from __future__ import annotations

import atexit
import gc
import sys
from typing import Final

import torch

from asyncdist import environment

#: Made with nanobind, which lists its objects that outlive the interpreter. Each GPU build of torch imports the first.
_COUNT_AT_THE_END: Final = ("triton", "jaxlib")


def limit_threads() -> None:
    """Let torch use this rank's share of the host's cores: by itself it would use all of them on every rank."""
    threads = environment.threads_per_rank()
    if threads is not None:
        torch.set_num_threads(threads)


def spare_collections() -> None:
    """Take what was imported, some 170,000 objects of torch, out of garbage collection.

    These objects live as long as the process. Each full collection walked them, and so did the interpreter at its end:
    a quarter of the time of a rank that does nothing. This is done once in a process, so that what a user drops between
    two runs is collected.
    """
    if gc.get_freeze_count() == 0:
        gc.freeze()
        atexit.register(_end)


def _end() -> None:
    """Have the interpreter collect all at its end, where a library prints what of its own is left then."""
    if any(name in sys.modules for name in _COUNT_AT_THE_END):
        gc.unfreeze()
