"""Passes the final counters of ended ranks to the last table of ``asyncdist run --live``.

A rank that has ended cannot answer requests, so it first writes its counters to the folder named by
ASYNCDIST_LAST_COUNTERS, which ``asyncdist run --live`` creates.
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Final

from asyncdist.live.counters import RankCounters, from_bytes
from asyncdist.story.facts import to_bytes
from asyncdist.trust import private_folders

logger = logging.getLogger("asyncdist.live.last_counters")

#: Maximum number of bytes of a rank's file.
_NBYTES_MAX: Final = 1 << 20
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


def leave(folder: str, counters: RankCounters) -> None:
    """Write the counters of an ending rank into ``folder``. Do nothing on a host without this folder."""
    try:
        with private_folders.opened(folder) as parent:
            file = os.open(f"{counters.rank}.{os.getpid()}", _NEW, mode=0o600, dir_fd=parent)
            with os.fdopen(file, "wb") as opened:
                opened.write(to_bytes(counters))
    except OSError as error:
        logger.debug("rank %d could not write its counters to %s: %s", counters.rank, folder, error)


def collect(folder: str, job: str | None) -> list[RankCounters]:
    """Return the counters in ``folder``, sorted by rank. For a restarted rank, only its newest process counts.

    Only ranks of ``job`` are included, because a rank may have started another job. None includes all jobs.
    """
    found: dict[int, RankCounters] = {}
    with contextlib.suppress(OSError), private_folders.opened(folder) as parent:
        for name in os.listdir(parent):
            with contextlib.suppress(OSError, ValueError):  # the file of a killed rank may be incomplete
                file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
                with os.fdopen(file, "rb") as opened:
                    counters = from_bytes(opened.read(_NBYTES_MAX))
                other = found.get(counters.rank)
                if job in (None, counters.job) and (other is None or other.incarnation <= counters.incarnation):
                    found[counters.rank] = counters
    return [found[rank] for rank in sorted(found)]
