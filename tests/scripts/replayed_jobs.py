"""Records real jobs in turn and replays each in the simulator; started by ``tools/soak``.

The seed determines each job: its transport, its policy, its number of steps, and the faults of its ranks. Rank 2 is a
straggler in all jobs; other ranks start late, stop for a while, compute for long, or are killed.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from support import mpi, warm

SCRIPT: Final = str(Path(__file__).with_name("recorded_training.py"))
SAME: Final = re.compile(
    r"^(\d+) decisions, metrics and checksums of weights are the same as in the recording$", re.MULTILINE
)
_TIMEOUT_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class Job:
    """The random choices for a job.

    Attributes:
        options: Options of ``asyncdist run``.
        arguments: Arguments of the script.
    """

    options: tuple[str, ...]
    arguments: tuple[str, ...]

    @property
    def kinds(self) -> list[str]:
        """Return the special properties of the job as text."""
        named = [word.lstrip("-") for word in (*self.options, *self.arguments) if word.startswith("--")]
        return [self.options[1], *(word for word in named if word not in ("transport", "coordinator"))]


def plan(seed: int) -> Job:
    """Draw a job."""
    rng = random.Random(seed)
    transport = rng.choice(("mpi", "mpi", "torch"))
    steps = rng.randint(40, 400)
    options, arguments = ["--transport", transport], []
    policy = rng.choice(("selective", "selective", "selective", "sharded", "average_all"))
    coordinator = rng.choice((0, 0, 1, 3)) if policy in ("selective", "sharded") else 0
    arguments += ["--policy", policy, "--coordinator", str(coordinator)]
    is_killed = rng.random() < 0.4
    if is_killed:
        rank = rng.choice((3, 3, coordinator, 1))
        arguments += ["--kill", str(rank), str(rng.randint(0, steps))]
        if transport == "mpi" and rng.random() < 0.5:
            options.append("--survive")
    if rng.random() < 0.3:
        arguments += ["--late", str(rng.randrange(4)), f"{rng.uniform(1.0, 3.0):.1f}"]
    if rng.random() < 0.3:
        arguments += ["--stop", str(rng.randrange(4)), str(rng.randint(1, steps)), f"{rng.uniform(0.2, 2.0):.1f}"]
    if rng.random() < 0.3:
        arguments += ["--long", str(rng.randrange(4)), str(rng.randint(20, 60)), f"{rng.uniform(0.1, 0.8):.1f}"]
    if rng.random() < 0.3:
        arguments += ["--collectives", str(rng.randint(3, 30))]
    if rng.random() < 0.2:
        arguments += ["--threads", str(rng.randint(1, 10))]
    if rng.random() < 0.2:
        arguments += ["--talk"]
    return Job(tuple(options), (str(3 * steps if is_killed else steps), *arguments))


def run(job: Job, folder: Path) -> int:
    """Record the job, replay it, and return the number of equal decisions. Raises AssertionError."""
    asyncdist = [sys.executable, "-m", "asyncdist"]
    environ = mpi.base_environment()
    program = warm.command(SCRIPT, job.arguments, environ, {})
    recorded = _output([*asyncdist, "run", *job.options, "-n", "4", "--record", str(folder), *program], environ)
    assert recorded.returncode == 0 or "--kill" in job.arguments, recorded.stderr
    replayed = _output([*asyncdist, "replay", str(folder), SCRIPT, *job.arguments], environ)
    found = SAME.search(replayed.stdout)
    # a rank may fail in the same way as in the recorded run
    assert found is not None, replayed.stdout + replayed.stderr
    return int(found[1])


def _output(command: list[str], environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    environ = {**environ, "PYTHONHASHSEED": "0"}
    return subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, env=environ)


def hunt(seeds: Iterable[int]) -> None:
    """Record and replay jobs until one replay differs, and keep its recording."""
    kinds: Counter[str] = Counter()
    count = same_count = 0
    for seed in seeds:
        job, folder = plan(seed), Path(tempfile.mkdtemp(prefix="replayed"))
        print(f"seed {seed}: {' '.join((*job.options, *job.arguments))}", end="", flush=True)
        try:
            same = run(job, folder)
        except (AssertionError, subprocess.TimeoutExpired):
            print(f"; differs: {folder}", flush=True)
            raise
        print(f"; {same} decisions are the same", flush=True)
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        kinds.update(job.kinds)
        count, same_count = count + 1, same_count + same
    told = ", ".join(f"{kind} {number}" for kind, number in sorted(kinds.items()))
    print(f"{count} jobs ({told}): {same_count} decisions, all the same")
