"""Allocates memory that other ranks on the host can map and read, so that no messages are needed.

The memory is an anonymous file (``memfd_create``), which other processes open through ``/proc/PID/fd``. No operation is
collective or blocks, so a late or lost rank delays no other rank. The file is not in a file system, so a killed rank
leaves nothing behind. The size of ``/dev/shm``, 64 MiB in many containers, is not a limit. The file's pages are
allocated immediately and its size is fixed, so later accesses never raise SIGBUS.

The file has a random name, with which a process checks that a descriptor refers to it. Ranks that are in another
container, belong to another user, or run on a system other than Linux cannot find the file, and use messages instead.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import struct
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

if TYPE_CHECKING:
    from torch import Tensor

TOKEN_NBYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Address:
    """Identifies a process's shared memory, so that other processes can find and map it.

    Attributes:
        pid: Process ID of the owner.
        descriptor: File descriptor of the memory in the owner.
        token: Unique random name of the memory file.
    """

    pid: int
    descriptor: int
    nbytes: int
    token: bytes

    _FORMAT: ClassVar[struct.Struct] = struct.Struct(f"<qqq{TOKEN_NBYTES}s")
    PACKED_NBYTES: ClassVar[int] = _FORMAT.size

    def pack(self) -> bytes:
        """Return the address as bytes, to be sent to other processes."""
        return self._FORMAT.pack(self.pid, self.descriptor, self.nbytes, self.token)

    @classmethod
    def unpack(cls, data: bytes) -> Address:
        """Return the address that :meth:`pack` converted to ``data``."""
        return cls(*cls._FORMAT.unpack(data))

    @property
    def path(self) -> str:
        """Path by which other processes open the file."""
        return f"/proc/{self.pid}/fd/{self.descriptor}"

    def is_behind(self, path: str) -> bool:
        """Return whether the open file at ``path`` is the file with this address."""
        return os.readlink(path).startswith(f"/memfd:{_name(self.token)} ")


class SharedMemory:
    """Holds ``nbytes`` bytes of this process's memory that other processes may map.

    Attributes:
        tensor: uint8 tensor that views the memory, initially zeros.
        address: Address with which other processes can map the memory.
        views: For each group (a weak key), a digest that identifies the shared memory of all its ranks, and the ranks'
            tensors in group order. The tensors are None if any rank cannot map all of them.

    Raises:
        OSError: This system does not support such memory, or does not have enough.
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
    """Make all ranks see this rank's earlier accesses to shared memory before its later accesses.

    x86 guarantees this order, but Arm does not.
    """
    lock = threading.Lock()  # releasing and acquiring the lock again orders the accesses
    for _ in range(2):
        lock.acquire()
        lock.release()


def find(address: Address) -> Tensor:
    """Map another process's memory as a uint8 tensor. Only that process may write to it. May raise OSError."""
    if not address.is_behind(address.path):  # checked before opening, because opening a device may have side effects
        raise FileNotFoundError(f"{address.path} is not the shared memory of process {address.pid}")
    descriptor = os.open(address.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if not address.is_behind(f"/proc/self/fd/{descriptor}"):
            raise FileNotFoundError(f"{address.path} changed while it was opened")
        return _map(descriptor, address.nbytes)
    finally:
        os.close(descriptor)


def _name(token: bytes) -> str:
    return f"asyncdist-{token.hex()}"


def _create(token: bytes) -> int:
    create = getattr(os, "memfd_create", None)
    if create is None:
        raise OSError("this system has no anonymous files (os.memfd_create)")
    return int(create(_name(token), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))


def _map(descriptor: int, nbytes: int) -> Tensor:
    """Map a file as a tensor. torch is used, because Python's mmap would keep a descriptor open."""
    import torch  # not at the top of the module, because asyncdist.progress() must not import torch

    found = os.fstat(descriptor).st_size
    if found != nbytes:
        raise OSError(f"the shared memory must have {nbytes} bytes, got {found}")
    try:
        with torch.inference_mode(False):
            return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=nbytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(f"the shared memory cannot be mapped: {error}") from error
