"""Measures the bytes and the time of a round of selective averaging by number of ranks and route, in the simulator.

Each population makes one round, which replaces a quarter of the ranks. The model has 1 MiB of float32. The bytes of a
round, with messages and frames, are the bytes of a run with the round minus the bytes of the same run without it. The
busiest rank is the rank that sends or receives the most bytes in streams. Bytes are reported in units of the model.

With D donors and R replacers, a round on the direct route moves D x R models, and each replacer receives D models. The
sharded route may move at most D + R models and 2 % for messages, and each rank at most 2.1 models.

The time of a round is measured from the assignment to the last replacer's new weights. Each rank is on its own host,
whose interface carries a model in the time that 10 Gbit/s take for 64 MiB (MODEL_S), in each direction. Ranks continue
to train in steps of 10 ms.

The coordinator's CPU time for a round of a thousand members is measured without the simulator (:mod:`coordinating`).

At the end, a large population trains a small model with the default options in one process. Its CPU time and peak
memory for at least five rounds are measured. Some hundreds of islands of 32 ranks are measured separately: all messages
of a run, including start and end, per rank and round, and the simulation's CPU time. The best rank of each island
donates to the next island.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from coordinating import coordinator_costs
from harness import Results, Row, model_of, optimizer_of, state_nbytes
from sim import pass_on

import asyncdist as ad
from asyncdist.simulation import Compute, Link, LogNormal, Network
from protocols import AsyncSelectiveAveragingPolicy
from protocols.selective.selection import Route

#: No ranks to launch: this benchmark simulates them.
RANKS: Final = ()
ROUTES: Final[tuple[Route, ...]] = ("direct", "sharded")
RATIO: Final = 0.25
TARGET_TOTAL: Final = 1.02
TARGET_RANK: Final = 2.1
#: Seconds in which a host's interface carries a model, and seconds of a training step.
MODEL_S: Final = 64 * 2**20 * 8 / 10e9
STEP_S: Final = 0.01
#: Above this number of ranks, the coordinator's messages wait behind models for so long that other ranks take over.
DIRECT_SIZE_MAX: Final = 16
#: The time is promised up to this many ranks.
TIMED_SIZE_MAX: Final = 64
#: Limits for the time of a round on the sharded route: relative to 8 ranks, and relative to one model plus four steps.
TARGET_GROWTH: Final = 1.3
TARGET_MODELS: Final = 2.5
#: Limits for the CPU time and memory of the large population.
TARGET_CPU_S: Final = 60.0
TARGET_GIB: Final = 3.0
#: Limit for the coordinator's CPU time per member and round, and number of rounds, of which the best counts.
TARGET_COORDINATOR_US: Final = 15.0
_COORDINATOR_ROUNDS: Final = 20
_AVERAGE_EVERY: Final = 2
_POPULATION_ROUNDS: Final = 5
#: Limit of messages per rank and round, in islands of this size.
ISLAND_SIZE: Final = 32
TARGET_MESSAGES: Final = 64
ISLAND_ROUNDS: Final = 5
#: Limits for the CPU time of an empty main on 10,000 ranks, and for the messages per second of many ranks relative to
#: eight.
TARGET_EMPTY_CPU_S: Final = 60.0
TARGET_RATE: Final = 0.5
#: Number of steps in which this number of rounds fits, and the virtual time in seconds at which all ranks leave.
_ISLAND_STEPS: Final = 60
_ISLANDS_END_AT: Final = 3.0


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of the populations, the model, and the steps in which one round fits."""

    sizes: tuple[int, ...]
    parameter_count: int
    steps: int
    timed_steps: int
    population: int
    island_counts: tuple[int, ...]
    empty: int
    passed_count: int


FULL: Final = Settings(
    (8, 16, 32, 64, 128),
    1 << 18,
    steps=40,
    timed_steps=800,
    population=1000,
    island_counts=(32, 313),
    empty=10_000,
    passed_count=200_000,
)
QUICK: Final = Settings(
    (8, 12), 1 << 16, steps=40, timed_steps=100, population=40, island_counts=(2,), empty=40, passed_count=800
)


async def _train(
    world: ad.World, route: str, ratio: float, settings: Settings, steps: int
) -> tuple[int, int, float, int]:
    """Take part in one round; return bytes sent and received in streams, seconds of its average or -1, and model size.

    The threshold is always crossed, and the cooldown after the first round never ends.
    """
    model = model_of(settings.parameter_count)
    policy = AsyncSelectiveAveragingPolicy(
        model,
        optimizer_of(model),
        average_every=_AVERAGE_EVERY,
        replacement_ratio=ratio,
        threshold=float(world.size),
        cooldown=10**9,
        quorum=1.0,
        grace_s=60.0,
        round_timeout_s=600.0,
        route=route,  # type: ignore[arg-type]
    )
    async with policy:
        infos = [await policy.step(float(world.rank)) for _ in range(steps)]
    statistics = world.statistics()
    seconds = [info.seconds for info in infos if info]
    assert len(seconds) == policy.statistics().replacement_count <= 1
    return (
        statistics.stream_sent_nbytes,
        statistics.stream_received_nbytes,
        seconds[0] if seconds else -1.0,
        state_nbytes(model),
    )


def _measure(size: int, route: str, settings: Settings) -> dict[str, float | None]:
    """Return the bytes of one round, in models, and its seconds if it is timed."""
    idle, report = (
        ad.simulate(_train, route, ratio, settings, settings.steps, ranks=size, seed=size, strict=True)
        for ratio in (0.0, RATIO)
    )
    sent, received, seconds, nbytes = zip(*report.results, strict=True)
    replacer_count = round(RATIO * size)
    _check_applied(seconds, replacer_count)
    model_nbytes = nbytes[0]
    return {
        "donors": size - replacer_count,
        "replacers": replacer_count,
        "total": (report.byte_count - idle.byte_count) / model_nbytes,
        "streams": sum(sent) / model_nbytes,
        "messages": report.message_count - idle.message_count,
        "out": max(sent) / model_nbytes,
        "in": max(received) / model_nbytes,
        "seconds": _round_s(size, route, settings, model_nbytes)
        if route != "direct" or size <= DIRECT_SIZE_MAX
        else None,
    }


def _round_s(size: int, route: str, settings: Settings, model_nbytes: int) -> float:
    """Return the seconds of one round between hosts of one rank each."""
    rate = model_nbytes / MODEL_S
    link = Link(latency_s=LogNormal(50e-6, 1.0), bandwidth_nbytes_per_s=rate)
    report = ad.simulate(
        _train,
        route,
        RATIO,
        settings,
        settings.timed_steps,
        ranks=size,
        seed=size,
        network=Network(ranks_per_host=1, host_bandwidth_nbytes_per_s=rate, cross_link=link),
        compute=Compute(step_s=STEP_S),
        strict=True,
    )
    seconds = [each for _, _, each, _ in report.results]
    _check_applied(seconds, round(RATIO * size))
    return float(max(seconds))


async def _train_small(world: ad.World) -> int:
    """Train until the coordinator has decided enough rounds. Return their number, or 0 on other ranks."""
    torch.manual_seed(0)  # the ranks begin with equal weights
    model = torch.nn.Linear(32, 1)
    async with AsyncSelectiveAveragingPolicy(model, optimizer_of(model), average_every=10) as policy:
        for _ in range(10 * 2 * _POPULATION_ROUNDS):
            await policy.step(float(world.rank))
    coordinator = policy.statistics().coordinator
    return coordinator.rounds_ended if coordinator else 0


def _population(size: int) -> dict[str, float]:
    """Simulate a large population, and return its CPU time, peak memory, messages and rounds."""
    began_s = time.process_time()
    report = ad.simulate(_train_small, ranks=size, seed=size, strict=True)
    rounds = max(report.results)
    assert rounds >= _POPULATION_ROUNDS, f"only {rounds} rounds took place"
    return {
        "ranks": size,
        "rounds": rounds,
        "cpu_s": time.process_time() - began_s,
        "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "messages": report.message_count / size,
    }


async def _train_on_island(world: ad.World) -> tuple[int, int, int] | None:
    """Take part in some rounds. On a coordinator, return the numbers of ended rounds, emigrants and guests."""
    torch.manual_seed(0)  # the ranks begin with equal weights
    model = torch.nn.Linear(4, 1)
    policy = AsyncSelectiveAveragingPolicy(
        model, optimizer_of(model), average_every=_AVERAGE_EVERY, replacement_ratio=RATIO,
        island_size=ISLAND_SIZE, migrate_every=2, start_timeout_s=600.0,
    )  # fmt: skip
    async with policy:
        for _ in range(_ISLAND_STEPS):
            await policy.step(float(world.rank * 7919 % world.size))
        await world.sleep(_ISLANDS_END_AT - world.time())
    found = policy.statistics().coordinator
    return None if found is None else (found.rounds_ended, found.emigrant_count, len(found.guests))


def _measure_islands(count: int) -> dict[str, float]:
    """Simulate ``count`` islands. Return the messages per rank and round, and the simulation's CPU time."""
    ranks, began_at = count * ISLAND_SIZE, time.process_time()
    report = ad.simulate(_train_on_island, ranks=ranks, seed=count, compute=Compute(step_s=STEP_S), strict=True)
    of_islands = [each for each in report.results if each is not None]
    rounds, emigrants, guests = zip(*of_islands, strict=True)
    assert len(of_islands) == count
    assert min(rounds) >= ISLAND_ROUNDS, f"one island has only had {min(rounds)} rounds"
    return {
        "ranks": ranks,
        "rounds": min(rounds),
        "messages": report.message_count / ranks / min(rounds),
        "emigrants": sum(emigrants),
        "guests": sum(guests),
        "cpu_s": time.process_time() - began_at,
    }


async def _nothing(world: ad.World) -> None:
    """Return at once."""


def _empty_main(size: int) -> dict[str, float]:
    """Simulate ``size`` ranks with an empty main, and return the cost of starting and ending the world."""
    began_s = time.process_time()
    report = ad.simulate(_nothing, ranks=size, seed=size, strict=True)
    return {"ranks": size, "messages": report.message_count / size, "cpu_s": time.process_time() - began_s}


def _passed_per_s(ranks: int, count: int) -> float:
    """Return the messages per second of CPU time that ``ranks`` ranks relay, about ``count`` of them.

    A run without these messages shows the cost of start and end, which with many ranks is most of a short run.
    """
    took_s = message_count = 0.0
    for sign, each in ((-1, 0), (1, count // ranks)):
        began_s = time.process_time()
        report = ad.simulate(pass_on, each, ranks=ranks, seed=ranks)
        took_s += sign * (time.process_time() - began_s)
        message_count += sign * report.message_count
    return message_count / took_s


def _rates(many: int, count: int) -> dict[str, float]:
    """Return the rates of many ranks and of eight ranks: medians of three alternating runs."""
    taken = [[_passed_per_s(ranks, count) for ranks in (8, many)] for _ in range(3)]
    of_8, of_many = (statistics.median(each) for each in zip(*taken, strict=True))
    return {"ranks": many, "per_s": of_many, "of_8_per_s": of_8}


def _check_applied(seconds: Sequence[float], replacer_count: int) -> None:
    applied_count = sum(each >= 0 for each in seconds)
    assert applied_count == replacer_count, (
        f"only {applied_count} of {replacer_count} replacers have applied an average"
    )


def _size_rows(results: Results) -> list[Row]:
    """Return the bytes and the time of a round for each number of ranks and route."""
    found = []
    for size, by_route in _by_size(results).items():
        for route, figures in by_route.items():
            is_promised = route == "sharded"
            least = figures["donors"] + figures["replacers"]
            busiest = max(figures["out"], figures["in"])
            against = least if is_promised else figures["donors"] * figures["replacers"]
            found += [
                Row(
                    f"{size} ranks, {route}: all bytes of a round",
                    f"{figures['total']:.2f} models",
                    f"{against:g}: {'D + R' if is_promised else 'D x R'}",
                    f"<= {TARGET_TOTAL:g} of it" if is_promised else "",
                    figures["total"] <= TARGET_TOTAL * least if is_promised else None,
                ),
                Row(
                    f"{size} ranks, {route}: the busiest rank, out and in",
                    f"{figures['out']:.2f}, {figures['in']:.2f} models",
                    "",
                    f"<= {TARGET_RANK:g}" if is_promised else "",
                    busiest <= TARGET_RANK if is_promised else None,
                ),
            ]
            if figures["seconds"] is not None:
                is_limited = is_promised and int(size) <= TIMED_SIZE_MAX
                target = _time_target(figures["seconds"], results["8"]) if is_limited else ("", None)
                seconds = f"{figures['seconds']:.3f} s"
                against = f"{figures['seconds'] / MODEL_S:.1f} models"
                found.append(Row(f"{size} ranks, {route}: seconds of a round", seconds, against, *target))
    return found


def rows(results: Results) -> list[Row]:
    """Return the rows of the table."""
    found = _size_rows(results)
    large = results["population"]
    name = f"population of {large['ranks']}, small model, {large['rounds']} rounds"
    for figures in results["islands"].values():
        found.append(
            Row(
                f"{figures['ranks']} ranks in islands of {ISLAND_SIZE}: messages of a rank, each round",
                f"{figures['messages']:.1f}",
                f"{figures['rounds']} rounds; {figures['cpu_s']:.0f} s of CPU",
                f"<= {TARGET_MESSAGES}",
                figures["messages"] <= TARGET_MESSAGES,
            )
        )
    empty, rates = results["empty"], results["rates"]
    limit = 4 * math.ceil(math.log2(empty["ranks"])) + 16
    ratio = rates["per_s"] / rates["of_8_per_s"]
    return [
        *found,
        Row(
            f"empty main of {empty['ranks']} ranks: messages of a rank",
            f"{empty['messages']:.1f}",
            "",
            f"<= {limit}",
            empty["messages"] <= limit,
        ),
        Row(
            f"empty main of {empty['ranks']} ranks: CPU",
            f"{empty['cpu_s']:.1f} s",
            "",
            f"<= {TARGET_EMPTY_CPU_S:g} s",
            empty["cpu_s"] <= TARGET_EMPTY_CPU_S,
        ),
        *_coordinator_rows(results["coordinator"]),
        Row(
            f"messages per second, {rates['ranks']} ranks that have started",
            f"{rates['per_s']:,.0f}",
            f"x{ratio:.2f} of {rates['of_8_per_s']:,.0f}: 8 ranks",
            f">= x{TARGET_RATE:g}",
            ratio >= TARGET_RATE,
        ),
        Row(f"{name}: CPU", f"{large['cpu_s']:.1f} s", "", f"<= {TARGET_CPU_S:g} s", large["cpu_s"] <= TARGET_CPU_S),
        Row(f"{name}: memory", f"{large['gib']:.2f} GiB", "", f"<= {TARGET_GIB:g} GiB", large["gib"] <= TARGET_GIB),
        Row(f"{name}: messages of a rank", f"{large['messages']:.0f}", "", "", None),
    ]


def _coordinator_rows(costs: Mapping[str, Mapping[str, float]]) -> list[Row]:
    """Return the coordinator's costs per member and round, for each route."""
    return [
        Row(
            f"coordinator of {of_route['ranks']} members, {route}: CPU for each, each round",
            f"{of_route['us']:.1f} us",
            f"{of_route['messages']:.2f} messages, {of_route['nbytes']:.0f} bytes",
            f"<= {TARGET_COORDINATOR_US:g} us" if route == "auto" else "",
            of_route["us"] <= TARGET_COORDINATOR_US if route == "auto" else None,
        )
        for route, of_route in costs.items()
    ]


def _by_size(results: Results) -> Results:
    return {size: figures for size, figures in results.items() if size.isdecimal()}


def _time_target(seconds: float, of_8: Mapping[str, Mapping[str, float]]) -> tuple[str, bool]:
    limit_s = min(TARGET_MODELS * MODEL_S + 4 * STEP_S, TARGET_GROWTH * of_8["sharded"]["seconds"])
    return f"<= {limit_s:.3f} s", seconds <= limit_s


def draw(results: Results, path: Path) -> None:
    """Write the chart, in the format that the path's ending names."""
    import matplotlib  # an optional package, needed only here

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    looks = {"direct": ("#D55E00", "s--"), "sharded": ("#0072B2", "o-")}
    panels = {"in": "models that the busiest rank takes in", "seconds": "seconds of a round"}
    figure, all_axes = plt.subplots(1, 2, figsize=(11.0, 4.0), dpi=150)
    for axes, (name, title) in zip(all_axes, panels.items(), strict=True):
        for route, (colour, style) in looks.items():
            points = [(int(size), by_route[route][name]) for size, by_route in _by_size(results).items()]
            points = [point for point in points if point[1] is not None]
            axes.plot(*zip(*points, strict=True), style, color=colour, label=route)
        axes.set(xscale="log", xlabel="ranks")
        if name == "in":
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        sizes = list(_by_size(results))
        axes.set_xticks(list(map(int, sizes)), labels=sizes, minor=False)
        axes.minorticks_off()
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_title(title, loc="left", fontsize=11)
        axes.grid(True, color="#dddddd", linewidth=0.5)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    all_axes[0].legend(frameon=False, title="route")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    """Measure, and write the results to the file named on the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    settings = QUICK if given.quick else FULL
    torch.set_num_threads(1)
    results: Results = {}

    def measure(name: str, function: Callable[..., Any], *args: Any) -> None:
        began_at = time.perf_counter()
        results[name] = function(*args)
        print(f"{name}: {time.perf_counter() - began_at:.0f} s", file=sys.stderr, flush=True)

    measure("population", _population, settings.population)  # runs first, because peak memory covers the whole process
    ways: tuple[Route, ...] = ("auto", *ROUTES)
    measure(
        "coordinator", lambda size: {way: coordinator_costs(size, _COORDINATOR_ROUNDS, way) for way in ways},
        settings.population,
    )  # fmt: skip
    measure("rates", _rates, settings.population, settings.passed_count)
    for size in settings.sizes:
        measure(str(size), lambda size: {route: _measure(size, route, settings) for route in ROUTES}, size)
    measure("empty", _empty_main, settings.empty)
    measure("islands", lambda counts: {str(count): _measure_islands(count) for count in counts}, settings.island_counts)
    given.out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
