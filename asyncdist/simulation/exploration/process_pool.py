"""Runs scenarios in processes that never outlive the process that started them.

The processes are spawned, because a fork would copy torch's threads in the middle of their work.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

import torch

from asyncdist import environment

#: Logger that gets a handler, so that Python does not print the warnings of a thousand seeds on standard error.
_log = logging.getLogger()

#: Seconds that an abandoned call may take before its process is killed.
_PATIENCE_S: Final = 2.0


def pack(scenario: Any) -> bytes:
    """Pack a scenario to be sent to a process. Raise TypeError if it cannot be sent."""
    if not callable(scenario):
        raise TypeError(f"the scenario must be a function of the seed, got {scenario!r}")
    try:
        return bytes(ForkingPickler.dumps(scenario))
    except Exception as error:
        raise TypeError(
            f"the scenario {scenario!r} cannot be sent to another process ({error}); it must be a function at the "
            "top level of a module"
        ) from error


def unpack(payload: bytes) -> Any:
    """Unpack a scenario. Raise TypeError if its module is not found."""
    try:
        return ForkingPickler.loads(payload)
    except Exception as error:
        raise TypeError(
            f"another process cannot import the scenario ({error}): put it into a module that can be imported, or "
            "use processes=1"
        ) from error


class Inline:
    """Runs seeds in this process."""

    #: Number of chunks in progress at a time.
    window = 1

    def __init__(self, payload: bytes) -> None:
        self.hash_seed = environment.hash_seed()
        self._payload = payload
        self._no_log = logging.NullHandler()
        _log.addHandler(self._no_log)

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Call ``function(payload, *args)``; return a future of its result."""
        future: Future[Any] = Future()
        future.set_result(function(self._payload, *args))
        return future

    def end(self) -> None:
        """Remove the handler of log records."""
        _log.removeHandler(self._no_log)

    def drop_the_rest(self) -> None:
        """Do nothing: every call has returned."""


class Pool:
    """Runs seeds in processes of its own.

    No process is left behind. Processes that still run a seed at the end are killed. All of them also end with their
    *lifeline*, a pipe that closes when this process ends for any reason. SIGINT is blocked in them from the start: a
    terminal sends it to all processes, and only this process must react.

    Attributes:
        hash_seed: PYTHONHASHSEED of all processes, so that sets of strings have the same order in each.
    """

    def __init__(self, payload: bytes, process_count: int) -> None:
        self.window = 2 * process_count
        self.hash_seed = environment.hash_seed() or "0"
        self._payload = payload
        self._start(process_count)

    def _start(self, process_count: int) -> None:
        self._process_count = process_count
        self._processes: set[BaseProcess] = set()
        self._futures: set[Future[Any]] = set()
        context = multiprocessing.get_context("spawn")
        self._reader, self._writer = context.Pipe(duplex=False)
        self._executor = ProcessPoolExecutor(
            process_count, mp_context=context, initializer=_begin_worker, initargs=(self._reader,)
        )

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Schedule ``function(payload, *args)`` in one of the processes; return a future of its result."""
        if len(self._processes) < self._process_count:  # they are started one by one, here
            others = set(multiprocessing.active_children())
            with _sigint_blocked(), environment.variable_set(environment.HASH_SEED_VARIABLE, self.hash_seed):
                future = self._executor.submit(function, self._payload, *args)
                self._processes |= set(multiprocessing.active_children()) - others
        else:
            future = self._executor.submit(function, self._payload, *args)
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        return future

    def drop_the_rest(self) -> None:
        """Drop the calls that are under way. A seed that never ends does not keep its process alive."""
        for future in list(self._futures):
            future.cancel()
        if wait(set(self._futures), timeout=_PATIENCE_S).not_done:
            self.end()
            self._start(1)

    def end(self) -> None:
        """Return when no process is left."""
        if self._futures:
            for process in self._processes:
                process.kill()
        self._writer.close()
        self._executor.shutdown(cancel_futures=True)
        self._reader.close()


@contextlib.contextmanager
def open_runner(payload: bytes, process_count: int) -> Iterator[Inline | Pool]:
    """Open what runs the seeds; it is ended with the context."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.exit(1)  # this process imports a script without a __main__ guard; its parent says so, once for all of them
    runner = Inline(payload) if process_count == 1 else Pool(payload, process_count)
    try:
        yield runner
    finally:
        runner.end()


@contextlib.contextmanager
def _sigint_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin_worker(lifeline: Connection) -> None:
    def die_with_it() -> None:
        with contextlib.suppress(EOFError, OSError):
            lifeline.recv_bytes()
        os._exit(0)

    threading.Thread(target=die_with_it, daemon=True, name="lifeline").start()
    torch.set_num_threads(1)
    _log.addHandler(logging.NullHandler())
