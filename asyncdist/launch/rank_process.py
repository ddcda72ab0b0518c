"""Runs a function as a rank in this process, and reports to the launcher how it has ended.

:func:`init_and_run` can be called in any process. :mod:`asyncdist.launch.spawn` starts processes that run
:func:`be_child`.
"""

from __future__ import annotations

import contextvars
import fcntl
import functools
import inspect
import multiprocessing
import multiprocessing.util
import os
import signal
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Final, ParamSpec, cast

import torch

from asyncdist import environment, rank_program
from asyncdist.errors import is_consequence
from asyncdist.functional.parallel_groups import new_parallel_groups
from asyncdist.launch import guardians, local_ranks, process_groups
from asyncdist.launch.config import MultiprocessConfig
from asyncdist.launchers import detection
from asyncdist.runtime import run
from asyncdist.runtime.failing.failure_report import failure_reporter
from asyncdist.runtime.failing.tracebacks import format_error
from asyncdist.runtime.world import World

P = ParamSpec("P")

#: Timeout in seconds for the start of all ranks, including the imports of torch and of the script.
START_TIMEOUT_S: Final = 300.0
#: Priority of an exit function that runs last in a child. multiprocessing's own priorities are from -100 to 10.
_LAST: Final = -1000

# The following constants are the first byte of a child's result.

#: Result of a rank whose function has returned, or has called ``sys.exit(0)``.
RETURNED: Final = b"."
#: Result of a rank that caused the failure. It is followed by the time, packed by ``MOMENT``, and the traceback.
CAUSE: Final = b"!"
#: Result of a rank that failed with RuntimeError. The error may be the cause, or torch's report of a dead peer.
PERHAPS: Final = b"?"
#: Result of a rank that failed because it lost another rank.
CONSEQUENCE: Final = b"-"
#: Format of a failure's time on the monotonic clock, which all processes on a host share.
MOMENT: Final = struct.Struct("<d")


def init_and_run(func: Callable[P, Any], cfg: MultiprocessConfig, *args: P.args, **kwargs: P.kwargs) -> None:
    """Run this process as one rank: join the other ranks, call ``func(*args, **kwargs)``, and leave.

    A plain function has a default process group, and :func:`asyncdist.parallel_groups` returns its parallel groups. A
    coroutine function runs under :func:`asyncdist.run` on the torch transport, and gets a world as its first argument.
    Its parallel groups are the world's.

    Args:
        func: Function to run. Its return value is ignored.
        cfg: Config with the rank of this process. If there are several ranks, it also has the ``master_port`` or
            ``init_method`` that all ranks use.

    Raises:
        TypeError: ``func`` is not a function, or ``cfg`` is not a config.
        ValueError: The config lacks a rank or the common ``master_port``, or has process group options although
            ``func`` is a coroutine function.
        TransportError: The other ranks did not join within 300 s. The message names the rendezvous.
        Exception: An error that ``func`` raised.
    """
    check_call(func, cfg)
    cfg = cfg.resolve()
    if cfg.rank is None:
        raise ValueError(f"rank must be set to this process's rank, from 0 to {(cfg.world_size or 1) - 1}, got None")
    check_process_group(func, cfg)
    if is_coroutine_function(func):
        _run_coroutine(func, cfg, args, kwargs)
    else:
        # The copied context keeps the function's parallel groups out of the caller's context.
        contextvars.copy_context().run(_run_function, func, cfg, args, kwargs)


def _run_function(
    func: Callable[..., Any], cfg: MultiprocessConfig, args: Sequence[Any], kwargs: dict[str, Any]
) -> None:
    facts = cast("Any", cfg)  # the config is resolved, so no number is None
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
    facts = cast("Any", cfg)  # the config is resolved, so no number is None
    variables = local_ranks.rank_variables(
        facts.rank,
        facts.world_size,
        local_rank=facts.local_rank,
        local_size=facts.local_world_size,
        address=cfg.master_addr,
        port=facts.master_port,
        # All hosts derive the same name without communication.
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


def is_coroutine_function(func: Callable[..., Any]) -> bool:
    """Return whether calling ``func`` returns a coroutine. Partials and async ``__call__`` methods are recognised."""
    while isinstance(func, functools.partial):
        func = func.func
    return inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(type(func).__call__)


def check_call(func: object, cfg: object) -> None:
    """Raise TypeError if ``func`` cannot be called or ``cfg`` is not a config."""
    if not callable(func):
        raise TypeError(f"func must be a function or a coroutine function, got {func!r:.200}")
    if not isinstance(cfg, MultiprocessConfig):
        raise TypeError(f"cfg must be a MultiprocessConfig, got {cfg!r:.200}")


def check_process_group(func: Callable[..., Any], cfg: MultiprocessConfig) -> None:
    """Raise ValueError if the config of a coroutine function has options for process groups."""
    named: dict[str, str | None] = {name: backend for name, backend in cfg._backends().items() if backend is not None}
    if cfg.init_method != "env://":
        named["init_method"] = cfg.init_method
    if named and is_coroutine_function(func):
        text = ", ".join(f"{name}={value!r}" for name, value in named.items())
        raise ValueError(
            f"{text} must be omitted for a coroutine function, which gets a world instead of process groups"
        )


# -- started by the launcher ----------------------------------------------------------------------------------------


def be_child(
    pipe: Connection,
    func: Callable[..., Any],
    cfg: MultiprocessConfig,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    environ: Mapping[str, str],
) -> None:
    """Run a child of the launcher: report the start, run as a rank, and report how the rank has ended."""
    environment.replace(environ)
    os.setpgid(0, 0)
    guardians.adopt_orphans()
    # With this priority, remaining children are ended after multiprocessing has waited for its own children.
    multiprocessing.util.Finalize(None, guardians.end_children, exitpriority=_LAST)
    _end_with_launcher()
    pipe.send_bytes(b"")
    threads = detection.threads_per_rank({**environment.environment(), "LOCAL_WORLD_SIZE": str(cfg.local_world_size)})
    if threads is not None:
        torch.set_num_threads(threads)
    failure_notice = _FailureNotice(pipe)
    failure_reporter.set(failure_notice.send)
    reported_func = func if is_coroutine_function(func) else functools.partial(_call, failure_notice, func)
    try:
        init_and_run(reported_func, cfg, *args, **kwargs)
        pipe.send_bytes(RETURNED)
    except KeyboardInterrupt:
        sys.exit(130)
    except SystemExit as error:
        if not rank_program.exit_code(error.code):
            pipe.send_bytes(RETURNED)
        failure_notice.send(error)
        sys.exit(rank_program.exit_code(error.code))
    except BaseException as error:
        failure_notice.send(error)
        sys.exit(1)


def _end_with_launcher() -> None:
    """Make the kernel kill this process group when the launcher's end of a pipe closes. Works only on Linux.

    A parent-death signal would not suffice, because the parent may be the fork server, which outlives the launcher.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    if sys.platform.startswith("linux"):
        fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, -os.getpid())
        fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, fcntl.fcntl(parent.sentinel, fcntl.F_GETFL) | os.O_ASYNC)
    if not parent.is_alive():  # the launcher has ended, or has abandoned the start of this process
        os._exit(1)


def _call(failure_notice: _FailureNotice, func: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Call ``func``. If it fails, report this before the end of the process group makes other ranks fail."""
    try:
        func(*args, **kwargs)
    except BaseException as error:
        failure_notice.send(error)
        raise


class _FailureNotice:
    """Reports to the launcher, once, why this rank failed."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._is_sent = False

    def send(self, error: BaseException) -> None:
        if self._is_sent or isinstance(error, KeyboardInterrupt):
            return
        kind = CONSEQUENCE if is_consequence(error) else PERHAPS if isinstance(error, RuntimeError) else CAUSE
        if isinstance(error, SystemExit):
            if error.code is None or (type(error.code) is int and error.code == rank_program.exit_code(error.code)):
                return  # the launcher derives the reason from the exit code
            text = f"exited with {error.code!r}"
        else:
            text = format_error(error)
        self._is_sent = True
        self._pipe.send_bytes(kind + MOMENT.pack(time.monotonic()) + text.encode(errors="replace"))
