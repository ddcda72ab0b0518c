"""What the README says: Python that a reader would copy whole runs, and ends; the run that fails does so as shown."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

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


@pytest.mark.slow
def test_the_first_program_averages_in_both_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    main = block("torch.nn.Linear")["train"]
    losses = ad.simulate(main, ranks=4, seed=7, strict=True).results
    assert len(losses) == 4 and max(losses) < 0.01
    lines = [line.partition(" of ranks")[0] for line in capsys.readouterr().out.splitlines()]
    assert [line.partition(", ")[2] for line in lines] == ["round 1: average", "round 2: average"]


def test_the_channel_example_ends_when_every_rank_has_trained() -> None:
    main = block("class Progress", train_step=lambda: 0.5)["main"]
    assert ad.run_local(main, ranks=3, strict=True) == [None] * 3
    ad.simulate(main, ranks=3, seed=1, strict=True)
