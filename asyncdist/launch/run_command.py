"""Implements ``asyncdist run``: declares its arguments, and starts ranks on the chosen transport."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

from asyncdist import local_host, rank_program
from asyncdist.argument_types import count, folder
from asyncdist.launchers.backends import BACKENDS, RUN_NAMES

if TYPE_CHECKING:
    from asyncdist.launch.hosts import remote_hosts

#: Options that take a value.
OPTIONS: Final = (
    *("-n", "--ranks", "--hosts", "--ssh", "--transport", "--mpi", "--threads-per-rank", "--stall-s", "--record"),
    *("--metrics", "--restarts", "--places", "--join", "-m"),
)
#: Maximum number of places (rank numbers). The launcher writes each place to the store before the first rank starts.
_PLACES_MAX: Final = 10_000
_Variables: TypeAlias = Mapping[str, str]


def add_to(add_parser: Callable[..., argparse.ArgumentParser], *, has_arguments: bool) -> None:
    """Add the subcommand ``run``. Its arguments are added only if ``has_arguments`` is true."""
    run = add_parser(
        "run",
        help="start a script on several ranks, on this host or others",
        usage=(
            "asyncdist run -n RANKS | --hosts HOST:RANKS,... [--ssh CMD] | --join HOST:PORT [-n RANKS]\n"
            f"                     [--transport {'|'.join(RUN_NAMES)}] [--mpi openmpi|mpich] [--threads-per-rank N]\n"
            "                     [--survive] [--restarts N] [--places N] [--stall-s S] [--record DIR]\n"
            "                     [--metrics PORT|SINK] [--live] [--prefix] script.py | -m MODULE [arguments]"
        ),
        description=(
            "Start a script on several ranks, on this host or on others by ssh: with the installed MPI, or for "
            "torch.distributed, as torchrun would."
        ),
    )
    if not has_arguments:
        return
    _add_places(run)
    _add_lives(run)
    _add_watching(run)
    run.add_argument("-m", dest="module", metavar="MODULE", help="run a module instead of a script, as python -m does")
    run.add_argument("script", nargs="?", help="a Python script; the words after it are passed to it unchanged")


def _add_places(run: argparse.ArgumentParser) -> None:
    from asyncdist import environment
    from asyncdist.launch.hosts import remote_hosts

    run.add_argument("-n", "--ranks", type=count, metavar="RANKS", help="the number of processes")
    run.add_argument(
        "--hosts",
        metavar="HOST:RANKS,...",
        help="the hosts, and the number of ranks on each; with a smaller -n, hosts are filled in their order",
    )
    run.add_argument(
        "--ssh", metavar="CMD", help=f"command to reach a host: CMD HOST COMMANDLINE (default: {remote_hosts.SSH})"
    )
    run.add_argument(
        "--transport",
        metavar="|".join(RUN_NAMES),
        help=f"transport of the ranks (default: {environment.TRANSPORT_VARIABLE}, else mpi); torch sends over gloo",
    )
    run.add_argument("--mpi", choices=environment.FLAVOURS, help="the MPI to use, if two are installed")
    run.add_argument(
        "--threads-per-rank",
        type=count,
        metavar="N",
        help="OMP_NUM_THREADS of each rank (default: its share of the cores)",
    )


def _add_lives(run: argparse.ArgumentParser) -> None:
    run.add_argument(
        "--survive",
        action="store_true",
        help="continue when ranks die (Open MPI 5 or later); without it, a killed rank ends a job on MPI",
    )
    run.add_argument(
        "--restarts",
        type=count,
        metavar="N",
        help="with --transport torch: restart each killed rank up to N times; it joins the others, which continue",
    )
    run.add_argument(
        "--places",
        type=count,
        metavar="N",
        help="with --transport torch: size of the world; ranks can later join the empty places, see --join",
    )
    run.add_argument(
        "--join",
        metavar="HOST:PORT",
        help="join a job that was started with --places, at the address that it printed, with -n RANKS (default: 1)",
    )


def _add_watching(run: argparse.ArgumentParser) -> None:
    run.add_argument(
        "--stall-s",
        metavar="S",
        help=(
            "show which rank waits for which, and at which line, when no rank has made progress for S seconds "
            "(default: 60); warn when main waits for S seconds while other ranks continue (default: 300, in "
            "collectives)"
        ),
    )
    run.add_argument(
        "--record",
        type=folder,
        metavar="DIR",
        help="write a recording of each rank into this folder; see the argument record of asyncdist.run",
    )
    run.add_argument(
        "--metrics",
        action="append",
        metavar="PORT|SINK",
        help="destination of the ranks' counters: a port for Prometheus, tensorboard:DIR, wandb or opentelemetry; "
        "see the argument metrics of asyncdist.run",
    )
    run.add_argument("--live", action="store_true", help="show a table of all ranks below the output")
    run.add_argument("--prefix", action="store_true", help="begin each line of a rank with its number, as in [0]")


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line after the script's name, into the words of ``asyncdist run`` and the script's words.

    The script's words may include ``--``, which argparse would drop.
    """
    place = 0
    while place < len(arguments) and arguments[place].startswith("-"):
        if arguments[place] == "--":
            place += 1
            break
        if arguments[place].startswith("-m"):  # -m MODULE or -mMODULE
            place += 2 if arguments[place] == "-m" else 1
            return list(arguments[:place]), list(arguments[place:])
        place += 2 if arguments[place] in OPTIONS else 1
    return list(arguments[: place + 1]), list(arguments[place + 1 :])


def ranks_missing(command: str, script: str, arguments: Sequence[str]) -> str:
    """Return the error for a missing ``-n``, with a hint if ``-n`` is among the script's arguments."""
    text = "the following arguments are required before the script: -n/--ranks"
    if any(word.partition("=")[0] in ("-n", "--ranks") for word in arguments):
        text += f". Options after the script are passed to the script; write asyncdist {command} -n RANKS {script}"
    return text


def run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run the command, and return the job's exit code. Raise LaunchError for invalid options."""
    from asyncdist import environment
    from asyncdist.launchers import detection

    script = _script(options)
    if options.ranks is None and options.hosts is None and options.join is None:
        raise local_host.LaunchError(ranks_missing("run", script, arguments))
    options.hosts, options.ssh = _hosts(options)
    environ = environment.environment()
    try:
        named = "torch" if options.transport is None and options.join is not None else options.transport
        transport, environ = detection.choose_transport(named, environ)
        if options.stall_s is not None:
            environment.seconds(options.stall_s, "--stall-s")
            environ = {**environ, environment.STALL_VARIABLE: options.stall_s}
        if options.record is not None:
            environ = {**environ, environment.RECORD_VARIABLE: os.path.abspath(options.record)}
        if options.metrics is not None:
            environ = {**environ, environment.METRICS_VARIABLE: _metrics(",".join(options.metrics))}
        if options.module is not None:
            environ = {**environ, rank_program.MODULE_VARIABLE: options.module}
        if options.prefix:
            environ = {**environ, rank_program.PREFIX_VARIABLE: "1"}
    except ValueError as error:
        raise local_host.LaunchError(str(error)) from error
    _check_supported(transport, options)
    return RUNNERS[transport](script, arguments, options, environ)


def _run_on_mpi(script: str, arguments: Sequence[str], options: argparse.Namespace, environ: _Variables) -> int:
    from asyncdist.launch import mpirun

    return mpirun.run(script, arguments, options, environ)


def _run_on_torch(script: str, arguments: Sequence[str], options: argparse.Namespace, environ: _Variables) -> int:
    from asyncdist.launch import joining_ranks, local_ranks
    from asyncdist.launch.hosts import remote_ranks

    if options.join is not None:
        return joining_ranks.run(script, arguments, options, environ)
    if options.hosts:
        return remote_ranks.run(script, arguments, options, environ)
    return local_ranks.run(
        script,
        arguments,
        ranks=options.ranks,
        threads=options.threads_per_rank,
        restarts=options.restarts or 0,
        places=options.places,
        environ=environ,
    )


#: For each transport, the function that starts the ranks of ``asyncdist run`` and returns the job's exit code.
RUNNERS: Final[Mapping[str, Callable[..., int]]] = {"mpi": _run_on_mpi, "torch": _run_on_torch}


def _metrics(named: str) -> str:
    """Return the destinations of counters, ``named``, with absolute paths. Raise ValueError if one is unusable."""
    from dataclasses import replace

    from asyncdist.live.destinations import destinations, missing

    texts = []
    for each in destinations(named, "--metrics"):
        lacking = missing(each)
        if lacking is not None:
            raise ValueError(f"--metrics: {lacking}")
        texts.append(str(each if each.sink != "tensorboard" else replace(each, where=os.path.abspath(each.where))))
    return ",".join(texts)


def _script(options: argparse.Namespace) -> str:
    if options.module is None:
        if options.script is None:
            raise local_host.LaunchError("the following arguments are required: script")
        return str(options.script)
    import importlib.util

    from asyncdist import environment

    if not environment.has_safe_path() and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        spec = importlib.util.find_spec(options.module)
        if spec is not None and spec.submodule_search_locations is not None:  # the module is a package
            spec = importlib.util.find_spec(f"{options.module}.__main__")
    except (ImportError, ValueError) as error:
        raise local_host.LaunchError(f"-m {options.module} cannot be imported: {error}") from error
    if spec is None or spec.origin is None or not spec.has_location:
        raise local_host.LaunchError(
            f"-m {options.module} must be a module, or a package with __main__, but none of this name was found"
        )
    return spec.origin


def _hosts(options: argparse.Namespace) -> tuple[list[remote_hosts.Host], list[str]]:
    """Return the hosts ([] if there is only this host), and the words of the ``--ssh`` command."""
    if options.hosts is None:
        if options.ssh is not None:
            raise local_host.LaunchError("--ssh needs --hosts, the list of hosts to which it connects")
        return [], []
    from asyncdist.launch.hosts import remote_hosts

    for name in ("restarts", "places", "join"):
        if getattr(options, name) is not None:
            raise local_host.LaunchError(f"--{name} cannot be used with --hosts; it needs ranks on this host")
    hosts = remote_hosts.place_ranks(remote_hosts.parse_hosts(options.hosts), options.ranks)
    return hosts, remote_hosts.split_ssh(remote_hosts.SSH if options.ssh is None else options.ssh)


def _check_supported(transport: str, options: argparse.Namespace) -> None:
    """Raise LaunchError if the transport does not support an option, or options contradict each other."""
    supporting = {
        name: [key for key in RUN_NAMES if name in BACKENDS[key].run_options]
        for backend in BACKENDS.values()
        for name in backend.run_options
        if getattr(options, name)
    }
    if not all(transport in keys for keys in supporting.values()):
        needs = [f"--{name} needs --transport {' or '.join(keys)}" for name, keys in supporting.items()]
        can_survive = "survive" in BACKENDS[transport].run_options and not options.survive
        hint = "; with --survive, its ranks continue when other ranks die" if can_survive else ""
        raise local_host.LaunchError(f"{' and '.join(needs)}, got --transport {transport}{hint}")
    if options.places is not None and options.join is not None:
        raise local_host.LaunchError(
            "--places cannot be used with --join; it belongs to the command that started the job"
        )
    if options.places is not None and options.places < options.ranks:
        raise local_host.LaunchError(
            f"--places must be >= {options.ranks} with -n {options.ranks}, got {options.places}"
        )
    if options.places is not None and options.places > _PLACES_MAX:
        raise local_host.LaunchError(f"--places must be <= {_PLACES_MAX}, got {options.places}")
