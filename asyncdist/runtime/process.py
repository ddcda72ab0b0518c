"""Limits the threads of a rank's process, reduces its garbage collections, and frees the memory of ended policies."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import sys
import weakref
from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor

from asyncdist.launchers import detection

#: Modules built with nanobind, which at the interpreter's exit prints all of its objects that still exist. GPU builds
#: of torch import triton.
_COUNT_AT_THE_END: Final = ("triton", "jaxlib")
#: Size in bytes of the state of ended policies for which garbage is collected. A full collection takes some 70 ms, and
#: several times the state's size may be freed.
_ENDED_NBYTES_MAX: Final = 8 << 20
#: Ended policies that still exist, with the sizes of their states in bytes.
_ended: Final[weakref.WeakKeyDictionary[object, int]] = weakref.WeakKeyDictionary()
#: A container that is hidden from the garbage collector if objects were frozen while DDP or FSDP wrappers
#: could exist.
_mark = [object()]


def limit_threads() -> None:
    """Limit torch's threads to this rank's share of the host's cores. By default, every rank would use all cores."""
    threads = detection.threads_per_rank()
    if threads is not None:
        torch.set_num_threads(threads)


@functools.cache  # Counting frozen objects takes time in proportion to their number.
def spare_collections() -> None:
    """Exclude all existing objects from garbage collection. Only the first call has an effect.

    These objects, of which torch makes some 170,000, live as long as the process. Visiting them in full collections
    took a quarter of an idle rank's time.
    """
    global _mark
    if gc.get_freeze_count() == 0:
        gc.freeze()
        atexit.register(_end)
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            _mark = [object()]


def note_ended(policy: object, tensors: Iterable[Tensor]) -> None:
    """Record that a policy has ended. Reference cycles may keep its model and buffers in memory.

    Args:
        tensors: Parameters and buffers of its model.
    """
    with contextlib.suppress(RuntimeError, ValueError):  # raised for sparse and uninitialized tensors
        _ended[policy] = sum(each.nbytes for each in tensors)


def free_ended(*, is_last: bool = False) -> None:
    """Collect garbage if ended policies with large states still exist, unless the program has disabled collections.

    Python decides about full collections by the number of objects, not by their bytes. Without this call, a
    hyperparameter search would run out of memory.

    Args:
        is_last: Whether policies that survive the collection, because the program uses them, are no longer recorded.
    """
    if _ended and sum(_ended.values()) >= _ENDED_NBYTES_MAX and gc.isenabled():
        gc.collect()
        if is_last:
            _ended.clear()


def may_hide_wrappers() -> bool:
    """Return whether frozen objects may include DDP or FSDP wrappers, which exist only with torch.distributed.

    If so, :func:`gc.get_referrers` does not find all wrappers.
    """
    return not any(holder is _mark for holder in gc.get_referrers(_mark[0]))


def _end() -> None:
    """Make frozen objects collectable at exit if a loaded library would otherwise report them as leaks."""
    if any(name in sys.modules for name in _COUNT_AT_THE_END):
        gc.unfreeze()
