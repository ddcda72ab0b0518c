"""Tests the one-sided policy on the local transport, where the owner of a snapshot answers each read.

Reads of shared memory are in ``launched/test_one_sided.py``; what any transport must do with exposed state, in the
conformance suite.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest
import torch
from scripts.one_sided import Ledger
from scripts.population import Mixed, clone_state, equal_states, fill, flat_state, identity, sgd, values
from support.facts import names, naming
from support.local import run
from support.seeds import in_ci
from torch import nn

import asyncdist as ad
from asyncdist.collectives import one_sided
from asyncdist.tensors.byte_layout import ALIGNMENT_NBYTES, Packing
from asyncdist.tensors.flat_state import FlatState
from protocols import OneSidedSelectiveAveragingPolicy, OneSidedStatistics, StepInfo
from protocols.one_sided import base as one_sided_averaging
from protocols.one_sided.reader import DonorReader, Replacement, UnreadableError
from protocols.one_sided.selection import Choice

MODES = ("age", "threshold", "worst_ratio")


@dataclass
class Member:
    """The observations of one rank of :func:`train`."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    infos: list[StepInfo] = field(default_factory=list)
    statistics: OneSidedStatistics | None = None
    start: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def replacements(self) -> list[StepInfo]:
        return [info for info in self.infos if info]

    @property
    def counts(self) -> OneSidedStatistics:
        assert self.statistics is not None
        return self.statistics


def train(
    *,
    ranks: int = 4,
    steps: int = 60,
    ledger: Ledger | None = None,
    metric: Callable[[int], Any] = float,
    value: Callable[[int], float] = float,
    build: Callable[[float], nn.Module] = Mixed,
    touch: Callable[[int, nn.Module], None] = lambda rank, model: None,
    **options: Any,
) -> list[Member]:
    """Train ranks in lockstep whose weights are constant; weights and metrics equal the rank by default."""
    barrier = asyncio.Barrier(ranks)
    kept = ledger or Ledger()

    async def main(world: ad.World) -> Member:
        model = build(value(world.rank))
        member = Member(model, sgd(model, momentum=0.9), start=clone_state(model))
        objects = identity(model)
        settings = {"average_every": 2, "replacement_mode": "worst_ratio", "replacement_ratio": 0.25, **options}
        settings["on_event"] = kept.listener(world.rank, model)
        async with OneSidedSelectiveAveragingPolicy(model, member.optimizer, **settings) as policy:
            for _ in range(steps):
                touch(world.rank, model)
                kept.before[world.rank] = flat_state(model)
                kept.stepping.add(world.rank)
                given = metric(world.rank)
                kept.told.setdefault(world.rank, []).append(given)
                member.infos.append(await policy.step(given))
                kept.stepping.discard(world.rank)
                await barrier.wait()
        member.statistics = policy.statistics()
        assert identity(model) == objects
        return member

    return run(main, ranks)


# -- exactness --------------------------------------------------------------------------------------------------------


def test_only_the_worst_rank_becomes_the_mean_of_its_donors() -> None:
    ledger = Ledger()
    members = train(ledger=ledger, donor_ratio=1.0)
    worst = members[0]
    assert len(worst.replacements) >= 5
    assert all(info.donors == (1, 2, 3) for info in worst.replacements)
    assert values(worst.model, floating=True) == {2.0}
    assert values(worst.model, floating=False) == {3.0, 1.0}  # the best rank's values, and 1 for bools
    assert isinstance(worst.model, Mixed) and worst.model.head.weight is worst.model.embed.weight
    for member in members[1:]:
        assert not member.replacements and equal_states(clone_state(member.model), member.start)
    assert ledger.verify() == len(worst.replacements)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["mean", "weighted_mean", "best_only"])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_and_strategy_to_the_bit(mode: str, strategy: str) -> None:
    """Each average equals the mean of its donors' snapshots, with random weights that change in every step."""
    ledger = Ledger()
    generators = [torch.Generator().manual_seed(rank) for rank in range(4)]

    def touch(rank: int, model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generators[rank], dtype=parameter.dtype))

    members = train(
        ledger=ledger,
        touch=touch,
        replacement_mode=mode,
        averaging_strategy=strategy,
        age_range=(3, 6),
        threshold_metric=1.5,
        donor_count=2,
    )
    count = sum(len(member.replacements) for member in members)
    assert ledger.verify() == count >= 5
    by_rank = [len(member.replacements) for member in members]
    assert {"age": all(by_rank), "threshold": by_rank[2:] == [0, 0], "worst_ratio": by_rank[1:] == [0, 0, 0]}[mode]
    for entry in ledger.applied:
        donors, weights = entry.event.donors, entry.event.weights
        if strategy == "best_only":
            assert donors == (entry.event.best,) and weights == (1.0,)
        elif strategy == "weighted_mean" and mode == "worst_ratio":
            assert weights == tuple(map(float, donors)), (
                "the metric is the rank, so each weight must be the donor's rank"
            )
        elif strategy == "mean":
            assert set(weights) == {1.0} and len(donors) <= 2
        if mode == "threshold":
            assert set(donors) <= {2, 3}, "a rank that would itself be replaced must not be a donor"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "metric_mode"),
    in_ci(itertools.product(MODES, ["max", "min"]), ("age", "max"), ("threshold", "min"), ("worst_ratio", "max")),
)
def test_weights_use_the_metric_published_with_the_snapshot(mode: str, metric_mode: str) -> None:
    """All metrics differ and change in every step, so the metric of any other version would give other weights."""
    ledger = Ledger()
    draws = [random.Random(rank).sample(range(rank, 1 << 18, 4), 1 << 10) for rank in range(4)]
    members = train(
        ledger=ledger,
        metric=lambda rank: draws[rank].pop() / 16.0,  # exact, and below 2**14
        average_every=1,
        replacement_mode=mode,
        age_range=(2, 4),
        threshold_metric=2.0**13,
        averaging_strategy="weighted_mean",
        metric_mode=metric_mode,
        donor_ratio=1.0,
        steps=100,
    )
    assert ledger.verify() == sum(len(member.replacements) for member in members)
    assert ledger.verify_weights(metric_mode) >= 10


@pytest.mark.parametrize("momentum", [0.25, 0.7, 1.0])
def test_momentum_mixes_with_the_weights_of_that_moment(momentum: float) -> None:
    ledger = Ledger()

    def touch(rank: int, model: nn.Module) -> None:
        next(model.parameters()).data.add_(0.125)

    members = train(ledger=ledger, touch=touch, momentum=momentum, donor_ratio=1.0)
    assert ledger.verify(momentum=momentum) == len(members[0].replacements) >= 5


class Many(nn.Module):
    """Every width there is, in an order that packs badly, and odd numbers of each."""

    def __init__(self, value: float) -> None:
        super().__init__()
        for index, dtype in enumerate(
            (torch.bool, torch.float16, torch.float64, torch.int8, torch.bfloat16, torch.float32, torch.complex64)
        ):
            self.register_buffer(f"b{index}", torch.full((2 * index + 3,), value).to(dtype))
        self.weight = nn.Parameter(torch.full((3, 5), value))
        self.tied = self.weight
        self.register_buffer("empty", torch.zeros(0, dtype=torch.int16))
        self.register_buffer("scalar", torch.tensor(value, dtype=torch.float64))


@pytest.mark.parametrize("chunk_nbytes", [64, 128, 4096])
def test_any_mix_of_dtypes_in_chunks_of_any_size(chunk_nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_sided_averaging, "CHUNK_NBYTES", chunk_nbytes)
    members = train(build=Many, donor_ratio=1.0)
    assert len(members[0].replacements) >= 3
    for name, tensor in members[0].model.state_dict().items():
        expected = 2.0 if tensor.is_floating_point() or tensor.is_complex() else 3.0
        assert torch.equal(tensor, torch.full(tensor.shape, expected).to(tensor.dtype)), name


def test_packing_is_aligned_averaged_first_and_complete() -> None:
    flat = FlatState(Many(1.0))
    packing = Packing(flat.entries)
    memory = torch.zeros(packing.nbytes, dtype=torch.uint8)
    buffers = packing.buffers(memory)
    flat.snapshot(buffers)
    again = flat.new_buffers()
    flat.snapshot(again)
    assert buffers.by_name().keys() == again.by_name().keys()
    for name, tensor in again.by_name().items():
        assert torch.equal(buffers.by_name()[name], tensor)
    whole = {dtype: torch.zeros_like(tensor) for dtype, tensor in buffers.tensors.items()}
    starts = range(0, packing.nbytes, ALIGNMENT_NBYTES)
    for start in starts:
        chunk = memory[start : start + ALIGNMENT_NBYTES].clone()
        for piece in packing.pieces(start, start + len(chunk)):
            assert piece.averaged == (start + piece.offset < packing.averaged_nbytes)
            piece.of_flat(whole[piece.dtype]).copy_(piece.of_chunk(chunk))
    assert all(torch.equal(whole[dtype], tensor) for dtype, tensor in buffers.tensors.items())
    exact = sum(tensor.nbytes for tensor in buffers.exact().values())
    assert packing.averaged_nbytes <= packing.nbytes - exact


def test_a_model_of_integers_alone_takes_those_of_the_best() -> None:
    def build(value: float) -> nn.Module:
        model = nn.Linear(1, 1)
        model.register_buffer("counts", torch.full((5,), int(value)))
        for parameter in model.parameters():
            parameter.data.fill_(value)
        return model

    members = train(build=build, donor_ratio=1.0)
    assert members[0].model.state_dict()["counts"].tolist() == [3] * 5


# -- who is replaced, and by whom -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_lifetime_is_as_drawn_and_restarts_at_each_replacement() -> None:
    members = train(replacement_mode="age", age_range=(10, 10), average_every=3, steps=80)
    for member in members:
        applied = [step for step, info in enumerate(member.infos) if info]
        lives = np.diff(applied)
        assert len(applied) >= 5 and lives.min() >= 10 and lives.min() <= 14, applied
        assert member.counts.age == 79 - applied[-1]
    short = train(replacement_mode="age", age_range=(5, 30), average_every=2, steps=200)
    lives = [life for member in short for life in np.diff([s for s, info in enumerate(member.infos) if info])]
    assert len(set(lives)) >= 5, "each replica must draw a new lifetime"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "expected"), [("max", [True, True, False, False]), ("min", [False, False, True, True])]
)
def test_the_threshold_replaces_those_beyond_it(mode: str, expected: list[bool]) -> None:
    members = train(replacement_mode="threshold", threshold_metric=1.5, metric_mode=mode)
    assert [bool(member.replacements) for member in members] == expected


@pytest.mark.parametrize(("ratio", "count"), [(0.0, 0), (0.25, 1), (0.5, 2), (1.0, 3)])
def test_the_worst_ratio_replaces_so_many(ratio: float, count: int) -> None:
    members = train(replacement_ratio=ratio)
    assert [bool(member.replacements) for member in members] == [rank < count for rank in range(4)]
    for member in members:
        assert all(min(info.donors) >= count for info in member.replacements), "the worst ranks must not be donors"


@pytest.mark.parametrize("bad", in_ci([math.nan, math.inf, -math.inf], math.nan, -math.inf))
@pytest.mark.parametrize("mode", MODES)
def test_metric_that_is_not_a_number_never_gives_and_ranks_worst(mode: str, bad: float) -> None:
    ledger = Ledger()
    members = train(
        ledger=ledger,
        replacement_mode=mode,
        age_range=(4, 6),
        threshold_metric=0.5,
        metric=lambda rank: bad if rank == 3 else float(rank),
    )
    assert members[3].replacements and members[3].counts.nonfinite_metric_count >= 10
    assert all(3 not in event.donors for rank in range(4) for event in ledger.by(rank))
    assert ledger.verify() >= 3


def test_weights_that_are_not_finite_are_given_to_nobody() -> None:
    ledger = Ledger()
    members = train(
        ledger=ledger,
        donor_ratio=1.0,
        touch=lambda rank, model: None if rank != 3 else (fill(model, math.nan), None)[1],
    )
    assert members[3].counts.unpublished and members[3].counts.num_replacements >= 5, (
        "a rank that has diverged must be replaced as the worst"
    )
    assert all(3 not in event.donors for rank in range(4) for event in ledger.by(rank))
    assert math.isfinite(max(values(members[0].model, floating=True)))


def test_one_sided_reset_copies_weights_and_clears_optimizer() -> None:
    members = train(averaging_strategy="reset_weights", model_builder=lambda: Mixed(7.0))
    info = members[0].replacements[0]
    assert (info.donors, info.weights, info.nbytes) == ((), (), 0)
    assert values(members[0].model, floating=True) == {7.0}
    assert members[0].counts.averaging_ranks == 0 and members[0].counts.received_nbytes == 0


@pytest.mark.parametrize("choice", ["keep", "reset"])
def test_the_optimizers_state_is_kept_or_cleared(choice: str) -> None:
    async def main(world: ad.World) -> list[bool]:
        model = Mixed(float(world.rank))
        optimizer = sgd(model, momentum=0.9)
        state, found = optimizer.state, []
        async with OneSidedSelectiveAveragingPolicy(
            model, optimizer, average_every=1, replacement_mode="worst_ratio", optimizer_state=choice
        ) as policy:
            for _ in range(80):
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
                if await policy.step(float(world.rank)):
                    found.append(bool(state))
            assert optimizer.state is state
        return found

    found = run(main, 3)
    assert len(found[0]) >= 3 and set(found[0]) == {choice == "keep"}


@pytest.mark.slow
def test_random_donors_leave_the_global_generators_alone() -> None:
    models = [Mixed(float(rank)) for rank in range(6)]  # torch's own generator initialises them
    before = random.getstate(), torch.get_rng_state(), np.random.get_state()[1].tolist()
    members = train(ranks=6, donor_count=2, steps=120, build=lambda value: models[int(value)])
    drawn = {info.donors for info in members[0].replacements}
    assert len(drawn) >= 4 and all(len(donors) == 2 for donors in drawn)
    assert random.getstate() == before[0] and np.random.get_state()[1].tolist() == before[2]
    assert torch.equal(torch.get_rng_state(), before[1])


# -- what a user sees -------------------------------------------------------------------------------------------------


def test_step_says_what_it_did_and_statistics_count_it() -> None:
    members = train(donor_ratio=1.0)
    info = members[0].replacements[0]
    assert info.averaged_this_iteration is True and info.round == 1 and info.weights == pytest.approx((1 / 3,) * 3)
    age = f"{info.staleness_steps} step{'' if info.staleness_steps == 1 else 's'} old"
    assert names(info, "round 1", "1, 2, 3", age)
    packing = Packing(FlatState(Mixed()).entries)
    assert info.nbytes == 2 * packing.averaged_nbytes + packing.nbytes
    counts, infos = members[0].counts, members[0].infos
    assert counts.total_iterations == 60 and counts.num_replacements == len(members[0].replacements)
    assert counts.averaging_ranks == 3 * counts.num_replacements
    given_up = sum(1 for info in infos if info.abandoned)
    assert counts.agents_killed - counts.num_replacements - given_up in (0, 1)
    assert counts.received_nbytes >= counts.num_replacements * info.nbytes
    donor = members[3].counts
    assert donor.agents_killed == 0 and donor.version + sum(donor.unpublished.values()) == 30
    assert {name: found.count for name, found in donor.timing.items()} == {"publish": donor.version}
    assert members[0].counts.timing["apply"].count == counts.num_replacements


def test_failed_reads_are_counted_by_reasons_without_values() -> None:
    """Regression: each metric that had become worse added a reason to ``statistics().abandoned``."""
    flat, found = FlatState(Mixed()), set[str]()
    window, choice = SimpleNamespace(), Choice((1, 2), 1, floor=0.5, sign=1)
    reader = DonorReader((1, 2), window, Packing(flat.entries), flat, Counter(), chunk_nbytes=64)  # type: ignore[arg-type]
    for donors, metric in (((1, 2), 0.25), ((2,), 0.125), ((1,), None), ((2,), None)):
        record = None if metric is None else SimpleNamespace(metric=metric)
        window.published_by = AsyncMock(return_value=record)
        with pytest.raises(UnreadableError) as error:
            asyncio.run(reader.read(Replacement(round=1, began_at=0.0), replace(choice, donors=donors), deadline=1.0))
        found.add(str(error.value).partition(":")[0])
    assert len(found) == 2


def test_statistics_are_printed_as_tables(capsys: pytest.CaptureFixture[str]) -> None:
    async def main(world: ad.World) -> str:
        model = Mixed(float(world.rank))
        timing: dict[str, list[float]] = {}
        async with OneSidedSelectiveAveragingPolicy(
            model, sgd(model), average_every=2, replacement_mode="age", age_range=(4, 4), timing=timing
        ) as policy:
            for _ in range(40):
                await policy.step(0.0)
        assert timing["publish"] and timing["read"] and timing["apply"]
        if world.rank == 0:
            policy.print_stats()
            policy.print_time()
        return str(policy.statistics())

    text = run(main, 2)[0]
    printed = capsys.readouterr().out
    for words in ("agents killed", "averaging ranks", "num replacements", "total iterations", "received"):
        assert words in printed and words in text, printed
    assert (
        "publish" in printed
        and " ms at most" in printed
        and printed.startswith("OneSidedSelectiveAveragingPolicy, rank 0\n")
    )


def test_the_porting_face_has_the_seeds_form() -> None:
    async def main(world: ad.World) -> int:
        model = Mixed(float(world.rank))
        optimizer, count = sgd(model), 0
        async with OneSidedSelectiveAveragingPolicy(
            model, optimizer, average_every=2, replacement_mode="worst_ratio", metric=lambda: float(world.rank)
        ) as policy:
            for iteration in range(60):
                same, also, info = await policy(iteration, model, optimizer)
                assert same is model and also is optimizer and set(info) >= {"averaged_this_iteration", "donors"}
                count += info["averaged_this_iteration"]
            with pytest.raises(ValueError, match="another model"):
                await policy(60, Mixed(), optimizer, 0.0)
        return count

    counts = run(main, 3)
    assert counts[0] >= 3 and counts[1:] == [0, 0]


def test_a_metric_is_asked_for_only_when_it_is_due() -> None:
    asked = [0]

    def metric() -> float:
        asked[0] += 1
        return 1.0

    async def main(world: ad.World) -> None:
        model = Mixed()
        async with OneSidedSelectiveAveragingPolicy(
            model, sgd(model), average_every=10, age_range=(999, 999)
        ) as policy:
            for _ in range(9):
                await policy.step()
            with pytest.raises(ValueError, match=naming(9)):
                await policy.step()
            for _ in range(20):
                await policy.step(metric if world.rank == 0 else 1.0)

    run(main, 2)
    assert asked == [2]


def test_one_rank_does_nothing_but_checks_its_input() -> None:
    async def main(world: ad.World) -> None:
        model = Mixed(1.0)
        start = clone_state(model)
        async with OneSidedSelectiveAveragingPolicy(model, sgd(model), average_every=2, age_range=(1, 1)) as policy:
            for _ in range(9):
                assert not await policy.step(0.0)
            with pytest.raises(ValueError, match=naming(9)):
                await policy.step()
        assert equal_states(clone_state(model), start)
        assert policy.statistics().total_iterations == 10 and policy.statistics().num_replacements == 0

    run(main, 1)


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"replacement_mode": "old"}, ["replacement_mode", "'old'", "'age', 'threshold', 'worst_ratio'"]),
        ({"averaging_strategy": "reset_weights"}, ["reset_weights", "model_builder"]),
        ({"momentum": 1.01}, ["momentum", "1.01", "0", "1"]),
        ({"model_builder": 3}, ["model_builder", "3"]),
        ({"metric": 3.0}, ["metric", "3.0"]),
        ({"optimizer_state": "drop"}, ["optimizer_state", "'drop'", "'keep', 'reset'"]),
        ({"read_timeout_s": 0}, ["read_timeout_s", "0"]),
        ({"drain_timeout_s": -2}, ["drain_timeout_s", "-2", "0"]),
        ({"on_event": 7}, ["on_event", "7"]),
        ({"average_every": 0}, ["average_every", "0", "1"]),
        ({"name": 7}, ["name", "7"]),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_one_sided_policy_refuses_an_option_out_of_range(options: dict[str, Any], facts: list[str]) -> None:
    model = Mixed()
    with pytest.raises((ValueError, TypeError)) as caught:
        OneSidedSelectiveAveragingPolicy(model, sgd(model), **{"average_every": 1, **options})
    assert names(caught.value, *facts), caught.value


def test_options_and_models_that_differ_are_refused_at_the_start() -> None:
    async def main(world: ad.World) -> list[str]:
        said = []
        for build, options in (
            (Mixed, {"age_range": (5, 5 + world.rank)}),
            (lambda: Mixed(width=4 + world.rank), {}),
        ):
            model = build()
            with pytest.raises(ad.DisagreementError) as caught:
                async with OneSidedSelectiveAveragingPolicy(model, sgd(model), average_every=1, **options):
                    pass
            said.append(str(caught.value))
        return said

    for options, models in run(main, 2):
        assert names(options, "age_range", [5, 5], "rank 0", [5, 6], "rank 1")
        assert names(models, "'embed.weight'", (5, 3), (4, 3))


def test_a_model_builder_of_another_model_is_named() -> None:
    with pytest.raises(ValueError, match="model_builder"):
        train(averaging_strategy="reset_weights", model_builder=lambda: Mixed(width=9))


def test_a_hostile_grant_is_answered_by_an_abort() -> None:
    """Sizes that no reader of ours asks for: neither more than there is nor millions of chunks."""

    async def main(world: ad.World) -> list[str]:
        scope = world.services.next_scope(world.group.ranks, "test")
        mine: Any = await one_sided.open_versioned_window(
            world.services,
            world.agreements,
            world.group,
            100,
            scope=scope,
            chunk_nbytes=64,
        )
        memory = mine.begin()
        assert memory is not None
        mine.publish(0, 1.0)
        await ad.barrier()
        said = []
        if world.rank == 0:
            record = await mine.published_by(1)
            assert record is not None
            for sizes in ((64, 64), (1,) * 100, (50, 50)):
                mine._chunk_nbytes = sizes[0]
                targets = [memoryview(bytearray(size)) for size in sizes]
                with pytest.raises(one_sided.OutdatedError) as caught:
                    await mine.read(1, record, targets, lambda index: None, deadline=world.time() + 30)
                said.append(str(caught.value))
        await ad.barrier()
        await mine.close(world.time() + 10)
        return said

    assert len(run(main, 2)[0]) == 3


def test_a_read_is_cancelled_after_its_window_was_closed() -> None:
    """Regression: it raised ClosedError instead, because the channel for the message to the sender was closed."""

    async def main(world: ad.World) -> bool:
        services = world.services
        scope = services.next_scope(world.group.ranks, "test")
        mine = await one_sided.open_versioned_window(services, world.agreements, world.group, 100, scope=scope)
        assert mine.begin() is not None
        mine.publish(0, 1.0)
        await ad.barrier()
        was_reading = False
        if world.rank == 0:
            record = await mine.published_by(1)
            assert record is not None
            targets = [memoryview(bytearray(100))]
            task = asyncio.ensure_future(mine.read(1, record, targets, lambda index: None, deadline=math.inf))
            await asyncio.sleep(0)
            was_reading = services.slots.taken_count == 1
            await mine.close(None)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await ad.barrier()
        await mine.close(None)
        return was_reading

    assert run(main, 2) == [True, False]
