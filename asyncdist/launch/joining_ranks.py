"""Starts ranks of a script that join a job which runs: ``asyncdist run --join HOST:PORT``.

The job is one of ``asyncdist run --places``, whose store is at that address. :mod:`asyncdist.launch.place_claims` takes
free places there, and tells the others what becomes of them. The rules are those of
:mod:`asyncdist.launch.local_ranks`, whose supervision this is, but for these:

- A rank that fails, or is killed, ends nobody else, here either.
- At a signal the ranks are killed: they are lost to the others, who go on.
"""

from __future__ import annotations

import contextlib
import json
import queue
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from asyncdist import environment, local_host, rank_program
from asyncdist._version import __version__
from asyncdist.launch import local_ranks, place_claims
from asyncdist.trust import secret_files

#: How long somebody may take to answer there at all.
_LISTENER_S: Final = 5.0
#: How long it may take to ask for places, the import of torch on a busy host included.
_ANSWER_S: Final = 60.0
#: How long the places may take to be given back.
_GIVE_BACK_S: Final = 5.0


def run(
    script: str,
    arguments: Sequence[str],
    *,
    address: str,
    ranks: int = 1,
    threads: int | None = None,
    restarts: int = 0,
    environ: Mapping[str, str],
) -> int:
    """Run ranks of a script in free places of a job, and return an exit code when the last one has ended.

    Args:
        script: path of a Python script.
        arguments: the script's own arguments.
        address: of the job, as its launcher has printed it.
        ranks: how many places to take.
        threads: OMP_NUM_THREADS of each rank; None keeps the user's, else gives each rank its share of the cores.
        restarts: how often each rank is started again when a signal kills it.
        environ: the environment to start from.

    Returns:
        0 if the last process of each rank ended with it; else the code of the first that did not, or 128 and the number
        of the signal that killed it, or that the launcher was given.

    Raises:
        local_host.LaunchError: the script is no file, or there is no such job, or too few of its places are free.
    """
    local_host.check_script(script)
    local_host.check_ranks(ranks)
    host, port = _parse(address)
    _check_listener(host, port)
    command = rank_program.rank_command(script, arguments)
    events: queue.SimpleQueue[local_ranks.Event] = queue.SimpleQueue()
    processes: dict[int, local_ranks.RankProcess] = {}

    def start_rank(rank: int, variables: Mapping[str, str]) -> local_ranks.RankProcess:
        return local_ranks.start(command, variables, rank=rank, ended=lambda: events.put(("ended", rank)))

    secret = local_ranks.given_secret(environ) or _kept_secret(address, port)
    keeper = _start_keeper(host, port, ranks, {**environ, environment.SECRET_VARIABLE: secret})
    try:
        job = _read_claim(keeper, address)
        environments = build_environments(environ, job, host=host, port=port, threads=threads, secret=secret)
        taken = ", ".join(map(str, environments))
        local_ranks.Restarts.say(f"joins as rank{'s' if ranks > 1 else ''} {taken} of {job['size']}")
        with local_ranks.signals_as_events(events):
            for rank, variables in environments.items():
                processes[rank] = start_rank(rank, variables)
            again = local_ranks.Restarts(start_rank, environments, restarts, keeper, is_open=True, have_joined=True)
            return local_ranks.supervise(processes, events, again)
    finally:
        for process in processes.values():
            process.end()
        for process in processes.values():
            process.wait()
        _end(keeper)


def build_environments(
    environ: Mapping[str, str],
    job: Mapping[str, Any],
    *,
    host: str,
    port: int,
    threads: int | None,
    secret: str = "",
) -> dict[int, dict[str, str]]:
    """Return the environment of each rank; the user's setting for threads is kept, unless ``threads`` is given.

    Args:
        environ: the environment to start from.
        job: as :func:`place_claims.claim` returns it.
        host, port: of the job's store.
        threads: OMP_NUM_THREADS.
        secret: The secret of the job.
    """
    places: list[tuple[int, int]] = job["places"]
    share = str(max(1, local_host.available_cores() // len(places)))
    chosen = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    chosen |= {environment.SECRET_VARIABLE: secret, environment.LOOPBACK_VARIABLE: "0" if job["is_open"] else "1"}
    return {
        rank: {
            "OMP_NUM_THREADS": share,
            **environment.without_launchers(environ),
            **local_ranks.rank_variables(
                rank,
                job["size"],
                local_rank=local_rank,
                local_size=len(places),
                address=host,
                port=port,
                run_id=job["job"],
            ),
            **local_ranks.newcomer_variables(number, job["empty_count"]),
            **chosen,
        }
        for local_rank, (rank, number) in enumerate(places)
    }


def _kept_secret(address: str, port: int) -> str:
    """Return the secret that the launcher of a job on this host keeps for this user.

    Raises:
        local_host.LaunchError: There is none. A job of ``asyncdist run --places`` has one, so what listens there is no
            such job, or another user's, or on another host.
    """
    secret = secret_files.find(secret_files.name_of(port), environment.secret_directories())
    if secret is None:
        raise local_host.LaunchError(
            f"--join {address}: this host has no secret of a job at that port, and a job is joined by its secret. It "
            "is found on the host of the job's launcher, for the same user, while the job runs. From elsewhere, give "
            "both the same ASYNCDIST_JOB_SECRET_FILE, a file of mode 0600"
        )
    return secret


def _parse(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not (host and port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
        raise local_host.LaunchError(
            f"--join {address!r} is no address; allowed: HOST:PORT, as asyncdist run --places printed it"
        )
    return host, int(port)


def _check_listener(host: str, port: int) -> None:
    try:
        socket.create_connection((host, port), timeout=_LISTENER_S).close()
    except (OSError, UnicodeError) as error:
        raise local_host.LaunchError(f"--join {host}:{port}: nobody answers there ({error})") from error


def _start_keeper(host: str, port: int, ranks: int, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start the process that takes the places. It outlives this one by the moment that it needs to give them back."""
    command = [sys.executable, place_claims.PROGRAM, host, str(port), str(ranks), __version__]
    quiet = {**environ, "TORCH_CPP_LOG_LEVEL": "FATAL"}
    try:
        return subprocess.Popen(command, env=quiet, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)
    except OSError as error:
        raise local_host.LaunchError(f"no places can be taken: {error}") from error


def _read_claim(keeper: subprocess.Popen[bytes], address: str) -> dict[str, Any]:
    assert keeper.stdout is not None
    if not select.select([keeper.stdout], [], [], _ANSWER_S)[0]:
        keeper.kill()
        raise local_host.LaunchError(f"--join {address}: what listens there does not answer within {_ANSWER_S:g} s")
    line = keeper.stdout.readline()
    found: dict[str, Any] = json.loads(line) if line else {"error": "the process that asks there has failed"}
    if "error" in found:
        raise local_host.LaunchError(f"--join {address}: {found['error']}")
    return found


def _end(keeper: subprocess.Popen[bytes]) -> None:
    """Let the places go of which nothing was said, and end the process that holds them."""
    assert keeper.stdin is not None and keeper.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        keeper.stdin.close()
    try:
        keeper.wait(_GIVE_BACK_S)
    except subprocess.TimeoutExpired:
        keeper.kill()
        keeper.wait()
    keeper.stdout.close()
