"""asyncio's streams over a Unix socket, on uvloop, with a length before each message."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

import torch
import uvloop
from work import LARGE, SMALL, async_median_s, start_second, write


async def receive(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(int.from_bytes(await reader.readexactly(8), "little"))


async def send(writer: asyncio.StreamWriter, data: bytes | memoryview) -> None:
    writer.write(len(data).to_bytes(8, "little"))
    writer.write(data)
    await writer.drain()


async def answer(path: str) -> None:
    reader, writer = await asyncio.open_unix_connection(path, limit=1 << 24)
    for _ in range(SMALL.total):
        await send(writer, await receive(reader))
    tensor = LARGE.tensor()
    for _ in range(LARGE.total):
        tensor.copy_(torch.frombuffer(bytearray(await receive(reader)), dtype=torch.float32))
        await send(writer, memoryview(tensor.numpy()).cast("B"))
    writer.close()


async def ask() -> None:
    connected: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
    connected = asyncio.get_running_loop().create_future()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "socket"))
        server = await asyncio.start_unix_server(lambda *both: connected.set_result(both), path, limit=1 << 24)
        with start_second(path):
            reader, writer = await connected
            message, tensor = bytes(SMALL.nbytes), LARGE.tensor()

            async def pass_message() -> None:
                await send(writer, message)
                await receive(reader)

            async def pass_tensor() -> None:
                await send(writer, memoryview(tensor.numpy()).cast("B"))
                tensor.copy_(torch.frombuffer(bytearray(await receive(reader)), dtype=torch.float32))

            small_s = await async_median_s(SMALL, pass_message)
            write(small_s=small_s, large_s=await async_median_s(LARGE, pass_tensor))
        server.close()


if __name__ == "__main__":
    uvloop.run(answer(sys.argv[2]) if len(sys.argv) > 2 else ask())
