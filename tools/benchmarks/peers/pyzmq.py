"""pyzmq's asyncio sockets (PAIR over a Unix socket), on uvloop; the tensor is not copied by the sender."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import uvloop
import zmq.asyncio
from work import LARGE, SMALL, async_median_s, start_second, write


async def answer(address: str) -> None:
    with zmq.asyncio.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.connect(address)
        for _ in range(SMALL.total):
            await socket.send(await socket.recv())
        tensor = LARGE.tensor()
        for _ in range(LARGE.total):
            tensor.copy_(torch.frombuffer((await socket.recv(copy=False)).buffer, dtype=torch.float32))
            await socket.send(tensor.numpy(), copy=False)


async def ask() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        zmq.asyncio.Context() as context,
        context.socket(zmq.PAIR) as socket,
    ):
        address = f"ipc://{Path(folder, 'socket')}"
        socket.bind(address)
        with start_second(address):
            message, tensor = bytes(SMALL.nbytes), LARGE.tensor()

            async def pass_message() -> None:
                await socket.send(message)
                await socket.recv()

            async def pass_tensor() -> None:
                await socket.send(tensor.numpy(), copy=False)
                tensor.copy_(torch.frombuffer((await socket.recv(copy=False)).buffer, dtype=torch.float32))

            small_s = await async_median_s(SMALL, pass_message)
            write(small_s=small_s, large_s=await async_median_s(LARGE, pass_tensor))


if __name__ == "__main__":
    uvloop.run(answer(sys.argv[2]) if len(sys.argv) > 2 else ask())
