"""Prepares the process of a rank: limits torch's threads, and reduces the work of the garbage collector."""

from __future__ import annotations

import atexit
import gc
import sys
from typing import Final

import torch

from asyncdist import environment

#: Modules made with nanobind, which prints its objects that outlive the interpreter. GPU builds of torch import the
#: first.
_COUNT_AT_THE_END: Final = ("triton", "jaxlib")


def limit_threads() -> None:
    """Limit torch to this rank's share of the host's cores; by default every rank would use all of them."""
    threads = environment.threads_per_rank()
    if threads is not None:
        torch.set_num_threads(threads)


def spare_collections() -> None:
    """Exclude imported objects, some 170,000 of torch, from garbage collection.

    These objects live as long as the process. Each full collection, and the interpreter's exit, walked over them, which
    took a quarter of the time of an idle rank. This is done once per process, so that objects that a user drops between
    two runs are collected.
    """
    if gc.get_freeze_count() == 0:
        gc.freeze()
        atexit.register(_end)


def _end() -> None:
    """Make the interpreter collect everything at exit if a loaded library prints its remaining objects then."""
    if any(name in sys.modules for name in _COUNT_AT_THE_END):
        gc.unfreeze()
