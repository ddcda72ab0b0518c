"""Tests ``policy.anchor_weights()``, which puts the common weights into the model for the length of a block."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts.population import Mixed, State, clone_state, equal_states
from support.facts import naming
from support.local import run
from support.seeds import in_ci
from torch import nn

import asyncdist as ad
from protocols import AsyncDiLoCoPolicy, DiLoCoPolicy, PopulationAveragingPolicy, SelectiveDiLoCoPolicy

OUTER = functools.partial(torch.optim.SGD, lr=0.5, momentum=0.5)
STEPS, EVERY = 14, 4
KINDS: dict[str, Callable[..., Any]] = {
    "one fragment": DiLoCoPolicy,
    "fragments": functools.partial(DiLoCoPolicy, fragments=2, fragment_pattern="balanced"),
    "overlap": functools.partial(
        DiLoCoPolicy, fragments=2, fragment_pattern="balanced", overlap_steps=1, mixing=0.5, wire="int8"
    ),
    "late": functools.partial(DiLoCoPolicy, overlap_steps=2, late="skip"),
    "quorum": functools.partial(DiLoCoPolicy, quorum=2),
    "eager": functools.partial(DiLoCoPolicy, eager=True),
    "selective": SelectiveDiLoCoPolicy,
    "async": AsyncDiLoCoPolicy,
    "async and waiting": functools.partial(AsyncDiLoCoPolicy, quorum=3, late="wait"),
    "replicas": functools.partial(DiLoCoPolicy, replica_size=2, fragments=2, fragment_pattern="balanced"),
    "async replicas": functools.partial(AsyncDiLoCoPolicy, replica_size=2, quorum=2, late="wait"),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, drift: int) -> None:
    """Make an inner step on dyadic numbers; the running statistics move as well."""
    optimizer.zero_grad()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, drift / 64)
    optimizer.step()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if "running" in name:
                buffer += drift / 64


def parameters(model: nn.Module) -> State:
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def look(kind: str, ranks: int, *, looks: bool) -> list[tuple[State, dict[int, State], State]]:
    """Train on some ranks, and return the last state, the anchors seen after some steps, and the last anchor."""

    async def main(world: ad.World) -> tuple[State, dict[int, State], State]:
        model = Mixed(1.0)
        optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5), {}
        options: dict[str, Any] = {"average_every": EVERY, "outer_optimizer": OUTER}
        if kind == "selective":
            options |= {"metric": lambda: model.wide.bias.sum().item(), "metric_mode": "min"}
        async with KINDS[kind](model, optimizer, **options) as policy:
            size = 2 if "replicas" in kind else 1
            for step in range(STEPS):
                train(model, optimizer, 1 + world.rank // size)
                await policy.step()
                await world.safe_point()
                if kind == "eager":
                    await policy.settle()
                own, state = clone_state(model), repr(optimizer.state_dict())
                if looks:
                    async with policy.anchor_weights():
                        seen[step] = parameters(model)
                        for buffer in model.buffers():
                            buffer.zero_()
                assert equal_states(clone_state(model), own) and repr(optimizer.state_dict()) == state
            await policy.settle()
            async with policy.anchor_weights():
                last = clone_state(model)
        return clone_state(model), seen, last

    return run(main, ranks)


@pytest.mark.parametrize(
    "kind", in_ci(KINDS, "overlap", "late", "eager", "selective", "async and waiting", "async replicas")
)
def test_training_continues_as_if_nothing_was_seen(kind: str) -> None:
    """The block changes neither the weights nor the rounds; only asynchronous rounds depend on the moment."""
    ranks = 4 if "replicas" in kind else 3
    seen, blind = look(kind, ranks, looks=True), look(kind, ranks, looks=False)
    if kind not in ("late", "quorum", "async"):
        for (one, _, last), (two, _, other) in zip(seen, blind, strict=True):
            assert equal_states(one, two) and equal_states(last, other)
        for step in seen[0][1]:
            assert all(equal_states(anchors[step], seen[0][1][step]) for _, anchors, _ in seen), f"step {step}"
    for _, anchors, _ in seen:
        assert equal_states(anchors[0], parameters(Mixed(1.0))), "the first anchor must be the first weights"
        assert not equal_states(anchors[0], anchors[STEPS - 1]), "the anchor did not change"


def test_the_anchor_is_the_formulas() -> None:
    """Between rounds of 4 steps, the model contains the anchor of the last round, and no rank's own weights."""

    async def main(world: ad.World) -> list[tuple[float, float]]:
        model, found = nn.Linear(1, 1, bias=False, dtype=torch.float64), []
        nn.init.ones_(model.weight)
        async with DiLoCoPolicy(
            model, torch.optim.SGD(model.parameters(), lr=0.5), average_every=EVERY, outer_optimizer=OUTER
        ) as policy:
            for _ in range(12):
                with torch.no_grad():
                    model.weight += (1 + world.rank) / 64
                await policy.step()
                own = model.weight.item()
                async with policy.anchor_weights():
                    found.append((model.weight.item(), own))
        return found

    anchor, buffer, right = 1.0, 0.0, []
    for step in range(12):
        if step % EVERY == EVERY - 1:
            buffer = 0.5 * buffer - EVERY * 1.5 / 64
            anchor -= 0.5 * buffer
        right.append(anchor)
    for rank, found in enumerate(run(main, 2)):
        assert [each for each, _ in found] == right
        drifts = [((step + 1) % EVERY) * (1 + rank) / 64 for step in range(12)]
        assert [own - each for each, own in found] == drifts


def test_an_asynchronous_anchor_has_common_buffers() -> None:
    """All ranks export one state after a version that all have applied; under DiLoCo each has its own statistics."""
    for kind, is_common in (("async and waiting", True), ("one fragment", False)):
        (_, _, first), *others = look(kind, 3, looks=False)
        assert all(equal_states(first, last) for _, _, last in others) == is_common, kind


def test_an_exception_in_the_block_restores_the_weights() -> None:
    async def main(world: ad.World) -> None:
        model = Mixed(1.0)
        async with DiLoCoPolicy(model, torch.optim.SGD(model.parameters(), lr=0.5), average_every=EVERY) as policy:
            train(model, policy.optimizer, 1)
            await policy.step()
            own = clone_state(model)
            with pytest.raises(ZeroDivisionError):
                async with policy.anchor_weights():
                    assert not equal_states(clone_state(model), own)
                    _ = 1 // 0
            assert equal_states(clone_state(model), own)
            await policy.step()

    run(main, 2)


@pytest.mark.parametrize("kind", ["one fragment", "async and waiting"])
def test_a_policy_that_is_left_in_the_block_is_left(kind: str) -> None:
    """Regression: a trainer that left the policy before the block left nothing, and the other ranks waited forever."""

    async def main(world: ad.World) -> bool:
        model = Mixed(1.0)
        policy = KINDS[kind](model, torch.optim.SGD(model.parameters(), lr=0.5), average_every=EVERY)
        await policy.__aenter__()
        for step in range(2 * EVERY):
            train(model, policy.optimizer, 1)
            await policy.step()
            if step == EVERY and world.rank == 1:
                own, block = clone_state(model), policy.anchor_weights()
                await block.__aenter__()
                assert not equal_states(clone_state(model), own)
                error = ZeroDivisionError()
                await policy.__aexit__(type(error), error, None)
                await block.__aexit__(None, None, None)
                with pytest.raises(ad.ClosedError):
                    await policy.step()
                return equal_states(clone_state(model), own)
        await policy.__aexit__(None, None, None)
        return True

    assert ad.simulate(main, ranks=3, strict=True, until_s=100.0).results == (True,) * 3


@pytest.mark.parametrize("kind", ["one fragment", "async", "selective"])
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_eval_in_the_block_does_not_change_the_training(kind: str, is_wrapped: bool) -> None:
    """Regression: after eval() in the block, as transformers' evaluate() calls it, train() changed the own weights."""
    schedulefree = pytest.importorskip("schedulefree", reason="the test extra brings schedulefree")

    async def main(world: ad.World) -> None:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = (
            schedulefree.ScheduleFreeWrapper(torch.optim.SGD(model.parameters(), lr=0.5))
            if is_wrapped
            else schedulefree.SGDScheduleFree(model.parameters(), lr=0.5)
        )
        optimizer.train()
        options: dict[str, Any] = {"average_every": EVERY}
        if kind == "selective":
            options |= {"metric": lambda: [optimizer.eval(), model.bias.item()][1], "metric_mode": "min"}
        async with KINDS[kind](model, optimizer, **options) as policy:
            for _ in range(EVERY + 1):
                train(model, optimizer, 1 + world.rank)
                await policy.step()
                own = clone_state(model)
                async with policy.anchor_weights():
                    optimizer.eval()
                optimizer.train()
                assert equal_states(clone_state(model), own)

    run(main, 2)


@pytest.mark.parametrize("kind", ["one fragment", "async"])
def test_calls_that_would_mix_both_weights_are_refused(kind: str, tmp_path: Path) -> None:
    async def main(world: ad.World) -> None:
        model = Mixed(1.0)
        policy = KINDS[kind](model, torch.optim.SGD(model.parameters(), lr=0.5), average_every=EVERY)
        with pytest.raises(ad.ClosedError, match=naming("anchor_weights()")):
            async with policy.anchor_weights():
                pass
        async with policy:
            async with policy.anchor_weights():
                for call in (policy.step, policy.settle, policy.anchor_weights().__aenter__):
                    with pytest.raises(ad.BusyError, match="anchor_weights") as caught:
                        await call()
                    assert caught.value.state == "evaluating"
                with pytest.raises(ad.BusyError, match="anchor_weights"):
                    await ad.save_population(tmp_path, model, policy=policy)
            await policy.step()
        with pytest.raises(ad.ClosedError, match=naming("anchor_weights()")):
            async with policy.anchor_weights():
                pass

    run(main, 2)


def test_policies_without_a_common_anchor_say_why() -> None:
    async def main(world: ad.World) -> None:
        model = Mixed(1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        async with DiLoCoPolicy(model, optimizer, average_every=1, outer_optimizer=None) as policy:
            with pytest.raises(ad.LocalProtocolError, match="outer_optimizer"):
                async with policy.anchor_weights():
                    pass
        async with DiLoCoPolicy(model, optimizer, average_every=1, eager=True) as policy:
            await policy.step()
            with pytest.raises(ad.LocalProtocolError, match="settle"):
                async with policy.anchor_weights():
                    pass
            await policy.settle()
            async with policy.anchor_weights():
                pass
        async with PopulationAveragingPolicy(model, optimizer) as pulled:
            with pytest.raises(ad.LocalProtocolError, match="center"):
                async with pulled.anchor_weights():
                    pass

    run(main, 2)


@pytest.mark.parametrize("policy_class", [DiLoCoPolicy, AsyncDiLoCoPolicy])
def test_blocking_code_and_a_single_rank_see_the_anchor(policy_class: Callable[..., Any]) -> None:
    model = Mixed(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with ad.blocking.policy(policy_class(model, optimizer, average_every=EVERY)) as policy:
        with policy.anchor_weights():
            first = parameters(model)
        train(model, optimizer, 1)
        policy.step()
        own = clone_state(model)
        with policy.anchor_weights():
            assert equal_states(parameters(model), first)
        assert equal_states(clone_state(model), own) and not equal_states(parameters(model), first)
