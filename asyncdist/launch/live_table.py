"""Runs a job as a child process, and shows a live table of its ranks: ``asyncdist run --live``."""

from __future__ import annotations

import codecs
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, Final

from asyncdist import environment, local_host
from asyncdist.launch import guardians
from asyncdist.launchers import launcher_signals
from asyncdist.live import last_counters, top
from asyncdist.story import sockets
from asyncdist.story.finding import job_of_process
from asyncdist.trust.private_folders import TemporaryFolder

if TYPE_CHECKING:
    from rich.console import Console

#: Maximum length of a printed line, in characters. Longer lines are printed in parts.
_LINE_LENGTH_MAX: Final = 1 << 16


def run(words: Sequence[str]) -> int:
    """Run the job, show a live table of its ranks on a terminal, and return the job's exit code.

    The job's output to the terminal is printed above the table. ``words`` are the arguments of ``asyncdist run``,
    without ``--live``.
    """
    # -P prevents imports of modules from the working directory, in which other users may have put files.
    command = [sys.executable, "-P", "-m", "asyncdist", "run", *words]
    shown = [number for number in (1, 2) if os.isatty(number)]
    if not shown or not top.has_rich():
        why = top.NEEDS_RICH if shown else "the output is not a terminal"
        local_host.print_launcher_line(f"--live: {why}; the job runs without the table")
        os.execv(sys.executable, command)
    own_pid = os.getpid()

    def prepare() -> None:
        guardians.die_with_parent(own_pid)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*launcher_signals.PASSED_ON_SIGNALS, signal.SIGCHLD})
    with _counters_folder() as folder:
        child = subprocess.Popen(
            command,
            env={**environment.VARIABLES, environment.LAST_COUNTERS_VARIABLE: folder},
            stdin=subprocess.DEVNULL,  # a prompt of the child could not be shown
            stdout=subprocess.PIPE if 1 in shown else None,
            stderr=subprocess.PIPE if 2 in shown else None,
            preexec_fn=prepare,
        )
        _show(child, folder, is_on_stderr=1 not in shown)
        code = child.wait()
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _counters_folder() -> Iterator[str]:
    """Make a folder for the ranks' final counters, and remove it when the context ends. Yield "" if this fails."""
    folder: TemporaryFolder | None = None
    with contextlib.suppress(OSError):  # raised if there is no writable folder for temporary files
        folder = TemporaryFolder.make(tempfile.gettempdir(), "asyncdist-live-", secrets.token_hex(8))
    try:
        yield "" if folder is None else folder.path
    finally:
        if folder is not None:
            folder.remove()


def _show(child: subprocess.Popen[bytes], folder: str, *, is_on_stderr: bool) -> None:
    """Show the table until ``child``, the process that runs the job, has ended and all its output has been shown.

    Ranks write their final counters to ``folder``.
    """
    from rich.console import Console
    from rich.live import Live

    top.allow_all_text()
    console, view = Console(stderr=is_on_stderr), top.JobView()
    live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
    is_gone = False  # whether the terminal was closed, which usually also ends the child
    own: str | None = None  # name of the child's job, once it is known

    def draw(act: Callable[[], object]) -> None:
        nonlocal is_gone
        try:
            act()
        except OSError:
            is_gone = True

    draw(live.start)
    pipes = [pipe for pipe in (child.stdout, child.stderr) if pipe is not None]
    copiers = [threading.Thread(target=_copy, args=(pipe, console), daemon=True) for pipe in pipes]
    for copier in copiers:
        copier.start()
    try:
        while child.poll() is None:
            with contextlib.suppress(OSError):  # there may be too many open files
                found = sockets.jobs()
                own = job_of_process(child.pid, found) or own
                if own in found and not is_gone:
                    view.ask(found[own])
                    draw(lambda: live.update(view.drawn(console), refresh=True))
            came = signal.sigtimedwait({*launcher_signals.PASSED_ON_SIGNALS, signal.SIGCHLD}, top.PERIOD_S)
            if came is not None and came.si_signo != signal.SIGCHLD:
                if not launcher_signals.has_reached_foreground(came):
                    child.send_signal(came.si_signo)
                launcher_signals.stop_with_ranks(came.si_signo)
        if not is_gone:
            final = last_counters.collect(folder, own) if folder else []
            draw(lambda: live.update(view.drawn_at_end(console, final), refresh=True))
        for copier in copiers:
            copier.join(1.0)  # a process that outlives the child may hold the pipe open
    finally:
        draw(live.stop)


def _copy(pipe: IO[bytes], console: Console) -> None:
    """Print each line from the pipe above the table. Of a progress bar, print only the last state.

    The pipe is read to the end even if the terminal is closed, because the ranks would block on a full pipe.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    begun = ""
    with pipe:
        while data := os.read(pipe.fileno(), 1 << 16):
            *lines, begun = (begun + decoder.decode(data)).split("\n")
            begun = begun[max(0, begun.rfind("\r", 0, -1)) :]
            if len(begun) > _LINE_LENGTH_MAX:
                lines, begun = [*lines, begun], ""
            if lines:
                _print("\n".join(map(_last_state, lines)), console)
    if begun:
        _print(_last_state(begun), console)


def _last_state(line: str) -> str:
    """Return the text after a line's last carriage return, because rich before version 15 would print the rest, too."""
    return line.rstrip("\r").rpartition("\r")[2]


def _print(text: str, console: Console) -> None:
    from rich.text import Text

    with contextlib.suppress(OSError, ValueError):  # the terminal or the stream was closed
        console.print(Text.from_ansi(text), soft_wrap=True)
