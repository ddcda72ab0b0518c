"""A file of the user's that hides the package, in each way to start a job."""

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
    """``launched`` is what ``asyncdist run`` makes of each rank."""
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


def test_a_file_of_the_users_that_hides_the_package_does_no_harm_to_who_needs_no_policy(tmp_path: Path) -> None:
    (tmp_path / "protocols.py").write_text("x = 1\n")
    script = tmp_path / "train.py"
    script.write_text(
        "import asyncdist as ad, protocols\n"
        "async def main(world): return world.size + protocols.x\n"
        "print(ad.run(main, transport='local', ranks=2))\n"
        "raise ImportError('of another kind')\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}, check=False
    )
    assert done.stdout.strip() == "3" and "hidden" not in done.stderr and "of another kind" in done.stderr, done.stderr
