"""Starts ranks from Python: a function in several processes of this host, joined by torch.distributed.

A plain function finds a process group, a coroutine function is given a world. The launcher keeps to these rules:

- Mistakes in the config, and a function that does not pickle, are found before a process is started.
- The first failure decides: the caller sees its traceback, and the others are stopped. A rank that failed only because
  it lost another one is not the first, also if it reports first.
- No rank outlives the call, however it ends; nor, on Linux, the process that made the call. Processes that a rank has
  started end when the rank does: by its process group, and on Linux also in a session of their own. The exception is a
  rank that something else has killed: then nothing tells which processes were its own.

The function and its arguments travel to the children through multiprocessing, which pickles them: they come from this
program and go to another copy of it. Threads and MPI do not survive a fork, so ranks are spawned, or forked by a server
that has neither. A child runs the code of :mod:`asyncdist.launch.rank_process`.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from operator import attrgetter
from pathlib import Path
from types import FrameType
from typing import Any, Final, ParamSpec, cast

from asyncdist import environment, local_host
from asyncdist.launch import guardians, process_groups, rank_process
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
from asyncdist.runtime.signals import interrupt_error

P = ParamSpec("P")

#: How long children may take to stop when they are asked to.
STOP_S: Final = 5.0


def launch_subprocesses(
    func: Callable[P, Any],
    cfg: MultiprocessConfig | None = None,
    setup: Callable[[], Any] | None = None,
    rank_offset: int = 0,
    *args: P.args,
    **kwargs: P.kwargs,
) -> None:
    """Run a function on ``local_world_size`` ranks, each a process of this host, and wait for all of them.

    Call it under ``if __name__ == "__main__":``, since a child imports the script. **Ownership**: tensors among the
    arguments come to the ranks in shared memory, as everywhere in torch.multiprocessing: clone what a rank changes.

    Args:
        func: a function that can be imported by its name. A coroutine function is given a world before the arguments;
            a plain one finds a process group; see :func:`init_and_run`.
        cfg: the config, which names no rank; :meth:`MultiprocessConfig.resolve` fills in its missing fields.
        setup: called here, once, before the first process is started.
        rank_offset: the first rank of this host, where there are several hosts.
        args: the arguments of ``func``.
        kwargs: the keyword arguments of ``func``.

    Raises:
        RuntimeError: ``func`` failed on a rank, and the text holds that rank's traceback; or a rank was killed, by a
            signal that is named, or exited with another code than 0, or did not start within 300 s. The other ranks
            have been stopped.
        TypeError: ``func`` or an argument cannot be taken to another process, or has the wrong type; nothing has been
            started.
        ValueError: the config does not allow it, or ``master_port`` is not free; nothing has been started.
        KeyboardInterrupt: at Ctrl-C, when all ranks have been stopped.
        SystemExit: at SIGTERM, SIGHUP and SIGQUIT likewise, with 128 and the signal's number as its code, in the main
            thread of a program that has no handler for it. Other signals without a handler are passed on to the ranks.
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
    with local_host.heeding_children(), _passing_signals_on(ranks):
        try:
            _start_all(ranks, func, configs, args, kwargs)
            _wait_for_all(ranks)
        finally:
            _stop_all(ranks)


@contextlib.contextmanager
def _passing_signals_on(ranks: Sequence[_Child]) -> Iterator[None]:
    """Pass signals on to the ranks for which this program has no handler; those that end the job raise SystemExit.

    Such a signal would otherwise end this process at once: ranks could save nothing, and nothing would end the
    processes that they have started in sessions of their own.
    """

    def take(number: int, _: FrameType | None) -> None:
        if number in local_host.ENDING_SIGNALS:
            raise interrupt_error(number)
        for child in ranks:
            child.send_signal(number)
        local_host.stop_with_ranks(number)

    is_main = threading.current_thread() is threading.main_thread()
    numbers = local_host.PASSED_ON_SIGNALS if is_main else ()
    taken = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, take)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _checked_config(
    func: Callable[..., Any], cfg: MultiprocessConfig, setup: object, rank_offset: int
) -> MultiprocessConfig:
    """Refuse everything that can be known to be wrong before a process is started, and return the resolved config."""
    check_call(func, cfg)
    if setup is not None and not callable(setup):
        raise TypeError(
            f"setup is {setup!r}; it must be None or a function without arguments: what is for func comes after setup "
            "and rank_offset, as in launch_subprocesses(func, cfg, None, 0, ...)"
        )
    for name, value in (("rank", cfg.rank), ("local_rank", cfg.local_rank)):
        if value is not None and cfg.world_size != 1:
            raise ValueError(f"{name} is {value}; every child is given its own: leave it away, or call init_and_run")
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
            f"rank_offset is {rank_offset!r}; with world_size={size} and local_world_size={local_size} allowed are "
            f"0..{size - local_size}"
        )
    if cfg.backend is None and environment.backend_name() is not None:
        # A server that forks the children has the environment of its own start.
        return dataclasses.replace(cfg, backend=process_groups.get_distributed_backend())
    return cfg


def _check_port_is_free(port: int) -> None:
    try:
        local_host.probe_port(port)
    except OSError as error:
        raise ValueError(
            f"master_port is {port}, where rank 0 of this host cannot listen ({error.strerror}); None takes a free one"
        ) from error


def _check_reachable(func: Callable[..., Any]) -> None:
    """Refuse a function that a child could not import; the child would find it out only after it has been started."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)  # "<stdin>" in a script that is piped
    is_interactive = getattr(main, "__spec__", None) is None and not (file and os.path.exists(file))
    if is_interactive and getattr(func, "__module__", None) == "__main__":
        raise TypeError(
            f"{func!r} was defined in an interactive session, which no other process can import: put it in a file"
        )
    if getattr(func, "__module__", None) == "__main__" and file and os.path.exists(file) and _is_guarded(func, file):
        raise TypeError(
            f'{func!r} is defined under if __name__ == "__main__":, where no other process finds it: define it above'
        )


def _is_guarded(func: Callable[..., Any], file: str) -> bool:
    """Return whether a function is defined in a part of the script that asks for the module's name."""
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
    """Keeps what the launcher knows of one rank.

    Attributes:
        rank: its number among all ranks.
        process: the child.
        pipe: brings an empty message when it runs, and later that its function has returned, or why it failed.
        started: whether it runs.
        returned: whether its function has returned, or has called ``sys.exit(0)``.
        failure: the traceback that it sent, or how it ended without one.
        kind: whether the failure is its own; see :mod:`asyncdist.launch.rank_process`.
        failed_at_s: The moment of the failure, or that at which it was found, on the monotonic clock.
        rest: pidfds of the processes that it had started when it was told to stop.
    """

    rank: int
    process: BaseProcess
    pipe: Connection
    started: bool = False
    returned: bool = False
    failure: str | None = None
    kind: bytes = CAUSE
    failed_at_s: float = 0.0
    rest: list[int] = field(default_factory=list)

    def read(self) -> None:
        """Take the messages that have arrived."""
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
        """Return whether the rank has ended, and describe a failure that it could not tell itself."""
        code = self.process.exitcode  # its sentinel may be in the hands of a child that it has forked
        if code is None:
            return False
        self.end_rest()
        if not self.pipe.closed:
            self.read()
        if code and self.failure is None:
            how = f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with code {code}"
            hint = (
                ""
                if self.started
                else ' before it ran: is launch_subprocesses called under if __name__ == "__main__":, and what travels '
                "defined above it?"
            )
            self.failure, self.failed_at_s = how + hint, time.monotonic()
        return True

    def stop(self) -> None:
        """List the processes that the rank has started, which only a living rank shows, and ask it to stop."""
        if self.process.pid is not None and self.process.exitcode is None:
            self.rest = guardians.open_descendants(self.process.pid)
            self.process.terminate()

    def send_signal(self, number: int) -> None:
        """Send the rank a signal, if it runs."""
        if self.process.pid is not None and self.process.exitcode is None:
            os.kill(self.process.pid, number)

    def end_rest(self) -> None:
        """End the processes that the rank, which has ended, has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS refuses a group of zombies
            os.killpg(cast("int", self.process.pid), signal.SIGKILL)
        guardians.kill_all(self.rest)
        self.rest = []


#: How often ranks are looked at, in seconds: a child that a rank has forked may keep its pipe and sentinel open.
_PERIOD_S: Final = 0.5
#: How long after a failure of this kind another rank may still report the cause, or be found dead, in seconds.
_PATIENCE_S: Final = {CAUSE: 0.0, PERHAPS: 2.0, CONSEQUENCE: 5.0}


def _start_all(
    ranks: list[_Child],
    func: Callable[..., Any],
    configs: Sequence[MultiprocessConfig],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> None:
    context = multiprocessing.get_context(configs[0].launch_method)
    # The server imports torch once for all ranks and launches: 4 ranks on 2 busy cores were up in 4 s in place of 15,
    # and in 0.3 s the next time. It does not import the script, which may start threads, and threads do not survive a
    # fork.
    context.set_forkserver_preload([rank_process.__name__])
    environ = environment.environment()
    for cfg in configs:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(  # type: ignore[attr-defined]
            target=be_child, args=(theirs, func, cfg, args, kwargs, environ), name=f"rank {cfg.rank}"
        )
        try:
            # The server, or a spawned rank, would import modules of the working directory, a folder of all users
            # perhaps, before it has the module path of this process.
            with environment.variable_set(environment.SAFE_PATH_VARIABLE, "1"):
                process.start()
        except OSError as error:
            raise RuntimeError(f"rank {cfg.rank} cannot be started: {error}") from error
        except Exception as error:  # pickling fails with any exception of the object, and for the first rank
            ours.close()
            raise TypeError(
                f"{func!r} and its arguments must be taken to another process, which fails ({type(error).__name__}: "
                f"{error}); allowed are functions that can be imported by name, and arguments that can be pickled"
            ) from error
        finally:
            theirs.close()
        ranks.append(_Child(cast("int", cfg.rank), process, ours))


def _wait_for_all(ranks: Sequence[_Child]) -> None:
    """Return when all ranks have ended well. Raises RuntimeError at the first failure."""
    deadline = time.monotonic() + START_TIMEOUT_S
    living = list(ranks)
    while living:
        is_starting = not all(child.started for child in living)
        _wait_for_news(living, max(0.0, deadline - time.monotonic()) if is_starting else None)
        living = [child for child in living if not child.reap()]
        if any(child.failure is not None for child in ranks):
            raise RuntimeError(_find_cause(ranks))
        late = [str(child.rank) for child in living if not child.started]
        if late and time.monotonic() >= deadline:
            raise RuntimeError(f"rank {', '.join(late)} did not start within {START_TIMEOUT_S:g} s")


def _wait_for_news(living: Sequence[_Child], timeout_s: float | None) -> None:
    pipes = {child.pipe: child for child in living if not child.pipe.closed}
    sentinels = [child.process.sentinel for child in living]
    ready = multiprocessing.connection.wait([*pipes, *sentinels], min(_PERIOD_S, timeout_s or _PERIOD_S))
    for pipe in pipes.keys() & set(ready):
        pipes[pipe].read()


def _find_cause(ranks: Sequence[_Child]) -> str:
    """Describe the rank that failed by itself, after a moment where only ranks that may have lost it have reported."""
    began_at = time.monotonic()
    while True:
        living = [child for child in ranks if not child.reap()]
        failed = sorted((child for child in ranks if child.failure is not None), key=attrgetter("failed_at_s"))
        first = {kind: [child for child in failed if child.kind == kind][:1] for kind in _PATIENCE_S}
        found = next(iter(first[CAUSE] + first[PERHAPS] + first[CONSEQUENCE]))
        left_s = began_at + _PATIENCE_S[found.kind] - time.monotonic()
        ended = [child for child in ranks if child not in living]
        gone = [child.rank for child in ended if child.process.exitcode == 0 and not child.returned]
        if gone and found.kind != CAUSE:  # as by os._exit(0): a failure only where another rank has failed
            text = f"rank {gone[0]} ended with exit code 0 before its function had returned"
            return text if found.kind == CONSEQUENCE else f"{text}; {_describe(found)}"
        if not living or left_s <= 0:
            return _describe(found)
        _wait_for_news(living, left_s)


def _describe(child: _Child) -> str:
    assert child.failure is not None
    return (
        f"rank {child.rank} failed:\n\n{child.failure}"
        if "\n" in child.failure
        else f"rank {child.rank} {child.failure}"
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _stop_all(ranks: Sequence[_Child]) -> None:
    """Stop all ranks: ask them, wait, and kill those that are left."""
    try:
        for child in ranks:
            child.stop()
        deadline = time.monotonic() + STOP_S
        while (living := [child for child in ranks if not child.reap()]) and time.monotonic() < deadline:
            _wait_for_news(living, max(0.001, deadline - time.monotonic()))
    finally:  # also at a second Ctrl-C
        for child in ranks:
            if child.process.exitcode is None:
                child.process.kill()
        for child in ranks:
            child.process.join()
            child.end_rest()
            child.pipe.close()
