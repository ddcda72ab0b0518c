"""Tests the cost of averages: collectives and memory. Their values are tested by ``helpers.cases_models``."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import asyncdist as ad
from asyncdist.collectives.algorithms import shared_memory_reduce
from asyncdist.collectives.collectives import Collectives


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.BatchNorm1d(8) for _ in range(30)])
        self.small = nn.ParameterList([torch.ones(3).bfloat16() for _ in range(30)])
        self.large = nn.ParameterList([torch.ones(3).double() for _ in range(30)])


def test_one_collective_per_dtype_and_not_one_per_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small all-gather, in which the ranks compare their models, is counted in addition."""
    counts: Counter[tuple[int, str, torch.dtype]] = Counter()
    for name in ("all_mean", "broadcast", "all_gather", "gather"):
        original = getattr(Collectives, name)

        async def counted(
            self: Any, tensor: torch.Tensor, *args: Any, name: str = name, original: Any = original
        ) -> Any:
            counts[self._rank, name, tensor.dtype] += 1
            return await original(self, tensor, *args)

        monkeypatch.setattr(Collectives, name, counted)

    async def main(world: ad.World) -> dict[str, dict[tuple[str, torch.dtype], int]]:
        model = Several()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        found = {}
        for call in (ad.average_models, ad.average_gradients):
            counts.update({key: -count for key, count in counts.items()})
            await world.collectives.barrier(world.group)
            await call(model)
            found[call.__name__] = {
                key[1:]: count
                for key, count in counts.items()
                if key[0] == world.rank and count and key[1] != "barrier"
            }
            await world.collectives.barrier(world.group)
        return found

    frame = {("all_gather", torch.uint8): 1}
    for found in ad.run_local(main, ranks=2, strict=True):
        assert found["average_models"] == frame | {
            ("all_mean", torch.float32): 2,  # the float32 entries, and the bfloat16 ones, widened
            ("all_mean", torch.float64): 1,
            ("broadcast", torch.int64): 1,
        }
        assert found["average_gradients"] == frame | {
            ("all_mean", torch.float32): 1,
            ("all_mean", torch.float64): 1,
        }


async def test_the_kept_memory_goes_with_the_model() -> None:
    async with ad.open_world(transport="local") as world:
        model = nn.Linear(100, 100)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        await ad.average_models(model)
        await ad.average_gradients(model)
        snapshot, (flats, *rest) = (world.scratch.take(model, purpose) for purpose in ("state", "gradients"))
        kept = [weakref.ref(tensor) for tensor in (*snapshot.buffers.tensors.values(), *flats.values())]
        assert len(kept) == 2
        world.scratch.give_back(model, "state", snapshot)
        world.scratch.give_back(model, "gradients", (flats, *rest))
        await ad.average_models(model)
        await ad.average_gradients(model)
        assert world.scratch.take(model, "state") is snapshot
        assert world.scratch.take(model, "gradients")[0] == flats
        world.scratch.give_back(model, "state", snapshot)
        world.scratch.give_back(model, "gradients", (flats, *rest))
        gone = weakref.ref(model)
        del model, parameter, snapshot, flats, rest
        gc.collect()
        assert gone() is None and not any(tensor() is not None for tensor in kept)


def test_a_model_that_has_changed_since() -> None:
    """Cached buffers of a model are replaced if its layers, its dtype or its gradients have changed."""

    async def main(world: ad.World) -> None:
        model = nn.Sequential(nn.Linear(2, 2))

        async def average_weights() -> None:
            for number, parameter in enumerate(model.parameters()):
                nn.init.constant_(parameter, 4.0 * world.rank + number)
            await ad.average_models(model)
            found = [parameter.unique().tolist() for parameter in model.parameters()]
            assert found == [[2.0 + number] for number in range(len(found))]

        async def average_gradients() -> None:
            for number, parameter in enumerate(model.parameters()):
                if parameter.grad is not None:
                    parameter.grad.fill_(4.0 * world.rank + number)
            await ad.average_gradients(model)
            found = [None if p.grad is None else p.grad.unique().tolist() for p in model.parameters()]
            assert found == [None if p.grad is None else [2.0 + n] for n, p in enumerate(model.parameters())]

        await average_weights()
        model.append(nn.Linear(3, 3))
        await average_weights()
        model.double()
        await average_weights()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        await average_gradients()
        model[0].weight.grad = None
        await average_gradients()
        assert model[0].weight.grad is None and model[1].weight.grad is not None

    assert ad.run_local(main, ranks=2, strict=True) == [None, None]


@pytest.mark.parametrize("average", [ad.average_models, ad.average_gradients])
@pytest.mark.parametrize("shares", [False, True])
def test_buffers_kept_in_inference_mode_serve_the_next_call(
    average: Any, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: cached buffers were inference tensors, which only that mode may write, so the job failed."""
    monkeypatch.setattr(shared_memory_reduce, "SHARED_NBYTES_MIN", 0)

    async def main(world: ad.World) -> bool:
        transport = world.services.engine.transport
        transport.capabilities = dataclasses.replace(transport.capabilities, shares_memory=shares)
        model = nn.Linear(3, 3)
        tensors = list(model.parameters())
        if average is ad.average_gradients:
            for parameter in tensors:
                parameter.grad = torch.zeros_like(parameter)
            tensors = [parameter.grad for parameter in tensors]
        for is_inference in (True, False):
            with torch.no_grad():
                for tensor in tensors:
                    tensor.fill_(float(world.rank))
            await ad.barrier()
            mode = torch.inference_mode(is_inference)
            if world.rank == 0:  # one mode for the ranks of a process
                mode.__enter__()
            await ad.barrier()
            await average(model)
            await ad.barrier()
            if world.rank == 0:
                mode.__exit__(None, None, None)
            await ad.barrier()
            assert all(bool((tensor == 0.5).all()) for tensor in tensors)
        return any(tensor.is_inference() for tensor in tensors)

    assert ad.run_local(main, ranks=2, strict=True) == [False] * 2


@pytest.mark.cuda
def test_gpu_tensors_stay_on_the_gpu_and_match_the_host_result() -> None:
    """Whole numbers: the mean is exact, wherever it is computed."""

    def made(rank: int) -> nn.Module:
        model = nn.Sequential(nn.Linear(300, 400), nn.BatchNorm1d(400))
        for number, tensor in enumerate(model.state_dict().values()):
            tensor.fill_(4 * rank + number)
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, 8 * rank + number)
        return model

    async def main(world: ad.World) -> list[Any]:
        found = []
        for device in ("cpu", "cuda"):
            model = made(world.rank).to(device)
            objects = [*model.state_dict(keep_vars=True).values(), *(p.grad for p in model.parameters())]
            await ad.average_models(model)
            await ad.average_gradients(model)
            rows = await ad.gather_distributed_data(torch.arange(3 * world.rank, device=device).reshape(-1, 3))
            assert all(tensor.device.type == device for tensor in [*objects, *([] if rows is None else [rows])])
            found.append([tensor.detach().cpu() for tensor in [*objects, *([] if rows is None else [rows])]])
        return found

    for here, there in ad.run_local(main, ranks=2, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(here, there, strict=True))
        assert here[0].unique().tolist() == [2.0]
