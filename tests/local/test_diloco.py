"""Tests DiLoCo on ranks in one process and real time: a run against numpy, and other events of a training job."""

from __future__ import annotations

import asyncio
import functools
import gc
import itertools
import math
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scripts.population import Mixed, clone_state, equal_states, sgd, values
from support.local import run
from support.tokens import tokens_for
from torch import nn

import asyncdist as ad
from asyncdist.protocols.diloco.fragment_state import FragmentState
from asyncdist.protocols.exchange.layout.wire_layout import WireLayout
from asyncdist.protocols.exchange.rounds import RoundTransfers
from asyncdist.tensors.codecs import find_codec
from protocols import AsyncDiLoCoPolicy, AverageAllPolicy, DiLoCoPolicy, StepInfo

HALF = functools.partial(torch.optim.SGD, lr=0.5, momentum=0.5)


def linear(size: int = 3) -> nn.Module:
    model = nn.Linear(size, size, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    return model


def move(model: nn.Module, by: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(by)


def test_four_ranks_train_as_in_numpy() -> None:
    """Each rank follows the gradient of its own quadratic (x - rank)^2 / 2, with DiLoCo's default outer optimizer."""

    async def main(world: ad.World) -> list[float]:
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
        found = []
        async with DiLoCoPolicy(model, optimizer, average_every=4) as policy:
            for _ in range(40):
                loss = sum(((parameter - world.rank) ** 2).sum() / 2 for parameter in model.parameters())
                optimizer.zero_grad()
                loss.backward()  # type: ignore[union-attr]
                optimizer.step()
                info = await policy.step()
                if info:
                    assert info.donors == (0, 1, 2, 3)
                    (value,) = set(model.bias.tolist())
                    found.append(value)
        return found

    own, anchor, buffer, right = np.ones(4), 1.0, 0.0, []
    for step in range(40):
        own -= 0.125 * (own - np.arange(4))
        if step % 4 == 3:
            difference = anchor - own.mean()
            buffer = 0.9 * buffer + difference
            anchor -= 0.7 * (difference + 0.9 * buffer)
            own[:] = anchor
            right.append(anchor)
    for found in run(main, 4):
        assert np.allclose(found, right, rtol=0, atol=1e-13)


def test_a_step_that_times_out_leaves_the_ranks_equal() -> None:
    """The rank that was cancelled continues, and takes the mean of the same round in a later step."""

    async def main(world: ad.World) -> tuple[int, dict[int, float], int]:
        model, applied, cancelled = linear(), {}, 0
        async with DiLoCoPolicy(
            model, sgd(model), average_every=2, outer_optimizer=HALF, on_event=lambda event: None
        ) as policy:
            step = 0
            while step < 20 or len(applied) < 8:
                step += 1
                move(model, world.rank + 1.0)
                if world.rank == 0 and step in (2, 5, 9):
                    step_task = asyncio.ensure_future(policy.step())
                    await asyncio.sleep(0)
                    step_task.cancel()
                    try:
                        info = await step_task
                    except asyncio.CancelledError:
                        cancelled += 1
                        continue
                elif world.rank == 0 and step == 13:
                    try:
                        info = await asyncio.wait_for(policy.step(), 1e-9)
                    except TimeoutError:
                        cancelled += 1
                        continue
                else:
                    info = await policy.step()
                if info:
                    applied[info.round] = model.bias[0].item()
        return cancelled, applied, policy.statistics().average_count

    results = run(main, 3)
    assert results[0][0] >= 3
    for number in range(1, 9):
        assert len({applied[number] for _, applied, _ in results}) == 1, f"round {number}"


def bytes_of_encoded_vectors() -> int:
    """Return the size of all living uint8 tensors in this process."""
    gc.collect()
    found = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.dtype == torch.uint8]
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in found}.values())


@pytest.mark.slow
def test_memory_is_bounded_over_many_rounds() -> None:
    """120 rounds of three fragments in flight keep no more encoded vectors than the first 20."""

    async def main(world: ad.World) -> tuple[int, int]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(50, 50) for _ in range(3)))
        sizes = []
        options: dict[str, Any] = {"fragments": 3, "overlap_steps": 2, "wire": "int8", "error_feedback": 0.9}
        async with DiLoCoPolicy(model, sgd(model), average_every=3, **options) as policy:
            for step in range(120):
                move(model, 0.01 * (world.rank + 1))
                await policy.step()
                if step in (20, 119):
                    sizes.append(bytes_of_encoded_vectors())
        return sizes[0], sizes[1]

    model_nbytes = 3 * 51 * 50  # encoded as int8
    for early, late in run(main, 2):
        assert model_nbytes < late <= early + 2 * model_nbytes


def test_the_model_and_the_policy_are_freed_at_the_end() -> None:
    references: list[Any] = []

    async def main(world: ad.World) -> None:
        model = linear()
        async with DiLoCoPolicy(model, sgd(model), average_every=1) as policy:
            for _ in range(3):
                await policy.step()
            references.append(weakref.ref(policy._fragments[0].anchors[0].untyped_storage()))
            references.append(weakref.ref(policy))

    run(main, 2)
    gc.collect()
    assert references[1::2] and all(reference() is None for reference in references[1::2])


def test_frozen_parameters_may_be_left_out() -> None:
    async def main(world: ad.World) -> tuple[set[float], set[float]]:
        model = nn.Sequential(linear(), linear())
        model[0].requires_grad_(False)
        model[0].weight.fill_(7.0)
        optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
        async with DiLoCoPolicy(
            model, optimizer, average_every=2, parameters="trainable", outer_optimizer=None
        ) as policy:
            for _ in range(2):
                move(model, float(world.rank))
                info = await policy.step()
            assert info.wire_nbytes == 12 * 8
        return set(model[0].weight.flatten().tolist()), set(model[1].weight.flatten().tolist())

    assert run(main, 3) == [({7.0}, {3.0})] * 3


def test_a_step_reports_all_fragments_that_it_averages() -> None:
    """Regression: in the warm-up, only the last fragment was reported, and its rounds alone were counted."""

    async def main(world: ad.World) -> tuple[list[tuple[int, ...]], int, list[int]]:
        model, rounds = nn.Sequential(linear(), linear(2)), []

        def note(_: float, kind: str, fields: Any) -> None:
            if kind == "applied":
                rounds.append(fields[1])

        world.services.events.sink = note
        options: dict[str, Any] = {"fragments": 2, "warmup_steps": 2, "outer_optimizer": None}
        async with DiLoCoPolicy(model, sgd(model), average_every=4, **options) as policy:
            found = [await policy.step() for _ in range(4)]
            counted = policy.statistics().average_count
        parts = [tuple(each.fragment for each in info.parts or (info,)) for info in found]
        assert found[0].nbytes == sum(part.nbytes for part in found[0].parts) == (12 + 6) * 8
        return parts, counted, rounds

    parts = [(0, 1), (0, 1), (-1,), (0,)]
    assert run(main, 2) == [(parts, 5, [1, 2, 3, 4, 5])] * 2


def test_a_model_on_the_meta_device_is_refused_by_name() -> None:
    model = nn.Linear(2, 2, device="meta")
    with pytest.raises((ValueError, TypeError, NotImplementedError), match="meta"):
        DiLoCoPolicy(model, sgd(model), average_every=1)


def test_two_policies_of_one_rank_do_not_mix() -> None:
    async def main(world: ad.World) -> list[Any]:
        one, two, three = linear(), linear(2), linear(2)
        own = await world.new_group([0, 2] if world.rank != 1 else [1])
        async with (
            DiLoCoPolicy(one, sgd(one), average_every=1, outer_optimizer=None, name="one") as first,
            DiLoCoPolicy(two, sgd(two), average_every=2, outer_optimizer=None, name="two") as second,
        ):
            for _ in range(4):
                move(one, float(world.rank))
                move(two, world.rank * 10.0)
                await asyncio.gather(first.step(), second.step())
            if world.rank != 1:
                async with AverageAllPolicy(three, sgd(three), average_every=1, group=own) as third:
                    move(three, float(world.rank))
                    await third.step()
                    await first.step()
            else:
                await first.step()
        return [each.bias[0].item() for each in (one, two, three)]

    assert run(main, 3) == [[5.0, 41.0, 2.0], [5.0, 41.0, 1.0], [5.0, 41.0, 2.0]]


def test_a_subset_of_the_ranks_averages() -> None:
    async def main(world: ad.World) -> float:
        model = linear()
        move(model, float(world.rank) - 1.0)
        if world.rank in (1, 3):
            group = await ad.new_group([1, 3])
            async with DiLoCoPolicy(model, sgd(model), average_every=1, group=group, outer_optimizer=None) as policy:
                info = await policy.step()
                assert info.donors == (1, 3)
        return model.bias[0].item()

    assert run(main, 4) == [0.0, 2.0, 2.0, 2.0]


def test_training_in_another_thread_overlaps_the_exchange() -> None:
    async def main(world: ad.World) -> tuple[int, ...]:
        model = linear()
        rounds = []
        async with DiLoCoPolicy(model, sgd(model), average_every=4, overlap_steps=3, mixing=0.5) as policy:
            for _ in range(16):
                await world.compute(move, model, world.rank + 1.0)
                info = await policy.step()
                rounds += [info.round] if info else []
            busy = asyncio.ensure_future(world.compute(move, model, 0.0))
            await asyncio.sleep(0)
            with pytest.raises(ad.BusyError):
                await policy.step()
            await busy
        return tuple(rounds)

    assert run(main, 2) == [(1, 2, 3)] * 2


def test_an_error_in_one_ranks_loop_ends_the_job_with_it() -> None:
    async def main(world: ad.World) -> None:
        model = linear()
        async with DiLoCoPolicy(model, sgd(model), average_every=2) as policy:
            for step in range(8):
                if world.rank == 1 and step == 5:
                    raise ZeroDivisionError("of rank 1")
                await policy.step()

    with pytest.raises(ZeroDivisionError, match="of rank 1"):
        run(main, 3)


def test_an_error_that_one_rank_handles_ends_its_part_alone() -> None:
    """Leaving the block by an error withdraws the rank's contribution; the others continue without the rank."""

    async def main(world: ad.World) -> list[tuple[int, ...]]:
        model, donors = linear(), []
        try:
            async with DiLoCoPolicy(model, sgd(model), average_every=2) as policy:
                for step in range(8):
                    if world.rank == 0 and step == 5:
                        raise ZeroDivisionError
                    info = await policy.step()
                    donors += [info.donors] if info else []
        except ZeroDivisionError:
            pass
        return donors

    results = run(main, 3)
    assert results[0] == [(0, 1, 2)] * 2
    assert results[1] == results[2] == [(0, 1, 2)] * 2 + [(1, 2)] * 2


def test_weights_change_only_inside_step() -> None:
    async def main(world: ad.World) -> None:
        model = Mixed(1.0)
        async with DiLoCoPolicy(model, sgd(model), average_every=3, overlap_steps=2) as policy:
            for _ in range(12):
                move(model, world.rank + 1.0)
                before = clone_state(model)
                for _ in range(20):
                    await world.progress()
                assert equal_states(before, clone_state(model))
                info = await policy.step()
                assert bool(info) != equal_states(before, clone_state(model))

    run(main, 2)


def test_an_optimizer_is_reset_at_each_average_on_request() -> None:
    async def main(world: ad.World) -> list[bool]:
        model = linear()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        found = []
        async with DiLoCoPolicy(model, optimizer, average_every=2, optimizer_state="reset") as policy:
            for _ in range(4):
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
                await policy.step()
                found.append(bool(optimizer.state))
        return found

    assert run(main, 2) == [[True, False, True, False]] * 2


def test_one_rank_alone_moves_its_anchor() -> None:
    async def main(world: ad.World) -> tuple[set[float], StepInfo]:
        model = linear()
        async with DiLoCoPolicy(model, sgd(model), average_every=2, outer_optimizer=HALF) as policy:
            for _ in range(2):
                move(model, 1.0)
                info = await policy.step()
        return values(model, floating=True), info

    ((found, info),) = run(main, 1)
    assert found == {2.0} and info.donors == (0,) and info.outer_norm == pytest.approx(2.0 * 12**0.5)


@pytest.mark.parametrize("tokens", [0, -1.0, float("nan"), float("inf"), "many"])
def test_a_wrong_number_of_tokens_is_refused(tokens: Any) -> None:
    async def main(world: ad.World) -> None:
        model = linear()
        async with DiLoCoPolicy(model, sgd(model), average_every=2, weights="tokens") as policy:
            with pytest.raises((ValueError, TypeError), match="tokens"):
                await policy.step(tokens=tokens)
            await policy.step(tokens=3)
            info = await policy.step(tokens=world.rank + 1)
        assert info.weights == pytest.approx((4 / 9, 5 / 9)), "a refused token count must not change the weights"

    run(main, 2)


def test_a_positional_number_of_tokens_is_refused() -> None:
    """Regression: it was taken for a metric and ignored, so all ranks had equal weights."""

    async def main(world: ad.World) -> None:
        for make in (DiLoCoPolicy, AsyncDiLoCoPolicy):
            model = linear()
            options: Any = {"average_every": 2, "weights": "tokens"}
            async with make(model, sgd(model), **options) as policy:
                with pytest.raises(TypeError, match=r"by name: step\(tokens=n\)"):
                    await policy.step(5)
                await policy.step(0.25, tokens=3)

    run(main, 2)


class Masked(nn.Module):
    """A layer with masks that contain -inf: a frozen parameter and a buffer."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()
        self.frozen = nn.Parameter(torch.full((2, 2), -math.inf).triu(1), requires_grad=False)
        self.register_buffer("mask", torch.full((2, 2), -math.inf).triu(1))


@pytest.mark.parametrize("policy", [DiLoCoPolicy, AsyncDiLoCoPolicy])
@pytest.mark.parametrize("options", [{}, {"weights": "tokens"}, {"wire": "int8"}], ids=str)
def test_masks_with_infinities_are_averaged_like_all_else(policy: Any, options: dict[str, Any]) -> None:
    """Regression: a frozen mask made each contribution NaN, so no round had a donor, and training was undone."""

    async def main(world: ad.World) -> bool:
        model, infos = Masked(), []
        async with policy(model, sgd(model), average_every=1, **options) as averages:
            for _ in range(6):
                move(model.layer, world.rank + 1.0)
                infos.append(await averages.step(tokens=tokens_for(averages, world.rank + 1)))
        expected = Masked()
        assert torch.equal(model.frozen, expected.frozen) and torch.equal(model.mask, expected.mask)
        assert not any(info.recovered for info in infos)
        return any(info.donors for info in infos)

    assert any(run(main, 2))


def test_a_rank_not_finite_at_the_capture_takes_the_mean() -> None:
    """Its own weights at the capture are unknown, so it has no progress that it could keep."""

    async def main(world: ad.World) -> list[float]:
        model = linear()
        options: Any = {"average_every": 4, "overlap_steps": 2, "mixing": 0.5, "outer_optimizer": None}
        async with DiLoCoPolicy(model, sgd(model), **options) as policy:
            for step in range(6):
                move(model, 1.0)
                if world.rank and step == 3:
                    with torch.no_grad():
                        model.weight.fill_(math.nan)
                if world.rank and step == 4:
                    with torch.no_grad():
                        model.weight.fill_(100.0)
                await policy.step()
        return model.weight.flatten().tolist()

    one, two = run(main, 2)
    assert one == [0.5 * 7.0 + 0.5 * 5.0] * 9 and two == [5.0] * 9


@pytest.mark.parametrize("wire", ["float32", "int8"])
def test_a_capture_without_memory_is_made_again(wire: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the rank's round counted as contributed, and all ranks waited for it forever."""
    capture, calls = FragmentState.capture, itertools.count()

    def fail_once(self: FragmentState, *arguments: Any) -> float:
        if next(calls) == 1:
            raise torch.OutOfMemoryError("no memory")
        return capture(self, *arguments)

    monkeypatch.setattr(FragmentState, "capture", fail_once)

    async def main(world: ad.World) -> tuple[int, int]:
        model, failures = linear().float(), 0
        options: Any = {"wire": wire, "error_feedback": 0.9 if wire == "int8" else None}
        async with DiLoCoPolicy(model, sgd(model), average_every=2, outer_optimizer=HALF, **options) as policy:
            for _ in range(8):
                move(model, world.rank + 1.0)
                try:
                    await policy.step()
                except torch.OutOfMemoryError:
                    failures += 1
        return failures, policy.statistics().average_count

    results = run(main, 2)
    assert sum(failures for failures, _ in results) == 1
    assert min(count for _, count in results) >= 3


def test_fragments_without_values_take_no_memory() -> None:
    """Regression: of a replica's rank without a part of a fragment, two blocks were lost in each round."""
    layout = WireLayout([], (), set(), 2, find_codec("float32"))
    part: Any = SimpleNamespace(layout=layout, version=0, holds_mean=False, is_frequent=True)
    services: Any = SimpleNamespace(rank=0, shares_memory=False)
    transfers = RoundTransfers(services, SimpleNamespace(), [part], is_overlapped=False)  # type: ignore[arg-type]
    assert [transfers.new_encoded(0) for _ in range(3)] == [[], [], []]
    assert not transfers._in_use


@pytest.mark.parametrize("wire", ["float32", "int8", "topk"])
def test_a_fragment_of_an_empty_parameter_is_exchanged(wire: str) -> None:
    """Regression: with a codec, ``step`` raised ValueError of zip."""

    async def main(world: ad.World) -> int:
        model = nn.ParameterDict({"a": torch.zeros(40), "e": torch.zeros(0)})
        options: Any = {"wire": wire, "fragments": 2, "fragment_pattern": [["a"], ["e"]], "error_feedback": 1.0}
        async with DiLoCoPolicy(model, sgd(model), average_every=2, **options) as policy:
            for _ in range(6):
                move(model, world.rank + 1.0)
                await policy.step()
        return policy.statistics().average_count

    assert min(run(main, 2)) > 2


class Halves:
    """A user's codec. Its text contains its address, which differs between ranks."""

    name, for_states, block = "halves", False, 1

    def nbytes(self, count: int) -> int:
        return 2 * count

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(values.to(torch.float16).view(torch.uint8))

    def decode(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(encoded.clone().view(torch.float16))


@pytest.mark.parametrize("kind", [DiLoCoPolicy, AsyncDiLoCoPolicy])
def test_each_rank_may_pass_its_own_object_of_a_users_codec(kind: Any) -> None:
    """Regression: the ranks compared the addresses of their codecs."""

    async def main(world: ad.World) -> int:
        model = linear()
        async with kind(model, torch.optim.SGD(model.parameters(), lr=0.1), average_every=2, wire=Halves()) as policy:
            await policy.step()
        return policy.iteration

    assert ad.simulate(main, ranks=2, seed=1).results == (1, 1)


@pytest.mark.parametrize("differs", [False, True])
def test_a_long_fragment_pattern_is_compared_by_its_checksum(differs: bool) -> None:
    """Regression: with 1,500 names, the start failed because its message was larger than a frame."""

    async def main(world: ad.World) -> int:
        torch.manual_seed(0)
        names = [f"decoder_layer_{number}_mixture_of_experts_expert_projection" for number in range(1500)]
        model = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in names})
        pattern = [names[:-1], names[-1:]] if differs and world.rank else [names[::2], names[1::2]]
        options: dict[str, Any] = {"average_every": 4, "fragments": 2, "fragment_pattern": pattern}
        async with DiLoCoPolicy(model, torch.optim.SGD(model.parameters(), lr=0.1), **options) as policy:
            await policy.step()
        return policy.iteration

    if not differs:
        assert ad.simulate(main, ranks=2, seed=1).results == (1, 1)
        return
    with pytest.raises(ad.DisagreementError, match=r"fragment_pattern.*characters, CRC-32"):
        ad.simulate(main, ranks=2, seed=1)
