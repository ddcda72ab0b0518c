"""Measures the simulator's speed: messages per second, time for ten thousand ranks, and seeds per second.

- Messages: eight ranks pass messages to their right-hand neighbours through real channels (encoded, framed, checked and
  decoded), on a random network. In alternation, the same traffic runs on a bare loop: asyncio's own, with virtual time,
  one coroutine and one ``asyncio.Queue`` per rank. There, nothing is packed or checked. Both draw their latencies from
  the same distribution.
- Ranks: ten thousand ranks report a metric each, and the coordinator decides. The time from the call until the decision
  and the process's peak memory are measured.
- Seeds: eight ranks train under selective averaging until 20 rounds have been decided. The figure is whole simulations
  per second of this process's CPU time, because one core runs one seed. This is measured twice, because a round costs
  as much as its exchange. With ``best_only`` the best rank donates to the two worst ranks, two streams per round, and
  ranks report every 5 steps, about the length of such a round. With ``mean`` six donors donate to two replacers, twelve
  streams per round, and all ranks report in every step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import random
import resource
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from harness import Results, Row, model_of, optimizer_of

import asyncdist as ad
from asyncdist.simulation import LogNormal
from protocols import AsyncSelectiveAveragingPolicy

#: No ranks to launch: this benchmark simulates them.
RANKS: Final = ()
TARGET_RATIO: Final = 0.4
TARGET_S: Final = 90.0
TARGET_GIB: Final = 6.0
TARGET_SEEDS_PER_S: Final = 20.0
_RANK_COUNT: Final = 8
_SCENARIOS: Final[dict[str, dict[str, Any]]] = {
    "best_only": {"average_every": 5, "replacement_ratio": 0.25, "averaging_strategy": "best_only"},
    "mean": {"average_every": 1, "replacement_ratio": 0.25},
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Messages per rank and block, blocks, ranks of the large world, rounds per seed, seeds."""

    message_count: int
    block_count: int
    rank_count: int
    round_count: int
    seed_count: int


FULL: Final = Settings(message_count=1000, block_count=7, rank_count=10_000, round_count=20, seed_count=40)
QUICK: Final = Settings(message_count=50, block_count=1, rank_count=30, round_count=2, seed_count=2)


# -- messages ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ping:
    """A message like the small messages of a protocol."""

    number: int
    value: float


async def pass_on(world: ad.World, count: int) -> None:
    """Send messages to the right-hand neighbour, and receive as many."""
    channel = world.channel(Ping, tag=100)
    right = (world.rank + 1) % world.size
    message = Ping(1000, 0.5)
    for _ in range(count):
        await channel.send(message, right)
        await channel.receive()


def _ours_per_s(count: int, seed: int) -> float:
    began_at = time.process_time()
    ad.simulate(pass_on, count, ranks=_RANK_COUNT, seed=seed)
    return _RANK_COUNT * count / (time.process_time() - began_at)


class _NoSelector:
    """Advances virtual time when asyncio's loop would wait for sockets."""

    def __init__(self) -> None:
        self.now = 0.0

    def select(self, timeout: float | None) -> list[Any]:
        self.now += timeout or 0.0
        return []


class BareLoop(asyncio.BaseEventLoop):
    """asyncio's own event loop in virtual time, without any part of asyncdist."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = _NoSelector()

    def time(self) -> float:
        return self._selector.now

    def _process_events(self, event_list: list[Any]) -> None:
        """Do nothing, because there are no events."""


def _bare_per_s(count: int) -> float:
    loop, rng = BareLoop(), random.Random(0)
    latency = LogNormal(2e-6, 1.0)  # the default of the simulator's network
    queues: list[asyncio.Queue[Ping]] = [asyncio.Queue() for _ in range(_RANK_COUNT)]

    async def pass_on(rank: int) -> None:
        right = queues[(rank + 1) % _RANK_COUNT]
        message = Ping(1000, 0.5)
        for _ in range(count):
            loop.call_later(latency.draw(rng), right.put_nowait, message)
            await queues[rank].get()

    async def run() -> None:
        await asyncio.gather(*map(pass_on, range(_RANK_COUNT)))

    began_at = time.process_time()
    loop.run_until_complete(run())
    took_s = time.process_time() - began_at
    loop.close()
    return _RANK_COUNT * count / took_s


def _messages(settings: Settings) -> Results:
    ours, bare = [], []
    for block in range(settings.block_count):
        ours.append(_ours_per_s(settings.message_count, block))
        bare.append(_bare_per_s(settings.message_count))
    found = {"messages_per_s": statistics.median(ours), "bare_messages_per_s": statistics.median(bare)}
    return {**found, "ratio": found["messages_per_s"] / found["bare_messages_per_s"]}


# -- ranks ------------------------------------------------------------------------------------------------------------


async def _step_until_decided(world: ad.World, decided: list[int], round_count: int, options: dict[str, Any]) -> int:
    """Return the number of steps until rank 0's coordinator has decided ``round_count`` rounds."""
    model = model_of(32)
    look_at = 0 if world.rank == 0 else math.inf
    async with AsyncSelectiveAveragingPolicy(model, optimizer_of(model), **options) as policy:
        while not decided:
            await policy.step(float(world.rank))
            if policy.iteration < look_at:
                continue  # statistics are copies, and take longer than a step
            coordinator = policy.statistics().coordinator
            assert coordinator is not None, "rank 0 must coordinate"
            left_count = round_count - coordinator.rounds_decided
            if left_count <= 0:
                decided.append(coordinator.rounds_decided)
            look_at = policy.iteration + left_count * policy.average_every  # each round needs a report of this rank
    return policy.statistics().iteration


def _large_world(rank_count: int) -> Results:
    torch.set_num_threads(1)
    options = {"average_every": 10, "replacement_ratio": 0.5, "averaging_strategy": "best_only"}
    decided: list[int] = []
    began_at = time.perf_counter()
    took_s: list[float] = []

    def is_decided() -> bool:
        if decided and not took_s:
            took_s.append(time.perf_counter() - began_at)
        return bool(decided)

    report = ad.simulate(_step_until_decided, decided, 1, options, ranks=rank_count, after_event=is_decided)
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"ranks": rank_count, "seconds": took_s[0], "peak_gib": peak_gib, "messages": report.message_count}


# -- seeds ------------------------------------------------------------------------------------------------------------


def _seeds(settings: Settings, options: dict[str, Any]) -> Results:
    seconds, rounds, steps, digests = [], [], [], set()
    for seed in range(settings.seed_count):
        decided: list[int] = []
        began_at = time.process_time()
        report = ad.simulate(
            _step_until_decided, decided, settings.round_count, options, ranks=_RANK_COUNT, seed=seed, strict=True
        )
        seconds.append(time.process_time() - began_at)
        rounds.append(decided[0])
        steps.append(sum(report.results))
        digests.add(report.trace_digest)
    return {
        "seeds_per_s": 1 / statistics.median(seconds),
        "rounds": statistics.median(rounds),
        "steps": statistics.median(steps),
        "digests": len(digests),
    }


def _apart(function: Callable[..., Results], *args: Any) -> Results:
    """Return the function's value from a separate process, because peak memory is counted per process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def rows(results: Results) -> list[Row]:
    """Return the rows of the table."""
    messages, large, seeds = results["messages"], results["large"], results["seeds"]
    return [
        Row(
            "messages through channels, 8 ranks",
            f"{messages['messages_per_s']:,.0f}/s, x{messages['ratio']:.2f}",
            f"{messages['bare_messages_per_s']:,.0f}/s (bare loop)",
            f">= x{TARGET_RATIO:g}",
            messages["ratio"] >= TARGET_RATIO,
        ),
        Row(
            f"{large['ranks']:,} ranks, from start to a decision",
            f"{large['seconds']:.1f} s",
            f"{large['messages']:,} messages",
            f"<= {TARGET_S:g} s",
            large["seconds"] <= TARGET_S,
        ),
        Row(
            f"{large['ranks']:,} ranks, peak memory",
            f"{large['peak_gib']:.2f} GiB",
            "",
            f"<= {TARGET_GIB:g} GiB",
            large["peak_gib"] <= TARGET_GIB,
        ),
        *(
            Row(
                f"seeds, 8 ranks, {name}, {found['rounds']:.0f} rounds, {found['steps']:.0f} steps",
                f"{found['seeds_per_s']:.1f}/s per core",
                f"{found['digests']} distinct",
                f">= {TARGET_SEEDS_PER_S:g}/s",
                found["seeds_per_s"] >= TARGET_SEEDS_PER_S,
            )
            for name, found in seeds.items()
        ),
    ]


def main() -> None:
    """Measure, and write the results to the file named on the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    settings = QUICK if given.quick else FULL
    torch.set_num_threads(1)
    results = {
        "messages": _messages(settings),
        "large": _apart(_large_world, settings.rank_count),
        "seeds": {name: _seeds(settings, options) for name, options in _SCENARIOS.items()},
    }
    given.out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
