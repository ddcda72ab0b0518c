"""Runs mpirun as a child: passes signals on to the ranks, reports which rank failed, and finds out the exit code.

- mpirun and its ranks are in other process groups, so a terminal's keys reach only this process. It sends signals
  directly to the guardians (supervising processes) of ranks on this host. If mpirun got a signal, it would stop reading
  its ranks' output, and kill the ranks after a quarter of a second. It therefore gets signals only until all ranks have
  guardians.
- Guardians report through a pipe how ranks have ended, before mpirun notices that they have. This process can therefore
  name the failed rank before the other ranks print errors. It suppresses mpirun's own message.
- On other hosts, agents forward reports and signals.
- In a job that survives lost ranks, mpirun takes minutes to detect lost hosts. Until all ranks are connected, this
  process therefore probes the agents, and ends the job if a host does not respond.
- mpirun has no standard input. Rank 0 opens the standard input of this process (:mod:`asyncdist.rank_program`).
- mpirun dies with this process.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import secrets
import select
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any, Final

from asyncdist import local_host, rank_program
from asyncdist.launch import guardians
from asyncdist.launch.hosts import remote_hosts
from asyncdist.launch.hosts.remote_hosts import Agent
from asyncdist.launch.supervision.endings import JobEnds
from asyncdist.launch.supervision.mpirun_output import MpirunOutputFilter
from asyncdist.launchers import launcher_signals

#: Maximum seconds for mpirun to end before it is killed.
_MPIRUN_STOP_S: Final = 5.0
#: Maximum seconds to read standard error after mpirun has ended. A leftover process may keep it open.
_LAST_WORDS_S: Final = 1.0
#: Maximum seconds for the agent on another host to forward its last reports. The host may be unplugged.
_AGENT_END_S: Final = 3.0
#: Maximum seconds to hold back the beginning of an mpirun message before printing it incomplete.
_HOLD_S: Final = 0.2
#: Signals that Open MPI's mpirun passes on to its ranks. Other signals would end it.
_FOR_MPIRUN: Final = frozenset(
    {*launcher_signals.ENDING_SIGNALS, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP, signal.SIGCONT, signal.SIGALRM}
) - {signal.SIGQUIT}


def run(
    mpirun: str,
    command: list[str],
    environ: Mapping[str, str],
    ends: JobEnds,
    *,
    token: str = "",
    agents: Sequence[Agent] = (),
) -> int:
    """Run mpirun, and return the job's exit code when it has ended.

    Args:
        ends: Record of how the ranks have ended, which decides the exit code.
        token: Token that marks the reports of guardian processes.
        agents: Connections to the agents on the hosts of the ranks; empty if the ranks are on this host.
    """
    with local_host.shared_file_variables() as variables:
        code = _Job(mpirun, command, {**environ, **variables}, ends, token or secrets.token_hex(8), agents).run()
        if code == 0:
            local_host.report_lone_ranks(variables, ends.ranks)
        return code


class _Job:
    """Runs one mpirun and supervises its ranks. The arguments are those of :func:`run`."""

    def __init__(
        self,
        mpirun: str,
        command: list[str],
        environ: Mapping[str, str],
        ends: JobEnds,
        token: str,
        agents: Sequence[Agent],
    ) -> None:
        self._pid = os.getpid()
        self._ends = ends
        self._output_filter = MpirunOutputFilter(guardians.report_mark(token))
        self._agents = agents
        is_on_this_host = not agents
        self._events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        # the outer guardian of each running rank
        self._guarded: dict[int, guardians.ProcessHandle | _RemoteGuardian] = {}
        self._guarded_count = 0
        self._missed: set[int] = set()  # signals that arrived before all ranks had a guardian
        self._stop_at: float | None = None
        self._is_stopping = False
        self._have_joined = threading.Event()
        self._has_silent_hosts = False
        self._at_terminal = {0} if is_on_this_host and os.isatty(0) else set()
        self._reports, self._reported = os.pipe()
        self._environ = {
            **environ,
            guardians.REPORTS_VARIABLE: f"{self._pid} {self._reported} {token}",
            **(self._inputs() if is_on_this_host else {}),
        }
        self._mpirun, self._command = mpirun, command

    def _inputs(self) -> dict[str, str]:
        """Return the environment variables by which rank 0 opens the standard input of this process."""
        if not guardians.ARE_SUPPORTED:
            return {}
        path = f"/proc/{self._pid}/fd/0"
        if os.isatty(0):
            path = f"{rank_program.TERMINAL} {''.join(str(number) for number in (1, 2) if os.isatty(number))}"
        return {rank_program.STDIN_VARIABLE: path, **guardians.foreground_variables()}

    def run(self) -> int:
        """Run the job, and return its exit code."""
        if signal.SIGUSR1 in signal.sigpending():  # SIGUSR1 has been blocked since this process started
            signal.sigwait({signal.SIGUSR1})
            local_host.print_launcher_line("no rank has started yet")
        self._unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, ()) - {signal.SIGUSR1}
        put = self._events.put
        try:
            with launcher_signals.signals_received(lambda number, is_key: put(("signal", (number, is_key)))):
                self._process = self._start()
                self._start_threads()
                return self._supervise()
        finally:
            self._have_joined.set()  # stops the probing of hosts
            for guardian in self._guarded.values():
                guardian.close()

    def _start_threads(self) -> None:
        assert self._process.stderr is not None
        self._copier = threading.Thread(target=self._copy, args=(self._process.stderr,), daemon=True)
        self._copier.start()
        self._reader = threading.Thread(target=self._read_reports, args=(self._reports,), daemon=True)
        self._reader.start()
        for agent in self._agents:
            agent.on_report = functools.partial(self._put_report, agent=agent)
        threading.Thread(target=self._await_end, daemon=True).start()
        if self._ends.survives and self._agents:
            threading.Thread(target=self._probe_hosts, daemon=True).start()

    def _start(self) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                self._command,
                executable=self._mpirun,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                process_group=0,
                preexec_fn=self._begin,
            )
        except OSError as error:
            os.close(self._reports)
            os.close(self._reported)
            raise local_host.LaunchError(f"{self._mpirun} cannot be started: {error}") from error

    def _begin(self) -> None:
        guardians.die_with_parent(self._pid)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # mpirun has no handler for it while it starts
        signal.pthread_sigmask(signal.SIG_SETMASK, self._unblocked)

    def _supervise(self) -> int:
        while True:
            match self._next_event():
                case ("signal", (number, is_key)):
                    self._handle_signal(number, is_key=is_key)
                case ("report", report):
                    self._handle_report(*report)
                case ("late", _):
                    self._end_late()
                case ("silent", hosts):
                    self._end_without(hosts)
                case ("ended", _):
                    break
        remote_hosts.close_all(self._agents, _AGENT_END_S)
        self._copier.join(_LAST_WORDS_S)  # ssh to an unplugged host may keep the pipe open
        os.close(self._reported)
        self._reader.join(_LAST_WORDS_S)  # guardians may keep the pipe open after mpirun was killed
        while not self._events.empty():
            what, report = self._events.get()
            if what == "report":
                self._handle_report(*report)
        return self._conclude()

    def _conclude(self) -> int:
        if self._has_silent_hosts:
            return 1
        code, lines = self._ends.conclude(self._process.returncode)
        if code == 0 and self._output_filter.has_lost_host:
            code, lines = 1, [self._output_filter.explain_lost_host()]
        connection = self._output_filter.explain_connection("" if self._ends.survives else self._ends.survival_option)
        if code and connection is not None and self._ends.asked_to_end is None and self._ends.cause is None:
            lines = [connection]
        for line in lines:
            local_host.print_launcher_line(line)
        if code and not lines and self._ends.cause is None and self._ends.asked_to_end is None:
            for blame in self._output_filter.blames:
                local_host.write_output(2, blame)
        return code

    def _next_event(self) -> tuple[str, Any]:
        try:
            return self._events.get(timeout=None if self._stop_at is None else max(0, self._stop_at - time.monotonic()))
        except queue.Empty:
            return ("late", None)

    def _handle_signal(self, number: int, *, is_key: bool) -> None:
        is_ending = number in launcher_signals.ENDING_SIGNALS
        if is_ending and self._ends.asked_to_end is None:
            self._ends.asked_to_end = number
            self._stop_at = time.monotonic() + launcher_signals.STOP_S
        if is_ending and self._guarded_count < self._ends.ranks:  # only mpirun can end ranks without a guardian
            self._process.send_signal(number if number in _FOR_MPIRUN else signal.SIGTERM)
            return
        self._ends.passed_on.add(number)
        if self._agents and self._guarded_count < self._ends.ranks:
            if number in _FOR_MPIRUN:
                self._process.send_signal(number)
        elif number == launcher_signals.STORY_SIGNAL and not self._guarded_count:
            local_host.print_launcher_line("no rank has started yet")
        else:
            for rank, guardian in self._guarded.items():
                if not (is_key and rank in self._at_terminal):
                    guardian.send(number)
            if self._guarded_count < self._ends.ranks:
                self._missed.add(number)
        launcher_signals.stop_with_ranks(number)

    def _handle_report(self, rank: int, what: str, number: int, agent: Agent | None) -> None:
        if what == "guarded":
            self._guarded_count += 1
            with contextlib.suppress(ProcessLookupError):  # raised if mpirun has just ended
                guardian = guardians.ProcessHandle(number) if agent is None else _RemoteGuardian(agent, rank)
                self._guarded[rank] = guardian
                for missed in sorted(self._missed):
                    guardian.send(missed)
            return
        if what == "joined":
            self._have_joined.set()
            return
        if rank in self._guarded:
            self._guarded.pop(rank).close()
        line = self._ends.note(rank, number)
        if line is not None:
            local_host.print_launcher_line(line)

    def _end_late(self) -> None:
        """End mpirun, which ends the remaining ranks. The first call terminates mpirun, and the second kills it."""
        if self._is_stopping:
            self._process.kill()
            self._stop_at = None
        else:
            self._is_stopping = True
            self._process.terminate()
            self._stop_at = time.monotonic() + _MPIRUN_STOP_S

    def _end_without(self, hosts: Sequence[str]) -> None:
        """End the job because ``hosts`` are silent, unless all ranks are connected. mpirun would wait for minutes."""
        if self._have_joined.is_set() or self._ends.asked_to_end is not None:
            return
        self._has_silent_hosts = True
        have, run = ("has", "it runs") if len(hosts) == 1 else ("have", "they run")
        local_host.print_launcher_line(
            f"{', '.join(hosts)} {have} not answered for {remote_hosts.SILENCE_S:g} s, and not all ranks are connected "
            f"yet, so the job ends: check that {run} and that the network is up"
        )
        self._end_late()

    # -- threads -------------------------------------------------------------------------------------------------------

    def _await_end(self) -> None:
        self._process.wait()
        self._events.put(("ended", None))

    def _probe_hosts(self) -> None:
        for silent in remote_hosts.silences(self._agents, self._have_joined):
            if silent:
                self._events.put(("silent", [agent.host.name for agent in silent]))
                return

    def _read_reports(self, pipe: int) -> None:
        with open(pipe, "rb", buffering=0) as file:
            rest = b""
            while data := file.read(1 << 16):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._put_report(line.decode())

    def _put_report(self, line: str, agent: Agent | None = None) -> None:
        rank, what, number = line.split()
        self._events.put(("report", (int(rank), what, int(number), agent)))

    def _copy(self, pipe: IO[bytes]) -> None:
        """Copy mpirun's standard error, except reports from guardian processes and messages that blame a rank."""
        with pipe:
            data = b"more"
            while data:
                if self._output_filter.has_held_bytes and not select.select([pipe], [], [], _HOLD_S)[0]:
                    local_host.write_output(2, self._output_filter.flush())
                    continue
                data = os.read(pipe.fileno(), 1 << 16)
                local_host.write_output(2, self._output_filter.feed(data) if data else self._output_filter.flush())
                for report in self._output_filter.reports:
                    self._put_report(report.decode())
                self._output_filter.reports.clear()


class _RemoteGuardian:
    """Sends signals to the outer guardian process of a rank on another host, through the agent on that host."""

    def __init__(self, agent: Agent, rank: int) -> None:
        self._agent = agent
        self._rank = rank

    def send(self, number: int) -> None:
        self._agent.send(guardian=self._rank, number=number)

    def close(self) -> None:
        """Do nothing. The agent owns the guardian's descriptor."""
