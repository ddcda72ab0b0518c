"""Lists the transports, with each transport's launchers and options of ``asyncdist run``.

Three dictionaries, keyed by the transport's name, contain the functions that open a transport (``OPENERS`` of
:mod:`asyncdist.transports.select`), start its ranks (``RUNNERS`` of :mod:`asyncdist.launch.run_command`) and check its
rendezvous (``RENDEZVOUS`` of :mod:`asyncdist.launch.doctor`). An open transport lists its capabilities
(:mod:`asyncdist.transports.base`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple


class RankVariables(NamedTuple):
    """Names the environment variables by which a launcher describes a rank; "" for a variable that it does not set."""

    size: str
    rank: str
    local_size: str = ""
    local_rank: str = ""


@dataclass(frozen=True, slots=True)
class Backend:
    """Describes how a transport's launchers and ``asyncdist run`` start ranks.

    Attributes:
        variables: Names of the variables that describe a rank, for each kind of launcher.
        launchers: Launchers, keyed by the variable that identifies them (``Launch.source``).
        names: Names of the variables that the launchers set for a rank and that a new job must not inherit.
        prefixes: Prefixes of other variables of this kind. Users' own variables must not begin with them.
        is_run: Whether ``asyncdist run`` starts ranks on this transport.
        run_options: Options of ``asyncdist run`` that only some transports support, including this one.
    """

    variables: Sequence[RankVariables] = ()
    launchers: Mapping[str, str] = field(default_factory=dict)
    names: Sequence[str] = ()
    prefixes: Sequence[str] = ()
    is_run: bool = True
    run_options: Sequence[str] = ()

    def sets(self, name: str) -> bool:
        """Return whether one of the launchers may have set the variable ``name`` for a rank."""
        return name in self.names or name.startswith(tuple(self.prefixes))


#: The transports, by name. If several launchers' variables are set, the transport listed first is used.
BACKENDS: Final[Mapping[str, Backend]] = {
    "local": Backend(is_run=False),
    "mpi": Backend(
        variables=(
            RankVariables(
                "OMPI_COMM_WORLD_SIZE",
                "OMPI_COMM_WORLD_RANK",
                "OMPI_COMM_WORLD_LOCAL_SIZE",
                "OMPI_COMM_WORLD_LOCAL_RANK",
            ),
            RankVariables("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
        ),
        launchers={
            "OMPI_COMM_WORLD_SIZE": "Open MPI's mpirun",
            "PMI_SIZE": "an MPI launcher with PMI (MPICH's, Intel's, srun)",
            "PMIX_RANK": "a launcher with PMIx",
            "SLURM_STEP_NUM_TASKS": "srun",
        },
        names=("MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
        prefixes=("OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "OMPI_WORLD_", "PMIX_", "PMI_", "HYDI_"),
        run_options=("hosts", "mpi", "survive"),
    ),
    "torch": Backend(
        variables=(RankVariables("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK"),),
        launchers={
            "TORCHELASTIC_RUN_ID": "torchrun, or asyncdist run --transport torch",
            "WORLD_SIZE": "the program that set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
        },
        names=(
            *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
            *("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        ),
        prefixes=("TORCHELASTIC_",),
        run_options=("hosts", "restarts", "places", "join"),
    ),
}
#: Names of the transports on which ``asyncdist run`` starts ranks.
RUN_NAMES: Final = tuple(name for name, backend in BACKENDS.items() if backend.is_run)
