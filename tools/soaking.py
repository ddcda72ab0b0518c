"""The hunt for bugs in the policies: scenario seeds, one after the other, until time is up or one fails.

Seeds below 500 are the test suite's; the hunt begins after them, and goes on where ``--seed-start`` says. A seed that
fails is shrunk, its story printed with the one line that repeats it, and the exit code is 1.

With ``--kills`` it starts real jobs on MPI in place of simulations, and kills ranks of them at moments that follow from
the seed (``tests/scripts/killed_members.py``). With ``--lies`` one rank of each simulation sends well-formed messages
that are not true (``tests/simulation/hostile_scenarios.py``).

With ``--memory`` it simulates one population for a million steps, in which all that a job opens is opened and closed
again and again, ranks are killed and stalled, and the coordinator changes (``tests/simulation/long_run.py``). It prints
the memory over time, and the exit code is 1 if it grows. This takes some five minutes.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

TESTS: Final = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

from scripts import killed_members  # noqa: E402 the path is set above
from simulation import long_run  # noqa: E402 as above
from simulation.hostile_scenarios import run_hostile  # noqa: E402 as above
from simulation.scenarios import Recorder  # noqa: E402 as above

from asyncdist.simulation import ExploreReport, explore  # noqa: E402 as above

PROGRESS_PERIOD_S: Final = 5.0
#: Seeds with a rank that lies between two lines.
_LIES_COUNT: Final = 50
#: Together about a million steps of three to six ranks, 20 ms each.
MEMORY_PHASE_COUNT: Final = 152
MEMORY_TRAIN_S: Final = 40.0


def main() -> int:
    """Hunt."""
    options = _parse()
    ends_at = time.monotonic() + 60.0 * options.minutes

    def seeds() -> Iterator[int]:
        for seed in itertools.count(options.seed_start):
            if time.monotonic() >= ends_at:
                return
            yield seed

    if options.memory:
        return _watch_memory(options.seed_start)
    if options.kills:
        killed_members.hunt(seeds())
        return 0
    if options.lies:
        return _hear_lies(options.seed_start, ends_at, options.processes)
    with tempfile.TemporaryDirectory(prefix="soak") as folder:
        recorder = Recorder(folder)
        progress = _Progress(recorder)
        report = explore(recorder, seeds(), processes=options.processes, on_progress=progress)
        progress.print(report)
        for name, count in sorted((+recorder.seen()).items()):
            print(f"  {name}: {count}")
    if report.failure is None:
        print(f"no failure; go on with --seed-start {options.seed_start + report.seed_count}")
    return 0 if report.failure is None else 1


def _hear_lies(seed_start: int, ends_at: float, processes: int | None) -> int:
    """Run seeds of a rank that lies, some at a time; raises what the first one raises that fails."""
    sent: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    seed = seed_start
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        while time.monotonic() < ends_at:
            for seen in pool.imap_unordered(run_hostile, range(seed, seed + _LIES_COUNT)):
                sent, ends = sent + seen.sent, ends + seen.ends
            seed += _LIES_COUNT
            print(f"{seed - seed_start} seeds, {sent.total()} lies; the others ended: {dict(ends)}", flush=True)
    print(f"no failure; lies: {dict(sent)}; go on with --seed-start {seed}")
    return 0


def _watch_memory(seed: int) -> int:
    """Simulate a million steps."""

    def show(look: long_run.Look) -> None:
        print(
            f"phase {look.phase}: {look.steps:,} steps, {look.objects:,} objects, {look.blocks:,} blocks, "
            f"{look.resident_nbytes / 2**20:.1f} MiB resident",
            flush=True,
        )

    looks = long_run.run(MEMORY_PHASE_COUNT, train_s=MEMORY_TRAIN_S, seed=seed, on_look=show)
    try:
        long_run.check_flat(looks)
    except AssertionError as error:
        print(error)
        return 1
    print(f"{looks[-1].steps:,} steps: memory is flat")
    return 0


class _Progress:
    """Prints a line now and then."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._next_at = time.monotonic() + PROGRESS_PERIOD_S

    def __call__(self, report: ExploreReport) -> None:
        if time.monotonic() >= self._next_at:
            self._next_at = time.monotonic() + PROGRESS_PERIOD_S
            self.print(report)

    def print(self, report: ExploreReport) -> None:
        """The line."""
        seen = self._recorder.seen()
        fired = ", ".join(f"{kind} {seen[f'fault {kind}']}" for kind in sorted(report.faults_fired))
        print(
            f"{report.seed_count} seeds, {report.seeds_per_s:.1f}/s, {len(report.digests)} distinct digests, "
            f"{seen['rounds']} rounds, {seen['applied']} averages applied; seeds with faults: {fired or 'none yet'}",
            flush=True,
        )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools/soak", description=__doc__)
    parser.add_argument("--minutes", type=_positive, default=10.0, help="how long (default: 10)")
    parser.add_argument("--seed-start", type=int, default=500, help="the first seed (default: 500)")
    parser.add_argument("--processes", type=int, default=None, help="default: one per core")
    parser.add_argument("--lies", action="store_true", help="let a rank of each simulation say what is not true")
    parser.add_argument("--kills", action="store_true", help="kill ranks of real jobs on MPI that go on without them")
    parser.add_argument("--memory", action="store_true", help="a million simulated steps, whose memory must stay flat")
    return parser.parse_args()


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number of minutes above 0")
    return value


if __name__ == "__main__":
    sys.exit(main())
