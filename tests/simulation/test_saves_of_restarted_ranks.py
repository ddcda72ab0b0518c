"""Tests that the states of restarted ranks become part of the other ranks' checkpoints."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
import logging
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.seeds import in_ci, seeds

import asyncdist as ad
from asyncdist.functional.checkpoints import checkpoint_files, manifests, restarted_ranks
from asyncdist.functional.checkpoints.manifests import Moment
from asyncdist.simulation import Fault, Kill, Network, Restart, simulate
from protocols import (
    AsyncDiLoCoPolicy,
    AsyncSelectiveAveragingPolicy,
    DiLoCoPolicy,
    GossipPolicy,
    PopulationAveragingPolicy,
)
from simulation.restarted_saves_scenarios import scenario

RANKS, LOST, END, SAVE_EVERY = 4, 2, 60, 10
FAULTS: list[Fault] = [Kill(LOST, at_s=0.105), Restart(LOST, at_s=0.25)]
POLICIES = (
    AsyncDiLoCoPolicy,
    AsyncSelectiveAveragingPolicy,
    DiLoCoPolicy,
    GossipPolicy,
    PopulationAveragingPolicy,
)
BEYOND_FLOATS = (
    '{"moment": {"run": "0000000a-1", "iteration": 10}, "entry": {"nbytes": 1, "crc32": 1, "metric": 1'
    + "0" * 400
    + ', "metric_mode": "max"}}'
)
RUN, OTHER_RUN = "0000000a-1", "0000000a-2"


def made(policy_class: Callable[..., Any]) -> tuple[torch.nn.Linear, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, policy_class(model, optimizer, average_every=5)


async def train(
    world: ad.World,
    folder: Path,
    policy_class: Callable[..., Any] = AsyncSelectiveAveragingPolicy,
    pace: float = 1.0,
    *,
    save_beside: bool = False,
    shift: int = 0,
    keep: int | None = None,
) -> list[float]:
    """Train to step 60 and save every 10 steps. Return the weights at the last save.

    Args:
        pace: Duration of a restarted rank's step, in steps of the others.
        shift: A restarted rank saves this number of steps later than the others.
    """
    model, optimizer, policy = made(policy_class)
    save: Any = ad.async_save_population if save_beside else ad.save_population
    shift = shift if world.incarnation else 0
    weights: list[float] = []
    async with policy:
        while policy.iteration < END:
            with torch.no_grad():
                model.weight += 0.01 * (world.rank + 1)
            await world.sleep(0.01 * (pace if world.incarnation else 1.0))
            await (policy.step(float(world.rank)) if policy_class is AsyncSelectiveAveragingPolicy else policy.step())
            if policy.iteration % SAVE_EVERY == shift:
                extra = {"rank": world.rank, "iteration": policy.iteration}
                await save(folder, model, optimizer, policy=policy, extra=extra, keep=keep)
                weights = model.weight.flatten().tolist()
    return weights


async def load(world: ad.World, folder: Path, policy_class: Callable[..., Any]) -> tuple[Any, ...]:
    model, optimizer, policy = made(policy_class)
    found = await ad.load_population(folder, model, optimizer, policy=policy)
    return found.source, found.is_copy, found.extra["rank"], policy.iteration, model.weight.flatten().tolist()


def ranks_in(folder: Path) -> list[int]:
    return [entry["rank"] for entry in manifests.find_newest(folder)[1]["files"]]


@pytest.mark.parametrize(
    ("policy_class", "pace"),
    in_ci(
        itertools.product(POLICIES, [0.3, 1.0, 3.0]),
        *((AsyncDiLoCoPolicy, 3.0), (AsyncSelectiveAveragingPolicy, 0.3), (DiLoCoPolicy, 0.3), (DiLoCoPolicy, 1.0)),
        *((DiLoCoPolicy, 3.0), (GossipPolicy, 0.3), (PopulationAveragingPolicy, 3.0)),
    ),
)
def test_a_restarted_rank_is_in_the_others_checkpoints(
    policy_class: Callable[..., Any], pace: float, tmp_path: Path
) -> None:
    """Faster or slower than the others, it is loaded with its own state, and with the ``extra`` of the first rank."""
    trained = simulate(train, tmp_path, policy_class, pace, ranks=RANKS, seed=1, faults=FAULTS, network=Network())
    loaded = simulate(load, tmp_path, policy_class, ranks=RANKS, seed=2, strict=True).results
    expected = [(rank, False, 0 if rank == LOST else rank, END, trained.results[rank]) for rank in range(RANKS)]
    assert list(loaded) == expected
    assert all(ranks_in(folder) == [0, 1, 2, 3] for folder in sorted(tmp_path.iterdir())[2:])
    assert all(folder.name.startswith("checkpoint-") for folder in tmp_path.iterdir()), "nothing is left beside them"


@pytest.mark.parametrize("pace", in_ci([0.3, 3.0], 0.3))
def test_saves_beside_training_contain_a_restarted_rank(pace: float, tmp_path: Path) -> None:
    main = functools.partial(train, save_beside=True)
    simulate(main, tmp_path, DiLoCoPolicy, pace, ranks=RANKS, seed=1, faults=FAULTS, network=Network())
    assert ranks_in(tmp_path) == [0, 1, 2, 3]
    assert simulate(load, tmp_path, DiLoCoPolicy, ranks=RANKS, seed=2, strict=True).results[LOST][0] == LOST


def test_ranks_that_were_restarted_twice_train_on_together(tmp_path: Path) -> None:
    """The resumed ranks make the same rounds: their models are equal after the last one."""
    faults = [*FAULTS, Kill(0, at_s=0.32), Restart(0, at_s=0.4), Kill(LOST, at_s=0.42), Restart(LOST, at_s=0.5)]
    simulate(train, tmp_path, DiLoCoPolicy, ranks=RANKS, seed=1, faults=faults, network=Network()).value()
    assert ranks_in(tmp_path) == [0, 1, 2, 3]

    async def resume(world: ad.World) -> list[float]:
        model, optimizer, policy = made(DiLoCoPolicy)
        await ad.load_population(tmp_path, model, optimizer, policy=policy)
        async with policy:
            while policy.iteration < END + 10:
                await policy.step()
        return model.weight.flatten().tolist()

    results = simulate(resume, ranks=RANKS, seed=2, strict=True).results
    assert list(results) == [results[0]] * RANKS


@pytest.mark.parametrize("seed", seeds(48))
def test_jobs_resume_after_saves_among_restarts(seed: int, tmp_path: Path) -> None:
    scenario(seed, tmp_path)


def test_a_soup_contains_a_restarted_rank(tmp_path: Path) -> None:
    trained = simulate(
        functools.partial(train, pace=3.0), tmp_path, ranks=RANKS, seed=1, faults=FAULTS, network=Network()
    )
    model = torch.nn.Linear(3, 1)
    assert ad.uniform_soup(model, tmp_path).members == (0, 1, 2, 3)
    mean = torch.tensor(trained.results, dtype=torch.float64).mean(0)
    torch.testing.assert_close(model.weight.detach().double().flatten(), mean)


def test_states_of_other_iterations_are_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A restarted rank that is ahead writes states, which the others' next checkpoint deletes."""
    main = functools.partial(train, pace=0.5, shift=3)
    simulate(main, tmp_path, ranks=RANKS, seed=1, faults=FAULTS, network=Network()).value()
    assert ranks_in(tmp_path) == [0, 1, 3]
    assert all(folder.name.startswith("checkpoint-") for folder in tmp_path.iterdir())
    assert not caplog.records, "it was never late"


def test_a_state_that_comes_too_late_is_not_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    main = functools.partial(train, pace=5.0, shift=3)
    simulate(main, tmp_path, ranks=RANKS, seed=1, faults=FAULTS, network=Network()).value()
    assert ranks_in(tmp_path) == [0, 1, 3] and not list(tmp_path.glob("*restarted*"))
    assert ad.lawa(torch.nn.Linear(3, 1), tmp_path, last=2, rank=3).members == (0, 1)
    with pytest.raises(ValueError, match=r"rank must be one of \[0, 1, 3\], .* got 2"):
        ad.lawa(torch.nn.Linear(3, 1), tmp_path, last=2, rank=2)
    texts = {record.getMessage() for record in caplog.records if record.levelno == logging.WARNING}
    assert any("no checkpoint of policy.iteration 53" in text for text in texts), texts


def test_a_restarted_rank_without_a_policy_saves_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main(world: ad.World) -> Path:
        model, optimizer, policy = made(DiLoCoPolicy)
        async with policy:
            while policy.iteration < END:
                await world.sleep(0.01)
                await policy.step()
            return await ad.save_population(tmp_path, model, optimizer)

    results = simulate(main, ranks=RANKS, seed=1, faults=FAULTS, network=Network()).results
    assert results == tuple(tmp_path if rank == LOST else tmp_path / "checkpoint-000001" for rank in range(RANKS))
    assert ranks_in(tmp_path) == [0, 1, 3]
    assert [r.args[0] for r in caplog.records if r.args and "without a policy" in r.getMessage()] == [LOST]


def write(folder: Path) -> dict[str, Any]:
    return checkpoint_files.write_rank(folder, 0, {"model": {}, "extra": None}, "torch")


def entry_of(rank: int) -> dict[str, Any]:
    return {"metric": 1.0, "metric_mode": "max", "replica_size": 1, "rank": rank}


def checkpoint(place: Path, moment: Moment | None, *, deletes_others: bool = False) -> Path:
    """Write a checkpoint of rank 0."""
    folder = checkpoint_files.new_folder(place)
    checkpoint_files.finish(folder, [{**write(folder), **entry_of(0)}], None, moment)
    if moment is not None:
        restarted_ranks.collect_states(folder, moment, deletes_others=deletes_others)
    return folder


def test_a_state_moves_at_whichever_comes_later(tmp_path: Path) -> None:
    first, second, third = (Moment(RUN, iteration) for iteration in (10, 20, 30))
    early = checkpoint(tmp_path, first)
    assert restarted_ranks.save(tmp_path, first, entry_of(3), write) == early
    assert restarted_ranks.save(tmp_path, third, entry_of(3), write) is None
    assert ranks_in(early) == [0, 3] and ranks_in(checkpoint(tmp_path, second)) == [0]
    assert restarted_ranks.save(tmp_path, second, entry_of(3), write) == tmp_path / "checkpoint-000002"
    assert ranks_in(checkpoint(tmp_path, third)) == [0, 3]
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("metric", [math.nan, math.inf, -math.inf])
def test_a_diverged_rank_is_in_the_checkpoint(metric: float, tmp_path: Path) -> None:
    """Regression: the entry of a rank whose metric was not finite was read as damaged, and its state was deleted."""
    first, second = (Moment(RUN, iteration) for iteration in (10, 20))
    entry = {**entry_of(3), "metric": metric}
    early = checkpoint(tmp_path, first)
    assert restarted_ranks.save(tmp_path, first, entry, write) == early
    assert restarted_ranks.save(tmp_path, second, entry, write) is None
    assert ranks_in(early) == ranks_in(checkpoint(tmp_path, second)) == [0, 3]


def test_a_checkpoint_that_ends_during_the_write_gets_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last look at the folder comes before the state is there, and the rank's first look before the manifest."""
    moment = Moment(RUN, 10)
    rename = Path.rename

    def late(path: Path, target: Path) -> Path:
        monkeypatch.undo()
        checkpoint(tmp_path, moment)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", late)
    assert restarted_ranks.save(tmp_path, moment, entry_of(1), write) == tmp_path / "checkpoint-000001"
    assert ranks_in(tmp_path) == [0, 1] and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("mover", ["the next checkpoint", "the rank's next save"])
def test_a_state_that_both_have_missed_is_moved_later(
    mover: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a network drive, where a folder's new entries are seen late."""
    first, second = Moment(RUN, 10), Moment(RUN, 20)
    with monkeypatch.context() as patched:
        patched.setattr(restarted_ranks, "find", lambda *_: (None, False))
        assert restarted_ranks.save(tmp_path, first, entry_of(1), write) is None
        folder = checkpoint_files.new_folder(tmp_path)
        checkpoint_files.finish(folder, [{**write(folder), **entry_of(0)}], None, first)
    if mover == "the next checkpoint":
        checkpoint(tmp_path, second)
    else:
        assert restarted_ranks.waiting_count(tmp_path, 1, second) == 0
    assert ranks_in(folder) == [0, 1]


def test_a_move_that_is_refused_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    checkpoint(tmp_path, Moment(RUN, 10))
    monkeypatch.setattr(os, "rename", refuse)
    folder = tmp_path / f"restarted-rank-00001-{RUN}-10"
    assert not restarted_ranks._move(folder, tmp_path / "checkpoint-000001")
    assert [record.args for record in caplog.records] == [(folder, tmp_path / "checkpoint-000001", "Permission denied")]


def test_two_saves_at_one_iteration(tmp_path: Path) -> None:
    """A state of the second save is not in the first checkpoint, whether the rank is early or late."""
    counts = restarted_ranks.SaveCounts(None)
    first = counts.counted(tmp_path, Moment(RUN, 10))
    second = counts.counted(tmp_path, Moment(RUN, 10))
    assert (first.count, second.count) == (0, 1)
    assert counts.counted(tmp_path / "other", Moment(RUN, 10)).count == 0
    assert restarted_ranks.save(tmp_path, second, entry_of(2), write) is None
    folders = [checkpoint(tmp_path, first), checkpoint(tmp_path, second)]
    assert [ranks_in(folder) for folder in folders] == [[0], [0, 2]]
    assert [restarted_ranks.save(tmp_path, each, entry_of(1), write) for each in (first, second)] == folders
    assert [ranks_in(folder) for folder in folders] == [[0, 1], [0, 1, 2]]
    assert counts.counted(tmp_path, Moment(RUN, 20)).count == 0


def test_a_state_whose_checkpoint_was_abandoned_does_not_wait(tmp_path: Path) -> None:
    """Regression: it was kept forever, because the others' next checkpoint was complete before it was written."""
    late, next_one = Moment(RUN, 10), Moment(RUN, 20)

    def write_late(folder: Path) -> dict[str, Any]:
        checkpoint(tmp_path, next_one)
        return write(folder)

    assert restarted_ranks.save(tmp_path, late, entry_of(1), write_late) is None
    assert [folder.name for folder in tmp_path.iterdir()] == ["checkpoint-000001"]


def test_the_number_of_waiting_states_is_limited(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The other rank, which was never restarted, trains without saving."""

    async def main(world: ad.World) -> None:
        model, optimizer, policy = made(AsyncSelectiveAveragingPolicy)
        async with policy:
            while policy.iteration < END:
                await world.sleep(0.01)
                await policy.step(1.0)
                if world.incarnation:
                    await ad.save_population(tmp_path, model, optimizer, policy=policy)

    faults: list[Fault] = [Kill(1, at_s=0.105), Restart(1, at_s=0.15)]
    simulate(main, ranks=2, seed=1, faults=faults, network=Network()).value()
    assert len(list(tmp_path.iterdir())) == restarted_ranks.WAITING_COUNT_MAX
    assert "4 of its earlier states still wait" in caplog.records[-1].getMessage()


def test_states_of_earlier_policies_do_not_wait(tmp_path: Path) -> None:
    for iteration in (10, 20):
        restarted_ranks.save(tmp_path, Moment(RUN, iteration), entry_of(1), write)
    restarted_ranks.save(tmp_path, Moment(RUN, 10), entry_of(2), write)
    assert restarted_ranks.waiting_count(tmp_path, 1, Moment(RUN, 30)) == 2
    assert restarted_ranks.waiting_count(tmp_path, 1, Moment(OTHER_RUN, 10)) == 0
    assert [folder.name for folder in tmp_path.iterdir()] == [f"restarted-rank-00002-{RUN}-10"]


def test_a_rank_in_another_round_is_not_in_the_checkpoint(tmp_path: Path) -> None:
    """Regression: DiLoCo refused to start, because the loaded ranks had completed different numbers of rounds."""
    policy_class = functools.partial(DiLoCoPolicy, late="skip")
    for number, (pace, at_s) in enumerate([(0.3, 0.105), (1.0, 0.155), (3.0, 0.205)]):
        folder = tmp_path / str(number)
        faults: list[Fault] = [Kill(LOST, at_s=at_s), Restart(LOST, at_s=at_s + 0.1)]
        simulate(train, folder, policy_class, pace, ranks=RANKS, seed=1, faults=faults, network=Network()).value()

        async def resume(world: ad.World, folder: Path) -> int:
            model, optimizer, policy = made(policy_class)
            await ad.load_population(folder, model, optimizer, policy=policy)
            async with policy:
                while policy.iteration < END + 10:
                    await policy.step()
            return int(policy.iteration)

        assert simulate(resume, folder, ranks=RANKS, seed=2, strict=True).results == (END + 10,) * RANKS


def test_the_position_of_a_moment(tmp_path: Path) -> None:
    def position(moment: Moment) -> str:
        found, is_late = restarted_ranks.find(tmp_path, moment)
        return "at a checkpoint" if found is not None else "late" if is_late else "ahead"

    assert position(Moment(RUN, 10)) == "ahead", "no checkpoint was written yet"
    for iteration in (10, 30):
        checkpoint(tmp_path, Moment(RUN, iteration))
    found = [position(Moment(RUN, iteration)) for iteration in (0, 10, 20, 30, 40)]
    assert found == ["late", "at a checkpoint", "late", "at a checkpoint", "ahead"]
    assert position(Moment(OTHER_RUN, 20)) == "ahead", "another run has no checkpoint yet"
    checkpoint(tmp_path, None)
    checkpoint(tmp_path, Moment("0000000b-1", 20))
    assert position(Moment(RUN, 20)) == "late", "checkpoints of other jobs, or without a policy, do not matter"


def test_the_state_of_another_process_of_the_rank_is_replaced(tmp_path: Path) -> None:
    moment = Moment(RUN, 10)
    for metric in (1.0, 2.0):
        assert restarted_ranks.save(tmp_path, moment, {**entry_of(1), "metric": metric}, write) is None
    checkpoint(tmp_path, moment)
    assert [entry["metric"] for entry in manifests.find_newest(tmp_path)[1]["files"]] == [1.0, 2.0]


def test_states_of_another_job_are_deleted_only_with_keep(tmp_path: Path) -> None:
    restarted_ranks.save(tmp_path, Moment("0000000b-1", 10), entry_of(1), write)
    assert ranks_in(checkpoint(tmp_path, Moment(RUN, 10))) == [0] and len(list(tmp_path.iterdir())) == 2
    assert ranks_in(checkpoint(tmp_path, Moment(RUN, 20), deletes_others=True)) == [0]
    assert [folder.name for folder in sorted(tmp_path.iterdir())] == ["checkpoint-000001", "checkpoint-000002"]


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    def full(folder: Path) -> dict[str, Any]:
        write(folder)
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        restarted_ranks.save(tmp_path, Moment(RUN, 10), entry_of(1), full)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", [None, "", "{}", '{"moment": 1}', "[" * 100_000, BEYOND_FLOATS])
def test_a_damaged_entry_is_ignored(damage: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Regression: without an entry, as after a partial copy, FileNotFoundError meant that there is no checkpoint."""
    moment = Moment(RUN, 10)
    folder = checkpoint(tmp_path, moment)
    restarted_ranks.save(tmp_path, moment, entry_of(1), write)
    path = folder / "restarted-rank-00001" / "entry.json"
    path.unlink() if damage is None else path.write_text(damage)
    assert ranks_in(tmp_path) == [0]
    assert [record.args[0] for record in caplog.records if record.args] == [folder / "restarted-rank-00001"]


@pytest.mark.parametrize("name", ["entry.json", "rank-00000.pt"])
def test_a_file_that_is_missing_or_a_pipe_is_ignored(name: str, tmp_path: Path) -> None:
    moment = Moment(RUN, 10)
    folder = checkpoint(tmp_path, moment)
    restarted_ranks.save(tmp_path, moment, entry_of(1), write)
    path = folder / "restarted-rank-00001" / name
    path.unlink()
    assert ranks_in(tmp_path) == [0]
    os.mkfifo(path)
    assert ranks_in(tmp_path) == [0]


def test_an_entry_of_another_moment_or_rank_is_ignored(tmp_path: Path) -> None:
    """A rank of the manifest counts, and so does the moment, whoever has copied the folder."""
    moment = Moment(RUN, 10)
    folder = checkpoint(tmp_path, moment)
    restarted_ranks.save(tmp_path, moment, entry_of(1), write)
    path = folder / "restarted-rank-00001" / "entry.json"
    facts = json.loads(path.read_text())
    for changed in ({"moment": {"run": RUN, "iteration": 11}}, {"entry": {**facts["entry"], "rank": 0}}):
        path.write_text(json.dumps({**facts, **changed}))
        assert ranks_in(tmp_path) == [0]
    with contextlib.suppress(FileNotFoundError):
        path.write_text(json.dumps(facts))
    assert ranks_in(tmp_path) == [0, 1]


def test_successive_policies_reach_the_same_iterations(tmp_path: Path) -> None:
    """The state of a rank that is restarted in the second epoch is not in the checkpoint of the first epoch."""

    async def main(world: ad.World) -> list[int]:
        model, optimizer, _ = made(AsyncSelectiveAveragingPolicy)
        counts = []
        for _ in range(3):
            policy = AsyncSelectiveAveragingPolicy(model, optimizer, average_every=5)
            async with policy:
                while policy.iteration < 20:
                    await world.sleep(0.01 if world.incarnation else 0.02)
                    await policy.step(1.0)
                await ad.save_population(tmp_path, model, optimizer, policy=policy)
            counts.append(policy.start_number)
        return counts

    faults: list[Fault] = [Kill(LOST, at_s=0.5), Restart(LOST, at_s=0.55)]
    report = simulate(main, ranks=RANKS, seed=1, faults=faults, network=Network())
    assert [ranks_in(tmp_path / f"checkpoint-00000{number}") for number in (1, 2, 3)] == [[0, 1, 2, 3]] * 3
    numbers: Any = report.results[0]
    assert len(set(numbers)) == 3 and report.results[1] == numbers
    written = [json.loads((tmp_path / f"checkpoint-00000{number}/manifest.json").read_text()) for number in (2, 3)]
    assert [manifest["moment"]["iteration"] for manifest in written] == [20, 20]
