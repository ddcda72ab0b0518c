"""Ranks started from Python: a function in several processes of this host, joined by torch.distributed.

A plain function finds a process group, a coroutine function is given a world. What the launcher keeps to:

- What can be wrong is found before a process is started: the config, and a function that does not pickle.
- The first failure decides: its traceback is what the caller sees, and the others are stopped. A rank that failed only
  because it lost another one is not the first, whatever the order in which they tell.
- No rank outlives the call, however it ends; nor, on Linux, the process that made it. What a rank has started goes when
  the rank does: by its process group, and on Linux also in a session of its own, unless something else has killed the
  rank, since then nothing tells what was its.

What travels to the children goes through multiprocessing, which pickles it: it comes from this program and goes to
another copy of it. Threads and MPI do not survive a fork, so ranks are spawned, or forked by a server that has neither.
"""

from __future__ import annotations

import ast
import contextlib
import contextvars
import dataclasses
import fcntl
import functools
import inspect
import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final, ParamSpec, cast

import torch

from asyncdist import environment, local_host, rank_program
from asyncdist.errors import is_consequence
from asyncdist.functional.parallel_groups import new_parallel_groups
from asyncdist.launch import guardians, local_ranks, process_groups
from asyncdist.launch.config import MultiprocessConfig
from asyncdist.runtime import run
from asyncdist.runtime.supervision import told_elsewhere
from asyncdist.runtime.tracebacks import format_error
from asyncdist.runtime.world import World

P = ParamSpec("P")

#: How long a child may take until it runs: importing torch, and the script's own imports.
START_TIMEOUT_S: Final = 300.0
#: How long children may take to stop when they are asked to.
STOP_S: Final = 5.0
#: Of what is to be done at a child's end: multiprocessing's own has 10 and less, not below -100.
_LAST: Final = -1000


# -- in a rank --------------------------------------------------------------------------------------------------------


def init_and_run(func: Callable[P, Any], cfg: MultiprocessConfig, *args: P.args, **kwargs: P.kwargs) -> None:
    """Be one rank: join the others, run ``func(*args, **kwargs)``, and leave.

    A plain function finds a default process group, and its parallel groups by :func:`asyncdist.parallel_groups`. A
    coroutine function runs under :func:`asyncdist.run` on the torch transport, with a world before its arguments; its
    parallel groups are the world's.

    Args:
        func: what to run. What it returns is dropped.
        cfg: with this process's rank.
        args: of ``func``.
        kwargs: of ``func``.

    Raises:
        TypeError: ``func`` is no function, or ``cfg`` no config.
        ValueError: the config lacks a rank, or says how to make a process group, which a coroutine function has not.
        TransportError: the other ranks did not come within 300 s; says where they were to meet.
        Exception: what ``func`` raised.
    """
    _check_call(func, cfg)
    cfg = cfg.resolve()
    if cfg.rank is None:
        raise ValueError(
            f"rank is missing; allowed are 0..{(cfg.world_size or 1) - 1}, since this process is to be one"
        )
    _check_process_group(func, cfg)
    if _is_coroutine_function(func):
        _run_coroutine(func, cfg, args, kwargs)
    else:
        contextvars.copy_context().run(_run_function, func, cfg, args, kwargs)  # its parallel groups end with it


def _run_function(
    func: Callable[..., Any], cfg: MultiprocessConfig, args: Sequence[Any], kwargs: dict[str, Any]
) -> None:
    facts = cast("Any", cfg)  # resolved: no number is missing
    process_groups.init_dist(
        facts.rank,
        facts.local_rank,
        facts.world_size,
        facts.local_world_size,
        cfg.master_addr,
        facts.master_port,
        cfg.init_method,
        cfg.backend,
        timeout_s=START_TIMEOUT_S,
    )
    try:
        process_groups.init_parallel_groups(
            cfg.model_parallelism,
            cfg.pipeline_parallelism,
            model_backend=cfg.model_parallel_backend,
            pipeline_backend=cfg.pipeline_parallel_backend,
            data_backend=cfg.data_parallel_backend,
        )
        func(*args, **kwargs)
    finally:
        process_groups.end_dist()


def _run_coroutine(
    func: Callable[..., Any], cfg: MultiprocessConfig, args: Sequence[Any], kwargs: dict[str, Any]
) -> None:
    facts = cast("Any", cfg)  # resolved: no number is missing
    variables = local_ranks.rank_variables(
        facts.rank,
        facts.world_size,
        local_rank=facts.local_rank,
        local_size=facts.local_world_size,
        address=cfg.master_addr,
        port=facts.master_port,
        # The same on all hosts, which agree on nothing else.
        run_id=f"asyncdist-{cfg.master_addr}-{cfg.master_port}",
    )
    environment.set_variables(variables)
    main = functools.partial(_with_groups, func, cfg.model_parallelism, cfg.pipeline_parallelism, kwargs)
    run.run(main, *args, transport=cast("Any", "torch"))


async def _with_groups(
    func: Callable[..., Any], model: int, pipeline: int, kwargs: dict[str, Any], world: World, *args: Any
) -> None:
    await new_parallel_groups(model, pipeline, world=world)
    await func(world, *args, **kwargs)


def _is_coroutine_function(func: Callable[..., Any]) -> bool:
    """Also an object that is called like one, and either with arguments bound to it."""
    while isinstance(func, functools.partial):
        func = func.func
    return inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(type(func).__call__)


def _check_call(func: object, cfg: object) -> None:
    if not callable(func):
        raise TypeError(f"func is {func!r}; it must be a function or a coroutine function")
    if not isinstance(cfg, MultiprocessConfig):
        raise TypeError(f"cfg is {cfg!r}; it must be a MultiprocessConfig")


def _check_process_group(func: Callable[..., Any], cfg: MultiprocessConfig) -> None:
    """What a coroutine function has no use for."""
    named: dict[str, str | None] = {name: backend for name, backend in cfg._backends().items() if backend is not None}
    if cfg.init_method != "env://":
        named["init_method"] = cfg.init_method
    if named and _is_coroutine_function(func):
        text = ", ".join(f"{name}={value!r}" for name, value in named.items())
        raise ValueError(f"{text}: a coroutine function is given a world in place of process groups; leave it away")


# -- in the launcher --------------------------------------------------------------------------------------------------


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
        cfg: what is missing in it is filled in by :meth:`MultiprocessConfig.resolve`; it names no rank.
        setup: called here, once, before the first process is started.
        rank_offset: the first rank of this host, where there are several hosts.
        args: of ``func``.
        kwargs: of ``func``.

    Raises:
        RuntimeError: ``func`` failed on a rank, and the text holds that rank's traceback; or a rank was killed, by a
            signal that is named, or exited with another code than 0, or did not start within 300 s. The other ranks
            have been stopped.
        TypeError: ``func`` or an argument cannot be taken to another process, or has the wrong type; nothing has been
            started.
        ValueError: the config does not allow it, or ``master_port`` is not free; nothing has been started.
        KeyboardInterrupt: at Ctrl-C, when all ranks have been stopped.
    """
    cfg = MultiprocessConfig() if cfg is None else cfg
    _check_call(func, cfg)
    if setup is not None and not callable(setup):
        raise TypeError(
            f"setup is {setup!r}; it must be None or a function without arguments: what is for func comes after setup "
            "and rank_offset, as in launch_subprocesses(func, cfg, None, 0, ...)"
        )
    for name, value in (("rank", cfg.rank), ("local_rank", cfg.local_rank)):
        if value is not None and cfg.world_size != 1:
            raise ValueError(f"{name} is {value}; every child is given its own: leave it away, or call init_and_run")
    resolved = _resolve_for(cfg, rank_offset)
    _check_process_group(func, resolved)
    _check_reachable(func)
    if rank_offset == 0 and cfg.master_port is not None and cfg.init_method == "env://":
        _check_port_is_free(cfg.master_port)
    if setup is not None:
        setup()
    size = cast("int", resolved.local_world_size)
    configs = [
        dataclasses.replace(resolved, rank=rank_offset + local_rank, local_rank=local_rank)
        for local_rank in range(size)
    ]
    ranks: list[_Child] = []
    with local_host.heeding_children():
        try:
            _start_all(ranks, func, configs, args, kwargs)
            _wait_for_all(ranks)
        finally:
            _stop_all(ranks)


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
    """What a child would find out only after it has been started."""
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
    """Whether a function stands in a part of the script that asks for the module's name."""
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
    """A rank seen from its launcher.

    Attributes:
        rank: among all.
        process: the child.
        pipe: an empty message when it runs, and later that its function has returned, or why it failed.
        started: whether it runs.
        returned: whether its function has, or has called ``sys.exit(0)``.
        failure: what it told, or what became of it.
        kind: whether that failure can have come by itself.
        rest: pidfds of what it had started when it was told to stop.
    """

    rank: int
    process: BaseProcess
    pipe: Connection
    started: bool = False
    returned: bool = False
    failure: str | None = None
    kind: bytes = b"!"
    rest: list[int] = field(default_factory=list)

    def read(self) -> None:
        """Take what has arrived."""
        try:
            while self.pipe.poll():
                message = self.pipe.recv_bytes()
                if message == _RETURNED:
                    self.returned = True
                elif message:
                    self.kind = message[:1]
                    self.failure = message[1:].decode()
                self.started = True
        except (EOFError, OSError):
            self.pipe.close()

    def reap(self) -> bool:
        """Whether it has ended; then a failure that it could not tell is described."""
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
            self.failure = how + hint
        return True

    def stop(self) -> None:
        """Ask it to stop; what it has started is known only while it lives."""
        if self.process.pid is not None and self.process.exitcode is None:
            self.rest = guardians.open_descendants(self.process.pid)
            self.process.terminate()

    def end_rest(self) -> None:
        """It has ended: end all that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS refuses a group of zombies
            os.killpg(cast("int", self.process.pid), signal.SIGKILL)
        guardians.kill_all(self.rest)
        self.rest = []


_RETURNED: Final = b"."
_CAUSE: Final = b"!"
#: What torch.distributed says of a peer that has died is a RuntimeError like any other.
_PERHAPS: Final = b"?"
_CONSEQUENCE: Final = b"-"
#: A child that a rank has forked may keep the rank's end from being noticed by itself.
_PERIOD_S: Final = 0.5
#: How long one that failed so leaves another to tell its story, or to be found dead.
_PATIENCE_S: Final = {_CAUSE: 0.0, _PERHAPS: 2.0, _CONSEQUENCE: 5.0}


def _start_all(
    ranks: list[_Child],
    func: Callable[..., Any],
    configs: Sequence[MultiprocessConfig],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> None:
    context = multiprocessing.get_context(configs[0].launch_method)
    # The server imports torch once for all ranks and launches: 4 ranks on 2 busy cores were up in 4 s in place of 15,
    # and in 0.3 s the next time. Not the script itself, which may start threads, and threads do not survive a fork.
    context.set_forkserver_preload([__name__])
    for cfg in configs:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(  # type: ignore[attr-defined]
            target=_be_child, args=(theirs, func, cfg, args, kwargs), name=f"rank {cfg.rank}"
        )
        try:
            process.start()
        except OSError as error:
            raise RuntimeError(f"rank {cfg.rank} cannot be started: {error}") from error
        except Exception as error:  # pickling fails with whatever the object raises, and for the first rank
            ours.close()
            raise TypeError(
                f"{func!r} and its arguments must be taken to another process, which fails ({type(error).__name__}: "
                f"{error}); allowed are functions that can be imported by name, and arguments that can be pickled"
            ) from error
        finally:
            theirs.close()
        ranks.append(_Child(cast("int", cfg.rank), process, ours))


def _wait_for_all(ranks: Sequence[_Child]) -> None:
    """Return when all have ended well. Raises RuntimeError at the first failure."""
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
    """What is said of the rank that failed by itself, for which those that may have lost it leave a moment."""
    began_at = time.monotonic()
    failed: list[_Child] = []
    while True:
        living = [child for child in ranks if not child.reap()]
        failed += [child for child in ranks if child.failure is not None and child not in failed]
        first = {kind: [child for child in failed if child.kind == kind][:1] for kind in _PATIENCE_S}
        found = next(iter(first[_CAUSE] + first[_PERHAPS] + first[_CONSEQUENCE]))
        left_s = began_at + _PATIENCE_S[found.kind] - time.monotonic()
        ended = [child for child in ranks if child not in living]
        gone = [child.rank for child in ended if child.process.exitcode == 0 and not child.returned]
        if gone and found.kind != _CAUSE:  # as by os._exit(0), which is nobody's failure where nobody minds
            text = f"rank {gone[0]} ended with exit code 0 before its function had returned"
            return text if found.kind == _CONSEQUENCE else f"{text}; {_describe(found)}"
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
    """Leave none behind: ask, wait, kill."""
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


# -- in the child -----------------------------------------------------------------------------------------------------


def _be_child(
    pipe: Connection, func: Callable[..., Any], cfg: MultiprocessConfig, args: Sequence[Any], kwargs: dict[str, Any]
) -> None:
    """What a child runs: tell that it lives, be a rank, tell why it failed."""
    os.setpgid(0, 0)
    guardians.adopt_orphans()
    # After multiprocessing has waited for those of its children that it waits for.
    multiprocessing.util.Finalize(None, guardians.end_children, exitpriority=_LAST)
    _end_with_launcher()
    pipe.send_bytes(b"")
    threads = environment.threads_per_rank({**environment.environment(), "LOCAL_WORLD_SIZE": str(cfg.local_world_size)})
    if threads is not None:
        torch.set_num_threads(threads)
    story = _Story(pipe)
    told_elsewhere.set(story.tell)
    told = func if _is_coroutine_function(func) else functools.partial(_call, story, func)
    try:
        init_and_run(told, cfg, *args, **kwargs)
        pipe.send_bytes(_RETURNED)
    except KeyboardInterrupt:
        sys.exit(130)
    except SystemExit as error:
        if not error.code:
            pipe.send_bytes(_RETURNED)
        story.tell(error)
        sys.exit(rank_program.exit_code(error.code))
    except BaseException as error:
        story.tell(error)
        sys.exit(1)


def _end_with_launcher() -> None:
    """Have the kernel kill this process group when the launcher's end of a pipe closes; except on Linux, nothing.

    The signal for a parent's death does not do: the parent may be the server that forks, and that lives until its last
    child has ended. Nor is it a thread's business to watch the pipe: a rank may fork, for the workers of a data loader.
    """
    parent = multiprocessing.parent_process()
    if not sys.platform.startswith("linux") or parent is None:
        return
    fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, -os.getpid())
    fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, fcntl.fcntl(parent.sentinel, fcntl.F_GETFL) | os.O_ASYNC)
    if not parent.is_alive():  # it has ended before the kernel was told
        os._exit(1)


def _call(story: _Story, func: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Tell of a failure before the process group goes, which the others would notice first."""
    try:
        func(*args, **kwargs)
    except BaseException as error:
        story.tell(error)
        raise


class _Story:
    """Why this rank failed; told once."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._told = False

    def tell(self, error: BaseException) -> None:
        if self._told or isinstance(error, KeyboardInterrupt):
            return
        kind = _CONSEQUENCE if is_consequence(error) else _PERHAPS if isinstance(error, RuntimeError) else _CAUSE
        if isinstance(error, SystemExit):
            if error.code is None or error.code == rank_program.exit_code(error.code):
                return  # which the launcher sees
            text = f"exited with {error.code!r}"
        else:
            text = format_error(error)
        self._told = True
        self._pipe.send_bytes(kind + text.encode(errors="replace"))
