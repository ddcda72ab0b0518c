"""Reads the variables that Slurm's srun sets for the tasks of a step, and translates them into torchrun's.

With an MPI plugin (``--mpi=pmix``, ``--mpi=pmi2``), srun describes the ranks to MPI in the plugin's own variables.
Without a plugin, the tasks are ranks of torch.distributed. SLURM_PROCID is the rank, and the first host of the step has
the store. Its port is computed from the job and step numbers, because srun does not assign a free port.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from typing import Final

from asyncdist import environment
from asyncdist.launchers.variables import Variables, number

#: Variable with the number of tasks in a step.
SIZE_VARIABLE: Final = "SLURM_STEP_NUM_TASKS"
#: Variables that identify ranks started by srun, with or without PMIx.
_SOURCES: Final = (SIZE_VARIABLE, "PMIX_RANK")
#: Lowest step number of batch and interactive shells, which are steps in Slurm, too.
_FIRST_SHELL_STEP: Final = 0xFFFFFFF0
#: Lowest port. With ``_PORT_COUNT`` ports, all are below Linux's ephemeral ports, which begin at 32768.
_FIRST_PORT: Final = 15000
_PORT_COUNT: Final = 16384
_LIST_TIMEOUT_S: Final = 10.0


def find_step(variables: Variables) -> tuple[int, int] | None:
    """Return this task's (size, rank) in its step, or None for a single task or a shell of sbatch or salloc."""
    step = variables.number("SLURM_STEP_ID") or 0
    if not (variables.has(SIZE_VARIABLE) and variables.has("SLURM_PROCID")) or step >= _FIRST_SHELL_STEP:
        return None
    size, rank = variables.place(SIZE_VARIABLE, "SLURM_PROCID")
    return None if size is None or size == 1 else (size, rank or 0)


def has_plugin(environ: Mapping[str, str]) -> bool:
    """Return whether srun describes the ranks to MPI through an MPI plugin."""
    return environ.get("SLURM_MPI_TYPE", "none") != "none"


def speaks_pmix(environ: Mapping[str, str]) -> bool:
    """Return whether srun itself provides PMIx to this task (``--mpi=pmix``)."""
    return environ.get("PMIX_NAMESPACE", "").startswith("slurm.pmix")


def is_sruns(source: str, environ: Mapping[str, str]) -> bool:
    """Return whether the variable ``source`` was set by srun and not by mpirun.

    With pmi2, srun sets the same variables as MPICH's mpirun, which may use srun to start one proxy per host.
    """
    if source != "PMI_SIZE" or any(name.startswith("HYDI_") for name in environ):
        return source in _SOURCES
    names = (("PMI_SIZE", SIZE_VARIABLE), ("PMI_RANK", "SLURM_PROCID"))
    return all(environ.get(pmi) == environ.get(slurm) for pmi, slurm in names)


def torch_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torchrun would set. Raise ValueError if rank 0 is not on the step's first host."""
    if not environ.get("MASTER_ADDR") and _is_rank_0_elsewhere(environ):
        raise ValueError(f"rank 0 must run on the host on which the ranks meet. {why_no_rank_0(environ)}")
    job, step = environ.get("SLURM_JOB_ID") or "0", environ.get("SLURM_STEP_ID") or "0"
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ[SIZE_VARIABLE],
        "MASTER_ADDR": environ.get("MASTER_ADDR") or first_host(environ.get("SLURM_STEP_NODELIST", "")) or "localhost",
        "MASTER_PORT": environ.get("MASTER_PORT") or str(port(int(job), int(step))),
        "TORCHELASTIC_RUN_ID": f"slurm {job}.{step}",
    }


def _is_rank_0_elsewhere(environ: Mapping[str, str]) -> bool:
    """Return whether this task's variables show that rank 0 is not on the step's first host."""
    node, tasks = environ.get("SLURM_NODEID"), environ.get("SLURM_GTIDS")
    if not node or not tasks:
        return bool(node) and node != "0" and environ["SLURM_PROCID"] == "0"
    return (node == "0") != ("0" in tasks.split(","))


def why_no_rank_0(environ: Mapping[str, str]) -> str:
    """Return the reason why rank 0 may not be on the rendezvous host, or "" if the user has set MASTER_ADDR."""
    if environ.get("MASTER_ADDR"):
        return ""
    nodelist = environ.get("SLURM_STEP_NODELIST", "")
    return (
        f"The ranks meet on {first_host(nodelist)}, the first host of SLURM_STEP_NODELIST={nodelist}, because "
        "MASTER_ADDR is not set; with srun --distribution=arbitrary rank 0 may run elsewhere: set MASTER_ADDR to its "
        "host"
    )


def port(job: int, step: int) -> int:
    """Return the port of a step's store. The first hundred steps of a hundred successive jobs have different ports."""
    return _FIRST_PORT + (job * 101 + step) % _PORT_COUNT


def first_host(nodelist: str) -> str:
    """Return the first host of a list in Slurm's notation, such as ``gpu03`` for ``gpu[03-05,7],login``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodelist)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0]) if first else ""


def local_size(environ: Mapping[str, str]) -> int | None:
    """Return the number of a step's tasks on this host, or None if this process does not belong to a step.

    Slurm lists the numbers for all hosts: ``2(x3),1`` means three hosts with two tasks each, then one with one task.
    """
    counts: list[int] = []
    for text in filter(None, environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(",")):
        found = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,9})\))?", text)
        if found is None:
            return None
        counts += [int(found[1])] * min(int(found[2] or 1), 100_000)
    node = number(environ, "SLURM_NODEID") if environ.get("SLURM_NODEID") else 0
    return counts[node] if node < len(counts) else None


def list_plugins() -> list[str]:
    """Return the MPI plugins listed by ``srun --mpi=list``. Return [] if srun is missing, fails or does not respond."""
    srun = environment.find_program("srun")
    if srun is None:
        return []
    try:
        ended = subprocess.run(
            [srun, "--mpi=list"], capture_output=True, text=True, timeout=_LIST_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    # srun indents the plugins' names below a headline. Before Slurm 21, it prints them on stderr.
    return sorted(set(re.findall(r"^\s+(\w+)$", ended.stdout + ended.stderr, re.MULTILINE)))
