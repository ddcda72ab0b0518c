"""Runs the user's script in a rank of ``asyncdist run``. Each rank is a process that runs this file.

The file runs as a program, outside any package, so it imports only the standard library. It therefore reads environment
variables itself.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import fcntl
import gc
import importlib.util
import io
import json
import os
import resource
import signal
import stat
import sys
import termios
import time
import types
import warnings
import zipimport
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, TextIO

#: Path of this file. As a program, it runs the script named by its first argument.
PROGRAM: Final = os.path.abspath(__file__)
#: Path of this distribution's package ``protocols``.
PROTOCOLS: Final = Path(__file__).resolve().parents[1] / "protocols" / "__init__.py"
#: Environment variable with the file descriptor to which a rank writes its state, if the job survives lost ranks. The
#: rank's parent process reads the state.
STARTED_VARIABLE: Final = "ASYNCDIST_STARTED_FD"
# States that a rank reports to its parent process:
#: The rank is opening a world, for which the other ranks are waiting.
OPENS_WORLD: Final = b"0"
#: The rank is in a world. The other ranks would notice its death.
IN_WORLD: Final = b"1"
#: The rank has left the world, and the other ranks know it.
LEFT_WORLD: Final = b"2"
#: The job must end when this rank ends.
ENDS_JOB: Final = b"3"
#: Environment variable with the name of the module that ranks run (``-m``) instead of a script.
MODULE_VARIABLE: Final = "ASYNCDIST_MODULE"
#: Environment variable that is 1 if each line of a rank's output must be prefixed with the rank.
PREFIX_VARIABLE: Final = "ASYNCDIST_PREFIX"
#: Environment variable with the launcher's pid, for ranks whose mpirun does not forward output while it stops them.
LAUNCHER_VARIABLE: Final = "ASYNCDIST_LAUNCHER"
#: Environment variable with the path of rank 0's standard input, or :data:`INHERITED` if rank 0 has the launcher's.
STDIN_VARIABLE: Final = "ASYNCDIST_STDIN"
INHERITED: Final = "inherited"
#: Value of :data:`STDIN_VARIABLE` for a terminal, possibly followed by the other descriptors to connect to it.
TERMINAL: Final = "/dev/tty"
_RANK_VARIABLES: Final = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
#: Environment variable with the launcher's pid, and its descriptor of the file of the errors that ranks have printed.
PRINTED_ERRORS_VARIABLE: Final = "ASYNCDIST_TOLD"
#: Environment variable with the launcher's pid, and its descriptor of a file with one byte per rank that has run alone.
LONE_VARIABLE: Final = "ASYNCDIST_ALONE"
#: Arguments with which a script usually prints text and calls sys.exit(0) without opening a world.
_ASKING_FOR_HELP: Final = frozenset({"-h", "--help", "--version"})
#: Note added to a debugger's error if the rank has no input.
_NO_INPUT: Final = (
    "This rank has an empty standard input, so a debugger cannot be used. In a job on one host, rank 0 shares the "
    "standard input of asyncdist run: if world.rank == 0: breakpoint(). To debug any rank of a recorded job, use "
    "asyncdist replay DIR --rank RANK --pdb"
)
_guardian: int | None = None
#: Environment variable that is 1 if the job continues when ranks die; Open MPI's ``mpirun --with-ft ulfm`` sets it.
SURVIVAL_VARIABLE: Final = "OMPI_MCA_mpi_ft_enable"
#: Seconds that a rank waits before it aborts the job, because MPICH's mpirun then stops reading output.
_LAST_WORDS_S: Final = 0.2
#: Maximum seconds to wait for the launcher to read this rank's output before the job is ended.
_READERS_S: Final = 2.0


def rank_command(script: str, arguments: Sequence[str]) -> list[str]:
    """Return the command line of a rank that runs ``script`` through this file.

    mpirun interprets an argument ``:`` as the start of another program's command line. An argument that consists of
    colons therefore gets one more colon, which the rank removes.
    """
    escaped = [word + ":" if set(word) == {":"} else word for word in (script, *arguments)]
    return [sys.executable, PROGRAM, *escaped]


def find_syntax_error(script: str) -> str | None:
    """Return why Python cannot compile a script, such as its syntax error, or None."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the ranks show warnings
        try:
            _compiled(script)
        except SyntaxError as error:
            line = f"line {error.lineno}: " if error.lineno else ""
            return f"{line}{error.msg}{f': {error.text.strip()}' if error.text else ''}"
        except (ValueError, zipimport.ZipImportError) as error:  # null bytes before Python 3.12; no __main__.py
            return str(error)
    return None


def _compiled(script: str) -> types.CodeType:
    """Compile a script, or the module ``__main__`` of a zip archive."""
    archive = _archive(script)
    if archive is not None:
        return archive.get_code("__main__")
    return compile(Path(script).read_bytes(), script, "exec", dont_inherit=True)


def _archive(script: str) -> zipimport.zipimporter | None:
    """Return the importer of a script that is a zip archive, such as a zipapp, or None."""
    try:
        return zipimport.zipimporter(script)
    except zipimport.ZipImportError:
        return None


def run_script(script: str, arguments: Sequence[str]) -> None:
    """Run this process like ``python script arguments``, with a rank's standard files and error handling.

    - Standard input is the launcher's on rank 0 of a job on one host, and empty on other ranks. It does not pass
      through mpirun, because some mpiruns never close the input they forward, so that a read would hang.
    - Output is line-buffered. Block buffering would delay output to mpirun's pipe, and unbuffered output would mix
      several ranks' words in a line.
    - A failure ends the job. If several ranks fail in the same way, only one prints the traceback.
    """
    _open_input()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    _prefix_output()
    sys.excepthook = _PrintOnce(os.environ.pop(PRINTED_ERRORS_VARIABLE, ""))
    lone_path = _launchers_file(os.environ.pop(LONE_VARIABLE, ""))
    heed_story_requests()
    sys.argv = [script, *arguments]
    module = os.environ.pop(MODULE_VARIABLE, "")
    archive = _archive(script)
    if archive is not None:
        sys.path[: 0 if sys.flags.safe_path else 1] = [script]
    elif not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if module else os.path.dirname(os.path.realpath(script))
    main = types.ModuleType("__main__")
    file = os.path.abspath(os.path.join(script, "__main__.py") if archive is not None else script)
    main.__dict__.update(__file__=file, __builtins__=__builtins__, __cached__=None, __loader__=archive)
    sys.modules["__main__"] = main
    explain_shadowing()
    if module or archive is not None:
        spec = archive.find_spec("__main__") if archive is not None else importlib.util.find_spec(module)
        main.__dict__.update(__spec__=spec, __package__=spec.parent if spec else "")
    codes = [0]
    if os.environ.get(SURVIVAL_VARIABLE) == "1":
        atexit.register(_exit_without_finalize, codes)
    process_id = os.getpid()
    try:
        exec(_compiled(script), main.__dict__)
        if os.getpid() == process_id:
            _record_if_alone(lone_path)
    except SystemExit as error:
        code = error.code
        if code is not None and not isinstance(code, int):  # the argument of sys.exit was a message
            with contextlib.suppress(Exception):  # raised by the user's object
                write_error(f"{code}\n")
        code = exit_code(code)
        codes.append(code)
        is_child = os.getpid() != process_id  # a child forked by the script must not end the job
        if code and not is_child:
            _leave_world(error)
            _end_job(code)
        elif not is_child and _ASKING_FOR_HELP.isdisjoint(arguments):
            _record_if_alone(lone_path)
        sys.exit(code)
    except BaseException as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # drops this function's frame
        shown = _leave_world(error) if os.getpid() == process_id else error
        if isinstance(shown, SystemExit):  # this restarted rank was too late, which is not a failure
            sys.exit(shown.code)
        code = _print_error(shown) or (130 if isinstance(error, KeyboardInterrupt) else 1)
        codes.append(code)
        if os.getpid() == process_id:
            _end_job(code)
        sys.exit(code)


def _open_input() -> None:
    """Open this rank's standard input.

    If it is a terminal, also open the output, so that prompts appear immediately.
    """
    source = os.environ.pop(STDIN_VARIABLE, "")  # child processes must not inherit this variable
    if source == INHERITED:
        return
    source, _, others = (source if _own_rank() == "0" else os.devnull).partition(" ")
    for path in (source or os.devnull, os.devnull):
        with contextlib.suppress(OSError):  # raised if standard input is a socket, or if the launcher has ended
            opened = os.open(path, (os.O_RDWR if others else os.O_RDONLY) | os.O_NOCTTY)
            for number in (0, *map(int, others)):
                os.dup2(opened, number)
            os.close(opened)
            return


def _launchers_file(variable: str) -> str:
    """Return the path of the launcher's file that ``variable`` names, or "" if the launcher is on another host."""
    pid, _, descriptor = variable.partition(" ")
    return f"/proc/{pid}/fd/{descriptor}" if pid.isdecimal() and int(pid) in ancestors() else ""


def _record_if_alone(path: str) -> None:
    """If this script has run alone, add a byte to the launcher's file ``path``, if there is one."""
    if path and _has_run_alone():
        with contextlib.suppress(OSError), open(path, "ab") as lone_ranks:  # the launcher may have just ended
            lone_ranks.write(b".")


def _has_run_alone() -> bool:
    """Return whether this script has used torch, and has certainly not communicated with other ranks.

    A world, and a simulation, would have frozen the objects of the garbage collector
    (:func:`asyncdist.runtime.process.spare_collections`). ``init_process_group`` would have replaced the
    ``sys.excepthook``. A child process might have opened a world.
    """
    has_children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss > 0
    may_have_world = gc.get_freeze_count() > 0 or "asyncdist.simulation.simulate" in sys.modules
    may_use_mpi, may_use_torch = "mpi4py.MPI" in sys.modules, not isinstance(sys.excepthook, _PrintOnce)
    return "torch" in sys.modules and not (has_children or may_have_world or may_use_mpi or may_use_torch)


class _PrintOnce:
    """A :data:`sys.excepthook` that prints a traceback only once if several ranks on this host raise the same error.

    Ranks often fail in the same way before they open a world, for example in an import. The first rank prints the
    traceback, and each other rank prints one line. They record printed tracebacks in a shared file, whose lock also
    keeps these lines below the traceback. After a world has opened, the ranks report their errors to each other
    instead.
    """

    def __init__(self, variable: str) -> None:
        self._path = _launchers_file(variable)
        self._process_id = os.getpid()

    def __call__(self, kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        explain_import(error)
        explain_input(error)
        with contextlib.suppress(OSError):  # raised if the launcher has just ended
            if self._path and os.getpid() == self._process_id:  # forked children always print their tracebacks
                with open(self._path, "r+b", buffering=0) as file:
                    fcntl.flock(file, fcntl.LOCK_EX)
                    self._print(file, kind, error, trace)
                return
        sys.__excepthook__(kind, error, trace)

    @staticmethod
    def _print(
        file: io.FileIO, kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
    ) -> None:
        with contextlib.redirect_stderr(io.StringIO()) as shown:
            sys.__excepthook__(kind, error, trace)
        text = shown.getvalue()
        printed: dict[str, str] = json.loads(file.read() or b"{}")
        first_rank = printed.setdefault(text, _own_name())
        if first_rank != _own_name():
            first_line = str(error).partition("\n")[0]
            write_error(
                f"asyncdist: {_own_name()} failed in the same way as {first_rank}: {kind.__name__}: {first_line}\n"
            )
        elif write_error(f"asyncdist: {first_rank} failed:\n{text}"):
            file.seek(0)
            file.write(json.dumps(printed).encode())


def _print_error(error: BaseException) -> int:
    """Print an error, or only one line for Ctrl-C during an import. Return the result of :func:`call_excepthook`."""
    trace, line, is_import = error.__traceback__, "", False
    while trace is not None and isinstance(error, KeyboardInterrupt):
        code = trace.tb_frame.f_code
        is_modules = code.co_name == "<module>" and trace.tb_frame.f_globals.get("__name__") != "__main__"
        is_import = is_import or is_modules or code.co_filename.startswith("<frozen importlib")
        if not is_import:
            line = f"{code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    if is_import:
        write_error(f"asyncdist: {_own_name()} was interrupted during an import, at {line}\n")
        return 0
    return call_excepthook(error)


def call_excepthook(error: BaseException) -> int:
    """Call ``sys.excepthook``. Return the exit code with which the user's hook ends the program, or 0. Never raise."""
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit as end:
        return exit_code(end.code)
    except (KeyboardInterrupt, OSError):  # Ctrl-C ended a peer before it reached this rank; the disk is full
        return 0
    except BaseException as failure:
        failure.__context__ = failure.__context__ or error
        sys.__excepthook__(type(failure), failure, failure.__traceback__)
    return 0


def write_error(text: str) -> bool:
    """Write to standard error, or to the original one if the user's stream raises. Return whether it was written.

    Never raise, because a failed rank must end the job even if it cannot print its error.
    """
    first: Any = getattr(sys, "stderr", None)
    second: Any = None if first is None or first is sys.__stderr__ else sys.__stderr__
    for each in (first, second):
        with contextlib.suppress(Exception):  # such as AttributeError, because None has no function
            each.write(text)  # one call, so that lines of several processes do not mix
            with contextlib.suppress(Exception):
                each.flush()
            return True
    return False


def flush_output() -> None:
    """Flush standard output and standard error. Ignore errors of closed files, full disks and the user's streams."""
    for name in ("stdout", "stderr"):
        with contextlib.suppress(Exception):
            getattr(sys, name).flush()


def _own_rank() -> str:
    return next((os.environ[name] for name in _RANK_VARIABLES if os.environ.get(name)), "")


def _own_name() -> str:
    return f"rank {_own_rank()}" if _own_rank() else "this process"


def _leave_world(error: BaseException) -> BaseException:
    """Leave this process's world, if any, because of ``error``. Return the error to print."""
    module = sys.modules.get("asyncdist.blocking.process_world")
    return error if module is None else module.leave_with(error)


def heed_story_requests() -> None:
    """Handle SIGUSR1, which requests a report, so that it does not end a rank that is importing or has left its world.

    In a Slurm job, the signal keeps its default action, because Lightning uses it to save and requeue if it has no
    handler. The launcher starts ranks with the signal blocked, so an early request remains pending until this call.
    """
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL and "SLURM_JOB_ID" not in os.environ:
        signal.signal(signal.SIGUSR1, report_without_world)
        atexit.register(_ignore_from_now)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


def _ignore_from_now() -> None:
    """Ignore SIGUSR1. The exiting interpreter would restore its default action, which ends the process."""
    if callable(signal.getsignal(signal.SIGUSR1)):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def report_without_world(_number: int, frame: types.FrameType | None) -> None:
    """Print the line that the program is executing.

    Handles SIGUSR1, which requests a report, while no world is open.
    """
    while (frame is not None and frame.f_back is not None) and (
        frame.f_code.co_filename.startswith("<frozen") or frame.f_globals.get("__name__") == "signal"
    ):
        frame = frame.f_back
    has_begun = frame is not None and frame.f_code.co_filename != __file__
    where = f"; it is at {frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None and has_begun else ""
    write_error(f"asyncdist: {_own_name()} has not opened a world, or has closed it{where}\n")


def _prefix_output() -> None:
    if os.environ.get(PREFIX_VARIABLE) == "1":
        prefix = f"[{_own_rank() or '?'}] "
        sys.stdout, sys.stderr = (_prefixed(stream, prefix) for stream in (sys.stdout, sys.stderr))


def _prefixed(stream: TextIO, prefix: str) -> TextIO:
    """Return a text stream that writes to the same file as ``stream``, with a prefix before each line."""
    lines = _PrefixedLines(stream.buffer, prefix.encode())
    prefixed = io.TextIOWrapper(lines, stream.encoding, stream.errors, newline="\n", line_buffering=True)
    vars(prefixed).update(vars(stream))  # the attribute mode of Python's standard streams
    return prefixed


class _PrefixedLines(io.BufferedIOBase):
    """A binary stream that writes to another stream, with a prefix before each line."""

    def __init__(self, stream: BinaryIO, prefix: bytes) -> None:
        self._stream = stream
        self._prefix = prefix
        self._is_in_line = False

    def write(self, data: Any) -> int:
        """Write ``data``, which may end within a line, and return its length."""
        written = bytes(data)
        lines = written.splitlines(keepends=True)
        if lines:
            first = b"" if self._is_in_line else self._prefix
            self._is_in_line = not lines[-1].endswith((b"\n", b"\r"))
            self._stream.write(first + self._prefix.join(lines))
        return len(written)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def writable(self) -> bool:
        """Return True."""
        return True

    def flush(self) -> None:
        """Flush the underlying stream."""
        self._stream.flush()

    def fileno(self) -> int:
        """Return the descriptor of the underlying stream."""
        return self._stream.fileno()

    def isatty(self) -> bool:
        """Return whether the underlying stream is a terminal."""
        return self._stream.isatty()


def _exit_without_finalize(codes: list[int]) -> None:
    """Exit with the last of ``codes``, without MPI_Finalize. If the job survives lost ranks, MPI_Finalize may hang.

    This :mod:`atexit` function is registered before the script runs, and is therefore called last, after all threads
    have ended. In a program that imports mpi4py itself, MPI_Finalize may still be called earlier.
    """
    try:
        flush_output()
    finally:
        os._exit(codes[-1])


def write_past_mpirun() -> None:
    """If the launcher is on this host, redirect output to its files, because mpirun may have stopped reading."""
    launcher = os.environ.get(LAUNCHER_VARIABLE, "")
    if not launcher.isdecimal() or int(launcher) not in ancestors():
        return
    for number in (1, 2):
        with contextlib.suppress(OSError):  # raised if the file is closed, is a socket, or has no reader
            if os.path.samestat(os.fstat(number), os.stat(f"/proc/{os.getppid()}/fd/{number}")):
                flags = os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_NONBLOCK
                opened = os.open(f"/proc/{launcher}/fd/{number}", flags)
                os.set_blocking(opened, True)
                os.dup2(opened, number)
                os.close(opened)


def ancestors() -> list[int]:
    """Return the pids of this process's parent, grandparent and so on."""
    found = [os.getppid()]
    with contextlib.suppress(OSError, ValueError):
        while found[-1] > 1:
            # The program's name may contain any character, and ends at the last ")".
            _, _, behind_name = Path(f"/proc/{found[-1]}/stat").read_bytes().rpartition(b")")
            found.append(int(behind_name.split()[1]))
    return found


def report_to_guardian(state: bytes) -> bool:
    """Write a state, such as :data:`IN_WORLD`, to the process that supervises this rank. Return whether it exists."""
    global _guardian
    descriptor = os.environ.pop(STARTED_VARIABLE, "")  # child processes must not inherit this variable
    if descriptor.isdecimal():
        _guardian = int(descriptor)
    if _guardian is not None:
        with contextlib.suppress(OSError):  # raised if that process was killed, in which case this rank will be too
            os.set_inheritable(_guardian, False)
            os.write(_guardian, state)
    return _guardian is not None


def exit_code(code: object) -> int:
    """Return the exit code of ``sys.exit(code)``, or 1 if ``code`` is a failure whose low 8 bits are 0."""
    if not isinstance(code, int):
        return 0 if code is None else 1
    return code & 0xFF or int(code != 0)


def _end_job(code: int) -> None:
    """End the whole job after this rank has failed, unless mpirun or ``asyncdist.run`` ends it.

    A script without ``asyncdist.run`` that fails after MPI_Init must abort, because it would wait for the other ranks
    in MPI_Finalize forever. Under ``asyncdist.run``, the job has already been ended. Before MPI_Init, Open MPI's mpirun
    ends the job at the first non-zero exit code, but MPICH's needs an abort command over PMI-1.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    is_mpi_up = mpi is not None and mpi.Is_initialized()
    is_supervised = "asyncdist.transports.mpi" in sys.modules
    if mpi is not None and is_mpi_up and not mpi.Is_finalized() and not is_supervised:
        if mpi.COMM_WORLD.Get_size() == 1:  # only a library's check has initialized MPI, and no other rank is waiting
            return
        _await_readers()
        mpi.COMM_WORLD.Abort(code)
    elif not is_mpi_up:
        abort_over_pmi(code)


def abort_over_pmi(code: int) -> None:
    """Ask MPICH's mpirun to end the job. Do nothing under other launchers.

    Without the request, mpirun overlooked the exit of a rank without MPI_Finalize in 2 of 430 runs.
    """
    descriptor = os.environ.get("PMI_FD", "")
    if descriptor.isdecimal():
        _await_readers()
        time.sleep(_LAST_WORDS_S)
        with contextlib.suppress(OSError):  # raised if mpirun is already ending the job
            os.write(int(descriptor), b"cmd=abort exitcode=%d\n" % code)


def _await_readers() -> None:
    """Wait briefly until the launcher has read this rank's output, because an abort may discard it."""
    flush_output()
    deadline = time.monotonic() + _READERS_S
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):  # raised if the descriptor is closed
            if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                unread = array.array("i", [1])
                while unread[0] and time.monotonic() < deadline:
                    fcntl.ioctl(descriptor, termios.FIONREAD, unread)
                    time.sleep(0.001)


def explain_shadowing() -> None:
    """Add a note to uncaught ImportErrors for ``protocols`` if a module shadows or has overwritten this package."""
    if find_shadowing() is None:
        return
    previous = sys.excepthook

    def explain(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        explain_import(error)
        previous(kind, error, trace)

    sys.excepthook = explain


def explain_import(error: BaseException) -> None:
    """If another module shadows or has overwritten ``protocols``, add a note to an ImportError for this package."""
    if isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "protocols":
        note = find_shadowing()
        if note is not None and note not in getattr(error, "__notes__", ()):
            error.add_note(note)


def explain_input(error: BaseException) -> None:
    """If this rank's standard input is empty, add a note to an end-of-input error, such as a debugger's."""
    is_end = isinstance(error, EOFError) or (type(error).__module__, type(error).__name__) == ("bdb", "BdbQuit")
    notes = getattr(error, "__notes__", ())
    with contextlib.suppress(OSError):  # raised if standard input is closed
        if is_end and os.path.samestat(os.fstat(0), os.stat(os.devnull)) and _NO_INPUT not in notes:
            error.add_note(_NO_INPUT)


def find_shadowing() -> str | None:
    """If the package ``protocols`` is shadowed or overwritten, return a message with a remedy, otherwise None."""
    found = sys.modules.get("protocols")
    if found is not None and found is sys.modules.get("asyncdist.protocols"):
        return None
    try:
        spec = importlib.util.find_spec("protocols")
    except ValueError:  # the program has created a module ``protocols`` without a spec
        return None
    if spec is None or spec.origin is None or Path(spec.origin).resolve() == PROTOCOLS:
        return find_overwriting()
    return (
        f"asyncdist's package 'protocols' is hidden by {spec.origin}: rename that, and the import finds {PROTOCOLS}; "
        "or import from asyncdist.protocols, which is the same package"
    )


def find_overwriting() -> str | None:
    """If another distribution has overwritten ``protocols``, return a message with a remedy, otherwise None."""
    is_there = PROTOCOLS.is_file()
    if is_there and b"asyncdist.protocols" in PROTOCOLS.read_bytes():
        return None
    from importlib.metadata import distributions  # not at the top of the file, because this import takes 19 ms

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
    script, *arguments = [word[1:] if set(word) == {":"} else word for word in sys.argv[1:]]  # see rank_command
    run_script(script, arguments)
