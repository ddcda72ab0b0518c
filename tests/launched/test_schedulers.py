"""Tests the recipes of docs/schedulers.md: Ray, submitit and hydra start their programs, and the files' commands run.

The tests of Ray, submitit and hydra are skipped unless these packages are installed; they last passed with ray 2.60.0,
submitit 1.5.4, hydra-core 1.3.8 and hydra-submitit-launcher 1.2.0.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import pages, slurm
from support.mpi import ROOT, base_environment
from support.torchrun import run_jobs

from asyncdist.launchers import addresses

PAGE = ROOT / "docs" / "schedulers.md"
LOOP = "            loss = (model(torch.randn(64, 8)) - 1).square().mean()\n"

SLOW = f"            await world.sleep(0.02)\n{LOOP}"
#: Ends rank 1 once, at step 30, after the first checkpoint.
DYING = f"            import os\n            if world.rank == 1 and begin == 0 and step == 30: os._exit(1)\n{SLOW}"

#: Run on the login node: submits the job, lets the scheduler preempt it after its first checkpoint, and starts it
#: again.
PREEMPT = """
import subprocess, sys, time
from pathlib import Path

folder = sys.argv[1]
submitter = subprocess.Popen([sys.executable, "submit.py", folder, "400"], stdout=subprocess.PIPE, text=True)
job = submitter.stdout.readline().split()[1]
while not list(Path(folder).glob("population/*/manifest.json")):
    time.sleep(0.1)
subprocess.run(["scancel", "--signal=USR2", job], check=True)
while subprocess.run(["squeue", "-h", "-o", "%T"], capture_output=True, text=True).stdout.strip() != "PENDING":
    time.sleep(0.1)
subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], check=True)  # not in two minutes
print(submitter.communicate()[0])
"""


def require(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


def programs(folder: Path, change: str = "") -> None:
    """Write the programs of the page, with an additional line before each training step."""
    for block in pages.blocks(PAGE):
        if block.title:
            (folder / block.title).write_text(block.text.replace(LOOP, change) if change else block.text)
    assert not change or change in (folder / "train.py").read_text()


def environment(folder: Path) -> dict[str, str]:
    paths = [str(folder), *base_environment().get("PYTHONPATH", "").split(os.pathsep), str(ROOT)]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


def results(text: str) -> list[Any]:
    """The tuples that ``train`` returns, as they were printed."""
    return [ast.literal_eval(found) for found in re.findall(r"\('torch', \d+, \d+, [\d.e-]+\)", text)]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_ray_starts_the_workers_again_and_they_resume(tmp_path: Path) -> None:
    require("ray")
    programs(tmp_path, DYING)
    env = {**base_environment(), **environment(tmp_path), "RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": "local"}
    command = [sys.executable, str(tmp_path / "train_ray.py"), str(tmp_path), "1000"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, check=False)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    found = results(ended.stdout + ended.stderr)
    assert found and all(each[:2] == ("torch", 2) and 20 <= each[2] < 1000 and each[3] < 1.0 for each in found), found


@pytest.mark.long
@pytest.mark.timeout(250)
def test_a_preempted_job_of_submitit_is_requeued_and_resumes(tmp_path: Path) -> None:
    require("submitit")
    programs(tmp_path, SLOW)
    (tmp_path / "preempt.py").write_text(PREEMPT)
    ended = run_on_slurm(tmp_path, [sys.executable, "preempt.py", str(tmp_path)])
    found = results(ended)
    assert len(found) == 2 and len(set(found)) == 1, ended
    assert found[0][:2] == ("torch", 2) and found[0][2] >= 20 and found[0][3] < 1.0


@pytest.mark.long
@pytest.mark.timeout(250)
def test_hydra_starts_a_job_of_two_ranks_for_each_run(tmp_path: Path) -> None:
    require("hydra", "hydra_plugins.hydra_submitit_launcher")
    programs(tmp_path)
    (block,) = [each for each in pages.blocks(PAGE) if each.language == "console"]
    words = block.text.removeprefix("$ python ").split()
    here = {"+folder=/shared/sweep": f"+folder={tmp_path}", "+steps=1000": "+steps=60"}
    run_on_slurm(tmp_path, [sys.executable, *(here.get(word, word) for word in words)])
    assert sorted(path.name for path in tmp_path.glob("lr-*")) == ["lr-0.01", "lr-0.1"]
    assert len(list(tmp_path.glob("lr-*/*/rank-*.pt"))) == 2 * 2 * 2, (
        "two runs of two ranks must keep two checkpoints each"
    )


def run_on_slurm(folder: Path, command: list[str]) -> str:
    """Run a command on the login node of a one-node Slurm, in a folder. Return its output."""
    variables = [f"{name}={value}" for name, value in environment(folder).items()]
    shell = ["sh", "-c", 'cd "$0" && exec "$@"', str(folder), "env", *variables, *command]
    result = slurm.run(1, shell, timeout_s=200.0).check()
    return result.stdout + result.stderr


def manifests() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="the docs extra brings PyYAML")
    read = [yaml.safe_load(block.text) for block in pages.blocks(PAGE) if block.language == "yaml"]
    return {each.get("kind", "SkyPilot"): each for each in read}


def test_the_job_set_is_that_of_the_page_on_clusters() -> None:
    """A test passes this JobSet's variables to ranks; the page's JobSet adds a failure policy and a volume."""
    yaml = pytest.importorskip("yaml", reason="the docs extra brings PyYAML")
    blocks = [
        yaml.safe_load(each.text) for each in pages.blocks(ROOT / "docs" / "clusters.md") if each.language == "yaml"
    ]
    (plain,) = [each for each in blocks if each["kind"] == "JobSet"]
    mine = manifests()["JobSet"]
    assert mine["spec"].pop("failurePolicy")["maxRestarts"] > 0
    pod = mine["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (mounts,) = [container.pop("volumeMounts") for container in pod["containers"]]
    assert {each["name"] for each in mounts} == {each["name"] for each in pod.pop("volumes")}
    pod["containers"][0]["command"] = ["python", "train.py"]
    assert mine == plain


@pytest.mark.long
def test_the_commands_for_skypilot_start_ranks_on_two_nodes(tmp_path: Path) -> None:
    """Both nodes are this host."""
    task = manifests()["SkyPilot"]
    assert task["num_nodes"] == 2 and set(task) <= {"name", "num_nodes", "resources", "file_mounts", "setup", "run"}
    programs(tmp_path)
    (tmp_path / "main.py").write_text(
        "import sys, asyncdist as ad\nfrom train import train\nprint(ad.run(train, sys.argv[1], 40))\n"
    )
    run = task["run"].replace("29500", str(addresses.find_free_port())).replace("/shared/population", "population")
    assert run != task["run"]
    bin_folder = str(Path(sys.executable).parent)
    nodes = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1"}
    jobs = [
        (
            ["sh", "-c", f"cd {tmp_path} && PATH={bin_folder}:$PATH; {run}"],
            {**environment(tmp_path), **nodes, "SKYPILOT_NODE_RANK": rank},
        )
        for rank in "01"
    ]
    found = results(run_jobs(jobs, 100.0).check().stdout)
    assert len(found) == 2 and found[0] == found[1] and found[0][:3] == ("torch", 2, 0)
