"""What the README says: Python that a reader would copy whole runs, and ends; the run that fails does so as shown."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncdist as ad
from asyncdist import simulation
from protocols import ReplayBuffer, serve_replay_buffer

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
    report = ad.simulate(main, ranks=4, seed=7, strict=True)
    assert len(report.results) == 4 and max(report.results) < 0.01
    counts = f"{report.message_count} messages, {report.byte_count} bytes, {report.event_count} events"
    assert f"4 ranks, seed 7: {report.virtual_time_s:.6f} s of virtual time, {counts}" in README
    lines = [line.partition(" of ranks")[0] for line in capsys.readouterr().out.splitlines()]
    assert [line.partition(", ")[2] for line in lines] == ["round 1: average", "round 2: average"]


def test_the_channel_example_ends_when_every_rank_has_trained() -> None:
    main = block("class Progress", train_step=lambda: 0.5)["main"]
    assert ad.run_local(main, ranks=3, strict=True) == [None] * 3
    ad.simulate(main, ranks=3, seed=1, strict=True).value()


@pytest.mark.slow
def test_the_planned_faults_happen_to_the_first_program() -> None:
    main = block("torch.nn.Linear")["train"]
    names = {name: getattr(simulation, name) for name in ("Kill", "Delay", "Network", "Compute")}
    report = block("report = ad.simulate", train=main, **names)["report"]
    assert report.results[3] is None and report.faults_fired == (1, 1)


def test_the_buffer_example_ends_also_with_batches_that_are_small() -> None:
    names = {
        "novelty": lambda batch: batch["reward"].mean(),
        "train_on": lambda sample: sample.batch["reward"].abs(),
        "states": torch.zeros(3, 2),
        "rewards": torch.ones(3),
        "range": lambda _: range(5),
    }
    main = block("num_remote_buffers", ReplayBuffer=ReplayBuffer, serve_replay_buffer=serve_replay_buffer, **names)[
        "main"
    ]
    ad.run_local(main, ranks=3, strict=True)
