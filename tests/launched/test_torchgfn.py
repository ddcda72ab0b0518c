"""Tests scripts like torchgfn's: ported by their imports, and with their own groups and their own end of MPI."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from support import mpi, torchrun, warm

from asyncdist.launch import mpirun

SCRIPT = Path(__file__).parents[1] / "scripts" / "hypergrid_blocking.py"

OWN_GROUPS = """
    import torch
    from mpi4py import MPI
    import asyncdist as ad
    from asyncdist.integrations import torchgfn
    from support.mpi import report

    everybody = MPI.COMM_WORLD
    rank, training = everybody.rank, range(everybody.size - 1)
    members = everybody.Get_group().Incl(training)
    if rank in training:
        group = everybody.Create_group(members)
        model = torch.nn.Linear(2, 1)
        torch.nn.init.constant_(model.weight, rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        policy = torchgfn.AsyncSelectiveAveragingPolicy(None, 2, threshold=float("inf"), cooldown=0, quorum=1.0)
        try:
            policy(0, model, optimizer, 0.0, group)
        except ValueError as refused:
            told = str(refused)
    everybody.Barrier()  # the last rank is at the same line: nothing collective has begun
    world = ad.blocking.process_world()
    if rank not in training:
        everybody.recv(source=0)  # it serves no message of asyncdist
        report(rank, None)
    else:
        iteration = 0
        while not sum(group.allgather(policy.replacement_count)):
            policy(iteration, model, optimizer, -rank, group)
            iteration += 1
            world.sleep(0.005)
        policy.shutdown()
        report(rank, {"told": told, "weight": model.weight[0, 0].item()})
        if rank == 0:
            everybody.send(None, dest=everybody.size - 1)
        MPI.Finalize()  # the world is open still
    print("ended")
"""


@pytest.mark.mpi
def test_a_communicator_of_some_ranks_is_refused_or_used() -> None:
    """Regression: a policy of some ranks hung, and MPI_Finalize before the end of the world aborted the job."""
    ended = mpi.run_source(3, OWN_GROUPS).check()
    assert ended.stdout.count("ended") == 3 and "abort" not in ended.stderr.lower(), ended.output()
    assert ended.reports[2] is None
    for rank in (0, 1):
        told = ended.reports[rank]["told"]
        assert "group must have all 3 ranks of the job when the world is opened" in told
        assert "initialize_distributed_compute" in told and "asyncdist.blocking.process_world()" in told
    assert [ended.reports[rank]["weight"] for rank in (0, 1)] == [0.0, 0.0], (
        "rank 1 was the worst, so its weight must have been replaced"
    )


LATE = """
    import asyncdist as ad
    import asyncdist.transports.mpi
    from mpi4py import MPI

    asyncdist.transports.mpi.OPEN_PATIENCE_S = 0.2
    if MPI.COMM_WORLD.rank == 1:
        for rank in (0, 2):
            MPI.COMM_WORLD.recv(source=rank)  # when these have waited for long
    else:
        import threading
        warned = threading.Event()
        asyncdist.transports.mpi.logger.warning = lambda text, *args: (print(text % args), warned.set())
        def tell():
            warned.wait()
            MPI.COMM_WORLD.send(None, dest=1)
        threading.Thread(target=tell).start()
    ad.blocking.process_world()
"""


@pytest.mark.mpi
def test_a_world_that_a_rank_does_not_open_is_told() -> None:
    """Regression: the other ranks silently waited in MPI_Comm_dup."""
    ended = mpi.run_source(3, LATE).check()
    for rank in (0, 2):
        assert f"rank {rank} has waited 0.2 s for the other ranks of this job to open their worlds" in ended.stdout


def check(reports: Any, buffer: int) -> None:
    training = [reports[rank] for rank in range(buffer)]
    assert all(each["averages"] == each["counted"] for each in training)
    assert sum(each["averages"] for each in training) > 0, training
    assert all(each["best_score"] > 0 for each in training), "the rank with the buffer did not answer"
    assert reports[buffer]["exits"] == buffer
    assert training[0]["metadata"]["n_modes_found"] <= reports[buffer]["modes"]


def warm_environment() -> dict[str, str]:
    return warm.environment(mpi.base_environment(), *warm.LIBRARIES)


@pytest.mark.mpi
@pytest.mark.timeout(300)
@pytest.mark.parametrize("lib", ["torch", pytest.param("mpi", marks=pytest.mark.long)])
@pytest.mark.parametrize("policy", ["selective", pytest.param("all", marks=pytest.mark.long)])
def test_a_ported_script_on_mpi(lib: str, policy: str) -> None:
    """Regression: a script with changed imports alone hung at its first iteration."""
    options = ("--lib", lib, "--policy", policy)
    check(mpi.run_ranks(5, SCRIPT, *options, timeout_s=240, env=warm_environment()).check().reports, 4)


@pytest.mark.mpi
@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_ported_script_under_mpirun() -> None:
    launchers = mpirun.find_installation(os.environ).launchers
    flavour = mpi.flavour()
    options = ("--host", "localhost:5", "--bind-to", "none") if flavour == "openmpi" else ()
    command = [launchers[flavour], *options, "-n", "5", sys.executable, str(SCRIPT), "--lib", "mpi"]
    environ = {**warm_environment(), **dict.fromkeys(mpirun.ROOT_VARIABLES, "1")}
    check(torchrun.run_jobs([(command, environ)], 240.0).check().reports, 4)


@pytest.mark.mpi  # the script imports modules that import mpi4py
@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("lib", ["mpi", "torch"])
def test_a_ported_script_on_torch(lib: str) -> None:
    check(
        torchrun.run_ranks(5, SCRIPT, "--lib", lib, timeout_s=240, env=warm_environment()).check().reports,
        4,
    )


@pytest.mark.long
@pytest.mark.mpi
@pytest.mark.timeout(300)
def test_a_ported_script_under_torchrun() -> None:
    program = f"import runpy; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    check(torchrun.run_torchrun(5, program, timeout_s=240).check().reports, 4)
