"""Tests replays of mains that fail in another way than the recorded ones, and the tests that such replays make."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncdist as ad
from asyncdist.recording.reader import read_recording
from asyncdist.simulation import DivergenceError, replay, replay_script, simulate
from protocols import AsyncSelectiveAveragingPolicy
from simulation.edited_records import edit_headers

SCRIPT = """
import asyncdist as ad

async def main(world):
    for step in range(3):
        await ad.barrier()
        if step == 1 and world.rank == 1:
            DEFECT
    return world.rank

ad.run(main)
"""


def record_script(folder: Path, defect: str) -> Path:
    """Record a run of the script with a defect. Return the script's path."""
    script = folder / "job.py"
    script.write_text(SCRIPT.replace("DEFECT", defect))
    namespace: dict[str, Any] = {"__name__": "elsewhere"}
    exec(compile(script.read_text().replace("ad.run(main)", ""), str(script), "exec"), namespace)
    simulate(namespace["main"], ranks=2, seed=0, record=folder / "run", return_exceptions=True)
    return script


def test_a_test_of_a_failed_run_fails_with_another_error(tmp_path: Path) -> None:
    """Regression: the test of a failed run passed although a rank failed with another error."""
    script = record_script(tmp_path, "raise ValueError('recorded')")
    script.write_text(SCRIPT.replace("DEFECT", "undefined_name"))
    with pytest.raises(NameError, match="undefined_name"):
        replay_script(tmp_path / "run", script)
    script.write_text(SCRIPT.replace("DEFECT", "pass"))
    assert replay_script(tmp_path / "run", script) is None


def test_a_difference_has_the_error_of_main_as_its_cause(tmp_path: Path) -> None:
    script = record_script(tmp_path, "pass")
    script.write_text(SCRIPT.replace("DEFECT", "undefined_name"))
    with pytest.raises(DivergenceError) as raised:
        replay_script(tmp_path / "run", script)
    assert isinstance(raised.value.__cause__, NameError) and raised.value.facts["rank"] == 1


async def train(world: ad.World, what: str = "") -> None:
    torch.manual_seed(world.rank)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with contextlib.suppress(KeyError):
        async with AsyncSelectiveAveragingPolicy(model, optimizer, average_every=10) as policy:
            for step in range(30):
                with torch.no_grad():
                    model.weight += 0.01
                await policy.step(loss=float(step))
                if step == 12:
                    await fail(world, what)
    await ad.barrier()


async def fail(world: ad.World, what: str) -> None:
    if what == "file":
        os.stat("no_such_file")
    if what == "thread":
        await asyncio.to_thread(sum, [1, 2])
    if what == "one rank" and world.rank:
        raise ValueError("one rank")
    if what == "catch":
        raise KeyError("caught")


@pytest.mark.parametrize(
    ("what", "error"), [("file", FileNotFoundError), ("thread", ad.LocalProtocolError), ("one rank", ValueError)]
)
def test_an_error_inside_a_policy_is_named(tmp_path: Path, what: str, error: type[Exception]) -> None:
    """Regression: the replay reported only that the checksum of the policy's weights differed."""
    simulate(train, ranks=2, seed=1, record=tmp_path)
    with pytest.raises(DivergenceError, match=rf"main ended with .*{error.__name__}") as raised:
        replay(train, what, recording=read_recording(tmp_path))
    assert isinstance(raised.value.__cause__, error)


def test_other_weights_are_reported_if_the_error_is_caught(tmp_path: Path) -> None:
    simulate(train, ranks=2, seed=1, record=tmp_path)
    with pytest.raises(DivergenceError, match=r"but the replay has .weights policy 0, checksum"):
        replay(train, "catch", recording=read_recording(tmp_path))


@pytest.mark.parametrize(("changed", "is_told"), [({}, False), ({"sources": 7}, True), ({"sources": None}, True)])
def test_other_sources_are_told_as_cause_of_a_difference(
    tmp_path: Path, changed: dict[str, int | None], is_told: bool
) -> None:
    """Regression: a difference caused by a change of asyncdist seemed to be the program's."""

    async def main(world: ad.World, wanted: bool) -> None:
        if not wanted:
            raise KeyError("as planned")

    simulate(main, True, ranks=2, seed=2, record=tmp_path)
    recording = edit_headers(tmp_path, lambda header: header.update(changed))
    replay(main, True, recording=recording)
    with pytest.raises(DivergenceError, match=r"ended with .*as planned") as raised:
        replay(main, False, recording=recording)
    assert ("other source files of asyncdist" in str(raised.value)) == is_told
