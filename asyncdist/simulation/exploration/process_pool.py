"""Runs scenarios in spawned processes, which never outlive the process that started them."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, wait
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

import torch

from asyncdist import environment

#: Root logger, which gets a handler so that the warnings of thousands of seeds are not printed to standard error.
_log = logging.getLogger()

#: Seconds that a dropped call may still run before its process is killed.
_PATIENCE_S: Final = 2.0


def pack(scenario: Any) -> bytes:
    """Pickle a scenario for another process. Raise TypeError if it cannot be pickled."""
    if not callable(scenario):
        raise TypeError(f"the scenario must be a function of the seed, got {scenario!r}")
    try:
        return bytes(ForkingPickler.dumps(scenario))
    except Exception as error:
        raise TypeError(
            "the scenario must be a function at the top level of a module, which can be sent to another process, got "
            f"{scenario!r} ({error})"
        ) from error


def unpack(payload: bytes) -> Any:
    """Unpickle a scenario. Raise TypeError if its module cannot be imported."""
    try:
        return ForkingPickler.loads(payload)
    except Exception as error:
        raise TypeError(
            f"the scenario must be in a module that another process can import ({error}); move it there, or pass "
            "processes=1"
        ) from error


class Inline:
    """Runs seeds in this process, with the methods of :class:`Pool`.

    Torch uses one thread, as in a pool's workers, because the order in which it adds numbers depends on this.
    """

    #: Number of chunks of seeds that are in progress at a time.
    window = 1

    def __init__(self, payload: bytes) -> None:
        self.hash_seed = environment.hash_seed()
        self._payload = payload
        self._no_log = logging.NullHandler()
        _log.addHandler(self._no_log)
        self._thread_count = torch.get_num_threads()
        torch.set_num_threads(1)

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Call ``function(payload, *args)``, and return a completed future with its result."""
        future: Future[Any] = Future()
        future.set_result(function(self._payload, *args))
        return future

    def end(self) -> None:
        """Remove the log handler that this object added, and restore torch's number of threads."""
        _log.removeHandler(self._no_log)
        torch.set_num_threads(self._thread_count)

    def drop_the_rest(self) -> None:
        """Do nothing, because every call has already returned."""


class Pool:
    """Runs seeds in worker processes.

    Workers that are still running a seed when the pool closes are killed. Each worker also exits when this process
    closes the other end of the worker's pipe, its *lifeline*. SIGINT is blocked in the workers, because a terminal
    sends it to all processes, but only this process should react to it.
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
        environ = {**environment.environment(), environment.HASH_SEED_VARIABLE: self.hash_seed}
        with _modules_of_others_ignored():  # creating the executor's locks starts a process
            self._executor = ProcessPoolExecutor(
                process_count, mp_context=context, initializer=_begin_worker, initargs=(self._reader, environ)
            )

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Schedule ``function(payload, *args)`` in a worker, and return a future for its result."""
        if len(self._processes) < self._process_count:  # workers are started one by one, when they are needed
            others = set(multiprocessing.active_children())
            with (
                _sigint_blocked(),
                _modules_of_others_ignored(),
                environment.variable_set(environment.HASH_SEED_VARIABLE, self.hash_seed),
            ):
                future = self._executor.submit(function, self._payload, *args)
                self._processes |= set(multiprocessing.active_children()) - others
        else:
            future = self._executor.submit(function, self._payload, *args)
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        return future

    def drop_the_rest(self) -> None:
        """Cancel the pending calls. If a running call does not end soon, kill all workers and use one new worker."""
        for future in list(self._futures):
            future.cancel()
        if wait(set(self._futures), timeout=_PATIENCE_S).not_done:
            self.end()
            self._start(1)

    def end(self) -> None:
        """End all workers, and return when none is left."""
        if self._futures:
            for process in self._processes:
                process.kill()
        self._writer.close()
        self._executor.shutdown(cancel_futures=True)
        self._reader.close()


@contextlib.contextmanager
def open_runner(payload: bytes, process_count: int) -> Iterator[Inline | Pool]:
    """Open a :class:`Pool`, or an :class:`Inline` for one process, until the context ends."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.exit(1)  # the parent process reports that the script has no ``__main__`` guard
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


def _modules_of_others_ignored() -> contextlib.AbstractContextManager[None]:
    """Prevent processes that are started in this context from importing modules from the working directory.

    The directory may be shared, and the processes may import modules before they receive this process's module path.
    """
    return environment.variable_set(environment.SAFE_PATH_VARIABLE, "1")


def _begin_worker(lifeline: Connection, environ: Mapping[str, str]) -> None:
    environment.replace(environ)

    def die_with_it() -> None:
        with contextlib.suppress(EOFError, OSError):
            lifeline.recv_bytes()
        os._exit(0)

    threading.Thread(target=die_with_it, daemon=True, name="lifeline").start()
    torch.set_num_threads(1)
    _log.addHandler(logging.NullHandler())
