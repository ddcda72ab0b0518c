"""Starts ranks of a script on this host with torchrun's environment variables: ``asyncdist run --transport torch``.

- Each rank has its own process group, so Ctrl-C in a terminal reaches only the launcher, which passes it on once. If
  the launcher has a terminal, however, rank 0 is in the launcher's group, so that it can read from the terminal.
- Processes that a rank has started (such as a data loader's workers) end with the rank, on Linux even in their own
  sessions (:mod:`asyncdist.launch.guardians`).
- :mod:`asyncdist.launch.supervision.supervisor` finds the rank that has failed, and stops the others. No process is
  left behind, on Linux even if the launcher itself is killed.
- If the connection to another host is lost, the ranks on that host are lost, and the other ranks continue.
- With ``restarts``, a rank that was killed by a signal is restarted with the same variables, except for
  ASYNCDIST_INCARNATION, which counts the restarts. A rank that exits is not restarted, because it has either returned
  or notified the other ranks of its failure. A separate process serves the store
  (:mod:`asyncdist.launch.store_server`), so that any rank may die. In the store, the launcher records which processes
  have ended.
- With ``places``, the world has more ranks than the launcher starts, and processes for the other ranks may join later
  (:mod:`asyncdist.launch.joining_ranks`). They may also replace a rank that was killed and not restarted.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Final

from asyncdist import environment, local_host, rank_program
from asyncdist._version import __version__
from asyncdist.launch import guardians, place_claims, store_server
from asyncdist.launch.supervision.supervisor import Event, Supervisor, signals_as_events
from asyncdist.launchers import addresses, child_environment, job_rendezvous
from asyncdist.trust import job_secret
from asyncdist.validation import printable

#: Seconds for which the store runs after all ranks have ended, so that it can notify ranks of other launchers.
OVER_S: Final = 0.5


class RankProcess(subprocess.Popen[bytes]):
    """The process of a rank on this host."""

    is_lost = False

    def end(self) -> None:
        """Kill the rank and all processes that it has started."""
        if guardians.ARE_SUPPORTED:
            self.send_signal(guardians.end_signal())
            self.send_signal(signal.SIGCONT)  # a stopped guardian would not react
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS refuses a signal to a group of zombies
            os.killpg(self.pid, signal.SIGKILL)


def run(
    script: str,
    arguments: Sequence[str],
    *,
    ranks: int,
    threads: int | None = None,
    restarts: int = 0,
    places: int | None = None,
    environ: Mapping[str, str],
) -> int:
    """Run ``ranks`` ranks of a script on this host, and return the job's exit code when the last of them has ended.

    The exit code is 0 if the last process of each rank ended with 0. With ``places``, ranks that were killed while
    others were alive do not count. If a rank failed, it is the code of the first rank that did (but 1 only if no other
    rank ended with another nonzero code soon after). If a signal killed that rank, or the launcher received a signal,
    the exit code is 128 plus the signal's number.

    Args:
        threads: OMP_NUM_THREADS of each rank; None for the user's value or, without one, the cores divided by the
            ranks.
        restarts: Maximum number of times that each rank is restarted after a signal has killed it.
        places: Size of the world if ranks may join later, or None.
    """
    local_host.check_ranks(ranks)
    addresses.check_loopback()
    given = given_secret(environ)
    is_open = places is not None and given is not None
    secret = given or job_secret.draw()
    of_ranks = build_environments(
        environ, ranks=ranks, threads=threads, restarts=restarts, places=places, secret=secret, is_open=is_open
    )
    is_joinable = bool(restarts) or places is not None
    module = environ.get(rank_program.MODULE_VARIABLE)
    program = [*(("-m", module) if module else (script,)), *arguments]
    store = _store(of_ranks[0], ranks, places, program, is_open=is_open) if is_joinable else None
    environments = dict(enumerate(of_ranks))
    return run_ranks(script, arguments, environments, restarts=restarts, store=store, is_open=places is not None)


def run_ranks(
    script: str,
    arguments: Sequence[str],
    environments: Mapping[int, Mapping[str, str]],
    *,
    restarts: int = 0,
    store: AbstractContextManager[subprocess.Popen[bytes] | None] | None = None,
    is_open: bool = False,
    have_joined: bool = False,
) -> int:
    """Run ranks on this host, on any transport, and return the job's exit code.

    Args:
        store: Context manager that runs the process through which the store's keys are set. None if no rank may join.
        is_open: Whether a new process may take over the rank number of a killed rank that is not restarted.
        have_joined: Whether these ranks join the world of another launcher.
    """
    local_host.check_script(script)
    command = rank_program.rank_command(script, arguments)
    # Only a SimpleQueue allows a signal handler to put items while this thread waits in get.
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    first = {rank_program.STDIN_VARIABLE: rank_program.INHERITED, **guardians.foreground_variables()}

    def start_rank(rank: int, variables: Mapping[str, str]) -> RankProcess:
        own = {**variables, **shared, **(first if rank == 0 and not have_joined else {})}
        return start(command, own, rank=rank, ended=lambda: events.put(("ended", rank)))

    with (
        local_host.shared_file_variables() as shared,
        signals_as_events(events),
        store or contextlib.nullcontext() as server,
    ):
        supervisor = Supervisor(
            events,
            start_rank,
            environments,
            restarts=restarts,
            store=server,
            is_open=is_open,
            have_joined=have_joined,
            at_terminal=(0,) if os.isatty(0) and not have_joined else (),
        )
        try:
            code = supervisor.run()
            if code == 0:
                local_host.report_lone_ranks(shared, len(environments))
            return code
        finally:
            for process in supervisor.processes.values():
                process.end()
            for process in supervisor.processes.values():
                process.wait()


@contextlib.contextmanager
def _store(
    variables: Mapping[str, str], ranks: int, places: int | None, program: Sequence[str], *, is_open: bool
) -> Iterator[RankProcess]:
    """Run the process that serves the store, at the address in the ranks' variables.

    With ``places``, write the secret to a file and the free places to the store, for ``asyncdist run --join``.

    Raises:
        LaunchError: The file cannot be written, and the user has not given a secret with which other ranks could join.
    """
    address, port = variables["MASTER_ADDR"], variables["MASTER_PORT"]
    command = [sys.executable, store_server.PROGRAM, address, port, *["open"] * is_open]
    with contextlib.ExitStack() as stack:
        if places is not None:
            directories, secret = environment.secret_directories, variables[environment.SECRET_VARIABLE]
            if not stack.enter_context(job_secret.kept(int(port), secret, directories)) and not is_open:
                why = job_secret.why_not_stored(directories())
                raise local_host.LaunchError(f"--places: the secret with which ranks join cannot be stored: {why}")
        server = _popen(command, variables, "the store", stdin=subprocess.PIPE)
        try:
            if places is not None:
                _announce_places(server, variables, ranks, places, program, is_open=is_open)
            yield server
        finally:
            if places is not None:  # gives other launchers' ranks time to notice that the store is about to close
                store_server.send_line(server, f"asyncdist/{place_claims.OVER} ")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    server.wait(OVER_S)
            server.end()
            server.wait()
            assert server.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # raised if a line could not be sent
                server.stdin.close()


def given_secret(environ: Mapping[str, str]) -> str | None:
    """Return the user's secret for this job, or None. Raise LaunchError if the secret cannot be used."""
    try:
        return job_rendezvous.given_secret(environ)
    except ValueError as error:
        raise local_host.LaunchError(str(error)) from error


def _announce_places(
    server: RankProcess, variables: Mapping[str, str], ranks: int, places: int, program: Sequence[str], *, is_open: bool
) -> None:
    """Write the job and its free places (rank numbers) into the store, and print the command with which ranks join.

    ``program`` is the last part of this command: the script or module, and its arguments.
    """
    for rank in range(places):
        store_server.send_line(server, f"asyncdist/place/{rank} {'held' if rank < ranks else 'free 1'}")
    run_id = variables["TORCHELASTIC_RUN_ID"]
    host = addresses.describe_host()
    job = place_claims.describe(run_id, places, places - ranks, __version__, host=host, is_open=is_open)
    store_server.send_line(server, f"asyncdist/{place_claims.JOB} {job}")
    address = f"{variables['MASTER_ADDR']}:{variables['MASTER_PORT']}"
    free = places - ranks
    store_server.send_line(
        server,
        f"!asyncdist run: {free} of {places} places {'is' if free == 1 else 'are'} free; to join, run: "
        f"asyncdist run --join {address} {printable(shlex.join(program))}",
    )


def build_environments(
    environ: Mapping[str, str],
    *,
    ranks: int,
    threads: int | None,
    cores: int | None = None,
    restarts: int = 0,
    places: int | None = None,
    secret: str = "",
    is_open: bool = False,
) -> list[dict[str, str]]:
    """Return the environment of each rank. If ``is_open`` is true, ranks on other hosts may join the job."""
    shared = child_environment.for_ranks(environ, ranks=ranks, threads=threads, cores=cores)
    is_joinable = restarts or places is not None
    own = newcomer_variables(0, (places or ranks) - ranks) if is_joinable else {}
    port, run_id = addresses.find_free_port(), local_host.new_run_id()
    shared |= {
        environment.SECRET_VARIABLE: secret,
        environment.LOOPBACK_VARIABLE: "0" if is_open else "1",
        environment.RUN_VARIABLE: run_id,
    }
    return [
        {
            **shared,
            **rank_variables(
                rank,
                ranks if places is None else places,
                local_rank=rank,
                local_size=ranks,
                address="127.0.0.1",
                port=port,
                run_id=run_id,
            ),
            **own,
        }
        for rank in range(ranks)
    ]


def newcomer_variables(incarnation: int, empty_count: int) -> dict[str, str]:
    """Return additional environment variables for a rank of a world that other ranks may join later."""
    return {
        environment.INCARNATION_VARIABLE: str(incarnation),
        environment.EMPTY_VARIABLE: str(empty_count),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def start(
    command: Sequence[str], variables: Mapping[str, str], *, rank: int, ended: Callable[[], object]
) -> RankProcess:
    """Start a rank under guardians (supervising processes). Call ``ended``, in a thread, when the rank has ended."""
    stdin = None if rank_program.STDIN_VARIABLE in variables else subprocess.DEVNULL
    process = _popen(command, variables, f"rank {rank}", stdin=stdin)

    def await_end() -> None:
        process.wait()
        ended()

    try:
        threading.Thread(target=await_end, name=f"rank {rank}", daemon=True).start()
    except RuntimeError as error:  # there are too many processes and threads
        process.end()
        process.wait()
        raise local_host.LaunchError(f"rank {rank} cannot be supervised: {error}") from error
    return process


def _popen(command: Sequence[str], variables: Mapping[str, str], what: str, *, stdin: int | None) -> RankProcess:
    guarded = guardians.guarded(list(command), parent=os.getpid())
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # the rank unblocks it when it has a handler
    try:
        return RankProcess(guarded, env=variables, stdin=stdin, process_group=0)
    except OSError as error:
        raise local_host.LaunchError(f"{what} cannot be started: {error}") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def rank_variables(
    rank: int, size: int, *, local_rank: int, local_size: int, address: str, port: int, run_id: str
) -> dict[str, str]:
    """Return torchrun's environment variables for this rank of a job whose rank 0 serves the store."""
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
