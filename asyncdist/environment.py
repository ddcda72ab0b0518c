"""Reads and sets environment variables: detects the launcher of this process, and sets variables for ranks.

:func:`detect` chooses the transport for ``transport="auto"``. Apart from modules that run before this one is imported,
such as :mod:`asyncdist.rank_program`, no other module reads environment variables. This module does not import torch,
so that ranks start fast.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import pwd
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal

from asyncdist import local_host, validation
from asyncdist.launchers import slurm
from asyncdist.launchers.backends import BACKENDS, RUN_NAMES, RankVariables
from asyncdist.launchers.variables import (
    NO_LAUNCHER as NO_LAUNCHER,
    TORCH_NAMES,
    Launch as Launch,
    TorchRendezvous as TorchRendezvous,
    Variables,
    number,
)
from asyncdist.rank_program import SURVIVAL_VARIABLE
from asyncdist.trust import job_secret, secret_files
from asyncdist.trust.job_secret import JobSecret

Flavour = Literal["openmpi", "mpich"]
FLAVOURS: Final[tuple[Flavour, ...]] = ("openmpi", "mpich")

#: Environment variables of this process.
VARIABLES: Final[Mapping[str, str]] = os.environ
#: Variable that selects the transport of programs with ``transport="auto"``.
TRANSPORT_VARIABLE: Final = "ASYNCDIST_TRANSPORT"
#: Source of a :class:`Launch` if the program itself has created a process group.
GROUP_SOURCE: Final = "torch.distributed.init_process_group"
#: Prefixes of variables that MPI's launchers set for their ranks, except users' settings like OMPI_MCA_*.
_MPI_PREFIXES: Final = tuple(BACKENDS["mpi"].prefixes)
#: Prefix of users' settings that also begin with the launchers' prefix PMIX_.
_MPI_SETTINGS: Final = "PMIX_MCA_"
#: Variables of all kinds of launchers. torchrun's come first, because other launchers start one torchrun per host.
_RANK_VARIABLES: Final = [
    each for name in sorted(BACKENDS, key=lambda name: name != "torch") for each in BACKENDS[name].variables
]
#: Variable that selects the torch.distributed backend for new process groups, if the program does not.
_BACKEND_VARIABLE: Final = "ASYNCDIST_BACKEND"
#: Variable with the seconds that main may wait before a warning is logged. The program's ``stall_s`` overrides it.
STALL_VARIABLE: Final = "ASYNCDIST_STALL_S"
RECORD_VARIABLE: Final = "ASYNCDIST_RECORD"
#: Variable with the destinations to which ranks export their counters.
METRICS_VARIABLE: Final = "ASYNCDIST_METRICS"
#: Variable with the folder to which ranks write their last counters; ``asyncdist run --live`` sets it.
LAST_COUNTERS_VARIABLE: Final = "ASYNCDIST_LAST_COUNTERS"
#: Variable with the number of restarts of this rank, in jobs whose launcher restarts ranks.
INCARNATION_VARIABLE: Final = "ASYNCDIST_INCARNATION"
#: Variable with the number of ranks (the highest ones) that may join the job after its start.
EMPTY_VARIABLE: Final = "ASYNCDIST_EMPTY_PLACES"
#: Variable with the secret by which a job's ranks authenticate each other.
SECRET_VARIABLE: Final = "ASYNCDIST_JOB_SECRET"
#: Variable with the path of the secret's file.
SECRET_FILE_VARIABLE: Final = "ASYNCDIST_JOB_SECRET_FILE"
#: Variable that is 1 if all ranks of the job are on one host, and 0 if ranks on other hosts may join.
LOOPBACK_VARIABLE: Final = "ASYNCDIST_LOOPBACK"
#: Variable with the name of the job to which the variables of :data:`_OF_RUN` apply. A rank's child processes inherit
#: these variables, but may be ranks of another job.
RUN_VARIABLE: Final = "ASYNCDIST_RUN_ID"
_OF_RUN: Final = (INCARNATION_VARIABLE, EMPTY_VARIABLE, LOOPBACK_VARIABLE)
#: Variable that passes an MPI rank's pid and launcher variables to the rank's child processes.
_RANK_VARIABLE: Final = "ASYNCDIST_RANK"


# --------------------------------------------------------------------------------------------------------- detection


def check_transport(name: str, *, what: str = "transport", allowed: Sequence[str] = ("auto", *BACKENDS)) -> None:
    """Raise ValueError unless ``name``, the value of the option or variable ``what``, is an allowed transport."""
    if name in allowed:
        return
    hint = ""
    if str(name).startswith("torch:"):
        hint = ". The transport 'torch' always sends over gloo; the program's own groups may use any backend"
    raise ValueError(f"{what} must be {validation.one_of(allowed)}, got {name!r}{hint}")


def choose_transport(named: str | None, environ: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Return the transport for which ``asyncdist run`` starts ranks, and the ranks' environment.

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
        group: Rank and size in the process group that the program has created, if any. Used if no launcher's variables
            are set.

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
        found = _detect(wanted, variables)
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
        found = _detect("torch", variables)
        found = found and dataclasses.replace(found, source="TORCHELASTIC_RUN_ID")
    else:
        names = [name for name in BACKENDS if name != "torch" or all(map(variables.has, TORCH_NAMES))]
        found = next(filter(None, (_detect(name, variables) for name in names)), None) or _detect_slurm(variables)
        if found is not None and found.source == slurm.SIZE_VARIABLE and not slurm.has_plugin(variables.values):
            found = dataclasses.replace(found, transport="torch")  # srun does not describe the ranks to MPI
        if found is None and group is not None and group[1] > 1:
            return Launch("torch", group[1], group[0], GROUP_SOURCE)
        if found is None and (variables.has("RANK") or variables.has("WORLD_SIZE")):
            variables.require(TORCH_NAMES, because="RANK" if variables.has("RANK") else "WORLD_SIZE")
    return found or Launch("local", 1, 0, NO_LAUNCHER)


def _detect(transport: str, variables: Variables) -> Launch | None:
    """Return the launch that the variables of this transport's launchers describe, or None if they are not set."""
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
    """Return the launch that one launcher's size and rank describe, or None if neither is set. Record problems."""
    if not (variables.has(names.size) or variables.has(names.rank)):
        return None
    size, rank = variables.place(names.size, names.rank)
    local_size, _ = variables.place(names.local_size, names.local_rank, alone=True)
    if size is not None and local_size is not None and local_size > size:
        variables.problems.append(f"{names.local_size}={local_size} must be at most {names.size}={size}")
    return Launch(transport, size, rank or 0, names.size)


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


def torch_rendezvous(environ: Mapping[str, str] = os.environ) -> TorchRendezvous:
    """Return the rendezvous described by the variables of torchrun or srun.

    Raise ValueError if variables are missing, are not numbers or contradict each other. The error names all of them.
    Also raise ValueError if MASTER_ADDR cannot be resolved, or rank 0 of a Slurm step is not on that host.
    """
    why_missing, own = "", environ
    missing = [name for name in TORCH_NAMES if not environ.get(name)]
    if missing and slurm.find_step(variables := Variables(environ)) is not None:
        variables.check()
        why_missing = slurm.why_no_rank_0(environ)
        environ, missing = {**environ, **slurm.torch_variables(environ)}, []
    if missing:
        raise ValueError(
            f"the torch transport needs the variables {', '.join(TORCH_NAMES)}; not set: {', '.join(missing)}. Start "
            "with torchrun, or call torch.distributed.init_process_group first"
        )
    variables = Variables(environ)
    launch, port = _detect("torch", variables), variables.number("MASTER_PORT")
    variables.check()
    assert launch is not None and launch.expected_size is not None and port is not None
    if launch.expected_size > 1:
        local_host.check_address("MASTER_ADDR", environ["MASTER_ADDR"])
    run_id = environ.get("TORCHELASTIC_RUN_ID", "")
    if environ.get(RUN_VARIABLE, run_id) != run_id:  # a rank of another job has started this job
        environ = {name: text for name, text in environ.items() if name not in _OF_RUN}
        variables = Variables(environ)
    is_served = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # the same comparison as in torch.distributed
    is_loopback = environ.get(LOOPBACK_VARIABLE) != "0" and local_host.is_loopback(environ["MASTER_ADDR"])
    return TorchRendezvous(
        launch.rank,
        launch.expected_size,
        environ["MASTER_ADDR"],
        port,
        is_served,
        incarnation=variables.number(INCARNATION_VARIABLE) or 0,
        admits_restarted=is_served and bool(environ.get(INCARNATION_VARIABLE)),
        job=run_id,
        empty_count=variables.number(EMPTY_VARIABLE) or 0,
        why_missing=why_missing,
        secret=_secret_of_job(own, environ["MASTER_ADDR"], port, launch.expected_size),
        is_loopback=is_loopback,
    )


def names_lost_ranks(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this rank's launcher reports killed ranks to the user, unlike Slurm and Kubernetes."""
    name = "TORCHELASTIC_RUN_ID"
    return bool(environ.get(name)) or name in _hidden or multiprocessing.parent_process() is not None


def _detect_slurm(variables: Variables) -> Launch | None:
    """Return the launch, on MPI, that a Slurm step with several tasks describes, or None."""
    step = slurm.find_step(variables)
    rank = variables.number("PMIX_RANK")
    if rank is not None:
        return Launch("mpi", step[0] if step is not None and step[1] == rank else None, rank, "PMIX_RANK")
    return None if step is None else Launch("mpi", *step, slurm.SIZE_VARIABLE)


def local_rank(environ: Mapping[str, str] | None = None) -> int | None:
    """Return this process's rank on its host, or None if the launcher does not set it."""
    environ = {**os.environ, **_hidden} if environ is None else environ
    for name in (*(each.local_rank for each in _RANK_VARIABLES), "SLURM_LOCALID"):
        if environ.get(name, "").isdecimal():
            return int(environ[name])
    return None


def threads_per_rank(environ: Mapping[str, str] = os.environ, cores: int | None = None) -> int | None:
    """Return one rank's share of this host's cores, by default of the cores that this process may use.

    Return None, for no limit, if OMP_NUM_THREADS is set, or if no other rank is known to be on the host.
    """
    if environ.get("OMP_NUM_THREADS"):
        return None
    ranks = local_size(environ)
    return max(1, (cores or local_host.available_cores()) // ranks) if ranks is not None and ranks > 1 else None


def record(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the folder in which the user wants to record this job, or None."""
    return environ.get(RECORD_VARIABLE) or None


def metrics(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the destinations to which the user wants to export this job's counters, or None."""
    return environ.get(METRICS_VARIABLE) or None


def last_counters(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the folder to which this job's ranks write their last counters, or None."""
    return environ.get(LAST_COUNTERS_VARIABLE) or None


def shared_directories(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the folders in which this user's processes on this host find each other, in order of preference.

    Folders that do not depend on variables are first. TMPDIR and XDG_RUNTIME_DIR may differ between a job's ranks,
    because schedulers set a TMPDIR for each rank, and ``su`` keeps its caller's variables.
    """
    session, named = f"/run/user/{os.getuid()}", environ.get("XDG_RUNTIME_DIR", "")
    usable = [path for path in (session, named) if os.path.isdir(path) and os.access(path, os.W_OK)]
    own = [path for path in usable if path == session]
    return list(dict.fromkeys([*own, "/tmp", *usable, environ.get("TMPDIR") or "/tmp"]))


def secret_directories(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the folders in which this user's processes on this host find secrets, in order of preference.

    The last folder is the user's home directory, because another user can occupy all file names in a shared folder.
    Unlike the folders of :func:`shared_directories`, the home directory may be shared with other hosts.
    """
    own = home(environ)
    return [*shared_directories(environ), *([own] if os.path.isabs(own) else [])]


def program_directories(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the absolute directories in PATH.

    asyncdist must not run programs from relative directories such as ``.``, to which other users may be able to write.
    """
    return list(filter(os.path.isabs, environ.get("PATH", os.defpath).split(os.pathsep)))


def find_program(name: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the path of a program in the absolute directories of PATH, or None."""
    return shutil.which(name, path=os.pathsep.join(program_directories(environ)))


def home(environ: Mapping[str, str] = os.environ) -> str:
    """Return this user's home directory, or "" if neither HOME nor the system's user database specifies one."""
    if not environ.get("HOME"):
        with contextlib.suppress(KeyError):  # raised if the user is not in the database, as in containers
            return pwd.getpwuid(os.getuid()).pw_dir
    return environ.get("HOME", "")


def hide_secret() -> None:
    """Remove the job's secret from this process's environment, so that no child inherits it and no log shows it."""
    if SECRET_VARIABLE in os.environ:
        _hidden[SECRET_VARIABLE] = os.environ.pop(SECRET_VARIABLE)


def given_secret(environ: Mapping[str, str] | None = None) -> str | None:
    """Hide and return the secret that the user has set for this job, or None. Raise ValueError if it is unusable."""
    known = environ
    if known is None:
        hide_secret()
        known = {**os.environ, **_hidden}
    if known.get(SECRET_VARIABLE):
        return job_secret.check(known[SECRET_VARIABLE], SECRET_VARIABLE)
    path = known.get(SECRET_FILE_VARIABLE)
    return secret_files.read(path) if path else None


def _secret_of_job(environ: Mapping[str, str], address: str, port: int, size: int) -> JobSecret:
    """Return the secret of a job whose ranks meet at ``address`` and ``port``.

    For a job on one host, the default is derived from the secret that the user's processes share.
    """
    text = given_secret(None if environ is os.environ else environ)
    is_on_one_host = local_host.is_loopback(address) or local_size(environ) == size
    if text is None and is_on_one_host and size > 1:
        text = secret_files.shared(secret_directories(environ))
    return JobSecret((text or "").encode()).at_port(port)


def secret_of_group(address: str, port: int, size: int, environ: Mapping[str, str] = os.environ) -> JobSecret:
    """Return the secret of a job whose program has created its process group.

    The store is at ``address`` and ``port``, which are "" and 0 for a store without a port.
    """
    return _secret_of_job(environ, address, port, size)


def is_slurm_job(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process belongs to a Slurm job."""
    return bool(environ.get("SLURM_JOB_ID"))


def stall_s(environ: Mapping[str, str] = os.environ) -> float | None:
    """Return the value of ASYNCDIST_STALL_S, or None if it is not set. Raise ValueError if it is invalid."""
    text = environ.get(STALL_VARIABLE)
    return seconds(text, STALL_VARIABLE) if text else None


def seconds(text: str, name: str) -> float:
    """Parse a number of seconds above 0, which may be infinite. Raise ValueError, which names ``name``, if invalid."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not number > 0:
        raise ValueError(f"{name} must be > 0 seconds, or inf for never, got {text!r}")
    return number


def local_size(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of ranks on this host, or None if the launcher does not set it."""
    name = next((each.local_size for each in _RANK_VARIABLES if environ.get(each.local_size)), None)
    return slurm.local_size(environ) if name is None else number(environ, name)


# ------------------------------------------------------------------------------------------------------------- a rank


def environment() -> dict[str, str]:
    """Return a copy of this process's environment."""
    return dict(os.environ)


def replace(environ: Mapping[str, str]) -> None:
    """Replace the environment of this process."""
    for name in os.environ.keys() - environ.keys():
        del os.environ[name]
    os.environ.update(environ)


HASH_SEED_VARIABLE: Final = "PYTHONHASHSEED"
#: Variable that removes the script's folder and the working directory from Python's module search path.
SAFE_PATH_VARIABLE: Final = "PYTHONSAFEPATH"
#: Hash seed when the interpreter started. Setting the variable later, as torchgfn's set_seed does, has no effect.
_HASH_SEED_AT_START: Final = os.environ.get(HASH_SEED_VARIABLE, "")


def hash_seed() -> str | None:
    """Return the hash seed, which determines the order of sets of strings, or None if Python chose it at random."""
    is_number = _HASH_SEED_AT_START.isdecimal()
    return _HASH_SEED_AT_START if is_number and not sys.flags.ignore_environment else None


def fix_hash_seed() -> None:
    """Restart this process with hash seed 0 if Python chose its seed at random."""
    if hash_seed() is None and not sys.flags.ignore_environment:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, HASH_SEED_VARIABLE: "0"})


def has_safe_path() -> bool:
    """Return whether Python searches neither the script's folder nor the working directory for modules."""
    return bool(os.environ.get(SAFE_PATH_VARIABLE))


@contextlib.contextmanager
def variable_set(name: str, text: str) -> Iterator[None]:
    """Set a variable for processes that are started in the ``with`` block."""
    before = os.environ.get(name)
    os.environ[name] = text
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def without_launchers(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` for a new job, without the launcher's variables if this process is a rank of another job.

    Variables that users set for libraries are removed only if the launcher may have set them. Examples are MASTER_ADDR
    in a torch rank, and the variable of ``mpirun --with-ft`` in an MPI rank.
    """
    is_torch_rank = any(environ.get(name) for name in ("RANK", "TORCHELASTIC_RUN_ID"))
    is_mpi_rank = any(name.startswith((_RANK_VARIABLE, "OMPI_COMM_WORLD_")) for name in environ)
    own = (_RANK_VARIABLE, RUN_VARIABLE, SECRET_VARIABLE, *_OF_RUN)
    backends = [backend for name, backend in BACKENDS.items() if name != "torch" or is_torch_rank]
    of_launchers = [prefix for backend in backends for prefix in backend.prefixes]
    outer = (*own, *of_launchers, *((SURVIVAL_VARIABLE,) if is_mpi_rank else ()))
    return {
        name: text for name, text in environ.items() if not name.startswith(outer) or name.startswith(_MPI_SETTINGS)
    }


def for_ranks(
    environ: Mapping[str, str], *, ranks: int, threads: int | None, cores: int | None = None
) -> dict[str, str]:
    """Return the variables that ``ranks`` ranks of a new job on one host share, without an outer launcher's variables.

    OMP_NUM_THREADS is ``threads`` if not None, else the user's value, else a rank's share of the host's ``cores``.
    """
    share = max(1, (cores or local_host.available_cores()) // ranks)
    chosen = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    return {"OMP_NUM_THREADS": str(share), **without_launchers(environ), **chosen}


#: Prefixes of variables from which a training library would conclude that it may use all ranks for one training.
_RANKS_OF_LAUNCHERS: Final = (
    *("OMPI_COMM_WORLD_", "PMI_SIZE", "PMI_RANK", "MPI_LOCAL", "PALS_", "MV2_COMM_WORLD_"),
    *("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_TASKS_PER_NODE"),
)
_RANKS_OF_TORCH: Final = (*TORCH_NAMES, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_", "ROLE_", "TORCHELASTIC_")
#: The launcher's variables that :func:`hide_ranks` has removed from the environment.
_hidden: dict[str, str] = {}


def hide_ranks() -> None:
    """Remove the variables that would make a training library use all ranks. :func:`ranks_shown` restores them."""
    is_torch_rank = any(os.environ.get(name) for name in ("RANK", "TORCHELASTIC_RUN_ID"))
    names = _RANKS_OF_LAUNCHERS + (_RANKS_OF_TORCH if is_torch_rank else ())
    for name in [name for name in os.environ if name.startswith(names)]:
        _hidden[name] = os.environ.pop(name)


@contextlib.contextmanager
def ranks_shown() -> Iterator[None]:
    """Restore the launcher's hidden variables, but not the secret, during the ``with`` block."""
    shown = {name: text for name, text in _hidden.items() if name not in (*os.environ, SECRET_VARIABLE)}
    os.environ.update(shown)
    try:
        yield
    finally:
        for name in shown:
            os.environ.pop(name, None)


def show_as_ranks(variables: Mapping[str, str]) -> None:
    """Set launcher variables for a training library, instead of the hidden ones."""
    os.environ.update(variables)


def is_started_by_trainer() -> bool:
    """Return whether a trainer has started this process, as Lightning does for each device except the first."""
    own = any(os.environ.get(name) or name in _hidden for name in ("RANK", "TORCHELASTIC_RUN_ID"))
    return (
        os.environ.get("LOCAL_RANK", "0") != "0"
        and not own
        and not any(n.startswith(_MPI_PREFIXES) for n in os.environ)
    )


def is_started_by_accelerate() -> bool:
    """Return whether ``accelerate launch`` has started this process. For one process, it sets no rank variables."""
    return "ACCELERATE_DYNAMO_BACKEND" in os.environ


def become_rank() -> None:
    """Hide the variables that would make MPI mistake child processes for this rank.

    ``os.environ`` keeps them for libraries in this process, but children do not inherit them. A data loader worker that
    imports mpi4py.MPI, which initializes MPI, is then a world of one rank.
    """
    os.environ[_RANK_VARIABLE] = f"{os.getpid()} {' '.join(_place(os.environ))}"
    for name in os.environ:
        if name.startswith(_MPI_PREFIXES) and not name.startswith(_MPI_SETTINGS):
            os.unsetenv(name)


def rank_above(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the pid of the MPI rank that is an ancestor of this process, or None."""
    pid, *place = environ.get(_RANK_VARIABLE, "").split(" ")
    return int(pid) if pid.isdecimal() and int(pid) != os.getpid() and _place(environ) <= set(place) else None


def _place(environ: Mapping[str, str]) -> set[str]:
    """Return the variables that identify an MPI rank, even among the ranks of a job that it starts."""
    names = ("PMIX_NAMESPACE", "PMIX_RANK", "PMI_FD", "PMI_SIZE", "PMI_RANK", "SLURM_STEP_ID", "SLURM_PROCID")
    return {f"{name}={environ[name]}" for name in names if environ.get(name)}


def set_variables(variables: Mapping[str, str]) -> None:
    """Set variables in this process's environment."""
    os.environ.update(variables)


def backend_name(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the backend that was chosen for torch.distributed process groups, or None."""
    return environ.get(_BACKEND_VARIABLE) or None


def set_backend_name(name: str) -> None:
    """Choose the backend for process groups of this process and of processes that it starts later."""
    os.environ[_BACKEND_VARIABLE] = name
