"""Copies bytes straight to or from the memory of another process of this host, which need do nothing for it.

Between two processes of a host MPI moves a large message by one copy, which the receiver makes inside one of its calls,
and gloo by two through a socket. Linux lets the sender write as well (``process_vm_writev``, the call behind MPI's own
single copy, which is called CMA there). So it may write half of a message while the receiver copies the other half:
two cores then move twice the bytes of one, 4 MiB in 186 us where MPI's one copy took 335, 256 MiB in 18 ms for 37. Or
it may write all of it, where the backend's own way is longer. Or the receiver reads (``process_vm_readv``) what lies
still there, as a snapshot does.

A process to be written to, or read, says where a random token of its own lies. The other one looks for it there, first
to learn whether this is the same host, and whether the kernel allows it; then before each piece that it writes, and
behind each that it has read, since the process may have ended and its number be another one's by now, or may have taken
the token back. Processes in containers of their own, under other users or guarded by Yama, and other systems than Linux
do not find each other, and messages are used.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
from pathlib import Path
from typing import Final

TOKEN_NBYTES: Final = 16
#: What one call writes: a third to half of a millisecond, in which the writer does nothing else.
PIECE_NBYTES: Final = 4 << 20
_YAMA: Final = Path("/proc/sys/kernel/yama/ptrace_scope")


class _Stretch(ctypes.Structure):
    """The kernel's iovec."""

    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class AttachToken:
    """Lets another process write to this one, until it is revoked.

    Attributes:
        pid: of this process.
        address: where the token lies.
        token: what lies there.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.token = secrets.token_bytes(TOKEN_NBYTES)
        self._memory = ctypes.create_string_buffer(self.token, TOKEN_NBYTES)
        self.address = ctypes.addressof(self._memory)

    def revoke(self) -> None:
        """Let no process write any more; one that has just looked for the token still writes one piece."""
        ctypes.memset(self._memory, 0, TOKEN_NBYTES)


class PeerProcess:
    """A process of this host that gave a token.

    Args:
        pid, address, token: of the licence.

    Raises:
        OSError: its memory is not to be reached from here.
    """

    def __init__(self, pid: int, address: int, token: bytes) -> None:
        self._token = token
        self._found = ctypes.create_string_buffer(TOKEN_NBYTES)
        self._look = _Copy(
            "process_vm_readv", pid, ctypes.addressof(self._found), address, TOKEN_NBYTES, keeps_gil=True
        )
        self._write = _Copy("process_vm_writev", pid)
        self._read = _Copy("process_vm_readv", pid)
        self.check()

    def check(self) -> None:
        """Find the token.

        Raises:
            OSError: it is not there, or not any more.
        """
        if self._look() != TOKEN_NBYTES or self._found.raw != self._token:
            raise OSError(errno.ESRCH, "the process has ended, or has taken its token back")

    def write(self, source: int, target: int, nbytes: int) -> None:
        """Copy from this process to the other one.

        Args:
            source: where the bytes are here. They must not change meanwhile.
            target: where they are to be there.
            nbytes: how many.

        Raises:
            OSError: not all of it has been written: the process has ended, or has no such memory.
        """
        self.check()
        self._copy(self._write, source, target, nbytes)

    def read(self, source: int, target: int, nbytes: int) -> None:
        """Copy from the other process to this one.

        Args:
            source: where the bytes are there. They must not change before the token is taken back.
            target: where they are to be here.
            nbytes: how many.

        Raises:
            OSError: not all of it has been read, or the token is not there any more: what has been read may be
                anything.
        """
        self._copy(self._read, target, source, nbytes)
        self.check()

    @staticmethod
    def _copy(copy: _Copy, here: int, there: int, nbytes: int) -> None:
        while nbytes:
            count = copy.of(here, there, nbytes)
            here, there, nbytes = here + count, there + count, nbytes - count


class _Copy:
    """A system call that copies one stretch, with its arguments kept: to make them takes longer than the call.

    Args:
        name: of the call.
        pid: of the other process.
        here, there, nbytes: the stretch, in this process and in the other one.
        keeps_gil: whether the call copies so little that giving up the GIL takes longer.
    """

    def __init__(
        self, name: str, pid: int, here: int = 0, there: int = 0, nbytes: int = 0, *, keeps_gil: bool = False
    ) -> None:
        library = ctypes.PyDLL if keeps_gil else ctypes.CDLL
        call = getattr(library(None, use_errno=True), name, None)
        if call is None:
            raise OSError(errno.ENOSYS, f"this system has no {name}")
        call.restype = ctypes.c_ssize_t
        self._call = call
        self._here = _Stretch(here, nbytes)
        self._there = _Stretch(there, nbytes)
        one = ctypes.c_ulong(1)
        self._arguments = (
            ctypes.c_int(pid),
            ctypes.byref(self._here),
            one,
            ctypes.byref(self._there),
            one,
            ctypes.c_ulong(0),
        )

    def __call__(self) -> int:
        count = int(self._call(*self._arguments))
        if count <= 0:
            number = ctypes.get_errno() if count else errno.EFAULT
            raise OSError(number, os.strerror(number))
        return count

    def of(self, here: int, there: int, nbytes: int) -> int:
        """Copy another stretch, or the beginning of it; returns how much."""
        self._here.address, self._there.address = here, there
        self._here.nbytes = self._there.nbytes = nbytes
        return self()


def obstacle() -> str | None:
    """Say why processes of this host cannot write to each other, as far as one can tell; None if nothing is known."""
    try:
        licence = AttachToken()
        PeerProcess(licence.pid, licence.address, licence.token)
        scope = _YAMA.read_text().strip() if os.geteuid() else "0"
    except FileNotFoundError:  # of Yama's file: this kernel has no Yama
        return None
    except OSError as error:
        return str(error.strerror)
    return None if scope == "0" else f"kernel.yama.ptrace_scope is {scope}"


class DirectWrite:
    """Writes the end of a tensor into the memory of another process.

    Args:
        neighbour: the process; None where it is not known, and nothing can be written.
        view: the bytes. They must not change before all of them are written.
        source: where they lie.
        target: where they are to lie there.

    Attributes:
        written_nbytes: how many are there.
    """

    def __init__(self, neighbour: PeerProcess | None, view: memoryview, source: int, target: int) -> None:
        self._neighbour = neighbour
        self._view = view
        self._source = source
        self._target = target
        self.written_nbytes = 0

    @property
    def rest(self) -> memoryview:
        """The bytes that are not written yet."""
        return self._view[self.written_nbytes :]

    def write_piece(self) -> int:
        """Write the next piece; returns its size. Raises OSError as :meth:`PeerProcess.write`."""
        if self._neighbour is None:
            raise OSError(errno.EPERM, "it is not known how to write there")
        nbytes = min(PIECE_NBYTES, len(self.rest))
        self._neighbour.write(self._source + self.written_nbytes, self._target + self.written_nbytes, nbytes)
        self.written_nbytes += nbytes
        return nbytes
