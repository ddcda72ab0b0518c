"""Tests every policy with difficult values: large, equal and infinite ones, and ranks that have diverged."""

from __future__ import annotations

import asyncio
import itertools
import math
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from scripts.population import sgd
from support.seeds import in_ci
from torch import nn

import asyncdist as ad
from asyncdist.recording.reader import read_recording
from asyncdist.tensors.infinities import all_finite
from protocols import (
    AsyncDiLoCoPolicy,
    AsyncSelectiveAveragingPolicy,
    AverageAllPolicy,
    OneSidedSelectiveAveragingPolicy,
    PopulationTrainingPolicy,
    SpawnPolicy,
    StepInfo,
)

RANKS = 4
SELECTIVE: dict[str, Any] = {"average_every": 2, "replacement_ratio": 0.25}
#: Of the selective policies, by name; their rank 0 is the worst, and is replaced by all the others.
SELECTIVE_POLICIES: dict[str, Callable[..., SpawnPolicy]] = {
    "selective": lambda *args, **options: AsyncSelectiveAveragingPolicy(*args, **(SELECTIVE | options)),
    "one-sided": lambda *args, **options: OneSidedSelectiveAveragingPolicy(
        *args, **(SELECTIVE | {"replacement_mode": "worst_ratio", "donor_count": 3} | options)
    ),
}
POLICIES = SELECTIVE_POLICIES | {
    "average-all": lambda *args, average_every=2, **_: AverageAllPolicy(*args, average_every=average_every),
}


class Masked(nn.Module):
    """Weights of its own, weights that all ranks have, and a mask."""

    def __init__(self, rank: int, mask: float) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.full((3,), float(rank)))
        self.frozen = nn.Parameter(torch.randn(500, generator=torch.Generator().manual_seed(1)), requires_grad=False)
        self.register_buffer("mask", torch.full((4, 4), mask).triu(1))


def train(
    policy_of: Callable[..., SpawnPolicy],
    build: Callable[[int], nn.Module],
    *,
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    touch: Callable[[int, int, nn.Module, torch.optim.Optimizer], None] = lambda *_: None,
    steps: int = 40,
    **options: Any,
) -> list[tuple[nn.Module, list[StepInfo]]]:
    """Four ranks in lockstep, whose metric is their rank."""
    barrier = asyncio.Barrier(RANKS)

    async def main(world: ad.World) -> tuple[nn.Module, list[StepInfo]]:
        model = build(world.rank)
        optimizer = optimizer_of(model)
        infos = []
        async with policy_of(model, optimizer, **options) as policy:
            for step in range(steps):
                touch(world.rank, step, model, optimizer)
                infos.append(await policy.step(float(world.rank)))
                await barrier.wait()
        return model, [info for info in infos if info]

    return ad.run_local(main, ranks=RANKS, strict=True)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("options", [{}, {"momentum": 0.3}, {"averaging_strategy": "weighted_mean"}])
def test_equal_values_stay_and_smallest_float_masks_stay_finite(policy: str, options: dict[str, Any]) -> None:
    """Regression: a mask of ``finfo.min`` became -inf in the first round, after which its ranks could not be donors."""
    smallest = torch.finfo(torch.float32).min
    members = train(POLICIES[policy], lambda rank: Masked(rank, smallest), **options)
    assert len(members[0][1]) >= 3
    for model, _ in members:
        assert torch.equal(model.mask, Masked(0, smallest).mask)
        assert torch.equal(model.frozen, Masked(0, 0.0).frozen)
        assert model.own.isfinite().all()
    assert (members[0][0].own > 0.5).all()


# -- infinities that belong to the model ------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", SELECTIVE_POLICIES)
@pytest.mark.parametrize("options", [{}, {"momentum": 0.3}, {"averaging_strategy": "weighted_mean"}])
def test_minus_infinity_mask_does_not_keep_ranks_from_giving(
    policy: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: every donor declined silently for the whole run."""
    members = train(SELECTIVE_POLICIES[policy], lambda rank: Masked(rank, -math.inf), **options)
    assert len(members[0][1]) >= 3
    for model, infos in members:
        assert torch.equal(model.mask, Masked(0, -math.inf).mask)
        assert not any(info.recovered for info in infos)
    assert (members[0][0].own > 0.5).all()
    assert not [record for record in caplog.records if record.name == "protocols.own_state"]


@pytest.mark.parametrize("policy", SELECTIVE_POLICIES)
@pytest.mark.parametrize("change", ["moved", "nan", "weights"])
def test_non_finite_foreign_value_is_named_once_per_rank(
    policy: str, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    def touch(rank: int, step: int, model: nn.Module, _: torch.optim.Optimizer) -> None:
        if step == 0:
            {"moved": model.mask, "nan": model.mask, "weights": model.own.data}[change].view(-1)[0] = (
                math.nan if change == "nan" else -math.inf
            )

    members = train(SELECTIVE_POLICIES[policy], lambda rank: Masked(rank, -math.inf), touch=touch)
    assert not any(infos for _, infos in members)
    warned = [record.getMessage() for record in caplog.records if record.name == "protocols.own_state"]
    assert 3 <= len(warned) <= RANKS
    assert all(("'own'" if change == "weights" else "'mask'") in text for text in warned)


@pytest.mark.parametrize("policy", SELECTIVE_POLICIES)
def test_average_of_donors_with_differing_infinities_is_refused(policy: str) -> None:
    reasons: list[str] = []

    def build(rank: int) -> nn.Module:
        return Masked(rank, -math.inf if rank == 2 else 0.0)

    barrier = asyncio.Barrier(RANKS)

    async def main(world: ad.World) -> bool:
        model = build(world.rank)
        async with SELECTIVE_POLICIES[policy](model, sgd(model)) as policy_:
            for _ in range(40):
                info = await policy_.step(float(world.rank))
                if info.abandoned:
                    reasons.append(info.abandoned)
                await barrier.wait()
        return torch.equal(model.mask, build(world.rank).mask)

    assert ad.run_local(main, ranks=RANKS, strict=True) == [True] * RANKS
    assert any("the donors differ in infinite values" in reason and "'mask'" in reason for reason in reasons)


# -- ranks that have diverged -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", SELECTIVE_POLICIES)
@pytest.mark.parametrize(
    ("spoiled", "momentum"),
    in_ci(
        itertools.product(["weights", "state", "both"], [0.0, 0.5, 1.0]),
        *(("weights", 0.5), ("state", 0.5), ("both", 0.0), ("both", 1.0)),
    ),
)
def test_a_rank_that_has_diverged_recovers(policy: str, momentum: float, spoiled: str) -> None:
    """Regression: Adam's moments stayed NaN, or weights mixed with NaN did, so the rank was replaced forever."""

    def touch(rank: int, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        (model.own**2).sum().backward()
        optimizer.step()
        if rank == 0 and step == 3:
            if spoiled != "state":
                model.own.data.fill_(math.nan)
            if spoiled != "weights":
                for state in optimizer.state.values():
                    state["exp_avg"].fill_(math.nan)

    members = train(
        SELECTIVE_POLICIES[policy],
        lambda rank: Masked(rank, 0.0),
        optimizer_of=lambda model: torch.optim.Adam([model.own], lr=1e-3),
        touch=touch,
        momentum=momentum,
    )
    model, infos = members[0]
    assert model.own.isfinite().all()
    recoveries = [info for info in infos if info.recovered]
    assert len(recoveries) == 1 and len(infos) > 1
    expected = "the optimizer's state was not finite" if spoiled == "state" else "'own' was not finite"
    assert recoveries[0].recovered in (expected, "'own' was not finite")
    assert recoveries[0].recovered in str(recoveries[0])


# -- values in odd tensors --------------------------------------------------------------------------------------------


class Views(nn.Module):
    """Complex weights that are stored conjugated, real ones that are stored negated, and a mask of both kinds."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        values = torch.full((3,), complex(rank, -rank))
        self.conjugated = nn.Parameter(values.conj())
        self.negated = nn.Parameter(values.clone().conj().imag)
        self.register_buffer("mask", torch.tensor([complex(-math.inf, 2.0), 1j]).conj())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("momentum", [0.0, 0.25])
def test_conjugated_and_negated_weights_are_averaged_as_values(policy: str, momentum: float) -> None:
    """Regression: steps raised RuntimeError, since torch has no real view of conjugated or negated tensors."""
    members = train(POLICIES[policy], Views, momentum=momentum)
    (model, infos), expected = members[0], 1.5 if policy == "average-all" else 2.0
    assert len(infos) >= 3
    assert model.conjugated.is_conj() and model.negated.is_neg() and model.mask.is_conj()
    assert torch.equal(model.mask, Views(0).mask)
    values = torch.cat([model.conjugated.real, model.conjugated.imag, model.negated]).detach()
    assert torch.allclose(values, torch.tensor(expected), rtol=momentum**3)


def sparse(*values: float) -> torch.Tensor:
    """A vector with repeated indices: its values are not added up yet."""
    return torch.sparse_coo_tensor(torch.zeros(1, len(values), dtype=torch.int64), torch.tensor(values), (4,))


def nested(*values: float, layout: torch.layout = torch.strided) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.tensor(values)], layout=layout)


class Quantised(torch.Tensor):
    """Stands for an 8-bit moment with a scale, as in torchao's optimizers."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, scale: float) -> Quantised:
        made: Quantised = torch.Tensor._make_wrapper_subclass(cls, (2,), dtype=torch.float32)  # type: ignore[attr-defined]
        made.codes, made.scale = torch.zeros(2, dtype=torch.uint8), torch.tensor(scale)
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(*_: Any) -> None: ...

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise NotImplementedError(f"{func}")


FINITE: list[Callable[[], dict[str, Any]]] = [
    lambda: {"step": torch.tensor(3.0), "closure": None, "history": [None, (None, torch.ones(2))]},
    lambda: {"step": torch.tensor(3), "mask": torch.tensor([True]), "count": 7, "name": "adam"},
    lambda: {"momentum_buffer": sparse(1.0, 2.0)},
    lambda: {"momentum_buffer": sparse()},
    lambda: {"momentum_buffer": torch.eye(3).to_sparse_csr()},
    lambda: {"nested": nested(1.0)},
    lambda: {"moments": torch.ones(2, dtype=torch.complex64).conj()},
    lambda: {"moments": torch.empty(0), "rows": torch.empty(0, 2, dtype=torch.complex64)},
    lambda: {"moments": torch.empty(1, device="meta")},
    lambda: {"moments": Quantised(0.1)},
]
NOT_FINITE: list[Callable[[], dict[str, Any]]] = [
    lambda: {"step": torch.tensor(math.nan)},
    lambda: {"history": [None, (torch.ones(2), {"d": torch.tensor([math.inf])})]},
    lambda: {"history": deque([torch.tensor(math.nan)])},
    lambda: {"history": MappingProxyType({"d": torch.tensor(math.nan)})},
    lambda: {"momentum_buffer": sparse(math.inf, -math.inf)},
    lambda: {"momentum_buffer": torch.tensor([[math.nan, 0.0]]).to_sparse_csc()},
    lambda: {"nested": nested(math.nan)},
    lambda: {"nested": nested(math.inf, layout=torch.jagged)},
    lambda: {"moments": torch.full((2,), complex(0.0, math.nan)).conj()},
    lambda: {"scale": torch.tensor(math.nan).to(torch.float8_e4m3fn)},
    lambda: {"moments": Quantised(math.nan)},
]


@pytest.mark.filterwarnings("ignore:Sparse|The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("is_finite", [True, False])
def test_an_optimizer_s_state_of_every_kind_is_looked_over(is_finite: bool) -> None:
    """Regression: sparse, nested and conjugated tensors raised in the step that was to apply an average."""
    found = [all_finite({torch.ones(1): make()}) for make in (FINITE if is_finite else NOT_FINITE)]
    assert found == [is_finite] * len(found)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("policy", SELECTIVE_POLICIES)
def test_a_rank_with_momentum_of_sparse_gradients_takes_averages(policy: str) -> None:
    def touch(_: int, __: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.tensor([1, 2])).square().mean().backward()
        optimizer.step()

    members = train(
        SELECTIVE_POLICIES[policy],
        lambda _: nn.Embedding(6, 3, sparse=True),
        optimizer_of=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        touch=touch,
    )
    assert members[0][1] and not members[0][1][0].recovered


@pytest.mark.parametrize("policy", POLICIES)
def test_inference_mode_buffer_is_refused_by_name(policy: str) -> None:
    """It cannot be written outside of that mode: the first average raised RuntimeError."""
    model = nn.Linear(2, 2)
    with torch.inference_mode():
        model.register_buffer("scale", torch.ones(2))
    with pytest.raises(ValueError, match="'scale' was made in inference mode and cannot be written"):
        POLICIES[policy](model, sgd(model))
    with torch.inference_mode():
        POLICIES[policy](model, sgd(model))


#: Policies whose ranks write to tensors that they have kept since an earlier step.
KEEPING: dict[str, Callable[..., SpawnPolicy]] = {
    "async diloco": lambda *of, **options: AsyncDiLoCoPolicy(*of, quorum=2, **options),
    "one-sided": lambda *of, **options: OneSidedSelectiveAveragingPolicy(*of, age_range=(2, 4), **options),
    "population": lambda *of, **options: PopulationTrainingPolicy(
        *of, hyperparameters={"lr": (0.001, 0.1)}, quantile=0.5, **options
    ),
}


@pytest.mark.parametrize("kind", KEEPING)
def test_some_steps_are_in_inference_mode(kind: str) -> None:
    """Regression: tensors that these policies keep were made in inference mode, and then written outside it."""

    async def train(world: ad.World) -> list[bool]:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        async with KEEPING[kind](model, optimizer, average_every=2) as policy:
            for step in range(24):
                optimizer.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                with torch.inference_mode(step % 6 != 5):
                    await policy.step(-float(world.rank))
        kept = [*model.state_dict().values(), *(each for state in optimizer.state.values() for each in state.values())]
        return [tensor.is_inference() for tensor in kept]

    assert not any(map(any, ad.run_local(train, ranks=2, strict=True)))


@pytest.mark.parametrize("kind", ["average-all", "selective", "one-sided"])
@pytest.mark.parametrize("average_every", [sys.maxsize, 1 << 70])
def test_a_policy_that_never_averages_is_recorded(kind: str, average_every: int, tmp_path: Path) -> None:
    """Regression: the recording was refused as invalid, and from 2**64 on entering the policy raised OverflowError."""

    async def train(world: ad.World) -> None:
        model = nn.Linear(2, 1)
        async with POLICIES[kind](model, sgd(model), average_every=average_every) as policy:
            await policy.step(0.5)

    ad.run_local(train, ranks=2, strict=True, record=tmp_path)
    for rank in read_recording(tmp_path).ranks:
        (begun,) = (event for event in rank.events() if event.kind == "policy")
        assert begun.get("average_every") == 2**53, "the largest count of a recording"
