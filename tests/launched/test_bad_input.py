"""Tests a user's file that hides the package, in each way to start a job."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


IN_MAIN = """
import asyncdist as ad

async def main(world):
    from protocols import AverageAllPolicy

ad.run(main)
"""


@pytest.mark.parametrize(
    ("source", "command"),
    [
        ("import asyncdist\nfrom protocols import AverageAllPolicy\n", []),
        ("import asyncdist\nimport protocols.selective.messages\n", []),
        (IN_MAIN, []),
        ("from protocols import AverageAllPolicy\nimport asyncdist\n", [str(ROOT / "asyncdist" / "rank_program.py")]),
        ("import asyncdist\nfrom protocols import AverageAllPolicy\n", ["-m", "asyncdist", "sim", "-n", "2"]),
        (IN_MAIN, ["-m", "asyncdist", "sim", "-n", "2"]),
        (IN_MAIN, ["-m", "asyncdist", "sim", "-n", "2", "--explore", "3", "--processes", "1"]),
    ],
    ids=["name", "module", "in-main", "launched", "sim", "sim-in-main", "explore"],
)
@pytest.mark.long
def test_a_file_of_the_users_that_hides_the_package_is_explained(
    tmp_path: Path, source: str, command: list[str]
) -> None:
    """``launched`` is the expected error of each rank under ``asyncdist run``."""
    mine, script = tmp_path / "protocols.py", tmp_path / "train.py"
    mine.write_text("x = 1\n")
    script.write_text(source)
    done = subprocess.run(
        [sys.executable, *command, str(script)],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        check=False,
    )
    assert done.returncode == 1
    said = f"asyncdist's package 'protocols' is hidden by {mine}: rename that"
    assert done.stderr.count(said) == 1, done.stderr


def test_pytest_says_what_hides_the_package(tmp_path: Path) -> None:
    (tmp_path / "protocols.py").write_text("x = 1\n")
    (tmp_path / "test_module.py").write_text("from protocols import AverageAllPolicy\n")
    (tmp_path / "test_call.py").write_text("def test_it():\n    from protocols import AverageAllPolicy\n")
    command = [sys.executable, "-m", "pytest", "-p", "asyncdist.pytest_plugin", "--continue-on-collection-errors"]
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        check=False,
    )
    said = f"asyncdist's package 'protocols' is hidden by {tmp_path / 'protocols.py'}: rename that"
    assert done.returncode == 1 and done.stdout.count(said) == 2, done.stdout


BESIDE = """
import pickle, sys
import asyncdist as ad, protocols

async def without_policies(world):
    return world.size + protocols.x

print(ad.run(without_policies, transport="local", ranks=2))

import torch
from asyncdist.integrations.pytorch import SelectiveAveraging
from asyncdist.protocols import AverageAllPolicy, SelectiveRules

async def main(world):
    model = torch.nn.Linear(1, 1)
    async with AverageAllPolicy(model, torch.optim.SGD(model.parameters()), average_every=1) as policy:
        await policy.step()
    return pickle.loads(pickle.dumps(SelectiveRules)) is SelectiveRules

print(protocols.x, *ad.run_local(main, ranks=2), "protocols.policy" in sys.modules)
raise ImportError("of another kind")
"""


def test_a_users_protocols_can_be_used_beside_the_package(tmp_path: Path) -> None:
    """Without policies, nothing but the user's file is used.

    Regression: the integrations could not be imported.
    """
    (tmp_path / "protocols.py").write_text("x = 1\n")
    (tmp_path / "train.py").write_text(BESIDE)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "train.py")],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.stdout.splitlines() == ["3", "1 True True False"], done.stderr
    assert "hidden" not in done.stderr and "of another kind" in done.stderr, done.stderr
