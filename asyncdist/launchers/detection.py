"""Detects which launcher started this process, and reads the process's rank on its host.

:func:`detect` chooses the transport for ``transport="auto"``.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
from collections.abc import Mapping, Sequence
from typing import Final

from asyncdist import local_host, validation
from asyncdist.environment import TRANSPORT_VARIABLE
from asyncdist.launchers import child_environment, slurm
from asyncdist.launchers.backends import BACKENDS, RUN_NAMES, RankVariables
from asyncdist.launchers.variables import NO_LAUNCHER, TORCH_NAMES, Launch, Variables, number

#: Source of a :class:`Launch` if the program itself has created a process group.
GROUP_SOURCE: Final = "torch.distributed.init_process_group"
#: Variables with which launchers describe a rank. torchrun's are first, because mpirun may start one torchrun per host.
_RANK_VARIABLES: Final = [
    each for name in sorted(BACKENDS, key=lambda name: name != "torch") for each in BACKENDS[name].variables
]


def check_transport(name: str, *, what: str = "transport", allowed: Sequence[str] = ("auto", *BACKENDS)) -> None:
    """Raise ValueError unless ``name`` is an allowed transport. It is the value of the option or variable ``what``."""
    if name in allowed:
        return
    hint = ""
    if str(name).startswith("torch:"):
        hint = ". The transport 'torch' always sends over gloo; the program's own groups may use any backend"
    raise ValueError(f"{what} must be {validation.one_of(allowed)}, got {name!r}{hint}")


def choose_transport(named: str | None, environ: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Return the transport of the ranks that ``asyncdist run`` starts, and these ranks' environment variables.

    ``named``, the value of ``--transport``, overrides ASYNCDIST_TRANSPORT. The ranks' environment lacks
    ASYNCDIST_TRANSPORT, because ranks detect their launcher by its variables. Raises ValueError if ``asyncdist run``
    does not support the transport.
    """
    what, name = "--transport", named
    if name is None:
        what, name = TRANSPORT_VARIABLE, environ.get(TRANSPORT_VARIABLE) or "auto"
        name = "mpi" if name == "auto" else name
    check_transport(name, what=what, allowed=RUN_NAMES)
    return name, {variable: text for variable, text in environ.items() if variable != TRANSPORT_VARIABLE}


def detect(
    environ: Mapping[str, str] = os.environ, *, wanted: str = "auto", group: tuple[int, int] | None = None
) -> Launch:
    """Detect from the environment which launcher started this process.

    The innermost launcher wins. For example, srun or mpirun often starts one torchrun per host, and mpirun inside a
    Slurm allocation passes Slurm's variables on. A user who sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT inside
    an srun step wants torch.distributed.

    Args:
        wanted: Requested transport, or ``"auto"`` to use ASYNCDIST_TRANSPORT if set. Variables of launchers for other
            transports are ignored.
        group: This process's rank in the process group that the program has created, and the group's size; None without
            a group. Used if no launcher's variables are set.

    Raises:
        ValueError: Variables are not numbers, are missing, or contradict each other. The error names all of them.
    """
    if wanted == "auto":
        wanted = environ.get(TRANSPORT_VARIABLE) or "auto"
        check_transport(wanted, what=TRANSPORT_VARIABLE)
    else:
        check_transport(wanted)
    variables = Variables(environ)
    if wanted == "local":
        return Launch("local", 1, 0, NO_LAUNCHER)
    if wanted == "auto":
        launch = _detect_any(variables, group)
    else:
        found = described_launch(wanted, variables)
        if wanted == "mpi" and found is None:
            found = _detect_slurm(variables)
        if wanted == "torch" and not all(map(variables.has, TORCH_NAMES)):
            step = slurm.find_step(Variables(environ))
            found = found if step is None else Launch("torch", *step, slurm.SIZE_VARIABLE)
        launch = found or Launch(wanted, None, 0, NO_LAUNCHER)
    variables.check()
    return launch


def _detect_any(variables: Variables, group: tuple[int, int] | None) -> Launch:
    if variables.has("TORCHELASTIC_RUN_ID"):
        variables.require(TORCH_NAMES, because="TORCHELASTIC_RUN_ID")
        found = described_launch("torch", variables)
        found = found and dataclasses.replace(found, source="TORCHELASTIC_RUN_ID")
    else:
        names = [name for name in BACKENDS if name != "torch" or all(map(variables.has, TORCH_NAMES))]
        described = filter(None, (described_launch(name, variables) for name in names))
        found = next(described, None) or _detect_slurm(variables)
        if found is not None and found.source == slurm.SIZE_VARIABLE and not slurm.has_plugin(variables.values):
            found = dataclasses.replace(found, transport="torch")  # srun does not describe the ranks to MPI
        if found is None and group is not None and group[1] > 1:
            return Launch("torch", group[1], group[0], GROUP_SOURCE)
        if found is None and (variables.has("RANK") or variables.has("WORLD_SIZE")):
            variables.require(TORCH_NAMES, because="RANK" if variables.has("RANK") else "WORLD_SIZE")
        elif found is None:
            _refuse_unconnected_tasks(variables)
    return found or Launch("local", 1, 0, NO_LAUNCHER)


def _refuse_unconnected_tasks(variables: Variables) -> None:
    """Record a problem if this is one of several tasks of submitit's local executor, which does not connect them."""
    if variables.has("SUBMITIT_LOCAL_GLOBALID") and (variables.number("SUBMITIT_LOCAL_NTASKS") or 1) > 1:
        variables.problems.append(
            f"SUBMITIT_LOCAL_NTASKS={variables.values['SUBMITIT_LOCAL_NTASKS']}, but submitit's local executor does "
            "not connect its tasks: call submitit.helpers.TorchDistributedEnvironment().export() in each task, before "
            f"asyncdist opens a world, or set {TRANSPORT_VARIABLE}=local to train separately in each task"
        )


def described_launch(transport: str, variables: Variables) -> Launch | None:
    """Describe this process's launch by the variables of a transport's launchers. Return None if none are set."""
    found = [
        launch
        for names in BACKENDS[transport].variables
        if (launch := _read_launch(transport, variables, names)) is not None
    ]
    for other in found[1:]:
        first = found[0]
        if (other.expected_size, other.rank) != (first.expected_size, first.rank):
            variables.problems.append(
                f"the variables of two launchers disagree: {first.source}={first.expected_size} (rank {first.rank}), "
                f"{other.source}={other.expected_size} (rank {other.rank}); unset the variables of one launcher"
            )
    port = variables.number("MASTER_PORT") if transport == "torch" else None
    if port is not None and not 0 < port < 65536:
        variables.problems.append(f"MASTER_PORT must be from 1 to 65535, got {port}")
    return found[0] if found else None


def _read_launch(transport: str, variables: Variables, names: RankVariables) -> Launch | None:
    """Describe this process's launch by one launcher's variables for size and rank. Return None if neither is set."""
    if not (variables.has(names.size) or variables.has(names.rank)):
        return None
    size, rank = variables.place(names.size, names.rank)
    local_size, _ = variables.place(names.local_size, names.local_rank, alone=True)
    if size is not None and local_size is not None and local_size > size:
        variables.problems.append(f"{names.local_size}={local_size} must be at most {names.size}={size}")
    return Launch(transport, size, rank or 0, names.size)


def _detect_slurm(variables: Variables) -> Launch | None:
    """Describe a launch on MPI by PMIX_RANK or by a Slurm step with several tasks. Return None if there is neither."""
    step = slurm.find_step(variables)
    rank = variables.number("PMIX_RANK")
    if rank is not None:
        return Launch("mpi", step[0] if step is not None and step[1] == rank else None, rank, "PMIX_RANK")
    return None if step is None else Launch("mpi", *step, slurm.SIZE_VARIABLE)


def check_alone(environ: Mapping[str, str] = os.environ) -> None:
    """Raise TransportError if another launcher's variables show several ranks. Called if MPI has only this rank."""
    variables = Variables(environ)
    found = _detect_any(variables, None)
    size = found.expected_size or 1
    if variables.problems or found.transport == "mpi" or size == 1:
        return
    from asyncdist.errors import TransportError  # not at the top of the module, to keep its imports minimal

    name = f"{TRANSPORT_VARIABLE}={environ[TRANSPORT_VARIABLE]}" if environ.get(TRANSPORT_VARIABLE) else "the program"
    raise TransportError(
        f"{name} asks for MPI, but MPI knows only this process, although {found.source} says that it is one of {size} "
        f"ranks: start them with asyncdist run -n {size} script.py (or mpirun), use transport={found.transport!r}, or "
        "use transport='local' for a single rank",
        expected=size,
        actual=1,
    )


def names_lost_ranks(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this rank's launcher reports killed ranks to the user. Slurm and Kubernetes do not."""
    name = "TORCHELASTIC_RUN_ID"
    return bool(environ.get(name)) or name in child_environment.hidden or multiprocessing.parent_process() is not None


def local_rank(environ: Mapping[str, str] | None = None) -> int | None:
    """Return this process's rank on its host, or None if the launcher does not set it."""
    environ = {**os.environ, **child_environment.hidden} if environ is None else environ
    for name in (*(each.local_rank for each in _RANK_VARIABLES), "SLURM_LOCALID"):
        if environ.get(name, "").isdecimal():
            return int(environ[name])
    return None


def local_size(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of ranks on this host, or None if the launcher does not set it."""
    name = next((each.local_size for each in _RANK_VARIABLES if environ.get(each.local_size)), None)
    return slurm.local_size(environ) if name is None else number(environ, name)


def threads_per_rank(environ: Mapping[str, str] = os.environ, cores: int | None = None) -> int | None:
    """Return the number of threads for one rank: this host's cores divided by its number of ranks.

    By default, only the cores that this process may use are counted. Return None (no limit) if OMP_NUM_THREADS is set,
    or if no other rank is known to be on the host.
    """
    if environ.get("OMP_NUM_THREADS"):
        return None
    ranks = local_size(environ)
    return max(1, (cores or local_host.available_cores()) // ranks) if ranks is not None and ranks > 1 else None


def is_slurm_job(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process belongs to a Slurm job."""
    return bool(environ.get("SLURM_JOB_ID"))


def is_started_by_trainer() -> bool:
    """Return whether a trainer has started this process. Lightning starts one for each device except the first."""
    own = any(os.environ.get(name) or name in child_environment.hidden for name in ("RANK", "TORCHELASTIC_RUN_ID"))
    return os.environ.get("LOCAL_RANK", "0") != "0" and not own and not any(map(BACKENDS["mpi"].sets, os.environ))


def is_started_by_accelerate() -> bool:
    """Return whether ``accelerate launch`` has started this process. It sets no rank variables for a single process."""
    return "ACCELERATE_DYNAMO_BACKEND" in os.environ
