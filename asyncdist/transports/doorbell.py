"""Wakes sleeping ranks on a host, for transports whose messages arrive without waking the receiver, such as MPI.

The ranks on a host map a common *board* (:mod:`asyncdist.host_memory.shared_memory`). On the board, each rank has one
cache line, which says whether the rank is asleep. Each rank also has a pipe, which its event loop watches. After each
message, the sender reads the receiver's line. It writes a byte into the receiver's pipe only if the receiver is asleep.
For a message to a rank that is awake, the cost is one read of memory.

- **No message is missed.** The receiver first writes to its line, then tests for messages once more, and then sleeps.
  The sender first sends, then reads the line. Both complete the first action before the second, so at least one of them
  notices the other. The receiver orders its memory accesses explicitly. The sender's accesses are ordered when its call
  of mpi4py acquires the GIL again.
- **Lost, repeated and late rings are harmless.** A ring, which is one byte in the pipe, only makes the rank test for
  messages. A sleeping rank also tests every 50 ms, in case a sender has died between sending and ringing.
- **Permissions.** A pipe has no name. It is opened through ``/proc/PID/fd``, which the kernel allows only for processes
  of the same user. Processes of other users can neither ring nor read the board.

A ring after a pause takes 15 to 25 us, and the receiver's loop runs 40 to 60 us later. A Unix datagram socket would be
as fast, but any process that knew its name could send to it.

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

#: Size of a cache line. Each rank has its own line, so that ranks that fall asleep and wake up do not slow down other
#: ranks.
LINE_NBYTES: Final = 64
#: Size of the digest of a host's name.
HOST_NBYTES: Final = 8
#: States of a rank, stored in the first byte of the rank's line.
_ABSENT: Final = 0
_AWAKE: Final = 1
_ASLEEP: Final = 2
_ENDED: Final = 3
#: Maximum number of bytes to read from the pipe at once. Each byte is a request to wake up.
_RINGS_NBYTES: Final = 4096
#: Format of a packed address: the host's digest, whether there is a board, the board's address, and the pipe's
#: descriptor and inode.
_ADDRESS: Final = struct.Struct(f"<{HOST_NBYTES}s?{shared_memory.Address.PACKED_NBYTES}sqq")
ADDRESS_NBYTES: Final = _ADDRESS.size


class BellAddress(NamedTuple):
    """Tells the other ranks on a host where a rank's pipe and board are (the board is shared memory with all states).

    Attributes:
        host: Digest of the host's name, of ``HOST_NBYTES`` bytes.
        board: Address of the board that this rank offers, or None if the rank cannot be woken.
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
    """Wakes another rank on this host, through a pipe, if that rank is asleep.

    Args:
        board: Shared memory with the states of the ranks on this host.
        place: Index of the rank's state on the board.
        pipe: File descriptor, in this process, of the write end of the rank's pipe.
    """

    def __init__(self, board: memoryview, place: int, pipe: int) -> None:
        self._board = board
        self._place = place
        self._pipe = pipe

    def ring_sleeper(self) -> None:
        """Wake the rank if it is asleep. Must be called after each step in sending a message to the rank."""
        if self._board[self._place] == _ASLEEP:
            self._ring()

    def mute(self) -> None:
        """Never write to the pipe again, because its descriptor is about to be closed and may be reused."""
        self._pipe = -1

    def _ring(self) -> None:
        self._board[self._place] = _AWAKE  # Later messages need not wake the rank again.
        with contextlib.suppress(OSError):  # Raised if the pipe is full, or the rank has ended.
            os.write(self._pipe, b"\0")


class Doorbell:
    """Lets the other ranks on this host wake this rank while it is asleep.

    Args:
        host: Digest of the host's name, of ``HOST_NBYTES`` bytes.

    Raises:
        OSError: This system has no shared memory that other processes can open, or no descriptors are left.
    """

    def __init__(self, host: bytes, size: int) -> None:
        self._offered: SharedMemory | None = SharedMemory(size * LINE_NBYTES)
        self._board = memoryview(bytearray(LINE_NBYTES))
        self._place = 0
        self._places: list[int] = []  # board indices of the other ranks on this host
        self._bells: list[PeerBell] = []
        self._have_all_joined = False
        self._descriptors: list[int] = list(os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC))
        self._finalizer = weakref.finalize(self, _close, self._descriptors)
        self._size = size
        inode = os.fstat(self._descriptors[1]).st_ino
        self.address = BellAddress(host, self._offered.address, self._descriptors[1], inode)

    def join(self, rank: int, addresses: Sequence[BellAddress]) -> list[PeerBell | None]:
        """Map the board (shared memory with the states of the ranks on this host), and open these ranks' pipes.

        Args:
            addresses: Addresses of all ranks, in rank order.

        Returns:
            For each rank, in rank order, the object that wakes it, or None for ranks on other hosts.

        Raises:
            OSError: The board or a pipe cannot be opened. In that case, no rank of the world ever sleeps.
        """
        ranks = [other for other, address in enumerate(addresses) if address.host == self.address.host]
        board = addresses[ranks[0]].board
        if board is None:
            raise OSError(f"rank {ranks[0]}, the first rank of this host, has no board")
        if ranks[0] != rank:  # The first rank keeps its board open, because the other ranks may map it later.
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
        # The pipe is opened for reading, too. If the rank were its only reader and died, a write would raise SIGPIPE.
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._descriptors.append(descriptor)
        if os.fstat(descriptor).st_ino != address.inode:
            raise FileNotFoundError(f"{path} changed while it was opened")
        return descriptor

    def fileno(self) -> int:
        """Return the descriptor of a pipe, which becomes readable when another rank wakes this rank."""
        return self._descriptors[0]

    def arm(self) -> bool:
        """Mark this rank as asleep. Return True if it was awake; it must then test for messages before it sleeps."""
        if self._board[self._place] == _ASLEEP:
            return False
        self._board[self._place] = _ASLEEP
        shared_memory.order_memory()
        return True

    def disarm(self) -> None:
        """Mark this rank as awake, so that other ranks do not write to its pipe."""
        if self._board[self._place] == _ASLEEP:
            self._board[self._place] = _AWAKE

    def clear(self) -> None:
        """Discard the bytes that other ranks have written to the pipe to wake this rank."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._descriptors[0], _RINGS_NBYTES)

    def is_rung_by_all(self) -> bool:
        """Return whether all other ranks of the world wake this rank when it is asleep."""
        if not self._have_all_joined:
            present = [place for place in self._places if self._board[place] != _ABSENT]
            self._have_all_joined = len(present) == self._size - 1
        return self._have_all_joined

    def end(self) -> None:
        """Mark this rank as ended, so that no rank wakes it. It must not send or receive any more messages."""
        self._board[self._place] = _ENDED

    def withdraw(self) -> None:
        """Mark this rank as never asleep, and as unable to wake other ranks."""
        self._board[self._place] = _ABSENT

    def close(self) -> None:
        """Close all pipes. This rank then wakes no other rank. The loop must no longer be watching :meth:`fileno`."""
        for bell in self._bells:
            bell.mute()
        self._offered = None  # otherwise, its descriptor would stay open until this object's cycle is collected
        self._finalizer()


def obstacle() -> str | None:
    """Return the reason why ranks on this host cannot wake each other, or None if no reason is known."""
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


def connect_doorbells(
    host: bytes, rank: int, size: int, all_gather: Callable[[bytes], Sequence[bytes]]
) -> tuple[Doorbell | None, list[Any], str | None]:
    """Make this rank's doorbell, and connect to those of the host's other ranks. All ranks must call this function.

    Args:
        all_gather: Function to which each rank passes bytes, and which returns the bytes of all ranks, in rank order.

    Returns:
        Three values: this rank's doorbell, or None; a list with an object for each rank that wakes it, or None if it
        cannot be woken; and the reason why this rank has no doorbell, or None.
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
