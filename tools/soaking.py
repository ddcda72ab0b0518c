"""Searches for bugs in the policies: simulates one scenario seed after another until one fails or time is up.

The test suite runs the seeds below 500. The search begins at 500, or at ``--seed-start``. A seed that fails is shrunk
to the fewest faults. The trace of the failure is printed with a command that repeats it, and the exit code is 1.

Options select a different kind of run:

- ``--islands``: simulated populations on islands, whose ranks are killed, stalled and restarted
  (``tests/simulation/island_scenarios.py``).
- ``--diloco``: simulated jobs with DiLoCo, its family and other policies, whose ranks are killed, restarted, stalled
  and separated (``tests/simulation/family_scenarios.py``).
- ``--grid``: simulated cases that combine drawn values of all policies' options with models, optimizers and events
  (``tests/simulation/grid``).
- ``--kills``: real jobs on MPI instead of simulations, whose ranks are killed at moments that follow from the seed
  (``tests/scripts/killed_members.py``).
- ``--restarts``: one real job on torch, which trains until time is up while its ranks are stalled, killed and
  restarted (``tests/scripts/long_job.py``).
- ``--lies``: simulations in which one rank sends well-formed messages with false content
  (``tests/simulation/hostile_scenarios.py``).
- ``--replays``: real jobs, a third of them on torch, are recorded and replayed in the simulator. All decisions and
  weights must be the same in the replay (``tests/scripts/replayed_jobs.py``).
- ``--starts``: ranks are killed while a policy starts, the deciding rank most often. The surviving ranks must continue
  in one policy (``tests/simulation/killed_start_scenarios.py``).
- ``--frames MILLIONS``: that many million frames, most of them damaged, for a rank's receive path on channels of all
  kinds, a tenth as many damaged strings for the other parsers of input, and 20 damaged recordings per million frames
  for every command that reads recordings (``tests/fuzzing``). One seed makes a million frames.
- ``--sequences MILLIONS``: that many million sequences of events, false ones included, for the state machines of the
  protocols. Each sequence has its own seed. Memory must stay flat, as with ``--frames``.
- ``--memory``: one simulated population that trains for a million steps. Everything that a job can open is opened and
  closed repeatedly, ranks are killed and stalled, and the coordinator changes (``tests/simulation/long_run.py``).
  Prints memory over time; the exit code is 1 if memory grows. Takes about five minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import logging
import math
import multiprocessing
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

TESTS: Final = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

from fuzzing import decoders, frames, memory, recordings, sequences  # noqa: E402 the path is set above
from scripts import killed_members, long_job, replayed_jobs  # noqa: E402 the path is set above
from simulation import family_scenarios, island_scenarios, killed_start_scenarios, long_run  # noqa: E402 as above
from simulation.grid import search  # noqa: E402 as above
from simulation.hostile_scenarios import run_hostile  # noqa: E402 as above
from simulation.scenarios import Recorder  # noqa: E402 as above

from asyncdist.simulation import ExploreReport, SimReport, explore  # noqa: E402 as above

PROGRESS_PERIOD_S: Final = 5.0
#: Seeds of ``--lies`` that are run between two lines of progress.
_LIES_COUNT: Final = 50
#: Cases of ``--grid`` that are run between two lines of progress.
_GRID_COUNT: Final = 20
#: Seeds of ``--starts`` that are run between two lines of progress.
_STARTS_COUNT: Final = 200
#: Three to six ranks, whose steps take 20 ms each, make about a million steps in these phases together.
MEMORY_PHASE_COUNT: Final = 152
MEMORY_TRAIN_S: Final = 40.0
#: Number of frames that one seed makes, and how many frames of a hundred thousand have their memory traced.
_FRAMES_PER_SEED: Final = 1_000_000
#: Number of damaged recordings that are read for each seed of ``--frames``.
_RECORDINGS_PER_SEED: Final = 20
_TRACED_COUNT: Final = 3_000
#: Number of sequences between two measurements of memory.
_SEQUENCES_PER_LOOK: Final = 10_000


def main() -> int:
    """Run the search that the command line selects, and return the exit code."""
    options = _parse()
    ends_at = time.monotonic() + 60.0 * options.minutes

    def seeds() -> Iterator[int]:
        for seed in itertools.count(options.seed_start):
            if time.monotonic() >= ends_at:
                return
            yield seed

    if options.frames is not None:
        return _repeat_on_failure(_feed_frames, "frames", options.frames, options.seed_start)
    if options.sequences is not None:
        return _repeat_on_failure(_tell_sequences, "sequences", options.sequences, options.seed_start)
    if options.memory:
        return _watch_memory(options.seed_start)
    if options.kills:
        killed_members.hunt(seeds())
        return 0
    if options.replays:
        replayed_jobs.hunt(seeds())
        return 0
    if options.restarts:
        return long_job.run(options.minutes, options.seed_start)
    if options.islands:
        return _explore(island_scenarios.scenario, seeds(), options)
    if options.diloco:
        return _explore(family_scenarios.scenario, seeds(), options)
    if options.lies:
        return _hear_lies(options.seed_start, ends_at, options.processes)
    if options.grid:
        return _try_the_grid(options.seed_start, ends_at, options.processes)
    if options.starts:
        return _kill_in_starts(options.seed_start, ends_at, options.processes)
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


def _explore(scenario: Callable[[int], SimReport[None]], seeds: Iterator[int], options: argparse.Namespace) -> int:
    """Run a scenario's seeds until time is up, or one fails."""
    next_at = time.monotonic() + PROGRESS_PERIOD_S

    def tell(report: ExploreReport) -> None:
        nonlocal next_at
        if time.monotonic() >= next_at:
            next_at = time.monotonic() + PROGRESS_PERIOD_S
            show(report)

    def show(report: ExploreReport) -> None:
        fired = ", ".join(f"{kind} {count}" for kind, count in sorted(report.faults_fired.items()))
        print(
            f"{report.seed_count} seeds, {report.seeds_per_s:.1f}/s; faults that fired: {fired or 'none'}", flush=True
        )

    report = explore(scenario, seeds, processes=options.processes, on_progress=tell)
    show(report)
    if report.failure is None:
        print(f"no failure; go on with --seed-start {options.seed_start + report.seed_count}")
    return 0 if report.failure is None else 1


def _hear_lies(seed_start: int, ends_at: float, processes: int | None) -> int:
    """Simulate jobs in which one rank sends false messages, and raise the error of the first seed that fails."""
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


def _try_the_grid(seed_start: int, ends_at: float, processes: int | None) -> int:
    """Run cases that cover all pairs of the grid, and print each that fails. Return 1 if one has failed."""
    results: Counter[str] = Counter()
    cases = search.cases(seed_start)
    with multiprocessing.get_context("spawn").Pool(processes, _be_quiet) as pool:
        while time.monotonic() < ends_at:
            for found in pool.imap_unordered(search.run, itertools.islice(cases, _GRID_COUNT)):
                result = found if found in ("", search.REFUSED) else "failed"
                results[result or "passed"] += 1
                if result == "failed":
                    print(found, flush=True)
            print(f"{results.total()} cases: {dict(results)}", flush=True)
    print(f"go on with --seed-start {seed_start + 1}, for other combinations of the same pairs")
    return 1 if results["failed"] else 0


def _kill_in_starts(seed_start: int, ends_at: float, processes: int | None) -> int:
    """Simulate policy starts in which ranks are killed, and raise the error of the first seed that fails."""
    seen: Counter[str] = Counter()
    seed = seed_start
    with multiprocessing.get_context("spawn").Pool(processes, _be_quiet) as pool:
        while time.monotonic() < ends_at:
            for found in pool.imap_unordered(killed_start_scenarios.run, range(seed, seed + _STARTS_COUNT)):
                seen += found
            seed += _STARTS_COUNT
            print(f"{seed - seed_start} starts; {dict(seen)}", flush=True)
    print(f"no failure; go on with --seed-start {seed}")
    return 0


def _be_quiet() -> None:
    """Silence the log message about each lost coordinator."""
    logging.getLogger("protocols").setLevel(logging.ERROR)


def _repeat_on_failure(run: Callable[[int, int], None], what: str, millions: float, seed_start: int) -> int:
    """Run a fuzzer and return the exit code; for a failure, print the command that repeats it."""
    gc.freeze()  # excludes torch's million objects from each garbage collection
    try:
        run(round(millions * 1e6), seed_start)
    except frames.FrameFailure as failure:
        print(f"{failure}\n{failure.__cause__!r}\nrepeat: ./tools/soak --frames 1 --seed-start {failure.seed}")
        return 1
    except sequences.SequenceFailure as failure:
        print(f"{failure}\nrepeat: ./tools/soak --sequences 0.000001 --seed-start {failure.seed}")
        return 1
    except AssertionError as error:
        print(f"--{what}, from seed {seed_start} on: {error}")
        return 1
    return 0


def _feed_frames(count: int, seed_start: int) -> None:
    """Feed ``count`` frames and a tenth as many strings to the receivers; raise AssertionError if one misbehaves."""
    first: memory.Look | None = None
    fates: Counter[str] = Counter()
    read: Counter[str] = Counter()
    began_at = time.monotonic()
    for place in range(-(-count // _FRAMES_PER_SEED)):
        seed = seed_start + place
        fed = asyncio.run(frames.fuzz(seed, min(count, _FRAMES_PER_SEED)))
        with memory.bounded_peak():
            asyncio.run(frames.fuzz(-1 - seed, _TRACED_COUNT))
        fates += Counter(fed.reasons) + Counter(received=fed.received_count)
        read += Counter({name: counts[0] for name, counts in decoders.fuzz(seed, fed.fed_count // 10).items()})
        drawn = range(_RECORDINGS_PER_SEED * seed, _RECORDINGS_PER_SEED * (seed + 1))
        read["recordings"] += recordings.fuzz(drawn).total()
        now = memory.look()
        first = first or now
        memory.check_flat(first, now)
        total = place * _FRAMES_PER_SEED + fed.fed_count
        rate = total / (time.monotonic() - began_at)
        print(f"seed {seed}: {total:,} frames, {read.total():,} texts, {rate:,.0f} frames/s; {now}", flush=True)
    print(f"no failure; frames by fate: {dict(fates.most_common())}; texts: {dict(read)}")


def _tell_sequences(count: int, seed_start: int) -> None:
    """Run ``count`` sequences of events; raise AssertionError if a state machine misbehaves."""
    first: memory.Look | None = None
    told: Counter[str] = Counter()
    began_at = time.monotonic()
    for begin in range(seed_start, seed_start + count, _SEQUENCES_PER_LOOK):
        seeds = range(begin, min(begin + _SEQUENCES_PER_LOOK, seed_start + count))
        told += sequences.fuzz(seeds)
        now = memory.look()
        first = first or now
        memory.check_flat(first, now)
        rate = (seeds.stop - seed_start) / (time.monotonic() - began_at)
        print(f"{seeds.stop - seed_start:,} sequences, {rate:,.0f}/s; {now}", flush=True)
    print(f"no failure; sequences by machine: {dict(told)}")


def _watch_memory(seed: int) -> int:
    """Simulate a million steps, print memory per phase, and return 1 if memory grows, else 0."""

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
    """Prints a line of progress at regular intervals."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._next_at = time.monotonic() + PROGRESS_PERIOD_S

    def __call__(self, report: ExploreReport) -> None:
        if time.monotonic() >= self._next_at:
            self._next_at = time.monotonic() + PROGRESS_PERIOD_S
            self.print(report)

    def print(self, report: ExploreReport) -> None:
        """Print the line of progress if it is due."""
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
    parser.add_argument("--processes", type=int, default=None, help="number of processes (default: one per core)")
    parser.add_argument("--islands", action="store_true", help="simulate populations on islands")
    parser.add_argument("--diloco", action="store_true", help="simulate DiLoCo with all kinds of faults")
    parser.add_argument("--lies", action="store_true", help="let one rank of each simulation send false messages")
    parser.add_argument("--starts", action="store_true", help="kill ranks of simulated jobs while a policy starts")
    parser.add_argument("--grid", action="store_true", help="combine all policies' options with models and events")
    parser.add_argument("--kills", action="store_true", help="kill ranks of real jobs on MPI; the others must continue")
    parser.add_argument("--replays", action="store_true", help="record real jobs and replay them")
    parser.add_argument(
        "--restarts", action="store_true", help="stall, kill and restart ranks of one real job on torch"
    )
    parser.add_argument("--memory", action="store_true", help="a million simulated steps, whose memory must stay flat")
    parser.add_argument("--frames", type=_positive, metavar="MILLIONS", help="feed damaged frames to a rank")
    parser.add_argument(
        "--sequences", type=_positive, metavar="MILLIONS", help="run sequences of events on the state machines"
    )
    return parser.parse_args()


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number above 0")
    return value


if __name__ == "__main__":
    sys.exit(main())
