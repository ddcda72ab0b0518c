"""Two ranks await their own requests of mpi4py: on asyncio and on uvloop without a world, and in a world."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import numpy as np
from mpi4py import MPI
from support.mpi import report

import asyncdist as ad

comm = MPI.COMM_WORLD
peer = 1 - comm.rank


async def exchange(waits: Any) -> None:
    """Await requests of all kinds; ``waits`` is a Progress or a World."""
    sent = comm.isend({"from": comm.rank}, peer, tag=1)
    assert await waits.wait(comm.irecv(source=peer, tag=1)) == {"from": peer}
    assert await waits.wait(sent) is None

    status, buffer = MPI.Status(), np.zeros(3)
    requests = [comm.Irecv(buffer, MPI.ANY_SOURCE, tag=2), comm.Isend(np.full(3, comm.rank), peer, tag=2)]
    assert await waits.wait(requests, [status, None]) == [None, None]
    assert (status.source, status.tag, status.Get_count(MPI.DOUBLE)) == (peer, 2, 3)
    assert await waits.wait(comm.Ibarrier()) is None

    receives = [comm.irecv(source=peer, tag=tag) for tag in (3, 4)]
    for tag in (4, 3):
        sent = comm.isend(10 * tag, peer, tag)
        assert await waits.waitany(receives, status) == (tag - 3, 10 * tag)
        assert status.tag == tag
        await waits.wait([sent, comm.Ibarrier()])
    await raises(ad.LocalProtocolError, "MPI.REQUEST_NULL", waits.waitany(receives))

    receives = [comm.irecv(source=peer, tag=tag) for tag in (11, 12, 13)]
    await waits.wait([comm.isend(tag, peer, tag) for tag in (11, 12, 13)] + [comm.Ibarrier()])
    assert sorted([await waits.waitany(receives) for _ in receives]) == [(0, 11), (1, 12), (2, 13)]

    receive, send = comm.Recv_init(buffer, peer, tag=5), comm.Send_init(np.arange(3.0), peer, tag=5)
    await raises(ad.LocalProtocolError, "inactive", waits.wait(receive))
    for _ in range(2):
        buffer[:] = 0
        MPI.Prequest.Startall([receive, send])
        await waits.wait([receive, send])
        assert list(buffer) == [0, 1, 2]
    receive.Free()
    send.Free()
    await raises(ad.LocalProtocolError, "was freed", waits.wait(send))


async def cancel(waits: Any) -> None:
    """Results of cancelled waits are kept; a request that another call completes, or that fails, is an error."""
    receive = comm.irecv(source=peer, tag=6)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(waits.wait(receive), 0.01)
        raise AssertionError("nothing was sent yet")
    await waits.wait(comm.Ibarrier())
    await waits.wait(comm.isend("kept", peer, tag=6))
    while receive:  # noqa: ASYNC110 - it completes while no task waits for it
        await asyncio.sleep(0.001)
    assert await waits.wait(receive) == "kept"
    await raises(ad.LocalProtocolError, "MPI.REQUEST_NULL", waits.wait(receive))

    buffer = np.zeros(1)
    persistent = comm.Recv_init(buffer, peer, tag=7)
    for value in (1.0, 2.0):
        persistent.Start()
        waiting = asyncio.ensure_future(waits.wait(persistent))
        await asyncio.sleep(0)
        waiting.cancel()
        await waits.wait(comm.Ibarrier())
        await waits.wait(comm.Isend(np.array([value]), peer, tag=7))
        while buffer[0] != value:  # noqa: ASYNC110 - likewise
            await asyncio.sleep(0.001)
        # The message has arrived, but the receive is active until a pass has tested it. This wait includes such a pass.
        await waits.wait(comm.Ibarrier())
        if value == 2.0:
            await waits.wait(persistent)
    await raises(ad.LocalProtocolError, "inactive", waits.wait(persistent))
    persistent.Free()

    receive = comm.irecv(source=peer, tag=8)
    waiting = asyncio.ensure_future(waits.wait(receive))
    await asyncio.sleep(0)
    receive.Cancel()
    receive.Wait()
    await raises(ad.LocalProtocolError, "another call has completed", waiting)

    receive = comm.Irecv(bytearray(8), peer, tag=9)
    await waits.wait(comm.Isend(bytes(32), peer, tag=9))
    await raises(MPI.Exception, "trunc", waits.wait(receive))


async def raises(kind: type[Exception], text: str, awaitable: Any) -> None:
    try:
        await awaitable
    except kind as error:
        assert text.lower() in str(error).lower(), error
    else:
        raise AssertionError(f"no {kind.__name__}")


async def alone() -> None:
    async with ad.progress() as progress:
        await exchange(progress)
        await cancel(progress)
        never = comm.Irecv(bytearray(8), peer, tag=10)
        waiting = asyncio.ensure_future(progress.wait(never))
        await asyncio.sleep(0)
    await raises(ad.ClosedError, "was closed", waiting)
    await raises(ad.ClosedError, "is closed", progress.wait(never))
    never.Cancel()
    never.Wait()


async def in_world(world: ad.World) -> None:
    await exchange(world)
    await cancel(world)
    never = comm.Irecv(bytearray(8), peer, tag=10)
    waiting = asyncio.ensure_future(world.wait(never))
    await asyncio.sleep(0)
    waiting.cancel()


class Lines(logging.Handler):
    """Keeps the lines that are logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


if __name__ == "__main__":
    logged = Lines()
    logging.getLogger("asyncdist").addHandler(logged)
    asyncio.run(alone())
    try:
        import uvloop
    except ImportError:
        pass
    else:
        uvloop.run(alone())
    ad.run(in_world)
    report(comm.rank, logged.lines)
