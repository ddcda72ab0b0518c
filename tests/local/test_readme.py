"""What the README says: Python that a reader would copy whole runs, and ends; the run that fails does so as shown."""

from __future__ import annotations

import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import asyncdist as ad

README = (Path(__file__).parents[2] / "README.md").read_text()


def block(first: str, **names: Any) -> dict[str, Any]:
    """The names that a block defines which contains ``first``."""
    (source,) = [text for text in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if first in text]
    module = types.ModuleType("readme")
    sys.modules["readme"] = module  # dataclasses look their annotations up there
    vars(module).update(names)
    exec("from dataclasses import dataclass\nimport asyncdist as ad\n" + source, vars(module))
    return vars(module)


def test_the_channel_example_ends_when_every_rank_has_trained() -> None:
    main = block("class Progress", train_step=lambda: 0.5)["main"]
    assert ad.run_local(main, ranks=3, strict=True) == [None] * 3
    ad.simulate(main, ranks=3, seed=1, strict=True)


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
