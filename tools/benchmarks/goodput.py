"""Goodput under failures, simulated: useful steps over possible steps, where every rank dies now and then.

Policies, checkpoints and kills are real; time is virtual. A step computes for 1 s. Each rank fails at random, with a
given mean number of steps between failures, and its process is killed at an arbitrary point. Three ways to train:

- selective: ``AsyncSelectiveAveragingPolicy``. The other ranks continue, whichever rank is lost, and a new process
  joins in its place. Only the dead rank's steps are lost, since its last snapshot that another rank applied or the last
  average that it applied itself.
- average-all: ``AverageAllPolicy`` with ``save_population``. A loss ends the job: all ranks start again, from the last
  population checkpoint by ``load_population``. Lost are the steps of all since then. A save takes as long as a step.
- alone: no averaging. Each rank saves its own state, and a new process resumes from it.

A second table has 8 ranks, which stand for the 8 learners of Decoupled DiLoCo (2604.21428), with DiLoCo and its
variants (:mod:`goodput_diloco`). The times between failures fall by the same factors as in the paper, in which a
learner has 1 to 16 times as many chips. The first time is chosen, because the paper's model of failures is not known.

Who saves does it in the interval that is best for its time between failures and the time of a save (Young, 1974: the
square root of twice their product).

The cost of a recovery is assumed, not measured (``DETECTION_S``, ``RELAUNCH_S``, ``RELOAD_S``), and is the same in all
three. In "average-all", the simulation ends with its ranks' errors, these seconds pass, and a new simulation loads the
files. In the other two, the rank's new process starts after these seconds while the simulation continues. The time
that it then needs to load a donor's state or its own checkpoint is added. No failure occurs during a recovery.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
import random
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import goodput_diloco
import simulations
from harness import Results, Row, optimizer_of
from torch import nn

import asyncdist as ad
from asyncdist.simulation import Compute, Fault, Kill, Network, Restart
from protocols import AsyncSelectiveAveragingPolicy, AverageAllPolicy, AverageApplied, PolicyEvent, SnapshotTaken

#: No ranks to launch: this benchmark simulates them.
RANKS: Final = ()
TARGET: Final = 0.9
TARGET_AT: Final = ("1000", "64")

STEP_S: Final = 1.0
#: Seconds from a rank's death until the other ranks, or the launcher, detect it.
DETECTION_S: Final = 2.0
#: Seconds from the detection until a new process runs: scheduler, interpreter, imports, device.
RELAUNCH_S: Final = 20.0
#: Seconds from the new process's start until it trains: model and optimizer from a donor or from a file.
RELOAD_S: Final = 8.0
RECOVERY_S: Final = DETECTION_S + RELAUNCH_S + RELOAD_S
#: The simulator charges as much for ``world.compute`` as for a step.
SAVE_S: Final = STEP_S
AVERAGE_EVERY: Final = 10
#: Training begins at this virtual time, after the collective start and a load.
START_S: Final = 3.0
KINDS: Final = ("selective", "average-all", "alone")
#: Published goodput in percent of Decoupled DiLoCo with 8 learners, and of elastic data parallelism if it is known, by
#: the number of chips, and the mean steps between failures of a rank that stand for it here.
PUBLISHED: Final = (
    ("150,000", 1600, 98, 88),
    ("300,000", 800, 96, None),
    ("600,000", 400, 94, None),
    ("1,200,000", 200, 88, None),
    ("2,400,000", 100, 80, 40),
)
LEARNER_COUNT: Final = 8


@dataclass(frozen=True, slots=True)
class Settings:
    """The populations to simulate.

    Attributes:
        rank_counts: Numbers of ranks.
        step_counts: Number of steps of all ranks together to simulate, keyed by a rank's mean steps between failures.
            A job that restarts is simulated up to the number of failures expected in these steps, but at least two
            and at most ``restart_count``.
        steps_min: Least number of steps of each rank in a population.
        learner_steps: Number of steps of all ranks together for each cell of the second table.
        learner_mtbfs: Mean steps between failures of a rank in the second table.
    """

    rank_counts: tuple[int, ...]
    step_counts: dict[int, int]
    restart_count: int
    steps_min: int
    learner_steps: int
    learner_mtbfs: tuple[int, ...]


FULL: Final = Settings(
    (8, 64, 512),
    {10_000: 40_000, 1000: 64_000, 100: 9600},
    restart_count=5,
    steps_min=150,
    learner_steps=3200,
    learner_mtbfs=tuple(mtbf_steps for _, mtbf_steps, *_ in PUBLISHED),
)
QUICK: Final = Settings(
    (8,), {1000: 800, 100: 800}, restart_count=2, steps_min=100, learner_steps=800, learner_mtbfs=(100,)
)


@dataclass(slots=True)
class Tally:
    """Counts steps of all ranks together.

    Attributes:
        useful: Steps whose effect survives.
        possible: Steps that would have been made without failures.
        died: Steps that were made and then lost with a rank or a job.
        empty: Steps not made because a rank or the job was dead or recovering.
        failures: Number of ranks killed.
    """

    useful: float = 0.0
    possible: float = 0.0
    died: float = 0.0
    empty: float = 0.0
    failures: int = 0

    def results(self) -> Results:
        """Return the goodput and the shares of lost steps by cause; the rest is time for waiting and saving."""
        shares = {name: getattr(self, name) / self.possible for name in ("useful", "died", "empty")}
        return {
            "goodput": shares.pop("useful"),
            **shares,
            "waited": (self.possible - self.useful - self.died - self.empty) / self.possible,
            "failures": self.failures,
            "steps": self.possible,
        }


@dataclass(slots=True)
class Work:
    """The steps that one process has made.

    Attributes:
        made: Number of steps.
        kept: Number of steps whose effect would survive if the process died now.
        given: Round of the process's newest snapshot, and the step at which it was taken.
    """

    made: int = 0
    kept: int = 0
    given: tuple[int, int] = (0, 0)


def _best_interval(mtbf_s: float) -> int:
    """Steps between two saves (Young, "A first order approximation to the optimum checkpoint interval", 1974)."""
    return max(1, round(math.sqrt(2 * SAVE_S * mtbf_s) / STEP_S))


async def _until_start(world: ad.World) -> None:
    """Wait until training begins, on all ranks at once."""
    assert world.time() < START_S, f"the start took {world.time():g} s of virtual time"
    await asyncio.sleep(START_S - world.time())


# -- ranks that fail one by one ---------------------------------------------------------------------------------------

#: The works of each rank's processes, the newest last.
Lives = list[list[Work]]


async def _train_selectively(world: ad.World, lives: Lives, ends_at_s: float, _: Path, __: int) -> None:
    work = Work()
    lives[world.rank].append(work)
    first = 0

    def note(event: PolicyEvent) -> None:
        if isinstance(event, SnapshotTaken):
            work.given = (event.round, event.iteration + 1 - first)
        elif isinstance(event, AverageApplied):
            work.kept = event.iteration + 1 - first
            for other in itertools.chain.from_iterable(lives[donor] for donor in event.donors):
                if other.given[0] == event.round:
                    other.kept = max(other.kept, other.given[1])

    model = nn.Linear(4, 4)
    policy = AsyncSelectiveAveragingPolicy(
        model, optimizer_of(model), average_every=AVERAGE_EVERY, replacement_ratio=0.25, on_event=note
    )
    try:
        async with policy:
            first = policy.iteration  # a new process continues its donor's count
            if not world.incarnation:
                await _until_start(world)
            while world.time() < ends_at_s - STEP_S / 2:
                await policy.step(random.random())  # any rank may be the best or the worst one
                work.made += 1
            await asyncio.sleep(max(0.0, ends_at_s - world.time()))
    except (ad.ClosedError, ad.RankLostError, ad.StartTimeoutError):
        if world.time() < ends_at_s:
            raise  # after that the others have left before this one was admitted


async def _train_alone(world: ad.World, lives: Lives, ends_at_s: float, place: Path, save_every: int) -> None:
    work = Work()
    lives[world.rank].append(work)
    place = place / str(world.rank)
    model = nn.Linear(4, 4)
    optimizer = optimizer_of(model)
    alone = await ad.new_group([world.rank])
    if not world.incarnation:
        await _until_start(world)
    elif any(earlier.kept for earlier in lives[world.rank]):
        await ad.load_population(place, model, optimizer, group=alone)
    while world.time() < ends_at_s - STEP_S / 2:
        await world.safe_point()
        work.made += 1
        if work.made % save_every == 0:
            made = work.made
            await ad.save_population(place, model, optimizer, keep=2, group=alone)
            work.kept = made
    await asyncio.sleep(max(0.0, ends_at_s - world.time()))


_Train = Callable[[ad.World, Lives, float, Path, int], Coroutine[Any, Any, None]]


def _failures(rng: random.Random, rank: int, mtbf_s: float, horizon_s: float) -> tuple[list[Fault], float]:
    """Draw a rank's deaths and new processes; return them, and for how long its place is empty."""
    faults: list[Fault] = []
    empty_s = 0.0
    dies_at_s = rng.expovariate(1 / mtbf_s)
    while dies_at_s < horizon_s:
        faults.append(Kill(rank, START_S + dies_at_s))
        begins_at_s = dies_at_s + RECOVERY_S
        if begins_at_s < horizon_s - AVERAGE_EVERY * STEP_S:
            faults.append(Restart(rank, START_S + begins_at_s))
        else:
            begins_at_s = horizon_s  # so late a newcomer would find that the others are about to leave
        empty_s += begins_at_s - dies_at_s
        dies_at_s = begins_at_s + rng.expovariate(1 / mtbf_s)
    return faults, empty_s


def _count_lives(train: _Train, rank_count: int, mtbf_steps: int, step_count: int, steps_min: int) -> Tally:
    """Simulate populations whose ranks die and are replaced individually."""
    tally = Tally()
    horizon_s = STEP_S * max(steps_min, min(mtbf_steps, math.ceil(step_count / rank_count)))
    seeds = itertools.count()
    while tally.possible < step_count:
        seed = next(seeds)
        rng = random.Random(f"failures of {rank_count} ranks, {mtbf_steps} steps, {seed}")
        drawn = [_failures(rng, rank, mtbf_steps * STEP_S, horizon_s) for rank in range(rank_count)]
        lives: Lives = [[] for _ in range(rank_count)]
        with tempfile.TemporaryDirectory() as place:
            report = ad.simulate(
                train,
                lives,
                START_S + horizon_s,
                Path(place),
                _best_interval(mtbf_steps * STEP_S),
                ranks=rank_count,
                seed=seed,
                network=Network(loss_detection_s=DETECTION_S),
                compute=Compute(step_s=STEP_S),
                faults=[fault for faults, _ in drawn for fault in faults],
            )
        report.value()  # raises if a rank failed that was not killed
        report.check_faults()
        for works, (faults, empty_s) in zip(lives, drawn, strict=True):
            death_count = sum(isinstance(fault, Kill) for fault in faults)
            lost = works[:death_count]  # the newest process lives, unless it has died as well
            tally.failures += death_count
            tally.died += sum(work.made - work.kept for work in lost)
            tally.useful += sum(work.kept for work in lost) + sum(work.made for work in works[death_count:])
            tally.empty += empty_s / STEP_S
        tally.possible += rank_count * horizon_s / STEP_S
    return tally


# -- a job that ends with any of its ranks ----------------------------------------------------------------------------


async def _train_together(world: ad.World, works: list[Work], place: Path, save_every: int) -> None:
    work = works[world.rank]
    model = nn.Linear(4, 4)
    optimizer = optimizer_of(model)
    policy = AverageAllPolicy(model, optimizer, average_every=AVERAGE_EVERY)
    if work.kept:
        loaded = await ad.load_population(place, model, optimizer, policy=policy)
        work.made = work.kept = loaded.extra
    async with policy:
        await _until_start(world)
        while True:
            await policy.step()
            work.made += 1
            if work.made % save_every == 0:
                made = work.made
                await ad.save_population(place, model, optimizer, policy=policy, extra=made, keep=2)
                work.kept = made


def _count_attempts(rank_count: int, mtbf_steps: int, failure_count: int) -> Tally:
    """Simulate one job, which is started again after each failure, up to the end of the last recovery."""
    mtbf_s = mtbf_steps * STEP_S / rank_count
    rng = random.Random(f"failures of a job of {rank_count} ranks, {mtbf_steps} steps")
    passed_s, died, kept = 0.0, 0, 0
    with tempfile.TemporaryDirectory() as place:
        for seed in range(failure_count):
            works = [Work(kept, kept) for _ in range(rank_count)]
            report = ad.simulate(
                _train_together,
                works,
                Path(place),
                _best_interval(mtbf_s),
                ranks=rank_count,
                seed=seed,
                network=Network(loss_detection_s=DETECTION_S),
                compute=Compute(step_s=STEP_S),
                faults=[Kill(rng.randrange(rank_count), START_S + rng.expovariate(1 / mtbf_s))],
            )
            report.check_faults()
            kept = max(work.kept for work in works)  # a checkpoint is whole as soon as the first rank knows that it is
            died += sum(work.made - kept for work in works)
            passed_s += report.virtual_time_s - START_S + RELAUNCH_S + RELOAD_S
    return Tally(
        useful=float(rank_count * kept),
        possible=rank_count * passed_s / STEP_S,
        died=float(died),
        empty=failure_count * rank_count * (RELAUNCH_S + RELOAD_S) / STEP_S,  # until a loss is known, others step on
        failures=failure_count,
    )


# -- DiLoCo and its variants ------------------------------------------------------------------------------------------


async def _train_diloco(world: ad.World, lives: Lives, ends_at_s: float, _: Path, __: int, *, kind: str) -> None:
    await goodput_diloco.train(world, lives, ends_at_s, START_S, Work(), kind)


def _count_learners(settings: Settings) -> Results:
    """Return the figures of the second table, by way to train and steps between failures."""
    results: Results = {}
    for mtbf_steps in settings.learner_mtbfs:
        count = functools.partial(
            _count_lives,
            rank_count=LEARNER_COUNT,
            mtbf_steps=mtbf_steps,
            step_count=settings.learner_steps,
            steps_min=settings.steps_min,
        )
        tallies = {kind: count(functools.partial(_train_diloco, kind=kind)) for kind in goodput_diloco.MAKERS}
        tallies["selective"] = count(_train_selectively)
        tallies["average-all"] = _count_attempts(LEARNER_COUNT, mtbf_steps, settings.restart_count)
        for kind, tally in tallies.items():
            results.setdefault(kind, {})[str(mtbf_steps)] = tally.results()
    return results


# -- all of them ------------------------------------------------------------------------------------------------------


def measure(settings: Settings) -> Results:
    """Return figures by way to train, number of ranks and steps between failures."""
    results: Results = {kind: {} for kind in KINDS}
    for rank_count in settings.rank_counts:
        for figures in results.values():
            figures[str(rank_count)] = {}
        for mtbf_steps, step_count in settings.step_counts.items():
            restart_count = min(settings.restart_count, max(2, step_count // mtbf_steps))
            count = functools.partial(
                _count_lives,
                rank_count=rank_count,
                mtbf_steps=mtbf_steps,
                step_count=step_count,
                steps_min=settings.steps_min,
            )
            for kind, tally in (
                ("selective", count(_train_selectively)),
                ("average-all", _count_attempts(rank_count, mtbf_steps, restart_count)),
                ("alone", count(_train_alone)),
            ):
                results[kind][str(rank_count)][str(mtbf_steps)] = tally.results()
    return {**results, "learners": _count_learners(settings)}


def rows(results: Results) -> list[Row]:
    """Return the rows of the table."""
    table = []
    for rank_count, by_mtbf in results["selective"].items():
        for mtbf_steps, figures in by_mtbf.items():
            is_target = (rank_count, mtbf_steps) == TARGET_AT
            rivals = (f"{results[kind][rank_count][mtbf_steps]['goodput']:.3f} ({kind})" for kind in KINDS[1:])
            table.append(
                Row(
                    f"goodput, {rank_count} ranks, one failure in {int(mtbf_steps):,} steps of a rank",
                    f"{figures['goodput']:.3f} (missing: empty {figures['empty']:.3f}, died {figures['died']:.3f}, "
                    f"waited {figures['waited']:.3f})",
                    ", ".join(rivals),
                    f">= {TARGET:g}" if is_target else "",
                    figures["goodput"] >= TARGET if is_target else None,
                )
            )
            if is_target and figures["failures"]:
                table.append(Row("seconds of recovery up to which that holds", f"{_longest_recovery_s(figures):.0f} s"))
    return table + _learner_rows(results["learners"])


def _learner_rows(by_kind: Results) -> list[Row]:
    """Return a row of the second table for each number of chips, beside the published figures."""
    found = []
    for chips, mtbf_steps, decoupled, elastic in PUBLISHED:
        if str(mtbf_steps) in by_kind["async"]:
            shown = (f"{kind} {of_mtbf[str(mtbf_steps)]['goodput']:.3f}" for kind, of_mtbf in by_kind.items())
            published = f"Decoupled DiLoCo {decoupled} %" + (f", elastic {elastic} %" if elastic else "")
            found.append(
                Row(f"8 ranks, one failure in {mtbf_steps} steps", ", ".join(shown), f"{chips} chips: {published}")
            )
    return found


def _longest_recovery_s(figures: Results) -> float:
    """Return the longest recovery in seconds, instead of RECOVERY_S, with which the target is still reached."""
    present = figures["steps"] * (1 - figures["empty"])
    allowed = figures["steps"] * figures["goodput"] / TARGET - present
    return float(allowed * STEP_S / figures["failures"])


def draw(results: Results, path: Path) -> None:
    """Write the chart, in the format that the path's ending names."""
    import matplotlib  # an extra, and only for this

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    looks = {"selective": ("#0072B2", "o-"), "average-all": ("#D55E00", "s--"), "alone": ("#009E73", "^:")}
    labels = {
        "selective": "selective averaging: the others go on",
        "average-all": "averaging all: all restart from the last checkpoint",
        "alone": "no averaging: each rank has its own checkpoint",
    }
    rank_counts = list(results["selective"])
    figure, panels = plt.subplots(
        1, len(rank_counts), figsize=(max(11.0, 3.4 * len(rank_counts) + 1), 4.2), dpi=150, sharey=True, squeeze=False
    )
    for axes, rank_count in zip(panels[0], rank_counts, strict=True):
        for kind, (colour, style) in looks.items():
            points = sorted((int(mtbf), figures["goodput"]) for mtbf, figures in results[kind][rank_count].items())
            axes.plot(*zip(*points, strict=True), style, color=colour, label=labels[kind])
        axes.set_xscale("log")
        axes.invert_xaxis()  # worse machines are on the right
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_ylim(-0.03, 1.03)
        axes.set_title(f"{rank_count} ranks", loc="left", fontsize=11)
        axes.set_xlabel("steps between failures of a rank")
        axes.grid(True, color="#dddddd", linewidth=0.5)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    panels[0][0].set_ylabel("useful steps / possible steps")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="lower center", ncols=3, fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    simulations.main(measure, full=FULL, quick=QUICK)
