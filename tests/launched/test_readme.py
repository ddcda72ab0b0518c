"""The run of the README that fails does so as shown, and its line repeats it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text()


ORDER = """
from dataclasses import dataclass

import asyncdist as ad


@dataclass(frozen=True, slots=True)
class Done:
    steps: int


{main}


if __name__ == "__main__":
    ad.run(main)
"""


def test_the_run_that_fails_fails_as_shown_and_its_line_repeats_it(tmp_path: Path) -> None:
    (main,) = [text for text in re.findall(r"```python\n(.*?)\n```", README, re.DOTALL) if "sources == sorted" in text]
    (shown,) = re.findall(r"```console\n(\$ asyncdist sim order.py.*?)```", README, re.DOTALL)
    (tmp_path / "order.py").write_text(ORDER.format(main=main).lstrip())
    command, *lines = shown.splitlines()

    def run(line: str) -> list[str]:
        words = line.removeprefix("$ ").removeprefix("asyncdist ").split()
        ended = subprocess.run(
            [sys.executable, "-m", "asyncdist", *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ended.returncode == 1
        return (ended.stderr + ended.stdout).replace(f"{sys.executable} -m asyncdist", "asyncdist").splitlines()

    said = run(command)
    assert [line for line in lines if line != "  ..." and line not in said] == []
    again = run(lines[-1].removeprefix("repeat it: "))
    assert "AssertionError: done in the order [2, 1]" in again
    assert [line for line in said if line.startswith("  0.")] == [line for line in again if line.startswith("  0.")]
