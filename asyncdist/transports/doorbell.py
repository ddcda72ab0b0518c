"""Wakes sleeping ranks of a host, for a transport whose messages arrive without waking the receiver, such as MPI.

The ranks of a host map a common *board* (:mod:`asyncdist.host_memory.shared_memory`) with one cache line per rank,
which says whether the rank is asleep. Each rank also has a pipe, which its event loop watches. After each message, the
sender reads the receiver's line. It writes a byte into the receiver's pipe only if the receiver is asleep. A message to
a rank that is awake costs one read of memory.

- **No message is missed.** The receiver first writes to its line, then tests for messages once more, and then sleeps.
  The sender first sends, then reads the line. Both complete the first access before the second, so at least one of them
  notices the other. The receiver orders its accesses explicitly. The sender's call of mpi4py orders them when it
  acquires the GIL again.
- **Lost, repeated and late rings are harmless.** A ring only requests a pass. A rank that sleeps also makes a pass
  every 50 ms, in case a sender has died between its two steps.
- **Permissions.** A pipe has no name. It is opened through ``/proc/PID/fd``, which the kernel allows only to processes
  of the same user. Processes of other users can neither ring nor read the board.

A ring after a pause takes 15 to 25 us, and the receiver's loop runs 40 to 60 us later. A Unix datagram socket would be
as fast, but any process that knows its name may send to it.

The module is compiled if possible (:mod:`asyncdist.compiled`), because it runs for each small message.
"""

from __future__ import annotations

import contextlib
import os
import struct
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, cast

from asyncdist.host_memory import shared_memory
from asyncdist.host_memory.shared_memory import SharedMemory

#: Size of a cache line. Each rank has a separate line, so that ranks that sleep and wake do not slow down others.
LINE_NBYTES: Final = 64
#: Size of the digest of a host's name.
HOST_NBYTES: Final = 8
#: States of a rank, in the first byte of the rank's line.
_ABSENT: Final = 0
_AWAKE: Final = 1
_ASLEEP: Final = 2
_ENDED: Final = 3
#: Maximum number of rings, of one byte each, to read from the pipe at once.
_RINGS_NBYTES: Final = 4096
#: Format of a packed address: the host's digest, whether there is a board, the board's address, the pipe, and its
#: inode.
_ADDRESS: Final = struct.Struct(f"<{HOST_NBYTES}s?{shared_memory.Address.PACKED_NBYTES}sqq")
ADDRESS_NBYTES: Final = _ADDRESS.size


class BellAddress(NamedTuple):
    """Address by which the other ranks of a host find a rank's board and pipe.

    Attributes:
        host: Digest of the host's name, of ``HOST_NBYTES`` bytes.
        board: Address of the board that this rank offers, or None if it has no doorbell.
        pipe: File descriptor of the pipe's end for writing, in the rank's process.
        inode: Inode number with which another process checks that it has opened this pipe.
    """

    host: bytes
    board: shared_memory.Address | None
    pipe: int
    inode: int

    def pack(self) -> bytes:
        """Pack the address into bytes, to be sent to the other ranks."""
        board = b"" if self.board is None else self.board.pack()
        return _ADDRESS.pack(self.host, self.board is not None, board, self.pipe, self.inode)

    @classmethod
    def unpack(cls, data: bytes) -> BellAddress:
        """Return the address that ``pack`` has packed into ``data``."""
        host, has_board, board, pipe, inode = _ADDRESS.unpack(data)
        found = shared_memory.Address.unpack(board) if has_board else None
        return cls(host, found, pipe, inode)


class PeerBell:
    """Rings a rank of this host if the rank is asleep.

    Args:
        board: Board of the host.
        place: Index of the rank's state on the board.
        pipe: File descriptor, in this process, of the write end of the rank's pipe.
    """

    def __init__(self, board: memoryview, place: int, pipe: int) -> None:
        self._board = board
        self._place = place
        self._pipe = pipe

    def ring_sleeper(self) -> None:
        """Ring the rank if it is asleep. Must be called after each step of a message to the rank."""
        if self._board[self._place] == _ASLEEP:
            self._ring()

    def mute(self) -> None:
        """Stop ringing, because the descriptor is about to be closed and its number may be used again."""
        self._pipe = -1

    def _ring(self) -> None:
        self._board[self._place] = _AWAKE  # Later messages need not ring.
        with contextlib.suppress(OSError):  # Raised if the pipe is full of rings, or the rank has ended.
            os.write(self._pipe, b"\0")


class Doorbell:
    """Bell of this rank, which the other ranks of its host ring while it sleeps.

    Args:
        host: Digest of the host's name, of ``HOST_NBYTES`` bytes.
        size: Number of ranks of the world.

    Raises:
        OSError: This system has no shared memory that other processes can open, or no descriptors are left.
    """

    def __init__(self, host: bytes, size: int) -> None:
        self._offered: SharedMemory | None = SharedMemory(size * LINE_NBYTES)
        self._board = memoryview(bytearray(LINE_NBYTES))
        self._place = 0
        self._places: list[int] = []  # board indices of this host's other ranks
        self._bells: list[PeerBell] = []
        self._is_everybody_here = False
        self._descriptors: list[int] = list(os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC))
        self._finalizer = weakref.finalize(self, _close, self._descriptors)
        self._size = size
        inode = os.fstat(self._descriptors[1]).st_ino
        self.address = BellAddress(host, self._offered.address, self._descriptors[1], inode)

    def join(self, rank: int, addresses: Sequence[BellAddress]) -> list[PeerBell | None]:
        """Map the board of this host, and open the pipes of its ranks.

        Args:
            addresses: Addresses of all ranks, in rank order.

        Returns:
            The bell of each rank, in rank order, or None for ranks of other hosts.

        Raises:
            OSError: The board or a pipe cannot be opened. Then no rank of the world sleeps.
        """
        ranks = [other for other, address in enumerate(addresses) if address.host == self.address.host]
        board = addresses[ranks[0]].board
        if board is None:
            raise OSError(f"rank {ranks[0]}, the first rank of this host, has no board")
        if ranks[0] != rank:  # The first rank keeps its board open, because the others may map it later.
            self._offered = None
        self._memory = shared_memory.find(board)
        self._board = memoryview(cast(Any, self._memory.numpy()))
        bells: list[PeerBell | None] = [None] * self._size
        for line, other in enumerate(ranks):
            place = line * LINE_NBYTES
            if other == rank:
                self._place = place
                pipe = self._descriptors[1]
            else:
                self._places.append(place)
                pipe = self._opened(addresses[other])
            bell = bells[other] = PeerBell(self._board, place, pipe)
            self._bells.append(bell)
        self._board[self._place] = _AWAKE
        return bells

    def _opened(self, address: BellAddress) -> int:
        if address.board is None:
            raise OSError("a rank of this host has no pipe")
        path = f"/proc/{address.board.pid}/fd/{address.pipe}"
        if os.readlink(path) != f"pipe:[{address.inode}]":  # Opening another kind of file might have side effects.
            raise FileNotFoundError(f"{path} is not the pipe of a rank")
        # Open the pipe for reading, too. Otherwise a write would raise SIGPIPE after the rank, its only reader, has
        # died.
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._descriptors.append(descriptor)
        if os.fstat(descriptor).st_ino != address.inode:
            raise FileNotFoundError(f"{path} changed while it was opened")
        return descriptor

    def fileno(self) -> int:
        """Return the descriptor of a pipe, which becomes readable when another rank rings."""
        return self._descriptors[0]

    def arm(self) -> bool:
        """Ask to be rung. If this returns True, this rank must test for messages again before it sleeps."""
        if self._board[self._place] == _ASLEEP:
            return False
        self._board[self._place] = _ASLEEP
        shared_memory.order_memory()
        return True

    def disarm(self) -> None:
        """Tell the other ranks that this rank is awake and need not be rung."""
        if self._board[self._place] == _ASLEEP:
            self._board[self._place] = _AWAKE

    def clear(self) -> None:
        """Remove the arrived rings from the pipe."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._descriptors[0], _RINGS_NBYTES)

    def is_rung_by_all(self) -> bool:
        """Return whether all other ranks of the world ring this rank when it sleeps."""
        if not self._is_everybody_here:
            there = [place for place in self._places if self._board[place] != _ABSENT]
            self._is_everybody_here = len(there) == self._size - 1
        return self._is_everybody_here

    def end(self) -> None:
        """Stop being rung, because this rank sends and receives no further messages."""
        self._board[self._place] = _ENDED

    def withdraw(self) -> None:
        """Declare that this rank does not sleep and may fail to ring, so that no other rank relies on its rings."""
        self._board[self._place] = _ABSENT

    def close(self) -> None:
        """Close all pipes. The bells of the other ranks then do nothing. The loop must no longer watch the pipe."""
        for bell in self._bells:
            bell.mute()
        self._finalizer()


def obstacle() -> str | None:
    """Return the reason why ranks of this host cannot ring each other, or None if no reason is known."""
    try:
        bell = Doorbell(bytes(HOST_NBYTES), 2)
    except OSError as error:
        return str(error.strerror or error)
    try:
        board = bell.address.board
        assert board is not None
        shared_memory.find(board)
        bell._opened(bell.address)
    except OSError as error:
        return str(error.strerror or error)
    finally:
        bell.close()
    return None


def meet(
    host: bytes, rank: int, size: int, all_gather: Callable[[bytes], Sequence[bytes]]
) -> tuple[Doorbell | None, list[Any], str | None]:
    """Make the doorbell of this rank, and find the bells of the other ranks. Collective among all ranks.

    Args:
        all_gather: Function that returns the bytes that each rank has passed to it, in rank order.

    Returns:
        This rank's doorbell or None, a list with each rank's bell, and the reason why this rank has no doorbell, or
        None. The bell is None for ranks that cannot be rung.
    """
    nothing: list[Any] = [None] * size
    try:
        bell = Doorbell(host, size)
    except OSError as error:
        all_gather(BellAddress(host, None, -1, 0).pack())
        return None, nothing, str(error.strerror or error)
    addresses = [BellAddress.unpack(each) for each in all_gather(bell.address.pack())]
    try:
        return bell, bell.join(rank, addresses), None
    except OSError as error:
        bell.close()
        return None, nothing, str(error.strerror or error)


def _close(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())
