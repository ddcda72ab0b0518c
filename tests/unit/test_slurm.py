"""Tests the translation of srun's variables into those that torchrun sets."""

from __future__ import annotations

import pytest
from support.facts import naming

from asyncdist.launchers import detection, job_rendezvous, slurm

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_STEP_NODELIST": "host[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
}


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("login", "login"),
        ("a,b", "a"),
        ("host[1-2]", "host1"),
        ("gpu[03-05,7],login", "gpu03"),
        ("gpu[7],gpu[1-2]", "gpu7"),
        ("rack[1-2]node[08,11]", "rack1node08"),
        ("n[3-4].example.org,x", "n3.example.org"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_list(nodelist: str, first: str) -> None:
    assert slurm.first_host(nodelist) == first


@pytest.mark.parametrize(
    ("text", "node", "size"),
    [
        ("2", "0", 2),
        ("2(x3),1", "2", 2),
        ("2(x3),1", "3", 1),
        ("2(x3),1", "4", None),
        ("", "0", None),
        ("x", "0", None),
    ],
)
def test_the_number_of_tasks_on_a_host(text: str, node: str, size: int | None) -> None:
    environ = {"SLURM_STEP_TASKS_PER_NODE": text, "SLURM_NODEID": node}
    assert slurm.local_size(environ) == size == detection.local_size(environ)


def test_successive_steps_have_ports_outside_the_kernels_range() -> None:
    ports = [slurm.port(job, step) for job in range(40_000, 40_100) for step in range(100)]
    assert len(set(ports)) == len(ports) and min(ports) >= 15000 and max(ports) < 32768


def test_task_without_a_plugin_meets_others_on_the_first_host() -> None:
    found = job_rendezvous.torch_rendezvous({**STEP, "SLURM_STEP_NODELIST": "localhost,host[1-2]"})
    assert (found.rank, found.size, found.address, found.port) == (2, 3, "localhost", slurm.port(7, 2))
    assert not found.is_store_served and found.job == "slurm 7.2"
    assert detection.local_size(STEP) == 1 and detection.local_rank(STEP) == 0
    unset = {**STEP, "SLURM_JOB_ID": "", "SLURM_STEP_NODELIST": "localhost"}  # as some container scripts set it
    assert job_rendezvous.torch_rendezvous(unset).port == slurm.port(0, 2)


def test_where_ranks_meet_is_the_users_to_say() -> None:
    own = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "WORLD_SIZE": "77"}
    found = job_rendezvous.torch_rendezvous({**STEP, **own})
    assert (found.rank, found.size, found.address, found.port) == (2, 3, "localhost", 29500)


def test_a_first_host_that_is_not_known_is_named() -> None:
    with pytest.raises(ValueError, match=naming("MASTER_ADDR", "no.such.host.invalid")):
        job_rendezvous.torch_rendezvous({**STEP, "SLURM_STEP_NODELIST": "no.such.host.invalid"})


ELSEWHERE = (
    "rank 0 must run on the host on which the ranks meet. The ranks meet on localhost, the first host of "
    "SLURM_STEP_NODELIST"
)


@pytest.mark.parametrize(
    ("node", "tasks", "rank", "is_known"),
    [
        ("1", "0,3", "3", True),
        ("1", "0", "0", True),
        ("0", "1,2", "1", True),
        ("2", "1", "1", False),
        ("0", "0,10", "10", False),
        ("1", "10,20", "10", False),
        ("1", "", "0", True),
        ("1", "", "1", False),
        ("0", "", "1", False),
        ("", "", "0", False),
    ],
)
def test_rank_0_known_to_be_off_the_first_host_is_reported(node: str, tasks: str, rank: str, is_known: bool) -> None:
    """Regression: rank 0's store was tried for 90 s on the wrong host, and the other ranks waited for 300 s."""
    places = {"SLURM_NODEID": node, "SLURM_GTIDS": tasks, "SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": "30"}
    environ = {**STEP, **places, "SLURM_STEP_NODELIST": "localhost,host[1-2]"}
    if is_known:
        with pytest.raises(ValueError, match=f"{ELSEWHERE}.*--distribution=arbitrary.*set MASTER_ADDR to its host"):
            job_rendezvous.torch_rendezvous(environ)
    else:
        assert job_rendezvous.torch_rendezvous(environ).why_missing.startswith(
            "The ranks meet on localhost, the first host of"
        )
    found = job_rendezvous.torch_rendezvous({**environ, "MASTER_ADDR": "127.0.0.1"})
    assert (found.address, found.why_missing) == ("127.0.0.1", "")


def test_what_slurm_says_must_fit_together() -> None:
    with pytest.raises(ValueError, match=r"SLURM_PROCID must be from 0 to 2 .*, got 3"):
        job_rendezvous.torch_rendezvous({**STEP, "SLURM_PROCID": "3"})
