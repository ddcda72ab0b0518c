"""Defines the contract between the runtime and a backend: rank-addressed, tagged, nonblocking messages.

What every transport promises, and the conformance suite proves:

- **Ordering.** Messages of one (source, tag) arrive in the order in which they were sent (MPI-4.1 section 3.5).
  Completion order across sources and tags is free.
- **Delivery.** Nothing is lost, duplicated or truncated in silence; a message larger than its buffer completes its
  receive with :class:`~asyncdist.errors.TruncationError`, naming both sizes.
- **Ownership.** A buffer belongs to the transport from the call until its request has completed. A request is never
  dropped before that: the engine keeps both.
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

#: Anything with a writable (receives) or readable (sends) C-contiguous buffer of bytes.
Buffer: TypeAlias = Any

ReduceOp: TypeAlias = Literal["sum", "min", "max", "prod"]


def as_bytes(buffer: Buffer) -> memoryview:
    """Return a buffer's bytes, for any format and shape."""
    view = memoryview(buffer)
    return view.cast("B") if view.nbytes else memoryview(bytearray())  # an empty view cannot be cast


class Request(Protocol):
    """One operation under way. Anything that can be tested may be one: a message, a collective, a device event."""

    def test(self) -> bool:
        """Try to complete the operation; True once, when it has.

        Raises:
            RankLostError: the peer is gone; the operation will never complete and its buffer is free.
            TruncationError: the message was larger than the buffer.
        """

    def cancel(self) -> None:
        """Ask that a receive not happen. It may happen all the same: ``test`` decides, and ``cancelled`` tells."""

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
    """A receive from any source that is posted again and again into one buffer, for one tag."""

    def start(self) -> None:
        """Post it. Only when it is not posted already."""

    def take(self) -> tuple[int, int] | None:
        """Test, and return the message's source and size in bytes; None until one has come."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a transport can do beyond the contract.

    Attributes:
        native_collectives: whether ``new_group`` gives handles with collectives of their own.
        survives_rank_loss: whether the job goes on after a rank has died.
        wakes: whether the transport rings the doorbell when a message arrives, so that nothing need poll by the clock.
        tag_max: the largest tag it takes.
        misses_wakes: whether the doorbell may fail to ring, so that a slow look is needed all the same.
        rings_from_threads: whether the doorbell may be rung by a thread that does not run the event loop.
        shares_process: whether all ranks are of this process, so their host ends them together.
        one_sided_reads: Whether the ranks of a host read each other's versioned windows while the owner computes.
        shares_memory: whether ranks are processes that, on one host, may map each other's memory
            (:mod:`asyncdist.host_memory.shared_memory`).
        written_share: how much of a large tensor its sender is to write straight into the receiver's memory, where both
            are on one host (:mod:`asyncdist.host_memory.cross_memory_attach`): from 0, nothing, over a half, where the
            receiver copies the other half meanwhile, to 1, where that is shorter than the backend's own way.
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
    """A backend's own communicator over some ranks. Ranks in these calls are positions in the group.

    Every method starts one nonblocking collective, which all members call in the same order. ``all_reduce`` is in
    place without ``receive``.
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
        """Take down that ``rank`` calls its next collective of a group."""

    def forget(self, ranks: Sequence[int], group_key: int, rank: int) -> None:
        """Drop what is known of ``rank`` in a group that all members have freed."""


class Transport(abc.ABC):
    """A backend. The module's docstring says what it promises.

    Attributes:
        name: how it is called in options and reports, e.g. ``"mpi"``.
        rank: this process's rank.
        size: the number of ranks.
        incarnation: how often this rank has been started again. Such a process finds all others lost at first, and
            hears of each (:meth:`set_return_listener`) when it is connected to it.
        may_return: whether lost ranks are started again.
        capabilities: what it can do beyond the contract.
        call_book: where the collectives that its ranks call are compared, if they are.
        job_nonce: where the ranks are known to be of one job and version, the number that they share; they need not
            agree on it then.
        hosts: for each rank the first one on its host, where that is known before the ranks meet; None where it is not,
            or all are on one host.
        launch_nonce: a number that all ranks have from their launcher, and which they take where one is lost while they
            meet; None where they have none.
        trusts_network: Whether ranks believe any process that reaches them, since the job has no secret.
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
        """Start sending ``buffer`` to ``dest`` (itself included)."""

    def start_send(self, buffer: Buffer, dest: int, tag: int) -> Request | None:
        """Send as ``isend`` does, and test once: None when the message has left already, as most small ones have."""
        request = self.isend(buffer, dest, tag)
        return None if request.test() else request

    def prepare_send(self, nbytes: int, dest: int, tag: int) -> PersistentSend | None:
        """Return a send of ``nbytes`` bytes that can be started repeatedly; None where the backend gives none.

        Equal arguments give the same send.
        """
        return None

    @abc.abstractmethod
    def irecv(self, buffer: Buffer, source: int, tag: int) -> Request:
        """Start receiving into ``buffer`` from ``source``, or from ``ANY_SOURCE``."""

    @abc.abstractmethod
    def persistent_receive(self, buffer: Buffer, tag: int) -> PersistentReceive:
        """Make a receive from any source that can be posted repeatedly; it is not posted yet."""

    @property
    def hostname(self) -> str:
        """Name of the host that this rank is on."""
        return socket.gethostname()

    @property
    def local_rank(self) -> int:
        """This rank's number among those of its host; its rank where nothing says so."""
        number = environment.local_rank()
        return self.rank if number is None else number

    @property
    def world_group(self) -> GroupHandle | None:
        """Return the backend's communicator over all ranks; None where it has none."""
        return None

    @property
    def end_group(self) -> GroupHandle | None:
        """Return a communicator over all ranks for the last barrier alone; None where messages take its place.

        On the world's group the barrier would pair with a collective that the others are still to start.
        """
        return None

    @abc.abstractmethod
    def new_group(self, ranks: Sequence[int], tag: int) -> GroupHandle | None:
        """Make the backend's communicator over ``ranks``, which all call this; None where it has none."""

    @abc.abstractmethod
    def lost_ranks(self) -> frozenset[int]:
        """Return the ranks that are known to be lost."""

    def missed_ranks(self) -> frozenset[int]:
        """Return the ranks that had left before this process, which was started again, was connected to them."""
        return frozenset()

    def vacant_ranks(self) -> frozenset[int]:
        """Return those of the lost ranks to whose place no process has come yet, as far as this one knows."""
        return frozenset()

    @abc.abstractmethod
    def abort(self, exit_code: int) -> None:
        """End every process of the job at once. May not return."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release the backend. Every request has completed."""

    def close_failed(self) -> None:  # noqa: B027 a backend that can release nothing alone does nothing
        """Release, after a failure, what needs neither the peers nor completed requests."""

    def note_met(self) -> None:  # noqa: B027 only some have something to do
        """Note that all ranks have opened their transports: this one has met them."""

    def set_doorbell(self, ring: Callable[[], None]) -> None:
        """Have ``ring`` called when a message has arrived, if ``capabilities.wakes``."""
        del ring

    def set_loss_listener(self, listen: Callable[[int], None]) -> None:
        """Have ``listen(rank)`` called once for each lost rank, if the transport detects that.

        It is called at once for those that are lost already: a rank may be lost before others have opened their world.
        """
        del listen

    def on_finalize(self, leave: Callable[[], None]) -> None:  # noqa: B027 a program can end MPI alone
        """Call ``leave`` when the program ends the backend by a call of its own, before the backend stops working."""

    def set_return_listener(self, listen: Callable[[int, int], None]) -> None:
        """Have ``listen(rank, incarnation)`` called when a lost rank is there again, as a new process.

        Its loss has been told before. It stays lost until :meth:`accept` is called.
        """
        del listen

    def accept(self, rank: int, incarnation: int) -> bool:
        """Connect to the new process of a rank, if it is still there; return whether it is.

        From then on messages go to it and come from it. Nothing of the process before arrives any more, and nothing
        that was sent to that one reaches the new one.
        """
        del rank, incarnation
        return False

    def describe(self) -> str:
        """Return one line for reports: backend, library, version."""
        return self.name
