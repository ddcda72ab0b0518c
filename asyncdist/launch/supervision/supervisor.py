"""Waits for a job's ranks, restarts or stops them, and finds out the exit code. For ranks without mpirun.

- As with mpirun, the first rank to fail decides the exit code, unless it ends with code 1, as Python does after any
  exception. Such a rank often stopped only because a different rank was failing, which ends later. A rank that fails in
  another way within ``SETTLE_S`` seconds is therefore the cause.
- The other ranks get SIGTERM, and are killed after ``launcher_signals.STOP_S``.
- A rank that was killed by a signal may be restarted. In the store, the supervisor records how processes have ended.
- A signal that ends the job kills ranks that have joined another launcher's world. If they were allowed to stop on
  their own, they would report a failure, which would end that world.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Final, Generic, Literal, Protocol, TypeAlias, TypeVar

from asyncdist import environment, local_host
from asyncdist.launch import store_server
from asyncdist.launch.supervision import endings
from asyncdist.launchers import launcher_signals
from asyncdist.wording import ranks_in_words

#: Seconds between a rank's exit with code 1 and the signal that stops the other ranks.
SETTLE_S: Final = 2.0

#: Kind of an event, and a signal number or rank. A "key" is a signal that has also reached the terminal's foreground
#: processes. "store" means that the process that serves the store has ended; its number is the return code.
Event: TypeAlias = tuple[Literal["signal", "key", "ended", "late", "store"], int]


class Process(Protocol):
    """The process of a rank, on this host or another host, with a ``returncode`` as in :mod:`subprocess`.

    Attributes:
        is_lost: Whether the connection to the rank's host has ended. The other ranks then continue without the rank.
    """

    returncode: int | None
    is_lost: bool

    def send_signal(self, number: int, /) -> None:
        """Send a signal to the process if it is running."""

    def end(self) -> None:
        """Kill the rank and all processes that it has started."""


P = TypeVar("P", bound=Process)


@contextlib.contextmanager
def signals_as_events(events: queue.SimpleQueue[Event]) -> Iterator[None]:
    """Put the signals that arrive during the ``with`` block in the queue ``events``."""
    with launcher_signals.signals_received(lambda number, is_key: events.put(("key" if is_key else "signal", number))):
        yield


class Supervisor(Generic[P]):
    """Starts and supervises the ranks of a job.

    Args:
        start: Function that starts the process of a rank with the given variables.
        environments: Environment variables of each rank's first process, by rank.
        restarts: Maximum number of restarts of each rank.
        store: Process that sets keys in the store; None if no rank may join.
        is_open: Whether a new process may take over the rank number of a killed rank that is not restarted.
        have_joined: Whether these ranks have joined another launcher's world.
        at_terminal: Ranks to which the terminal itself sends the signals of its keys, such as Ctrl-C.

    Attributes:
        processes: Newest process of each rank that has been started.
    """

    def __init__(
        self,
        events: queue.SimpleQueue[Event],
        start: Callable[[int, Mapping[str, str]], P],
        environments: Mapping[int, Mapping[str, str]],
        *,
        restarts: int = 0,
        store: subprocess.Popen[bytes] | None = None,
        is_open: bool = False,
        have_joined: bool = False,
        at_terminal: Collection[int] = (),
    ) -> None:
        self.processes: dict[int, P] = {}
        self._events = events
        self._start = start
        self._environments = environments
        self._restarts = restarts
        self._store = store
        self._is_open = is_open
        self._can_lose_ranks = restarts > 0 or is_open
        self._have_joined = have_joined
        self._at_terminal = at_terminal
        self._first = {rank: int(each.get(environment.INCARNATION_VARIABLE, 0)) for rank, each in environments.items()}
        self._newest = dict(self._first)
        self._living: set[int] = set()
        self._victims: list[int] = []  # ranks that ended with 1 and may be the cause
        self._passed_on: set[int] = set()
        self._code = self._lost_code = 0
        self._deadline: float | None = None

    def run(self) -> int:
        """Start all ranks, wait for them, and return the job's exit code."""
        for rank, variables in self._environments.items():
            self.processes[rank] = self._start(rank, variables)
        store = self._store
        if store is not None and not self._have_joined:
            awaiting = threading.Thread(target=lambda: self._events.put(("store", store.wait())), daemon=True)
            awaiting.start()
        return self.supervise()

    def supervise(self) -> int:
        """Wait for all ranks, and return the job's exit code. If a rank fails or a signal ends the job, stop them."""
        self._living = set(self.processes)
        while self._living:
            match self._next_event():
                case ("late", _):
                    self._end_late()
                case ("ended", rank):
                    self._note_end(rank)
                case ("store", returncode):
                    self._do_without_store(returncode)
                case (origin, number):
                    self._handle_signal(number, is_key=origin == "key")
        return self._code or (_explain(self._victims, 1, others=False) if self._victims else self._lost_code)

    def _next_event(self) -> Event:
        try:
            left_s = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            return self._events.get(timeout=left_s)
        except queue.Empty:
            return ("late", 0)

    def _end_late(self) -> None:
        if self._code:  # the signal that should stop the ranks has not ended them in time
            self._deadline = None
            self._kill()
        else:  # no rank failed in another way, so the rank that ended with 1 is the cause
            self._stop_after(_explain(self._victims, 1, others=True))

    def _handle_signal(self, number: int, *, is_key: bool) -> None:
        if number not in launcher_signals.ENDING_SIGNALS:
            self._passed_on.add(number)
            self._send(number, is_key=is_key)
            launcher_signals.stop_with_ranks(number)
            return
        if not self._code:
            if self._victims:  # reports the failure before the ranks are stopped
                _explain(self._victims, 1, others=True)
            self._code, self._deadline = 128 + number, None
        self._deadline = self._deadline or time.monotonic() + launcher_signals.STOP_S
        if self._have_joined:
            self._kill()
        else:
            self._send(number, is_key=is_key)

    def _note_end(self, rank: int) -> None:
        self._living.discard(rank)
        process = self.processes[rank]
        process.end()  # ends the rank's remaining child processes
        returncode = process.returncode
        assert returncode is not None, "it has ended"
        self._note(f"exited/{rank}.{self._newest[rank]}")  # so that no rank tries to connect to this process
        if self._is_open and returncode >= 0:
            self._note_place(rank, is_free=bool(returncode) and self._have_joined)
        if self._code or not returncode:
            return
        if process.is_lost:  # this was reported when the connection ended
            self._lost_code = self._lost_code or returncode
        elif returncode > 0 and (self._have_joined or self._newest[rank]):  # the ranks of the joined job decide
            self._lost_code = self._lost_code or returncode
            newcomer = "which had joined the others" if self._have_joined else "which was restarted"
            local_host.print_launcher_line(f"rank {rank}, {newcomer}, {endings.describe_end(returncode)}")
        elif self._can_lose_ranks and returncode < 0 and not self._victims and -returncode not in self._passed_on:
            self._replace(rank, returncode)
        elif returncode == 1:
            self._victims.append(rank)
            self._deadline = self._deadline or time.monotonic() + SETTLE_S
        else:
            others, was_passed_on = bool(self._living), -returncode in self._passed_on
            self._stop_after(_explain([rank], returncode, others=others, was_passed_on=was_passed_on))

    def _replace(self, rank: int, returncode: int) -> None:
        """Restart a killed rank, unless it has no restarts left, no other rank is left, or starting a process fails."""
        why = endings.describe_end(returncode)
        number = self._newest[rank] - self._first[rank]
        has_others = bool(self._living) or self._have_joined
        left = "the others continue without it" if has_others else "no other rank is left for it to join"
        is_only_one = len(self._environments) == 1  # a job's only rank can start a new world alone
        if (has_others or is_only_one) and number < self._restarts:
            local_host.print_launcher_line(f"rank {rank} {why}; restarting it ({number + 1} of {self._restarts})")
            newest = str(self._newest[rank] + 1)
            try:
                variables = {**self._environments[rank], environment.INCARNATION_VARIABLE: newest}
                self.processes[rank] = self._start(rank, variables)
            except local_host.LaunchError as error:  # for example, fork() found no memory
                local_host.print_launcher_line(f"{error}: {left}")
            else:
                self._newest[rank] += 1
                self._living.add(rank)
                return
        else:
            again = f"; it is not restarted ({number} of {self._restarts})" if self._restarts else ""
            local_host.print_launcher_line(f"rank {rank} {why}{again}: {left}")
        if self._is_open:
            self._note_place(rank, is_free=True)
        else:
            self._note("gone", str(rank))
        if not self._is_open or self._have_joined or not self._living:  # the job does not continue without this rank
            self._lost_code = self._lost_code or 128 - returncode

    def _do_without_store(self, returncode: int) -> None:
        """Report that the store's process has ended. No killed rank is restarted from now on."""
        if not self._code:
            self._restarts = 0
            local_host.print_launcher_line(
                f"the process that serves the store {endings.describe_end(returncode)}: no rank can join or be "
                "restarted, and ranks that are not connected yet will fail"
            )

    def _note_place(self, rank: int, *, is_free: bool) -> None:
        self._note(f"place/{rank}", f"free {self._newest[rank] + 1}" if is_free else "left")

    def _note(self, key: str, value: str = "") -> None:
        """Set a key in the store."""
        if self._store is not None:
            store_server.send_line(self._store, f"asyncdist/{key} {value}")

    def _stop_after(self, code: int) -> None:
        self._code, self._deadline = code, time.monotonic() + launcher_signals.STOP_S
        self._send(signal.SIGTERM)

    def _kill(self) -> None:
        for rank in self._living:
            self.processes[rank].end()

    def _send(self, number: int, *, is_key: bool = False) -> None:
        """Send a signal to the running ranks, except those that have already received it from the terminal."""
        for rank in self._living:
            if not (is_key and rank in self._at_terminal):
                self.processes[rank].send_signal(number)


def _explain(ranks: Sequence[int], returncode: int, *, others: bool, was_passed_on: bool = False) -> int:
    stopping = "; stopping the others" if others else ""
    local_host.print_launcher_line(
        f"{ranks_in_words(ranks)} {endings.describe_end(returncode, was_passed_on=was_passed_on)}{stopping}"
    )
    return endings.exit_code(returncode)
