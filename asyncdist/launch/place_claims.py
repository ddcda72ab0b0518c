"""Takes free places in a job for ranks that join it: ``python place_claims.py HOST PORT COUNT VERSION``.

The launcher of a job with places says in the store which job it is and what becomes of each place, under the key
``place/RANK``:

- ``held``, and who holds it: a rank is there, or will be.
- ``free N``: nobody is there; the process that comes will be the start number N of that rank.
- ``left``: its rank has ended by itself, which the others know of. Nobody takes its place.

This program takes free places, the lowest first, and prints what a launcher has to know to start ranks there, or why it
cannot: one line of JSON. Then it reads ``KEY VALUE`` lines from its standard input, and sets these keys for its
launcher, which does without torch. When the input ends its launcher has, in whatever way: the places of which nothing
was said since are free again.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Final

#: This file, to be run as a program.
PROGRAM: Final = os.path.abspath(__file__)
#: The key that says which job this is, and the one that says that it is over.
JOB: Final = "places"
OVER: Final = "over"
#: For torch, which waits for much longer where what listens is silent.
_CONNECT_S: Final = 5.0
_FREE: Final = "free "
NOT_BELIEVED: Final = (
    "the job there has another secret than this command: give both the same ASYNCDIST_JOB_SECRET_FILE, a file of mode "
    "0600. On the host and for the user of the job's launcher, the secret is found without it"
)
#: How often places are asked for again where some are free, though too few, and the longest pause between: of two that
#: ask at the same moment each may have got some.
_PAUSE_COUNT: Final = 5
_PAUSE_S: Final = 0.3


class ClaimError(Exception):
    """No places can be taken: the message says why."""


def describe(job: str, size: int, empty_count: int, version: str, *, is_open: bool = False) -> str:
    """Return what the launcher of a job says of it.

    Args:
        job: its name.
        size: of its world.
        empty_count: how many places, the highest, have no process when the world begins.
        version: of asyncdist.
        is_open: Whether ranks of other hosts may join.
    """
    return json.dumps({"job": job, "size": size, "empty_count": empty_count, "version": version, "is_open": is_open})


def claim(store: Any, count: int, version: str) -> dict[str, Any]:
    """Take places.

    Args:
        store: the part of the store that belongs to the job.
        count: how many.
        version: of asyncdist here.

    Returns:
        What :func:`describe` was given, and ``places``: rank and number of the start of each.

    Raises:
        ClaimError: too few are free, or the job is none that ranks of this version can join. None are taken then.
    """
    if not store.check([JOB]):
        raise ClaimError("no job of asyncdist run --places is there")
    job: dict[str, Any] = json.loads(bytes(store.get(JOB)))
    if job["version"] != version:
        raise ClaimError(f"the job has asyncdist {job['version']}, and this is asyncdist {version}; allowed: the same")
    if store.check([OVER]):
        raise ClaimError("the job is over")
    pause_count = 0
    while len(places := _take_lowest(store, job["size"], count)) < count:
        for rank, number in places:
            store.set(f"place/{rank}", f"{_FREE}{number}")
        if not places or pause_count == _PAUSE_COUNT:
            break
        pause_count += 1
        time.sleep(_PAUSE_S * secrets.randbelow(100) / 100)  # another one may have done the same at this moment
    else:
        return {**job, "places": places}
    raise ClaimError(f"{len(places)} of its {job['size']} places are free, and -n asks for {count}")


def _take_lowest(store: Any, size: int, count: int) -> list[tuple[int, int]]:
    """Take the lowest places that are free, up to so many; return rank and number of the start of each."""
    places: list[tuple[int, int]] = []
    for rank in range(size):
        number = _take(store, rank) if len(places) < count else None
        if number is not None:
            places.append((rank, number))
    return places


def _take(store: Any, rank: int) -> int | None:
    """Take a place if it is free; return the number of the start that comes there."""
    key, mine = f"place/{rank}", f"held {secrets.token_hex(8)}"
    if not store.check([key]):  # another program has written there
        return None
    found = bytes(store.get(key)).decode()
    if not found.startswith(_FREE) or bytes(store.compare_set(key, found, mine)).decode() != mine:
        return None
    return int(found.removeprefix(_FREE))


def keep(store: Any, places: Iterable[tuple[int, int]], lines: Iterable[str]) -> None:
    """Set the keys that the launcher names until it ends; then free the places of which it has said nothing.

    Args:
        store: as for :func:`claim`.
        places: that were taken.
        lines: from the launcher: keys of the store, and values.
    """
    newest = dict(places)  # by rank: no later start has been made
    for line in lines:
        key, _, value = line.rstrip("\n").removeprefix("asyncdist/").partition(" ")
        store.set(key, value)
        what, _, which = key.partition("/")
        if what == "exited":
            place, _, ended = which.partition(".")
            newest[int(place)] = int(ended) + 1
        elif what == "place":
            newest.pop(int(which))
    for rank, number in newest.items():
        store.set(f"exited/{rank}.{number}", "")
        store.set(f"place/{rank}", f"{_FREE}{number + 1}")


def main(host: str, port: int, count: int, version: str) -> None:
    """Take places, and keep them until the launcher has ended."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from asyncdist import environment
    from asyncdist.transports.torch_distributed.meeting.sealed_store import SealedStore
    from asyncdist.trust.job_secret import JobSecret

    is_store = False
    secret = JobSecret((environment.given_secret() or "").encode())
    try:
        common = TCPStore(host, port, None, False, timedelta(seconds=_CONNECT_S), wait_for_workers=False)
        is_store = True
        store = SealedStore(common, secret).part("asyncdist")
        name = f"{store.prefix}{JOB}"
        if common.check([name]) and secret.unseal(name, bytes(common.get(name))) is None:
            raise ClaimError(NOT_BELIEVED)
        found = claim(store, count, version)
    except (ClaimError, RuntimeError) as error:
        has_closed = is_store or not _listens(host, port)
        unsaid = "the job is over" if has_closed else "what listens there is no store"
        print(json.dumps({"error": str(error) if isinstance(error, ClaimError) else unsaid}), flush=True)
        return
    print(json.dumps(found), flush=True)
    try:
        keep(store, found["places"], sys.stdin)
    except RuntimeError:  # the store has closed
        return


def _listens(host: str, port: int) -> bool:
    """Return whether anybody listens there; the launcher has found somebody a moment ago."""
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(PROGRAM)))
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
