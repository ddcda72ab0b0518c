"""Lets a restarted rank, or a rank that starts later than the others, join a running world.

A process is identified by its rank and its *incarnation*, the number of restarts of the rank. The world's key-value
store contains a log of the processes that have arrived since the world began. In each process, a thread reads the log
several times a second. When two processes have recorded that they want to connect, a thread in each makes two gloo
groups of these two processes, and retries after a failure.

- A process connects to a new process only once it considers the previous process of that rank lost. The first process
  to connect records a welcome, for which the new process waits before it opens its world.
- In the store, the launcher records which processes have ended, so that no process waits for them. A new process waits
  for a welcome as long as any process of the world is alive, because the event loops of all ranks may be blocked.
- A process that reads a later incarnation of its own rank in the log records that it is alive. The new process then
  raises an error.
- If a world begins with fewer processes than ranks, the highest ranks are vacant. A process of such a rank always joins
  later. As it may have no predecessor, every process connects to it and welcomes it.
- A rank that is restarted before its world has begun, or after the others have left it, begins a world together with
  other ranks. If a rank is killed before all are connected, all ranks start the handshake again.
- If no process of the world is alive, new processes cannot be welcomed. They then begin the next world.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import logging
import math
import re
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from asyncdist._version import describe_version
from asyncdist.errors import DisagreementError, LateError, TransportError
from asyncdist.launchers.variables import TorchRendezvous
from asyncdist.transports.matching import CallbackQueue
from asyncdist.transports.torch_distributed import gloo_groups
from asyncdist.transports.torch_distributed.meeting.rendezvous import join_world, open_store
from asyncdist.transports.torch_distributed.meeting.stores import PAUSE_PER_RANK_S, SealedStore, reason, text_of
from asyncdist.wording import ranks_in_words

logger = logging.getLogger("asyncdist.transports.torch_distributed.meeting.newcomers")

#: Seconds between two reads of the log, in addition to ``PAUSE_PER_RANK_S``.
_PERIOD_S: Final = 0.1
#: Number of log reads after which a process rewrites the name of the running world, in case the name was deleted.
_LOOKS_PER_RENEWAL: Final = 10
#: Seconds after which a new process logs that no process of the world has agreed to connect to it. Unless the loops of
#: all ranks are blocked, the loss of a process is detected within 1 s, and the loss of a host within 30 s.
_NOTICE_S: Final = 30.0
#: Seconds within which both processes must arrive for an attempt to connect, and seconds for connecting in each
#: attempt. If one process ends during an attempt, the other one waits in gloo for five times as long as the attempt
#: lasts. A lost packet costs 1 s.
_PAIR_S: Final = 20.0
_PAIR_CONNECT_S: Final = (0.5, 1.0, 2.0, 2.0)
#: Base seconds, and additional seconds per rank, for connecting the first groups; and the number of attempts. gloo is
#: slow to detect that a process has ended.
_CONNECT_S: Final = 10.0
_CONNECT_PER_RANK_S: Final = 0.5
_ATTEMPT_COUNT: Final = 3
#: Seconds for which a restarted or late process tries to reach the store.
_REACH_S: Final = 10.0
_RUNNING: Final = "running"
#: Key that the launcher writes before it closes the store.
_OVER: Final = "over"
#: Key under which the launcher writes the number of a rank that it will not restart.
_GONE: Final = "gone"


class WorldEntry:
    """Connects this process to a world. Joins the running world, or begins one together with the other ranks.

    Attributes:
        rendezvous: Address and settings by which the ranks find each other.
        common: Part of the store that belongs to the job.
        store: Part of the store that belongs to the world.
        incarnation: Number of restarts of this rank since the world began, or 0 if this process began the world.
        late_places: Ranks that had no process when the job started.
        vacant: Ranks for which no process had been started when this process entered the world.
        nonce: Number that all processes of the world share.
        process: Launcher's name for this process: its rank and the number of restarts by the launcher.
        running: Value in the store with which later processes find this world.
        groups: Groups of all ranks if this process began the world, otherwise empty.

    Raises:
        DisagreementError: The running world belongs to another job, or has a different size or version.
        LateError: This rank was restarted or is joining late, and other ranks have ended.
        TransportError: The ranks do not find each other, or the previous process of this rank is still alive.
    """

    def __init__(self, rendezvous: TorchRendezvous, timeout_s: float) -> None:
        self.rendezvous = rendezvous
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._first_count = rendezvous.size - rendezvous.empty_count
        self.common = self._open_store().part("asyncdist")
        self.incarnation = 0
        self.late_places = range(self._first_count, rendezvous.size)
        self.vacant = frozenset(self.late_places)
        self.process = f"{rendezvous.rank}.{rendezvous.incarnation}"
        self.groups: list[Any] = []
        is_late = rendezvous.rank >= self._first_count
        token = ""
        if rendezvous.incarnation and (is_late or rendezvous not in _entered):
            try:
                token = self._join(is_late=is_late)
            except RuntimeError as error:
                raise self._late("the store of the job has closed") from error
        if not rendezvous.incarnation and rendezvous not in _entered and self.common.check([_RUNNING]):
            raise TransportError(
                f"the job already has a rank {rendezvous.rank} (RANK), with which its world began, so this process is "
                "refused",
                rank=rendezvous.rank,
            )
        is_first = not token
        token = token or self._begin()
        self.running = json.dumps({"world": token, **_identity(rendezvous)})
        if is_first:
            self.common.set(_RUNNING, self.running)
        self.nonce = int(token[:8], 16)
        if rendezvous not in _entered:
            atexit.register(_record_end, self.common, rendezvous.rank)
        _entered[rendezvous] = token

    def _open_store(self) -> SealedStore:
        """Return the job's store. If this process was restarted or is joining late, the store must already exist."""
        if not self.rendezvous.incarnation:
            return open_store(self.rendezvous, self._deadline)
        try:
            return open_store(self.rendezvous, min(self._deadline, time.monotonic() + _REACH_S))
        except TransportError as error:
            raise self._late("the store of the job has closed") from error

    def _late(self, why: str) -> LateError:
        rank = self.rendezvous.rank
        how = "joins the others" if rank >= self._first_count else "was restarted"
        return LateError(f"rank {rank} {how}, and {why}", rank=rank)

    def _join(self, *, is_late: bool) -> str:
        """Join the running world and return its token, or "" if this process may begin the next world instead.

        If ``is_late``, this rank had no process when the job started, and never begins a world.
        """
        left = _entered.get(self.rendezvous, "")
        while True:
            token = left
            if self.common.check([_RUNNING]):
                token = _check_running(text_of(self.common, _RUNNING), self.rendezvous)
            if token != left:
                self.store = self.common.part(token)
                newest = request_welcome(self.store, self.rendezvous, self._has_exited)
                if newest is not None:
                    self.incarnation = self.rendezvous.incarnation
                    self.vacant = frozenset(place for place in self.vacant if not newest[place])
                    return token
                left = token
                self._deadline = time.monotonic() + self._timeout_s  # The wait for a welcome may have been long.
            if not is_late:
                return ""
            self._check_others()
            if time.monotonic() >= self._deadline:
                raise TransportError(
                    f"rank {self.rendezvous.rank} waited, but the other ranks did not begin a world in time"
                )
            time.sleep(_PERIOD_S + self.rendezvous.size * PAUSE_PER_RANK_S)

    def _begin(self) -> str:
        """Begin a world with all other ranks, and return its token. Retry if a rank is killed before all connect."""
        attempt = 1
        while True:
            self.store, token = join_world(self.rendezvous, self._deadline - time.monotonic(), self._check_others)
            if self.rendezvous.admits_restarted:
                self.store.set(f"process/{self.rendezvous.rank}", self.process)
            try:
                self.groups = self._make_groups()
                return token
            except TransportError as error:
                if attempt == _ATTEMPT_COUNT:
                    raise
                attempt += 1
                logger.info("rank %d starts the world again with the other ranks: %s", self.rendezvous.rank, error)

    def _make_groups(self) -> list[Any]:
        """Make the gloo groups of all ranks that begin the world. Raise TransportError if a rank cannot make them."""
        rank, count = self.rendezvous.rank, self._first_count
        if count == 1:
            return []
        timeout_s = _CONNECT_S + count * _CONNECT_PER_RANK_S
        return gloo_groups.make_agreed_groups(
            self.store,
            rank,
            count,
            connect_s=timeout_s,
            timeout_s=timeout_s,
            is_loopback=self.rendezvous.is_loopback,
        )

    def _has_exited(self, rank: int, incarnation: int) -> bool:
        """Return whether the launcher has recorded the end of a process of the running world."""
        process = f"{rank}.{incarnation}"
        if not incarnation:  # The process began this world, which may not be the job's first.
            if not self.store.check([f"process/{rank}"]):
                return False
            process = text_of(self.store, f"process/{rank}")
        return bool(self.common.check([f"exited/{process}"]))

    def _check_others(self) -> None:
        """Raise an error if no new world can begin, because a rank has ended and will not be restarted."""
        if self.rendezvous.admits_restarted and self.common.check([_GONE]):
            gone = int(text_of(self.common, _GONE))
            raise TransportError(
                f"rank {gone} was killed and will not be restarted; a new world cannot begin without it", rank=gone
            )
        if self.rendezvous.incarnation:
            if any(self.common.check([f"ended/{other}"]) for other in range(self._first_count)):
                raise self._late("other ranks have ended")
            if self.common.check([_OVER]):
                raise self._late("the job has ended")


#: Token of the last world that this process has entered at each rendezvous. The process takes part in beginning the
#: next world, unless its rank had no process when the job started.
_entered: dict[TorchRendezvous, str] = {}


def _identity(rendezvous: TorchRendezvous) -> dict[str, Any]:
    return {"job": rendezvous.job, "WORLD_SIZE": rendezvous.size, "version": describe_version()}


def _check_running(running: str, rendezvous: TorchRendezvous) -> str:
    """Return the running world's token. Raise an error if this process has a different job, world size or version."""
    theirs = json.loads(running)
    for what, mine in _identity(rendezvous).items():
        if theirs[what] != mine:
            raise DisagreementError(
                f"{what} must be equal in the running world and on the restarted rank {rendezvous.rank}, but it is "
                f"{theirs[what]!r:.80} there and {mine!r:.80} here",
                rank=rendezvous.rank,
            )
    return str(theirs["world"])


def _record_end(common: Any, rank: int) -> None:
    """Record that this process has ended normally, so that the launcher does not restart its rank."""
    with contextlib.suppress(RuntimeError):  # Raised if the store has already closed.
        common.set(f"ended/{rank}", "")


def request_welcome(
    store: Any,
    rendezvous: TorchRendezvous,
    has_exited: Callable[[int, int], bool] = lambda rank, incarnation: False,
) -> list[int] | None:
    """Record this process in the world's log, and wait until a process of the world agrees to connect to this one.

    The wait lasts as long as a process of the world is alive and has not left. It is logged after ``_NOTICE_S``
    seconds.

    ``has_exited`` returns, for a rank and an incarnation, whether the launcher has recorded the end of that process.

    Returns:
        The latest incarnation of each rank in the log, or 0. None if all processes of the world have left or ended.
    """
    rank, size, incarnation = rendezvous.rank, rendezvous.size, rendezvous.incarnation
    first_count = size - rendezvous.empty_count
    entry = f"{rank} {incarnation} {secrets.token_hex(8)}"
    newest = [0] * size
    number = 1
    while bytes(store.compare_set(f"newcomer/{number}", "", entry)).decode() != entry:
        number = _read(store, number, newest)
    if newest[rank] >= incarnation:
        raise TransportError(
            f"ASYNCDIST_INCARNATION must be larger than {newest[rank]}, the number of restarts of rank {rank} so far, "
            f"got {incarnation}",
            rank=rank,
        )
    notice_at = time.monotonic() + _NOTICE_S
    while True:
        if store.check([f"lives/{rank}.{incarnation}"]):
            raise TransportError(
                f"rank {rank} must not be restarted, because its previous process is still alive", rank=rank
            )
        if store.check([f"welcome/{rank}.{incarnation}"]):
            return newest
        number = _read(store, number, newest)
        members = _members(store, newest, rank, first_count, has_exited)
        if not members:
            return None
        if time.monotonic() >= notice_at:
            notice_at = math.inf
            _log_wait(rendezvous, members)
        time.sleep(_PERIOD_S / 2 + size * PAUSE_PER_RANK_S)


def _read(store: Any, number: int, newest: list[int]) -> int:
    """Read the log from entry ``number`` on, record incarnations in ``newest``, and return the next entry's number."""
    while store.check([f"newcomer/{number}"]):
        entry = _parse(text_of(store, f"newcomer/{number}"))
        if entry is not None and entry[0] < len(newest):
            newest[entry[0]] = entry[1]
        number += 1
    return number


def _members(
    store: Any, newest: list[int], rank: int, first_count: int, has_exited: Callable[[int, int], bool]
) -> list[int]:
    """Return the ranks of the processes that have entered the world, and have neither left it nor ended."""
    others = [(other, n) for other, n in enumerate(newest) if other != rank and (n or other < first_count)]
    inside = [(other, n) for other, n in others if not n or store.check([f"welcome/{other}.{n}"])]
    return [other for other, n in inside if not (store.check([f"closed/{other}.{n}"]) or has_exited(other, n))]


def _log_wait(rendezvous: TorchRendezvous, members: list[int]) -> None:
    logger.warning(
        "rank %d %s, but no living rank (%s) has reacted for %.0f s; it waits until one does. A rank cannot react "
        "while its event loop is blocked, for example by a long evaluation",
        rendezvous.rank,
        "joins the others" if rendezvous.rank >= rendezvous.size - rendezvous.empty_count else "was restarted",
        ranks_in_words(members),
        _NOTICE_S,
    )


def _parse(entry: str) -> tuple[int, int] | None:
    """Return the rank and incarnation of a log entry, or None if the entry does not have this job's format."""
    found = re.fullmatch(r"([0-9]{1,9}) ([0-9]{1,9}) [0-9a-f]+", entry)
    return None if found is None else (int(found[1]), int(found[2]))


class NewcomerConnector:
    """Reads a world's log of new processes, and connects to the processes that :meth:`request` requests.

    Args:
        entry: How this process entered the world.
        callbacks: Queue through which the following functions are called on the loop.
        on_announced: Function called with the rank and incarnation of each new process.
        on_connected: Function called when a process is connected, with its rank, its incarnation and the two groups.
        on_missed: Function called with the rank and incarnation of a process that leaves before it is connected.
    """

    def __init__(
        self,
        entry: WorldEntry,
        callbacks: CallbackQueue,
        on_announced: Callable[[tuple[int, int]], None],
        on_connected: Callable[[tuple[int, int, list[Any]]], None],
        on_missed: Callable[[tuple[int, int]], None],
    ) -> None:
        self._entry = entry
        self._rank = entry.rendezvous.rank
        self._incarnation = entry.incarnation
        self._store = entry.store
        self._period_s = _PERIOD_S + entry.rendezvous.size * PAUSE_PER_RANK_S
        self._callbacks = callbacks
        self._on_announced = on_announced
        self._on_connected = on_connected
        self._on_missed = on_missed
        # Incarnation to connect to, and whether to welcome it, keyed by rank.
        self._requested: dict[int, tuple[int, bool]] = {}
        self._guard = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="asyncdist-newcomers", daemon=True)

    def start(self) -> None:
        """Start reading the log."""
        self._thread.start()

    def request(self, rank: int, incarnation: int, *, welcomes: bool) -> None:
        """Request a connection to a process, instead of any earlier process of the same rank.

        If ``welcomes`` is true, this rank considers the earlier process lost, and records that it will connect to the
        new process.
        """
        with self._guard:
            self._requested[rank] = incarnation, welcomes

    def close(self) -> None:
        """Stop connecting to processes, and record that this process has left the world."""
        self._closing.set()
        try:
            self._store.set(f"closed/{self._rank}.{self._incarnation}", "")
        except RuntimeError as error:
            logger.debug("the store has closed: %s", reason(error))
        self._thread.join(_PAIR_S)

    def _run(self) -> None:
        try:
            store, common = self._store.clone(), self._entry.common.clone()
            number = 1
            recorded: set[str] = set()
            for look in itertools.count():
                try:
                    if look % _LOOKS_PER_RENEWAL == 0:  # Another user of this host may have deleted the name.
                        common.compare_set(_RUNNING, "", self._entry.running)
                    number = self._read_log(store, number)
                    self._connect_to_requested(store, recorded)
                except RuntimeError as error:  # Another user may have deleted a value while it was being read.
                    common.check([_OVER])  # This raises an error if the store has closed.
                    logger.info("rank %d could not read the store, and tries again: %s", self._rank, reason(error))
                if self._closing.wait(self._period_s) or common.check([_OVER]):
                    return
        except RuntimeError as error:
            if not self._closing.is_set():
                logger.warning(
                    "rank %d: the store has closed, so ranks can no longer join: %s", self._rank, reason(error)
                )

    def _read_log(self, store: Any, number: int) -> int:
        while store.check([f"newcomer/{number}"]):
            entry = _parse(text_of(store, f"newcomer/{number}"))
            number += 1
            if entry is None:
                continue
            rank, incarnation = entry
            if rank != self._rank:
                self._callbacks.put(self._on_announced, (rank, incarnation))
            elif incarnation > self._incarnation:
                store.set(f"lives/{rank}.{incarnation}", "")
        return number

    def _connect_to_requested(self, store: Any, recorded: set[str]) -> None:
        with self._guard:
            requested = dict(self._requested)
        for rank, (incarnation, welcomes) in requested.items():
            names = sorted([(self._rank, self._incarnation), (rank, incarnation)])
            place = "meeting " + " ".join(f"{one}.{theirs}" for one, theirs in names)
            if place not in recorded:
                recorded.add(place)
                store.set(f"{place}/{self._rank}", self._entry.process)
            welcome = f"welcome/{rank}.{incarnation}"
            if welcomes and welcome not in recorded:
                recorded.add(welcome)
                store.set(welcome, "")
            has_closed = store.check([f"closed/{rank}.{incarnation}"])
            is_there = store.check([f"{place}/{rank}"])
            if not (has_closed or is_there):
                continue
            with self._guard:
                if self._requested.get(rank) == (incarnation, welcomes):
                    del self._requested[rank]
            if has_closed:
                self._callbacks.put(self._on_missed, (rank, incarnation))
            else:
                # Not a daemon thread, because a thread that is still in gloo when the interpreter exits would abort the
                # process.
                threading.Thread(
                    target=self._connect_and_notify,
                    name=f"asyncdist-meeting-{rank}",
                    args=(rank, incarnation, place),
                    daemon=False,
                ).start()

    def _connect_and_notify(self, rank: int, incarnation: int, place: str) -> None:
        try:
            groups = self._connect(rank, incarnation, place)
        except (RuntimeError, TransportError) as error:
            logger.info("rank %d did not connect to rank %d (restart %d): %s", self._rank, rank, incarnation, error)
        else:
            self._callbacks.put(self._on_connected, (rank, incarnation, groups))

    def _connect(self, rank: int, incarnation: int, place: str) -> list[Any]:
        """Return new gloo groups of this rank and ``rank``. Raise TransportError if several attempts fail."""
        store, common = self._store.clone(), self._entry.common.clone()
        process = text_of(store, f"{place}/{rank}")

        def check() -> None:
            if self._closing.is_set():
                raise _EndedError("this process has left the world")
            if store.check([f"closed/{rank}.{incarnation}"]) or common.check([f"exited/{process}"]):
                raise _EndedError("the other process has ended or left the world")

        for number, connect_s in enumerate(_PAIR_CONNECT_S, 1):
            part = store.part(f"{place}/{number}")
            try:
                check()
                return gloo_groups.make_agreed_groups(
                    part,
                    int(self._rank > rank),
                    2,
                    connect_s=connect_s,
                    timeout_s=_PAIR_S,
                    is_loopback=self._entry.rendezvous.is_loopback,
                    check=check,
                )
            except _EndedError:
                raise
            except TransportError as error:
                logger.info("rank %d: attempt %d to connect to rank %d failed: %s", self._rank, number, rank, error)
        raise TransportError(f"all {len(_PAIR_CONNECT_S)} attempts to connect to the rank failed")


class _EndedError(TransportError):
    """Raised if one of two connecting processes has ended or left. No further attempt is made."""
