"""Writes a rank's diary, its log for the demo: a JSON object per line in `rankN.jsonl`, or lines on the terminal.

Kinds of lines: `start`, `progress` (every quarter of a second), `replaced` (new weights were applied), `end`; a replay
buffer's are `start`, `held` (every quarter of a second in which something is added) and `end`. Each has `time`, seconds
since the epoch, so that the diaries of one machine can be laid over each other.
"""

import dataclasses
import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

PROGRESS_PERIOD_S = 0.25
PRINT_PERIOD_S = 2.0


class Diary:
    """Writes the lines of a rank's diary.

    Args:
        directory: Where `rankN.jsonl` goes; None prints instead.
        rank: This rank.
    """

    def __init__(self, directory: Path | None, rank: int) -> None:
        self._rank = rank
        self._file: TextIO | None = None
        if directory is not None:
            self._file = open(directory / f"rank{rank}.jsonl", "w", buffering=1, encoding="utf-8")  # noqa: SIM115
        self.period_s = PRINT_PERIOD_S if self._file is None else PROGRESS_PERIOD_S

    def write(self, kind: str, **fields: Any) -> None:
        """Write one line."""
        if self._file is not None:
            self._file.write(json.dumps({"kind": kind, "time": time.time(), **fields}, default=str) + "\n")
            return
        shown = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in fields.items()}
        for name in ("idle_step_us", "statistics", "pid"):
            shown.pop(name, None)
        text = ", ".join(f"{name} {value}" for name, value in shown.items())
        print(f"rank {self._rank}: {kind}: {text}", flush=True)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


class Recorder:
    """Writes the diary of one rank that trains, and times its steps.

    Args:
        directory: Where `rankN.jsonl` goes; None prints instead.
        rank: This rank.
    """

    def __init__(self, directory: Path | None, rank: int) -> None:
        self._diary = Diary(directory, rank)
        self._started = self._last = time.perf_counter()
        self._last_iteration = 0
        self._idle_step_us: list[float] = []
        self._stall_s = 0.0

    def seconds(self) -> float:
        """Return the seconds since training began."""
        return time.perf_counter() - self._started

    def start(self, *, transport: str, ranks: int, mode_count: int, parameter_count: int) -> None:
        """Write the first line, and start the clock."""
        self._diary.write(
            "start",
            pid=os.getpid(),
            transport=transport,
            ranks=ranks,
            mode_count=mode_count,
            parameter_count=parameter_count,
        )
        self._started = self._last = time.perf_counter()

    def step(self, iteration: int, metric: float, step_s: float, info: Any) -> None:
        """Record the duration and the result of a `policy.step`."""
        self._stall_s += step_s
        if info:
            self._diary.write(
                "replaced",
                iteration=iteration,
                metric=metric,
                round=info.round,
                donors=list(info.donors),
                staleness_steps=info.staleness_steps,
                step_s=step_s,
                text=str(info),
            )
        else:
            self._idle_step_us.append(round(1e6 * step_s, 2))
        now = time.perf_counter()
        if now - self._last >= self._diary.period_s:
            rate = (iteration - self._last_iteration) / (now - self._last)
            self._diary.write("progress", iteration=iteration, metric=metric, rate=rate)
            self._last, self._last_iteration = now, iteration

    def end(
        self,
        *,
        iteration: int,
        metric: float,
        modes: Iterable[int],
        l1_distance: float,
        statistics: Any,
        replay: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the last line, with the results, the selective policy's statistics, and the statistics of replay."""
        seconds = self.seconds()
        self._diary.write(
            "end",
            iteration=iteration,
            metric=metric,
            train_s=seconds,
            rate=iteration / seconds,
            statistics=dataclasses.asdict(statistics) if statistics is not None else {},
            modes=sorted(modes),
            l1_distance=l1_distance,
            stall_s=self._stall_s,
            idle_step_us=self._idle_step_us,
            **({} if replay is None else {"replay": replay}),
        )
        self._diary.close()


class BufferRecorder:
    """Writes the diary of one rank that serves a replay buffer.

    Args:
        directory: Where `rankN.jsonl` goes; None prints instead.
        rank: This rank.
    """

    def __init__(self, directory: Path | None, rank: int) -> None:
        self._diary = Diary(directory, rank)
        self._last = time.perf_counter()

    def start(self, **fields: Any) -> None:
        """Write the first line, with the transport and the clients."""
        self._diary.write("start", pid=os.getpid(), **fields)

    def is_due(self) -> bool:
        """Return whether the next line is due."""
        return time.perf_counter() - self._last >= self._diary.period_s

    def held(self, **contents: Any) -> None:
        """Write a line with the buffer's current contents."""
        self._last = time.perf_counter()
        self._diary.write("held", **contents)

    def end(self, **fields: Any) -> None:
        """Write the last line, with the buffer's contents and counters."""
        self._diary.write("end", **fields)
        self._diary.close()
