"""The driver's view of a run: reads the ranks' diaries while they are written, and sums them up in the end."""

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Line = dict[str, Any]


class RankHistory:
    """One rank's diary, as far as it has been read.

    Attributes:
        rank: The rank.
        start: Its first line, None until there is one.
        progress: The lines that say how it does, in order.
        replaced: The lines that say that new weights were applied, in order.
        held: The lines that say what a replay buffer holds, in order; none where the rank trains.
        end: Its last line, None until there is one.
        killed_at: When the demo has killed it, seconds since the epoch; None where it has not.
    """

    def __init__(self, rank: int, directory: Path) -> None:
        self.rank = rank
        self.start: Line | None = None
        self.progress: list[Line] = []
        self.replaced: list[Line] = []
        self.held: list[Line] = []
        self.end: Line | None = None
        self.killed_at: float | None = None
        self._path = directory / f"rank{rank}.jsonl"
        self._offset = 0

    def poll(self) -> None:
        """Read what is new; a line that is not finished waits for the next time."""
        if not self._path.exists():
            return
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            new = file.read()
        complete = new[: new.rfind(b"\n") + 1]
        self._offset += len(complete)
        for text in complete.splitlines():
            line: Line = json.loads(text)
            if line["kind"] == "start":
                self.start = line
            elif line["kind"] == "progress":
                self.progress.append(line)
            elif line["kind"] == "replaced":
                self.replaced.append(line)
            elif line["kind"] == "held":
                self.held.append(line)
            elif line["kind"] == "end":
                self.end = line

    @property
    def latest(self) -> Line:
        """The newest line that has `iteration` and `metric`, or zeros."""
        lines = [line for line in (*self.progress[-1:], *self.replaced[-1:], self.end) if line is not None]
        return max(lines, key=lambda line: float(line["time"]), default={"iteration": 0, "metric": math.nan})

    @property
    def rate(self) -> float:
        """Iterations per second: over the whole training once it has ended, else lately."""
        if self.end is not None:
            return float(self.end["rate"])
        recent = [float(line["rate"]) for line in self.progress[-8:]]
        return statistics.fmean(recent) if recent else math.nan


def first_time(histories: Sequence[RankHistory]) -> float | None:
    """When the first rank began to train; None while none has."""
    return min((float(history.start["time"]) for history in histories if history.start), default=None)


def summarise(
    histories: Sequence[RankHistory],
    *,
    policy: str,
    seed: int,
    verified_count: int | None,
    buffers: Sequence[RankHistory] = (),
) -> dict[str, Any]:
    """Sum a finished run up, as JSON values.

    `modes_found` counts the modes that trajectories of any rank ended in. `l1_distance` is that of the rank with the
    best final metric, the one whose model a user would keep: the sum over all states of |chance that the model ends
    there - chance that the rewards ask for|, exact, from 0 to 2. `rounds` is how often an average was decided on.
    Lists have an entry for each rank of `rank_numbers`, those that were not killed.

    Args:
        histories: Of every rank, each with its `end`, or killed.
        policy: As given to `--policy`.
        seed: As given to `--seed`.
        verified_count: Averages checked, None when it was not asked for.
        buffers: Of every rank that is a replay buffer, each with its `end`.
    """
    zero = first_time(histories) or 0.0
    killed = [
        {"rank": history.rank, "at_s": round(history.killed_at - zero, 3), "iterations": history.latest["iteration"]}
        for history in histories
        if history.killed_at is not None
    ]
    starts = [history.start for history in histories if history.start is not None]
    histories = [history for history in histories if history.end is not None]
    ends = [history.end for history in histories if history.end is not None]
    best = max(range(len(ends)), key=lambda index: _or_worst(ends[index]["metric"]))
    idle_us = [us for end in ends for us in end["idle_step_us"]]
    return {
        "transport": starts[0]["transport"],
        "policy": policy,
        "seed": seed,
        "ranks": len(ends),
        "rank_numbers": [history.rank for history in histories],
        "killed": killed,
        "parameters": starts[0]["parameter_count"],
        "iterations": [end["iteration"] for end in ends],
        "iterations_per_s": [round(end["rate"], 2) for end in ends],
        "metric": [_finite(end["metric"]) for end in ends],
        "rounds": max(_round_count(history) for history in histories),
        "replacements": [len(history.replaced) for history in histories],
        "modes_found": len({mode for end in ends for mode in end["modes"]}),
        "modes_total": starts[0]["mode_count"],
        "modes_found_by_rank": [len(end["modes"]) for end in ends],
        "best_rank": histories[best].rank,
        "l1_distance": ends[best]["l1_distance"],
        "l1_distance_by_rank": [end["l1_distance"] for end in ends],
        "step_overhead_us": statistics.median(idle_us) if idle_us else None,
        "step_overhead_us_by_rank": [
            statistics.median(end["idle_step_us"]) if end["idle_step_us"] else None for end in ends
        ],
        "stall_s": sum(end["stall_s"] for end in ends),
        "stall_s_by_rank": [end["stall_s"] for end in ends],
        "wall_s": max(end["train_s"] for end in ends),
        "verified_averages": verified_count or 0,
        "replay": [end["replay"] for end in ends if "replay" in end],
        "buffers": [_buffer_summary(history) for history in buffers],
    }


def _buffer_summary(history: RankHistory) -> Line:
    """What a buffer held in the end and has done: items, and how many of each client's."""
    assert history.end is not None
    names = "clients, capacity, size, added, drawn, evicted_count, mean_reward, modes"
    return {"rank": history.rank, **{name: history.end[name] for name in names.split(", ")}}


def _round_count(history: RankHistory) -> int:
    """Rounds that a rank knows of: the coordinator's knows all; where everybody averages, each application is one."""
    coordinator = history.end["statistics"].get("coordinator") if history.end else None
    return int(coordinator["rounds_decided"]) if coordinator else len(history.replaced)


def _or_worst(metric: float) -> float:
    return metric if math.isfinite(metric) else -math.inf


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
