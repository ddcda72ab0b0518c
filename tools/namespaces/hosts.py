"""Runs a command on a login node of a simulated cluster with N hosts, all made of Linux namespaces of this machine.

    tools/hosts 2 asyncdist run --hosts host1:2,host2:2 train.py
    tools/hosts 3 --rate 200 mpirun --host host1,host2,host3 python train.py

The hosts are called host1 to hostN. Each host has a network card eth0 on a common bridge, an address listed in
/etc/hosts, its own processes and its own shared memory. All hosts see this machine's files, as on a cluster with a
shared file system; only temporary files are separate. The command runs on the login node, where ``ssh HOST COMMAND``
works, as do programs that start their processes by ssh. No other network exists.

Linux, root, iproute2 and util-linux are required. If one of them is missing, or namespaces (or tbf, for ``--rate``)
are not available, one line says so and the exit code is 77.

No process outlives this program, even if it is killed: all processes are in one PID namespace, whose first process the
kernel kills together with this one. The namespaces, cards and bridge vanish with their processes. Signals to this
process are forwarded to the command.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NoReturn

#: Exit code if hosts cannot be made on this machine. Test harnesses read 77 as "skipped".
UNAVAILABLE: Final = 77
COUNT_MAX: Final = 64
NETWORK: Final = "10.213.77"
_LOGIN_NUMBER: Final = 254
#: Directory on which this program briefly mounts its own file system; it exists on every Linux.
_SCRATCH: Final = Path("/mnt")
#: Directory of the job's temporary files, on the login node and all hosts. It differs by job, since Open MPI names its
#: files by host name and process number, which are the same on the login nodes of two jobs.
_TEMPORARY: Final = Path("/media")
_PROGRAMS: Final = {"ip": "iproute2", "nsenter": "util-linux", "mount": "util-linux"}
#: State of a bridge's port that forwards packets, and the seconds that ports may take to reach it.
_FORWARDING: Final = "3\n"
_BRIDGE_S: Final = 10.0
# unshare(2), prctl(2)
_NEWNS, _NEWUTS, _NEWIPC, _NEWPID, _NEWNET = 0x0002_0000, 0x0400_0000, 0x0800_0000, 0x2000_0000, 0x4000_0000
_PR_SET_PDEATHSIG: Final = 1
_C: Final = ctypes.CDLL(None, use_errno=True)


class UnavailableError(Exception):
    """Raised if hosts cannot be made on this machine; the message is one line that says why."""


def main() -> NoReturn:
    """Run the command line."""
    options = _parse()
    try:
        check(rate=options.rate is not None)
        sys.exit(run(options.hosts, options.rate, options.command))
    except UnavailableError as error:
        print(f"tools/hosts: {error}", file=sys.stderr)
        sys.exit(UNAVAILABLE)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools/hosts",
        usage="tools/hosts N [--rate MBIT] COMMAND...",
        description="Runs a command on a login node of a cluster with N hosts, all made of namespaces of this machine.",
        epilog=f"Exit code {UNAVAILABLE}: hosts cannot be made here. Else it is the command's.",
        allow_abbrev=False,
    )
    parser.add_argument("hosts", type=_between(1, COUNT_MAX), metavar="N", help="the number of hosts, host1 to hostN")
    parser.add_argument(
        "--rate", type=_between(1, 100_000), metavar="MBIT", help="Mbit/s of each host's card, each way (default: any)"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="runs on the login node")
    words = sys.argv[1:]
    if words[1:2] == ["--rate"]:  # argparse would take every argument after N for the command's
        words = [*words[1:3], words[0], *words[3:]]
    options = parser.parse_args(words)
    if not options.command:
        parser.error("a command is needed: tools/hosts 2 asyncdist run --hosts host1:2,host2:2 train.py")
    if shutil.which(options.command[0], path=_path()) is None:
        parser.error(f"there is no program {options.command[0]!r}")
    return options


def _between(low: int, high: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and low <= int(text) <= high):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")
        return int(text)

    return convert


def check(*, rate: bool = False) -> None:
    """Raise UnavailableError if hosts (or, if ``rate`` is true, hosts with limited cards) cannot be made here."""
    if not sys.platform.startswith("linux"):
        raise UnavailableError(f"hosts are made of Linux's namespaces; this is {sys.platform}")
    programs = _PROGRAMS | ({"tc": "iproute2"} if rate else {})
    missing = {package: name for name, package in programs.items() if shutil.which(name) is None}
    if missing:
        raise UnavailableError("; ".join(f"there is no {name}: install {p}" for p, name in missing.items()))
    if os.geteuid() != 0:
        raise UnavailableError("only root may make namespaces")


def _path() -> str:
    """Return the PATH of the command. It begins with the interpreter's programs and this folder's ssh."""
    own = [str(Path(__file__).resolve().parent), str(Path(sys.executable).parent)]
    return os.pathsep.join([*own, os.environ.get("PATH", os.defpath)])


def run(count: int, rate: int | None, command: Sequence[str]) -> int:
    """Run a command on the login node of a cluster of ``count`` hosts, and return its exit code.

    Raises:
        UnavailableError: Hosts cannot be made on this machine.
    """
    signals = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    told, tell = os.pipe()
    login = _fork_into(functools.partial(_login, count, rate, command, tell, signals))
    os.close(tell)
    code = _wait(login)
    with open(told) as file:
        problem = file.read()
    if problem:
        raise UnavailableError(problem)
    return code


def _fork_into(body: Callable[[], int]) -> int:
    """Start ``body`` in a process that is the first of a PID namespace and dies with this one; return its pid."""
    own = os.open("/proc/self/ns/pid", os.O_RDONLY)
    alive, held = os.pipe()
    try:
        _call("unshare", _NEWPID)  # affects only children: this process stays in its namespace
        pid = os.fork()
        if pid == 0:
            _be(alive, held, body)
        _call("setns", own, _NEWPID)
    except OSError as error:
        raise UnavailableError(f"namespaces are not available here: {error.strerror}") from error
    finally:
        os.close(own)
        os.close(alive)  # the other end stays open as long as this process lives
    return pid


def _be(alive: int, held: int, body: Callable[[], int]) -> NoReturn:
    code = 1
    try:
        os.close(held)
        _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL)
        os.set_blocking(alive, False)
        with contextlib.suppress(BlockingIOError):
            os.read(alive, 1)
            os._exit(1)  # the parent has ended, too early for the kernel to kill this process with it
        code = body()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _call(name: str, *arguments: int) -> None:
    """Make a system call through the C library's function; raise OSError if it fails."""
    if getattr(_C, name)(*map(int, arguments)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


# -- the login node and the hosts, each process 1 of its own namespaces -----------------------------------------------


def _login(count: int, rate: int | None, command: Sequence[str], tell: int, signals: set[int | signal.Signals]) -> int:
    """Make the hosts, run the command, and return its exit code. Write to ``tell`` why hosts cannot be made."""
    try:
        _prepare("login", count)
        hosts = _make_hosts(count, rate)
    except UnavailableError as error:
        os.write(tell, str(error).encode())
        return UNAVAILABLE
    finally:
        os.close(tell)
    names = " ".join(f"host{number}={pid}" for number, pid in hosts.items())
    environ = {**os.environ, "PATH": _path(), "ASYNCDIST_HOSTS": names, "TMPDIR": str(_TEMPORARY)}
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, signals)
        try:
            os.execvpe(command[0], list(command), environ)
        except OSError as error:
            print(f"tools/hosts: {command[0]}: {error.strerror}", file=sys.stderr)
            os._exit(127)
    return _wait(child)


def _prepare(name: str, count: int) -> None:
    """Enter new namespaces of all other kinds; set the host name, /proc, the names of all hosts, and loopback."""
    try:
        _call("unshare", _NEWNET | _NEWNS | _NEWUTS | _NEWIPC)
    except OSError as error:
        raise UnavailableError(f"namespaces are not available here: {error.strerror}") from error
    _make("mount", "--make-rprivate", "/")
    _make("mount", "-t", "proc", "proc", "/proc")
    _make("mount", "-t", "sysfs", "sysfs", "/sys")
    _make("mount", "-t", "tmpfs", "shm", "/dev/shm")
    if name == "login":  # the hosts copy the login node's mounts
        numbers = {f"host{number}": number for number in range(1, count + 1)} | {name: _LOGIN_NUMBER}
        lines = ["127.0.0.1 localhost", *(f"{NETWORK}.{number} {host}" for host, number in numbers.items())]
        _make("mount", "-t", "tmpfs", "hosts", str(_SCRATCH))
        (_SCRATCH / "hosts").write_text("".join(f"{line}\n" for line in lines))
        _make("mount", "--bind", str(_SCRATCH / "hosts"), "/etc/hosts")
        _make("umount", "--lazy", str(_SCRATCH))
        _make("mount", "-t", "tmpfs", "tmp", str(_TEMPORARY))
    encoded = name.encode()
    if _C.sethostname(encoded, len(encoded)) != 0:
        raise UnavailableError("the hosts cannot be given names")
    _make("ip", "link", "set", "lo", "up")


def _make_hosts(count: int, rate: int | None) -> dict[int, int]:
    """Start the hosts, connect them to a bridge, and return the pid of each host's first process."""
    _make("ip", "link", "add", "bridge", "type", "bridge")
    _make("ip", "addr", "add", f"{NETWORK}.{_LOGIN_NUMBER}/24", "dev", "bridge")
    _make("ip", "link", "set", "bridge", "up")
    hosts = {}
    for number in range(1, count + 1):
        ready, tell = os.pipe()
        pid = _fork_into(functools.partial(_host, number, count, tell))
        os.close(tell)
        with open(ready) as file:
            problem = file.read()
        if problem != "ready":
            raise UnavailableError(problem or f"host{number} did not start")
        port = f"port{number}"
        _make("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        _make("ip", "link", "set", port, "master", "bridge", "up")
        inside = ("nsenter", "--target", str(pid), "--net")
        _make(*inside, "ip", "addr", "add", f"{NETWORK}.{number}/24", "dev", "eth0")
        _make(*inside, "ip", "link", "set", "eth0", "up")
        if rate is not None:
            bucket = ("root", "tbf", "rate", f"{rate}mbit", "burst", "32kb", "latency", "50ms")
            _make("tc", "qdisc", "add", "dev", port, *bucket)
            _make(*inside, "tc", "qdisc", "add", "dev", "eth0", *bucket)
        hosts[number] = pid
    _await_bridge(count)
    return hosts


def _await_bridge(count: int) -> None:
    """Wait until the bridge forwards packets: up to a second passes until the kernel sees both ends of a link up."""
    states = [Path(f"/sys/class/net/port{number}/brport/state") for number in range(1, count + 1)]
    links = [Path("/sys/class/net/bridge/operstate"), *(path.parents[1] / "operstate" for path in states)]
    deadline = time.monotonic() + _BRIDGE_S
    while {path.read_text() for path in states} != {_FORWARDING} or {path.read_text() for path in links} != {"up\n"}:
        if time.monotonic() > deadline:
            raise UnavailableError(f"hosts cannot be made here: the bridge passes nothing on within {_BRIDGE_S:g} s")
        time.sleep(0.01)


def _host(number: int, count: int, tell: int) -> int:
    """Act as the first process of a host, which reaps the other processes, until the login node has ended."""
    try:
        _prepare(f"host{number}", count)
        os.write(tell, b"ready")
    except UnavailableError as error:
        os.write(tell, str(error).encode())
    os.close(tell)
    return _wait(None)


def _make(*command: str) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        words = " ".join(ended.stderr.split()) or f"exit code {ended.returncode}"
        raise UnavailableError(f"hosts cannot be made here: {' '.join(command)}: {words}")


def _wait(child: int | None) -> int:
    """Reap processes and forward signals to ``child`` until it has ended; return its exit code.

    A terminal also signals the child directly. Only the process outside the PID namespace signals its first process.
    """
    while True:
        came = signal.sigwaitinfo(signal.valid_signals())
        if came.si_signo != signal.SIGCHLD:
            if child is not None and came.si_code <= 0:  # a code above 0 means that the kernel sent the signal
                os.kill(child, came.si_signo)
            continue
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == child:
                    code = os.waitstatus_to_exitcode(ended[1])
                    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    main()
