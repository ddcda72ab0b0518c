"""Allocates memory that other ranks on the host can map and read, so that no messages are needed.

The memory is an anonymous file (``memfd_create``), which other processes open through ``/proc/PID/fd``. No operation is
collective or blocking, so a late or lost rank delays no other rank. The file has no name in a file system, so a killed
rank leaves nothing behind. It does not count against the size of ``/dev/shm``, which is 64 MiB in many containers. Its
pages are allocated immediately and its size is fixed, so later accesses never raise SIGBUS.

The file has a random name, by which a process checks that a descriptor belongs to it. Ranks in another container, of
another user, or on a system other than Linux do not find it, and use messages instead.
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
    """Information with which other processes find and map a process's shared memory.

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
        """Pack the address into bytes, to be sent to other processes."""
        return self._FORMAT.pack(self.pid, self.descriptor, self.nbytes, self.token)

    @classmethod
    def unpack(cls, data: bytes) -> Address:
        """Return the address that ``pack`` has packed into ``data``."""
        return cls(*cls._FORMAT.unpack(data))

    @property
    def path(self) -> str:
        """Path by which other processes open the file."""
        return f"/proc/{self.pid}/fd/{self.descriptor}"

    def is_behind(self, path: str) -> bool:
        """Return whether the open file at ``path`` is the file with this address."""
        return os.readlink(path).startswith(f"/memfd:{_name(self.token)} ")


class SharedMemory:
    """Memory of this process, of ``nbytes`` bytes, that other processes may map.

    Attributes:
        tensor: uint8 tensor over the memory, initially zeros.
        address: Address that other processes receive to map the memory.
        views: Pairs of a digest that identifies all members' memory and the members' tensors in the group's order, by
            group (a weak key). The tensors are None if some member cannot map all of them.

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
    """Complete this rank's earlier accesses to shared memory before its later ones, as seen by all ranks.

    x86 preserves this order, but Arm does not. A lock's release is ordered before its next acquisition.
    """
    lock = threading.Lock()
    for _ in range(2):
        lock.acquire()
        lock.release()


def find(address: Address) -> Tensor:
    """Map another process's memory as a uint8 tensor, which only the other process may write. May raise OSError."""
    if not address.is_behind(address.path):  # the name is checked first, since opening a device may have effects
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
    """Map a file as an ordinary tensor. Uses torch, since mappings by Python's mmap keep descriptors open."""
    import torch  # not at the top, since asyncdist.progress() must not import torch

    found = os.fstat(descriptor).st_size
    if found != nbytes:
        raise OSError(f"the shared memory must have {nbytes} bytes, got {found}")
    try:
        with torch.inference_mode(False):
            return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=nbytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(f"the shared memory cannot be mapped: {error}") from error
