"""Tests ranks and policies on a GPU: averages are exact there, training continues, and streams and graphs are kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor

import asyncdist as ad
from asyncdist.tensors.optimizers.reset import reset_optimizer_state
from protocols import AsyncSelectiveAveragingPolicy, AverageAllPolicy, AverageApplied, DiLoCoPolicy, PolicyEvent

pytestmark = pytest.mark.cuda


def test_a_part_of_the_own_weights_is_kept_as_on_the_host() -> None:
    def trained(device: str) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []

        async def main(world: ad.World) -> None:
            torch.manual_seed(world.rank)
            model = nn.Sequential(nn.Linear(33, 65), nn.BatchNorm1d(65), nn.Linear(65, 3).double()).to(device)

            def note(event: PolicyEvent) -> None:
                if isinstance(event, AverageApplied):
                    seen.append(torch.cat([tensor.detach().cpu().double().flatten() for tensor in model.parameters()]))

            policy = AsyncSelectiveAveragingPolicy(
                model,
                torch.optim.Adam(model.parameters(), lr=0.0),
                average_every=4,
                replacement_ratio=0.25,
                momentum=0.3,
                on_event=note,
            )
            async with policy:
                while not (seen and world.rank == 0) and policy.iteration < 500:
                    await policy.step(float(world.rank))

        ad.run_local(main, ranks=4, strict=True)
        return seen

    here, there = trained("cuda"), trained("cpu")
    assert here and there and torch.equal(here[0], there[0])


@pytest.mark.parametrize(
    "options", [{"wire": "int8"}, {"wire": "topk", "error_feedback": 0.9}, {"wire": "q4"}], ids=str
)
def test_contributions_encoded_there_have_the_same_bits(options: dict[str, Any]) -> None:
    def trained(device: str) -> list[torch.Tensor]:
        ended: list[torch.Tensor] = []

        async def main(world: ad.World) -> None:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(1300, 5000), nn.BatchNorm1d(5000), nn.Linear(5000, 3)).to(device)
            noise = torch.Generator().manual_seed(world.rank)
            async with DiLoCoPolicy(model, torch.optim.SGD(model.parameters()), average_every=2, **options) as policy:
                for _ in range(8):
                    with torch.no_grad():
                        for each in model.parameters():
                            each.add_(torch.randn(each.shape, generator=noise).to(device))
                    await policy.step()
            ended.extend(each.detach().cpu() for each in model.parameters())

        ad.run_local(main, ranks=2, strict=True)
        return ended

    assert all(torch.equal(one, two) for one, two in zip(trained("cuda"), trained("cpu"), strict=True))


@pytest.mark.parametrize("state", ["keep", "reset"])
@pytest.mark.parametrize(
    "is_compiled", [False, pytest.param(True, marks=pytest.mark.workers)], ids=["plain", "compiled"]
)
def test_mixed_precision_with_a_scaler_goes_on_after_an_average(state: str, is_compiled: bool) -> None:
    async def main(world: ad.World) -> int:
        torch.manual_seed(world.rank)
        model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).to(world.device)
        network = torch.compile(model) if is_compiled else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        scaler = torch.amp.GradScaler("cuda")
        policy = AsyncSelectiveAveragingPolicy(
            network, optimizer, average_every=4, replacement_ratio=0.25, optimizer_state=state
        )
        first = last = 0.0
        async with policy:
            for _ in range(120):
                inputs = torch.randn(32, 16, device=world.device)
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = (network(inputs).squeeze(1) - inputs.sum(1)).square().mean()
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                await policy.step(-loss)
                last = float(loss.detach())
                first = first or last
        assert last < first
        return policy.statistics().replacement_count

    with inductor.patch(compile_threads=1):  # no pool of processes, which would remain
        assert sum(ad.run_local(main, ranks=4, strict=True)) >= 1


def test_everybody_takes_the_mean_of_all() -> None:
    async def main(world: ad.World) -> list[float]:
        model = nn.Linear(8, 8).to(world.device)
        nn.init.constant_(model.weight, float(world.rank))
        nn.init.constant_(model.bias, 2.0 * world.rank)
        policy = AverageAllPolicy(model, torch.optim.SGD(model.parameters(), lr=0.0), average_every=3)
        async with policy:
            for _ in range(12):
                await policy.step()
        return [float(tensor.detach().unique()) for tensor in model.parameters()]

    assert ad.run_local(main, ranks=3, strict=True) == [[1.0, 2.0]] * 3


def test_checkpoint_restores_gpu_weights_and_random_state(tmp_path: object) -> None:
    async def main(world: ad.World) -> bool:
        model = nn.Linear(8, 8).to(world.device)
        optimizer = torch.optim.Adam(model.parameters())
        torch.randn(1, device=world.device)
        await ad.save_population(str(tmp_path), model, optimizer)
        kept, drawn = model.weight.detach().clone(), torch.randn(4, device=world.device)
        with torch.no_grad():
            model.weight.zero_()
        await ad.load_population(str(tmp_path), model, optimizer)
        return torch.equal(model.weight, kept) and torch.equal(torch.randn(4, device=world.device), drawn)

    assert ad.run_local(main, ranks=1) == [True]


def test_a_cuda_graph_sees_the_weights_of_an_average() -> None:
    """A captured forward pass reads the parameters at their addresses, which an average must not change."""

    async def main(world: ad.World) -> float:
        model = nn.Linear(8, 1, bias=False).to(world.device)
        nn.init.constant_(model.weight, float(world.rank))
        inputs = torch.ones(1, 8, device=world.device)
        stream = torch.cuda.Stream()
        with torch.no_grad(), torch.cuda.stream(stream):
            model(inputs)  # cuBLAS allocates its workspace before the capture
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            outputs = model(inputs)
        await ad.average_models(model)
        graph.replay()
        torch.cuda.synchronize()
        return float(outputs)

    assert ad.run_local(main, ranks=2, strict=True) == [4.0, 4.0]


def test_a_reset_reaches_a_captured_optimizer_step() -> None:
    weight = nn.Parameter(torch.ones(3, device="cuda"))
    weight.grad = torch.tensor([1.0, -2.0, 3.0], device="cuda")
    optimizer = torch.optim.Adam([weight], lr=0.1, capturable=True)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        optimizer.step()  # makes the state before the capture
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()

    def step() -> list[float]:
        with torch.no_grad():
            weight.fill_(1.0)
        graph.replay()
        return weight.tolist()

    reset_optimizer_state(optimizer)
    first = step()
    weight.grad.mul_(-5.0)
    step()
    weight.grad.div_(-5.0)
    reset_optimizer_state(optimizer)
    assert step() == first


def test_a_computed_function_runs_on_the_stream_of_its_caller() -> None:
    async def main(world: ad.World) -> None:
        stream = torch.cuda.Stream(world.device)
        with torch.cuda.stream(stream):
            assert await world.compute(torch.cuda.current_stream) == stream
        assert await world.compute(torch.cuda.current_stream) == torch.cuda.default_stream()

    ad.run_local(main, ranks=1)


def test_ranks_of_a_process_have_their_own_streams() -> None:
    async def main(world: ad.World) -> bool:
        with torch.cuda.stream(torch.cuda.Stream(world.device)):
            own = torch.cuda.current_stream()
            for _ in range(3):
                await ad.barrier()
            return torch.cuda.current_stream() == own

    assert ad.run_local(main, ranks=3) == [True] * 3
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
