"""Defines the contract between the runtime and a backend: rank-addressed, tagged, nonblocking messages.

Every transport promises, and the conformance suite tests:

- **Ordering.** Messages of one (source, tag) arrive in the order in which they were sent (MPI-4.1 section 3.5).
  Completion order across sources and tags is free.
- **Delivery.** Nothing is silently lost, duplicated or truncated. If a message is larger than its buffer, its receive
  raises :class:`~asyncdist.errors.TruncationError`, which names both sizes.
- **Ownership.** A buffer belongs to the transport from the call until its request has completed. The engine keeps the
  buffer and the request until then.
- **Loss.** A lost peer fails the requests that involve it with :class:`~asyncdist.errors.RankLostError`, and no others.
- **One thread.** All calls come from the thread that runs the event loop.

A transport knows no asyncio, no frame format and no protocol.
"""

from __future__ import annotations

import abc
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, TypeAlias

from asyncdist import environment
from asyncdist.transports.persistent_send import PersistentSend

ANY_SOURCE: Final = -1

#: An object with a C-contiguous buffer of bytes: writable for receives, readable for sends.
Buffer: TypeAlias = Any

ReduceOp: TypeAlias = Literal["sum", "min", "max", "prod"]


def as_bytes(buffer: Buffer) -> memoryview:
    """Return a buffer's bytes, for any format and shape."""
    view = memoryview(buffer)
    return view.cast("B") if view.nbytes else memoryview(bytearray())  # an empty view cannot be cast


class Request(Protocol):
    """Represents an operation in progress that can be tested: a message, a collective or a device event."""

    def test(self) -> bool:
        """Try to complete the operation; return True once, when it has completed.

        Raises:
            RankLostError: The peer is gone. The operation will never complete, and its buffer is free.
            TruncationError: The message was larger than the buffer.
        """

    def cancel(self) -> None:
        """Request that a receive be cancelled. It may still complete: see ``cancelled`` after ``test``."""

    @property
    def cancelled(self) -> bool:
        """After ``test`` returned True: whether the operation ended without a message."""

    @property
    def source(self) -> int:
        """After ``test`` returned True on a receive: the sender's rank."""

    @property
    def nbytes(self) -> int:
        """After ``test`` returned True on a receive: the message's size in bytes."""


class PersistentReceive(Request, Protocol):
    """Represents a receive from any source, for one tag, that is posted repeatedly into one buffer."""

    def start(self) -> None:
        """Post the receive, which must not be posted already."""

    def take(self) -> tuple[int, int] | None:
        """Test, and return the message's source and size in bytes; None if no message has arrived."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Lists what a transport can do beyond the contract.

    Attributes:
        native_collectives: Whether ``new_group`` gives handles with collectives of their own.
        survives_rank_loss: Whether the job continues after a rank has died.
        wakes: Whether the transport rings the doorbell when a message arrives, so that no periodic poll is needed.
        tag_max: Largest tag.
        misses_wakes: Whether the doorbell may fail to ring, so that a slow periodic poll is needed anyway.
        rings_from_threads: Whether the doorbell may be rung by a thread that does not run the event loop.
        shares_process: Whether all ranks are in this process, so that their host ends them together.
        one_sided_reads: Whether the ranks of a host read each other's versioned windows while the owner computes.
        shares_memory: Whether ranks are processes that, on one host, may map each other's memory
            (:mod:`asyncdist.host_memory.shared_memory`).
        written_share: Share of a large tensor, from 0 to 1, that the sender writes directly into the memory of a
            receiver on its host (:mod:`asyncdist.host_memory.cross_memory_attach`). With 0.5, the receiver copies the
            other half meanwhile; with 1, the backend moves none of it.
    """

    native_collectives: bool
    survives_rank_loss: bool
    wakes: bool
    tag_max: int
    misses_wakes: bool = True
    rings_from_threads: bool = False
    shares_process: bool = False
    one_sided_reads: bool = False
    shares_memory: bool = False
    written_share: float = 0.0


class GroupHandle(Protocol):
    """Represents a backend's own communicator over some ranks. Ranks in these calls are positions in the group.

    Every method starts one nonblocking collective. All members call the collectives in the same order. Without
    ``receive``, ``all_reduce`` writes its result into the sent buffer.
    """

    def barrier(self) -> Request: ...
    def broadcast(self, buffer: Buffer, root: int) -> Request: ...
    def gather(self, send: Buffer, receive: Buffer | None, root: int) -> Request: ...
    def all_gather(self, send: Buffer, receive: Buffer) -> Request: ...
    def all_reduce(self, buffer: Buffer, op: ReduceOp, receive: Buffer | None = None) -> Request: ...
    def all_to_all(
        self, send: Buffer, send_counts: Sequence[int], receive: Buffer, receive_counts: Sequence[int]
    ) -> Request: ...
    def free(self) -> None: ...


class CollectiveCheckerProtocol(Protocol):
    """Compares the collectives that the ranks of one process call; see :mod:`asyncdist.collectives.call_checker`."""

    def note(self, ranks: Sequence[int], group_key: int, rank: int, call: Any) -> None:
        """Record that ``rank`` calls its next collective of a group."""

    def forget(self, ranks: Sequence[int], group_key: int, rank: int) -> None:
        """Drop the records of ``rank`` in a group that all members have freed."""


class Transport(abc.ABC):
    """Moves messages over a backend. The module's docstring states the contract.

    Attributes:
        name: Name in options and reports, e.g. ``"mpi"``.
        rank: This process's rank.
        size: Number of ranks.
        incarnation: Number of restarts of this rank. A restarted rank considers all others lost at first, and is
            notified of each (:meth:`set_return_listener`) once they are connected.
        may_return: Whether lost ranks are restarted.
        capabilities: Abilities beyond the contract.
        call_book: Checker that compares the collectives of the ranks; None if they are not compared.
        job_nonce: Number that all ranks share if they are known to be of one job and version, so that they need not
            agree on one; otherwise None.
        hosts: For each rank, the first rank on its host; None if that is not known before the ranks meet, or if all
            ranks are on one host.
        launch_nonce: Number that all ranks have from their launcher, used if a rank is lost while they meet; None if
            there is none.
        trusts_network: Whether ranks trust any process that reaches them, since the job has no secret.
    """

    name: str
    rank: int
    size: int
    capabilities: Capabilities
    incarnation: int = 0
    may_return: bool = False
    collective_checker: CollectiveCheckerProtocol | None = None
    job_nonce: int | None = None
    hosts: Sequence[int] | None = None
    launch_nonce: int | None = None
    trusts_network: bool = False

    @abc.abstractmethod
    def isend(self, buffer: Buffer, dest: int, tag: int) -> Request:
        """Start sending ``buffer`` to ``dest``, which may be this rank."""

    def start_send(self, buffer: Buffer, dest: int, tag: int) -> Request | None:
        """Send like ``isend`` and test once; return None if the message has left, as most small ones have."""
        request = self.isend(buffer, dest, tag)
        return None if request.test() else request

    def prepare_send(self, nbytes: int, dest: int, tag: int) -> PersistentSend | None:
        """Return a send of ``nbytes`` bytes that can be started repeatedly; None if the backend has none.

        Equal arguments give the same send.
        """
        return None

    @abc.abstractmethod
    def irecv(self, buffer: Buffer, source: int, tag: int) -> Request:
        """Start receiving into ``buffer`` from ``source``, or from ``ANY_SOURCE``."""

    @abc.abstractmethod
    def persistent_receive(self, buffer: Buffer, tag: int) -> PersistentReceive:
        """Make a receive from any source that can be posted repeatedly, without posting it."""

    @property
    def hostname(self) -> str:
        """Name of this rank's host."""
        return socket.gethostname()

    @property
    def local_rank(self) -> int:
        """This rank's position among the ranks of its host; its rank if that is not known."""
        number = environment.local_rank()
        return self.rank if number is None else number

    @property
    def world_group(self) -> GroupHandle | None:
        """Return the backend's communicator over all ranks; None if it has none."""
        return None

    @property
    def end_group(self) -> GroupHandle | None:
        """Return a communicator over all ranks for the last barrier only; None if messages are used instead.

        On the world's group, the barrier could be matched with another collective that other ranks have yet to start.
        """
        return None

    @abc.abstractmethod
    def new_group(self, ranks: Sequence[int], tag: int) -> GroupHandle | None:
        """Make the backend's communicator over ``ranks``, which all call this; None if it has none."""

    @abc.abstractmethod
    def lost_ranks(self) -> frozenset[int]:
        """Return the ranks that are known to be lost."""

    def missed_ranks(self) -> frozenset[int]:
        """Return the ranks that had left before this restarted process was connected to them."""
        return frozenset()

    def vacant_ranks(self) -> frozenset[int]:
        """Return the lost ranks for which no process has arrived yet, as far as this process knows."""
        return frozenset()

    @abc.abstractmethod
    def abort(self, exit_code: int) -> None:
        """End every process of the job immediately. May not return."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release the backend; every request has completed."""

    def close_failed(self) -> None:  # noqa: B027 a backend that can release nothing alone does nothing
        """Release, after a failure, the resources that need neither the peers nor completed requests."""

    def note_met(self) -> None:  # noqa: B027 most transports have nothing to do
        """Note that all ranks have opened their transports and this rank has met them."""

    def set_doorbell(self, ring: Callable[[], None]) -> None:
        """Have ``ring`` called when a message has arrived, if ``capabilities.wakes``."""
        del ring

    def set_loss_listener(self, listen: Callable[[int], None]) -> None:
        """Have ``listen(rank)`` called once for each lost rank, if the transport detects that.

        It is called immediately for ranks that are lost already, since one may be lost before others open their world.
        """
        del listen

    def on_finalize(self, leave: Callable[[], None]) -> None:  # noqa: B027 a program can end MPI alone
        """Call ``leave`` when the program ends the backend by a call of its own, before the backend stops working."""

    def set_return_listener(self, listen: Callable[[int, int], None]) -> None:
        """Have ``listen(rank, incarnation)`` called when a lost rank is back as a new process.

        Its loss has been reported before. The rank stays lost until :meth:`accept` is called.
        """
        del listen

    def accept(self, rank: int, incarnation: int) -> bool:
        """Connect to the new process of a rank, if it is still there; return whether it is.

        From then on, messages are sent to it and received from it. Messages to or from the earlier process of that rank
        are dropped.
        """
        del rank, incarnation
        return False

    def describe(self) -> str:
        """Return one line for reports: backend, library, version."""
        return self.name
