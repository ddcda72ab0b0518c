"""Tests snapshots of models on a GPU: started by one step, offered after the copy, with that step's values.

The policy's part runs everywhere, over a stand-in for a slow device; the device's own part needs one.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from scripts.one_sided import Applied, verify
from scripts.population import Mixed, State, Story, fill, flat_state as state_of, sgd
from support.seeds import in_ci
from torch import nn
from torch.overrides import TorchFunctionMode

import asyncdist as ad
from asyncdist.tensors import flat_state
from asyncdist.tensors.flat_state import FlatBuffers, FlatState
from protocols import (
    AsyncSelectiveAveragingPolicy,
    OneSidedSelectiveAveragingPolicy,
    OneSidedStatistics,
    PolicyEvent,
    SnapshotTaken,
)


class SlowCopy:
    """Keeps the values of its moment to itself; they appear in the buffers with the n-th test, and not before."""

    cancelled = False
    source = -1
    nbytes = 0
    rings = False

    def __init__(self, state: FlatState, into: FlatBuffers, test_count: int) -> None:
        self._hidden = state.new_buffers()
        state.snapshot(self._hidden)
        self._into = into
        self._tests_left = test_count
        for tensor in into.tensors.values():
            tensor.fill_(99)

    def test(self) -> bool:
        self._tests_left -= 1
        if self._tests_left == 0:
            for dtype, tensor in self._into.tensors.items():
                tensor.copy_(self._hidden.tensors[dtype])
        return self._tests_left <= 0

    def cancel(self) -> None:
        raise AssertionError("a copy cannot be taken back")


@pytest.fixture
def slow_device(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[SlowCopy]]:
    def install(test_count: int) -> list[SlowCopy]:
        copies: list[SlowCopy] = []

        def start_snapshot(state: FlatState, into: FlatBuffers) -> SlowCopy:
            copies.append(SlowCopy(state, into, test_count))
            return copies[-1]

        monkeypatch.setattr(FlatState, "start_snapshot", start_snapshot)
        return copies

    return install


async def train(world: ad.World, story: Story, steps: int) -> None:
    """Weights change in every step, to a number that says whose and when."""
    model = Mixed(world.rank)
    policy = AsyncSelectiveAveragingPolicy(
        model, sgd(model), average_every=2, replacement_ratio=0.25, on_event=story.listener(world.rank)
    )
    async with policy:
        for step in range(steps):
            fill(model, world.rank + step / 1024)
            story.before[world.rank] = state_of(model)
            await policy.step(float(world.rank))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "test_count"), in_ci(itertools.product(range(4), [2, 5, 40]), (0, 2), (1, 5), (0, 40))
)
def test_what_is_offered_is_what_the_step_saw(
    slow_device: Callable[[int], list[SlowCopy]], test_count: int, seed: int
) -> None:
    copies = slow_device(test_count)
    story = Story()
    report = ad.simulate(train, story, 300, ranks=4, seed=seed, strict=True)
    report.value()
    assert story.verify() >= 2, "too few averages were of snapshots copied late"
    assert len(copies) >= 6
    for (_, rank), state in story.snapshots.items():
        values = set(state["float32"].tolist())
        assert len(values) == 1, "a snapshot must contain the weights of one step only"
        assert rank <= min(values) < rank + 1


def test_a_round_that_ends_before_the_copy_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """``strict`` would name a snapshot in use and a pending request."""
    copies: list[SlowCopy] = []

    class LateCopy(SlowCopy):
        """Done when all ranks have left their policies."""

        def test(self) -> bool:
            return len(left) == 3 and super().test()

    def start_snapshot(state: FlatState, into: FlatBuffers) -> SlowCopy:
        copies.append(LateCopy(state, into, 1))
        return copies[-1]

    monkeypatch.setattr(FlatState, "start_snapshot", start_snapshot)
    story = Story()
    left: list[int] = []

    async def main(world: ad.World) -> None:
        await train(world, story, 40)
        left.append(world.rank)

    ad.run_local(main, ranks=3, strict=True)
    assert copies
    assert not story.snapshots


def test_a_model_in_host_memory_needs_no_device() -> None:
    model = nn.Linear(3, 2)
    state = FlatState(model)
    buffers = state.new_buffers()
    assert state.start_snapshot(buffers) is None
    assert torch.equal(buffers.views[0], model.weight)
    assert not any(tensor.is_pinned() for tensor in buffers.tensors.values()) or torch.cuda.is_available()


class OnDevice(nn.Parameter):
    """A parameter that claims to be in CUDA memory."""

    is_cuda = True
    done: ClassVar[list[str]] = []

    def record_stream(self, stream: Any) -> None:
        self.done.append(f"keep memory for {stream.name}")


class Stream:
    """Stands for a CUDA stream. An event is the name of its stream."""

    def __init__(self, name: str) -> None:
        self.name = name

    def wait_stream(self, other: Stream) -> None:
        OnDevice.done.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        OnDevice.done.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        return self.name


class Copies(TorchFunctionMode):
    """Notes each copy between tensors, and whether it conjugates or negates the values."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.copy_:
            assert kwargs == {"non_blocking": True}
            OnDevice.done.append("copy lazily" if args[1].is_conj() or args[1].is_neg() else "copy")
        return function(*args, **kwargs or {})


def test_a_copy_is_ordered_between_steps_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: torch conjugates a lazily conjugated parameter in host memory, before the device has written it."""
    monkeypatch.setattr(OnDevice, "done", [])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("training"))
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(flat_state, "copy_stream", lambda device: Stream("copying"))
    values = torch.ones(2), torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j]).conj().imag
    buffers = FlatState(nn.ParameterList(map(nn.Parameter, values))).new_buffers()
    state = FlatState(nn.ParameterList(map(OnDevice, values)))
    with Copies():
        copy = state.start_snapshot(buffers)
    assert copy is not None and copy._events == ["copying"]
    assert OnDevice.done == [
        "copying waits for training",
        *["copy", "keep memory for copying"] * 3,
        "training waits for copying",
    ]
    assert [view.tolist() for view in buffers.views] == [[1.0, 1.0], [1 - 2j], [-2.0]]


def test_a_model_builder_leaves_the_numbers_of_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: only the current GPU's generator was restored, and a rank's GPU need not be the current one."""
    states, restored = ["first GPU", "second GPU", "third GPU"], []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(states))
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: states)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", restored.extend)
    model = nn.Linear(2, 2)
    options: Any = {"averaging_strategy": "reset_weights", "model_builder": lambda: nn.Linear(2, 2)}
    AsyncSelectiveAveragingPolicy(model, sgd(model), average_every=2, **options)
    assert restored == states


@pytest.mark.slow
@pytest.mark.parametrize("test_count", [2, 7, 40])
def test_one_sided_policy_exposes_a_snapshot_once_it_is_copied(
    test_count: int, slow_device: Callable[[int], list[SlowCopy]]
) -> None:
    """Readers get older versions until the copy is complete, then the values of the step that started it."""
    copies = slow_device(test_count)
    snapshots: dict[tuple[int, int], State] = {}
    applied: list[Applied] = []

    async def main(world: ad.World) -> OneSidedStatistics:
        model = Mixed(world.rank)

        def on_event(event: PolicyEvent) -> None:
            state = {name: tensor.clone() for name, tensor in event.state.items()}
            if isinstance(event, SnapshotTaken):
                snapshots[world.rank, event.round] = state
                assert float(state["float64"][0]) == world.rank + event.iteration / 1024
            else:
                applied.append(Applied(world.rank, event, None, state))

        policy = OneSidedSelectiveAveragingPolicy(
            model, sgd(model), average_every=2, age_range=(6, 9), donor_ratio=1.0, on_event=on_event
        )
        async with policy:
            for step in range(200):
                fill(model, world.rank + step / 1024)
                await policy.step(1.0)
        return policy.statistics()

    found = ad.run_local(main, ranks=3, strict=True)
    for entry in applied:
        verify(entry, snapshots)
    assert len(applied) == sum(statistics.num_replacements for statistics in found) >= 10
    assert len(copies) >= sum(statistics.version for statistics in found) == len(snapshots)
    late = sum(statistics.unpublished.get("a device is still copying the last snapshot", 0) for statistics in found)
    assert test_count == 7 or bool(late) == (test_count == 40), late


@pytest.mark.cuda
def test_a_copy_from_the_gpu_has_the_weights_of_its_moment() -> None:
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8))).cuda()
    state = FlatState(model)
    buffers = state.new_buffers()
    assert all(tensor.is_pinned() for tensor in buffers.tensors.values())
    expected = [parameter.detach().cpu().clone() for parameter in model.parameters()]
    copy = state.start_snapshot(buffers)
    assert copy is not None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)  # queued behind the copy, whatever the host does meanwhile
    torch.cuda.synchronize()
    assert copy.test()
    for view, tensor in zip(buffers.views, expected, strict=True):
        assert torch.equal(view, tensor)


@pytest.mark.cuda
def test_a_copy_from_the_gpu_conjugates_lazy_values() -> None:
    values = torch.arange(1 << 22, dtype=torch.float32, device="cuda") + 1j
    state = FlatState(nn.ParameterList([nn.Parameter(values.conj())]))
    buffers = state.new_buffers()
    copy = state.start_snapshot(buffers)
    assert copy is not None
    torch.cuda.synchronize()
    assert copy.test() and torch.equal(buffers.views[0], values.cpu().conj().resolve_conj())


@pytest.mark.cuda
def test_averages_between_models_on_the_gpu_are_exact() -> None:
    story = Story()

    async def main(world: ad.World) -> None:
        model = nn.Linear(64, 64).cuda()
        nn.init.constant_(model.weight, float(world.rank))
        policy = AsyncSelectiveAveragingPolicy(
            model,
            torch.optim.SGD(model.parameters(), lr=0.0),
            average_every=2,
            replacement_ratio=0.25,
            on_event=story.listener(world.rank),
        )
        async with policy:
            for _ in range(200):
                await policy.step(float(world.rank))

    ad.run_local(main, ranks=4, strict=True)
    assert story.verify() >= 1
