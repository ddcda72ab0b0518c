"""Tests the manifests of docs/clusters.md: with the pods' variables, the commands of their pods find all ranks."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from support import hosts, mpi, warm
from support.mpi import base_environment
from support.torchrun import run_jobs

from asyncdist.launch import mpirun
from asyncdist.launchers import addresses

PAGE = Path(__file__).parents[2] / "docs" / "clusters.md"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
SCRIPT = """
import torch
from support.mpi import report
import asyncdist as ad

async def main(world):
    total = await ad.all_reduce(torch.tensor([float(world.rank)]))
    report(world.rank, [world.size, total.item()])

ad.run(main)
"""


@pytest.fixture(scope="module")
def manifests() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="the docs extra brings PyYAML")
    read = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)]
    return {each["kind"]: each for each in read}


def variables(container: Any, index: int) -> dict[str, str]:
    """Return a container's environment in the pod with an index, as a kubelet sets it."""
    found: dict[str, str] = {}
    for each in container["env"]:
        if "value" in each:
            assert isinstance(each["value"], str), f"{each['name']} is not a string"
            found[each["name"]] = each["value"]
        else:
            assert each["valueFrom"]["fieldRef"]["fieldPath"] == INDEX
            found[each["name"]] = str(index)
    return found


def test_ranks_with_the_variables_of_the_job_sets_pods_meet(manifests: dict[str, Any], tmp_path: Path) -> None:
    manifest = manifests["JobSet"]
    (job,) = manifest["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
    (container,) = spec["template"]["spec"]["containers"]
    environments = [variables(container, index) for index in range(spec["completions"])]
    name = manifest["metadata"]["name"]
    assert {each["MASTER_ADDR"] for each in environments} == {f"{name}-{job['name']}-0-0.{name}"}, (
        "MASTER_ADDR must be the first pod's host"
    )
    program, _script = container["command"]
    assert program == "python"
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(addresses.find_free_port())}
    base = base_environment()
    jobs = [([sys.executable, *warm.command(script, (), base, each)], {**each, **here}) for each in environments]
    ended = run_jobs(jobs, 100.0).check()
    assert ended.reports == {rank: [4, 6.0] for rank in range(4)}


@pytest.mark.mpi
def test_the_launcher_of_the_mpi_job_starts_ranks_on_the_workers(manifests: dict[str, Any], tmp_path: Path) -> None:
    """Regression: all ranks began in the launcher's pod, because Open MPI 5 ignores the operator's variables."""
    mpi.require_mpi()
    if mpi.flavour() != "openmpi":
        pytest.skip("the manifest is for Open MPI")
    spec = manifests["MPIJob"]["spec"]
    (launcher,) = spec["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"]
    hostfile, script = tmp_path / "hostfile", tmp_path / "train.py"
    count = spec["mpiReplicaSpecs"]["Worker"]["replicas"]
    hostfile.write_text("".join(f"host{1 + i} slots={spec['slotsPerWorker']}\n" for i in range(count)))
    script.write_text("import os, socket\nprint(os.environ['OMPI_COMM_WORLD_RANK'], socket.gethostname())\n")
    here = {
        "/opt/venv/bin/mpirun": mpirun.find_installation(os.environ).launchers["openmpi"],
        "/opt/venv/bin/python": sys.executable,
        "/etc/mpi/hostfile": str(hostfile),
        "train.py": str(script),
    }
    of_operator = {
        "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
        "OMPI_MCA_orte_default_hostfile": str(hostfile),
        "OMPI_MCA_orte_set_default_slots": str(spec["slotsPerWorker"]),
        "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
    }
    env = {name: here.get(value, value) for name, value in variables(launcher, 0).items()}
    words = [here.get(word, word) for word in launcher["command"]]
    started = hosts.run(count, words, **of_operator, **env).check().stdout
    assert sorted(started.splitlines()) == ["0 host1", "1 host1", "2 host2", "3 host2"]


def test_the_mpi_job_has_a_slot_for_each_rank(manifests: dict[str, Any]) -> None:
    spec = manifests["MPIJob"]["spec"]
    (launcher,) = spec["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"]
    words = launcher["command"]
    assert words[words.index("-n") + 1] == "4"
    assert spec["slotsPerWorker"] * spec["mpiReplicaSpecs"]["Worker"]["replicas"] == 4
