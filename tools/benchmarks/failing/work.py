"""Counts the steps of ranks that fail, and draws the times of their failures."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from harness import Results

import asyncdist as ad
from asyncdist.simulation import Fault, Kill, Restart
from failing.students import Classifier, Idle, Student

STEP_S: Final = 1.0
#: Seconds from a rank's death until the other ranks, or the launcher, detect it.
DETECTION_S: Final = 2.0
#: Seconds from the detection until a new process runs: scheduler, interpreter, imports, device.
RELAUNCH_S: Final = 20.0
#: Seconds from the new process's start until it trains: model and optimizer from a donor or from a file.
RELOAD_S: Final = 8.0
RECOVERY_S: Final = DETECTION_S + RELAUNCH_S + RELOAD_S
#: Seconds that a save takes. The simulator charges as much for ``world.compute`` as for a step.
SAVE_S: Final = STEP_S
AVERAGE_EVERY: Final = 10
#: Training begins at this virtual time, after the collective start and a load.
START_S: Final = 3.0


@dataclass(slots=True)
class Tally:
    """Counts seconds of all ranks together. A step counts with the seconds that it takes on its rank.

    Attributes:
        useful: Steps whose effect survives.
        possible: Seconds in which the ranks would have trained without failures and without waiting.
        died: Steps that were made and then lost with a rank or a job.
        empty: Seconds in which a rank or the job was dead or recovering.
        failures: Number of ranks killed.
        losses: Loss of the model at the end of each simulation, if the models learn.
    """

    useful: float = 0.0
    possible: float = 0.0
    died: float = 0.0
    empty: float = 0.0
    failures: int = 0
    losses: list[float] = field(default_factory=list)

    def results(self) -> Results:
        """Return the goodput and the shares of lost time by cause. The rest is time for waiting and saving."""
        shares = {name: getattr(self, name) / self.possible for name in ("useful", "died", "empty")}
        return {
            "goodput": shares.pop("useful"),
            **shares,
            "waited": (self.possible - self.useful - self.died - self.empty) / self.possible,
            "failures": self.failures,
            "steps": self.possible,
            **({"losses": self.losses} if self.losses else {}),
        }


@dataclass(slots=True)
class Work:
    """The steps that one process has made.

    Attributes:
        made: Number of steps.
        kept: Number of steps whose effect would survive if the process died now.
        given: Round of the process's newest snapshot, and the step at which it was taken.
        offered: Rating of the final model, of which the largest is taken, and the model's loss.
    """

    made: int = 0
    kept: int = 0
    given: tuple[int, int] = (0, 0)
    offered: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """One simulation of ranks that fail individually.

    Attributes:
        lives: Works of each rank's processes, the newest last.
        ends_at_s: Virtual time at which the training ends.
        place: Folder for checkpoints.
        save_every: Number of steps between two checkpoints.
        learns_by: Seed of the task that the models learn; None if only steps count.
    """

    lives: list[list[Work]]
    ends_at_s: float
    place: Path
    save_every: int
    learns_by: int | None = None

    def begin(self, world: ad.World) -> tuple[Work, Student]:
        """Begin a process of this rank, and return its counts and its model."""
        own = self.lives[world.rank]
        own.append(Work())
        source = 1000 * world.rank + len(own)
        return own[-1], Idle() if self.learns_by is None else Classifier(self.learns_by, source)


def best_interval(mtbf_s: float) -> int:
    """Return the steps between saves (Young, A first order approximation to the optimum checkpoint interval, 1974)."""
    return max(1, round(math.sqrt(2 * SAVE_S * mtbf_s) / STEP_S))


def failures(rng: random.Random, rank: int, mtbf_s: float, horizon_s: float) -> tuple[list[Fault], float]:
    """Draw a rank's deaths and restarts. Return them, and the seconds for which the rank is dead."""
    faults: list[Fault] = []
    empty_s = 0.0
    if math.isinf(mtbf_s):
        return faults, empty_s
    dies_at_s = rng.expovariate(1 / mtbf_s)
    while dies_at_s < horizon_s:
        faults.append(Kill(rank, START_S + dies_at_s))
        begins_at_s = dies_at_s + RECOVERY_S
        if begins_at_s < horizon_s - AVERAGE_EVERY * STEP_S:
            faults.append(Restart(rank, START_S + begins_at_s))
        else:
            begins_at_s = horizon_s  # a process that starts so late would find other ranks leaving
        empty_s += begins_at_s - dies_at_s
        dies_at_s = begins_at_s + rng.expovariate(1 / mtbf_s)
    return faults, empty_s
