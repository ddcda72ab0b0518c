"""Starts N ranks of a script on this host, with the variables that torchrun sets: ``asyncdist run --transport torch``.

The launcher keeps to these rules:

- A rank is in a process group of its own. So Ctrl-C in a terminal reaches the launcher alone, which passes it on, once.
  Processes that a rank has started (the workers of a data loader) end when the rank does, on Linux also those in a
  session of their own (:mod:`asyncdist.launch.guardians`).
- The first rank to fail decides the exit code, as with mpirun. But exit code 1, with which Python ends after any
  exception, says little: ranks that stop because another one fails often end so before that one does. So a rank that
  ends in another way within ``SETTLE_S`` is the cause.
- The others are asked to stop, and killed if they have not done so after ``STOP_S``. No process is left behind, also
  when the launcher itself is killed (on Linux).
- Where ranks are to be started again (``restarts``), one that is killed by a signal is, under the same variables but
  for ASYNCDIST_INCARNATION, which counts that; the others are left alone. One that ends by itself is not: it ended
  well, or has told the others of its failure. The store then is with a process of its own
  (:mod:`asyncdist.launch.store_server`), so that any rank may die. There the launcher notes which processes have ended.
- Nothing here imports torch: the launcher is up in 0.1 s and waits without using a core.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Generic, Literal, Protocol, TypeAlias, TypeVar

from asyncdist import environment, local_host, rank_program
from asyncdist.launch import guardians, store_server

#: How long ranks that were asked to stop may take.
STOP_S: Final = 10.0
#: How long, after one has ended with 1, the others may end by themselves before they are asked to.
SETTLE_S: Final = 2.0

_FORWARDED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: What happened: a signal came, by its number; a rank ended, by its rank; or time was up, for all.
Event: TypeAlias = tuple[Literal["signal", "ended", "late"], int]


class Process(Protocol):
    """The process of a rank, on this host or on another one.

    Attributes:
        returncode: how it has ended, as :mod:`subprocess` says it; None while it runs.
    """

    returncode: int | None

    def send_signal(self, number: int, /) -> None:
        """Send it a signal, if it runs."""

    def end(self) -> None:
        """End it, if it has not ended, and all that it has started; its process has ended when that is done."""


P = TypeVar("P", bound=Process)


class RankProcess(subprocess.Popen[bytes]):
    """The process of a rank on this host."""

    def end(self) -> None:
        """End it, if it has not ended, and all that it has started; its process has ended when that is done."""
        if guardians.ARE_HERE:
            self.send_signal(guardians.end_signal())
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS refuses a group of zombies
            os.killpg(self.pid, signal.SIGKILL)


def run(
    script: str,
    arguments: Sequence[str],
    *,
    ranks: int,
    threads: int | None = None,
    restarts: int = 0,
    environ: Mapping[str, str],
) -> int:
    """Run ``ranks`` ranks of a script on this host, and return the job's exit code when the last one has ended.

    Args:
        script: path of a Python script.
        arguments: the script's own arguments.
        ranks: the number of processes.
        threads: OMP_NUM_THREADS of each rank; None keeps the user's, else gives each rank its share of the cores.
        restarts: how often each rank is started again when a signal kills it.
        environ: the environment to start from.

    Returns:
        0 if all ranks ended with it, the last process of each where they are started again; else the code of the
        first that did not, 1 only if none ended with another soon after, and 128 and the signal's number if it was
        killed; or 128 and the number of the signal that the launcher was given.

    Raises:
        local_host.LaunchError: the script is no file, or a process cannot be started.
    """
    local_host.check_script(script)
    local_host.check_ranks(ranks)
    local_host.check_loopback()
    command = rank_program.rank_command(script, arguments)
    environments = build_environments(environ, ranks=ranks, threads=threads, restarts=restarts)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()  # the one queue whose put may interrupt its own get
    processes: list[RankProcess] = []
    servers: list[RankProcess] = []

    def start_rank(rank: int, variables: Mapping[str, str]) -> RankProcess:
        return start(command, variables, rank=rank, ended=lambda: events.put(("ended", rank)))

    with signals_as_events(events):
        try:
            if restarts:
                servers.append(_start_store(environments[0]))
            for variables in environments:
                processes.append(start_rank(len(processes), variables))
            again = Restarts(start_rank, environments, restarts, servers[0] if servers else None)
            return supervise(processes, events, again)
        finally:
            for process in processes + servers:
                process.end()
            for process in processes + servers:
                process.wait()


class Restarts(Generic[P]):
    """Starts ranks again, each so many times.

    Args:
        start: starts a rank, whose end will be an event.
        environments: of the ranks.
        count: how often each may be started again.
        server: of the store, where they may be.
    """

    def __init__(
        self,
        start: Callable[[int, Mapping[str, str]], P],
        environments: Sequence[Mapping[str, str]],
        count: int,
        server: RankProcess | None = None,
    ) -> None:
        self._server = server
        self._start = start
        self._environments = environments
        self.count = count
        self._counts = [0] * len(environments)

    def start(self, rank: int, returncode: int, others: int) -> P | None:
        """Start a rank again that was killed, unless it has been so too often, or no rank is left; say which."""
        why = _how_ended(returncode)
        if not others or self._counts[rank] == self.count:
            left = "no other rank is left to take it in" if not others else "the others go on without it"
            self.say(f"rank {rank} {why}; it is not started again ({self._counts[rank]} of {self.count}): {left}")
            return None
        self._counts[rank] += 1
        self.say(f"rank {rank} {why}; starting it again ({self._counts[rank]} of {self.count})")
        variables = {**self._environments[rank], environment.INCARNATION_VARIABLE: str(self._counts[rank])}
        return self._start(rank, variables)

    def note_exit(self, rank: int) -> None:
        """Let the ranks know that the process of ``rank`` has ended, so that none goes on connecting to it."""
        if self._server is not None and self._server.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # the store has been killed
                self._server.stdin.write(f"asyncdist/exited/{rank}.{self._counts[rank]}\n".encode())
                self._server.stdin.flush()

    def is_newcomer(self, rank: int) -> bool:
        """Whether this rank has been started again."""
        return self._counts[rank] > 0

    @staticmethod
    def say(text: str) -> None:
        """Print a line of the launcher."""
        print(f"asyncdist run: {text}", file=sys.stderr, flush=True)


def _start_store(variables: Mapping[str, str]) -> RankProcess:
    """Start the process that serves the store at the address that the ranks are told."""
    command = [sys.executable, store_server.PROGRAM, variables["MASTER_ADDR"], variables["MASTER_PORT"]]
    return _popen(command, variables, "the store", stdin=subprocess.PIPE)


def build_environments(
    environ: Mapping[str, str],
    *,
    ranks: int,
    threads: int | None,
    cores: int | None = None,
    restarts: int = 0,
) -> list[dict[str, str]]:
    """Return the environment of each rank; the user's setting for threads is kept, unless ``threads`` is given."""
    share = str(max(1, (cores or local_host.available_cores()) // ranks))
    chosen = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    if restarts:
        chosen |= {environment.INCARNATION_VARIABLE: "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    port, run_id = local_host.find_free_port(), local_host.new_run_id()
    return [
        {
            "OMP_NUM_THREADS": share,
            **environment.without_launchers(environ),
            **rank_variables(
                rank, ranks, local_rank=rank, local_size=ranks, address="127.0.0.1", port=port, run_id=run_id
            ),
            **chosen,
        }
        for rank in range(ranks)
    ]


def start(
    command: Sequence[str], variables: Mapping[str, str], *, rank: int, ended: Callable[[], object]
) -> RankProcess:
    """Start a rank under guardians; ``ended`` is called when it has ended, in a thread."""
    process = _popen(command, variables, f"rank {rank}")

    def await_end() -> None:
        process.wait()
        ended()

    threading.Thread(target=await_end, name=f"rank {rank}", daemon=True).start()
    return process


def _popen(
    command: Sequence[str], variables: Mapping[str, str], what: str, *, stdin: int = subprocess.DEVNULL
) -> RankProcess:
    guarded = guardians.guarded(list(command), parent=os.getpid())
    try:
        return RankProcess(guarded, env=variables, stdin=stdin, process_group=0)
    except OSError as error:
        raise local_host.LaunchError(f"{what} cannot be started: {error}") from error


@contextlib.contextmanager
def signals_as_events(events: queue.SimpleQueue[Event]) -> Iterator[None]:
    """Turn signals into events while the context lasts; signals that are ignored (nohup) stay so."""
    previous = {number: signal.getsignal(number) for number in _FORWARDED}
    for number, handler in previous.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, lambda caught, _: events.put(("signal", caught)))
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def supervise(processes: list[P], events: queue.SimpleQueue[Event], again: Restarts[P]) -> int:
    """Wait for all ranks, and stop those that are left when one fails or a signal comes. Returns the exit code.

    A rank that is started again has a new process in ``processes``.
    """
    living = set(range(len(processes)))
    victims: list[int] = []  # or causes: they ended as Python does after any exception
    code = lost_code = 0
    deadline: float | None = None

    def stop(number: int) -> None:
        for rank in living:
            processes[rank].send_signal(number)

    while living:
        match _next_event(events, deadline):
            case ("late", _) if code:  # they were asked to stop
                deadline = None
                for rank in living:
                    processes[rank].end()
            case ("late", _):  # no rank ended in another way, so exit code 1 was the cause
                code, deadline = _explain(victims, 1, others=True), time.monotonic() + STOP_S
                stop(signal.SIGTERM)
            case ("signal", number):
                if not code:
                    if victims:  # ranks that are stopped now say nothing of what happened before
                        _explain(victims, 1, others=True)
                    code, deadline = 128 + number, None
                deadline = deadline or time.monotonic() + STOP_S
                stop(number)
            case ("ended", rank):
                living.discard(rank)
                processes[rank].end()  # what it left behind
                again.note_exit(rank)
                returncode = processes[rank].returncode
                if code or not returncode:
                    continue
                if returncode > 0 and again.is_newcomer(rank):  # the others know whether this is a failure of the job
                    lost_code = lost_code or returncode
                    again.say(f"rank {rank}, which was started again, {_how_ended(returncode)}")
                    continue
                if again.count and returncode < 0 and not victims:
                    started = again.start(rank, returncode, len(living))
                    if started is None:
                        lost_code = lost_code or 128 - returncode
                    else:
                        processes[rank] = started
                        living.add(rank)
                    continue
                if returncode == 1:
                    victims.append(rank)
                    deadline = deadline or time.monotonic() + SETTLE_S
                    continue
                code, deadline = _explain([rank], returncode, others=bool(living)), time.monotonic() + STOP_S
                stop(signal.SIGTERM)
    return code or (_explain(victims, 1, others=False) if victims else lost_code)


def _next_event(events: queue.SimpleQueue[Event], deadline: float | None) -> Event:
    try:
        return events.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
    except queue.Empty:
        return ("late", 0)


def _explain(ranks: Sequence[int], returncode: int, *, others: bool) -> int:
    """Say which ranks failed, and how. Returns the job's exit code."""
    who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"
    print(
        f"asyncdist run: {who} {_how_ended(returncode)}{'; stopping the others' if others else ''}",
        file=sys.stderr,
        flush=True,
    )
    return returncode if returncode > 0 else 128 - returncode


def _how_ended(returncode: int) -> str:
    how = f"ended with exit code {returncode}" if returncode > 0 else f"was killed by {_signal_name(-returncode)}"
    return how + " (the kernel does that where memory is short: see dmesg)" * (returncode == -signal.SIGKILL)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def rank_variables(
    rank: int, size: int, *, local_rank: int, local_size: int, address: str, port: int, run_id: str
) -> dict[str, str]:
    """Return the variables that torchrun would set for this rank; rank 0 itself hosts the store at ``address``."""
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
