"""Makes private folders for Open MPI's files and shared memory on this host.

By default, Open MPI uses predictable names: ``/tmp/ompi.PID``, ``/tmp/prted.PID`` and ``/dev/shm/sm_segment.*``.
Another user who creates such a folder or file first can read the ranks' messages, and change them unless the kernel's
``fs.protected_regular`` prevents it. Each job of ``asyncdist run`` therefore gets folders of mode 0700 with random
names. They also separate the jobs of containers that share ``/tmp`` or ``/dev/shm``. A rank that was started directly
by ``mpirun`` or ``srun`` uses its user's private folder in ``/dev/shm``. By then, however, mpirun has already created
its own folder.

If the process that makes a job's folders is killed, the next job of this user removes them
(:mod:`asyncdist.trust.private_folders`).
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from asyncdist.trust import private_folders
from asyncdist.trust.private_folders import TemporaryFolder

logger = logging.getLogger("asyncdist.launch")

_PREFIX: Final = "asyncdist-mpi-"
#: Number of characters of each folder's name. A job's token consists of the names of three folders.
_NAME_LENGTH: Final = 16
#: Folder in which Open MPI by default creates the memory that ranks share.
_MEMORY: Final = "/dev/shm"
#: Settings of Open MPI 5 and 4 that name the folder of mpirun's files.
_OF_MPIRUN: Final = ("PRTE_MCA_prte_local_tmpdir_base", "OMPI_MCA_orte_local_tmpdir_base")
#: Settings of Open MPI 5 and 4 that name the folder of files for mpirun's daemons on other hosts.
_OF_DAEMONS: Final = ("PRTE_MCA_prte_remote_tmpdir_base", "OMPI_MCA_orte_remote_tmpdir_base")
#: Settings that name the folder of ranks' shared memory: for messages (Open MPI 5 and 4), and for windows.
_OF_MEMORY: Final = tuple(
    f"OMPI_MCA_{part}_backing_directory" for part in ("btl_sm", "btl_vader", "osc_sm", "osc_rdma", "osc_ucx")
)


def draw_token() -> str:
    """Return random names for a new job's three folders: for supervisors' reports, MPI's files and shared memory."""
    return secrets.token_hex(3 * _NAME_LENGTH // 2)


@dataclass(frozen=True, slots=True)
class MpiFolders:
    """Holds a job's private folders on one host.

    Attributes:
        files: Folder for the files of mpirun or its daemon; "" if it could not be made.
        memory: Folder for memory that ranks share; "" if it could not be made.
        made: The folders, in the process that has made them.
    """

    files: str
    memory: str
    made: tuple[TemporaryFolder, ...] = field(default=(), compare=False)

    @staticmethod
    def make(token: str) -> MpiFolders:
        """Make this host's folders for a job, and remove the folders of this user's killed jobs.

        The names are different parts of the job's token, so a user who sees one folder does not learn the name of the
        other.
        """
        of_files, of_memory = token[_NAME_LENGTH : 2 * _NAME_LENGTH], token[2 * _NAME_LENGTH :]
        files = None
        with contextlib.suppress(OSError):  # raised if no folder for temporary files is writable
            files = _made(tempfile.gettempdir(), of_files)
        memory = _made(_MEMORY, of_memory)
        made = tuple(filter(None, (files, memory)))
        return MpiFolders(files.path if files else "", memory.path if memory else "", made)

    def remove(self) -> None:
        """Remove the folders and all files in them."""
        for folder in self.made:
            folder.remove()


def _made(base: str, name: str) -> TemporaryFolder | None:
    """Make and lock a folder. Return None if it cannot be made."""
    try:
        return TemporaryFolder.make(base, _PREFIX, name)
    except private_folders.NotPrivateError as error:
        logger.warning("%s; Open MPI uses a folder with a predictable name instead", error)
    except OSError:  # the base folder does not exist or is not writable
        pass
    return None


@contextlib.contextmanager
def kept(token: str) -> Iterator[MpiFolders]:
    """Make this host's folders for a job, and remove them when the context ends."""
    folders = MpiFolders.make(token)
    try:
        yield folders
    finally:
        folders.remove()


def settings(own: MpiFolders, of_hosts: Sequence[MpiFolders] = ()) -> dict[str, str]:
    """Return the environment variables that make Open MPI use the private folders.

    A setting applies to all hosts, so a folder is used only if all hosts have it.

    Args:
        own: Folders on the host of mpirun.
        of_hosts: Folders on the ranks' hosts; empty if the ranks are on the host of mpirun.
    """
    folders = {
        _OF_MPIRUN: own.files,
        _OF_DAEMONS: _common([each.files for each in of_hosts]),
        _OF_MEMORY: _common([each.memory for each in of_hosts or (own,)]),
    }
    return {name: folder for names, folder in folders.items() if folder for name in names}


def _common(folders: Sequence[str]) -> str:
    """Return the folder that all hosts have, or "" if their folders differ."""
    return folders[0] if len(set(folders)) == 1 else ""


def without_outer(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` without the folder settings of an outer job that has started this process."""
    names = (*_OF_MPIRUN, *_OF_DAEMONS, *_OF_MEMORY)
    return {name: text for name, text in environ.items() if name not in names or _PREFIX not in text}


def settings_of_rank(environ: Mapping[str, str], others: Sequence[str] = ()) -> dict[str, str]:
    """Return the environment variables that make Open MPI put a rank's shared memory in the user's private folder.

    Return {} if one of them is already set. The folder is in ``/dev/shm``, or in one of ``others`` if other users have
    taken all of its names in ``/dev/shm``.
    """
    if any(environ.get(name) for name in _OF_MEMORY):
        return {}
    for folder in private_folders.candidates([_MEMORY, *others]):
        with contextlib.suppress(OSError), private_folders.opened(folder, makes=True):
            return dict.fromkeys(_OF_MEMORY, str(folder))
    return {}
