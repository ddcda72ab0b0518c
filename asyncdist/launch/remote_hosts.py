"""Reaches other hosts by ssh, finds out what is missing there, and starts ranks on them.

On each host one ssh runs :mod:`asyncdist.launch.host_agent`, with the interpreter and in the directory of this process:
hosts of a job have the same files in the same places. All hosts are asked before a rank is started, so what is wrong is
one error, and nothing has to be stopped. When this process ends, in any way, so does each ssh, and with it all that the
agent has started.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, Final

from asyncdist import local_host
from asyncdist.launch import host_agent
from asyncdist.wording import ranks_in_words

#: A login that would ask for a password, or whether a host is known, fails instead: nobody could answer in time.
SSH: Final = "ssh -o BatchMode=yes -o ConnectTimeout=10"
#: How long hosts may take to say what they have.
HELLO_S: Final = 30.0
#: How long an ssh may take to end when its agent is told to.
_CLOSE_S: Final = 15.0
#: Variables that tell of a host, a login or a terminal begin so, and do not travel.
_HOST_BOUND: Final = (
    "HOSTNAME",
    "SSH_",
    "DISPLAY",
    "XAUTHORITY",
    "XDG_",
    "DBUS_",
    "TERM",
    "PWD",
    "OLDPWD",
    "SHLVL",
    "_",
)
#: The exit codes with which the shell of a host says what is not there, and the texts for them.
_MISSING: Final = {
    91: "there is no directory {folder}: start in one that all hosts share, or that is the same on all",
    92: "there is no interpreter {python}: install this environment in the same place on all hosts",
    93: "there is no asyncdist at {agent}: install it in the same place on all hosts",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Host:
    """Names a host and the number of ranks that it takes.

    Attributes:
        name: as ssh knows it, ``user@`` included.
        slots: ranks.
    """

    name: str
    slots: int

    @property
    def address(self) -> str:
        """Return the name that other hosts know it by."""
        return self.name.rpartition("@")[2]


def parse_hosts(text: str) -> list[Host]:
    """Return the hosts of ``--hosts a:4,b:4``; a name without a number has one slot.

    Raises:
        local_host.LaunchError: it is no such list.
    """
    hosts: list[Host] = []
    for word in text.split(","):
        name, colon, number = word.partition(":")
        is_number = number.isascii() and number.isdecimal() and int(number) > 0
        if not name or name.startswith("-") or set(name) & set(" \t\"'\\;&|$") or (colon and not is_number):
            raise local_host.LaunchError(
                f"--hosts {text!r}: {word!r} is no host with a number of ranks; allowed is NAME:RANKS, as in a:4,b:4"
            )
        if name in [host.name for host in hosts]:
            raise local_host.LaunchError(f"--hosts {text!r}: {name!r} is named twice")
        hosts.append(Host(name, int(number) if colon else 1))
    return hosts


def place_ranks(hosts: Sequence[Host], ranks: int | None) -> list[Host]:
    """Return the hosts that so many ranks are on, each with its number of them; hosts are filled in their order.

    Raises:
        local_host.LaunchError: the hosts have too few slots.
    """
    slots = sum(host.slots for host in hosts)
    left = slots if ranks is None else ranks
    if left > slots:
        raise local_host.LaunchError(
            f"-n {ranks}: {', '.join(f'{host.name}:{host.slots}' for host in hosts)} have {slots} slots, "
            f"{left - slots} too few: give more hosts, or more ranks to some, as in {hosts[0].name}:"
            f"{hosts[0].slots + left - slots}"
        )
    placed = []
    for host in hosts:
        count = min(host.slots, left)
        left -= count
        if count:
            placed.append(Host(host.name, count))
    return placed


def split_ssh(command: str) -> list[str]:
    """Return the words of ``--ssh``.

    Raises:
        local_host.LaunchError: it names no program, or one that is not there.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise local_host.LaunchError(f"--ssh {command!r}: {error}") from error
    if not words or shutil.which(words[0]) is None:
        lacking = f"there is no program {words[0]!r}" if words else "no program is named"
        raise local_host.LaunchError(
            f"--ssh {command!r}: {lacking}; allowed is a command that takes a host and a command line, as ssh does"
        )
    return words


def travelling(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what ranks on other hosts get of an environment: all but what tells of this host, as srun does it."""
    return {name: text for name, text in environ.items() if not name.startswith(_HOST_BOUND) and name.isidentifier()}


class RemoteRank:
    """The process of a rank on another host, seen from here.

    Args:
        agent: of its host.
        rank: its rank.
        ended: called, in a thread, when it has ended.

    Attributes:
        returncode: how it has ended, as :mod:`subprocess` says it; None while it runs.
    """

    def __init__(self, agent: Agent, rank: int, ended: Callable[[], object]) -> None:
        self._agent = agent
        self._rank = rank
        self._ended = ended
        self.returncode: int | None = None

    def send_signal(self, number: int, /) -> None:
        """Send it a signal, if it runs."""
        self._agent.say(signal=self._rank, number=int(number))

    def end(self) -> None:
        """End it, if it has not ended, and all that it has started."""
        if self.returncode is None:
            self._agent.say(end=self._rank)

    def note_end(self, returncode: int) -> None:
        """Take in how it has ended."""
        self.returncode = returncode
        self._ended()


class Agent:
    """Speaks with the agent of a host, and passes on what the ranks there print.

    Args:
        host: the host.
        ssh: the words of the command that reaches it.
        script: what its ranks will run.
        needs: paths of programs that must be there.
        reports: Token of a job whose guardians report there; "" for a job without.

    Attributes:
        on_report: Is given each of these reports, in a thread.
        host: the host.
        cores: that its ranks may use; known when ``check`` has returned.
        port: one that nobody listens at there; likewise.
        heard_at: Time of the agent's last line, of :func:`time.monotonic`.
    """

    def __init__(self, host: Host, ssh: Sequence[str], script: str, needs: Sequence[str], reports: str = "") -> None:
        self.on_report: Callable[[str], object] = lambda _: None
        self.host = host
        self.cores = self.port = 0
        self.heard_at = time.monotonic()
        self._token = secrets.token_hex(8)
        self._ranks: dict[int, RemoteRank] = {}
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._is_ready = False
        self._last_words = ""
        command = [*ssh, host.name, _remote_command(self._token)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                process_group=0,  # Ctrl-C in a terminal is for this process, which passes it on
            )
        except OSError as error:
            raise local_host.LaunchError(f"{command[0]} cannot be started: {error}") from error
        assert self._process.stdout is not None and self._process.stderr is not None
        self._readers = [
            threading.Thread(
                target=self._reading, args=(self._read, self._process.stdout), name=f"{host.name} stdout", daemon=True
            ),
            threading.Thread(
                target=self._reading, args=(self._warn, self._process.stderr), name=f"{host.name} stderr", daemon=True
            ),
        ]
        for reader in self._readers:
            reader.start()
        self.say(script=script, count=host.slots, needs=list(needs), reports=reports)

    def check(self, deadline: float) -> str | None:
        """Wait for what the host has to say; return what is wrong with it."""
        try:
            answer = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return f"no answer within {HELLO_S:g} s"
        if "problem" in answer:
            return str(answer["problem"])
        if "hello" not in answer:
            return self._explain_silence()
        for name, version in host_agent.versions().items():
            if answer["hello"].get(name) != version:
                there = answer["hello"].get(name)
                return f"{name} is {there} there and {version} here: all hosts need the same version"
        self.cores, self.port = answer["cores"], answer["port"]
        self._is_ready = True
        return None

    def _explain_silence(self) -> str:
        code = self._process.wait()
        self._readers[1].join(_CLOSE_S)
        if code in _MISSING:
            return _MISSING[code].format(folder=os.getcwd(), python=sys.executable, agent=host_agent.PROGRAM)
        return f"cannot be reached: {self._last_words or 'no reason given'} (exit code {code})"

    def start(
        self, rank: int, command: Sequence[str], variables: Mapping[str, str], ended: Callable[[], object]
    ) -> RemoteRank:
        """Start a rank on the host; ``ended`` is called when it has ended, in a thread."""
        self._ranks[rank] = started = RemoteRank(self, rank, ended)
        self.say(start=rank, command=list(command), environ=dict(variables))
        return started

    def say(self, **news: Any) -> None:
        """Tell the agent something; one that is not there any more hears nothing."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(json.dumps(news).encode() + b"\n")
            self._process.stdin.flush()

    def close(self, patience_s: float = _CLOSE_S) -> None:
        """End all that still runs on the host, and the connection. May be called again.

        Args:
            patience_s: Seconds that the agent may take to end.
        """
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
        signal.pthread_sigmask(signal.SIG_BLOCK, local_host.PASSED_ON_SIGNALS)  # another thread waits for these
        with pipe:
            read(pipe)

    def _read(self, stdout: IO[bytes]) -> None:
        """Take in the agent's lines, and pass on those of the ranks."""
        mark, rest = host_agent.mark(self._token), b""
        while data := stdout.read1(1 << 16):  # type: ignore[attr-defined]
            rest += data
            while (place := rest.find(mark)) >= 0 and (end := rest.find(b"\n", place)) >= 0:
                _write(1, rest[:place])
                self._hear(json.loads(rest[place + len(mark) : end]))
                rest = rest[end + 1 :]
            kept = rest.rfind(mark[:1])  # perhaps the beginning of a line of the agent
            if kept < 0 or (len(rest) - kept > len(mark) and not rest.startswith(mark, kept)):
                kept = len(rest)
            if self._is_ready:  # before that it is a greeting of the host
                _write(1, rest[:kept])
            rest = rest[kept:]
        self._lose()

    def _hear(self, news: dict[str, Any]) -> None:
        self.heard_at = time.monotonic()
        if "ended" in news:
            self._ranks.pop(news["ended"]).note_end(news["code"])
        elif "report" in news:
            self.on_report(news["report"])
        elif "alive" not in news:
            self._answers.put(news)

    def _lose(self) -> None:
        """Let what waits for the host know that nothing more comes from it."""
        self._answers.put({})
        if self._ranks:
            code = self._process.wait()
            self._readers[1].join(_CLOSE_S)
            why = f"; {self._last_words}" * bool(self._last_words)
            print(
                f"asyncdist run: the connection to {self.host.name} has ended (exit code {code}{why}), and with it "
                f"{ranks_in_words(self._ranks)}",
                file=sys.stderr,
                flush=True,
            )
        for rank in sorted(self._ranks):
            self._ranks.pop(rank).note_end(255)

    def _warn(self, stderr: IO[bytes]) -> None:
        """Pass on what is written to standard error; before the agent is there it may be a reason."""
        for line in stderr:
            if self._is_ready:
                _write(2, line)
            self._last_words = " ".join(line.decode(errors="replace").split()) or self._last_words


def _write(descriptor: int, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):  # what reads it has gone, as with the output of any process
        while data:
            data = data[os.write(descriptor, data) :]


def _remote_command(token: str) -> str:
    """Return the command line that starts the agent in any shell."""
    folder, python, agent = map(shlex.quote, (os.getcwd(), sys.executable, host_agent.PROGRAM))
    steps = f"cd {folder} || exit 91; test -x {python} || exit 92; test -r {agent} || exit 93"
    return f"exec sh -c {shlex.quote(f'{steps}; exec {python} {agent} {token}')}"


@contextlib.contextmanager
def connected(
    hosts: Sequence[Host], ssh: Sequence[str], script: str, *, needs: Sequence[str] = (), reports: str = ""
) -> Iterator[list[Agent]]:
    """Connect to all hosts, until the context ends.

    Args:
        hosts, ssh, script, needs, reports: See :class:`Agent`.

    Raises:
        local_host.LaunchError: some cannot run this; the text names all of them, and why.
    """
    agents: list[Agent] = []
    try:
        deadline = time.monotonic() + HELLO_S
        agents += [Agent(host, ssh, script, needs, reports) for host in hosts]
        problems: dict[str, list[str]] = {}
        for agent in agents:
            problem = agent.check(deadline)
            if problem is not None:
                problems.setdefault(problem, []).append(agent.host.name)
        if problems:
            raise local_host.LaunchError("; ".join(f"{', '.join(names)}: {what}" for what, names in problems.items()))
        yield agents
    finally:
        closing = [threading.Thread(target=agent.close) for agent in agents]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
