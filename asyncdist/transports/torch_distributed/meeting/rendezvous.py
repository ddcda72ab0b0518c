"""Lets the ranks of a torch.distributed job find each other through a key-value store.

The store of the user's process group is used if there is one, or the store of torchrun's agent. Otherwise, rank 0
serves a store at a port chosen by the system, and announces this port in a second store at MASTER_PORT. The second
store is closed before any rank continues, so that the user's ``init_process_group`` can use MASTER_PORT.

A store may contain keys of earlier processes, and torchrun's agents may disagree on their number of restarts. A world
is therefore identified by a random token from its rank 0. Every rank writes a hello with its own random token. Rank 0
answers each hello, including a repeated hello from a restarted rank, with the world's token. When all ranks have
registered under this token, rank 0 lets them continue. If rank 0 is restarted before that, its new process answers all
hellos with a new token, which the ranks adopt.

Rank 0 does not expect ranks beyond its own WORLD_SIZE. A rank that gets no answer therefore repeats its hello under a
key that rank 0 reads in any case. Rank 0 answers, and both ranks report that their sizes differ.
"""

from __future__ import annotations

import functools
import logging
import math
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

from torch import distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from asyncdist._version import describe_version
from asyncdist.errors import DisagreementError, TransportError
from asyncdist.launchers import detection, job_rendezvous
from asyncdist.launchers.variables import TorchRendezvous
from asyncdist.transports.torch_distributed.meeting import stores
from asyncdist.transports.torch_distributed.meeting.stores import (
    PAUSE_PER_RANK_S,
    Refusals,
    SealedStore,
    reason,
    text_of,
)

logger = logging.getLogger("asyncdist.transports.torch_distributed.meeting.rendezvous")

#: Seconds between two reads of the store. A wait inside the store would ignore signals and log warnings.
_PAUSE_S: Final = 0.02
_CONNECT_S: Final = 1.0
_SHORTEST_CONNECT_S: Final = 0.1
_UNANSWERED: Final = "unanswered"
#: Seconds after which, if no process serves the store, one rank on each host logs that it is waiting.
NOTICE_S: Final = 5.0
#: Seconds after which rank 0 logs the missing ranks. With many hosts, imports may take long.
MISSING_NOTICE_S: Final = 30.0


def is_group_initialised() -> bool:
    """Return whether the user has called ``init_process_group``, so that no rendezvous is needed."""
    return dist.is_available() and dist.is_initialized()


def join_store(rendezvous: TorchRendezvous | None, rank: int, size: int, timeout_s: float) -> SealedStore:
    """Wait for all ranks of a world, and return the part of the store that only this world uses.

    Args:
        rendezvous: Address of the store, or None to use the store of the user's process group.
        timeout_s: Seconds to wait for the other ranks.

    Raises:
        DisagreementError: The versions of asyncdist differ.
        TransportError: The store cannot be served or reached, ranks are missing, or two processes have the same rank.
            The message names the ranks.
    """
    if rendezvous is not None:
        return join_world(rendezvous, timeout_s)[0]
    of_group = dist.distributed_c10d._get_default_store()
    store = SealedStore(of_group, job_rendezvous.secret_of_job(*_address_of(of_group), size))
    gathering = _Gathering(store, rank, size, time.monotonic() + timeout_s)
    gathering.wait_for_all()
    gathering.release_others()
    return gathering.world


def join_world(
    rendezvous: TorchRendezvous, timeout_s: float, check: Callable[[], object] = lambda: None
) -> tuple[SealedStore, str]:
    """Wait for all ranks that begin a world. Return the world's part of the store and the world's token.

    During the wait, ``check`` is called repeatedly. It may raise an error to end the wait.
    """
    deadline = time.monotonic() + timeout_s
    store = _store_of(rendezvous)
    try:
        first_count = rendezvous.size - rendezvous.empty_count
        hint = _loopback_hint(rendezvous)
        gathering = _Gathering(store.open(deadline), rendezvous.rank, first_count, deadline, check, hint)
        gathering.wait_for_all()
    except BaseException:
        store.forget()
        raise
    finally:
        store.free_port()  # The other ranks continue only afterwards.
    gathering.release_others()
    return gathering.world, gathering.token


def _address_of(store: Any) -> tuple[str, int]:
    """Return the address and port at which the user's store is served, or "" and 0 for a file or an unknown store."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", "")), int(getattr(store, "port", 0))


def open_store(rendezvous: TorchRendezvous, deadline: float) -> SealedStore:
    """Return the store through which the ranks find each other. Other worlds use it as well."""
    return _store_of(rendezvous).open(deadline)


def _loopback_hint(rendezvous: TorchRendezvous) -> str:
    """Return a sentence, to be appended to errors, that explains why ranks on other hosts may be missing, or ""."""
    if rendezvous.rank or not rendezvous.is_loopback or detection.local_size() == rendezvous.size:
        return ""
    return (
        f". Rank 0 listens only on the loopback interface, since its MASTER_ADDR is {rendezvous.address}: if ranks "
        "are on other hosts, give rank 0 the same MASTER_ADDR as theirs"
    )


# -- the handshake ----------------------------------------------------------------------------------------------------


class _Gathering:
    """Performs one rank's part of the handshake that starts a world.

    Args:
        deadline: :func:`time.monotonic` time at which the rank gives up.
        check: Function that is called repeatedly during the wait, and raises an error to end it.
        hint: Reason why ranks may be missing, to be appended to warnings and errors. It is empty or begins with a full
            stop.

    Attributes:
        world, token: The part of the store that belongs to this world, and the world's token. Both are set when this
            rank learns the token.
    """

    def __init__(
        self,
        store: SealedStore,
        rank: int,
        size: int,
        deadline: float,
        check: Callable[[], object] = lambda: None,
        hint: str = "",
    ) -> None:
        self._hint = hint
        self._store = store.part("asyncdist")
        self._rank = rank
        self._size = size
        self._facts = f"{size} {describe_version()}"  # equal on all ranks
        self._deadline = deadline
        self._check = check
        self._hello = secrets.token_hex(8)
        self._answered: set[str] = set()
        self._strays: set[int] = set()
        self._missing = [peer for peer in range(size) if peer != rank] if rank == 0 else [0]
        self.world = self._store
        self.token = ""

    def wait_for_all(self) -> None:
        """Wait until all ranks have arrived (on rank 0), or until rank 0 lets this rank continue (on other ranks)."""
        try:
            self._store.set(f"hello/{self._rank}", self._hello)
            if self._rank == 0:
                self._lead()
            else:
                self._follow()
        except ValueError as error:
            raise TransportError(
                f"rank {self._rank} found a value in the job's store that no rank of this job writes: {error}"
            ) from error
        except RuntimeError as error:
            # The rank that served the store has ended, possibly because its deadline was slightly earlier.
            raise TransportError(
                f"{self._describe_missing()} before the store closed: {reason(error)}", missing=self._missing
            ) from error

    def release_others(self) -> None:
        """On rank 0, let the other ranks continue."""
        if self._rank == 0:
            self.world.set("go", "")

    def _lead(self) -> None:
        self.token = self._hello
        self.world = self._store.part(self.token)
        self.world.set("facts", self._facts)
        self.world.set("missing", _join(self._missing))
        self._until(self._have_all_arrived)

    def _have_all_arrived(self) -> bool:
        self._answer()
        here = [peer for peer in (*self._missing, *self._strays) if self.world.check([f"rank {peer}"])]
        for peer in here:
            _check_facts(peer, text_of(self.world, f"rank {peer}"), self._facts)
        if here:
            self._missing = [peer for peer in self._missing if peer not in here]
            self.world.set("missing", _join(self._missing))
        return not self._missing

    def _answer(self) -> None:
        """Send the world's token to each rank that has written a new hello."""
        for peer in range(1, self._size):
            if self._store.check([f"hello/{peer}"]):
                hello = text_of(self._store, f"hello/{peer}")
                if hello not in self._answered:
                    self._store.set(f"answer/{hello}", self._hello)
                    self._answered.add(hello)
                self._check_single(peer, hello)
        if self._store.check([_UNANSWERED]):
            stray, _, hello = text_of(self._store, _UNANSWERED).partition(" ")
            if int(stray) >= self._size and hello not in self._answered:
                self._store.set(f"answer/{hello}", self._hello)
                self._answered.add(hello)
                self._strays.add(int(stray))

    def _follow(self) -> None:
        self._until(self._is_answered)
        self._use_token(text_of(self._store, f"answer/{self._hello}"))
        self._until(self._is_released)

    def _use_token(self, token: str) -> None:
        self.token = token
        self.world = self._store.part(token)
        self.world.set(f"rank {self._rank}", self._facts)
        _check_facts(self._rank, self._facts, text_of(self.world, "facts"))

    def _is_answered(self) -> bool:
        if self._store.check([f"answer/{self._hello}"]):
            return True
        self._store.check(["hello/0"])  # This logs a warning if rank 0 has a different secret.
        self._store.set(_UNANSWERED, f"{self._rank} {self._hello}")
        return False

    def _is_released(self) -> bool:
        """Return whether rank 0 has let the ranks continue. If it has not, read the list of missing ranks.

        Only rank 0 looks for the missing ranks, because n ranks that look for each other would make n * n requests.
        """
        if self.world.check(["go"]):
            return True
        newest = text_of(self._store, f"answer/{self._hello}")
        if newest != self.token:
            self._use_token(newest)
        missing = map(int, text_of(self.world, "missing").split())
        self._missing = [peer for peer in missing if peer != self._rank] or [0]
        return False

    def _until(self, is_done: Callable[[], bool]) -> None:
        longest_s = _PAUSE_S + self._size * PAUSE_PER_RANK_S
        pause_s, notice_at = 0.001, time.monotonic() + MISSING_NOTICE_S
        while not is_done():
            self._check_alone()
            self._check()
            if time.monotonic() >= notice_at:
                notice_at = math.inf
                self._log_missing_ranks()
            if time.monotonic() >= self._deadline:
                raise TransportError(self._describe_missing() + self._hint, missing=self._missing)
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, longest_s)

    def _log_missing_ranks(self) -> None:
        """Log the missing ranks on rank 0 or, if rank 0 is missing, on one or two ranks per host."""
        if self._rank == 0 or (not self.token and detection.local_rank() in (None, 0, 1)):
            logger.warning(
                "rank %d waits for ranks %s, which have not arrived at the start of the world and may have ended; it "
                "waits up to %.0f s longer%s",
                self._rank,
                self._missing,
                max(0.0, self._deadline - time.monotonic()),
                self._hint,
            )

    def _check_alone(self) -> None:
        """Raise an error if another process has started as this rank. An ended process cannot detect its successor."""
        newest = text_of(self._store, f"hello/{self._rank}")
        if newest != self._hello:
            self._store.set(f"twice/{newest}", "")
            self._store.set(f"twice/{self._hello}", "")
        self._check_single(self._rank, self._hello)

    def _check_single(self, rank: int, hello: str) -> None:
        if self._store.check([f"twice/{hello}"]):
            raise TransportError(
                f"each rank must be started once, but two processes were started as rank {rank} (RANK)", rank=rank
            )

    def _describe_missing(self) -> str:
        return f"rank {self._rank} waits for ranks {self._missing}, which did not arrive at the start of the world"


def _join(ranks: Sequence[int]) -> str:
    return " ".join(map(str, ranks))


def _check_facts(rank: int, facts: str, facts_of_0: str) -> None:
    """Raise an error if a rank's world size or version differs from rank 0's. Both ranks call this function.

    In a job that restarts ranks, versions are not compared later.
    """
    (size, _, version), (size_of_0, _, version_of_0) = facts.partition(" "), facts_of_0.partition(" ")
    if int(size) != int(size_of_0):
        raise TransportError(
            f"WORLD_SIZE must be equal on all ranks, but it is {size} on rank {rank} and {size_of_0} on rank 0",
            rank=rank,
        )
    if version != version_of_0:
        raise DisagreementError(
            f"all ranks must run the same version, but rank {rank} runs {version!r:.80} and rank 0 runs "
            f"{version_of_0!r:.80}",
            rank=rank,
        )


# -- the store --------------------------------------------------------------------------------------------------------


class _RendezvousStore:
    """Opens the store of a rendezvous, and keeps it open for the job's next worlds."""

    def __init__(self, rendezvous: TorchRendezvous) -> None:
        self._rendezvous = rendezvous
        self._store: SealedStore | None = None
        self._announcement: SealedStore | None = None

    def open(self, deadline: float) -> SealedStore:
        if self._store is None:
            self._store = SealedStore(self._find(deadline), self._rendezvous.secret)
        return self._store

    def forget(self) -> None:
        """Make the next world open a new store, as ranks that arrive later do."""
        self._store = None

    def free_port(self) -> None:
        """Close the server on the user's port, so that the program can use the port."""
        self._announcement = None

    def _find(self, deadline: float) -> Any:
        rendezvous = self._rendezvous
        if rendezvous.is_store_served:
            _await_server(rendezvous, deadline, "the launcher" if rendezvous.admits_restarted else "torchrun's agent")
            return _reach(rendezvous, rendezvous.port, deadline)
        if rendezvous.rank != 0:
            return _reach(rendezvous, _announced_port(rendezvous, deadline), deadline)
        store = _serve(rendezvous, 0)
        self._announcement = SealedStore(_serve(rendezvous, rendezvous.port), rendezvous.secret)
        self._announcement.set(_PORT, str(store.port))
        return store


_PORT: Final = "asyncdist/port"
_store_of = functools.cache(_RendezvousStore)


def _announced_port(rendezvous: TorchRendezvous, deadline: float) -> int:
    """Return the port that rank 0 announces on MASTER_PORT. An old group's store may still be served there."""
    refusals, cause = Refusals(), ""
    while True:
        _await_server(rendezvous, deadline, "rank 0")
        try:
            reached = _reach(rendezvous, rendezvous.port, deadline)
            announcement = SealedStore(reached, rendezvous.secret, refusals=refusals)
            while time.monotonic() < deadline:
                if announcement.check([_PORT]):
                    return int(announcement.get(_PORT))
                time.sleep(_PAUSE_S)
            cause = announcement.why_absent(_PORT)
        except (RuntimeError, ValueError, TransportError) as error:
            if time.monotonic() >= deadline:
                raise TransportError(f"{_describe_wait(rendezvous)}: {error}", missing=[0]) from error
        if time.monotonic() >= deadline:
            raise TransportError(f"{_describe_wait(rendezvous)}, which has not arrived there{cause}", missing=[0])
        time.sleep(_PAUSE_S)


def _describe_wait(rendezvous: TorchRendezvous) -> str:
    return f"rank {rendezvous.rank} waits for rank 0 at {_address_text(rendezvous, rendezvous.port)}"


def _serve(rendezvous: TorchRendezvous, port: int) -> Any:
    try:
        return stores.serve(rendezvous.address, port, size=rendezvous.size)
    except RuntimeError as error:
        raise TransportError(
            f"rank 0 cannot serve the job's store at {_address_text(rendezvous, port)}: {reason(error)}", port=port
        ) from error


def _reach(rendezvous: TorchRendezvous, port: int, deadline: float) -> Any:
    """Connect to a store at an address where a process was listening a moment ago."""

    def warn() -> None:
        if detection.local_rank() in (None, 0, 1):  # rank 0 may be the process that serves the store
            logger.warning(
                "rank %d: the process that listens at %s does not answer yet, and may be another program; the rank "
                "waits up to %.0f s longer",
                rendezvous.rank,
                _address_text(rendezvous, port),
                max(0.0, deadline - time.monotonic()),
            )

    timeout_s = max(_SHORTEST_CONNECT_S, deadline - time.monotonic())
    within = min(timedelta(seconds=timeout_s), stores.TIMEOUT)
    try:
        store = stores.answered(
            lambda: TCPStore(rendezvous.address, port, rendezvous.size, False, within, wait_for_workers=False),
            timeout_s,
            notice_s=NOTICE_S,
            notice=warn,
        )
    except RuntimeError as error:
        raise TransportError(
            f"rank {rendezvous.rank} cannot use the job's store at {_address_text(rendezvous, port)}: {reason(error)}",
            port=port,
        ) from error
    store.set_timeout(stores.TIMEOUT)
    return store


def _address_text(rendezvous: TorchRendezvous, port: int) -> str:
    known = " (MASTER_ADDR, MASTER_PORT)" if port == rendezvous.port else ""
    return f"{rendezvous.address}:{port}{known}"


def _await_server(rendezvous: TorchRendezvous, deadline: float, whose: str) -> None:
    waits = f"rank {rendezvous.rank} waits for {whose}"
    place = f"no process serves the job's store at {_address_text(rendezvous, rendezvous.port)}"
    cause = f". {rendezvous.why_missing}" if rendezvous.why_missing else ""
    for until in (min(time.monotonic() + NOTICE_S, deadline), deadline):
        try:
            await_listener(rendezvous.address, rendezvous.port, until)
            return
        except OSError as error:
            if until == deadline:
                raise TransportError(f"{waits}, but {place}: {error}{cause}", port=rendezvous.port) from error
            if detection.local_rank() in (None, 0):
                left_s = deadline - until
                logger.warning(
                    "%s: %s yet; the rank waits up to %.0f s longer (%s)%s", waits, place, left_s, error, cause
                )


def await_listener(address: str, port: int, deadline: float) -> None:
    """Wait until a process listens at a port. The store's own wait would ignore signals and log warnings.

    Args:
        deadline: :func:`time.monotonic` time at which to give up.

    Raises:
        OSError: No process listened before the deadline. This is the error of the last attempt.
    """
    while True:
        try:
            socket.create_connection((address, port), timeout=_CONNECT_S).close()
            return
        except OSError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(_PAUSE_S)
