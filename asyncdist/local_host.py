"""Checks and prepares this host for a job: ports, the loopback interface, memory, files and signals.

The module also defines which signals launchers pass on. It does not import torch, so that ranks start fast.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from asyncdist import rank_program

#: Private memory of one rank and its guardian processes, in bytes.
_RANK_NBYTES: Final = 16 << 20
#: File with Linux's ephemeral port range.
_PORT_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
#: First ephemeral port according to RFC 6335.
_RFC_6335_FIRST: Final = 49152
#: Minimum number of ports below the ephemeral range. If there are fewer, most may be reserved for services.
_PORT_COUNT_MIN: Final = 16384
#: Listen backlog, equal to the backlog of torch's store. The kernel may lower it.
_BACKLOG: Final = 4096
#: Number of random ports to try before giving up.
_DRAW_COUNT: Final = 64
#: Signals that end the job. Ranks still running some seconds after such a signal are killed.
ENDING_SIGNALS: Final = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
#: Signal that requests a report of each rank's state.
STORY_SIGNAL: Final = signal.SIGUSR1
#: Signals that a launcher does not pass on, because they cannot be caught or concern only the launcher itself.
_KEPT_SIGNALS: Final = frozenset(
    int(getattr(signal, name, 0))
    for name in (
        *("SIGKILL", "SIGSTOP", "SIGCHLD", "SIGPIPE", "SIGTTIN", "SIGTTOU"),
        *("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGSYS", "SIGTRAP", "SIGEMT", "SIGRTMIN"),
    )
)
#: Signals that a launcher passes on to its ranks, because a script may handle any of them.
PASSED_ON_SIGNALS: Final = frozenset(int(number) for number in signal.valid_signals()) - _KEPT_SIGNALS


class LaunchError(Exception):
    """Raised if ``asyncdist run`` cannot start the job. The message is one line for the user."""


def check_script(script: str) -> None:
    """Raise ``LaunchError`` unless ``script`` is a file with a Python program."""
    path = Path(script)
    if not path.exists():
        try:
            place = f"looked in {Path.cwd()}"
        except FileNotFoundError:
            place = "the current directory has been deleted"
        raise LaunchError(f"the script {script!r} does not exist ({place})")
    if path.is_dir():
        raise LaunchError(f"the script must be a file, but {script!r} is a directory")
    if not os.access(path, os.R_OK):
        raise LaunchError(f"the script {script!r} cannot be read by this user; change its permissions")
    error = rank_program.find_syntax_error(script)
    if error is not None:
        raise LaunchError(f"the script {script!r} is not valid Python: {error}")


@contextlib.contextmanager
def told_variables() -> Iterator[dict[str, str]]:
    """Yield the variables by which this host's ranks share a record of printed errors, to print each error once."""
    if not hasattr(os, "memfd_create"):
        yield {}
        return
    told = os.memfd_create("asyncdist-told")
    try:
        yield {rank_program.TOLD_VARIABLE: f"{os.getpid()} {told}"}
    finally:
        os.close(told)


def check_ranks(ranks: int) -> None:
    """Raise ``LaunchError`` if starting ``ranks`` ranks would exhaust the host's memory."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    most = memory // _RANK_NBYTES
    if ranks > most:
        raise LaunchError(
            f"the number of ranks must be <= {most} on this host, got {ranks}: each rank takes {_RANK_NBYTES >> 20} "
            f"MiB before it imports anything, and the host has {memory >> 30} GiB"
        )


def check_loopback() -> None:
    """Raise ``LaunchError`` if 127.0.0.1 does not connect ranks on this host, as in a bare network namespace."""
    with socket.socket() as listener:
        try:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            socket.create_connection(listener.getsockname(), timeout=10).close()
        except OSError as error:
            raise LaunchError(
                f"ranks of this host cannot reach each other at 127.0.0.1 ({error.strerror}), because the loopback "
                "interface is down: ip link set lo up"
            ) from error


def find_free_port() -> int:
    """Return a TCP port on which no process listens, below the kernel's ephemeral port range."""
    import secrets  # not at the top of the module, because it imports hashlib

    lowest = _lowest_ephemeral_port()
    for _ in range(_DRAW_COUNT if lowest >= _PORT_COUNT_MIN else 0):
        port = lowest - 1 - secrets.randbelow(lowest // 2)
        with contextlib.suppress(OSError):
            probe_port(port)
            return port
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _lowest_ephemeral_port() -> int:
    """Return the kernel's lowest ephemeral port, or RFC 6335's if the kernel's is unknown."""
    try:
        return int(_PORT_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _RFC_6335_FIRST


def probe_port(port: int) -> None:
    """Raise OSError unless a torch.distributed store can listen on this port of this host."""
    has_both = socket.has_dualstack_ipv6()
    with socket.socket(socket.AF_INET6 if has_both else socket.AF_INET) as probe:
        if has_both:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignore connections in TIME_WAIT
        probe.bind(("", port))


@contextlib.contextmanager
def heeding_children() -> Iterator[None]:
    """Let this process read its children's exit codes, even if it was started with SIGCHLD ignored.

    If SIGCHLD is ignored, raises RuntimeError outside the main thread, which alone can change the signal's handler.
    """
    if signal.getsignal(signal.SIGCHLD) is not signal.SIG_IGN:
        yield
        return
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "SIGCHLD must not be ignored in this process, because the exit codes of its children would be lost: call "
            "signal.signal(signal.SIGCHLD, signal.SIG_DFL) in the main thread first"
        )
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)


@contextlib.contextmanager
def signals_received(put: Callable[[int, bool], object]) -> Iterator[None]:
    """Call ``put`` for each signal of :data:`PASSED_ON_SIGNALS` that arrives during the ``with`` block.

    Signals that are already ignored, such as SIGHUP under ``nohup``, remain ignored. On Linux, this thread blocks the
    signals. So do processes that it starts, until they reset their signal mask.

    Args:
        put: Function called with the signal's number, and with whether the kernel has also sent the signal to the
            terminal's foreground processes. It runs in another thread, or in a signal handler if the system has no
            ``sigwaitinfo``.
    """
    numbers = {number for number in PASSED_ON_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN}
    if not hasattr(signal, "sigwaitinfo"):
        previous = {number: signal.signal(number, lambda caught, _: put(caught, False)) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        return
    is_over = threading.Event()

    def receive() -> None:
        while True:
            came = signal.sigwaitinfo(numbers)
            if is_over.is_set() and came.si_pid == os.getpid():
                return
            put(came.si_signo, has_reached_foreground(came))

    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    receiver = threading.Thread(target=receive, name="signals", daemon=True)
    receiver.start()
    try:
        yield
    finally:
        is_over.set()
        assert receiver.ident is not None, "it has been started"
        signal.pthread_kill(receiver.ident, min(numbers))
        receiver.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def has_reached_foreground(came: signal.struct_siginfo) -> bool:
    """Return whether the kernel has sent a signal to all foreground processes of this process's terminal.

    The kernel does so for keys such as Ctrl-C. When the terminal closes, however, the kernel signals only the session
    leader. This process is the leader if no shell started it, as with ``ssh -t HOST asyncdist run``.
    """
    is_from_kernel = came.si_code > 0
    return is_from_kernel and not (came.si_signo == signal.SIGHUP and os.getsid(0) == os.getpid())


def stop_with_ranks(number: int) -> None:
    """Stop this process if ``number`` is SIGTSTP, which has stopped the ranks, so that the shell notices."""
    if number == signal.SIGTSTP:
        os.kill(os.getpid(), signal.SIGSTOP)


def signal_name(number: int) -> str:
    """Return the name of a signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def open_standard_files() -> None:
    """Open /dev/null for each closed standard file. Otherwise the next opened file would get its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # open returns the lowest free descriptor
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))


def check_address(name: str, address: str) -> None:
    """Raise ValueError, which names the setting ``name``, unless ``address`` resolves to a host."""
    try:
        socket.getaddrinfo(address, None)
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"{name} must be a name that all hosts know, or an address, got {address!r} ({error})"
        ) from error


def is_loopback(address: str) -> bool:
    """Return whether an address belongs to the loopback interface. Does not resolve names."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def listen_at(address: str, port: int) -> socket.socket | None:
    """Return a socket that listens only on this address; None for a name, another host's address or a used port."""
    host = "127.0.0.1" if address == "localhost" else address
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    except ValueError:
        return None
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError:  # the port is in use, or the address is not an interface's, as behind a gateway
        listener.close()
        return None
    return listener


def available_cores() -> int:
    """Return the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):  # macOS lacks this function
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def new_run_id() -> str:
    """Return a new job name for TORCHELASTIC_RUN_ID."""
    import secrets

    return f"asyncdist-{secrets.token_hex(8)}"
