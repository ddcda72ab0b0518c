"""Kills ranks of a population on MPI at random moments; the survivors continue to train and average.

    python killed_members.py JOBS SEED

As a program it runs JOBS jobs of four ranks. In each job, one to three ranks are killed, some of them together, and it
prints the observations of the others. Under a launcher it is a rank. The seed determines all random choices.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__" and "ASYNCDIST_TEST_REPORTS" not in os.environ:
    sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

from support.mpi import Result, report, run_ranks

from asyncdist.wording import ranks_in_words

RANKS = 4
#: Seconds after the moment at which all ranks train: until the kills, and until the end of training.
KILLS_S = (0.1, 2.0)
TRAINING_S = 3.5
#: Limits in seconds for the surviving ranks: from a kill to its notice, in addition to their longest step, and for one
#: step.
DETECTION_S = 2.0
STEP_S = 1.0


def plan(seed: int) -> dict[int, float]:
    """Return the moments of the kills, by rank."""
    draws = random.Random(seed)
    victims = draws.sample(range(RANKS), draws.choice((1, 1, 1, 2, 3)))
    moment = draws.uniform(*KILLS_S)
    return {rank: moment if draws.random() < 0.5 else draws.uniform(*KILLS_S) for rank in victims}


@dataclass
class Kills:
    """Kills ranks from outside when all of them train; ``at`` gives the moments, on the clock that they share."""

    folder: Path
    plan: dict[int, float]

    def __post_init__(self) -> None:
        self.at: dict[int, float] = {}
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while ready_count(self.folder) < RANKS:
            time.sleep(0.005)
        began_at = time.monotonic()
        for rank, moment in sorted(self.plan.items(), key=lambda kill: kill[1]):
            time.sleep(max(0.0, began_at + moment - time.monotonic()))
            self.at[rank] = time.monotonic()
            os.kill(int((self.folder / f"{rank}.pid").read_text()), signal.SIGKILL)


def run(seed: int) -> tuple[Kills, Result]:
    """Run one job."""
    with tempfile.TemporaryDirectory(prefix="asyncdist-kills-") as name:
        kills = Kills(Path(name), plan(seed))
        return kills, run_ranks(RANKS, __file__, name, timeout_s=60, survive=True)


def check(kills: Kills, result: Result) -> dict[str, float]:
    """Fail unless all other ranks continued; return the longest times, in seconds."""
    result.check()  # the exit code is 0
    live = sorted(set(range(RANKS)) - set(kills.at))
    assert sorted(result.reports) == live, result.output()
    lines = [line for line in result.stderr.splitlines() if "the job continues" in line]
    assert 1 <= len(lines) <= len(kills.at), result.output()
    assert lines[-1].startswith(f"{ranks_in_words(kills.at)} "), result.output()
    assert "Traceback" not in result.stderr, result.output()
    found = {"step": 0.0, "news": 0.0, "round": 0.0}
    last_at = max(kills.at.values())
    for seen in result.reports.values():
        assert set(map(int, seen["lost"])) == set(kills.at), result.output()
        found["step"] = max(found["step"], seen["longest_s"])
        news = [heard_at - kills.at[int(rank)] for rank, heard_at in seen["lost"].items()]
        found["news"] = max(found["news"], *news)
    if len(live) > 1:
        rounds = [at - last_at for seen in result.reports.values() for at in seen["averages"] if at > last_at]
        assert rounds, f"no average after the last kill\n{result.output()}"
        found["round"] = min(rounds)
    return found


def say_ready(folder: str, rank: int) -> None:
    place = Path(folder, f"{rank}.pid")
    place.with_suffix(".new").write_text(str(os.getpid()))
    place.with_suffix(".new").rename(place)


def ready_count(folder: str | Path) -> int:
    return len(list(Path(folder).glob("*.pid")))


async def train(world: Any, folder: str) -> None:
    """Train in small steps with an average in every fifth, and record all durations."""
    import torch
    from torch import nn

    from protocols import AsyncSelectiveAveragingPolicy

    torch.manual_seed(world.rank)
    model = nn.Sequential(nn.Linear(256, 2048), nn.Linear(2048, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    samples = torch.randn(4, 256)
    lost: dict[int, float] = {}
    averages: list[float] = []
    longest_s, ends_at = 0.0, 0.0
    of_longest: dict[str, float] = {}
    async with AsyncSelectiveAveragingPolicy(model, optimizer, average_every=5, grace_s=0.2) as policy:
        say_ready(folder, world.rank)
        while not ends_at or time.monotonic() < ends_at:
            began_at, cpu_s = time.monotonic(), time.process_time()
            optimizer.zero_grad()
            loss = (model(samples) - samples).square().mean()
            loss.backward()
            optimizer.step()
            trained_s = time.monotonic() - began_at
            info = await policy.step(-loss.item())
            now = time.monotonic()
            if ends_at and now - began_at > longest_s:
                longest_s = now - began_at
                of_longest = {"trained_s": trained_s, "cpu_s": time.process_time() - cpu_s}
            if not ends_at and ready_count(folder) == RANKS:
                ends_at = now + TRAINING_S
            if info:
                averages.append(now)
            for rank in world.services.lost_ranks():
                lost.setdefault(rank, now)
    report(world.rank, {"lost": lost, "averages": averages, "longest_s": longest_s, **of_longest})


def hunt(seeds: Iterable[int]) -> None:
    """Run jobs in turn until one fails, and print its random choices and its observations."""
    job_count = kill_count = 0
    worst: dict[str, float] = {}
    for seed in seeds:
        moments = ", ".join(f"rank {rank} at {at:.3f} s" for rank, at in sorted(plan(seed).items()))
        print(f"seed {seed}: {moments}", end="", flush=True)
        kills, result = run(seed)
        found = check(kills, result)
        print("; " + ", ".join(f"{name} {seconds:.3f} s" for name, seconds in found.items()), flush=True)
        assert found["news"] <= DETECTION_S + found["step"], result.reports
        assert found["step"] <= STEP_S, result.reports
        job_count += 1
        kill_count += len(kills.at)
        worst = {name: max(seconds, worst.get(name, 0.0)) for name, seconds in found.items()}
    times = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in worst.items())
    print(f"{kill_count} kills in {job_count} jobs: all others went on; longest {times}")


if __name__ == "__main__":
    if "ASYNCDIST_TEST_REPORTS" in os.environ:
        import asyncdist as ad

        ad.run(train, sys.argv[1])
    else:
        hunt(range(int(sys.argv[2]), int(sys.argv[2]) + int(sys.argv[1])))
