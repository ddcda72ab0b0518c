"""Kills a rank of a job with ``--survive`` at a random moment of its start: the others continue, or all end.

    python killed_starts.py JOBS SEED [opening | handshake]

The moment is counted from the launch. With ``opening`` it is counted from the moment at which the rank opens its world,
and with ``handshake`` from the moment at which it has its communicators. As a program it runs JOBS jobs of four ranks
and prints how each ended; under a launcher it is a rank. The seed determines all random choices.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

RANKS: Final = 4
#: Largest number of seconds to the kill.
KILLS_S: Final = {"launch": (0.0, 8.0), "opening": (0.0, 1.0), "handshake": (1e-6, 0.03)}
TRAINING_S: Final = 2.0
#: Seconds after the kill: a job that runs longer hangs.
HANGS_S: Final = 60.0
FOLDER_VARIABLE: Final = "ASYNCDIST_TEST_FOLDER"
#: Rank that ends itself in the handshake, and the number of seconds until then.
END_VARIABLE: Final = "ASYNCDIST_TEST_END"


def say(rank: int, stage: str) -> None:
    """On a rank: record its progress, if the caller wants to know it."""
    if FOLDER_VARIABLE not in os.environ:
        return
    with Path(os.environ[FOLDER_VARIABLE], f"{rank}.stage").open("a") as file:
        file.write(f"{stage}\n")


def be_rank() -> None:
    """Act as a rank: import, open the world, start a policy, and train."""
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    say(rank, "imports")
    import torch
    from torch import nn

    import asyncdist as ad
    from asyncdist.transports import mpi_survival
    from protocols import AsyncSelectiveAveragingPolicy

    def compute() -> None:
        time.sleep(0.005)

    async def main(world: ad.World) -> None:
        say(rank, "starts the policy")
        torch.manual_seed(0)
        model = nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        async with AsyncSelectiveAveragingPolicy(model, optimizer, average_every=5, grace_s=0.2) as policy:
            say(rank, "trains")
            ends_at = time.monotonic() + TRAINING_S
            while time.monotonic() < ends_at:
                compute()
                await policy.step(float(rank))
            last_round = policy.statistics().last_round
        say(rank, f"ended after round {last_round}")

    victim, moment = json.loads(os.environ[END_VARIABLE])
    check_world, init = mpi_survival.SurvivingMpiTransport._check_world, mpi_survival.SurvivingMpiTransport.__init__

    def begin(transport: mpi_survival.SurvivingMpiTransport) -> None:
        say(rank, "duplicates communicators")
        check_world(transport)

    def shake_hands(transport: mpi_survival.SurvivingMpiTransport, *args: Any) -> None:
        init(transport, *args)
        if rank == victim:
            signal.setitimer(signal.ITIMER_REAL, moment)  # the signal of this timer ends the process
        say(rank, "shakes hands")

    mpi_survival.SurvivingMpiTransport._check_world = begin  # type: ignore[method-assign]
    mpi_survival.SurvivingMpiTransport.__init__ = shake_hands  # type: ignore[method-assign, assignment]
    say(rank, "opens the world")
    ad.run(main)


# -- the program that kills -------------------------------------------------------------------------------------------


def plan(seed: int, since: str) -> tuple[int, float]:
    """Draw the rank to kill, and when."""
    draws = random.Random(seed)
    return draws.randrange(RANKS), draws.uniform(*KILLS_S[since])


def stage_of(folder: str, rank: int) -> str:
    place = Path(folder, f"{rank}.stage")
    said = place.read_text().splitlines() if place.exists() else []
    return said[-1] if said else "begins"


def processes_of(folder: str) -> dict[int, tuple[int, list[str]]]:
    """Return rank and command line of each process of the job with this folder; -1 for processes that are not ranks."""
    found = {}
    mark = f"{FOLDER_VARIABLE}={folder}".encode()
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            variables = Path("/proc", entry, "environ").read_bytes().split(b"\0")
            if mark not in variables:
                continue
            words = Path("/proc", entry, "cmdline").read_bytes().decode().split("\0")
            if words != [""]:  # not a zombie
                of_rank = (int(each.split(b"=")[1]) for each in variables if each.startswith(b"OMPI_COMM_WORLD_RANK="))
                found[int(entry)] = next(of_rank, -1), words
    return found


def kill(folder: str, rank: int, launcher: subprocess.Popen[bytes]) -> str | None:
    """Kill the process of a rank as soon as it exists; return the rank's progress, or None if the job ended before."""
    while launcher.poll() is None:
        for pid, (of, words) in processes_of(folder).items():
            if of == rank and "guardians.py" not in " ".join(words):
                os.kill(pid, signal.SIGKILL)
                return stage_of(folder, rank)
    return None


def until_it_has_ended(folder: str, rank: int, launcher: subprocess.Popen[bytes]) -> str | None:
    """Return the progress of a rank when it ended itself; None if it completed."""
    while launcher.poll() is None:
        of_rank = any(
            of == rank and "guardians.py" not in " ".join(words) for of, words in processes_of(folder).values()
        )
        if (
            stage_of(folder, rank) not in ("begins", "imports", "opens the world", "duplicates communicators")
            and not of_rank
        ):
            break
        time.sleep(0.01)
    stage = stage_of(folder, rank)
    return None if stage.startswith("ended") else stage


def run(seed: int, since: str) -> dict[str, Any]:
    """Run one job and return its observations."""
    rank, moment = plan(seed, since)
    with tempfile.TemporaryDirectory(prefix="asyncdist-starts-") as folder, open(f"{folder}/said", "wb") as said:
        command = [sys.executable, "-m", "asyncdist", "run", "--survive", "-n", str(RANKS), __file__]
        ends = (rank, moment) if since == "handshake" else (-1, 0.0)
        environ = {**os.environ, FOLDER_VARIABLE: folder, END_VARIABLE: json.dumps(ends)}
        launcher = subprocess.Popen(command, env=environ, stdout=said, stderr=said, start_new_session=True)
        while since == "opening" and stage_of(folder, rank) in ("begins", "imports"):
            time.sleep(0.002)
        if since == "handshake":
            stage = until_it_has_ended(folder, rank, launcher)
        else:
            time.sleep(moment)
            stage = kill(folder, rank, launcher)
        killed_at = time.monotonic()
        try:
            code: int | None = launcher.wait(HANGS_S)
        except subprocess.TimeoutExpired:
            code = None
        ended_s = time.monotonic() - killed_at
        time.sleep(0.5)
        left = {pid: words for pid, (_, words) in processes_of(folder).items() if pid != os.getpid()}
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        launcher.wait()
        stages = {path.stem: path.read_text().splitlines() for path in Path(folder).glob("*.stage")}
        lines = Path(folder, "said").read_text(errors="replace").splitlines()
    ended = [rank for rank, told in stages.items() if told[-1].startswith("ended after")]
    return {
        "rank": rank,
        "moment": round(moment, 3),
        "stage": stage,
        "code": code,
        "ended_s": round(ended_s, 1),
        "left": list(left.values()),
        "survivors": sorted(map(int, ended)),
        "rounds": sorted({stages[rank][-1].split()[-1] for rank in ended}),
        "said": lines,
    }


def verdict(seen: dict[str, Any]) -> str:
    """Return in one word how a job has ended."""
    if seen["code"] is None:
        return "HANGS"
    if seen["left"]:
        return "LEAVES PROCESSES"
    if seen["code"] == 0:
        expected = [rank for rank in range(RANKS) if rank != seen["rank"] or seen["stage"] is None]
        return "survived" if set(expected) <= set(seen["survivors"]) else "LOST RANKS"
    # mpirun's own message
    ours = [line for line in seen["said"] if line and not line.startswith("Abort is in progress")]
    return "ended" if len(ours) == 1 and seen["ended_s"] < 10 else "ENDED BADLY"


if __name__ == "__main__":
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        be_rank()
    else:
        since = sys.argv[3] if len(sys.argv) > 3 else "launch"
        counts: collections.Counter[str] = collections.Counter()
        for seed in range(int(sys.argv[2]), int(sys.argv[2]) + int(sys.argv[1])):
            seen = run(seed, since)
            counts[verdict(seen)] += 1
            print(f"seed {seed}: {verdict(seen)}: {json.dumps(seen)}", flush=True)
        print(dict(counts))
