"""Makes mpi4py and torch requests awaitable in any asyncio program, with or without a world."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from asyncdist.errors import ClosedError
from asyncdist.messaging.engine import Engine
from asyncdist.messaging.user_requests.waiting import RequestWaiter, refuse_in_simulation
from asyncdist.transports.local import LocalHub

logger = logging.getLogger("asyncdist.progress")


class Progress:
    """Waits for requests that the program has started with mpi4py or torch. Made by :func:`asyncdist.progress`.

    A new MPI request is tested for some 10 µs before its task yields to the event loop. Then a callback of the loop
    tests all outstanding requests, in each iteration of the loop for some 100 iterations. If the loop has nothing else
    to do, it then tests them every 20 µs or so for 20 iterations, and then every millisecond.

    **Ownership**: from the first wait for a request until a wait has returned its result, the request belongs to this
    object. It stores the request with its buffer, and tests it even if no task is waiting for it. Meanwhile, do not
    call methods of the request, except ``Cancel`` of a receive.

    **Cancellation**: a cancelled wait does not cancel the request. The next wait for the same request returns its
    result, even if the request has completed meanwhile.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        transport = LocalHub(1).transport(0)  # This transport has no peers.
        # With ``wakes``, the engine would wait for a notification, but completed requests of the program send none.
        transport.capabilities = dataclasses.replace(transport.capabilities, wakes=False)
        self._engine = Engine(transport, loop)
        self._requests = RequestWaiter(self._engine, "asyncdist.progress()", drives=True)

    def __repr__(self) -> str:
        return f"<Progress, {'closed' if self._engine.failure else 'open'}>"

    def wait(self, request: Any, status: Any = None) -> Coroutine[Any, Any, Any]:
        """Wait until a request, or each request of a list, has completed. Return its result, or the list of results.

        Args:
            request: One of these objects, or a list of them:

                - an ``mpi4py.MPI.Request``, which may be persistent
                - a ``torch.distributed.Work``. Works of gloo's ``isend`` and ``irecv`` cannot be polled, so a thread
                  waits for each of them.
                - an event with a method ``query()``, such as a ``torch.cuda.Event``
            status: ``MPI.Status`` to be filled by an MPI request, or, for a list of requests, a list of statuses.

        Returns:
            The value of mpi4py's ``request.wait(status)``: the received object for a request of ``irecv``, and None for
            other MPI requests. None for works and events. For a list, the list of these values.

        Raises:
            mpi4py.MPI.Exception: The MPI request has failed.
            RuntimeError: The work has failed.
            TypeError: ``request`` or ``status`` has another type.
            LocalProtocolError: The request is MPI.REQUEST_NULL or inactive, was completed by another call, or belongs
                to asyncdist, or this call runs on another event loop.
            ClosedError: The block of ``progress()`` has ended.

        If a request of a list fails, its error is raised after all requests have completed. The results of the other
        requests remain stored. Wait for each of them again, one by one.
        """
        return self._requests.wait(request, status)

    def waitany(self, requests: Sequence[Any], status: Any = None) -> Coroutine[Any, Any, tuple[int, Any]]:
        """Wait until one request of a list has completed. Return its index and the value that :meth:`wait` returns.

        MPI requests whose results were returned are skipped, as in MPI, so a loop may pass the same list repeatedly.
        Count the results to end the loop, because ``bool(request)`` may be False before the result was returned. Remove
        completed works, events and persistent requests from the list. Inactive persistent requests raise an error.

        Args:
            requests: List of one or more requests that :meth:`wait` accepts.
            status: ``MPI.Status`` to be filled by the completed MPI request.

        Raises:
            LocalProtocolError: The results of all MPI requests have already been returned, or for another reason of
                :meth:`wait`.
            TypeError, mpi4py.MPI.Exception, RuntimeError, ClosedError: As in :meth:`wait`.
        """
        return self._requests.waitany(requests, status)

    def _close(self) -> None:
        left = self._requests.close()
        self._engine.fail(ClosedError("asyncdist.progress() was closed while a task waited for a request"))
        self._engine.stop()
        if left is not None:
            logger.warning(
                "asyncdist.progress() has ended with unfinished requests (%s). Their buffers stay in memory until the "
                "process ends, and a thread that waits for a work of gloo may abort the process at its exit. Wait for "
                "all requests inside the block; to end an MPI receive, call its Cancel and wait for it",
                left,
            )


@asynccontextmanager
async def progress() -> AsyncIterator[Progress]:
    """Make mpi4py and torch requests awaitable in this event loop, without a world.

    ::

        async with ad.progress() as progress:
            message = await progress.wait(request)  # for example, request = MPI.COMM_WORLD.irecv(source=0)

    Inside a world, use :meth:`asyncdist.World.wait` instead. Its requests share the world's polling.

    When the block ends, waits that are still in progress raise ClosedError. If requests have not completed, one warning
    is logged. These requests stay in memory with their buffers until the process ends, because MPI may still write to
    the buffers.

    Raises:
        LocalProtocolError: The caller is a simulated rank.
    """
    loop = asyncio.get_running_loop()
    if type(loop).__module__.startswith("asyncdist."):
        refuse_in_simulation("asyncdist.progress()")
    made = Progress(loop)
    try:
        yield made
    finally:
        made._close()
