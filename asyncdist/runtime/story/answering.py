"""Reports a rank's current waits on request, and prints the waits of all ranks if no rank makes progress.

A separate thread answers the requests. The loop collects the waits or, if ``main`` blocks the loop, the thread does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import selectors
import socket
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

from asyncdist import local_host
from asyncdist.live.counters import RankCounters, counters_of
from asyncdist.runtime.story.collecting import Activity, collect, seconds_waited
from asyncdist.runtime.world import World
from asyncdist.story import sockets
from asyncdist.story.event_texts import ABORT
from asyncdist.story.facts import RankStory, to_bytes
from asyncdist.story.formatting import describe_job, describe_rank
from asyncdist.story.sockets import RankSocket
from asyncdist.wording import seconds_in_words

logger = logging.getLogger("asyncdist.runtime.story.answering")

#: Bytes that wake the thread, to end it or to make it print the reports of all ranks.
_END: Final = b"!"
_ASKED: Final = b"?"

#: Seconds in which the loop must answer. After that, it counts as blocked.
_LOOP_S: Final = 0.3
#: Number of checks for progress within ``stall_s`` seconds, and maximum seconds between two checks.
_LOOKS_IN_STALL: Final = 4
_PERIOD_S_MAX: Final = 1.0
#: Number of other ranks that record a printed report, because the loop of the printing rank may be blocked.
_KEEPER_COUNT: Final = 4
#: Seconds between a signal and the report. In this time, the signal reaches all ranks, and only one of them prints.
_ASKED_TOGETHER_S: Final = 0.3
#: Seconds during which a rank answers other ranks that it has received the signal, because a signal is not handled
#: while compiled code runs.
_ASKED_S: Final = 3.0


class WaitReporter:
    """Reports one rank's waits on request over a socket, and the waits of all ranks if no rank makes progress.

    All ranks' waits are printed after ``stall_s`` seconds without progress, or never if ``stall_s`` is infinity.
    """

    def __init__(self, world: World, main: asyncio.Task[object], stall_s: float) -> None:
        self.reported_at = -math.inf
        self._world = world
        self._main = main
        self._loop = asyncio.get_running_loop()
        self._thread_of_rank = threading.get_ident()
        self._activity = Activity(world)
        self._stall_s = stall_s
        #: Time of this rank's last progress before the last printed report.
        self._reported_progress_at: float | None = None
        self._look_again_at = 0.0
        self._asking: threading.Thread | None = None
        self._asked: RankStory | None = None  # this rank's report from the moment of the signal
        self._asked_at = -math.inf
        self._printing: threading.Thread | None = None
        self._period_s = min(_PERIOD_S_MAX, stall_s / _LOOKS_IN_STALL)
        self._listener: socket.socket | None = None
        self._path: Path | None = None
        self._wake: tuple[socket.socket, socket.socket] | None = None
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Open a socket, if this host has a folder for sockets, and start the thread that answers on it.

        If the system does not allow this, for example because the user has too many threads, log a warning.
        """
        try:
            opened = sockets.listen(self._world.services.job, self._world.rank)
            if opened is None:
                return
            self._listener, self._path = opened
            self._wake = socket.socketpair()
            thread = threading.Thread(target=self._serve, name="asyncdist story", daemon=True)
            thread.start()
        except (OSError, RuntimeError) as error:
            logger.warning("rank %d cannot report its waits to other processes: %s", self._world.rank, error)
            self._close()
            self._listener = self._path = None
        else:
            self._thread = thread

    def end(self) -> None:
        """Stop answering requests for reports, and close the sockets."""
        if self._thread is None or self._wake is None or self._listener is None or self._path is None:
            return
        self._wake[1].send(_END)
        self._thread.join()
        if self._printing is not None:
            self._printing.join(_ASKED_TOGETHER_S + sockets.ANSWER_S)
        self._close()
        self._thread = None

    def _close(self) -> None:
        for each in (self._listener, *(self._wake or ())):
            if each is not None:
                each.close()
        if self._path is not None:
            sockets.withdraw(self._path)

    def forget_in_child(self) -> None:
        """Close this rank's socket in a forked child.

        The child would otherwise keep it open after the rank's death.
        """
        if self._listener is not None:
            self._listener.close()
            self._thread = None

    def has_reported_standstill(self) -> bool:
        """Return whether any rank has printed the reports of all ranks since this rank's last progress."""
        return self.reported_at >= self._activity.progressed_at

    # -- in the rank's thread, or in a signal's handler there ---------------------------------------------------------

    def report(self) -> str:
        """Report the waits of the ranks on this host, because this rank has received the signal that requests a report.

        The answering thread asks the other ranks and prints all reports, unless a lower rank has also received the
        signal and prints them.

        Returns:
            This rank's report, for the caller to print, if there are no other ranks to ask. Otherwise "".
        """
        self._activity.sample()
        runs = asyncio.current_task(self._loop) is not None or not self._loop.is_running()
        own = collect(self._world, self._main, self._activity, sys._getframe(1) if runs else None)
        if self._thread is None or self._wake is None or not self._other_sockets():
            return describe_rank(own)
        self._asked, self._asked_at = own, time.monotonic()
        self._wake[1].send(_ASKED)  # Starting a thread in a signal handler could deadlock with the interrupted code.
        return ""

    def report_abort(self) -> str:
        """Return and record a report on the waits of all ranks on this host, because the job is being aborted."""
        text = describe_job(*self._ask_all(collect(self._world, self._main, self._activity)))
        self._world.services.events.record("told", f"{ABORT}; {text}")
        return text

    # -- in the thread ------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        assert self._listener is not None and self._wake is not None, "it has begun"
        with selectors.DefaultSelector() as ready:
            ready.register(self._listener, selectors.EVENT_READ)
            ready.register(self._wake[0], selectors.EVENT_READ)
            look_at = time.monotonic() + self._period_s
            while True:
                events = ready.select(max(0.0, look_at - time.monotonic()))
                woken = {key.fileobj for key, _ in events}
                if self._wake[0] in woken and self._wake[0].recv(1) == _END:
                    return
                try:
                    self._activity.sample()
                    if self._asked is not None:
                        self._begin_to_print_all()
                    if self._listener in woken:
                        self._answer(self._listener)
                    if time.monotonic() >= look_at:  # Check even if requests arrive continuously.
                        look_at = time.monotonic() + self._period_s
                        self._renew_listener(ready)
                        self._look()
                except Exception as error:  # A report must never end a run.
                    logger.debug("rank %d could not report its waits", self._world.rank, exc_info=error)

    def _renew_listener(self, ready: selectors.BaseSelector) -> None:
        """Listen on a new socket if the socket's file was removed, for example when the user's last session ended."""
        assert self._listener is not None and self._path is not None, "it has begun"
        if os.path.lexists(self._path):
            return
        opened = sockets.listen(self._world.services.job, self._world.rank)
        if opened is not None:
            ready.unregister(self._listener)
            self._listener.close()
            self._listener, self._path = opened
            ready.register(self._listener, selectors.EVENT_READ)

    def _answer(self, listener: socket.socket) -> None:
        client, _ = listener.accept()
        with client:
            if not sockets.is_of_own_user(client):
                return
            client.settimeout(sockets.ANSWER_S)
            question = client.recv(len(sockets.STORY))
            if question == sockets.STORY:
                client.sendall(to_bytes(self._story()))
            elif question == sockets.COUNTERS:
                self._world.services.count_waits()
                client.sendall(to_bytes(self._counters()))
            elif question == sockets.REPORTED:
                self._note_reported(_read_all(client))
            elif question == sockets.PULSE:
                client.sendall(sockets.YES)
            elif question == sockets.ASKED:
                was_asked = time.monotonic() - self._asked_at < _ASKED_S
                client.sendall(sockets.YES if was_asked else sockets.NO)

    def _counters(self) -> RankCounters:
        found = counters_of(self._world.services)
        with contextlib.suppress(RuntimeError, AttributeError):  # ``main`` continued while its wait was read.
            return replace(found, waiting_s=seconds_waited(self._main, self._world))
        return found

    def _story(self) -> RankStory:
        answer: list[RankStory] = []
        is_there = threading.Event()

        def collect_in_loop() -> None:
            if not has_given_up:
                with contextlib.suppress(Exception):
                    answer.append(collect(self._world, self._main, self._activity))
                is_there.set()

        has_given_up = False
        with contextlib.suppress(RuntimeError):  # Raised if the loop is closed.
            self._loop.call_soon_threadsafe(collect_in_loop)
            is_there.wait(_LOOP_S)
        has_given_up = True
        if answer:
            return answer[0]
        while True:
            frame = sys._current_frames().get(self._thread_of_rank)
            with contextlib.suppress(RuntimeError):  # A dictionary changed while it was read, so collect again.
                return collect(self._world, self._main, self._activity, frame)

    # -- after a signal -----------------------------------------------------------------------------------------------

    def _begin_to_print_all(self) -> None:
        if self._printing is None or not self._printing.is_alive():
            self._printing = threading.Thread(target=self._print_all, args=(self._asked,), daemon=True)
            self._printing.start()
        self._asked = None

    def _print_all(self, own: RankStory) -> None:
        try:
            time.sleep(_ASKED_TOGETHER_S)
            if not sockets.were_asked([peer for peer in self._other_sockets() if peer.rank < self._world.rank]):
                local_host.print_line(f"asyncdist: {describe_job(*self._ask_all(own))}")
        except Exception as error:  # A report must never end a run.
            logger.debug("rank %d could not report the waits of all ranks", self._world.rank, exc_info=error)

    # -- if nothing moves ---------------------------------------------------------------------------------------------

    def _look(self) -> None:
        now = time.monotonic()
        still_s = self._activity.still_s()
        is_news = still_s >= self._stall_s and self._activity.progressed_at != self._reported_progress_at
        is_asking = self._asking is not None and self._asking.is_alive()
        if is_news and now >= self._look_again_at and not is_asking:
            # The other ranks are asked in a separate thread, because this thread must answer their requests.
            self._asking = threading.Thread(target=self._try_to_report, name="asyncdist story, asking", daemon=True)
            self._asking.start()

    def _try_to_report(self) -> None:
        try:
            self._report_if_none_progresses()
        except Exception as error:  # A report must never end a run.
            logger.warning("rank %d could not report that no rank makes progress", self._world.rank, exc_info=error)

    def _report_if_none_progresses(self) -> None:
        if not self._does_lower_rank_report():
            stories, silent = self._ask_all(self._story())
            least_s = min(story.still_s for story in stories.values())
            if least_s < self._stall_s:
                self._look_again_at = time.monotonic() + self._stall_s - least_s
            elif any(story.state != "computes" for story in stories.values()):
                self._report_standstill(stories, silent, least_s)
            else:
                self._look_again_at = time.monotonic() + self._stall_s / _LOOKS_IN_STALL

    def _report_standstill(self, stories: dict[int, RankStory], silent: list[RankSocket], still_s: float) -> None:
        what = f"no rank here has made a step or received a message for {seconds_in_words(still_s)}"
        text = f"{what}; {describe_job(stories, silent)}"
        self._note_reported(text)
        for count, peer in enumerate(self._other_sockets()):
            sockets.notify_reported(peer, text if count < _KEEPER_COUNT else "")
        local_host.print_line(f"asyncdist: {text}")

    def _note_reported(self, text: str) -> None:
        """Record that the reports were printed. If ``text`` is not empty, let the loop add it to the rank's events."""
        if text:
            with contextlib.suppress(RuntimeError):  # Raised if the loop is closed.
                self._loop.call_soon_threadsafe(self._world.services.events.record, "told", text)
        self._reported_progress_at = self._activity.progressed_at
        self.reported_at = time.monotonic()
        self._stall_s *= 2  # Print the next report only after twice the time.

    def _other_sockets(self) -> list[RankSocket]:
        assert self._path is not None, "it has begun"
        return [peer for peer in sockets.rank_sockets(self._path.parent) if peer.rank != self._world.rank]

    def _does_lower_rank_report(self) -> bool:
        """Return whether a lower rank on this host is alive, and therefore prints the reports instead of this rank."""
        lower = (peer for peer in self._other_sockets() if peer.rank < self._world.rank)
        return any(sockets.answers_pulse(peer) for peer in lower)

    def _ask_all(self, own: RankStory) -> tuple[dict[int, RankStory], list[RankSocket]]:
        others = [] if self._path is None else self._other_sockets()
        stories = {own.rank: own, **sockets.ask(others)}
        return dict(sorted(stories.items())), [each for each in others if each.rank not in stories]


def _read_all(client: socket.socket) -> str:
    """Return the text that a client sends before it closes the connection or its timeout passes."""
    data = bytearray()
    with contextlib.suppress(TimeoutError):
        while len(data) < sockets.REPORT_NBYTES_MAX and (part := client.recv(sockets.REPORT_NBYTES_MAX)):
            data += part
    return data.decode("utf-8", "replace")
