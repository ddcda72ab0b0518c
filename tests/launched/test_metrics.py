"""Tests counters of ranks in separate processes: requested during training, and with ports that cannot be opened."""

from __future__ import annotations

import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support import mpi, torchrun

from asyncdist.launchers import addresses

#: Each rank requests the other rank's counters while that rank computes and its event loop does not run.
ASKED = """
    import os, time, torch, urllib.request
    import asyncdist as ad
    from protocols import AsyncSelectiveAveragingPolicy
    from support.mpi import report

    def page(port):
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60).read().decode()
        except OSError:
            return ""

    async def main(world, port):
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        async with AsyncSelectiveAveragingPolicy(model, optimizer, average_every=5, name="mine") as policy:
            for _ in range(9):
                await policy.step(-float(world.rank))
            await ad.barrier()
            other = 1 - world.rank
            told = ""
            deadline = time.monotonic() + 60
            while not told and time.monotonic() < deadline and port:
                told = page(port + other)  # blocks the loop of this rank
            report(world.rank, told)
            await ad.barrier()

    port = int(os.environ["PORT"])
    ad.run(main, port)
"""


def check(told: str, rank: int) -> None:
    assert f'asyncdist_steps_total{{policy="mine",rank="{rank}"}} 9.0' in told, told
    assert f'asyncdist_metric{{policy="mine",rank="{rank}"}} {-float(rank)}' in told, told
    assert 'size="2"' in told


@pytest.mark.mpi
def test_ranks_of_mpi_serve_while_they_compute() -> None:
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    port = addresses.find_free_port()
    result = mpi.run_source(2, ASKED, env={"PORT": str(port), "ASYNCDIST_METRICS": str(port)}).check()
    for rank, told in result.reports.items():
        check(told, 1 - rank)


def test_ranks_of_torch_serve_while_they_compute() -> None:
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    port = addresses.find_free_port()
    result = torchrun.run_source(2, ASKED, env={"PORT": str(port), "ASYNCDIST_METRICS": str(port)}).check()
    for rank, told in result.reports.items():
        check(told, 1 - rank)


@pytest.mark.mpi
def test_a_port_that_is_taken_ends_nothing() -> None:
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = mpi.run_source(
            1, ASKED.replace("1 - world.rank", "0"), env={"PORT": "0", "ASYNCDIST_METRICS": str(port)}
        )
    told = [line for line in result.check().stderr.splitlines() if f" {port} " in line]
    assert len(told) == 1 and "rank 0 " in told[0] and "prometheus" in told[0], result.output()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--metrics", "grafana"], "'grafana'"),
        (["--metrics", "9100", "--metrics", "0"], "'0'"),
    ],
)
def test_the_command_refuses_what_is_no_destination(options: list[str], words: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    command = [sys.executable, "-m", "asyncdist", "run", "-n", "1", *options, "script.py"]
    ended = subprocess.run(
        command, cwd=tmp_path, env=mpi.base_environment(), capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith("asyncdist run: --metrics ") and words in ended.stderr, ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.long
def test_wandb_itself_has_a_run_for_each_rank_offline(tmp_path: Path) -> None:
    """This runs only if wandb is installed: it needs a hundred megabytes, and no other test uses it."""
    pytest.importorskip("wandb", reason="wandb is not installed: pip install 'asyncdist[wandb]'")
    source = """
        import asyncdist as ad
        async def main(world):
            await ad.barrier()
        ad.run_local(main, ranks=2, metrics="wandb:mine")
    """
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(source))
    environ = {**mpi.base_environment(), "WANDB_DIR": str(tmp_path)}
    subprocess.run([sys.executable, str(script)], cwd=tmp_path, env=environ, check=True, timeout=100)
    assert len(list(tmp_path.glob("wandb/offline-run-*/*.wandb"))) == 2
