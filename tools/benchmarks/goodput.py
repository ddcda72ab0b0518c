"""Measures goodput under failures in the simulator: useful steps divided by possible steps, if ranks die now and then.

Policies, checkpoints and kills are real; time is virtual. A step computes for 1 s. Each rank fails at random, with a
given mean number of steps between failures, and its process is killed at an arbitrary point. Ranks train in three ways:

- selective: ``AsyncSelectiveAveragingPolicy``. The other ranks continue, whichever rank is lost, and a new process
  joins in its place. The dead rank's steps are lost, but only those since its last snapshot that another rank applied,
  or since the last average that it applied.
- average-all: ``AverageAllPolicy`` with ``save_population``. A loss ends the job: all ranks start again, from the last
  population checkpoint by ``load_population``. The steps of all ranks since then are lost. A save takes as long as a
  step.
- alone: without averaging. Each rank saves its own state, and a new process resumes from it.

A second table has 8 ranks, which stand for the 8 learners of Decoupled DiLoCo (2604.21428), with DiLoCo and its
variants (:mod:`failing.diloco`). The times between failures fall by the same factors as in the paper, in which a
learner has 1 to 16 times as many chips. The first time is chosen, because the paper's model of failures is not known.

In a third table, a step of every second rank takes twice as long. With 8 and 64 ranks the models are trained
(:mod:`failing.students`), so the table also has the loss after equal virtual time. Its share of useful time counts each
rank's time equally, so that a rank that waits for a slow one loses time.

Checkpoints are saved at the best interval for the time between failures and the time of a save (Young, 1974: the square
root of twice their product).

The cost of a recovery is assumed, not measured (``DETECTION_S``, ``RELAUNCH_S``, ``RELOAD_S``), and is the same for all
three ways. In "average-all", the simulation ends with its ranks' errors, these seconds pass, and a new simulation loads
the files. In the other two, the rank's new process starts after these seconds while the simulation continues. The time
that it then needs to load a donor's state or its own checkpoint is added. No failure occurs during a recovery.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import simulations
from failing import diloco
from failing.counting import Train, count_attempts, count_lives
from failing.training import train_alone, train_selectively
from failing.work import STEP_S
from harness import Results, Row

#: No ranks to launch: this benchmark simulates them.
RANKS: Final = ()
TARGET: Final = 0.9
#: Number of ranks, and number of steps between failures, for which the target is set.
TARGET_AT: Final = ("64", "1000")

KINDS: Final = ("selective", "average-all", "alone")
#: For each number of chips: the published goodput in percent of Decoupled DiLoCo with 8 learners and, if known, of
#: elastic data parallelism. The last number is the mean number of steps between a rank's failures here.
PUBLISHED: Final = (
    ("150,000", 1600, 98, 88),
    ("300,000", 800, 96, None),
    ("600,000", 400, 94, None),
    ("1,200,000", 200, 88, None),
    ("2,400,000", 100, 80, 40),
)
#: Published goodput, and points on text benchmarks, of Decoupled DiLoCo with 8 learners on mixed hardware.
PUBLISHED_MIXED: Final = "Decoupled DiLoCo: quorum of all 84 %, 54.4; quorum 1 100 %, 51.4; with grace 100 %, 55.3"
LEARNER_COUNT: Final = 8
#: In the third table, a step of every second rank takes this many times as long.
SLOWDOWN: Final = 2.0
#: Mean steps of a fast rank between its failures in the third table.
MIXED_MTBF: Final = 400


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
        mixed: Number of simulations, their virtual seconds, and whether the models learn, keyed by the number of ranks
            in the third table.
    """

    rank_counts: tuple[int, ...]
    step_counts: dict[int, int]
    restart_count: int
    steps_min: int
    learner_steps: int
    learner_mtbfs: tuple[int, ...]
    mixed: Mapping[int, tuple[int, float, bool]]


FULL: Final = Settings(
    (8, 64, 512),
    {10_000: 40_000, 1000: 64_000, 100: 9600},
    restart_count=5,
    steps_min=150,
    learner_steps=3200,
    learner_mtbfs=tuple(mtbf_steps for _, mtbf_steps, *_ in PUBLISHED),
    mixed={8: (3, 300.0, True), 64: (1, 300.0, True), 512: (1, 120.0, False)},
)
QUICK: Final = Settings(
    (8,),
    {1000: 800, 100: 800},
    restart_count=2,
    steps_min=100,
    learner_steps=800,
    learner_mtbfs=(100,),
    mixed={8: (1, 100.0, True)},
)


# -- one cell of a table ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cell:
    """One entry of a table.

    Attributes:
        table: "sizes" for the first table, "learners" for the second one, "mixed" for ranks of two speeds.
        kind: Way to train.
        mtbf_steps: Mean steps between failures of a rank; infinite without failures.
    """

    table: str
    kind: str
    rank_count: int
    mtbf_steps: float

    def cells_of(self, results: Results) -> Results:
        """Return the part of the results to which this cell belongs."""
        table = results if self.table == "sizes" else results.setdefault(self.table, {})
        found: Results = table.setdefault(self.kind, {})
        return found if self.table == "learners" else found.setdefault(str(self.rank_count), {})


def simulate(cell: Cell, settings: Settings) -> Results:
    """Simulate a cell, and return its figures."""
    ranks, mtbf_steps = cell.rank_count, cell.mtbf_steps
    if cell.table == "mixed":
        count, horizon_s, learns = settings.mixed[ranks]
        factors = dict.fromkeys(range(1, ranks, 2), SLOWDOWN)
        train = _train_of(cell.kind)
        return count_lives(train, ranks, mtbf_steps, horizon_s, count, factors=factors, learns=learns).results()
    step_count = settings.learner_steps if cell.table == "learners" else settings.step_counts[int(mtbf_steps)]
    if cell.kind == "average-all":
        expected = max(2, int(step_count // mtbf_steps)) if cell.table == "sizes" else settings.restart_count
        return count_attempts(ranks, int(mtbf_steps), min(settings.restart_count, expected)).results()
    horizon_s = STEP_S * max(settings.steps_min, min(mtbf_steps, math.ceil(step_count / ranks)))
    count = math.ceil(step_count / (ranks * horizon_s))
    return count_lives(_train_of(cell.kind), ranks, int(mtbf_steps), horizon_s, count).results()


def _train_of(kind: str) -> Train:
    if kind in diloco.MAKERS:
        return functools.partial(diloco.train, kind=kind)
    return train_selectively if kind == "selective" else train_alone


# -- all of them ------------------------------------------------------------------------------------------------------


def measure(settings: Settings) -> Results:
    """Return the figures, keyed by way to train, number of ranks and steps between failures."""
    cells = [
        Cell("sizes", kind, rank_count, mtbf_steps)
        for kind in KINDS
        for rank_count in settings.rank_counts
        for mtbf_steps in settings.step_counts
        if rank_count <= mtbf_steps and (kind, rank_count, mtbf_steps) != ("average-all", 512, 1000)  # too slow
    ]
    of_diloco = (*diloco.MAKERS, "selective")
    cells += [
        Cell("learners", kind, LEARNER_COUNT, mtbf_steps)
        for kind in (*of_diloco, "average-all")
        for mtbf_steps in settings.learner_mtbfs
    ]
    cells += [
        Cell("mixed", kind, rank_count, mtbf_steps)
        for kind in of_diloco
        for rank_count in settings.mixed
        for mtbf_steps in (math.inf, MIXED_MTBF)
    ]
    results: Results = {}
    for cell, figures in simulations.simulated(functools.partial(simulate, settings=settings), cells):
        name = f"{cell.mtbf_steps:g}" if math.isfinite(cell.mtbf_steps) else "none"
        cell.cells_of(results)[name] = figures
    return results


def rows(results: Results) -> list[Row]:
    """Return the rows of the table."""
    table = []
    for rank_count, by_mtbf in results["selective"].items():
        for mtbf_steps, figures in by_mtbf.items():
            is_target = (rank_count, mtbf_steps) == TARGET_AT
            found = {kind: results[kind].get(rank_count, {}).get(mtbf_steps) for kind in KINDS[1:]}
            rivals = (f"{each['goodput']:.3f} ({kind})" for kind, each in found.items() if each)
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
    return table + _learner_rows(results["learners"]) + _mixed_rows(results["mixed"])


def _learner_rows(by_kind: Results) -> list[Row]:
    """Return a row of the second table for each number of chips, with the published figures."""
    found = []
    for chips, mtbf_steps, decoupled, elastic in PUBLISHED:
        if str(mtbf_steps) in by_kind["async"]:
            shown = (f"{kind} {of_mtbf[str(mtbf_steps)]['goodput']:.3f}" for kind, of_mtbf in by_kind.items())
            published = f"Decoupled DiLoCo {decoupled} %" + (f", elastic {elastic} %" if elastic else "")
            found.append(
                Row(f"8 ranks, one failure in {mtbf_steps} steps", ", ".join(shown), f"{chips} chips: {published}")
            )
    return found


def _mixed_rows(by_kind: Results) -> list[Row]:
    """Return a row of the third table for each number of ranks, without and with failures."""
    return [
        Row(
            f"{rank_count} ranks, half at half speed, steps between failures: {mtbf_steps}",
            ", ".join(_shown(kind, by_size[rank_count][mtbf_steps]) for kind, by_size in by_kind.items()),
            PUBLISHED_MIXED,
        )
        for rank_count, of_mtbf in next(iter(by_kind.values())).items()
        for mtbf_steps in of_mtbf
    ]


def _shown(kind: str, figures: Results) -> str:
    loss = f" (loss {statistics.median(figures['losses']):.2f})" if "losses" in figures else ""
    return f"{kind} {figures['goodput']:.3f}{loss}"


def _longest_recovery_s(figures: Results) -> float:
    """Return the longest recovery, in seconds, with which the target would still be reached."""
    present = figures["steps"] * (1 - figures["empty"])
    allowed = figures["steps"] * figures["goodput"] / TARGET - present
    return float(allowed * STEP_S / figures["failures"])


def draw(results: Results, path: Path) -> None:
    """Write the chart, in the format that the path's ending names."""
    import matplotlib  # an optional package, needed only here

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    count = max(len(results["selective"]), len(_mixed_sizes(results)))
    figure, panels = plt.subplots(2, count, figsize=(max(11.0, 3.4 * count + 1), 8.0), dpi=150, squeeze=False)
    for axes in panels.flat:
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    _draw_sizes(results, panels[0])
    _draw_mixed(results["mixed"], panels[1])
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="upper center", ncols=3, fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.96))
    figure.savefig(path)
    plt.close(figure)


def _draw_sizes(results: Results, panels: Any) -> None:
    """Draw the goodput of the first table, a panel for each number of ranks."""
    looks = {"selective": ("#0072B2", "o-"), "average-all": ("#D55E00", "s--"), "alone": ("#009E73", "^:")}
    labels = {
        "selective": "selective averaging: the others continue",
        "average-all": "averaging all: all restart from the last checkpoint",
        "alone": "no averaging: each rank has its own checkpoint",
    }
    for axes, rank_count in zip(panels, results["selective"], strict=False):
        for kind, (colour, style) in looks.items():
            points = sorted((int(mtbf), each["goodput"]) for mtbf, each in results[kind].get(rank_count, {}).items())
            if points:
                axes.plot(*zip(*points, strict=True), style, color=colour, label=labels[kind])
        axes.set_xscale("log")
        axes.invert_xaxis()  # worse machines are on the right
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_ylim(-0.03, 1.03)
        axes.set_title(f"{rank_count} ranks", loc="left", fontsize=11)
        axes.set_xlabel("steps between failures of a rank")
        axes.grid(True, color="#dddddd", linewidth=0.5)
    panels[0].set_ylabel("useful steps / possible steps")


def _draw_mixed(mixed: Results, panels: Any) -> None:
    """Draw the goodput of the third table, a panel for each number of ranks: light without failures, dark with them."""
    sizes = list(next(iter(mixed.values())))
    for axes in panels[len(sizes) :]:
        axes.set_visible(False)
    for axes, rank_count in zip(panels, sizes, strict=False):
        for height, by_size in enumerate(reversed(mixed.values())):
            for place, (name, figures) in enumerate(by_size[rank_count].items()):
                bar, text, shift = (("#9ecae1", "black", 0.2), ("#0072B2", "white", -0.2))[place]
                axes.barh(height + shift, figures["goodput"], height=0.38, color=bar)
                loss = f", loss {statistics.median(figures['losses']):.2f}" if "losses" in figures else ""
                said = f"{figures['goodput']:.2f}{loss}" + ("" if name == "none" else ", failures")
                axes.text(0.02, height + shift, said, va="center", fontsize=7.5, color=text)
        axes.set_yticks(range(len(mixed)), list(reversed(mixed)), fontsize=8.5)
        axes.set_xlim(0, 1.03)
        axes.set_title(f"{rank_count} ranks, half at half speed", loc="left", fontsize=11)
        axes.set_xlabel("useful time / possible time")


def _mixed_sizes(results: Results) -> list[str]:
    return list(next(iter(results["mixed"].values())))


if __name__ == "__main__":
    simulations.main(measure, full=FULL, quick=QUICK)
