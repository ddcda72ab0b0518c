"""Simulates a rank that sends well-formed but false messages, on every channel of the runtime and the protocols.

The hostile rank runs the same program as the others. In addition to each of its messages it sends others of the
channel's types: the same message with some fields changed, or a random one. The other ranks may end normally, or with
an error that names the peer's violation. They may not crash in asyncdist's code, or use memory in proportion to a
number in a message. They may wait: they cannot distinguish a rank that falsely claims to have done its part from a
rank that computes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import random
import tracemalloc
import typing
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from unittest import mock

import torch
import torch._dynamo  # the modules that optimizers import first: 70 MiB that no message has requested
from support.drawing import draw_message

import asyncdist as ad
from asyncdist.errors import AsyncdistError, DeadlockError, TimeLimitError
from asyncdist.messaging import wire
from asyncdist.messaging.channels import Channel
from asyncdist.messaging.services import Services
from asyncdist.simulation import Compute, Fault, Kill, Restart, Uniform, simulate
from protocols import (
    AsyncDiLoCoPolicy,
    AsyncSelectiveAveragingPolicy,
    AverageAllPolicy,
    DiLoCoPolicy,
    OneSidedSelectiveAveragingPolicy,
    PopulationAveragingPolicy,
    ReplayBuffer,
    SelectiveDiLoCoPolicy,
    serve_replay_buffer,
)

LIMIT_S: Final = 400.0
#: Messages with which a member contributes to an average.
FIRST_CONTRIBUTIONS: Final = ("Captured", "Arrived")
GROWTH_NBYTES_MAX: Final = 32 * 2**20


@dataclass
class Seen:
    """Counts of the observations of a run.

    Attributes:
        sent: Number of hostile messages by type.
        ends: Ways in which the other ranks ended.
    """

    sent: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)


class _Liar:
    """Draws the messages of the hostile rank."""

    def __init__(self, seed: int, seen: Seen) -> None:
        self._rng = random.Random(f"{seed} lies")
        self._seen = seen
        self._texts: list[str] = ["", "x"]
        self._values: list[Any] = []
        self._channels: list[tuple[Callable[..., Any], tuple[type, ...]]] = []
        self.scopes: list[int] = []  # names of policies, as in messages
        self.is_silent = False  # whether it sends no false messages yet
        self.rate = self._rng.choice((0.1, 0.3, 0.6))

    def posting(self, post: Callable[..., Any], classes: tuple[type, ...], size: int) -> Callable[..., Any]:
        """Return a function that sends like ``post``, and adds false messages, sometimes on another channel."""
        self._channels.append((post, classes))

        def hostile(message: Any, dest: int, round: int) -> Any:
            self._learn(message)
            if self.is_silent:
                self.is_silent = type(message).__name__ not in FIRST_CONTRIBUTIONS
                return post(message, dest, round)
            for _ in itertools.takewhile(lambda _: self._rng.random() < self.rate, range(8)):
                its_post, its_classes = post, classes
                if self._rng.random() < 0.3:
                    its_post, its_classes = self._rng.choice(self._channels)
                lie = self._draw_message(its_classes, message)
                whom = self._rng.choice((dest, self._rng.randrange(size)))
                when = self._rng.choice((round, round, max(0, round - 1), min(round + 1, 2**32 - 1), 2**32 - 1))
                self._say(its_post, lie, whom, when)
            return post(message, dest, round)

        return hostile

    def _say(self, post: Callable[..., Any], message: Any, dest: int, round: int) -> None:
        try:
            post(message, dest, round)
        except AsyncdistError:
            return  # the message is too large, or has no receiver
        self._seen.sent[type(message).__name__] += 1

    def _learn(self, message: Any) -> None:
        for entry in dataclasses.fields(message):
            value = getattr(message, entry.name)
            if isinstance(value, str) and value not in self._texts:
                self._texts.append(value)
                del self._texts[2:-40]
            self._values.append(value)
            del self._values[:-60]

    def _draw_message(self, classes: tuple[type, ...], like: Any) -> Any:
        rng = self._rng
        cls = type(like) if type(like) in classes and rng.random() < 0.5 else rng.choice(classes)
        names = [entry.name for entry in dataclasses.fields(cls)] if cls is type(like) else []
        kept = {name: getattr(like, name) for name in names if rng.random() < 0.7}
        try:
            return draw_message(cls, rng, [*self._values, *self.scopes], self._texts, **kept)
        except ValueError:  # a class refuses its values, as the receiver's would
            return like


class _HostileOutbox:
    """An outbox with another ``post``."""

    def __init__(self, outbox: Any, post: Callable[..., Any]) -> None:
        vars(self).update(outbox=outbox, post=post)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.outbox, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.outbox, name, value)


def run_hostile(seed: int, programs: Sequence[Callable[..., Any]] = ()) -> Seen:
    """Run one seed.

    Args:
        programs: Programs, from which one is drawn; by default :data:`PROGRAMS`. In :data:`AVERAGING_PROGRAMS` the
            hostile rank is honest until its first contribution, and another rank may be killed and restarted.

    Raises:
        AssertionError: An honest rank has ended with an error that no peer's message may cause, or has used too much
            memory.
    """
    rng = random.Random(f"{seed} hostile")
    size = rng.randint(2, 4)
    hostile = rng.randrange(size)
    seen = Seen()
    liar = _Liar(seed, seen)
    open_channel = Services.open_channel

    def opened(services: Services, message_types: Any, **options: Any) -> Channel[Any]:
        channel = open_channel(services, message_types, **options)
        if services.rank == hostile:
            classes = typing.get_args(message_types) or (message_types,)
            outbox: Any = channel._outbox
            channel._outbox = typing.cast(Any, _HostileOutbox(outbox, liar.posting(outbox.post, classes, size)))
        return channel

    scope_of = wire.scope_of

    def noted(*facts: Any) -> int:
        scope = scope_of(*facts)
        if scope not in liar.scopes:
            liar.scopes.append(scope)
        return scope

    program = rng.choice(programs or PROGRAMS)
    liar.is_silent = program in AVERAGING_PROGRAMS
    faults = _draw_faults(rng, size, hostile) if program in AVERAGING_PROGRAMS else []
    tracemalloc.start()
    try:
        with mock.patch.object(Services, "open_channel", opened), mock.patch.object(wire, "scope_of", noted):
            try:
                compute = Compute(step_s=Uniform(0.001, 0.01))
                results = simulate(
                    program,
                    ranks=size,
                    seed=seed,
                    compute=compute,
                    faults=faults,
                    until_s=LIMIT_S,
                    return_exceptions=True,
                ).results
            except (DeadlockError, TimeLimitError):
                results = ()
                seen.ends["waits"] += 1
        peak_nbytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    where = f"seed {seed}, {program.__name__}, {size} ranks, hostile {hostile}"
    assert peak_nbytes < GROWTH_NBYTES_MAX, f"{where}: allocated {peak_nbytes} bytes"
    for rank, result in enumerate(results):
        if rank == hostile:
            continue
        error = result if isinstance(result, BaseException) else None
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        # For example, a rank believes a forged verdict that says that this rank asked for its release.
        if error is not None and not isinstance(error, (AsyncdistError, TimeoutError, asyncio.CancelledError)):
            raise AssertionError(f"{where}: rank {rank} ended by {result!r}") from result
        seen.ends["well" if error is None else type(error).__name__] += 1
    return seen


def _draw_faults(rng: random.Random, size: int, hostile: int) -> list[Fault]:
    """Return no faults, or the death of an honest rank, perhaps with its restart."""
    if size == 2 or rng.random() < 0.5:
        return []
    rank = rng.choice([each for each in range(size) if each != hostile])
    restart = [Restart(rank, at_s=rng.uniform(0.3, 0.5))] if rng.random() < 0.6 else []
    return [Kill(rank, at_s=rng.uniform(0.05, 0.3)), *restart]


# -- what the ranks do ------------------------------------------------------------------------------------------------


def _model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


async def _average(policy: Any) -> None:
    for iteration in range(20):
        async with asyncio.timeout(30):
            await policy.step(float(ad.current_world().rank + iteration))


async def selective(world: ad.World) -> None:
    """Average selectively."""
    async with AsyncSelectiveAveragingPolicy(*_model(), average_every=2, start_timeout_s=20) as policy:
        await _average(policy)


async def one_sided(world: ad.World) -> None:
    """Average by one-sided reads."""
    async with OneSidedSelectiveAveragingPolicy(*_model(), average_every=2, start_timeout_s=20) as policy:
        await _average(policy)


async def synchronous(world: ad.World) -> None:
    """Average all."""
    async with AverageAllPolicy(*_model(), average_every=2, start_timeout_s=20) as policy:
        await _average(policy)


async def groups(world: ad.World) -> None:
    """Make groups and a mesh, and use them."""
    for _ in range(4):
        async with asyncio.timeout(30), await world.new_group(range(world.size), timeout_s=10) as group:
            await ad.all_reduce(torch.ones(3), group=group)
            await ad.barrier(group=group)
    async with asyncio.timeout(30):
        mesh = await ad.new_mesh({"POP": world.size})
        await ad.psum({"a": torch.ones(3)}, "POP", mesh=mesh)


async def streams(world: ad.World) -> None:
    """Send and receive tensors and messages."""
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    for _ in range(5):
        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            tasks.create_task(world.send_stream(torch.ones(5000), after))
            tasks.create_task(world.receive_stream(torch.zeros(5000), before))


async def replay(world: ad.World) -> None:
    """Use a replay buffer; its rank may be the hostile one."""
    clients = range(world.size - 1)
    if world.rank == world.size - 1:
        async with asyncio.timeout(60):
            await serve_replay_buffer(clients, capacity=100, prioritized=True)
        return
    async with asyncio.timeout(60), ReplayBuffer(world.size - 1, start_timeout_s=20) as buffer:
        for _ in range(10):
            await buffer.add({"a": torch.ones(3, 2)})
            sample = await buffer.sample(4, wait=False)
            with contextlib.suppress(ValueError):  # the hostile rank has declared that it draws uniformly
                await buffer.update_priorities(sample.ids, torch.ones(len(sample.ids)))


PROGRAMS: Final = (selective, one_sided, synchronous, groups, streams, replay)


def _layers() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.5)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


async def _contribute(policy: Any, step_count: int = 24) -> None:
    async with policy:
        for _ in range(step_count):
            async with asyncio.timeout(30):
                await policy.step(loss=lambda: 1.0)


async def diloco(world: ad.World) -> None:
    """Average differences; the first rank leaves early."""
    policy = DiLoCoPolicy(*_layers(), average_every=2, late="skip", start_timeout_s=20)
    await _contribute(policy, 24 if world.rank else 9)


async def streaming_diloco(world: ad.World) -> None:
    """Average fragments of the model, in the background."""
    options: dict[str, Any] = {"fragments": 2, "overlap_steps": 1, "wire": "int8"}
    await _contribute(DiLoCoPolicy(*_layers(), average_every=4, start_timeout_s=20, **options))


async def asynchronous_diloco(world: ad.World) -> None:
    """Apply differences to an anchor when they arrive; the first rank leaves early."""
    policy = AsyncDiLoCoPolicy(*_layers(), average_every=2, mirror_every=1, start_timeout_s=20)
    await _contribute(policy, 24 if world.rank else 9)


async def asynchronous_quorum(world: ad.World) -> None:
    """Apply the differences of two ranks together."""
    options: dict[str, Any] = {"quorum": 2, "mirror_every": 1, "late": "wait", "wire": "int8"}
    await _contribute(AsyncDiLoCoPolicy(*_layers(), average_every=2, start_timeout_s=20, **options))


async def selective_diloco(world: ad.World) -> None:
    """Average differences by their gains."""
    await _contribute(SelectiveDiLoCoPolicy(*_layers(), average_every=2, start_timeout_s=20))


async def simple(world: ad.World) -> None:
    """Average weights by a rule."""
    await _contribute(PopulationAveragingPolicy(*_layers(), average_every=2, start_timeout_s=20))


AVERAGING_PROGRAMS: Final = (
    diloco,
    streaming_diloco,
    asynchronous_diloco,
    asynchronous_quorum,
    selective_diloco,
    simple,
)
