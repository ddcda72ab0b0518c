"""Runs the user's script: every rank of ``asyncdist run`` runs this file.

:mod:`asyncdist.launch.mpirun` and :mod:`asyncdist.launch.local_ranks` start it. It imports only the standard library,
and nothing of asyncdist, since a file that is run as a program belongs to no package. For the same reason it reads
PMI_FD, and the variables of a job that continues when ranks die, directly from the environment.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import fcntl
import importlib.util
import io
import json
import os
import signal
import stat
import sys
import termios
import time
import types
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, TextIO

#: This file: run as a program, it runs the script that is its first argument.
PROGRAM: Final = os.path.abspath(__file__)
#: The package ``protocols`` of this distribution.
PROTOCOLS: Final = Path(__file__).resolve().parents[1] / "protocols" / "__init__.py"
#: Descriptor on which a rank reports its state to its guardian, in jobs that continue when ranks die.
STARTED_VARIABLE: Final = "ASYNCDIST_STARTED_FD"
#: The states: it opens a world, whose other ranks would wait for it; it is in that world, and they notice its death;
#: it has left the world, as the others know; its end must end the job.
OPENS_WORLD: Final = b"0"
IN_WORLD: Final = b"1"
LEFT_WORLD: Final = b"2"
ENDS_JOB: Final = b"3"
#: Name of the script's module, if ranks run a module (``-m``).
MODULE_VARIABLE: Final = "ASYNCDIST_MODULE"
#: 1 if each line that a rank prints must begin with its rank.
PREFIX_VARIABLE: Final = "ASYNCDIST_PREFIX"
#: Process whose output is the job's, if its mpirun passes no output on while it stops the ranks.
LAUNCHER_VARIABLE: Final = "ASYNCDIST_LAUNCHER"
#: Standard input of rank 0: the path of its launcher's, or :data:`INHERITED` if rank 0 has inherited it.
STDIN_VARIABLE: Final = "ASYNCDIST_STDIN"
INHERITED: Final = "inherited"
#: The path of the session's terminal; digits after a blank are descriptors of rank 0 that must be the terminal too.
TERMINAL: Final = "/dev/tty"
_RANK_VARIABLES: Final = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
#: File in which ranks of this host record the errors that they have reported: the launcher's pid and a descriptor.
TOLD_VARIABLE: Final = "ASYNCDIST_TOLD"
#: Message that a rank without input adds when a debugger ends.
_NO_INPUT: Final = (
    "This rank has an empty standard input, which a debugger cannot read. asyncdist run gives its own to rank 0 of a "
    "job on this host: if world.rank == 0: breakpoint(). For any rank of a recorded job there is asyncdist replay DIR "
    "--rank RANK --pdb"
)
_guardian: int | None = None
#: 1 in the ranks of a job that continues when ranks die: Open MPI's ``mpirun --with-ft ulfm`` sets it.
SURVIVAL_VARIABLE: Final = "OMPI_MCA_mpi_ft_enable"
#: Seconds that a rank waits before an abort, since MPICH's mpirun aborts a job without reading its last output.
_LAST_WORDS_S: Final = 0.2
#: Seconds that a rank that ends the job waits for the launcher to read its output.
_READERS_S: Final = 2.0


def rank_command(script: str, arguments: Sequence[str]) -> list[str]:
    """Return the command line of a rank: this file becomes the script.

    Every mpirun takes an argument ``:`` as the start of another program's command line. So an argument that consists of
    colons is passed with one more colon.
    """
    escaped = [word + ":" if set(word) == {":"} else word for word in (script, *arguments)]
    return [sys.executable, PROGRAM, *escaped]


def find_syntax_error(script: str) -> str | None:
    """Return why no rank could compile a script, for a launcher; None if the script is valid."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ranks warn
        try:
            compile(Path(script).read_bytes(), script, "exec", dont_inherit=True)
        except SyntaxError as error:
            line = f"line {error.lineno}: " if error.lineno else ""
            return f"{line}{error.msg}{f': {error.text.strip()}' if error.text else ''}"
        except ValueError as error:  # null bytes, before Python 3.12
            return str(error)
    return None


def _unescape(words: Sequence[str]) -> list[str]:
    return [word[1:] if set(word) == {":"} else word for word in words]


def run_script(script: str, arguments: Sequence[str]) -> None:
    """Run this process as ``python script arguments``, with what a rank needs besides.

    - Standard input is that of the launcher on rank 0, where both are on one host, and empty on the others. It does not
      come through mpirun: Open MPI never closes the one it forwards, MPICH leaves it open on all ranks but the first,
      and a read there hangs.
    - Output leaves line by line: mpirun hands Python a pipe, which would hold it back; unbuffered output would mix the
      words of several ranks in a line.
    - A failure ends the job (see ``_end_job``). Of ranks that fail alike, one prints the traceback (see ``_ToldOnce``).
    """
    _open_input()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    _prefix_output()
    sys.excepthook = _ToldOnce(os.environ.pop(TOLD_VARIABLE, ""))
    heed_story_requests()
    sys.argv = [script, *arguments]
    module = os.environ.pop(MODULE_VARIABLE, "")
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if module else os.path.dirname(os.path.realpath(script))
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=script, __builtins__=__builtins__, __cached__=None)
    sys.modules["__main__"] = main
    explain_shadowing()
    if module:
        spec = importlib.util.find_spec(module)
        main.__dict__.update(__spec__=spec, __package__=spec.parent if spec else "")
    ending = _Ending()
    process_id = os.getpid()
    try:
        exec(compile(Path(script).read_bytes(), script, "exec", dont_inherit=True), main.__dict__)
    except SystemExit as error:
        code = error.code
        if code is not None and not isinstance(code, int):  # sys.exit("what went wrong")
            print(code, file=sys.stderr)
        code = ending.code = exit_code(code)
        if code and os.getpid() == process_id:  # a child that the script has forked ends nothing but itself
            _leave_world(error)
            _end_job(code)
        sys.exit(code)
    except BaseException as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # without this frame
        told = _leave_world(error) if os.getpid() == process_id else error
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C has ended a peer first, and this rank reports that
            _tell_error(told)
        code = ending.code = 130 if isinstance(error, KeyboardInterrupt) else 1
        if os.getpid() == process_id:
            _end_job(code)
        sys.exit(code)


def _open_input() -> None:
    """Open the standard input of this rank; if that is a terminal, open the output there too.

    Output that comes through mpirun would show a prompt, which ends without a newline, too late.
    """
    source = os.environ.pop(STDIN_VARIABLE, "")  # it is not for programs that this rank starts
    if source == INHERITED:
        return
    is_first = next((os.environ[name] for name in _RANK_VARIABLES if os.environ.get(name)), "") == "0"
    source, _, others = (source if is_first else os.devnull).partition(" ")
    for path in (source or os.devnull, os.devnull):
        with contextlib.suppress(OSError):  # a socket, which has no path, or the launcher has ended
            opened = os.open(path, (os.O_RDWR if others else os.O_RDONLY) | os.O_NOCTTY)
            for number in (0, *map(int, others)):
                os.dup2(opened, number)
            os.close(opened)
            return


class _ToldOnce:
    """Prints the traceback of an error that ends a script, once for all ranks of this host; a hook of :mod:`sys`.

    The error of a rank that has opened a world is known to the other ranks, and does not come here. This is for errors
    before that, such as a failed import, which the ranks make alike. A rank that fails like an earlier one prints a
    line. The lock on the file keeps that line below the traceback.

    Args:
        told: The value of ``TOLD_VARIABLE``; "" if the rank is to print the error as Python does.
    """

    def __init__(self, told: str) -> None:
        pid, _, descriptor = told.partition(" ")
        self._path = f"/proc/{pid}/fd/{descriptor}" if pid.isdecimal() and int(pid) in ancestors() else ""
        self._process_id = os.getpid()

    def __call__(self, kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        explain_import(error)
        explain_input(error)
        with contextlib.suppress(OSError):  # the launcher has just ended
            if self._path and os.getpid() == self._process_id:  # no child that the rank has forked
                with open(self._path, "r+b", buffering=0) as file:
                    fcntl.flock(file, fcntl.LOCK_EX)
                    self._tell(file, kind, error, trace)
                return
        sys.__excepthook__(kind, error, trace)

    @staticmethod
    def _tell(
        file: io.FileIO, kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
    ) -> None:
        with contextlib.redirect_stderr(io.StringIO()) as shown:
            sys.__excepthook__(kind, error, trace)
        text = shown.getvalue()
        told: dict[str, str] = json.loads(file.read() or b"{}")
        teller = told.setdefault(text, _own_name())
        if teller != _own_name():
            first_line = str(error).partition("\n")[0]
            sys.stderr.write(
                f"asyncdist: {_own_name()} failed in the same way as {teller}: {kind.__name__}: {first_line}\n"
            )
            return
        sys.stderr.write(f"asyncdist: {teller} failed:\n{text}")
        sys.stderr.flush()
        file.seek(0)
        file.write(json.dumps(told).encode())


def _tell_error(error: BaseException) -> None:
    """Let Python print an error; of a Ctrl-C that met an import, which every rank would print, print one line."""
    trace, line, is_import = error.__traceback__, "", False
    while trace is not None and isinstance(error, KeyboardInterrupt):
        code = trace.tb_frame.f_code
        is_modules = code.co_name == "<module>" and trace.tb_frame.f_globals.get("__name__") != "__main__"
        is_import = is_import or is_modules or code.co_filename.startswith("<frozen importlib")
        if not is_import:
            line = f"{code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    if is_import:
        sys.stderr.write(f"asyncdist: {_own_name()} was interrupted in an import, in {line}\n")
    else:
        sys.excepthook(type(error), error, error.__traceback__)


def _own_name() -> str:
    return next((f"rank {os.environ[name]}" for name in _RANK_VARIABLES if os.environ.get(name)), "this process")


def _leave_world(error: BaseException) -> BaseException:
    """Report the error to the other ranks if the process has an open world; return the error to print."""
    module = sys.modules.get("asyncdist.blocking.process_world")
    return error if module is None else module.leave_with(error)


def heed_story_requests() -> None:
    """Let SIGUSR1, which asks a rank what it does, be no end of one that still imports or has no world any more.

    Not in a job of Slurm, where Lightning saves and requeues at that signal if nobody else has a handler for it. What
    starts a rank blocks the signal, so one that comes earlier is heeded here.
    """
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL and "SLURM_JOB_ID" not in os.environ:
        signal.signal(signal.SIGUSR1, tell_no_world)
        atexit.register(_heed_no_more)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


def _heed_no_more() -> None:
    """Ignore SIGUSR1 if it is handled, since the exiting interpreter restores the default action, which ends it."""
    if callable(signal.getsignal(signal.SIGUSR1)):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def tell_no_world(_number: int, frame: types.FrameType | None) -> None:
    """Print the current line of this process, as a handler of SIGUSR1."""
    while frame is not None and frame.f_back is not None and _is_passed_over(frame):
        frame = frame.f_back
    has_begun = frame is not None and frame.f_code.co_filename != __file__
    where = f"; it stands in {frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None and has_begun else ""
    with contextlib.suppress(Exception):  # a request for a report must not raise
        sys.stderr.write(f"asyncdist: {_own_name()} has no open world yet, or none any more{where}\n")
        sys.stderr.flush()


def _is_passed_over(frame: types.FrameType) -> bool:
    return frame.f_code.co_filename.startswith("<frozen") or frame.f_globals.get("__name__") == "signal"


def _prefix_output() -> None:
    """Prefix each line that this rank prints with its rank, if that was requested."""
    if os.environ.get(PREFIX_VARIABLE) == "1":
        rank = next((os.environ[name] for name in _RANK_VARIABLES if os.environ.get(name)), "?")
        sys.stdout, sys.stderr = (_Prefixed(stream, f"[{rank}] ") for stream in (sys.stdout, sys.stderr))


class _Prefixed(io.TextIOBase):
    """Writes to a stream, with a prefix before each line.

    Args:
        stream: Stream to write to.
        prefix: String before each line.
    """

    def __init__(self, stream: TextIO, prefix: str) -> None:
        self._stream = stream
        self._prefix = prefix
        self._is_in_line = False

    def write(self, text: str) -> int:
        """Write text, which may be part of a line."""
        for line in text.splitlines(keepends=True):
            self._stream.write(line if self._is_in_line else self._prefix + line)
            self._is_in_line = not line.endswith(("\n", "\r"))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()

    def fileno(self) -> int:
        """Return the stream's descriptor."""
        return self._stream.fileno()

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        return self._stream.isatty()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The stream's encoding."""
        return self._stream.encoding


class _Ending:
    """Ends the process without MPI_Finalize in a job that goes on when ranks die: after a death that may hang.

    A program that has imported mpi4py by itself has asked for it. What is registered first is called last: when the
    threads have ended, and all other functions of :mod:`atexit` have been called.

    Attributes:
        code: Exit code of the process.
    """

    def __init__(self) -> None:
        self.code = 0
        if os.environ.get(SURVIVAL_VARIABLE) == "1":
            atexit.register(self._end)

    def _end(self) -> None:
        for file in filter(None, (sys.stdout, sys.stderr)):
            with contextlib.suppress(OSError, ValueError):  # its reader is gone
                file.flush()
        os._exit(self.code)


def write_past_mpirun() -> None:
    """Let what this rank prints from now on go straight to the files of its launcher, where it lives on this host.

    Open MPI's mpirun reads nothing more of its ranks once it stops them. What the program has sent elsewhere stays so.
    """
    launcher = os.environ.get(LAUNCHER_VARIABLE, "")
    if not launcher.isdecimal() or int(launcher) not in ancestors():
        return
    for number in (1, 2):
        with contextlib.suppress(OSError):  # it is closed, or a socket, or nobody reads there any more
            if os.path.samestat(os.fstat(number), os.stat(f"/proc/{os.getppid()}/fd/{number}")):
                flags = os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_NONBLOCK
                opened = os.open(f"/proc/{launcher}/fd/{number}", flags)
                os.set_blocking(opened, True)
                os.dup2(opened, number)
                os.close(opened)


def ancestors() -> list[int]:
    """Return the pids of this process's parent, of the parent's parent, and so on."""
    found = [os.getppid()]
    with contextlib.suppress(OSError, ValueError):
        while found[-1] > 1:
            _, _, behind_name = Path(f"/proc/{found[-1]}/stat").read_bytes().rpartition(b")")  # which may hold anything
            found.append(int(behind_name.split()[1]))
    return found


def tell_guardian(news: bytes) -> bool:
    """Tell the guardian of this rank one of the words above; return whether one listens."""
    global _guardian
    descriptor = os.environ.pop(STARTED_VARIABLE, "")  # it is not for programs that this rank starts
    if descriptor.isdecimal():
        _guardian = int(descriptor)
    if _guardian is not None:
        with contextlib.suppress(OSError):  # the guardian has been killed, and this rank is about to be
            os.set_inheritable(_guardian, False)
            os.write(_guardian, news)
    return _guardian is not None


def exit_code(code: object) -> int:
    """Return the exit code of ``sys.exit(code)``, but 1 where the system, which keeps 8 bits, takes for success."""
    if not isinstance(code, int):
        return 0 if code is None else 1
    return code & 0xFF or int(code != 0)


def _end_job(code: int) -> None:
    """End the whole job when a rank fails, where nothing else does that; return where something does.

    A bare script that fails while MPI is up sits in MPI_Finalize, and the others wait for it for ever: abort. Under
    ``asyncdist.run`` the supervisor has already done what is right. Before MPI is up, Open MPI's mpirun ends a job by
    the first non-zero exit code, but MPICH's does so only when it is told over its own wire (PMI-1, command abort).
    """
    mpi = sys.modules.get("mpi4py.MPI")
    is_mpi_up = mpi is not None and mpi.Is_initialized()
    is_supervised = "asyncdist.transports.mpi" in sys.modules
    if mpi is not None and is_mpi_up and not mpi.Is_finalized() and not is_supervised:
        if mpi.COMM_WORLD.Get_size() == 1:  # a library has asked whether there is MPI, and nobody would hear
            return
        _await_readers()
        mpi.COMM_WORLD.Abort(code)
    elif not is_mpi_up:
        abort_over_pmi(code)


def abort_over_pmi(code: int) -> None:
    """Ask MPICH's mpirun to end the job, where it has started this rank; do nothing under other launchers.

    It may miss the end of a rank that leaves without MPI_Finalize (2 of 430 such ends), and waits then for the others.
    """
    descriptor = os.environ.get("PMI_FD", "")
    if descriptor.isdecimal():
        _await_readers()
        time.sleep(_LAST_WORDS_S)
        with contextlib.suppress(OSError):  # mpirun has closed it: it ends the job already
            os.write(int(descriptor), b"cmd=abort exitcode=%d\n" % code)


def _await_readers() -> None:
    """Wait, at most for a while, until the launcher has read this rank's output, which an abort may discard."""
    sys.stdout.flush()
    deadline = time.monotonic() + _READERS_S
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):  # it is closed
            if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                unread = array.array("i", [1])
                while unread[0] and time.monotonic() < deadline:
                    fcntl.ioctl(descriptor, termios.FIONREAD, unread)
                    time.sleep(0.001)


def explain_shadowing() -> None:
    """Make an ImportError of ``protocols`` report the module that hides the package, or has overwritten it.

    Nothing is checked before an import fails, since a user who needs no policy may want to hide the package.
    """
    if find_shadowing() is None:
        return
    previous = sys.excepthook

    def explain(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        explain_import(error)
        previous(kind, error, trace)

    sys.excepthook = explain


def explain_import(error: BaseException) -> None:
    """Add to an ImportError of ``protocols`` the module that hides the package, or has overwritten it."""
    if isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "protocols":
        note = find_shadowing()
        if note is not None and note not in _notes_of(error):
            error.add_note(note)


def explain_input(error: BaseException) -> None:
    """Add to the error of a debugger or a read why there is no input, if this rank has none."""
    is_end = isinstance(error, EOFError) or (type(error).__module__, type(error).__name__) == ("bdb", "BdbQuit")
    with contextlib.suppress(OSError):  # it is closed
        if is_end and os.path.samestat(os.fstat(0), os.stat(os.devnull)) and _NO_INPUT not in _notes_of(error):
            error.add_note(_NO_INPUT)


def _notes_of(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def find_shadowing() -> str | None:
    """Return a message on how the package ``protocols`` is hidden or overwritten, with the remedy; otherwise None."""
    found = sys.modules.get("protocols")
    if found is not None and found is sys.modules.get("asyncdist.protocols"):
        return None
    try:
        spec = importlib.util.find_spec("protocols")
    except ValueError:  # a module without a spec, made by hand
        return None
    if spec is None or spec.origin is None or Path(spec.origin).resolve() == PROTOCOLS:
        return find_overwriting()
    return (
        f"asyncdist's package 'protocols' is hidden by {spec.origin}: rename that, and the import finds {PROTOCOLS}; "
        "or import from asyncdist.protocols, which is the same package"
    )


def find_overwriting() -> str | None:
    """Return a message on the distribution that has overwritten ``protocols``, with the remedy; otherwise None."""
    is_there = PROTOCOLS.is_file()
    if is_there and b"asyncdist.protocols" in PROTOCOLS.read_bytes():
        return None
    from importlib.metadata import distributions  # it takes 19 ms

    others = [
        f"{each.metadata['Name']} {each.version}"
        for each in distributions()
        if Path(str(each.locate_file("protocols/__init__.py"))).resolve() == PROTOCOLS
        and any(str(file) == "protocols/__init__.py" for file in each.files or ())
        and each.metadata["Name"] != "asyncdist"
    ]
    by = f" by the distribution {' and '.join(others)}" if others else ""
    how = "overwritten" if is_there else "deleted"
    cure = "pip install --force-reinstall --no-deps asyncdist"
    return (
        f"{PROTOCOLS} of asyncdist was {how}{by}: the two cannot be installed together; in an environment without the "
        f"other one, {cure} brings the file back"
        if others
        else f"{PROTOCOLS} of asyncdist was {how}: {cure} brings it back"
    )


if __name__ == "__main__":
    script, *arguments = _unescape(sys.argv[1:])
    run_script(script, arguments)
