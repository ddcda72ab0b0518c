"""Chooses the environment variables that a rank's child processes, training libraries and new jobs see.

If a training library or a child process saw a launcher's variables, it would act as if it were a rank of the job.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Final

from asyncdist import local_host
from asyncdist.environment import OF_RUN, RUN_VARIABLE, SECRET_FILE_VARIABLE, SECRET_VARIABLE
from asyncdist.launchers.backends import BACKENDS
from asyncdist.rank_program import SURVIVAL_VARIABLE

#: Variable that passes an MPI rank's pid and launcher variables to the rank's child processes.
_RANK_VARIABLE: Final = "ASYNCDIST_RANK"
#: Prefix of users' settings that also begin with the launchers' prefix PMIX_.
_MPI_SETTINGS: Final = "PMIX_MCA_"
#: Variables, in addition to torchrun's, from which a training library would conclude that it may use all ranks for one
#: training run, and prefixes of such variables.
_RANK_NAMES: Final = ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID")
_RANK_PREFIXES: Final = (
    *("OMPI_COMM_WORLD_", "PALS_", "MV2_COMM_WORLD_"),
    *("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_TASKS_PER_NODE"),
)
#: The launcher's variables that :func:`hide_ranks` has removed from the environment.
hidden: dict[str, str] = {}
#: The launcher variables that :func:`show_as_ranks` has set.
_shown: dict[str, str] = {}


def without_launchers(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` for a new job. If this process is a rank of another job, omit that job's launcher variables.

    Variables that users set for libraries are removed only if the launcher may have set them. Examples are MASTER_ADDR
    in a torch rank, and the variable of ``mpirun --with-ft`` in an MPI rank.
    """
    is_torch_rank = any(environ.get(name) for name in ("RANK", "TORCHELASTIC_RUN_ID"))
    is_mpi_rank = any(name == _RANK_VARIABLE or name.startswith("OMPI_COMM_WORLD_") for name in environ)
    own = (_RANK_VARIABLE, RUN_VARIABLE, SECRET_VARIABLE, SECRET_FILE_VARIABLE, *OF_RUN)
    outer = (*own, *((SURVIVAL_VARIABLE,) if is_mpi_rank else ()))
    backends = [backend for name, backend in BACKENDS.items() if name != "torch" or is_torch_rank]

    def is_kept(name: str) -> bool:
        return name.startswith(_MPI_SETTINGS) or (name not in outer and not any(each.sets(name) for each in backends))

    return {name: text for name, text in environ.items() if is_kept(name)}


def for_ranks(
    environ: Mapping[str, str], *, ranks: int, threads: int | None, cores: int | None = None
) -> dict[str, str]:
    """Return the environment of a new job's ``ranks`` ranks on one host, without an outer launcher's variables.

    OMP_NUM_THREADS is ``threads`` if given, otherwise the user's value, otherwise ``cores`` divided among the ranks.
    """
    share = max(1, (cores or local_host.available_cores()) // ranks)
    chosen = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    return {"OMP_NUM_THREADS": str(share), **without_launchers(environ), **chosen}


def hide_secret() -> None:
    """Remove the job's secret from this process's environment, so that no child inherits it and no log shows it."""
    if SECRET_VARIABLE in os.environ:
        hidden[SECRET_VARIABLE] = os.environ.pop(SECRET_VARIABLE)


def hide_ranks() -> None:
    """Remove the variables that would make training libraries use all ranks. :func:`ranks_shown` restores them.

    Variables that :func:`show_as_ranks` has set remain.
    """
    if _shown:
        return
    is_torch_rank = any(os.environ.get(name) for name in ("RANK", "TORCHELASTIC_RUN_ID"))
    for name in list(os.environ):
        is_rank = name in _RANK_NAMES or name.startswith(_RANK_PREFIXES)
        if is_rank or (is_torch_rank and BACKENDS["torch"].sets(name)):
            hidden[name] = os.environ.pop(name)


@contextlib.contextmanager
def ranks_shown() -> Iterator[None]:
    """Restore the launcher's hidden variables, but not the secret, during the ``with`` block."""
    shown = {name: text for name, text in hidden.items() if name not in (*os.environ, SECRET_VARIABLE)}
    os.environ.update(shown)
    try:
        yield
    finally:
        for name in shown:
            os.environ.pop(name, None)


def show_as_ranks(variables: Mapping[str, str]) -> None:
    """Set launcher variables for a training library, instead of the variables that :func:`hide_ranks` has removed."""
    _shown.update(variables)
    os.environ.update(variables)


def become_rank() -> None:
    """Hide the environment variables that would make MPI mistake child processes for this rank.

    ``os.environ`` keeps them for libraries in this process, but children do not inherit them. A data loader worker that
    imports mpi4py.MPI, which initializes MPI, is then a world of one rank.
    """
    os.environ[_RANK_VARIABLE] = f"{os.getpid()} {' '.join(_place(os.environ))}"
    for name in os.environ:
        if BACKENDS["mpi"].sets(name) and not name.startswith(_MPI_SETTINGS):
            os.unsetenv(name)


def rank_above(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the pid of the MPI rank that is an ancestor of this process, or None."""
    pid, *place = environ.get(_RANK_VARIABLE, "").split(" ")
    return int(pid) if pid.isdecimal() and int(pid) != os.getpid() and _place(environ) <= set(place) else None


def _place(environ: Mapping[str, str]) -> set[str]:
    """Return the variables that identify an MPI rank among the ranks of nested jobs, each as ``NAME=VALUE``."""
    names = ("PMIX_NAMESPACE", "PMIX_RANK", "PMI_FD", "PMI_SIZE", "PMI_RANK", "SLURM_STEP_ID", "SLURM_PROCID")
    return {f"{name}={environ[name]}" for name in names if environ.get(name)}
