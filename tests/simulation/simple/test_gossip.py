"""Tests gossip against its formulas in numpy, with the state of push-sum, NoLoCo and GASLoC, and with lost ranks."""

from __future__ import annotations

import asyncio
import functools
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from scripts.population import sgd
from simulation.diloco_scenarios import Record
from simulation.simple_scenarios import Array, Plan, draw_plan, mean_of, run
from simulation.training_runs import Layers, drift, weights_of
from support.seeds import seeds
from torch import nn
from unit.test_topologies import matrix_of

import asyncdist as ad
from asyncdist.simulation import Fault, Kill, Network, Restart, simulate
from protocols import AverageApplied, Contributed, GossipPolicy, StepInfo

HAS_PARTNERS = True
#: Options without additional state, for the runs of all simple policies; the first are for exact runs.
OPTIONS: Final[list[dict[str, Any]]] = [
    {"average_every": 2},
    {"topology": "ring"},
    {"topology": "random", "seed": 3},
    {"topology": "hosts"},
    {"topology": "rotating", "seed": 1},
]
#: Each column adds up to 1, but the rows do not.
DIRECTED: Final = [[0.5, 0.0, 0.25, 0.5], [0.5, 0.5, 0.25, 0.0], [0.0, 0.25, 0.5, 0.0], [0.0, 0.25, 0.0, 0.5]]
STOCHASTIC: Final = [[0.5, 0.25, 0.25, 0.0], [0.0, 0.5, 0.25, 0.25], [0.25, 0.0, 0.5, 0.25], [0.25, 0.25, 0.0, 0.5]]
NOLOCO: Final[dict[str, Any]] = {"topology": "random", "outer_lr": 0.75, "outer_momentum": 0.5}
GASLOC: Final[dict[str, Any]] = {"outer_lr": 0.75, "outer_momentum": 0.5, "nesterov": True}
PUSH_SUM: Final[dict[str, Any]] = {"topology": DIRECTED, "push_sum": True}
#: Options with additional state.
STATEFUL: Final[list[dict[str, Any]]] = [
    {"push_sum": True},
    {"push_sum": True, "topology": "ring"},
    {**NOLOCO, "outer_lr": 1.25},
    GASLOC,
    {**GASLOC, "topology": "random", "average_every": 2},
    {"outer_momentum": 0.5, "topology": "hosts"},
]


def others(options: Sequence[Any]) -> list[Any]:
    """Mark options that only ``--all`` runs."""
    return [pytest.param(each, marks=pytest.mark.long) for each in options]


def formula(options: Mapping[str, Any], donors: Sequence[Array], own: Array, number: int) -> Array:
    """Return the mean of the partners: in all named graphs, partners have equal shares."""
    del options, own, number
    return mean_of(donors)


class Oracle:
    """One rank's weights in numpy, with its state."""

    def __init__(self, options: Mapping[str, Any], first: Array) -> None:
        self.theta = first.copy()
        self.is_push_sum = options.get("push_sum", False)
        self.lr, self.beta = options.get("outer_lr", 1.0), options.get("outer_momentum", 0.0)
        self.is_nesterov = options.get("nesterov", False)
        self.x, self.mass = first.copy(), 1.0  # of push-sum
        self.phi, self.momentum, self.last_y = first.copy(), np.zeros_like(first), first.copy()

    def train(self, move: Array) -> None:
        self.theta = self.theta + move
        self.x = self.x + move

    def sent(self) -> Array:
        """Return x of push-sum, y of GASLoC, or the weights."""
        if self.is_push_sum:
            return self.x
        return self.phi + self.lr * (self.theta - self.phi) if self.is_nesterov else self.theta

    def take(self, mixed: Array, mass: float, y: Array) -> None:
        if self.is_push_sum:
            self.x, self.mass = mixed, mass
            self.theta = mixed / mass
        elif self.is_nesterov:
            self.phi = self.theta = mixed + self.beta * (y - self.last_y)
            self.last_y = y
        else:
            self.momentum = self.beta * self.momentum + self.lr * (mixed - self.phi)
            self.phi = self.theta = self.phi + self.momentum


def flat(arrays: Sequence[Array]) -> Array:
    return np.concatenate([array.reshape(-1) for array in arrays])


def moves_of(rank: int, step: int) -> Array:
    return flat([drift(rank, step, place, array.shape) for place, array in enumerate(weights_of(Layers()))])


def shares_of(event: AverageApplied, masses: Mapping[int, float]) -> dict[int, float]:
    """Return the shares W of an applied round; a verdict's weights are W times the donors' masses."""
    return {donor: weight / masses[donor] for donor, weight in zip(event.donors, event.weights, strict=True)}


def check(plan: Plan, record: Record, tolerance: float) -> int:
    """Compare all weights with the oracle's, which takes the shares of each round from the run; return the rounds."""
    ranks = {rank: Oracle(plan.options, flat(weights_of(Layers()))) for rank in range(plan.ranks)}
    taken = {rank: {event.round: event for event in record.applied[rank]} for rank in ranks}
    every, count = plan.options.get("average_every", 1), 0
    for step in range(max(plan.steps)):
        for rank, own in ranks.items():
            own.train(moves_of(rank, step))
        if (step + 1) % every == 0:
            count += 1
            sent = {rank: own.sent() for rank, own in ranks.items()}
            masses = {rank: own.mass for rank, own in ranks.items()}
            for rank, own in ranks.items():
                if count in taken[rank]:
                    shares = shares_of(taken[rank][count], masses)
                    mixed = np.sum([share * sent[donor] for donor, share in shares.items()], axis=0)
                    total = sum(shares.values())
                    assert abs(total - 1.0) < 1e-12 or own.is_push_sum, (
                        f"rank {rank}, round {count}: the shares {shares} must add up to 1"
                    )
                    own.take(mixed, sum(share * masses[donor] for donor, share in shares.items()), sent[rank])
                else:
                    is_gone = rank in plan.killed | record.without or plan.steps[rank] <= step
                    assert is_gone, f"rank {rank} received nothing in round {count}"
        for rank, weights in record.weights.items():
            if step < len(weights):
                error = np.abs(flat(weights[step]) - ranks[rank].theta).max()
                assert error <= tolerance, f"rank {rank}, step {step}: the error is {error}, allowed {tolerance}"
    return count


# -- the formulas -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("options", [PUSH_SUM, *others([*STATEFUL, {"topology": STOCHASTIC}])])
def test_fifty_rounds_equal_the_formula_in_numpy(options: dict[str, Any]) -> None:
    """Also compares the shares of each round with matrices that are written from the papers."""
    plan = Plan(policy="GossipPolicy", options=options, steps=(50 * options.get("average_every", 1),) * 4)
    _, record = run(plan)
    assert check(plan, record, 1e-10) == 50
    masses = np.ones(4)
    for number in range(1, 51):
        matrix = matrix_of(options.get("topology", "exponential"), number, 4, seed=0)
        for rank in range(4):
            found = shares_of(record.applied[rank][number - 1], dict(enumerate(masses)))
            wanted = {other: share for other, share in enumerate(matrix[rank]) if share}
            assert found == pytest.approx(wanted, rel=1e-12)
        masses = matrix @ masses if options.get("push_sum") else masses


@pytest.mark.slow
@pytest.mark.parametrize("topology", others(["random", "exponential", "hypercube"]))
def test_pairs_of_equal_shares_are_exact(topology: str) -> None:
    """Bit for bit, since halves are exact: 50 rounds in float64, as W theta in numpy."""
    plan = Plan(policy="GossipPolicy", options={"topology": topology, "seed": 1}, steps=(50,) * 4)
    _, record = run(plan)
    states = np.stack([flat(weights_of(Layers()))] * 4)
    for step in range(50):
        moved = states + np.stack([moves_of(each, step) for each in range(4)])
        states = matrix_of(topology, step + 1, 4, seed=1) @ moved
        for rank in range(4):
            assert np.array_equal(flat(record.weights[rank][step]), states[rank])


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(24))
def test_faults_change_nothing_but_the_partners(seed: int) -> None:
    plan = draw_plan("GossipPolicy", seed)
    options = random.Random(seed).choice(STATEFUL)
    plan = Plan(**{**vars(plan), "options": options})
    _, record = run(plan, seed)
    check(plan, record, 1e-9)


# -- the laws ---------------------------------------------------------------------------------------------------------


async def mix(world: ad.World, options: Mapping[str, Any], rounds: int) -> list[float]:
    """Gossip without training, beginning with the rank's number."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.constant_(model.weight, float(world.rank))
    found = []
    async with GossipPolicy(model, torch.optim.SGD(model.parameters(), 0.1), **options) as policy:
        for _ in range(rounds):
            await policy.step()
            found.append(model.weight.item())
    return found


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("topology", ["hypercube", "exponential"])
def test_log2_rounds_without_training_give_the_exact_mean(topology: str, ranks: int) -> None:
    results = simulate(mix, {"topology": topology}, int(math.log2(ranks)), ranks=ranks).results
    assert {found[-1] for found in results} == {(ranks - 1) / 2}
    assert ranks == 2 or len({found[-2] for found in results}) > 1, "the ranks must not agree before the last round"


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["hosts", *others(["random", "ring", "exponential", STOCHASTIC])])
def test_all_ranks_approach_the_mean_that_they_keep(topology: Any) -> None:
    ranks = 4 if topology is STOCHASTIC else 5
    network = Network(ranks_per_host=2)
    results = simulate(mix, {"topology": topology}, 60, ranks=ranks, network=network).results
    for number in range(60):
        assert sum(found[number] for found in results) / ranks == pytest.approx((ranks - 1) / 2, rel=1e-14)
    assert max(abs(found[-1] - (ranks - 1) / 2) for found in results) < 1e-4


@pytest.mark.slow
def test_a_directed_graph_reaches_the_mean_with_push_sum() -> None:
    """Without the masses, the ranks would agree on a weighted mean of 1.3 instead of 1.5."""
    results = simulate(mix, PUSH_SUM, 80, ranks=4).results
    assert [found[-1] for found in results] == pytest.approx([1.5] * 4, rel=1e-12)
    plain = np.linalg.matrix_power(np.array(DIRECTED) / np.sum(DIRECTED, 1, keepdims=True), 80) @ np.arange(4.0)
    assert abs(plain[0] - 1.5) > 0.05


@pytest.mark.slow
def test_push_sum_loses_no_mass_at_any_moment() -> None:
    """Counts x and w of each rank and of all shares in flight, after each capture and each average of a run.

    A capture puts all of a rank's mass in flight, in shares for its partners and itself. The ranks have different
    speeds, so that some are rounds ahead of others.
    """
    ranks, rounds, shares = 4, 40, np.array(DIRECTED)
    masses = dict.fromkeys(range(ranks), 1.0)
    xs: dict[int, Array] = {}
    flight: dict[tuple[int, int, int], tuple[float, Array]] = {}  # by receiver, giver and round
    totals: list[tuple[float, Array]] = []
    ahead: list[int] = []

    def see(rank: int, model: nn.Module, event: Any) -> None:
        if isinstance(event, Contributed):
            mass, x = masses.pop(rank), xs.pop(rank)
            for receiver in np.flatnonzero(shares[:, rank]).tolist():
                flight[receiver, rank, event.round] = shares[receiver, rank] * mass, shares[receiver, rank] * x
        elif isinstance(event, AverageApplied):
            for donor, weight in zip(event.donors, event.weights, strict=True):
                assert flight.pop((rank, donor, event.round))[0] == weight, "the weight w must travel with its x"
            masses[rank] = sum(event.weights)
            xs[rank] = masses[rank] * flat(weights_of(model))
            ahead.append(max(number for *_, number in flight) - event.round if flight else 0)
        held, kept = [*masses.values()], [*xs.values()]
        held += [mass for mass, _ in flight.values()]
        kept += [x for _, x in flight.values()]
        totals.append((math.fsum(held), np.array([math.fsum(each) for each in zip(*kept, strict=True)])))

    async def main(world: ad.World) -> None:
        model = Layers()
        with torch.no_grad():
            model.head.weight.add_(1.0 + 0.37 * world.rank)
        xs[world.rank] = flat(weights_of(model))
        policy = GossipPolicy(model, sgd(model), on_event=functools.partial(see, world.rank, model), **PUSH_SUM)
        async with policy:
            for step in range(rounds):
                await asyncio.sleep(0.01 * (1 + (world.rank * 7 + step * 5) % 4))
                await policy.step()

    simulate(main, ranks=ranks, seed=3)
    assert len(totals) == 2 * ranks * rounds and max(ahead) >= 1, (
        "no rank was ahead of the others, so the test tests nothing"
    )
    first = totals[0][1]
    for mass, x in totals:
        assert mass == pytest.approx(ranks, rel=2e-15)
        np.testing.assert_allclose(x, first, rtol=1e-14)


# -- faults, joins and checkpoints ------------------------------------------------------------------------------------


async def trained(world: ad.World, options: Mapping[str, Any], first: int, last: int, folder: Path) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    policy = GossipPolicy(model, optimizer, **options)
    if first:
        await ad.load_population(folder, model, optimizer, policy=policy)
    async with policy:
        for step in range(first, last):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * step + world.rank))
            optimizer.zero_grad()
            (model(x) - x[:, :1]).square().mean().backward()
            optimizer.step()
            await policy.step()
        if last == 9:
            await ad.save_population(folder, model, optimizer, policy=policy)
    return [tensor.tolist() for tensor in model.state_dict().values()]


@pytest.mark.slow
@pytest.mark.parametrize("options", [NOLOCO, *others([PUSH_SUM, GASLOC])])
def test_a_saved_population_has_masses_and_momenta(options: dict[str, Any], tmp_path: Path) -> None:
    straight = simulate(trained, options, 0, 20, tmp_path, ranks=4, seed=1, strict=True).results
    half = simulate(trained, options, 0, 9, tmp_path, ranks=4, seed=1, strict=True).results
    resumed = simulate(trained, options, 9, 20, tmp_path, ranks=4, seed=2, strict=True).results
    assert resumed == straight != half


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [PUSH_SUM, *others([{"push_sum": True}, NOLOCO, GASLOC, {"topology": "hypercube"}])]
)
def test_a_lost_rank_comes_back(options: dict[str, Any]) -> None:
    """Its mass is 1 again, and all ranks stay near the common weights."""

    async def main(world: ad.World) -> tuple[int, list[StepInfo], float]:
        model = nn.Linear(3, 2, dtype=torch.float64)
        nn.init.constant_(model.weight, 1.0)
        infos = []
        async with GossipPolicy(model, torch.optim.SGD(model.parameters(), 0.1), **options) as policy:
            begun_at = policy.iteration
            while policy.iteration < 60:
                with torch.no_grad():
                    model.weight.sub_(0.1 * (model.weight - world.rank))
                await asyncio.sleep(0.01)
                infos.append(await policy.step())
        return begun_at, infos, model.weight.mean().item()

    faults: list[Fault] = [Kill(1, at_s=0.1), Restart(1, at_s=0.2)]
    results = simulate(main, ranks=4, faults=faults, until_s=100.0).results
    assert 5 < results[1][0] < 50
    assert any(1 in info.donors for info in results[0][1][-4:] + results[2][1][-4:]), (
        "the rank must be a donor in the end"
    )
    assert all(0.0 < weight < 3.0 for *_, weight in results)


def test_a_rank_that_is_not_finite_takes_its_partners_mean() -> None:
    async def main(world: ad.World) -> tuple[list[bool], float]:
        model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        nn.init.constant_(model.weight, math.nan if world.rank == 2 else 1.0)
        async with GossipPolicy(model, torch.optim.SGD(model.parameters(), 0.1), **NOLOCO) as policy:
            return [bool((await policy.step()).recovered) for _ in range(8)], model.weight.item()

    results = simulate(main, ranks=4).results
    assert sum(results[2][0]) == 1 and not any(map(any, (found for found, _ in results[:2])))
    assert all(weight == 1.0 for _, weight in results)


@pytest.mark.parametrize("options", [{"push_sum": True}, GASLOC], ids=["push-sum", "nesterov"])
def test_a_state_of_another_outer_step_is_refused(options: dict[str, Any]) -> None:
    async def main(world: ad.World) -> None:
        model = Layers()
        policy = GossipPolicy(model, sgd(model), **NOLOCO)
        async with policy:
            await policy.step()
        other = GossipPolicy(model, sgd(model), **options)
        other.load_state_dict(policy.state_dict())
        async with other:
            pass

    with pytest.raises(ValueError, match="saved by a policy with"):
        simulate(main, ranks=2).value()


# -- NoLoCo and GASLoC as DiLoCo --------------------------------------------------------------------------------------


def outer_means(options: Mapping[str, Any], ranks: int) -> list[Array]:
    """Return the mean over ranks after each of 20 rounds."""
    _, record = run(Plan(policy="GossipPolicy", options=options, ranks=ranks, steps=(40,) * ranks))
    return [mean_of([flat(record.weights[rank][step]) for rank in range(ranks)]) for step in range(1, 40, 2)]


def outer_oracle(ranks: int, lr: float, beta: float, nesterov: bool) -> list[Array]:
    """Return DiLoCo's anchor after each round, for the given drifts: torch's SGD on anchor minus weights."""
    anchor, found = flat(weights_of(Layers())), []
    parameter = torch.nn.Parameter(torch.from_numpy(anchor.copy()))
    outer = torch.optim.SGD([parameter], lr=lr, momentum=beta, nesterov=nesterov)
    for number in range(20):
        moves = [moves_of(rank, 2 * number) + moves_of(rank, 2 * number + 1) for rank in range(ranks)]
        parameter.grad = torch.from_numpy(-mean_of(moves))
        outer.step()
        found.append(parameter.detach().numpy().copy())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["random", *others(["ring", "exponential", "hypercube", STOCHASTIC])])
@pytest.mark.parametrize("nesterov", [True, False])
def test_the_mean_of_the_ranks_moves_like_diloco(nesterov: bool, topology: Any) -> None:
    """GASLoC with Nesterov, NoLoCo with a heavy ball: for given drifts, on any doubly stochastic graph."""
    outer = {"outer_lr": 0.75, "outer_momentum": 0.5, "nesterov": nesterov}
    found = outer_means({"average_every": 2, "topology": topology, **outer}, 4)
    for mean, wanted in zip(found, outer_oracle(4, 0.75, 0.5, nesterov), strict=True):
        np.testing.assert_allclose(mean, wanted, rtol=0, atol=1e-11)


@pytest.mark.slow
def test_noloco_in_the_group_of_all_is_a_heavy_ball() -> None:
    """On each rank the mean moves in this way, because all ranks take the same mean of the same group."""
    options = {"average_every": 2, "topology": np.full((4, 4), 0.25), "outer_lr": 0.75, "outer_momentum": 0.5}
    _, record = run(Plan(policy="GossipPolicy", options=options, steps=(40,) * 4))
    for number, wanted in enumerate(outer_oracle(4, 0.75, 0.5, False)):
        for rank in range(4):
            np.testing.assert_allclose(flat(record.weights[rank][2 * number + 1]), wanted, rtol=0, atol=1e-11)


# -- wrong options ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nesterov": True}, r"^outer_momentum must be above 0 with nesterov=True, got 0.0"),
        ({"outer_momentum": 1.0}, r"^outer_momentum must be a number >= 0 and < 1, got 1.0"),
        ({"outer_lr": 0.0}, r"^outer_lr must be a number above 0, got 0.0"),
        ({"push_sum": True, **NOLOCO}, r"outer_lr must be 1 and outer_momentum 0 with push_sum=True, got 0.75"),
        ({"push_sum": 1}, r"^push_sum must be True or False, got 1"),
        ({"topology": DIRECTED}, r"matrix with rows and columns that add up to 1, got row 0 .*push_sum"),
        ({"graph": 1}, r"no option 'graph': here topology is a name"),
        ({"num_steps_per_communication": 1}, r"here average_every is the number of steps"),
        ({"num_modules": 1}, r"here the world defines the ranks and hosts"),
        ({"target_group_size": 4}, r"topology chooses the partners"),
        ({"outer_optimizer": None}, r"here outer_lr, outer_momentum and nesterov are the outer step"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    model = Layers()
    with pytest.raises((TypeError, ValueError), match=message):
        GossipPolicy(model, sgd(model), **options)


@pytest.mark.parametrize(("topology", "is_stable"), [("ring", True), ("exponential", False)])
def test_a_momentum_that_is_not_stable_is_reported(
    topology: Any, is_stable: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Mixing alone is computed in numpy: after 300 rounds, differences have vanished, or have grown without limit."""
    model = Layers()
    GossipPolicy(model, sgd(model), topology=topology, outer_momentum=0.9)
    assert ("outer_momentum=0.9 is above 0.5" in caplog.text) is not is_stable
    own = [Oracle({"outer_momentum": 0.9}, np.array([float(rank == 0)])) for rank in range(8)]
    for number in range(1, 301):
        mixed = matrix_of(topology, number, 8, seed=0) @ [each.theta for each in own]
        for each, mean in zip(own, mixed, strict=True):
            each.take(mean, 1.0, each.theta)
    spread = np.std([each.theta for each in own])
    assert spread < 1e-4 if is_stable else spread > 1e4


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ("hypercube", r"on 3 ranks, because in a hypercube each rank has a partner only if .* got 'hypercube'"),
        (STOCHASTIC, r"topology must be a 3 x 3 matrix, with a row for each of the 3 ranks, got 4 x 4 matrix"),
    ],
)
def test_a_topology_of_another_size_is_refused(topology: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(mix, {"topology": topology}, 1, ranks=3).value()


def test_ranks_with_different_matrices_do_not_start() -> None:
    async def main(world: ad.World) -> None:
        model = Layers()
        rows = [[0.5, 0.5], [0.5, 0.5]] if world.rank else [[0.75, 0.25], [0.25, 0.75]]
        async with GossipPolicy(model, sgd(model), topology=rows):
            pass

    with pytest.raises(ad.DisagreementError, match="topology"):
        simulate(main, ranks=2).value()
