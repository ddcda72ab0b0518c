"""Passes frames, most of them damaged, to a rank's receive path, on channels of all kinds.

Each channel that the code opens (:mod:`fuzzing.channel_sites`) is open here, on its own tag and with its own settings.
In addition, a user's channel is open for a message with fields of all types that can be sent. A frame may only be
received, or be counted as dropped; all frames are accounted for. Meanwhile the channels enter new epochs, and are
closed and opened again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from support.drawing import draw_message
from support.local import NONCE, engines

from asyncdist.messaging import wire
from asyncdist.messaging.channels import Channel, Envelope
from asyncdist.messaging.engine import yield_to_loop
from asyncdist.messaging.services import PROTOCOL_CAPACITY, Services
from fuzzing.channel_sites import ChannelSite, channel_sites
from fuzzing.mutations import mutate, odd_values

SIZE: Final = 8
USER_TAG: Final = 77
#: Number of frames between two changes of a channel, between two checks of all counts, and between two turns of the
#: loop.
CHANGE_PERIOD: Final = 5_000
CHECK_PERIOD: Final = 50_000
#: Payloads for each message type: damaged ones that may be damaged further, and valid msgpack of wrong types.
_DAMAGED_COUNT: Final = 64
_ODD_COUNT: Final = 12
_MESSAGE_COUNT: Final = 8
_TEXTS: Final = ("", "x", "donor", "replacer", "float32", "tensor", "dict", "barrier on ranks 0-3,5, time 2")
_HEADER: Final = struct.Struct("=16sIQ")
_CRC: Final = struct.Struct("=I")


@dataclass(frozen=True, slots=True)
class Point:
    """A message inside another message."""

    x: float
    y: float


@dataclass(frozen=True, slots=True)
class Everything:
    """A user's message with fields of all types that can be sent."""

    flag: bool
    count: int
    value: float
    text: str
    data: bytes
    nothing: None
    maybe: int | None
    either: int | str | None
    numbers: tuple[float, ...]
    pair: tuple[int, str]
    point: Point
    path: tuple[Point, ...]
    grid: tuple[tuple[int, ...], ...]
    maybe_point: Point | None

    def __post_init__(self) -> None:
        """Refuse some values by a separate error, as a user's class may do."""
        if self.count == 7:
            raise RuntimeError("seven")


@dataclass(frozen=True, slots=True)
class Nothing:
    """A user's message without fields."""


USERS: Final = ChannelSite("a user", Everything | Nothing, USER_TAG, "stall", False, False, False)


class FrameFailure(AssertionError):
    """A frame has done something that no frame may do.

    Attributes:
        seed: Seed of the fuzzer.
        frame: Bytes of the frame.
    """

    def __init__(self, text: str, seed: int, frame: bytes, site: str) -> None:
        super().__init__(f"seed {seed}, {text}; the last frame, for the channel of {site}: {frame.hex()[:2000]}")
        self.seed = seed
        self.frame = frame


@dataclass(slots=True)
class _Kind:
    """Data on one message type of one channel."""

    target: _Target
    number: int
    payloads: list[bytes]
    odd: list[bytes]
    damaged: list[bytes] = field(default_factory=list)
    route: bytes = b""


class _Target:
    """One channel, and the outcomes of its frames."""

    def __init__(self, services: Services, site: ChannelSite, scope: int, rng: random.Random) -> None:
        self.services = services
        self.site = site
        self.scope = scope
        self.epoch = 0
        self.handled_count = 0
        self.channel = self.open()
        codec = wire.Codec(site.message_types)
        self.classes = site.classes
        self.kinds = [
            _Kind(self, number, [codec.encode(_drawn(cls, rng))[1] for _ in range(_MESSAGE_COUNT)], _odd(cls, rng))
            for number, cls in enumerate(self.classes)
        ]
        self.codec = codec
        self.renew_routes()

    def open(self) -> Channel[Any]:
        site = self.site
        self.is_open = True
        self.channel = self.services.open_channel(
            site.message_types,
            tag=site.tag,
            scope=self.scope,
            name=site.where,
            overflow=site.overflow,
            handler=self._on_message if site.has_handler else None,
            epoch=self.epoch if site.has_epochs else None,
            earlier_handler=self._on_earlier if site.has_earlier_handler else None,
            capacity=1 if site.overflow == "stall" else PROTOCOL_CAPACITY,
        )
        return self.channel

    def close(self, *, answers: bool) -> None:
        self.is_open = False
        self.channel.close(afterwards=self._on_message if answers else None)

    def renew_routes(self) -> None:
        for kind in self.kinds:
            kind.route = wire.pack_route(kind.number, NONCE, self.epoch, self.scope)

    def _on_message(self, envelope: Envelope[Any]) -> None:
        self.check(envelope)
        self.handled_count += 1

    def _on_earlier(self, envelope: Envelope[Any]) -> None:
        self.check(envelope)  # the frame already counts as dropped

    def check(self, envelope: Envelope[Any]) -> None:
        """Check that a received message is one that could have been sent."""
        assert type(envelope.message) in self.classes
        if not envelope.round & 15:
            self.codec.encode(envelope.message)


def _drawn(cls: type[Any], rng: random.Random) -> Any:
    while True:
        with contextlib.suppress(ValueError, RuntimeError):
            return draw_message(cls, rng, texts=_TEXTS)


def _odd(cls: type[Any], rng: random.Random) -> list[bytes]:
    return [odd_values(cls.__match_args__, rng) for _ in range(_ODD_COUNT)]


class FrameFuzzer:
    """Feeds frames to one rank.

    Args:
        services: Services of the rank.
        seed: Number that determines all events.

    Attributes:
        fed_count: Number of frames so far.
        received_count: Number of frames that were received as messages.
    """

    def __init__(self, services: Services, seed: int) -> None:
        self._seed = seed
        self._rng = random.Random(f"{seed} frames")
        self._services = services
        sites = (*channel_sites(), USERS)
        self._targets = [_Target(services, site, 1000 + place, self._rng) for place, site in enumerate(sites)]
        self._kinds = [kind for target in self._targets for kind in target.kinds]
        self._kinds += 4 * self._targets[-1].kinds  # kinds of a user's channel, with more types of fields
        self._demultiplexers = services._demultiplexers
        self._mailboxes: dict[int, list[tuple[Any, _Target]]] = {}
        self._note_mailboxes()
        self._buffer = bytearray(wire.FRAME_NBYTES_MAX)
        self._view = memoryview(self._buffer)
        self._frame = wire.FrameReader(self._buffer)
        self._nbytes = 0
        self._kind = self._kinds[0]
        self._sequence = 0
        self._made_room_count = 0
        self._slack = 0
        self.fed_count = self.received_count = 0

    def _note_mailboxes(self) -> None:
        self._mailboxes = {tag: [] for tag in self._demultiplexers}
        for target in self._targets:
            if not target.site.has_handler:
                self._mailboxes[target.site.tag].append((target.channel.inbox.mailbox, target))

    # -- making frames ----------------------------------------------------------------------------------------------

    def _put(self, route: bytes, round: int, sequence: int, payload: bytes) -> None:
        """Write a whole frame with a valid CRC."""
        buffer = self._buffer
        self._nbytes = nbytes = wire.HEADER_NBYTES + len(payload)
        _HEADER.pack_into(buffer, 4, route, round, sequence)
        buffer[wire.HEADER_NBYTES : nbytes] = payload
        _CRC.pack_into(buffer, 0, zlib.crc32(self._view[4:nbytes]))

    def _draw(self) -> int:
        """Write the next frame, and return its source."""
        bits = self._rng.getrandbits(128)
        kind = self._kind = self._kinds[(bits >> 96) % len(self._kinds)]
        payload = kind.payloads[bits >> 48 & 7]
        round_, source = bits >> 50 & 0xFFFF, bits >> 66 & 3
        self._sequence += 1
        match bits >> 90 & 15:
            case 0 | 1 | 2 | 3 | 4 | 5 | 6:
                damaged = kind.damaged
                if damaged and bits >> 88 & 3 == 0:
                    payload = damaged[(bits >> 72) % len(damaged)]
                other = self._kinds[(bits >> 80) % len(self._kinds)].payloads[bits >> 51 & 7]
                payload = mutate(payload, bits & 0xFFFFFFFFFFFF, other)
                if bits >> 75 & 7 == 0:
                    if len(damaged) < _DAMAGED_COUNT:
                        damaged.append(payload)
                    elif len(payload) < 4096:
                        damaged[(bits >> 60) % _DAMAGED_COUNT] = payload
                self._put(kind.route, round_, self._sequence, payload)
            case 7 | 8:
                self._put(kind.route, round_, self._sequence, kind.odd[(bits >> 70) % _ODD_COUNT])
            case 9:
                self._put(kind.route, round_, self._sequence, payload)
            case 10:
                self._put(kind.route, round_, self._sequence, payload)
                self._put(self._odd_route(kind, bits), round_, self._sequence, payload)
            case 11:  # from another rank: a large sequence number makes all later frames old
                sequence = (0, 1, self._sequence, self._sequence - 1, 2**63, 2**64 - 1, bits >> 64, bits & 0xFFFF)
                self._put(kind.route, (0, 2**32 - 1)[bits & 1], sequence[bits >> 1 & 7], payload)
                source += 4
            case 12 | 13:
                self._put(kind.route, round_, self._sequence, payload)
                damaged_frame = mutate(bytes(self._view[: self._nbytes]), bits & 0xFFFFFFFFFFFF, payload)
                self._nbytes = len(damaged_frame)
                self._buffer[: self._nbytes] = damaged_frame
            case 14:
                self._put(kind.route, round_, self._sequence, payload)
                self._nbytes = bits % (self._nbytes + 9)
            case _:
                self._nbytes = bits & 127 if bits >> 8 & 1023 else bits >> 20 & 0xFFFF
                if self._nbytes < 128 or bits >> 19 & 1:
                    self._buffer[: self._nbytes] = self._rng.randbytes(self._nbytes)
                else:  # as long as allowed, and with many fields
                    start = payload[: (bits >> 40) % (len(payload) + 1)] + b"\xdd\0\0\x80\0"
                    filled = (start + b"\0" * wire.FRAME_NBYTES_MAX)[: wire.PAYLOAD_NBYTES_MAX]
                    self._put(kind.route, round_, self._sequence, filled)
        return source

    def _odd_route(self, kind: _Kind, bits: int) -> bytes:
        """Return the frame's route with one wrong part."""
        target = kind.target
        parts = {"kind": kind.number, "nonce": NONCE, "epoch": target.epoch, "scope": target.scope}
        version, reserved = wire.VERSION, 0
        value = (0, 1, 255, bits >> 8 & 255)[bits >> 16 & 3]
        match bits & 7:
            case 0:
                version = value
            case 1:
                reserved = value
            case 2:
                parts["kind"] = value
            case 3:
                parts["nonce"] ^= 1 << (bits >> 20 & 31)
            case 4 | 5:
                parts["epoch"] = max(0, target.epoch + (bits >> 20 & 7) - 4)
            case 6:
                parts["epoch"] = bits >> 20 & 0xFFFFFFFF
            case _:
                parts["scope"] = bits >> 20 & 0xFFFFFFFF
        route = bytearray(wire.pack_route(**parts))
        route[0] = version
        route[2] = reserved
        return bytes(route)

    # -- feeding them -----------------------------------------------------------------------------------------------

    def run(self, count: int) -> Iterator[None]:
        """Feed this number of frames; the loop may run after each step.

        Raises:
            FrameFailure: A frame has raised an error, or has vanished.
        """
        ends_at = self.fed_count + count
        while self.fed_count < ends_at:
            self._change()
            try:
                self._feed(min(CHANGE_PERIOD, ends_at - self.fed_count))
                if self.fed_count % CHECK_PERIOD < CHANGE_PERIOD:
                    self.check()
            except Exception as error:
                text = f"after {self.fed_count} frames: {error!r:.500}"
                frame, site = bytes(self._view[: self._nbytes]), self._kind.target.site.where
                raise FrameFailure(text, self._seed, frame, site) from error
            yield

    def _feed(self, count: int) -> None:
        demultiplexers, mailboxes, frame, draw = self._demultiplexers, self._mailboxes, self._frame, self._draw
        for _ in range(count):
            source = draw()
            tag = self._kind.target.site.tag
            receiver = demultiplexers[tag].receiver
            self.fed_count += 1
            receiver.deliver(frame, self._nbytes, source)
            for mailbox, target in mailboxes[tag]:
                if mailbox:
                    self._take_all(target)
            if receiver.stalled_on is not None:
                self._make_room(tag)

    def _take_all(self, target: _Target) -> None:
        while (envelope := target.channel.receive_nowait()) is not None:
            target.check(envelope)
            self.received_count += 1

    def _make_room(self, tag: int) -> None:
        """Drop the frames that wait for scopes without a channel, as if these channels were opened and closed."""
        demultiplexer = self._demultiplexers[tag]
        self._check_early(tag)
        self._made_room_count += len(demultiplexer.early.take_all())
        demultiplexer.receiver.resume(demultiplexer.receiver)
        assert demultiplexer.receiver.stalled_on is None

    def _change(self) -> None:
        """Let one channel enter a later epoch, or close or open it."""
        rng = self._rng
        target = rng.choice(self._targets)
        if target.site.overflow == "latest":  # several of the waiting frames may compete for one place in the mailbox
            self._slack += len(self._demultiplexers[target.site.tag].early)
        if not target.is_open:
            target.open()
        elif rng.random() < 0.2:
            self._take_all_of(target)
            self._keep_handled(target)
            target.close(answers=target.site.has_handler)
        elif target.site.has_epochs:
            target.epoch += rng.choice((1, 1, 2, 5))
            self._take_all_of(target)
            target.channel.enter_epoch(target.epoch)
        target.renew_routes()
        self._note_mailboxes()
        self._take_all_of(target)

    def _take_all_of(self, target: _Target) -> None:
        if target.is_open and not target.site.has_handler:
            self._take_all(target)

    def _keep_handled(self, target: _Target) -> None:
        self.received_count += target.handled_count
        target.handled_count = 0

    # -- looking at it ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check that every frame was received, was dropped and counted, or waits for its channel."""
        for target in self._targets:
            self._keep_handled(target)
        dropped = sum((each.dropped for each in self._demultiplexers.values()), start=_no_counts())
        waiting = sum(len(each.early) for each in self._demultiplexers.values())
        known = self.received_count + dropped.total() + waiting + self._made_room_count
        # A frame of an earlier epoch is counted as dropped, and may be answered or dropped again.
        twice = dropped["earlier epoch"] + dropped["closed scope"]
        assert self.fed_count - self._slack <= known <= self.fed_count + twice, (
            f"{self.fed_count} frames, of which {known} are accounted for: {dict(dropped)}, {waiting} wait, "
            f"{self.received_count} were received"
        )
        for tag in self._demultiplexers:
            self._check_early(tag)

    def _check_early(self, tag: int) -> None:
        """Check that frames wait only for channels that are not open, or have not entered the frames' epoch."""
        targets = {target.scope: target for target in self._targets if target.site.tag == tag and target.is_open}
        for _, frame in self._demultiplexers[tag].early._frames:
            route = frame.route()
            target = targets.get(route.scope)
            assert target is None or (target.site.has_epochs and route.epoch > target.epoch), (
                f"a frame waits forever: {route}"
            )

    @property
    def reasons(self) -> dict[str, int]:
        """Return the number of dropped frames by reason."""
        return dict(sum((each.dropped for each in self._demultiplexers.values()), start=_no_counts()))


def _no_counts() -> Counter[str]:
    return Counter()


async def fuzz(seed: int, count: int, *, on_pause: Callable[[FrameFuzzer], object] = lambda _: None) -> FrameFuzzer:
    """Feed ``count`` frames to a new rank, calling ``on_pause`` now and then; FrameFailure is raised for a fault."""
    with _quiet():
        async with engines(SIZE) as (_, made):
            services = Services(made[0], asyncio.get_running_loop(), NONCE)
            fuzzer = FrameFuzzer(services, seed)
            for _ in fuzzer.run(count):
                await yield_to_loop()
                on_pause(fuzzer)
            fuzzer.check()
            return fuzzer


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Disable the log messages about dropped frames."""
    logger = logging.getLogger("asyncdist.messaging")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
