"""Reserves free ranks in a running job for new processes: ``python place_claims.py HOST PORT COUNT VERSION``.

A launcher of joining ranks runs this program, because the launcher itself does not import torch. A *place* is a rank
number in a job started with ``--places``. The job's store contains the place's state under ``place/RANK``:

- ``held`` and the holder's token: a process has the rank, or is about to have it.
- ``free N``: no process has the rank, and the next one will have incarnation N.
- ``left``: the rank's process has left the world in an orderly way, and no other process may replace it.

The program reserves the lowest free places. It prints one line of JSON: either an error, or the facts that a launcher
needs to start ranks in these places. Then it sets a key for each ``KEY VALUE`` line of its standard input. The end of
standard input means that the launcher has ended. Places whose ranks were not reported as ended then become free again.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Final

#: Path of this file, which is run as a program.
PROGRAM: Final = os.path.abspath(__file__)
#: Store key of the job's description.
JOB: Final = "places"
#: Store key that is set when the job has ended.
OVER: Final = "over"
#: Timeout in seconds for torch's store client, whose default is much longer.
_CONNECT_S: Final = 5.0
#: Seconds after which this process ends if the process at the address, perhaps a different service, does not answer.
#: torch's client would wait forever. The launcher gives up earlier.
_SILENT_S: Final = 65
_FREE: Final = "free "
SECRET_DIFFERS: Final = (
    "the job's secret differs from this command's: give both commands the same ASYNCDIST_JOB_SECRET_FILE, a file with "
    "mode 0600. On the launcher's host, the launcher's user needs no such file"
)
#: Number of retries if too few ranks are free. If several processes claim ranks simultaneously, each may get too few.
_PAUSE_COUNT: Final = 5
_PAUSE_S: Final = 0.3


class ClaimError(Exception):
    """Raised if free ranks of a job cannot be reserved. The message gives the reason."""


def describe(job: str, size: int, empty_count: int, version: str, *, host: str, is_open: bool = False) -> str:
    """Return a job's description as JSON. The last ``empty_count`` of its ``size`` ranks may join later.

    ``host`` identifies the host of the job's launcher.
    """
    facts = {"job": job, "size": size, "empty_count": empty_count, "version": version}
    return json.dumps({**facts, "host": host, "is_open": is_open})


def claim(store: Any, count: int, version: str) -> dict[str, Any]:
    """Reserve ``count`` free ranks, or raise ClaimError. Return the job's description plus ranks and incarnations."""
    if not store.check([JOB]):
        raise ClaimError("no job that was started by `asyncdist run --places` listens at this address")
    job: dict[str, Any] = json.loads(bytes(store.get(JOB)))
    if job["version"] != version:
        raise ClaimError(
            f"this asyncdist must have the job's version {job['version']}, got {version}; install that version"
        )
    if store.check([OVER]):
        raise ClaimError("the job has ended")
    pause_count = 0
    while len(places := _reserve_lowest(store, job["size"], count)) < count:
        for rank, number in places:
            store.set(f"place/{rank}", f"{_FREE}{number}")
        if not places or pause_count == _PAUSE_COUNT:
            break
        pause_count += 1
        time.sleep(_PAUSE_S * secrets.randbelow(100) / 100)  # a random pause, in case two claimants have collided
    else:
        return {**job, "places": places}
    if not places:
        raise ClaimError(
            f"none of the job's {job['size']} places is free: wait until a joined rank fails, or start a job with more "
            "--places"
        )
    raise ClaimError(f"-n must be <= {len(places)}, the number of free places of the job's {job['size']}, got {count}")


def _reserve_lowest(store: Any, size: int, count: int) -> list[tuple[int, int]]:
    """Reserve up to ``count`` free ranks, the lowest first. Return pairs of rank and incarnation."""
    places: list[tuple[int, int]] = []
    for rank in range(size):
        number = _reserve(store, rank) if len(places) < count else None
        if number is not None:
            places.append((rank, number))
    return places


def _reserve(store: Any, rank: int) -> int | None:
    """Reserve a rank. Return the incarnation of its next process, or None if the rank is not free."""
    key, mine = f"place/{rank}", f"held {secrets.token_hex(8)}"
    if not store.check([key]):  # the store belongs to another program, and has no ranks to reserve
        return None
    found = bytes(store.get(key)).decode()
    if not found.startswith(_FREE) or bytes(store.compare_set(key, found, mine)).decode() != mine:
        return None
    return int(found.removeprefix(_FREE))


def keep(store: Any, places: Iterable[tuple[int, int]], lines: Iterable[str]) -> None:
    """Set store keys for the launcher until it ends. Then release all ranks that were not reported as ended."""
    newest = dict(places)  # newest incarnation of each rank number
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
    """Reserve free ranks of the job, and keep them until the launcher has ended."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from asyncdist.launchers import job_rendezvous
    from asyncdist.transports.torch_distributed.meeting.stores import SealedStore
    from asyncdist.trust.job_secret import JobSecret

    is_store = False
    secret = JobSecret((job_rendezvous.given_secret() or "").encode()).at_port(port)
    try:
        signal.alarm(_SILENT_S)
        common = TCPStore(host, port, None, False, timedelta(seconds=_CONNECT_S), wait_for_workers=False)
        signal.alarm(0)
        is_store = True
        store = SealedStore(common, secret).part("asyncdist")
        name = f"{store.prefix}{JOB}"
        if common.check([name]) and secret.unseal(name, bytes(common.get(name))) is None:
            raise ClaimError(SECRET_DIFFERS)
        found = claim(store, count, version)
    except (ClaimError, RuntimeError) as error:
        has_closed = is_store or not _listens(host, port)
        unsaid = "the job has ended" if has_closed else "the process at this address is not a job's store"
        _print_json({"error": str(error) if isinstance(error, ClaimError) else unsaid})
        return
    _print_json(found)
    try:
        keep(store, found["places"], sys.stdin)
    except RuntimeError:  # the store was closed
        return


def _print_json(content: dict[str, Any]) -> None:
    """Print one line of JSON. If the launcher has just ended, do nothing; :func:`keep` then releases the ranks."""
    with contextlib.suppress(BrokenPipeError):
        os.write(1, json.dumps(content).encode() + b"\n")


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(PROGRAM)))
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
