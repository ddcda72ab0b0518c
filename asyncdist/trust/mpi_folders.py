"""Makes private folders for Open MPI's files and shared memory on this host.

By default, Open MPI uses predictable names: ``/tmp/ompi.PID``, ``/tmp/prted.PID`` and ``/dev/shm/sm_segment.*``. If
another user of the host has created such a folder or file first, Open MPI uses it, and that user can read and change
the ranks' messages (unless the kernel's ``fs.protected_regular`` prevents the latter). Each job of
``asyncdist run`` therefore gets folders of mode 0700 with a random name. They also keep apart the jobs of containers
that share ``/tmp`` or ``/dev/shm``. A rank that ``mpirun`` or ``srun`` has started uses its user's private folder in
``/dev/shm``; mpirun's own folder cannot be changed then.

The process that has made the folders of a job locks them (flock(2)) until it removes them. If it is killed, the lock
ends, and the next job of this user removes the folders, whose files would otherwise occupy memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from asyncdist.trust import private_folders

_PREFIX: Final = "asyncdist-mpi-"
#: Age in seconds from which an unlocked folder is removed; a newer one may be about to be locked.
_LEFT_S: Final = 60.0
#: Folder in memory, in which Open MPI would create the memory that ranks share.
_MEMORY: Final = "/dev/shm"
#: Settings for the folder of mpirun's files and of the files of its daemons on other hosts, by Open MPI 5's and 4's
#: names.
_OF_MPIRUN: Final = ("PRTE_MCA_prte_local_tmpdir_base", "OMPI_MCA_orte_local_tmpdir_base")
_OF_DAEMONS: Final = ("PRTE_MCA_prte_remote_tmpdir_base", "OMPI_MCA_orte_remote_tmpdir_base")
#: Settings for the folder of memory that ranks share: for messages (Open MPI 5's and 4's names) and for windows.
_OF_MEMORY: Final = tuple(
    f"OMPI_MCA_{part}_backing_directory" for part in ("btl_sm", "btl_vader", "osc_sm", "osc_rdma", "osc_ucx")
)


@dataclass(frozen=True, slots=True)
class MpiFolders:
    """Private folders on one host.

    Attributes:
        files: Folder for the files of mpirun or its daemon; "" if it could not be made.
        memory: Folder for the memory that ranks share; "" if it could not be made.
        locks: Descriptors that lock the folders, in the process that has made them.
    """

    files: str
    memory: str
    locks: tuple[int, ...] = field(default=(), compare=False)

    @staticmethod
    def make(name: str) -> MpiFolders:
        """Make this host's folders for a job, whose random name is known to no other user.

        Folders of this user's killed jobs are removed.
        """
        locks: list[int] = []
        files = ""
        with contextlib.suppress(OSError):  # no folder for temporary files is writable
            files = _made(tempfile.gettempdir(), name, locks)
        return MpiFolders(files, _made(_MEMORY, name, locks), tuple(locks))

    def remove(self) -> None:
        """Remove the folders and all files in them."""
        for folder in filter(None, (self.files, self.memory)):
            shutil.rmtree(folder, ignore_errors=True)
        for lock in self.locks:
            os.close(lock)


def _made(base: str, name: str, locks: list[int]) -> str:
    """Return the path of a new, locked folder, and append its lock to ``locks``; return "" if it cannot be made."""
    _remove_left(base)
    path = os.path.join(base, _PREFIX + name)
    with contextlib.suppress(OSError), private_folders.opened(path, makes=True) as folder:
        with contextlib.suppress(OSError):  # a network drive may not support locks
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locks.append(os.dup(folder))
        return path
    return ""


def _remove_left(base: str) -> None:
    """Remove the folders of this user's jobs whose launcher or agent was killed."""
    for path in Path(base).glob(f"{_PREFIX}*"):
        # The folder belongs to another user, or its job is running and has locked it.
        with contextlib.suppress(OSError), private_folders.opened(path) as folder:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - os.fstat(folder).st_mtime > _LEFT_S:
                shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def kept(name: str) -> Iterator[MpiFolders]:
    """Make this host's folders for a job, and remove them when the context ends."""
    folders = MpiFolders.make(name)
    try:
        yield folders
    finally:
        folders.remove()


def settings(own: MpiFolders, of_hosts: Sequence[MpiFolders] = ()) -> dict[str, str]:
    """Return the variables by which Open MPI uses the private folders.

    A setting applies to all hosts, so a folder is used only if all hosts have it.

    Args:
        own: Folders on the host of mpirun.
        of_hosts: Folders on the hosts of the ranks; empty if the ranks are on the host of mpirun.
    """
    folders = {
        _OF_MPIRUN: own.files,
        _OF_DAEMONS: _common([each.files for each in of_hosts]),
        _OF_MEMORY: _common([each.memory for each in of_hosts or (own,)]),
    }
    return {name: folder for names, folder in folders.items() if folder for name in names}


def _common(folders: Sequence[str]) -> str:
    """Return the folder that all hosts have, or an empty string."""
    return folders[0] if len(set(folders)) == 1 else ""


def without_outer(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` without settings that name the folders of another job, which has started this process."""
    names = (*_OF_MPIRUN, *_OF_DAEMONS, *_OF_MEMORY)
    return {name: text for name, text in environ.items() if name not in names or _PREFIX not in text}


def settings_of_rank(environ: Mapping[str, str], others: Sequence[str] = ()) -> dict[str, str]:
    """Return the variables by which a rank that has no such setting shares memory in its user's private folder.

    The folder is in ``/dev/shm``, or in one of the folders ``others`` if other users have taken all of its names.
    """
    if any(environ.get(name) for name in _OF_MEMORY):
        return {}
    for folder in private_folders.candidates([_MEMORY, *others]):
        with contextlib.suppress(OSError), private_folders.opened(folder, makes=True):
            return dict.fromkeys(_OF_MEMORY, str(folder))
    return {}
