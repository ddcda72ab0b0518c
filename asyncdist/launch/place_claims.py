"""Takes free places in a job for ranks that join it: ``python place_claims.py HOST PORT COUNT VERSION``.

The launcher of a job with places describes the job in the store, and the state of each place under ``place/RANK``:

- ``held`` and a token of the holder: a rank has the place, or will have it.
- ``free N``: no rank has the place; the next process there will have the incarnation N.
- ``left``: its rank has ended on its own, and the others know it. No rank may take the place.

This program takes free places, the lowest first. It prints one line of JSON: the facts that a launcher needs to start
ranks there, or an error. Then it reads ``KEY VALUE`` lines from its standard input, and sets these keys for its
launcher, which does not import torch. When the input ends, the launcher has ended: places whose ranks have not been
reported as ended become free again.
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

#: Path of this file, to run it as a program.
PROGRAM: Final = os.path.abspath(__file__)
#: Keys of the job's description, and of the notice that the job is over.
JOB: Final = "places"
OVER: Final = "over"
#: Timeout for torch in seconds. By default it waits much longer if the listening process is silent.
_CONNECT_S: Final = 5.0
_FREE: Final = "free "
NOT_BELIEVED: Final = (
    "the job there has another secret than this command: give both the same ASYNCDIST_JOB_SECRET_FILE, a file with "
    "mode 0600. On the launcher's host, the launcher's user needs no such file"
)
#: Number of retries if too few places are free, and the longest pause between them in seconds: two claimants at the
#: same moment may each have got some.
_PAUSE_COUNT: Final = 5
_PAUSE_S: Final = 0.3


class ClaimError(Exception):
    """No places can be taken; the message says why."""


def describe(job: str, size: int, empty_count: int, version: str, *, is_open: bool = False) -> str:
    """Return the description of a job, as JSON.

    Args:
        job: Name of the job.
        size: Number of places of its world.
        empty_count: Number of places without a process when the world begins; these are the highest ranks.
        version: Version of asyncdist.
        is_open: Whether ranks of other hosts may join.
    """
    return json.dumps({"job": job, "size": size, "empty_count": empty_count, "version": version, "is_open": is_open})


def claim(store: Any, count: int, version: str) -> dict[str, Any]:
    """Take places.

    Args:
        store: Part of the store that belongs to the job.
        count: Number of places to take.
        version: Version of asyncdist in this process.

    Returns:
        The arguments of :func:`describe`, and ``places``: rank and incarnation for each place.

    Raises:
        ClaimError: Too few places are free, or ranks of this version cannot join the job. No place is taken then.
    """
    if not store.check([JOB]):
        raise ClaimError("there is no job of asyncdist run --places")
    job: dict[str, Any] = json.loads(bytes(store.get(JOB)))
    if job["version"] != version:
        raise ClaimError(f"the job has asyncdist {job['version']}, but this is asyncdist {version}; install the same")
    if store.check([OVER]):
        raise ClaimError("the job is over")
    pause_count = 0
    while len(places := _take_lowest(store, job["size"], count)) < count:
        for rank, number in places:
            store.set(f"place/{rank}", f"{_FREE}{number}")
        if not places or pause_count == _PAUSE_COUNT:
            break
        pause_count += 1
        time.sleep(_PAUSE_S * secrets.randbelow(100) / 100)  # another claimant may have done the same
    else:
        return {**job, "places": places}
    raise ClaimError(f"{len(places)} of its {job['size']} places are free, and -n asks for {count}")


def _take_lowest(store: Any, size: int, count: int) -> list[tuple[int, int]]:
    """Take up to ``count`` free places, the lowest first; return rank and incarnation for each."""
    places: list[tuple[int, int]] = []
    for rank in range(size):
        number = _take(store, rank) if len(places) < count else None
        if number is not None:
            places.append((rank, number))
    return places


def _take(store: Any, rank: int) -> int | None:
    """Take a place; return the incarnation for its next process, or None if the place is not free."""
    key, mine = f"place/{rank}", f"held {secrets.token_hex(8)}"
    if not store.check([key]):  # another program's store
        return None
    found = bytes(store.get(key)).decode()
    if not found.startswith(_FREE) or bytes(store.compare_set(key, found, mine)).decode() != mine:
        return None
    return int(found.removeprefix(_FREE))


def keep(store: Any, places: Iterable[tuple[int, int]], lines: Iterable[str]) -> None:
    """Set keys for the launcher until it ends; then free the places whose ranks it has not reported as ended.

    Args:
        store: Part of the store that belongs to the job.
        places: Rank and incarnation for each taken place.
        lines: Lines of the launcher, each a key and its value.
    """
    newest = dict(places)  # by rank: the last incarnation that was started
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
    """Take places, and hold them until the launcher has ended."""
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
        unsaid = "the job is over" if has_closed else "the process that listens there is not a store"
        print(json.dumps({"error": str(error) if isinstance(error, ClaimError) else unsaid}), flush=True)
        return
    print(json.dumps(found), flush=True)
    try:
        keep(store, found["places"], sys.stdin)
    except RuntimeError:  # the store is closed
        return


def _listens(host: str, port: int) -> bool:
    """Return whether a process still listens there; the launcher has found one just before."""
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(PROGRAM)))
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
