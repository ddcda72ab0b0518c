"""Starts ranks of a script that join a running job: ``asyncdist run --join HOST:PORT``.

The job was started by ``asyncdist run --places``. HOST:PORT is the address of its store.
:mod:`asyncdist.launch.place_claims` reserves free places (rank numbers without a process) in the store.
:mod:`asyncdist.launch.local_ranks` supervises the ranks, with two exceptions:

- If a rank fails or is killed, this launcher's other ranks continue. The job decides whether the failure ends it.
- After a signal, the launcher kills its ranks. The job's other ranks treat them as lost and continue.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from asyncdist import environment, local_host
from asyncdist._version import __version__
from asyncdist.launch import local_ranks, place_claims
from asyncdist.launchers import addresses, child_environment
from asyncdist.trust import job_secret

#: Timeout in seconds for connecting to the job's address.
_LISTENER_S: Final = 5.0
#: Timeout in seconds for reserving rank numbers in the job, including the import of torch on a busy host.
_ANSWER_S: Final = 60.0
#: Timeout in seconds for releasing the reserved rank numbers.
_GIVE_BACK_S: Final = 5.0


def run(script: str, arguments: Sequence[str], options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Run ranks of a script that join a job under free rank numbers. Return when all of them have ended.

    Args:
        options: Options of ``asyncdist run``. The job's address in ``join`` was printed by its launcher.

    Returns:
        The exit code, as described for :func:`asyncdist.launch.local_ranks.run`.

    Raises:
        LaunchError: The script does not exist, no job is at the address, or too few of its places are free.
    """
    address, ranks = options.join, options.ranks or 1
    local_host.check_script(script)
    local_host.check_ranks(ranks)
    host, port = _parse(address)
    _check_listener(host, port)
    secret = local_ranks.given_secret(environ) or _kept_secret(address, port)
    keeper = _start_keeper(host, port, ranks, {**environ, environment.SECRET_VARIABLE: secret})
    try:
        job = _read_claim(keeper, address)
        threads = options.threads_per_rank
        environments = build_environments(environ, job, host=host, port=port, threads=threads, secret=secret)
        taken = ", ".join(map(str, environments))
        local_host.print_launcher_line(f"joins as rank{'s' if ranks > 1 else ''} {taken} of {job['size']}")
        store, restarts = contextlib.nullcontext(keeper), options.restarts or 0
        return local_ranks.run_ranks(
            script, arguments, environments, restarts=restarts, store=store, is_open=True, have_joined=True
        )
    finally:
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
    """Return each rank's environment variables, keyed by rank. ``job`` is the result of :func:`place_claims.claim`.

    On the host of the job's launcher, a rank's LOCAL_RANK is its rank, so that its GPU and port differ from those of
    the job's other ranks. On another host, each launcher counts its ranks from 0.
    """
    places: list[tuple[int, int]] = job["places"]
    is_at_job = job.get("host") == addresses.describe_host()
    shared = child_environment.for_ranks(environ, ranks=len(places), threads=threads)
    shared |= {
        environment.SECRET_VARIABLE: secret,
        environment.LOOPBACK_VARIABLE: "0" if job["is_open"] else "1",
        environment.RUN_VARIABLE: job["job"],
    }
    return {
        rank: {
            **shared,
            **local_ranks.rank_variables(
                rank,
                job["size"],
                local_rank=rank if is_at_job else local_rank,
                local_size=job["size"] if is_at_job else len(places),
                address=host,
                port=port,
                run_id=job["job"],
            ),
            **local_ranks.newcomer_variables(number, job["empty_count"]),
        }
        for local_rank, (rank, number) in enumerate(places)
    }


def _kept_secret(address: str, port: int) -> str:
    """Return the job's secret, which a launcher on this host has stored. Raise LaunchError if it is missing."""
    secret = job_secret.find(job_secret.name_of(port), environment.secret_directories())
    if secret is None:
        raise local_host.LaunchError(
            f"--join {address}: this host has no secret of a job at that port, and joining a job needs its secret. The "
            "secret is found automatically on the host of the job's launcher by the same user; elsewhere, give both "
            "commands the same ASYNCDIST_JOB_SECRET_FILE, a file with mode 0600"
        )
    return secret


def _parse(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not (host and port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
        raise local_host.LaunchError(f"--join must be HOST:PORT as asyncdist run --places printed it, got {address!r}")
    return host, int(port)


def _check_listener(host: str, port: int) -> None:
    try:
        socket.create_connection((host, port), timeout=_LISTENER_S).close()
    except (OSError, UnicodeError) as error:
        raise local_host.LaunchError(f"--join {host}:{port}: cannot connect to the job's launcher ({error})") from error


def _start_keeper(host: str, port: int, ranks: int, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a child that reserves rank numbers in the job. When this process ends, the child releases them and ends."""
    command = [sys.executable, place_claims.PROGRAM, host, str(port), str(ranks), __version__]
    quiet = {**environ, "TORCH_CPP_LOG_LEVEL": "FATAL"}
    try:
        return subprocess.Popen(command, env=quiet, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)
    except OSError as error:
        raise local_host.LaunchError(f"no place in the job can be claimed: {error}") from error


def _read_claim(keeper: subprocess.Popen[bytes], address: str) -> dict[str, Any]:
    assert keeper.stdout is not None
    if not select.select([keeper.stdout], [], [], _ANSWER_S)[0]:
        keeper.kill()
        raise local_host.LaunchError(
            f"--join {address}: the process at that address did not answer within {_ANSWER_S:g} s"
        )
    line = keeper.stdout.readline()
    found: dict[str, Any] = json.loads(line) if line else {"error": "the process that asks for places has failed"}
    if "error" in found:
        raise local_host.LaunchError(f"--join {address}: {found['error']}")
    return found


def _end(keeper: subprocess.Popen[bytes]) -> None:
    """End the child that reserved the rank numbers. It releases those whose ranks were not reported as ended."""
    assert keeper.stdin is not None and keeper.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        keeper.stdin.close()
    try:
        keeper.wait(_GIVE_BACK_S)
    except subprocess.TimeoutExpired:
        keeper.kill()
        keeper.wait()
    keeper.stdout.close()
