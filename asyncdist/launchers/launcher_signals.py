"""Defines which signals launchers pass on to their ranks, and receives these signals."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

#: Signals that end the job.
ENDING_SIGNALS: Final = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
#: Maximum seconds for ranks to end after a signal that stops them. Ranks that still run are then killed.
STOP_S: Final = 10.0
#: Seconds after the first ending signal during which ranks treat further signals as copies of it.
COPIES_S: Final = 1.0
#: Seconds that a signal may take to reach a rank from the launcher.
_DELIVERY_S: Final = 0.1
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


def signal_name(number: int) -> str:
    """Return the name of a signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@contextlib.contextmanager
def signals_received(put: Callable[[int, bool], object]) -> Iterator[None]:
    """Call ``put`` for each signal of :data:`PASSED_ON_SIGNALS` that arrives during the ``with`` block.

    Signals that are already ignored, such as SIGHUP under ``nohup``, remain ignored. On Linux, the signals are blocked
    in this thread and in processes that it starts, until they reset their signal mask.

    The terminal signals this process once for each Ctrl-C. A second Ctrl-C is therefore not a copy of the first signal.
    ``put`` is called for it only after ``COPIES_S`` seconds, when the ranks no longer treat it as a copy.

    Args:
        put: Function called with the signal's number and a bool: whether the kernel has also sent the signal to the
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
                signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: C code has set it
        return
    is_over = threading.Event()

    def receive() -> None:
        copies_until_s: float | None = None
        while True:
            came = signal.sigwaitinfo(numbers)
            if is_over.is_set() and came.si_pid == os.getpid():
                return
            number, is_key = came.si_signo, has_reached_foreground(came)
            if copies_until_s is None and number in ENDING_SIGNALS:
                copies_until_s = time.monotonic() + COPIES_S + _DELIVERY_S
            elif number == signal.SIGINT and is_key and (left_s := (copies_until_s or 0) - time.monotonic()) > 0:
                later = threading.Timer(left_s, put, (number, is_key))
                later.daemon = True
                later.start()
                continue
            put(number, is_key)

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


def is_in_foreground() -> bool:
    """Return whether this process is in the foreground of its terminal, which sends signals to such processes."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:  # it has no terminal
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:  # the terminal was closed
        return False
    finally:
        os.close(terminal)


def stop_with_ranks(number: int) -> None:
    """Suspend this process if ``number`` is SIGTSTP, so that the shell notices that the ranks are suspended."""
    if number == signal.SIGTSTP:
        os.kill(os.getpid(), signal.SIGSTOP)


@contextlib.contextmanager
def heeding_children() -> Iterator[None]:
    """During the ``with`` block, let this process read its children's exit codes, even if it ignores SIGCHLD.

    If SIGCHLD is ignored, only the main thread can change this, so other threads raise RuntimeError.
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
