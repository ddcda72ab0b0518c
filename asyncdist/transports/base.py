"""Defines the contract that every transport fulfils: nonblocking messages, addressed by rank and tag.

The conformance tests check every transport for:

- **Ordering.** Messages with the same source and tag arrive in the order in which they were sent (MPI-4.1 section 3.5).
  Messages with different sources or tags complete in any order.
- **Delivery.** No message is lost, duplicated or truncated without an error. If a message is larger than the receive
  buffer, the receive raises :class:`~asyncdist.errors.TruncationError`, whose message states both sizes.
- **Ownership.** A buffer belongs to the transport from the call until its request has completed.
- **Loss.** If a peer is lost, the requests that involve this peer raise :class:`~asyncdist.errors.RankLostError`. Other
  requests continue.
- **Self-sends** work.
- **One thread.** All calls are made by the thread that runs the event loop.

Transports do not depend on asyncio, on the format of frames, or on any protocol.
"""

from __future__ import annotations

import abc
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, ParamSpec, Protocol, TypeAlias, TypeVar

from asyncdist.launchers import detection
from asyncdist.transports.doorbell import Doorbell
from asyncdist.transports.persistent_send import PersistentSend

P = ParamSpec("P")
T = TypeVar("T")

ANY_SOURCE: Final = -1

#: Object with a C-contiguous buffer of bytes, writable for receives and readable for sends.
Buffer: TypeAlias = Any

ReduceOp: TypeAlias = Literal["sum", "min", "max", "prod"]


def as_bytes(buffer: Buffer) -> memoryview:
    """Return a view of a buffer's bytes, for any format and shape."""
    view = memoryview(buffer)
    return view.cast("B") if view.nbytes else memoryview(bytearray())  # An empty view cannot be cast.


class Request(Protocol):
    """An operation in progress whose completion can be tested: a message, a collective or a device event."""

    def test(self) -> bool:
        """Try to complete the operation. Return True once, when it has completed.

        Raises:
            RankLostError: The peer is lost. The operation will never complete, and its buffer may be reused.
            TruncationError: The message was larger than the buffer.
        """

    def cancel(self) -> None:
        """Ask to cancel a receive, which may still complete. ``cancelled`` is valid once ``test`` has returned True."""

    @property
    def cancelled(self) -> bool:
        """Whether the operation ended without a message. Valid once ``test`` has returned True."""

    @property
    def source(self) -> int:
        """Rank of the sender. Valid after ``test`` has returned True on a receive."""

    @property
    def nbytes(self) -> int:
        """Size of the message in bytes. Valid after ``test`` has returned True on a receive."""


class PersistentReceive(Request, Protocol):
    """A receive from any source on one tag that is posted repeatedly with the same buffer."""

    def start(self) -> None:
        """Post the receive, which must not be posted already."""

    def take(self) -> tuple[int, int] | None:
        """Test the receive. Return the message's source and size in bytes, or None if no message has arrived."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Features of a transport that the contract does not require.

    Attributes:
        native_collectives: Whether ``new_group`` returns handles that can run collectives.
        survives_rank_loss: Whether the other ranks continue when a rank is lost.
        wakes: Whether the transport calls the function of :meth:`Transport.set_arrival_callback` when a message
            arrives, so that no polling is needed.
        misses_wakes: Whether the transport sometimes fails to call that function, so slow periodic polling is needed as
            well. True if ``wakes`` is false.
        rings_from_threads: Whether threads other than the event loop's thread may call that function.
        shares_process: Whether all ranks run in this process, and therefore end together.
        one_sided_reads: Whether ranks on a host can read each other's memory windows even while the owner is computing.
        shares_memory: Whether ranks on one host are processes that may map each other's memory
            (:mod:`asyncdist.host_memory.shared_memory`).
        written_share: Fraction of a large tensor, from 0 to 1, that the sender writes directly into the memory of a
            receiver on its host (:mod:`asyncdist.host_memory.cross_memory_attach`). The backend sends the rest.
        logs_losses: Whether the ranks themselves log a warning for each lost rank. False if the launcher reports lost
            ranks.
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
    logs_losses: bool = False


class GroupHandle(Protocol):
    """A backend's own communicator for a group of ranks. A root is identified by its position in the group.

    Each method except ``free`` starts a nonblocking collective. ``all_reduce`` without ``receive`` works in place.
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
    """Checks that the ranks of a process call the same collectives (:mod:`asyncdist.collectives.call_checker`)."""

    def note(self, ranks: Sequence[int], group_key: int, rank: int, call: Any) -> None:
        """Record that ``rank`` calls its next collective of a group."""

    def forget(self, ranks: Sequence[int], group_key: int, rank: int) -> None:
        """Remove the records of ``rank`` in a group that all members have freed."""


class Transport(abc.ABC):
    """Sends and receives messages over one backend, under the contract described in the module's docstring.

    Attributes:
        incarnation: Number of restarts of this rank. On a restarted rank, all other ranks count as lost until this rank
            is connected to them (:meth:`set_return_listener`).
        may_return: Whether lost ranks may be restarted.
        collective_checker: Object that compares the collective calls of this process's ranks, or None.
        job_nonce: Number that identifies the job, if all ranks are known to have the same job and version of asyncdist.
            None if the ranks have yet to agree on a number.
        hosts: For each rank, the lowest rank on that rank's host. None if the hosts are not known before the handshake,
            or if there is only one host.
        launch_nonce: Number from the launcher that identifies the job even if a rank is lost during the handshake, or
            None.
        trusts_network: Whether ranks trust every process that connects to them, because the job has no secret.
        doorbell: Object through which other ranks on this host wake this rank when it is asleep
            (:mod:`asyncdist.transports.doorbell`). None if they cannot, or if the transport itself reports each
            arriving message (``capabilities.wakes``).
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
    doorbell: Doorbell | None = None
    _listen: Callable[[int], None] = staticmethod(lambda _: None)  # the function to call for each lost rank

    @abc.abstractmethod
    def isend(self, buffer: Buffer, dest: int, tag: int) -> Request:
        """Start sending ``buffer`` to ``dest``, which may be this rank."""

    def start_send(self, buffer: Buffer, dest: int, tag: int) -> Request | None:
        """Start sending ``buffer`` and test once. Return None if it has been sent, as small messages usually are."""
        request = self.isend(buffer, dest, tag)
        return None if request.test() else request

    def prepare_send(self, nbytes: int, dest: int, tag: int) -> PersistentSend | None:
        """Return a send of ``nbytes`` bytes that can be started repeatedly, or None if the backend cannot."""
        return None

    def is_sending(self) -> bool:
        """Test the sends that :meth:`prepare_send` has returned, and return whether any of them is in progress."""
        return False

    @abc.abstractmethod
    def irecv(self, buffer: Buffer, source: int, tag: int) -> Request:
        """Start receiving a message from ``source``, or from ``ANY_SOURCE``, into ``buffer``."""

    @abc.abstractmethod
    def persistent_receive(self, buffer: Buffer, tag: int) -> PersistentReceive:
        """Return a receive from any source that can be posted repeatedly. It is not posted yet."""

    def shared(self, make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return ``make(*args, **kwargs)``, an object that every use overwrites, such as a receive buffer.

        If received data is written only when a receive is tested, ranks in one process may share the object.
        """
        return make(*args, **kwargs)

    @property
    def hostname(self) -> str:
        """Name of this rank's host."""
        return socket.gethostname()

    @property
    def local_rank(self) -> int:
        """Index of this rank among the ranks on its host, or the rank itself if the index is unknown."""
        number = detection.local_rank()
        return self.rank if number is None else number

    @property
    def world_group(self) -> GroupHandle | None:
        """Communicator of the backend for all ranks, or None if the backend has no communicators."""
        return None

    @property
    def end_group(self) -> GroupHandle | None:
        """Communicator only for the last barrier, so that no other collective matches it. None if messages are used."""
        return None

    def new_group(self, ranks: Sequence[int], tag: int) -> GroupHandle | None:
        """Make a communicator, or return None if the backend has none. All of ``ranks`` must call this method."""
        del ranks, tag
        return None

    @abc.abstractmethod
    def lost_ranks(self) -> frozenset[int]:
        """Return the ranks that are known to be lost."""

    def missed_ranks(self) -> frozenset[int]:
        """Return the ranks that had already left before this restarted process was connected to them."""
        return frozenset()

    def vacant_ranks(self) -> frozenset[int]:
        """Return the lost ranks that may never have had a process."""
        return frozenset()

    @abc.abstractmethod
    def abort(self, exit_code: int) -> None:
        """End all processes of the job immediately. May not return."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release the backend. All ranks must have ended or be lost, and all requests must have completed.

        While a rank is closing, it does not report closing peers as lost.
        """

    def close_failed(self) -> None:  # noqa: B027 optional for backends
        """Release the backend after a failure, without waiting for peers or requests.

        Peers may report this rank as lost.
        """

    def note_handshake(self) -> None:  # noqa: B027 optional for backends
        """Record that this rank has completed the handshake with all ranks."""

    def set_arrival_callback(self, ring: Callable[[], None]) -> None:
        """Set the function to call when a message has arrived, if ``capabilities.wakes`` is true."""
        del ring

    def set_loss_listener(self, listen: Callable[[int], None]) -> None:
        """Call ``listen(rank)`` once for each rank that is lost, and immediately for ranks that are already lost."""
        self._listen = listen
        for rank in sorted(self.lost_ranks()):
            listen(rank)

    def on_finalize(self, leave: Callable[[], None]) -> None:  # noqa: B027 only user code that ends MPI needs this
        """Call ``leave`` when the user's program is about to finalize the backend."""

    def set_return_listener(self, listen: Callable[[int, int], None]) -> None:
        """Call ``listen(rank, incarnation)`` when a lost rank has a new process. :meth:`accept` connects to it."""
        del listen

    def accept(self, rank: int, incarnation: int) -> bool:
        """Connect to the new process of ``rank``. Return False if the process has ended."""
        del rank, incarnation
        return False

    def describe(self) -> str:
        """Return a one-line description for reports: backend, library, version."""
        return self.name
