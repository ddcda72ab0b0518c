"""Trains a population of four real ranks for minutes, while ranks are stalled, killed and restarted.

    python long_job.py MINUTES SEED

As a program it starts ``asyncdist run --transport torch --restarts N``. From outside, it stalls and kills ranks at
moments that follow from the seed, some of them together and some while they join again, and prints a line now and then.
Under the launcher it is a rank. One random rank is stalled but never killed: its memory shows whether the memory for
all ranks that were lost and joined stays bounded.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

if __name__ == "__main__" and "ASYNCDIST_INCARNATION" not in os.environ:
    sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

RANKS: Final = 4
RESTARTS: Final = 100_000
#: Seconds between two faults, and of a stall.
PAUSE_S: Final = (1.0, 12.0)
STALL_S: Final = (0.2, 3.0)
#: Seconds within which a newcomer must be admitted, imports included, on a machine that also runs other programs.
ADMISSION_S: Final = 90.0
#: Seconds between two printed lines.
PERIOD_S: Final = 15.0
#: Largest growth of the spared rank's memory in the last quarter, relative to the third quarter.
GROWTH_MAX_NBYTES: Final = 8 << 20


@dataclass
class Job:
    """Disturbs the ranks of a job, and reads their reports.

    Attributes:
        folder: Folder in which each process appends JSON lines to ``RANK.INCARNATION``, the first at its admission.
        draws: Random numbers that decide each event, its time and its ranks.
        spared: Rank that is never killed.
        counts: Number of events of each kind.
        killed: Processes that were killed.
    """

    folder: Path
    draws: random.Random
    spared: int
    counts: Counter[str] = field(default_factory=Counter)
    killed: set[int] = field(default_factory=set)

    def pids(self) -> dict[int, int]:
        """Return the newest process of each living rank, whether it has been admitted or not."""
        return {rank: pid for rank, (_, pid) in self._newest().items() if pid not in self.killed}

    def notes(self) -> dict[int, dict[str, Any]]:
        """Return the last lines of the admitted processes."""
        found = {}
        for rank, (incarnation, pid) in self._newest().items():
            notes = self.folder / f"{rank}.{incarnation}.notes"
            whole = notes.read_text().rpartition("\n")[0].splitlines() if notes.exists() else []
            if pid not in self.killed and whole:
                found[rank] = json.loads(whole[-1])
        return found

    def _newest(self) -> dict[int, tuple[int, int]]:
        """Return the incarnation and the pid of each rank's newest process."""
        newest: dict[int, tuple[int, int]] = {}
        for place in self.folder.glob("*.pid"):
            rank, incarnation, _ = place.name.split(".")
            newest[int(rank)] = max(newest.get(int(rank), (-1, 0)), (int(incarnation), int(place.read_text())))
        return newest

    def strike(self) -> None:
        """Stall a rank, or kill one or two."""
        pids = self.pids()
        if self.draws.random() < 0.4:
            rank = self.draws.choice(sorted(pids))
            self.counts["stalls"] += 1
            with _signal(pids[rank], signal.SIGSTOP):
                time.sleep(self.draws.uniform(*STALL_S))
            return
        admitted = self.notes().keys()
        victims = [rank for rank in sorted(pids) if rank != self.spared]
        if len(admitted) < 3:  # at least two members run at any time, so that rounds take place
            victims = [rank for rank in victims if rank not in admitted and self.draws.random() < 0.3]
        count = min(len(victims), 2 if len(admitted) == RANKS and self.draws.random() < 0.3 else 1)
        for rank in self.draws.sample(victims, count):
            self.counts["kills"] += 1
            self.counts["kills of ranks that were not admitted yet"] += rank not in admitted
            self.killed.add(pids[rank])
            with _signal(pids[rank], signal.SIGKILL):
                pass


@contextmanager
def _signal(pid: int, number: int) -> Iterator[None]:
    """Send a signal to a process, and continue it afterwards; the process may have ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
    yield
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def run(minutes: float, seed: int) -> int:
    """Run the job; return 0. Raises AssertionError."""
    draws = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="asyncdist-long-") as name:
        job = Job(Path(name), draws, spared=draws.randrange(RANKS))
        options = ["--transport", "torch", "-n", str(RANKS), "--restarts", str(RESTARTS)]
        command = [sys.executable, "-m", "asyncdist", "run", *options, __file__, name]
        print(f"seed {seed}: rank {job.spared} is never killed", flush=True)
        with (job.folder / "output").open("w") as output:
            tests = Path(__file__).resolve().parents[1]
            paths = os.pathsep.join(map(str, (tests, tests.parent)))
            launcher = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": paths}
            )
            try:
                _go_on(job, launcher, 60.0 * minutes)
            except BaseException:
                launcher.terminate()
                launcher.wait()
                print((job.folder / "output").read_text())
                raise
        _check(job, launcher.returncode)
    return 0


def _go_on(job: Job, launcher: subprocess.Popen[bytes], seconds: float) -> None:
    def wait(what: str, is_so: Callable[[], bool]) -> None:
        gives_up_at = time.monotonic() + ADMISSION_S
        while not is_so():
            assert launcher.poll() is None, f"the job ended with {launcher.returncode} while it waited for {what}"
            assert time.monotonic() < gives_up_at, f"{what}: not true after {ADMISSION_S} s; notes {job.notes()}"
            time.sleep(0.05)

    wait("all ranks in the policy", lambda: len(job.notes()) == RANKS)
    began_at = time.monotonic()
    next_line_at, last_round = began_at, -1
    while time.monotonic() < began_at + seconds:
        time.sleep(job.draws.uniform(*PAUSE_S))
        assert launcher.poll() is None, f"the job ended with {launcher.returncode}"
        job.strike()
        if time.monotonic() >= next_line_at:
            next_line_at = time.monotonic() + PERIOD_S
            notes = job.notes()
            newest = max(note["round"] for note in notes.values())
            assert newest > last_round, f"no round has taken place since round {last_round}"
            last_round = newest
            print(
                f"{time.monotonic() - began_at:.0f} s: {dict(job.counts)}; round {newest}; admitted {sorted(notes)}; "
                f"rank {job.spared}: {notes[job.spared]}",
                flush=True,
            )
    wait("all ranks admitted again", lambda: len(job.notes()) == RANKS)
    round_before = max(note["round"] for note in job.notes().values())
    wait("a round for each rank", lambda: all(note["round"] > round_before for note in job.notes().values()))
    (job.folder / "end").touch()
    launcher.wait(timeout=ADMISSION_S)


def _check(job: Job, returncode: int) -> None:
    said = (job.folder / "output").read_text()
    assert returncode == 0, f"exit code {returncode}\n{said}"
    assert "Traceback" not in said, said
    spared = [json.loads(line) for line in (job.folder / f"{job.spared}.0.notes").read_text().splitlines()]
    resident = [note["resident_nbytes"] for note in spared]
    quarter = len(resident) // 4
    third, last = statistics.median(resident[2 * quarter : 3 * quarter]), statistics.median(resident[3 * quarter :])
    newcomers = [
        json.loads(place.read_text().splitlines()[0])
        for place in job.folder.glob("*.notes")
        if place.name.split(".")[1] != "0" and place.stat().st_size
    ]
    print(f"exit code 0; {dict(job.counts)}; iteration {spared[-1]['iteration']}, round {spared[-1]['round']}")
    print(f"{len(newcomers)} newcomers were admitted, {_range(newcomers, 'joined_s')} s after they asked")
    print(
        f"rank {job.spared}: longest step {max(note['longest_s'] for note in spared):.3f} s, its stalls included; "
        f"memory {min(resident) >> 20} to {max(resident) >> 20} MiB"
    )
    assert quarter == 0 or last - third <= GROWTH_MAX_NBYTES, f"the memory of rank {job.spared} grows: {resident}"


def _range(notes: list[dict[str, Any]], name: str) -> str:
    values = sorted(note[name] for note in notes)
    return f"{values[0]:.2f} to {values[-1]:.2f} (median {statistics.median(values):.2f})" if values else "-"


async def train(world: Any, folder: Path) -> None:
    """Train in small steps with an average in every fifth."""
    import torch
    from torch import nn

    from protocols import AsyncSelectiveAveragingPolicy, SnapshotTaken

    torch.manual_seed(world.rank)
    model = nn.Sequential(nn.Linear(128, 512), nn.Linear(512, 128))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    samples = torch.randn(4, 128)
    counts: Counter[str] = Counter()
    longest_s, began_at = 0.0, time.monotonic()
    policy = AsyncSelectiveAveragingPolicy(
        model,
        optimizer,
        average_every=5,
        grace_s=0.2,
        on_event=lambda event: counts.update([type(event).__name__]),
    )
    async with policy:
        joined_s = time.monotonic() - began_at
        next_note_at, last_at = 0.0, time.monotonic()
        while not (folder / "end").exists():
            await asyncio.sleep(0.005)
            optimizer.zero_grad()
            loss = (model(samples) - samples).square().mean()
            loss.backward()
            optimizer.step()
            info = await policy.step(-loss.item())
            now = time.monotonic()
            counts["averages"] += bool(info)
            longest_s, last_at = max(longest_s, now - last_at), now
            if now >= next_note_at:
                next_note_at = now + 1.0
                note = {
                    "round": policy.statistics().last_round,
                    "iteration": policy.iteration,
                    "averages": counts["averages"],
                    "snapshots": counts[SnapshotTaken.__name__],
                    "coordinator": policy.statistics().coordinator_rank,
                    "resident_nbytes": _resident_nbytes(),
                    "longest_s": longest_s,
                    "joined_s": joined_s,
                }
                with (folder / f"{world.rank}.{world.incarnation}.notes").open("a") as notes:
                    notes.write(json.dumps(note) + "\n")
                longest_s = 0.0
    assert all(bool(value.isfinite().all()) for value in model.state_dict().values())


def _resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _be_a_rank(folder: Path) -> None:
    name = f"{os.environ['RANK']}.{os.environ['ASYNCDIST_INCARNATION']}.pid"
    (folder / f"{name}.new").write_text(str(os.getpid()))
    (folder / f"{name}.new").rename(folder / name)

    import asyncdist as ad

    ad.run(train, folder)


if __name__ == "__main__":
    if "ASYNCDIST_INCARNATION" in os.environ:
        _be_a_rank(Path(sys.argv[1]))
    else:
        sys.exit(run(float(sys.argv[1]), int(sys.argv[2])))
