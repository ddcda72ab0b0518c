"""Measures the CPU time that a coordinator of selective averaging needs for a round, and the bytes that it sends.

The coordinator is the real one, with its channels, codecs and frames, but without a transport or simulator. The
members' messages are frames in memory, and outgoing frames are counted. The figure is therefore the time for receiving
reports, deciding, and notifying all members, without the work of a transport. The CPU time of the stand-in for the
transport is measured separately and subtracted.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from types import SimpleNamespace
from typing import Any, Final

from asyncdist import tags
from asyncdist.messaging import wire
from asyncdist.messaging.channels import Channel
from asyncdist.messaging.demultiplexer import TagDemultiplexer
from asyncdist.waits import WaitId
from protocols.joining.scopes import PolicyScopes
from protocols.selective.coordinator import Coordinator
from protocols.selective.messages import DONOR, Applied, ControlMessage, PackedAssign, Ready, Report
from protocols.selective.selection import Route, SelectiveRules

_NONCE: Final = 7
_TO_MEMBERS: Final = 1
_TO_COORDINATOR: Final = 2
#: Number of messages that arrive between two turns of the coordinator.
_BATCH_COUNT: Final = 64
#: Seconds between reports.
_CADENCE_S: Final = 10.0
_MODEL_NBYTES: Final = 132


class _Arrivals:
    """Stands in for a persistent receive: copies prepared frames into the buffer."""

    source = -1

    def __init__(self, buffer: Any) -> None:
        self._view = memoryview(buffer).cast("B")
        self.frames: deque[tuple[int, bytes]] = deque()

    def start(self) -> None:
        """Post the receive."""

    def take(self) -> tuple[int, int] | None:
        """Return the source and the size of the next frame."""
        if not self.frames:
            return None
        source, frame = self.frames.popleft()
        self._view[: len(frame)] = frame
        return source, len(frame)


class _Engine:
    """Stands in for the engine and the transport of the coordinator's rank."""

    failure = None
    notes_sends = False
    capabilities = SimpleNamespace(wakes=True)

    def __init__(self, size: int) -> None:
        self.size = size
        self.transport = self
        self.loop: Any = SimpleNamespace(time=time.perf_counter)
        self.sent: list[tuple[int, bytearray]] = []
        self.arrivals: _Arrivals

    def shared(self, make: Callable[..., Any], *args: Any) -> Any:
        """Return a new object, because there is only one rank."""
        return make(*args)

    def start_send(self, frame: bytearray, dest: int, tag: int) -> None:
        """Record an outgoing frame, whose send counts as complete."""
        self.sent.append((dest, frame))

    def prepare_send(self, nbytes: int, dest: int, tag: int) -> None:
        """Return None, because the stand-in, like the simulator, does not prepare sends."""

    def persistent_receive(self, buffer: Any, tag: int) -> _Arrivals:
        """Return the only receive with this tag."""
        self.arrivals = _Arrivals(buffer)
        return self.arrivals

    def add_pollable(self, pollable: Any) -> None:
        """Do nothing, because the benchmark polls."""

    def ring(self) -> None:
        """Do nothing."""

    recheck = ring

    async def until(self, condition: Callable[[], bool], what: WaitId, *, deadline: float | None = None) -> None:
        """Return control to the benchmark until there is work."""
        while not condition():
            await _Turn()


class _Turn:
    def __await__(self) -> Generator[None]:
        yield


class _Services:
    """Stands in for the services that a coordinator uses on its rank: a clock, notices of lost ranks, and channels."""

    rank = incarnation = 0
    gone: frozenset[int] = frozenset()

    def __init__(self, size: int) -> None:
        self.engine: Any = _Engine(size)
        self.restarted: dict[int, int] = {}
        self.now = 0.0
        self.receivers: dict[int, tuple[Any, _Arrivals]] = {}

    def time(self) -> float:
        """Return the time that the benchmark has set."""
        return self.now

    def on_gone(self, listener: Callable[[int], None]) -> None:
        """Ignore the listener, because no rank is lost."""

    off_gone = on_gone

    def open_channel(self, message_types: Any, *, tag: int, scope: int, **options: Any) -> Channel[Any]:
        """Open a real channel on its own tag."""
        demultiplexer = TagDemultiplexer(self.engine, tag, _NONCE, flow=None, sent_to=set(), received_from=set())
        self.receivers[tag] = demultiplexer.receiver, self.engine.arrivals
        given = {"overflow": "error", "capacity": 4096, **options}
        return Channel(demultiplexer, wire.Codec(message_types), scope, **given)

    def hear(self, task: Any, tag: int, frames: list[tuple[int, bytes]]) -> float:
        """Deliver frames, run the coordinator's task, and return its CPU time in seconds without the stand-in's."""
        receiver, arrivals = self.receivers[tag]
        self.now += 0.1
        took_s = 0.0
        for is_whole in (True, False):
            began_s = time.process_time()
            for start in range(0, len(frames), _BATCH_COUNT):
                arrivals.frames.extend(frames[start : start + _BATCH_COUNT])
                if is_whole:
                    receiver.poll()
                    task.send(None)
                while arrivals.take() is not None:
                    pass
            took_s += (1 if is_whole else -1) * (time.process_time() - began_s)
        return took_s


class _Members:
    """Makes the frames that arrive from all members."""

    def __init__(self) -> None:
        self._codecs: dict[int, wire.Codec] = {
            tags.METRIC: wire.Codec(Report),
            tags.CONTROL: wire.Codec(ControlMessage),
        }
        self._sequence = itertools.count(1)

    def frames(self, tag: int, round: int, messages: Iterable[tuple[int, Any]]) -> list[tuple[int, bytes]]:
        """Pack messages into frames, each with its source."""
        found = []
        for source, message in messages:
            kind, payload = self._codecs[tag].encode(message)
            writer = wire.FrameWriter(wire.pack_route(kind, _NONCE, 0, _TO_COORDINATOR))
            found.append((source, bytes(writer.frame(round, next(self._sequence), payload))))
        return found

    def parts(self, sent: list[tuple[int, bytearray]]) -> tuple[int, list[int], list[int]]:
        """Return the round, the donors and the replacers of the assignments in sent frames."""
        donors: list[int] = []
        replacers: list[int] = []
        for dest, frame in sent:
            route = wire.unpack_route(bytes(frame[4:20]))
            message = self._codecs[tags.CONTROL].decoders[route.kind](bytes(frame[wire.HEADER_NBYTES :]))
            assert isinstance(message, PackedAssign)
            assign = message.opened(dest)
            assert assign is not None
            (donors if assign.role == DONOR else replacers).append(dest)
        return int.from_bytes(sent[0][1][20:24], "little"), donors, replacers


def coordinator_costs(size: int, round_count: int, route: Route = "auto") -> dict[str, float]:
    """Return the coordinator's least CPU time, bytes and messages, per round and member, with ``size`` members.

    All members report, a quarter of them is replaced, all donors are ready and all replacers apply.
    """
    services, members = _Services(size), _Members()
    rules = SelectiveRules(replacement_ratio=0.25, quorum=1.0, route=route)
    scopes = PolicyScopes(_TO_MEMBERS, _TO_COORDINATOR)
    given: Any = services
    coordinator = Coordinator(given, range(size), range(size), rules, scopes, epoch=0, model_nbytes=_MODEL_NBYTES)
    task: Any = coordinator.serve()
    task.send(None)
    sent = services.engine.sent
    gc.collect()
    gc.freeze()  # excludes collections of other objects from the figure
    best_s, nbytes, message_count = float("inf"), 0, 0

    for number in range(1, round_count + 1):
        sent.clear()
        services.now += _CADENCE_S
        values = [float((rank * 7919 + number) % size) for rank in range(size)]
        reports = [(rank, Report(50 * number, value, 0.01, _CADENCE_S, host=1)) for rank, value in enumerate(values)]
        took_s = services.hear(task, tags.METRIC, members.frames(tags.METRIC, 0, reports))
        at, donors, replacers = members.parts(sent)
        ready = [(each, Ready(1)) for each in donors]
        took_s += services.hear(task, tags.CONTROL, members.frames(tags.CONTROL, at, ready))
        applied = [(each, Applied(50 * number + 9)) for each in replacers]
        took_s += services.hear(task, tags.CONTROL, members.frames(tags.CONTROL, at, applied))
        message_count, nbytes = len(sent), sum(len(frame) for _, frame in sent)
        best_s = min(best_s, took_s - _sending_s(sent))
    assert coordinator.core.statistics().rounds_ended == round_count
    gc.unfreeze()
    task.close()
    return {
        "ranks": size,
        "us": best_s / size * 1e6,
        "messages": message_count / size,
        "nbytes": nbytes / size,
    }


def _sending_s(sent: list[tuple[int, bytearray]]) -> float:
    """Return the seconds that the stand-in needs to record these frames."""
    engine = _Engine(0)
    began_s = time.process_time()
    for dest, frame in sent:
        engine.start_send(frame, dest, tags.CONTROL)
    return time.process_time() - began_s


if __name__ == "__main__":
    for ranks in (100, 1000, 4000):
        for way in ("direct", "auto", "sharded"):
            costs = coordinator_costs(ranks, 10, way)
            print(f"{ranks} members, {way}: {costs['us']:.1f} us, {costs['nbytes']:.0f} bytes for each")
