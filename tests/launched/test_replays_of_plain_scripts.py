"""Tests that replayed scripts without a main draw the recorded random numbers before their world opens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support import mpi, warm

#: Before the world opens, the script draws with torch's own seed, which differs between processes, and with a new seed.
PLAIN = """
import torch
from asyncdist.integrations.torchgfn import AsyncSelectiveAveragingPolicy

data = torch.randn(64, 8)
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
torch.seed()
noise = torch.randn(64, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
policy = AsyncSelectiveAveragingPolicy(model_builder=None, average_every=5, replacement_ratio=0.5)
for iteration in range(20):
    inputs = data + noise + torch.randn(64, 8)
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model, optimizer, info = policy(iteration=iteration, model=model, optimizer=optimizer, local_metric=-loss.item())
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "asyncdist", *words]
    environ = warm.environment(mpi.base_environment(), *warm.LIBRARIES)
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environ)


def test_numbers_drawn_before_the_world_opened_are_drawn_again(tmp_path: Path) -> None:
    """Regression: a replay drew other numbers, and the example programs differed at the first metric."""
    script = tmp_path / "script.py"
    script.write_text(PLAIN)
    recorded = run("run", "--transport", "torch", "-n", "2", "--record", str(tmp_path / "run"), str(script))
    assert recorded.returncode == 0, recorded.stderr
    result = run("replay", str(tmp_path / "run"), str(script))
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.long
def test_a_replay_of_replicas_under_ddp_is_refused_in_a_line(tmp_path: Path) -> None:
    """Regression: the replay waited forever, in one thread, for the other ranks of the process group."""
    script = tmp_path / "script.py"
    script.write_text("from asyncdist.integrations.pytorch import new_replica_group\nnew_replica_group(2)\n")
    recorded = run("run", "--transport", "torch", "-n", "2", "--record", str(tmp_path / "run"), str(script))
    assert recorded.returncode == 0, recorded.stderr
    result = run("replay", str(tmp_path / "run"), str(script))
    assert result.returncode == 1
    assert "cannot be used by ranks that share a process, as in a simulation or a replay" in result.stderr
