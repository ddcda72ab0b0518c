"""Makes memory that the other ranks of a host map and read, so that no messages are needed.

The memory is an anonymous file (``memfd_create``), which others open through ``/proc/PID/fd``. Its advantages over a
window of MPI and over a named file in ``/dev/shm``:

- Nothing is collective or blocks, so a late or lost rank delays no other rank. It works on every transport whose ranks
  are processes.
- The file has no name in any file system, so a killed rank leaves nothing behind.
- It does not count against ``/dev/shm``, which has 64 MiB in many containers. Its pages are allocated when it is made,
  and its size is sealed, so later accesses never raise SIGBUS.

Ranks need not know whether they are on one host: the file has a random name, and a process that finds this name behind
the descriptor has the right file. Ranks in another container, of another user or on a system other than Linux do not
find it; messages are used then.
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
    """Tells other processes how to find a process's shared memory.

    Attributes:
        pid: Process id of the owner.
        descriptor: File descriptor in the owner.
        nbytes: Size of the memory in bytes.
        token: Unique random name of the file.
    """

    pid: int
    descriptor: int
    nbytes: int
    token: bytes

    _FORMAT: ClassVar[struct.Struct] = struct.Struct(f"<qqq{TOKEN_NBYTES}s")
    PACKED_NBYTES: ClassVar[int] = _FORMAT.size

    def pack(self) -> bytes:
        """Pack the address into bytes, to be sent to other processes."""
        return self._FORMAT.pack(self.pid, self.descriptor, self.nbytes, self.token)

    @classmethod
    def unpack(cls, data: bytes) -> Address:
        """Unpack the bytes that ``pack`` returned."""
        return cls(*cls._FORMAT.unpack(data))

    @property
    def path(self) -> str:
        """Path by which other processes open the file."""
        return f"/proc/{self.pid}/fd/{self.descriptor}"

    def is_behind(self, path: str) -> bool:
        """Return whether the file open at ``path`` is this one."""
        return os.readlink(path).startswith(f"/memfd:{_name(self.token)} ")


class SharedMemory:
    """Owns memory that other processes may map.

    Its pages are freed when the last process that maps it has unmapped it or ended.

    Args:
        nbytes: Size in bytes, at least 1.

    Attributes:
        tensor: uint8 tensor over the memory, initially zeros.
        address: Address to send to other processes.
        views: The members' memory, keyed weakly by group: a key that identifies all of it and the tensors in the
            group's order, including this rank's own; None if not every member can map all of it.

    Raises:
        OSError: This system has no such memory, or not enough.
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
    """Order this rank's earlier reads and writes of shared memory before its later ones, as seen by all ranks.

    x86 keeps this order anyway; Arm does not. It holds since a lock's release is ordered before its next acquisition.
    """
    lock = threading.Lock()
    for _ in range(2):
        lock.acquire()
        lock.release()


def find(address: Address) -> Tensor:
    """Map another process's memory as a uint8 tensor, which only that process may write.

    Raises:
        OSError: The memory cannot be mapped from this process.
    """
    if not address.is_behind(address.path):  # checked before the open, which may have effects on a device
        raise FileNotFoundError(f"{address.path} is not the shared memory of process {address.pid}")
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
    """Map a file through torch, since each mapping by Python's mmap would keep a descriptor open.

    The result is an ordinary tensor, which may be written later, even if this is called in inference mode.
    """
    found = os.fstat(descriptor).st_size
    if found != nbytes:
        raise OSError(f"the memory has {found} bytes, not {nbytes}")
    try:
        return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=nbytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(f"the memory cannot be mapped: {error}") from error
