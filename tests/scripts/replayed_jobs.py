"""Real jobs that are recorded and happen again in the simulator, one after the other; started by ``tools/soak``.

Each job is drawn from its seed: its transport, how many steps it makes, and whether a rank of it kills itself. Rank 2
is a straggler in all of them.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SCRIPT: Final = str(Path(__file__).with_name("recorded_training.py"))
SAME: Final = re.compile(
    r"^(\d+) decisions, metrics and checksums of weights are those that were recorded$", re.MULTILINE
)
_TIMEOUT_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class Job:
    """What is drawn: the arguments of the script are its steps and, where one is killed, the step of rank 3's end."""

    transport: str
    arguments: tuple[str, ...]

    @property
    def is_killed(self) -> bool:
        """Whether rank 3 kills itself."""
        return len(self.arguments) == 2


def plan(seed: int) -> Job:
    """Draw a job."""
    rng = random.Random(seed)
    transport = rng.choice(("mpi", "mpi", "torch"))
    steps = rng.randint(40, 400)
    if rng.random() < 0.4:
        return Job(transport, (str(10 * steps), str(rng.randint(0, steps))))
    return Job(transport, (str(steps),))


def run(job: Job, folder: Path) -> int:
    """Record the job, replay it, and return how many decisions were the same. Raises AssertionError."""
    asyncdist = [sys.executable, "-m", "asyncdist"]
    options = ["--transport", job.transport, "-n", "4", "--record", str(folder)]
    recorded = _output([*asyncdist, "run", *options, SCRIPT, *job.arguments])
    assert (recorded.returncode == 0) is not job.is_killed or job.transport == "torch", recorded.stderr
    replayed = _output([*asyncdist, "replay", str(folder), SCRIPT, *job.arguments])
    found = SAME.search(replayed.stdout)
    assert replayed.returncode == 0 and found is not None, replayed.stdout + replayed.stderr
    return int(found[1])


def _output(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)


def hunt(seeds: Iterable[int]) -> None:
    """Record and replay jobs until one differs, and keep that one's recording."""
    count = killed_count = same_count = 0
    for seed in seeds:
        job, folder = plan(seed), Path(tempfile.mkdtemp(prefix="replayed"))
        print(f"seed {seed}: {job.transport}, {' '.join(job.arguments)}", end="", flush=True)
        try:
            same = run(job, folder)
        except AssertionError:
            print(f"; differs: {folder}", flush=True)
            raise
        print(f"; {same} decisions are the same", flush=True)
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        count, killed_count, same_count = count + 1, killed_count + job.is_killed, same_count + same
    print(f"{count} jobs, {killed_count} of them with a killed rank: {same_count} decisions, all the same")
