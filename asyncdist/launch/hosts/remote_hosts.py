"""Connects to other hosts by ssh, checks them, and starts ranks on them.

On each host, ssh runs :mod:`asyncdist.launch.hosts.host_agent` with this process's interpreter and working directory,
so all hosts of a job need the same files at the same paths. All hosts are checked before the first rank starts, so one
error reports all problems. When this process ends, the ssh processes and all processes started by agents end.

A host may freeze or be unplugged, and ssh notices this only after many minutes. The launcher therefore probes the
agents. If a host is silent or its connection ends, a job on torch does not end, because the ranks on the other hosts
notice the loss and continue. When only ranks on silent hosts are left, the launcher stops waiting for them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, Final

from asyncdist import environment, local_host
from asyncdist.launch import guardians
from asyncdist.launch.hosts import host_agent
from asyncdist.launchers import launcher_signals
from asyncdist.trust.mpi_folders import MpiFolders
from asyncdist.wording import ranks_in_words

#: Default command to reach a host. It fails instead of asking for a password or about an unknown host's key.
SSH: Final = "ssh -o BatchMode=yes -o ConnectTimeout=10"
#: Maximum seconds for hosts to respond to the check.
HELLO_S: Final = 30.0
#: Seconds between probes of an agent.
PROBE_S: Final = 5.0
#: Seconds without any answer to a probe after which a host counts as silent.
SILENCE_S: Final = 30.0
#: Maximum seconds for ssh to end after the agent was asked to end.
_CLOSE_S: Final = 15.0
#: Exit code of ranks whose host is lost. ssh also uses this code for a failed connection.
_LOST_CODE: Final = 255
#: Environment variables that describe a host, a login or a terminal, and are not passed to other hosts.
_HOST_BOUND: Final = (
    *("HOSTNAME", "DISPLAY", "XAUTHORITY", "PWD", "OLDPWD", "SHLVL", "_"),
    *("TERM", "TERMCAP", "TERMINFO", "TERMINFO_DIRS"),
)
#: Prefixes of further such variables.
_HOST_BOUND_PREFIXES: Final = ("SSH_", "XDG_", "DBUS_", "TERM_")
#: Messages for the exit codes with which a host's shell reports a missing file.
_MISSING: Final = {
    91: "the directory {folder} does not exist: start in a directory that exists on all hosts",
    92: "the interpreter {python} does not exist: install this environment in the same place on all hosts",
    93: "asyncdist is not installed at {agent}: install it in the same place on all hosts",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Host:
    """A host for ``slots`` ranks. Its ``name`` may include ``user@``, as for ssh."""

    name: str
    slots: int

    @property
    def address(self) -> str:
        """Name or address at which other hosts reach this host."""
        return self.name.rpartition("@")[2]


def parse_hosts(text: str) -> list[Host]:
    """Parse a list of hosts like ``a:4,b:4``. Without a number, a host has one slot. Raise LaunchError if invalid."""
    hosts: list[Host] = []
    for word in text.split(","):
        name, colon, number = word.partition(":")
        is_number = number.isascii() and number.isdecimal() and int(number) > 0
        if not name or name.startswith("-") or set(name) & set(" \t\"'\\;&|$") or (colon and not is_number):
            raise local_host.LaunchError(
                f"each entry of --hosts must be NAME:RANKS as in a:4,b:4, got {word!r} in {text!r}"
            )
        if name in [host.name for host in hosts]:
            raise local_host.LaunchError(f"--hosts must name each host once, got {name!r} twice in {text!r}")
        hosts.append(Host(name, int(number) if colon else 1))
    return hosts


def place_ranks(hosts: Sequence[Host], ranks: int | None) -> list[Host]:
    """Distribute ranks over the hosts in order, and return the used hosts. Raise LaunchError if slots are too few."""
    slots = sum(host.slots for host in hosts)
    left = slots if ranks is None else ranks
    if left > slots:
        raise local_host.LaunchError(
            f"-n must be <= {slots}, the number of slots of --hosts "
            f"{','.join(f'{host.name}:{host.slots}' for host in hosts)}, got {ranks}: pass more hosts, or more ranks "
            f"per host, as in {hosts[0].name}:{hosts[0].slots + left - slots}"
        )
    placed = []
    for host in hosts:
        count = min(host.slots, left)
        left -= count
        if count:
            placed.append(Host(host.name, count))
    return placed


def split_ssh(command: str) -> list[str]:
    """Split the value of ``--ssh`` into words, and find the program's path. Raise LaunchError for a missing program."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise local_host.LaunchError(f"--ssh must be a command line, got {command!r}: {error}") from error
    program = environment.find_program(words[0]) if words else None
    if program is None:
        lacking = f"there is no program {words[0]!r}" if words else "no program is named"
        raise local_host.LaunchError(
            f"--ssh must be a command that takes a host and a command line as ssh does, got {command!r}: {lacking}"
        )
    return [program, *words[1:]]


def travelling(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables to pass to ranks on other hosts: all except those that describe this host."""
    bound = {name for name in environ if name in _HOST_BOUND or name.startswith(_HOST_BOUND_PREFIXES)}
    return {name: text for name, text in environ.items() if name not in bound and name.isidentifier()}


class RemoteRank:
    """The process of a rank on another host, with a ``returncode`` as in :mod:`subprocess`.

    Attributes:
        is_lost: Whether the connection to the rank's host ended while the rank was running.
    """

    def __init__(self, agent: Agent, rank: int, ended: Callable[[], object]) -> None:
        self._agent = agent
        self._rank = rank
        self._ended = ended
        self.returncode: int | None = None
        self.is_lost = False

    def send_signal(self, number: int, /) -> None:
        """Send a signal to the rank if it is running."""
        self._agent.send(signal=self._rank, number=int(number))

    def end(self) -> None:
        """Kill the rank and all processes that it has started."""
        if self.returncode is None:
            self._agent.send(end=self._rank)

    def note_end(self, returncode: int) -> None:
        """Record that the process has ended with ``returncode``, and notify the launcher."""
        self.returncode = returncode
        self._ended()

    def note_loss(self) -> None:
        """Record that the connection to the rank's host has ended, and notify the launcher."""
        self.is_lost = True
        self.note_end(_LOST_CODE)


class Agent:
    """Connects to the agent program on a host, which starts ranks there, and prints the ranks' output.

    ``cores``, ``port`` and ``folders`` are known after :meth:`check`.

    Args:
        ssh: Words of the command that reaches the host.
        needs: Paths of programs that must exist on the host.
        reports: Token of a job whose ranks' guardians (supervising processes) send reports; "" if they send none.

    Attributes:
        on_report: Function called, in a thread, with each report from a guardian.
        cores: Number of cores of the host.
        port: Free port on the host.
        folders: Private folders for Open MPI on the host.
    """

    def __init__(self, host: Host, ssh: Sequence[str], script: str, needs: Sequence[str], reports: str = "") -> None:
        self.on_report: Callable[[str], object] = lambda _: None
        self.host = host
        self.cores = self.port = 0
        self.folders = MpiFolders("", "")
        self._unanswered_count = 0  # probes since the agent's last message
        self._printing: set[int] = set()  # descriptors to which a thread is writing the host's output
        self._token = secrets.token_hex(8)
        self._ranks: dict[int, RemoteRank] = {}
        self._is_lost = False
        self._lock = threading.Lock()  # for _is_lost and the additions to _ranks
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._is_ready = False
        self._last_line = ""
        command = [*ssh, host.name, _remote_command(self._token)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                process_group=0,  # Ctrl-C must not reach ssh directly
            )
        except OSError as error:
            raise local_host.LaunchError(f"{command[0]} cannot be started: {error}") from error
        assert self._process.stdout is not None and self._process.stderr is not None
        streams = ((self._read, self._process.stdout, "stdout"), (self._warn, self._process.stderr, "stderr"))
        self._readers = [
            threading.Thread(target=self._reading, args=(read, pipe), name=f"{host.name} {name}", daemon=True)
            for read, pipe, name in streams
        ]
        for reader in self._readers:
            reader.start()
        self.send(script=script, count=host.slots, needs=list(needs), reports=reports)

    def check(self, deadline: float) -> str | None:
        """Wait for the agent's report on the host. Return a problem, or None."""
        try:
            answer = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return f"the host did not answer within {HELLO_S:g} s"
        if "problem" in answer:
            return str(answer["problem"])
        if "hello" not in answer:
            return self._explain_silence()
        for name, version in host_agent.versions().items():
            if answer["hello"].get(name) != version:
                there = answer["hello"].get(name)
                return (
                    f"{name} must be equal on all hosts, but it is {there} there and {version} here; install the same "
                    "version"
                )
        self.cores, self.port, self.folders = answer["cores"], answer["port"], MpiFolders(**answer["folders"])
        self._is_ready = True
        return None

    def _explain_silence(self) -> str:
        code = self._process.wait()
        self._readers[1].join(_CLOSE_S)
        if code in _MISSING:
            return _MISSING[code].format(folder=os.getcwd(), python=sys.executable, agent=host_agent.PROGRAM)
        return f"the host cannot be reached: {self._last_line or 'no reason given'} (exit code {code})"

    def start(
        self, rank: int, command: Sequence[str], variables: Mapping[str, str], ended: Callable[[], object]
    ) -> RemoteRank:
        """Start a rank on the host. Call ``ended``, in a thread, when it has ended, or at once if the host is lost."""
        started = RemoteRank(self, rank, ended)
        with self._lock:
            is_lost = self._is_lost
            if not is_lost:
                self._ranks[rank] = started
        if is_lost:
            self._report_loss([rank])
            started.note_end(_LOST_CODE)  # the other ranks would wait for a rank that has never run
        else:
            self.send(start=rank, command=list(command), environ=dict(variables))
        return started

    def send(self, **message: Any) -> None:
        """Send a command to the agent, unless it has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    @property
    def has_ranks(self) -> bool:
        """Whether ranks are running on the host."""
        return bool(self._ranks)

    @property
    def is_silent(self) -> bool:
        """Whether the agent has not answered the last probes."""
        # The probes are counted, because the clock does not stop while this process is stopped (Ctrl-Z).
        return self._unanswered_count * PROBE_S > SILENCE_S

    def probe(self) -> None:
        """Ask the agent for an answer, unless it is silent: requests without answers would fill the pipe to ssh.

        Nor is it asked while this process's output is blocked (for example, by Ctrl-S in a terminal), because its
        answers cannot be read then.
        """
        if not self.is_silent and not self._printing:
            self._unanswered_count += 1
            self.send(probe=True)

    def give_up(self) -> None:
        """Kill ssh, so that the ranks of a silent host count as lost."""
        if self._process.poll() is None:
            self._last_line = f"the host has not answered for {SILENCE_S:g} s"
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self, patience_s: float) -> None:
        """End the remaining ranks on the host, and close the connection. Kill ssh after ``patience_s`` seconds."""
        assert self._process.stdin is not None
        if self._process.stdin.closed:
            return
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        deadline = time.monotonic() + patience_s
        for reader in self._readers if self._is_ready else ():
            reader.join(max(0.0, deadline - time.monotonic()))
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for reader in self._readers:
            reader.join(_CLOSE_S)

    @staticmethod
    def _reading(read: Callable[[IO[bytes]], None], pipe: IO[bytes]) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, launcher_signals.PASSED_ON_SIGNALS)  # another thread handles signals
        with pipe:
            read(pipe)

    def _read(self, stdout: IO[bytes]) -> None:
        mark, rest = guardians.report_mark(self._token), b""
        while data := stdout.read1(1 << 16):  # type: ignore[attr-defined]
            rest += data
            while (place := rest.find(mark)) >= 0 and (end := rest.find(b"\n", place)) >= 0:
                self._print(1, rest[:place])
                self._handle(json.loads(rest[place + len(mark) : end]))
                rest = rest[end + 1 :]
            kept = rest.rfind(mark[:1])  # the agent's next line may begin here
            if kept < 0 or (len(rest) - kept > len(mark) and not rest.startswith(mark, kept)):
                kept = len(rest)
            if self._is_ready:  # earlier output is the host's login message
                self._print(1, rest[:kept])
            rest = rest[kept:]
        self._lose()

    def _handle(self, message: dict[str, Any]) -> None:
        self._unanswered_count = 0
        if "ended" in message:
            self._ranks.pop(message["ended"]).note_end(message["code"])
        elif "report" in message:
            self.on_report(message["report"])
        elif "alive" not in message:
            self._answers.put(message)

    def _lose(self) -> None:
        """Report the end of the connection to the user, and to all code that is waiting for the host or its ranks."""
        self._answers.put({})
        with self._lock:  # a rank that is started later must also end
            self._is_lost = True
            lost = dict(self._ranks)
        if lost:
            self._report_loss(sorted(lost))
        for rank in sorted(lost):
            lost[rank].note_loss()
        self._ranks.clear()

    def _report_loss(self, ranks: Sequence[int]) -> None:
        code = self._process.wait()
        self._readers[1].join(_CLOSE_S)
        why = f"; {self._last_line}" * bool(self._last_line)
        local_host.print_launcher_line(
            f"the connection to {self.host.name} has ended (exit code {code}{why}), and with it {ranks_in_words(ranks)}"
        )

    def _warn(self, stderr: IO[bytes]) -> None:
        """Print the host's standard error. Until the agent is ready, only store the last line, to explain a failure."""
        for line in stderr:
            if self._is_ready:
                self._print(2, line)
            self._last_line = " ".join(line.decode(errors="replace").split()) or self._last_line

    def _print(self, descriptor: int, data: bytes) -> None:
        self._printing.add(descriptor)
        local_host.write_output(descriptor, data)
        self._printing.discard(descriptor)


def _remote_command(token: str) -> str:
    """Return a command line that starts the agent, whatever shell the user has on the host."""
    folder, python, agent = map(shlex.quote, (os.getcwd(), sys.executable, host_agent.PROGRAM))
    steps = f"cd {folder} || exit 91; test -x {python} || exit 92; test -r {agent} || exit 93"
    return f"exec sh -c {shlex.quote(f'{steps}; exec {python} {agent} {token}')}"


@contextlib.contextmanager
def connected(
    hosts: Sequence[Host], ssh: Sequence[str], script: str, *, needs: Sequence[str] = (), reports: str = ""
) -> Iterator[list[Agent]]:
    """Connect to all hosts, and yield their agents. Raise LaunchError, with all problems, if a host is unusable."""
    agents: list[Agent] = []
    try:
        deadline = time.monotonic() + HELLO_S
        for host in hosts:
            # one by one, so that the earlier agents are closed if a later constructor raises
            agents.append(Agent(host, ssh, script, needs, reports))  # noqa: PERF401
        problems: dict[str, list[str]] = {}
        for agent in agents:
            problem = agent.check(deadline)
            if problem is not None:
                problems.setdefault(problem, []).append(agent.host.name)
        if problems:
            raise local_host.LaunchError("; ".join(f"{', '.join(names)}: {what}" for what, names in problems.items()))
        yield agents
    finally:
        close_all(agents)


def close_all(agents: Sequence[Agent], patience_s: float = _CLOSE_S) -> None:
    """Close the connections to all hosts simultaneously. See :meth:`Agent.close`."""
    closing = [threading.Thread(target=agent.close, args=(patience_s,)) for agent in agents]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join()


def silences(agents: Sequence[Agent], is_over: threading.Event) -> Iterator[list[Agent]]:
    """Probe the hosts' agents until ``is_over`` is set. After each probe, yield the agents that do not respond."""
    while not is_over.wait(PROBE_S):
        for agent in agents:
            agent.probe()
        yield [agent for agent in agents if agent.is_silent]


@contextlib.contextmanager
def giving_up_silent_hosts(agents: Sequence[Agent]) -> Iterator[None]:
    """During the ``with`` block, disconnect from silent hosts once all ranks on the other hosts have ended."""
    is_over = threading.Event()

    def watch() -> None:
        for silent in silences(agents, is_over):
            if silent and all(agent in silent for agent in agents if agent.has_ranks):
                for agent in silent:
                    agent.give_up()

    threading.Thread(target=watch, name="probes", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()
