"""Compares how long selective averaging should wait for late reports (the window), in the simulator.

Ranks train under the policy in virtual time, 50 ms per step, and report every 5 steps. Each population has a
disturbance: one rank in eight has steps 2, 10 or 100 times as long; each rank stops for a second on average, every 200
steps; or step times have a distribution with a heavy tail. The coordinator waits for late reports by one of these
windows, counted from the quorum:

- ``fixed, all``: one second, and slow ranks get roles like all others. The policy behaved in this way before the
  adaptive windows.
- ``fixed``: one second.
- ``median + 3 MAD``: computed from the past offsets of reports from the first report of their decision.
- ``free``: ``gamma * max(0, cadence - quorum_time - round_time)`` with gamma 1, or 0.5: Decoupled DiLoCo, eq. 3.
- ``expected``: like ``free``, but only for ranks whose report is expected by then. This is the policy's default.

For each window, the tables show: rounds completed per report interval; the share of ranks that a decision may give a
role; the age in steps of the reports that it judges; the steps that a round takes; and a replacer's lost steps, between
its assignment and its new weights. The steps of a rank never wait for anything.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
from harness import Results, Row, compute, model_of, optimizer_of

import asyncdist as ad
from protocols import AsyncSelectiveAveragingPolicy
from protocols.selective import coordinator, rounds, waiting
from protocols.selective.rounds import RoundCoordinator
from protocols.selective.waiting import Pace, Patience

#: No ranks to launch: this benchmark simulates them.
RANKS: Final = ()
TARGET_ROUNDS: Final = 0.8
POPULATIONS: Final = ("equal", "x2", "x10", "x100", "stalls", "heavy tails")
MEASURES: Final = {
    "rounds": "Rounds in the time of a report",
    "share": "Part of the ranks that a decision may give a role",
    "age_steps": "Age of the judged reports, in steps",
    "round_steps": "Length of a round, in steps",
    "lost_steps": "Steps of a replacer between its assignment and its new weights",
}
_STEP_S: Final = 0.05
_AVERAGE_EVERY: Final = 5


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of the populations, number of seeds for each, and virtual seconds of each run."""

    sizes: tuple[int, ...]
    seed_count: int
    duration_s: float


FULL: Final = Settings(sizes=(8, 32), seed_count=1, duration_s=60.0)
QUICK: Final = Settings(sizes=(8,), seed_count=1, duration_s=2.0)


# -- windows ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Seen:
    """Records the actions of coordinators: one value for each decision, round or replacement."""

    share: list[float] = field(default_factory=list)
    age_steps: list[float] = field(default_factory=list)
    round_steps: list[float] = field(default_factory=list)
    lost_steps: list[float] = field(default_factory=list)
    offsets_s: list[float] = field(default_factory=list)


def _watched(seen: Seen, size: int, kind: type[Patience]) -> type[Patience]:
    """Return a subclass of this window that also records its decisions."""

    class Watched(kind):  # type: ignore[misc, valid-type]
        def slow_ranks(
            self, paces: Iterable[tuple[int, Pace]], cadence_s: float, now: float, *, slowest: Pace | None = None
        ) -> frozenset[int]:
            known = dict(paces)
            slow: frozenset[int] = super().slow_ranks(known.items(), cadence_s, now, slowest=slowest)
            judged = [pace for rank, pace in known.items() if rank not in slow]
            seen.share.append(len(judged) / size)
            seen.age_steps.extend(pace.silent_s / _STEP_S for pace in judged)
            return slow

        def on_round(self, named: list[int], took_s: float, now: float) -> None:
            seen.round_steps.append(took_s / _STEP_S)
            super().on_round(named, took_s, now)

    return Watched


class _ForAll(Patience):
    """Waits for all other ranks, whether their reports are expected or not."""

    def on_quorum(self, others: Mapping[int, Pace], cadence_s: float, quorum_s: float, now: float) -> None:
        super().on_quorum(others, cadence_s, quorum_s, now)
        self.awaited = set(others)


def _fixed(stack: ExitStack, seen: Seen) -> type[Patience]:
    stack.enter_context(mock.patch.object(waiting, "grace_s", lambda *_: 1.0))
    return _ForAll


def _fixed_all(stack: ExitStack, seen: Seen) -> type[Patience]:
    stack.enter_context(mock.patch.object(waiting, "slow_ranks", lambda *_: frozenset()))
    return _fixed(stack, seen)


def _median_mad(stack: ExitStack, seen: Seen) -> type[Patience]:
    def grace_s(cadence_s: float, quorum_s: float, rounds_s: list[float]) -> float:
        recent = seen.offsets_s[-256:] or [0.0]
        median = statistics.median(recent)
        mad = statistics.median(abs(offset - median) for offset in recent)
        return max(0.0, median + 3 * mad - quorum_s)

    stack.enter_context(mock.patch.object(waiting, "grace_s", grace_s))
    stack.enter_context(mock.patch.object(coordinator, "RoundCoordinator", _with_offsets(seen)))
    return _ForAll


def _with_offsets(seen: Seen) -> type[RoundCoordinator]:
    """Return a coordinator class that records each report's delay after the first report of its decision.

    A report that a decision did not wait for counts from the first report of that decision.
    """

    class WithOffsets(RoundCoordinator):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._missed: dict[int, float] = {}

        def on_report(self, rank: int, *facts: Any, **rest: Any) -> Any:
            now = facts[-1]
            start = now if self._window_start is None else self._window_start
            if not self._members[rank].fresh:
                seen.offsets_s.append(now - self._missed.pop(rank, start))
            return super().on_report(rank, *facts, **rest)

        def _judge(self, sends: list[Any], now: float) -> None:
            for rank, member in self._members.items():
                if not member.fresh and self._window_start is not None:
                    self._missed.setdefault(rank, self._window_start)
            super()._judge(sends, now)

    return WithOffsets


def _free(gamma: float) -> Callable[[ExitStack, Seen], type[Patience]]:
    def choose(stack: ExitStack, seen: Seen) -> type[Patience]:
        grace_s = waiting.grace_s
        stack.enter_context(mock.patch.object(waiting, "grace_s", lambda *times: gamma * grace_s(*times)))
        return _ForAll

    return choose


def _expected(stack: ExitStack, seen: Seen) -> type[Patience]:
    return Patience


WINDOWS: Final[dict[str, Callable[[ExitStack, Seen], type[Patience]]]] = {
    "fixed, all": _fixed_all,
    "fixed": _fixed,
    "median + 3 MAD": _median_mad,
    "free, gamma 1": _free(1.0),
    "free, gamma 0.5": _free(0.5),
    "expected": _expected,
}


# -- populations ------------------------------------------------------------------------------------------------------


def _draw_step_s(population: str, is_slow: bool, rng: random.Random) -> float:
    """Return the seconds that the next step of a rank takes."""
    if population == "heavy tails":
        return _STEP_S * rng.lognormvariate(0.0, 1.0)
    step_s = _STEP_S * rng.uniform(0.98, 1.02)
    if population == "stalls" and rng.random() < 1 / 200:
        step_s += rng.expovariate(1.0)
    return step_s * (float(population[1:]) if population.startswith("x") and is_slow else 1.0)


async def _train(world: ad.World, population: str, settings: Settings, seed: int, seen: Seen) -> int:
    """Train until time is up, and return the number of rounds decided on this rank. The coordinator is never slow."""
    rng = random.Random(f"{population} {seed} {world.rank}")
    model = model_of(32)
    policy = AsyncSelectiveAveragingPolicy(model, optimizer_of(model), average_every=_AVERAGE_EVERY)
    async with policy:
        while world.time() < settings.duration_s:
            compute(_draw_step_s(population, world.rank % 8 == 7, rng))
            info = await policy.step(rng.random())
            if info:
                seen.lost_steps.append(info.seconds / _STEP_S)
    decided = policy.statistics().coordinator
    return 0 if decided is None else decided.rounds_ended


def _measure(size: int, population: str, window: str, settings: Settings) -> dict[str, float]:
    """Return the mean of each measure over the seeds."""
    found: dict[str, list[float]] = defaultdict(list)
    for seed in range(settings.seed_count):
        seen = Seen()
        with ExitStack() as stack:
            kind = WINDOWS[window](stack, seen)
            stack.enter_context(mock.patch.object(rounds, "Patience", _watched(seen, size, kind)))
            results = ad.simulate(_train, population, settings, seed, seen, ranks=size, seed=seed, strict=True).results
        found["rounds"].append(sum(results) * _AVERAGE_EVERY * _STEP_S / settings.duration_s)
        for name in MEASURES:
            if name != "rounds":
                found[name].append(statistics.fmean(getattr(seen, name) or [0.0]))
    return {name: statistics.fmean(values) for name, values in found.items()}


# -- tables -----------------------------------------------------------------------------------------------------------


def markdown(results: Results) -> str:
    """Return one table for each measure, as docs/grace.md has them."""
    lines = []
    for name, title in MEASURES.items():
        lines += [
            f"**{title}**",
            "",
            f"| ranks, population | {' | '.join(WINDOWS)} |",
            "|---" * (len(WINDOWS) + 1) + "|",
        ]
        for population, by_window in results.items():
            lines.append(f"| {population} | {' | '.join(f'{by_window[each][name]:.2f}' for each in WINDOWS)} |")
        lines.append("")
    return "\n".join(lines)


def rows(results: Results) -> list[Row]:
    """Return the rows of the table."""
    found = []
    for population, by_window in results.items():
        size = population.split(",")[0]
        ratio = by_window["expected"]["rounds"] / results[f"{size}, equal"]["expected"]["rounds"]
        before = by_window["fixed, all"]["rounds"] / results[f"{size}, equal"]["fixed, all"]["rounds"]
        is_promised = population.endswith("x100")
        found.append(
            Row(
                f"{population}: rounds kept",
                f"{ratio:.2f}",
                f"{before:.2f} (fixed, all)",
                f">= {TARGET_ROUNDS:g}" if is_promised else "",
                ratio >= TARGET_ROUNDS if is_promised else None,
            )
        )
    return found


def main() -> None:
    """Measure, write the results to the file named on the command line, and print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    settings = QUICK if given.quick else FULL
    torch.set_num_threads(1)
    began_at = time.perf_counter()
    results = {
        f"{size}, {population}": {window: _measure(size, population, window, settings) for window in WINDOWS}
        for size in settings.sizes
        for population in POPULATIONS
    }
    given.out.write_text(json.dumps(results))
    print(markdown(results))
    print(f"{time.perf_counter() - began_at:.0f} s")


if __name__ == "__main__":
    main()
