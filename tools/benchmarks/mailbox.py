"""Measures a sender whose receiver's mailbox is full, against asyncio streams over a Unix socket in the same processes.

Rank 0 sends small messages to rank 1 as fast as it can. Ours is a channel with a capacity of 64; the rival writes the
same bytes to a ``StreamWriter`` and awaits ``drain``. Blocks of both alternate. A block has two parts:

- Slow reader: rank 1 alternately reads 32 messages and sleeps for 1 ms. The figure is rank 0's CPU time per message.
- No reader: rank 1 reads nothing for half a second. The figure is rank 0's CPU time in percent of this time. Rank 1
  then reads all messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import struct
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from harness import Results, Row, main

import asyncdist as ad

RANKS: Final = (2,)
#: Target for the CPU time per message, as a multiple of the rival's.
TARGET_RATIO: Final = 2.0
#: Target for the CPU time of a waiting sender: the time of a rank that awaits a message.
TARGET_PERCENT: Final = 2.5
_CAPACITY: Final = 64
_BURST: Final = 32
_PAUSE_S: Final = 0.001
_FRAME: Final = struct.Struct("<qd48x")


@dataclass(frozen=True, slots=True)
class Item:
    """The message that is sent."""

    number: int
    value: float


@dataclass(frozen=True, slots=True)
class Settings:
    """``block_count`` blocks of ``message_count`` messages each, ours and the rival's; one more block warms up."""

    block_count: int
    message_count: int
    wait_s: float


FULL: Final = Settings(block_count=9, message_count=8192, wait_s=0.5)
QUICK: Final = Settings(block_count=1, message_count=256, wait_s=0.05)

Send = Callable[[int], Awaitable[None]]
Receive = Callable[[], Awaitable[object]]


async def measure(world: ad.World, settings: Settings) -> Results | None:
    """Alternate blocks of both senders."""
    channel = world.channel(Item, tag=100, capacity=_CAPACITY)
    figures: dict[str, list[tuple[float, float]]] = {"ours": [], "rival": []}
    async with _connection(world) as (reader, writer):

        async def send_ours(number: int) -> None:
            await channel.send(Item(number, 0.5), 1)

        async def send_rival(number: int) -> None:
            writer.write(_FRAME.pack(number, 0.5))
            await writer.drain()

        async def receive_rival() -> tuple[Any, ...]:
            return _FRAME.unpack(await reader.readexactly(_FRAME.size))

        contestants: dict[str, tuple[Send, Receive]] = {
            "ours": (send_ours, channel.receive),
            "rival": (send_rival, receive_rival),
        }
        for block in range(1 + settings.block_count):
            for name, (send, receive) in contestants.items():
                await ad.barrier()
                figure = await (_send(send, settings) if world.rank == 0 else _receive(receive, settings))
                if block and figure is not None:
                    figures[name].append(figure)
    if world.rank:
        return None
    found: Results = {"transport": world.transport_name}
    for name, values in figures.items():
        per_message_us, percent = zip(*values, strict=True)
        found |= {f"{name}_us": statistics.median(per_message_us), f"{name}_percent": statistics.median(percent)}
    return found


@contextlib.asynccontextmanager
async def _connection(world: ad.World) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect the two ranks by a Unix socket with small buffers."""
    path = f"{tempfile.gettempdir()}/asyncdist-mailbox-{world.services.nonce}"
    accepted: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Future()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set_result((reader, writer))

    limit = _CAPACITY * _FRAME.size
    server = await asyncio.start_unix_server(accept, path, limit=limit) if world.rank == 1 else None
    await ad.barrier()
    streams = await accepted if server else await asyncio.open_unix_connection(path, limit=limit)
    streams[1].transport.set_write_buffer_limits(limit)
    await ad.barrier()
    try:
        yield streams
    finally:
        streams[1].close()
        if server is not None:
            server.close()
            os.unlink(path)


async def _send(send: Send, settings: Settings) -> tuple[float, float]:
    """Return the microseconds of CPU time per message to a slow reader, and the percentage without a reader."""
    began_at = time.process_time()
    for number in range(settings.message_count):
        await send(number)
    per_message_us = (time.process_time() - began_at) / settings.message_count * 1e6
    await ad.barrier()
    sending = asyncio.ensure_future(_send_until_full(send))
    await asyncio.sleep(settings.wait_s / 5)
    began_at, began_at_s = time.process_time(), time.perf_counter()
    await asyncio.sleep(settings.wait_s)
    percent = (time.process_time() - began_at) / (time.perf_counter() - began_at_s) * 100
    await ad.barrier()
    sending.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await sending
    await send(-1)
    return per_message_us, percent


async def _send_until_full(send: Send) -> None:
    while True:
        await send(0)


async def _receive(receive: Receive, settings: Settings) -> None:
    for _ in range(0, settings.message_count, _BURST):
        for _ in range(_BURST):
            await receive()
        await asyncio.sleep(_PAUSE_S)
    await ad.barrier()
    await asyncio.sleep(settings.wait_s * 1.2)
    await ad.barrier()
    while True:
        found: Any = await receive()
        if (found[0] if type(found) is tuple else found.message.number) == -1:
            return


def rows(results: Results) -> list[Row]:
    """Return the rows of the table."""
    ratio = results["ours_us"] / results["rival_us"]
    return [
        Row(
            "CPU time of the sender per message, slow reader",
            f"{results['ours_us']:.1f} us, x{ratio:.2f}",
            f"{results['rival_us']:.1f} us: asyncio streams",
            f"<= x{TARGET_RATIO:g}",
            ratio <= TARGET_RATIO,
        ),
        Row(
            "CPU time of the sender while the mailbox is full",
            f"{results['ours_percent']:.1f} %",
            f"{results['rival_percent']:.1f} %: asyncio streams",
            f"<= {TARGET_PERCENT:g} %",
            results["ours_percent"] <= TARGET_PERCENT,
        ),
    ]


if __name__ == "__main__":
    main(measure, full=FULL, quick=QUICK)
