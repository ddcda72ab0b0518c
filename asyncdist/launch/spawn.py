"""Runs a function on several ranks, each a new process on this host, which torch.distributed connects.

- Mistakes in the config, and a function that cannot be pickled, are reported before a process is started.
- At the first failure, the other ranks are stopped, and the error contains the failure's traceback. The failure of a
  rank that only lost another rank does not count.
- No rank outlives the call or, on Linux, the calling process. Processes that a rank has started end with the rank, on
  Linux even in their own sessions. These processes may survive only if another process kills the rank.

multiprocessing pickles the function and its arguments to send them to the children. Because threads and MPI do not
survive a fork, ranks are spawned, or forked by a server process that uses neither. Each child runs
:mod:`asyncdist.launch.rank_process`.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from operator import attrgetter
from pathlib import Path
from types import FrameType
from typing import Any, Final, ParamSpec, cast

from asyncdist import environment
from asyncdist.launch import guardians, process_groups
from asyncdist.launch.config import MultiprocessConfig
from asyncdist.launch.rank_process import (
    CAUSE,
    CONSEQUENCE,
    MOMENT,
    PERHAPS,
    RETURNED,
    START_TIMEOUT_S,
    be_child,
    check_call,
    check_process_group,
)
from asyncdist.launchers import addresses, launcher_signals
from asyncdist.runtime.signals import StopRequest, interrupt_error

P = ParamSpec("P")

#: Module that only the fork server imports.
_FORK_SERVER: Final = "asyncdist.launch.fork_server"


def launch_subprocesses(
    func: Callable[P, Any],
    cfg: MultiprocessConfig | None = None,
    setup: Callable[[], Any] | None = None,
    rank_offset: int = 0,
    *args: P.args,
    **kwargs: P.kwargs,
) -> None:
    """Run a function on ``local_world_size`` ranks, each a process on this host, and wait for all of them.

    Call this function under ``if __name__ == "__main__":``, because children import the script. **Ownership**: ranks
    get tensor arguments in shared memory, as always with torch.multiprocessing. A rank must clone a tensor before it
    changes it.

    Args:
        func: Function that can be imported by its name. A coroutine function gets a world as its first argument, and a
            plain function has a process group. See :func:`init_and_run`.
        cfg: Config without ranks. :meth:`MultiprocessConfig.resolve` fills in its missing fields.
        setup: Function called once in this process, before the first rank starts, or None.
        rank_offset: First rank on this host, in a job on several hosts.
        args, kwargs: Arguments of ``func``.

    Raises:
        RuntimeError: ``func`` failed on a rank (the message contains the traceback), or a rank was killed by a signal,
            exited with a code other than 0, or did not start within 300 s. The other ranks have been stopped.
        TypeError: ``func`` or an argument cannot be pickled, or has the wrong type. No rank was started.
        ValueError: A value is not allowed, or ``master_port`` is not free. No rank was started.
        KeyboardInterrupt: Ctrl-C was pressed. All ranks have been stopped.
        SystemExit: The main thread received SIGTERM, SIGHUP or SIGQUIT, for which the program has no handler. All ranks
            have been stopped. The code is 128 plus the signal's number. Other signals without a handler are passed on
            to the ranks.
    """
    cfg = MultiprocessConfig() if cfg is None else cfg
    resolved = _checked_config(func, cfg, setup, rank_offset)
    if setup is not None:
        setup()
    size = cast("int", resolved.local_world_size)
    configs = [
        dataclasses.replace(resolved, rank=rank_offset + local_rank, local_rank=local_rank)
        for local_rank in range(size)
    ]
    ranks: list[_Child] = []
    with launcher_signals.heeding_children(), _passing_signals_on(ranks):
        try:
            _start_all(ranks, func, configs, args, kwargs)
            _wait_for_all(ranks)
        finally:
            _stop_all(ranks)


@contextlib.contextmanager
def _passing_signals_on(ranks: Sequence[_Child]) -> Iterator[None]:
    """Forward signals that have no handler to the ranks. Raise an exception after a signal that ends the job.

    Further copies of that signal are ignored, because a second exception would keep the ranks from stopping on their
    own.
    """
    request = StopRequest()

    def take(number: int, _: FrameType | None) -> None:
        if number in launcher_signals.ENDING_SIGNALS:
            if not request.is_copy(number):
                raise interrupt_error(number)
            return
        for child in ranks:
            child.send_signal(number)
        launcher_signals.stop_with_ranks(number)

    is_main = threading.current_thread() is threading.main_thread()
    numbers = launcher_signals.PASSED_ON_SIGNALS if is_main else ()
    unhandled = (signal.SIG_DFL, signal.default_int_handler)
    taken = {number: handler for number in numbers if (handler := signal.getsignal(number)) in unhandled}
    for number in taken:
        signal.signal(number, take)
    try:
        yield
    finally:
        for number, handler in taken.items():
            signal.signal(number, handler)


def _checked_config(
    func: Callable[..., Any], cfg: MultiprocessConfig, setup: object, rank_offset: int
) -> MultiprocessConfig:
    """Return the resolved config. Raise an error for any mistake that can be found before a process is started."""
    check_call(func, cfg)
    if setup is not None and not callable(setup):
        raise TypeError(
            f"setup must be None or a function without arguments, got {setup!r:.200}. The arguments of func follow "
            "setup and rank_offset, as in launch_subprocesses(func, cfg, None, 0, ...)"
        )
    for name, value in (("rank", cfg.rank), ("local_rank", cfg.local_rank)):
        if value is not None and cfg.world_size != 1:
            raise ValueError(
                f"{name} must be None, because each child process gets a separate one, got {value}; omit it, or call "
                "init_and_run"
            )
    resolved = _resolve_for(cfg, rank_offset)
    check_process_group(func, resolved)
    _check_reachable(func)
    if rank_offset == 0 and cfg.master_port is not None and cfg.init_method == "env://":
        _check_port_is_free(cfg.master_port)
    return resolved


def _resolve_for(cfg: MultiprocessConfig, rank_offset: int) -> MultiprocessConfig:
    cfg = cfg.resolve()
    size, local_size = cast("int", cfg.world_size), cast("int", cfg.local_world_size)
    if type(rank_offset) is not int or not 0 <= rank_offset <= size - local_size:
        raise ValueError(
            f"rank_offset must be from 0 to {size - local_size} with world_size={size} and "
            f"local_world_size={local_size}, got {rank_offset!r}"
        )
    if cfg.backend is None and environment.backend_name() is not None:
        # The config carries the chosen backend, because the fork server keeps its initial environment.
        return dataclasses.replace(cfg, backend=process_groups.get_distributed_backend())
    return cfg


def _check_port_is_free(port: int) -> None:
    try:
        addresses.probe_port(port)
    except OSError as error:
        raise ValueError(
            f"master_port must be a port of this host on which rank 0 can listen, got {port} ({error.strerror}); pass "
            "None for a free port"
        ) from error


def _check_reachable(func: Callable[..., Any]) -> None:
    """Raise an error if a child process could not import the function, before a child is started."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)  # a piped script has the name "<stdin>"
    is_interactive = getattr(main, "__spec__", None) is None and not (file and os.path.exists(file))
    if is_interactive and getattr(func, "__module__", None) == "__main__":
        raise TypeError(
            f"func must be importable by other processes, but {func!r} was defined in an interactive session; put it "
            "in a file"
        )
    if getattr(func, "__module__", None) == "__main__" and file and os.path.exists(file) and _is_guarded(func, file):
        raise TypeError(
            f"func must be importable by other processes, but {func!r} is defined under "
            'if __name__ == "__main__":; define it above'
        )


def _is_guarded(func: Callable[..., Any], file: str) -> bool:
    """Return whether the script defines a function inside an ``if`` statement that tests ``__name__``."""
    while isinstance(func, functools.partial):
        func = func.func
    code = getattr(func, "__code__", None)
    guards = (
        node
        for node in ast.parse(Path(file).read_bytes()).body
        if isinstance(node, ast.If) and any(getattr(name, "id", "") == "__name__" for name in ast.walk(node.test))
    )
    return code is not None and any(
        guard.lineno <= code.co_firstlineno <= (guard.end_lineno or guard.lineno) for guard in guards
    )


@dataclass(slots=True)
class _Child:
    """Tracks the process of one rank for the launcher.

    Attributes:
        pipe: Pipe from the rank. The rank sends an empty message when it starts, and its result when it ends.
        returned: Whether the rank's function has returned, or has called ``sys.exit(0)``.
        failure: Traceback of the rank, or a description of how it ended; None if it has not failed.
        kind: Kind of failure: ``CAUSE``, ``PERHAPS`` or ``CONSEQUENCE``.
        rest: Pidfds of the rank's descendants at the time of SIGTERM.
        has_ended: Whether the rank's end was noticed and its descendants were killed.
    """

    rank: int
    process: BaseProcess
    pipe: Connection
    started: bool = False
    returned: bool = False
    failure: str | None = None
    kind: bytes = CAUSE
    failed_at_s: float = 0.0
    rest: list[guardians.ProcessHandle] = field(default_factory=list)
    has_ended: bool = False

    def read(self) -> None:
        try:
            while self.pipe.poll():
                message = self.pipe.recv_bytes()
                if message == RETURNED:
                    self.returned = True
                elif message:
                    self.kind, text_begin = message[:1], 1 + MOMENT.size
                    (self.failed_at_s,) = MOMENT.unpack(message[1:text_begin])
                    self.failure = message[text_begin:].decode()
                self.started = True
        except (EOFError, OSError):
            self.pipe.close()

    def reap(self) -> bool:
        """Return whether the rank has ended. If it has failed without reporting the reason, set ``failure``."""
        code = self.process.exitcode  # the sentinel is unreliable, because a forked child may keep it open
        if code is None:
            return False
        if not self.has_ended:
            self.end_rest()
            self.has_ended = True  # later, a different process may have the rank's process ID
        if not self.pipe.closed:
            self.read()
        if code and self.failure is None:
            how = f"was killed by {launcher_signals.signal_name(-code)}" if code < 0 else f"exited with code {code}"
            hint = (
                ""
                if self.started
                else ' before its function ran: call launch_subprocesses under if __name__ == "__main__":, and '
                "define its function and arguments above"
            )
            self.failure, self.failed_at_s = how + hint, time.monotonic()
        return True

    def stop(self) -> None:
        """List the rank's descendants, which cannot be found after it has ended, and then ask the rank to stop."""
        if self.process.pid is not None and self.process.exitcode is None:
            self.rest = guardians.open_descendants(self.process.pid)
            self.process.terminate()

    def send_signal(self, number: int) -> None:
        if self.process.pid is not None and self.process.exitcode is None:
            os.kill(self.process.pid, number)

    def end_rest(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS refuses a signal to a group of zombies
            os.killpg(cast("int", self.process.pid), signal.SIGKILL)
        guardians.kill_all(self.rest)
        self.rest = []


#: Seconds between checks for ended ranks. A rank's pipe and sentinel do not suffice, as forked children may keep them
#: open.
_PERIOD_S: Final = 0.5
#: Seconds to wait, after each kind of failure, for another rank to report the cause or to end.
_PATIENCE_S: Final = {CAUSE: 0.0, PERHAPS: 2.0, CONSEQUENCE: 5.0}


def _start_all(
    ranks: list[_Child],
    func: Callable[..., Any],
    configs: Sequence[MultiprocessConfig],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> None:
    context = multiprocessing.get_context(configs[0].launch_method)
    # The server imports torch once for all ranks, so 4 ranks on 2 busy cores start in 4 s instead of 15 s. It does not
    # import the script, because the script may start threads, which do not survive a fork.
    context.set_forkserver_preload([_FORK_SERVER])
    environ = environment.environment()
    for cfg in configs:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(  # type: ignore[attr-defined]
            target=be_child, args=(theirs, func, cfg, args, kwargs, environ), name=f"rank {cfg.rank}"
        )
        ranks.append(_Child(cast("int", cfg.rank), process, ours))
        try:
            # A new process must not import from the working directory before it has this process's module path.
            with environment.variable_set(environment.SAFE_PATH_VARIABLE, "1"):
                process.start()
        except BaseException as error:
            if process.pid is None:
                ranks.pop()
                ours.close()
                # After Ctrl-C, the fork server may still start the process. The process ends before its function runs
                # if multiprocessing's local variables, to which the error refers, no longer keep a pipe open.
                traceback.clear_frames(error.__traceback__)
            if isinstance(error, OSError):
                raise RuntimeError(f"rank {cfg.rank} cannot be started: {error}") from error
            if isinstance(error, Exception):  # pickling may raise any exception
                raise TypeError(
                    f"{func!r} and its arguments cannot be sent to another process ({type(error).__name__}: {error}). "
                    "The function must be importable by name, and its arguments must be picklable"
                ) from error
            raise
        finally:
            theirs.close()


def _wait_for_all(ranks: Sequence[_Child]) -> None:
    """Wait until all ranks have returned. Raise RuntimeError at the first failure."""
    deadline = time.monotonic() + START_TIMEOUT_S
    living = list(ranks)
    while living:
        is_starting = not all(child.started for child in living)
        _wait_for_reports(living, max(0.0, deadline - time.monotonic()) if is_starting else None)
        living = [child for child in living if not child.reap()]
        if any(child.failure is not None for child in ranks):
            raise RuntimeError(_find_cause(ranks))
        late = [str(child.rank) for child in living if not child.started]
        if late and time.monotonic() >= deadline:
            raise RuntimeError(f"rank {', '.join(late)} did not start within {START_TIMEOUT_S:g} s")


def _wait_for_reports(living: Sequence[_Child], timeout_s: float | None) -> None:
    pipes = {child.pipe: child for child in living if not child.pipe.closed}
    sentinels = [child.process.sentinel for child in living]
    ready = multiprocessing.connection.wait([*pipes, *sentinels], min(_PERIOD_S, timeout_s or _PERIOD_S))
    for pipe in pipes.keys() & set(ready):
        pipes[pipe].read()


def _find_cause(ranks: Sequence[_Child]) -> str:
    """Return a description of the rank that caused the failure. Wait briefly if that rank may not have reported yet."""
    began_at = time.monotonic()
    while True:
        living = [child for child in ranks if not child.reap()]
        failed = sorted((child for child in ranks if child.failure is not None), key=attrgetter("failed_at_s"))
        first = {kind: [child for child in failed if child.kind == kind][:1] for kind in _PATIENCE_S}
        found = next(iter(first[CAUSE] + first[PERHAPS] + first[CONSEQUENCE]))
        left_s = began_at + _PATIENCE_S[found.kind] - time.monotonic()
        ended = [child for child in ranks if child not in living]
        gone = [child.rank for child in ended if child.process.exitcode == 0 and not child.returned]
        if gone and found.kind != CAUSE:  # an early exit with code 0 may be the cause
            text = f"rank {gone[0]} ended with exit code 0 before its function had returned"
            return text if found.kind == CONSEQUENCE else f"{text}; {_describe(found)}"
        if not living or left_s <= 0:
            return _describe(found)
        _wait_for_reports(living, left_s)


def _describe(child: _Child) -> str:
    assert child.failure is not None
    return (
        f"rank {child.rank} failed:\n\n{child.failure}"
        if "\n" in child.failure
        else f"rank {child.rank} {child.failure}"
    )


def _stop_all(ranks: Sequence[_Child]) -> None:
    try:
        for child in ranks:
            child.stop()
        deadline = time.monotonic() + launcher_signals.STOP_S
        while (living := [child for child in ranks if not child.reap()]) and time.monotonic() < deadline:
            _wait_for_reports(living, max(0.001, deadline - time.monotonic()))
    finally:  # also runs after a second Ctrl-C
        for child in ranks:
            if child.process.exitcode is None:
                child.process.kill()
        for child in ranks:
            child.process.join()
            child.reap()
            child.pipe.close()
