"""Keeps the counters with which ranks end, for the last table of ``asyncdist run --live``.

Nobody can ask a rank that has ended. So ``asyncdist run --live`` makes a folder, names it to the ranks in
ASYNCDIST_LAST_COUNTERS, and each rank writes its counters there when its main has ended. A rank that is killed writes
nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Final

from asyncdist.live.counters import RankCounters, from_bytes, to_bytes
from asyncdist.trust import private_folders

logger = logging.getLogger("asyncdist.live.last_counters")

#: A larger file is not of a rank.
_NBYTES_MAX: Final = 1 << 20
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


def leave(folder: str, counters: RankCounters) -> None:
    """Write the counters of a rank that ends into ``folder``; on another host than the table's, where is none, not."""
    try:
        with private_folders.opened(folder) as parent:
            file = os.open(f"{counters.rank}.{os.getpid()}", _NEW, mode=0o600, dir_fd=parent)
            with os.fdopen(file, "wb") as opened:
                opened.write(to_bytes(counters))
    except OSError as error:
        logger.debug("rank %d could not leave its counters in %s: %s", counters.rank, folder, error)


def collect(folder: str, job: str | None) -> list[RankCounters]:
    """Return the counters that ranks have left in ``folder``, one per rank: its newest process's.

    Args:
        folder: The folder that the ranks were given.
        job: The job whose ranks count: a rank may have started another job. None for all.
    """
    found: dict[int, RankCounters] = {}
    with contextlib.suppress(OSError), private_folders.opened(folder) as parent:
        for name in os.listdir(parent):
            with contextlib.suppress(OSError, ValueError):  # a rank was killed while it wrote
                file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
                with os.fdopen(file, "rb") as opened:
                    counters = from_bytes(opened.read(_NBYTES_MAX))
                other = found.get(counters.rank)
                if job in (None, counters.job) and (other is None or other.incarnation <= counters.incarnation):
                    found[counters.rank] = counters
    return [found[rank] for rank in sorted(found)]
