"""Opens worlds for code without an event loop: ``open_world`` for a ``with`` block, ``run`` for a function."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Concatenate, Final, ParamSpec, TypeVar, Unpack

import torch

from asyncdist.blocking import callers
from asyncdist.blocking.helpers import Face
from asyncdist.collectives.groups import Group
from asyncdist.recording.writer import LIMIT_NBYTES
from asyncdist.runtime import run as runtime
from asyncdist.runtime.hosting import GRACE_S
from asyncdist.runtime.run import WATCHDOG_S, MetricsName, TransportName, WorldOptions
from asyncdist.runtime.world import (
    GROUP_TIMEOUT_S,
    PROGRESS_BUDGET_S,
    World as AwaitedWorld,
    WorldStatistics,
    _current_world,
    refuse_inside_a_world,
)

P = ParamSpec("P")
T = TypeVar("T")


class World:
    """One rank of a running job, for code without an event loop.

    The methods that are coroutines in :class:`asyncdist.World` block here. Between two calls, this rank does not
    respond to other ranks. Calling a policy's ``step`` in each iteration is usually often enough.

    Attributes:
        rank: Number of this rank, from 0.
        size: Number of ranks.
        group: Group of all ranks.
        awaited: Underlying :class:`asyncdist.World`, for use in coroutines.
    """

    def __init__(self, caller: callers.Caller) -> None:
        self._caller = caller
        self.awaited: Final[AwaitedWorld] = caller.world
        self.rank = caller.world.rank
        self.size = caller.world.size
        self.group: Group = caller.world.group

    def __repr__(self) -> str:
        return f"{self.awaited!r:.{len(repr(self.awaited)) - 1}}, blocking>"

    def call(self, fn: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a coroutine function and return its value. All tasks of this rank run while the call blocks.

        Raises:
            ClosedError: The world is closed.
            LocalProtocolError: Called in a thread other than the rank's, or inside another blocking call.
            BaseException: The exception that ``fn`` raised, RankLostError if the job has failed, or KeyboardInterrupt
                after SIGINT.
        """
        return self._caller.call(fn, *args, **kwargs)

    # -- calls that do not block --------------------------------------------------------------------------------------

    @property
    def local_rank(self) -> int:
        """Index of this rank among the ranks of its host. See :attr:`asyncdist.World.local_rank`."""
        return self.awaited.local_rank

    @property
    def device(self) -> torch.device:
        """This rank's device: the visible GPU with the index ``local_rank``, or the CPU if there is no GPU."""
        return self.awaited.device

    @property
    def transport_name(self) -> str:
        """Name of the transport: ``"local"``, ``"mpi"``, ..."""
        return self.awaited.transport_name

    @property
    def is_simulated(self) -> bool:
        """Whether this rank is simulated. Its files are real nevertheless, and shared with all other ranks."""
        return self.awaited.is_simulated

    @property
    def hostname(self) -> str:
        """Name of this rank's host. In a simulation: ``"host0"``, ``"host1"``, ..."""
        return self.awaited.hostname

    @property
    def incarnation(self) -> int:
        """Incarnation of this rank: 0 in the initial process, 1 or more in a restarted or late process."""
        return self.awaited.incarnation

    def time(self) -> float:
        """Return the time of the event loop's clock, in seconds. Only differences are meaningful."""
        return self.awaited.time()

    def describe(self) -> str:
        """Return a one-line description for reports: transport, library and number of ranks."""
        return self.awaited.describe()

    def statistics(self) -> WorldStatistics:
        """Return counters of messages and requests since the world was opened."""
        return self.awaited.statistics()

    def check(self) -> None:
        """Raise the error that ended the job, if there is one."""
        self.awaited.check()

    # -- calls that block ---------------------------------------------------------------------------------------------

    def sleep(self, seconds: float) -> None:
        """Wait for ``seconds`` while this rank's tasks run."""
        self.call(self.awaited.sleep, seconds)

    def safe_point(self) -> None:
        """Check all outstanding messages and other requests once, and let this rank's tasks run."""
        self.call(self.awaited.safe_point)

    def progress(self, budget_s: float = PROGRESS_BUDGET_S) -> None:
        """Check outstanding messages and other requests until none completes, for at most ``budget_s`` seconds."""
        self.call(self.awaited.progress, budget_s)

    def compute(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``fn`` in a worker thread while this rank's tasks run. See :meth:`asyncdist.World.compute`."""
        return self.call(lambda: self.awaited.compute(fn, *args, **kwargs))

    def channel(
        self,
        message_type: type,
        *,
        tag: int,
        name: str | None = None,
        capacity: int = 1024,
        group: Group | None = None,
    ) -> Any:
        """Open a channel whose ``send`` and ``receive`` block. See :meth:`asyncdist.World.channel`."""
        return Face(self.awaited.channel(message_type, tag=tag, name=name, capacity=capacity, group=group))

    def new_group(self, ranks: Sequence[int], *, timeout_s: float = GROUP_TIMEOUT_S) -> Group:
        """Make a group of ``ranks``, all of which must call this method. See :meth:`asyncdist.World.new_group`."""
        return self.call(self.awaited.new_group, ranks, timeout_s=timeout_s)

    def new_groups(self, lists: Iterable[Sequence[int]], *, timeout_s: float = GROUP_TIMEOUT_S) -> list[Group]:
        """Make several groups, one after another. See :meth:`asyncdist.World.new_groups`."""
        return self.call(self.awaited.new_groups, lists, timeout_s=timeout_s)

    def send_stream(self, tensor: torch.Tensor, dest: int) -> None:
        """Send a tensor of any size to rank ``dest``, which must call ``receive_stream``."""
        self.call(self.awaited.send_stream, tensor, dest)

    def receive_stream(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Receive a tensor from rank ``source`` into ``tensor``, and return ``tensor``."""
        return self.call(self.awaited.receive_stream, tensor, source)


def current_world() -> World:
    """Return the world of the rank that runs this code.

    Raises:
        LocalProtocolError: Called in a coroutine, which must use :func:`asyncdist.current_world`.
        RuntimeError: No world is open.
    """
    return World(callers.current_caller("current_world"))


@contextmanager
def open_world(
    *,
    transport: TransportName = "auto",
    grace_s: float = GRACE_S,
    strict: bool = False,
    watchdog_s: float = WATCHDOG_S,
    stall_s: float | None = None,
    stall_aborts: bool = False,
    record: str | os.PathLike[str] | None = None,
    record_limit_nbytes: int = LIMIT_NBYTES,
    metrics: MetricsName = None,
) -> Iterator[World]:
    """Open a world for code without an event loop: ``with ad.blocking.open_world() as world``.

    The ``with`` block runs as one rank, under every launcher that :func:`asyncdist.run` supports, and may be a notebook
    cell. Under ``asyncdist sim``, each simulated rank runs the whole script. The arguments are the same as for
    :func:`asyncdist.run`.

    The first SIGINT raises KeyboardInterrupt in the block, and the first SIGTERM or SIGHUP raises SystemExit. A second
    SIGINT or SIGTERM, at least one second later, ends the process.

    Raises:
        LocalProtocolError: This rank already has an open world.
        BaseException: Any error that :func:`asyncdist.run` raises.
    """
    here = callers.find_caller()
    if isinstance(here, callers.SwitchingCaller) and here.is_of_script:
        here.note_opened()
        yield World(here)
        return
    refuse_inside_a_world()
    ask = callers.ask_for_world.get()
    if ask is not None:
        yield World(ask())
        return
    options = runtime.rank_options(
        watchdog_s,
        stall_s,
        stall_aborts,
        grace_s=grace_s,
        strict=strict,
        record=record,
        limit_nbytes=record_limit_nbytes,
        metrics=metrics,
    )
    user = sys._getframe(2)  # the frame of the caller, outside contextlib
    with callers.without_running_loop():
        host = runtime.prepare_rank(user, transport=transport, options=options)
    caller = callers.LoopCaller(host)
    caller.open()
    tokens = callers._current.set(caller), _current_world.set(caller.world)
    error: BaseException | None = None
    try:
        caller.listen()
        yield World(caller)
    except GeneratorExit:  # the generator was discarded, which is not a failure
        raise
    except BaseException as caught:
        error = caught
        raise
    finally:
        with suppress(ValueError):  # raised if the block was entered in a different context
            callers._current.reset(tokens[0])
            _current_world.reset(tokens[1])
        caller.close(error)


def run(
    main: Callable[..., T],
    *args: Any,
    transport: TransportName = "auto",
    ranks: int | None = None,
    **options: Unpack[WorldOptions],
) -> T:
    """Call ``main(world, *args)`` as this process's rank, and return its value.

    Args:
        main: Function whose first argument is the :class:`World`.
        args: Other arguments of ``main``.
        transport: Transport, as for :func:`asyncdist.run`.
        ranks: Number of ranks to host in this process, with ``transport="local"``.
        options: Other options of :func:`asyncdist.run`.

    Raises:
        BaseException: The exception that ``main`` raised, or any error that :func:`asyncdist.run` raises.
    """
    if runtime.run_override.get() is not None or ranks is not None:
        return runtime.run(hosted(main), *args, transport=transport, ranks=ranks, **options)
    with open_world(transport=transport, **options) as world:
        return main(world, *args)


def hosted(main: Callable[Concatenate[World, P], T]) -> Callable[Concatenate[AwaitedWorld, P], Coroutine[Any, Any, T]]:
    """Wrap a blocking main in a coroutine function, for :func:`asyncdist.simulate` and :func:`asyncdist.run_local`."""

    @functools.wraps(main)
    async def host(world: AwaitedWorld, /, *args: P.args, **kwargs: P.kwargs) -> T:
        caller = callers.SwitchingCaller(world)

        def run_and_end() -> T:
            value = main(World(caller), *args, **kwargs)
            caller.end()  # integrations now close their policies, because the other ranks wait for that
            return value

        return await caller.run(run_and_end)

    return host
