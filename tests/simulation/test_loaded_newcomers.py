"""Tests restarted ranks whose script first loads the rank's own checkpoint, and then joins the running policy.

The newcomer gets the leader's whole state, so nothing of the loaded state may remain.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import io
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.seeds import in_ci
from torch import nn

import asyncdist as ad
from asyncdist.simulation import Kill, Restart, simulate
from protocols import (
    AsyncDiLoCoPolicy,
    AsyncSelectiveAveragingPolicy,
    DiLoCoPolicy,
    GossipPolicy,
    PopulationTrainingPolicy,
)

END = 60
KINDS: dict[str, Callable[..., Any]] = {
    "overlap": functools.partial(DiLoCoPolicy, average_every=4, fragments=2, overlap_steps=1),
    "late": functools.partial(DiLoCoPolicy, average_every=4, late="skip"),
    "async": functools.partial(AsyncDiLoCoPolicy, average_every=4),
}


async def train(world: ad.World, kind: str, saved: dict[int, Any], loads: bool) -> tuple[int, int, list[Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    policy = KINDS[kind](model, torch.optim.Adam(model.parameters(), lr=0.0))
    if world.incarnation and loads:
        policy.load_state_dict(copy.deepcopy(saved[world.rank]))
    applied_count = 0
    async with policy:
        while policy.iteration < END:
            model(torch.ones(4)).sum().backward()
            policy.optimizer.step()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 0.01 * (1 + world.rank)
            await asyncio.sleep(0.01)
            applied_count += bool(await policy.step())
            if policy.iteration == 12 and not world.incarnation:
                await policy.settle()
                saved[world.rank] = copy.deepcopy(policy.state_dict())
    moments = [each.untyped_storage().nbytes() for state in policy.optimizer.state.values() for each in state.values()]
    return applied_count, max(moments), [parameter.tolist() for parameter in model.parameters()]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_a_state_loaded_before_the_join_remains(kind: str) -> None:
    """Regression: old means were applied once more, and an old contribution kept the rank from contributing again."""
    faults = (Kill(2, at_s=0.3), Restart(2, at_s=0.4))
    without, loaded = (
        simulate(train, kind, {}, loads, ranks=3, seed=1, faults=faults, strict=True).results for loads in (False, True)
    )
    assert loaded == without
    applied_count, moment_nbytes, _ = loaded[2]
    assert applied_count >= 5, "the newcomer must apply means"
    assert moment_nbytes <= 12 * 4, "the optimizer must not keep the received state in memory"


ORDERED: dict[str, Callable[..., Any]] = {
    "async diloco": functools.partial(AsyncDiLoCoPolicy, average_every=4),
    "diloco": functools.partial(DiLoCoPolicy, average_every=4),
    "gossip": functools.partial(GossipPolicy, average_every=4),
    "selective": functools.partial(AsyncSelectiveAveragingPolicy, average_every=4),
    "population training": functools.partial(
        PopulationTrainingPolicy, average_every=4, hyperparameters={"lr": (1e-4, 1e-1)}
    ),
}


@pytest.mark.parametrize("kind", in_ci(ORDERED, "async diloco", "selective", "gossip"))
def test_moments_follow_the_names_of_the_parameters(kind: str) -> None:
    """Regression: if a newcomer's optimizer listed its parameters in another order, their moments were exchanged."""

    async def main(world: ad.World) -> tuple[int, int]:
        model = nn.ParameterDict({name: torch.ones(2) for name in "abc"})
        order = [model[name] for name in ("abc", "cab", "bca")[(world.rank + world.incarnation) % 3]]
        policy = ORDERED[kind](model, torch.optim.Adam(order, lr=0.001))
        took = 0
        async with policy:
            while policy.iteration < END:
                for place, name in enumerate("abc"):
                    model[name].grad = torch.full((2,), place + 1.0)
                policy.optimizer.step()
                await asyncio.sleep(0.01)
                took += bool(await policy.step(**({"score": world.rank} if policy.takes_metric else {})))
                for place, name in enumerate("abc"):
                    state = policy.optimizer.state[model[name]]
                    moment = (1 - 0.9 ** float(state["step"])) * (place + 1.0)
                    assert state["exp_avg"].tolist() == pytest.approx([moment] * 2, rel=1e-4)
        return took, int(policy.optimizer.state[model["a"]]["step"])

    faults = (Kill(2, at_s=0.2), Restart(2, at_s=0.3))
    results = simulate(main, ranks=3, seed=1, faults=faults, strict=True).results
    assert sum(took for took, _ in results) > 5
    assert results[2][1] > END - 15, "the newcomer must have the step count of the leader's optimizer"


@pytest.mark.parametrize("kind", in_ci(ORDERED, "diloco", "selective", "population training"))
def test_a_received_optimizer_state_can_be_saved(kind: str) -> None:
    """Regression: moments and step counts of two dtypes were views of one buffer, which torch.save refuses."""
    has_quantile = kind == "population training"

    async def main(world: ad.World) -> int:
        torch.manual_seed(0)
        model = nn.Linear(2, 1).bfloat16()
        policy = ORDERED[kind](model, torch.optim.Adam(model.parameters(), lr=1e-3))
        copies = 0
        async with policy:
            while policy.iteration < END:
                model(torch.ones(2, dtype=torch.bfloat16)).sum().backward()
                policy.optimizer.step()
                await asyncio.sleep(0.01)
                copies += bool(await policy.step(**({"score": world.rank} if policy.takes_metric else {})))
        torch.save(policy.optimizer.state_dict(), io.BytesIO())
        for state in policy.optimizer.state.values():
            assert all(each.untyped_storage().nbytes() == each.nbytes for each in state.values())
        return copies

    faults = () if has_quantile else (Kill(2, at_s=0.2), Restart(2, at_s=0.3))
    results = simulate(main, ranks=4, seed=1, faults=faults, strict=True).results
    assert not has_quantile or any(results), "a rank must have copied another"


def test_a_newcomer_with_other_parameters_is_refused_alone() -> None:
    async def main(world: ad.World) -> int:
        model = nn.ParameterDict({name: torch.ones(2) for name in "abc"})
        names = "ab" if world.incarnation else "abc"
        policy = DiLoCoPolicy(model, torch.optim.SGD([model[name] for name in names], lr=0.001), average_every=4)
        if world.incarnation:
            with pytest.raises(ValueError, match="'c' is only in the other optimizer"):
                await policy.__aenter__()
            return 0
        async with policy:
            while policy.iteration < END:
                await asyncio.sleep(0.01)
                await policy.step()
        return policy.iteration

    faults = (Kill(2, at_s=0.2), Restart(2, at_s=0.3))
    assert simulate(main, ranks=3, seed=1, faults=faults, strict=True).results == (END, END, 0)


class Remembering(torch.optim.SGD):
    """An optimizer with a value in its state, from its first step on, that cannot be sent."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            self.state[group["params"][0]]["history"] = functools.partial(int)


@pytest.mark.parametrize(
    ("begins", "kind"),
    in_ci(
        itertools.product(["at once", "with a step"], ["diloco", "selective"]),
        ("at once", "selective"),
        ("with a step", "diloco"),
    ),
)
def test_a_state_that_cannot_be_sent_ends_the_newcomer_alone(kind: str, begins: str) -> None:
    """Regression: the leader's step raised TypeError, and all ranks ended. Selective averaging warned in each round."""
    make = functools.partial(ORDERED[kind], start_timeout_s=0.5)
    is_late = begins == "with a step"

    async def main(world: ad.World) -> Any:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = Remembering([{"params": list(model.parameters()), "own": None if is_late else int}], lr=0.0)
        policy = make(model, optimizer)
        if world.incarnation:
            with pytest.raises((ad.AsyncdistError, TypeError)) as raised:
                await policy.__aenter__()
            return type(raised.value)
        async with policy:
            while policy.iteration < 120:
                model(torch.ones(2)).sum().backward()
                policy.optimizer.step()
                await asyncio.sleep(0.01)
                await policy.step(**({"score": world.rank} if policy.takes_metric else {}))
        return policy.iteration

    faults = (Kill(2, at_s=0.2), Restart(2, at_s=0.3))
    *others, newcomer = simulate(main, ranks=3, seed=1, faults=faults, strict=True).results
    assert others == [120, 120]
    assert newcomer in ((ad.StartTimeoutError, ad.LateError) if is_late else (TypeError,))


@pytest.mark.slow
@pytest.mark.parametrize("lingers_s", in_ci([0.0, 100.0], 100.0), ids=["and ends", "and stays"])
def test_newcomers_do_not_wait_for_a_leader_that_leaves(lingers_s: float) -> None:
    """Regression: a newcomer waited for 60 s for the state of a leader that had left, and others waited with it.

    It settled a policy that it had not joined. If the leader stayed in the world, the newcomer was not notified.
    """
    waited_s: list[float] = []

    async def main(world: ad.World) -> None:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        policy = AsyncDiLoCoPolicy(
            model, torch.optim.SGD(model.parameters(), lr=0.1), average_every=2, start_timeout_s=10.0
        )
        began_s = world.time()
        try:
            async with policy:
                while policy.iteration < 40:
                    await asyncio.sleep(0.01)
                    await policy.step()
        except ad.LateError:
            waited_s.append(world.time() - began_s)
            raise
        await asyncio.sleep(lingers_s)

    for at_s in (0.42, 0.422, 0.424, 0.426, 0.428, 0.43):
        faults = (Kill(1, at_s=at_s), Restart(1, at_s=at_s + 0.001), Kill(2, at_s=0.34), Restart(2, at_s=0.438))
        simulate(main, ranks=3, seed=1, faults=faults)
    assert waited_s and max(waited_s) < (12.0 if lingers_s else 3.0)
