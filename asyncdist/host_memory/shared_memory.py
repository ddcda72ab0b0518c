"""Makes memory that the other ranks of a host map, so they read what would be sent otherwise.

It is an anonymous file (``memfd_create``), which others open through ``/proc/PID/fd``. That was chosen over a window of
MPI and over a named file in ``/dev/shm`` because

- nothing about it is collective and nothing blocks, so a late or lost rank holds up nobody, and it works on every
  transport whose ranks are processes;
- it has no name in any file system: a rank that is killed leaves nothing behind;
- it does not count against ``/dev/shm``, which has 64 MiB in many containers. Its pages are allocated when it is made,
  and its size is sealed, so a process that touches it later never gets SIGBUS.

Ranks do not ask whether they are on one host: the file carries a random name, and a process that finds that name behind
the descriptor has the right one. Ranks in containers of their own, under other users, or on another system than Linux
do not find it, and messages are used.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import struct
import threading
import weakref
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

TOKEN_NBYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Address:
    """Says where a process finds another one's memory.

    Attributes:
        pid: of the owner.
        descriptor: of the file, in the owner.
        nbytes: how long it is.
        token: its random name, which no other has.
    """

    pid: int
    descriptor: int
    nbytes: int
    token: bytes

    _FORMAT: ClassVar[struct.Struct] = struct.Struct(f"<qqq{TOKEN_NBYTES}s")
    PACKED_NBYTES: ClassVar[int] = _FORMAT.size

    def pack(self) -> bytes:
        """Pack it into bytes, for the other processes."""
        return self._FORMAT.pack(self.pid, self.descriptor, self.nbytes, self.token)

    @classmethod
    def unpack(cls, data: bytes) -> Address:
        """Read what ``pack`` gave."""
        return cls(*cls._FORMAT.unpack(data))

    @property
    def path(self) -> str:
        """Path at which the file is open."""
        return f"/proc/{self.pid}/fd/{self.descriptor}"

    def is_behind(self, path: str) -> bool:
        """Whether the file that is open there is this one."""
        return os.readlink(path).startswith(f"/memfd:{_name(self.token)} ")


class SharedMemory:
    """Memory that this process has made.

    Its pages are given back when the last process that maps it has let go of it, or ended.

    Args:
        nbytes: at least one.

    Attributes:
        tensor: uint8, zeros at first.
        address: for the others.
        views: what is known of other members' memory, by group, for as long as that lives: a word for all of it, and
            that memory, this rank's own included, in the group's order; or None, where not all members can have all of
            it.

    Raises:
        OSError: this system has no such memory, or not as much.
    """

    def __init__(self, nbytes: int) -> None:
        token = secrets.token_bytes(TOKEN_NBYTES)
        descriptor = _create(token)
        weakref.finalize(self, os.close, descriptor)
        os.posix_fallocate(descriptor, 0, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self.address = Address(os.getpid(), descriptor, nbytes, token)
        self.tensor = _map(descriptor, nbytes)
        self.views: weakref.WeakKeyDictionary[object, tuple[bytes, list[Tensor] | None]] = weakref.WeakKeyDictionary()


def order_memory() -> None:
    """Let all ranks see the writes before this call before the writes after it, and do the same for this rank's reads.

    x86 keeps such orders anyway; Arm does not. The release of a lock is ordered before the next time it is acquired.
    """
    lock = threading.Lock()
    for _ in range(2):
        lock.acquire()
        lock.release()


def find(address: Address) -> Tensor:
    """Map another process's memory, as uint8. Only the process that made it writes it.

    Raises:
        OSError: it is not to be had from here.
    """
    if not address.is_behind(address.path):  # before it is opened: a device there might not like that
        raise FileNotFoundError(f"{address.path} is not what process {address.pid} calls so")
    descriptor = os.open(address.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if not address.is_behind(f"/proc/self/fd/{descriptor}"):
            raise FileNotFoundError(f"{address.path} has changed meanwhile")
        return _map(descriptor, address.nbytes)
    finally:
        os.close(descriptor)


def _name(token: bytes) -> str:
    return f"asyncdist-{token.hex()}"


def _create(token: bytes) -> int:
    create = getattr(os, "memfd_create", None)
    if create is None:
        raise OSError("this system has no anonymous files")
    return int(create(_name(token), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))


@torch.inference_mode(False)
def _map(descriptor: int, nbytes: int) -> Tensor:
    """Map through torch, which keeps no descriptor: one of Python's own would stay open for each mapping.

    An ordinary tensor, which may be written later, also where this is called in inference mode.
    """
    found = os.fstat(descriptor).st_size
    if found != nbytes:
        raise OSError(f"the memory has {found} bytes, not {nbytes}")
    try:
        return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=nbytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(f"the memory cannot be mapped: {error}") from error
