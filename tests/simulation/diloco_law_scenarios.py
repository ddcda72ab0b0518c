"""Simulates laws that DiLoCo keeps whatever the timing: late means, error feedback, and ranks that are not finite."""

from __future__ import annotations

import asyncio
import functools
import math
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

import asyncdist as ad
from asyncdist.simulation import Fault, SimReport, SlowLink, SlowRank, simulate
from protocols import AverageApplied, Contributed, DiLoCoPolicy, PolicyEvent, TopK
from simulation.training_runs import Arrays, Layers, draw_network, drift, layer_of, weights_of

# -- late means -------------------------------------------------------------------------------------------------------


class LateOracle:
    """Predicts each rank's weights if means may be late, from the captured weights and the order of events.

    Args:
        lr: Learning rate of the outer optimizer, which has no momentum; None without an outer optimizer.
    """

    def __init__(self, fragments: int, lr: float | None) -> None:
        self._fragments, self._lr = fragments, lr
        self._captured: dict[int, dict[int, Arrays]] = defaultdict(dict)  # by round and rank
        self._anchors: dict[int, Arrays] = {}  # by round; the first anchor by 0
        self._anchors[0] = weights_of(Layers())
        self.late_count = 0

    def capture(self, rank: int, number: int, own: Arrays) -> None:
        self._captured[number][rank] = [array.copy() for array in own]

    def anchor(self, number: int, donors: Sequence[int]) -> Arrays:
        """Return the anchor after a round, with the parameters of the round's fragment."""
        if number not in self._anchors:
            before = self._anchors[max(0, number - self._fragments)]
            given = [self._captured[number][rank] for rank in donors]
            means = [sum(each) / len(donors) for each in zip(*given, strict=True)]
            lr = self._lr
            self._anchors[number] = [
                mean if lr is None else old - lr * (old - mean) for old, mean in zip(before, means, strict=True)
            ]
        return self._anchors[number]

    def apply(self, rank: int, event: AverageApplied, own: Arrays, *, is_late: bool) -> None:
        new, captured = self.anchor(event.round, event.donors), self._captured[event.round][rank]
        self.late_count += is_late
        for place, array in enumerate(own):
            if layer_of(place) % self._fragments == (event.round - 1) % self._fragments:
                array[:] = array + (new[place] - captured[place]) if is_late else new[place]


async def _train_late(world: ad.World, options: dict[str, Any], tau: int, oracle: LateOracle) -> None:
    model, rank = Layers(), world.rank
    own = weights_of(model)
    captured_at: dict[int, int] = {}

    def see(event: PolicyEvent) -> None:
        if isinstance(event, Contributed):
            captured_at[event.round] = event.iteration
            oracle.capture(rank, event.round, own)
        elif isinstance(event, AverageApplied):
            oracle.apply(rank, event, own, is_late=captured_at[event.round] + tau < event.iteration)

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    async with DiLoCoPolicy(model, optimizer, late="skip", overlap_steps=tau, on_event=see, **options) as policy:
        for step in range(40):
            for place, parameter in enumerate(model.parameters()):
                change = drift(rank, step, place, parameter.shape)
                own[place] += change
                with torch.no_grad():
                    parameter.add_(torch.from_numpy(change))
            await asyncio.sleep(0.01)
            await policy.step()
            for place, (mine, right) in enumerate(zip(weights_of(model), own, strict=True)):
                error = np.abs(mine - right).max()
                assert error < 1e-9, f"rank {rank}, step {step}, parameter {place}: the error is {error}"


def late(seed: int, faults: Sequence[Fault] | None = None) -> SimReport[Any]:
    """Run ranks that skip late means: each mean keeps the progress since the capture, whenever it is applied."""
    rng = random.Random(f"late {seed}")
    ranks, every, lr = rng.randint(2, 4), rng.randint(2, 6), rng.choice((None, 1.0, 0.5))
    fragments = rng.randint(1, min(3, every))
    outer = None if lr is None else functools.partial(torch.optim.SGD, lr=lr)
    options = {"average_every": every, "fragments": fragments, "outer_optimizer": outer}
    plan: list[Fault] = [SlowRank(rng.randrange(ranks), 0.0, rng.choice((3.0, 10.0)))] if rng.random() < 0.7 else []
    if rng.random() < 0.7:
        rank, other = rng.sample(range(ranks), 2)
        plan.append(SlowLink(rank, other, 0.0, rng.choice((30.0, 300.0))))
    oracle = LateOracle(fragments, lr)
    chosen = plan if faults is None else faults
    tau = rng.randrange(every)
    network = draw_network(rng)
    return simulate(_train_late, options, tau, oracle, ranks=ranks, seed=seed, network=network, faults=chosen)


# -- error feedback ---------------------------------------------------------------------------------------------------


async def _train_sparsely(world: ad.World, every: int, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the anchor, and the sum of this rank's changes and its residual."""
    model = nn.Linear(20, 20, bias=False)
    nn.init.zeros_(model.weight)
    generator, changed = torch.Generator().manual_seed(world.rank), torch.zeros(400)
    outer = functools.partial(torch.optim.SGD, lr=1.0)
    options: dict[str, Any] = {"outer_optimizer": outer, "wire": TopK(share=share, block=64), "error_feedback": 1.0}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    async with DiLoCoPolicy(model, optimizer, average_every=every, **options) as policy:
        for _ in range(6 * every):
            change = torch.randn(20, 20, generator=generator)
            with torch.no_grad():
                model.weight += change
            changed += change.flatten()
            await policy.step()
        (fragment,) = policy.state_dict()["fragments"]
    return fragment["anchors"][0], changed + fragment["residuals"][0]


def feedback(seed: int, faults: Sequence[Fault] | None = None) -> SimReport[Any]:
    """Run top-k with error feedback: the anchor and the mean residual contain all changes of all ranks."""
    rng = random.Random(f"feedback {seed}")
    ranks, every, share = rng.randint(2, 4), rng.randint(1, 4), rng.choice((0.05, 0.3))
    report = simulate(_train_sparsely, every, share, ranks=ranks, seed=seed, faults=faults or ())
    right = torch.stack([sent for _, sent in report.results]).mean(0)
    for rank, (anchor, _) in enumerate(report.results):
        error = (anchor - right).abs().max().item()
        assert error < 1e-4, f"rank {rank}: the changes differ by {error}"
    return report


# -- ranks that are not finite ----------------------------------------------------------------------------------------


async def _train_unsound(world: ad.World, options: dict[str, Any], bad: int, at: int) -> list[float]:
    model, rank = Layers(), world.rank
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    is_sound = True
    async with DiLoCoPolicy(model, optimizer, **options) as policy:
        for step in range(24):
            with torch.no_grad():
                for place, parameter in enumerate(model.parameters()):
                    parameter.add_(torch.from_numpy(drift(rank, step, place, parameter.shape)))
                if (rank, step) == (bad, at):
                    next(model.parameters())[0, 0] = math.nan
                    is_sound = False
            await asyncio.sleep(0.01)
            info = await policy.step()
            if info.recovered:
                assert rank == bad, (
                    f"rank {rank} recovered in step {step}, but only rank {bad} had values that were not finite"
                )
                is_sound = True
            is_finite = all(bool(parameter.isfinite().all()) for parameter in model.parameters())
            assert is_finite or not is_sound, f"rank {rank} has values that are not finite after step {step}"
    assert is_sound, f"rank {rank} never recovered"
    return [value for array in weights_of(model) for value in array.reshape(-1).tolist()]


def unsound(seed: int, faults: Sequence[Fault] | None = None) -> SimReport[Any]:
    """Run ranks of which one becomes NaN: no other rank does, and the rank recovers in its next round."""
    rng = random.Random(f"unsound {seed}")
    ranks, every = rng.randint(2, 4), rng.randint(2, 5)
    overlap = rng.randrange(every)
    options: dict[str, Any] = {
        "average_every": every,
        "fragments": rng.choice((1, min(2, every))),
        "overlap_steps": overlap,
        "mixing": rng.choice((0.0, 0.5)),
    }
    if rng.random() < 0.3:  # without an anchor, each fragment recovers in a separate round
        options |= {"outer_optimizer": None, "fragments": 1}
    bad, at = rng.randrange(ranks), rng.randint(0, 10)
    report = simulate(_train_unsound, options, bad, at, ranks=ranks, seed=seed, faults=faults or ())
    if not options["mixing"] and not overlap and 24 % every == 0 and options["fragments"] == 1:
        assert len(set(map(tuple, report.results))) == 1, "the ranks differ after the last round"
    return report
