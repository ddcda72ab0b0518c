"""Reads the ranks' diaries while they are written, and summarises them at the end, for the demo's process."""

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Line = dict[str, Any]


class RankHistory:
    """The lines of one rank's diary that have been read so far.

    Attributes:
        rank: The rank.
        start: First line, or None before it is written.
        progress: Lines of kind `progress`, in order.
        replaced: Lines of kind `replaced` (new weights were applied), in order.
        held: Lines of kind `held` (contents of a replay buffer), in order; empty for a rank that trains.
        end: Last line, or None before it is written.
        killed_at: Seconds since the epoch when the demo killed the rank, or None.
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
        """Read the new lines; an incomplete line is left for the next call."""
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
        """The newest line with `iteration` and `metric`, or iteration 0 and metric NaN."""
        lines = [line for line in (*self.progress[-1:], *self.replaced[-1:], self.end) if line is not None]
        return max(lines, key=lambda line: float(line["time"]), default={"iteration": 0, "metric": math.nan})

    @property
    def rate(self) -> float:
        """Iterations per second, over the whole training if it has ended, otherwise over the last few seconds."""
        if self.end is not None:
            return float(self.end["rate"])
        recent = [float(line["rate"]) for line in self.progress[-8:]]
        return statistics.fmean(recent) if recent else math.nan


def first_time(histories: Sequence[RankHistory]) -> float | None:
    """Return the time at which the first rank began to train; None if no rank has begun."""
    return min((float(history.start["time"]) for history in histories if history.start), default=None)


def summarise(
    histories: Sequence[RankHistory],
    *,
    policy: str,
    seed: int,
    verified_count: int | None,
    buffers: Sequence[RankHistory] = (),
) -> dict[str, Any]:
    """Summarise a finished run as JSON values.

    `modes_found` counts the modes in which a trajectory of any rank ended. `l1_distance` describes the model that a
    user would keep, on the rank with the best final metric: the exact sum over all states of |probability that the
    model ends there - target probability|, from 0 to 2. `rounds` is the number of decisions to average. Lists have an
    entry for each rank in `rank_numbers`, which are the ranks that were not killed.

    Args:
        histories: Histories of all training ranks, which have ended or were killed.
        policy: Value of `--policy`.
        seed: Value of `--seed`.
        verified_count: Number of averages verified, or None without `--verify`.
        buffers: Histories of all replay buffers, which have ended.
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
    """Return a buffer's final contents and counters."""
    assert history.end is not None
    names = "clients, capacity, size, added, drawn, evicted_count, mean_reward, modes"
    return {"rank": history.rank, **{name: history.end[name] for name in names.split(", ")}}


def _round_count(history: RankHistory) -> int:
    """Return the number of rounds that a rank has counted; with `average-all`, each average applied is a round."""
    coordinator = history.end["statistics"].get("coordinator") if history.end else None
    return int(coordinator["rounds_decided"]) if coordinator else len(history.replaced)


def _or_worst(metric: float) -> float:
    return metric if math.isfinite(metric) else -math.inf


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
