"""Tests trees and meshes, and the functions built on them, in one process.

Tests for every transport, and the comparison with JAX, are in ``conformance/cases_population.py``.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
from typing import Any, NamedTuple

import optree
import pytest
import torch
from hypothesis import given, settings, strategies as st
from support import jax_table
from support.facts import naming

import asyncdist as ad
from asyncdist.errors import ClosedError, LocalProtocolError
from asyncdist.tensors import pytrees

# -- the table --------------------------------------------------------------------------------------------------------


def test_the_model_is_what_jax_answers() -> None:
    """The checked model of JAX's results also holds with two ranks, and with more than four."""
    cases = jax_table.table()["reductions"]
    assert {(case["operation"], case["ranks"]) for case in cases} == {
        (operation, ranks) for operation in jax_table.OPERATIONS for ranks in (1, 3, 4)
    }
    for case in cases:
        parts = [jax_table.tree(part) for part in case["inputs"]]
        jax_table.assert_equal(jax_table.model(case["operation"], parts), jax_table.tree(case["output"]))


def test_the_table_has_what_it_is_for() -> None:
    case = next(case for case in jax_table.table()["reductions"] if case["ranks"] == jax_table.RANKS)
    special = torch.stack([jax_table.tree(part)["special"] for part in case["inputs"]])
    assert special.isnan().any() and (special == torch.inf).any() and (special == -torch.inf).any()
    zeros = special[special == 0].signbit()
    assert zeros.any() and not zeros.all()
    assert {case["momentum"] for case in jax_table.table()["updates"]} == {0.0, 0.5}
    assert {case["operation"] for case in jax_table.table()["shards"]} == {"shmap_map", "shmap_vmap"}


def test_a_comparison_sees_the_last_bit_and_the_sign_of_zero() -> None:
    one = torch.tensor([1.0], dtype=torch.float64)
    with pytest.raises(AssertionError):
        jax_table.assert_equal(one, torch.nextafter(one, 2 * one))
    jax_table.assert_equal(one, torch.nextafter(one, 2 * one), ulps=1)
    with pytest.raises(AssertionError):
        jax_table.assert_equal(one * 0, -one * 0)
    with pytest.raises(AssertionError):
        jax_table.assert_equal(one, one.float())


# -- trees ------------------------------------------------------------------------------------------------------------

DTYPES = (torch.float32, torch.float64, torch.int64, torch.bool)
LEAVES = st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3))
TREES = st.recursive(
    LEAVES.map(lambda kind: torch.arange(torch.Size(kind[1]).numel()).reshape(kind[1]).to(kind[0])),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner) | st.tuples(inner, inner)
    ),
    max_leaves=8,
)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(TREES)
def test_packing_and_unpacking_give_the_leaves_back(tree: Any) -> None:
    leaves, spec = pytrees.flatten_tensors(tree, "tree")
    flats = pytrees.pack(leaves)
    assert list(flats) == list(dict.fromkeys(leaf.dtype for leaf in leaves))
    assert all(flat.dim() == 1 and flat.is_contiguous() for flat in flats.values())
    jax_table.assert_equal(optree.tree_unflatten(spec, pytrees.unpack(flats, leaves)), tree)
    twice = {dtype: torch.stack([flat, flat]) for dtype, flat in flats.items()}
    for found, leaf in zip(pytrees.unpack(twice, leaves), leaves, strict=True):
        assert torch.equal(found, torch.stack([leaf, leaf]))


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(TREES, TREES)
def test_digests_of_two_trees_are_equal_only_if_the_trees_are(one: Any, two: Any) -> None:
    (_, first), (_, second) = pytrees.outline(one), pytrees.outline(two)
    same = first.lines == second.lines
    assert same == (optree.tree_structure(one) == optree.tree_structure(two) and first.kinds == second.kinds)
    assert same == (first.digest == second.digest)
    if not same:
        path, sentence = pytrees.first_difference([first.lines, first.lines, second.lines], [3, 4, 9])
        assert sentence.startswith(f"{path} ") and "rank 3" in sentence and "rank 9" in sentence
        assert path in {*dict(first.lines), *dict(second.lines)}
    assert pytrees.lines_from_text(pytrees.lines_to_text(first.lines)) == first.lines


# -- who takes part ---------------------------------------------------------------------------------------------------


def test_a_rank_that_has_left_is_named_to_those_that_wait_for_it() -> None:
    async def main(world: ad.World) -> str:
        mesh = await ad.new_mesh({"POP": 3})
        if world.rank == 1:
            return ""
        with pytest.raises(ClosedError) as caught:
            await ad.psum(torch.ones(2), "POP", mesh=mesh)
        return str(caught.value)

    first, _, last = ad.run_local(main, ranks=3, strict=True)
    assert "axis 'POP'" in first and "rank 1 left" in first and "rank 1 left" in last


def test_the_mesh_of_another_rank_is_refused() -> None:
    """Ranks of one process can pass a mesh to each other."""
    meshes: dict[int, ad.Mesh] = {}

    async def main(world: ad.World) -> None:
        if world.rank < 2:
            meshes[world.rank] = await ad.new_mesh({"POP": 2}, group=await ad.new_group([0, 1]))
        await ad.barrier()
        told = f"rank {world.rank} must use the mesh .* not the mesh of rank {1 - world.rank if world.rank < 2 else 0}"
        with pytest.raises(LocalProtocolError, match=told):
            await ad.psum(torch.ones(2), "POP", mesh=meshes[1 - world.rank if world.rank < 2 else 0])
        if world.rank == 2:
            with pytest.raises(LocalProtocolError, match=r"the ranks \[0, 1\], which do not include rank 2"):
                meshes[0].__enter__()
        await ad.barrier()

    ad.run_local(main, ranks=3, strict=True)


def test_a_mesh_of_a_group_that_another_rank_made_is_refused() -> None:
    groups: dict[int, ad.Group] = {}

    async def main(world: ad.World) -> None:
        if world.rank < 2:
            groups[world.rank] = await ad.new_group([0, 1])
        await ad.barrier()
        if world.rank == 2:
            with pytest.raises(LocalProtocolError, match=r"group must include this rank, 2, got the ranks \[0, 1\]"):
                await ad.new_mesh({"POP": 2}, group=groups[0])
        await ad.barrier()

    ad.run_local(main, ranks=3, strict=True)


def test_two_meshes_over_the_same_ranks_do_not_hear_each_other() -> None:
    async def main(world: ad.World) -> list[int]:
        one, two = await ad.new_mesh({"POP": 2}), await ad.new_mesh({"POP": 2})
        pairs = [(one, 1), (two, 10)] if world.rank else [(two, 10), (one, 1)]
        found = await asyncio.gather(*(ad.psum(torch.tensor([n]), "POP", mesh=mesh) for mesh, n in pairs))
        return sorted(int(value) for value in found)

    assert ad.run_local(main, ranks=2, strict=True) == [[2, 20]] * 2


@pytest.mark.slow
@pytest.mark.sim(ranks=4, seeds=20)
async def test_trees_that_differ_are_told_to_all_in_any_order(world: ad.World) -> None:
    with await ad.new_mesh({"POP": 2, "DP": 2}) as mesh:
        tree = {"a": torch.ones(2), **({"b": torch.ones(1)} if world.rank == 3 else {})}
        if mesh.axis_index("POP") == 0:
            assert torch.equal((await ad.psum(tree, "DP"))["a"], torch.full((2,), 2.0))
        else:
            with pytest.raises(ad.DisagreementError, match=naming("tree['b']", "rank 3", "rank 2")):
                await ad.psum(tree, "DP")
        assert (await ad.psum(torch.tensor([world.rank]), "POP")).item() == 2 * mesh.axis_index("DP") + 2


# -- training steps ---------------------------------------------------------------------------------------------------


class State(NamedTuple):
    params: dict[str, torch.Tensor]
    steps: int


@dataclasses.dataclass(frozen=True)
class Agent:
    params: dict[str, torch.Tensor]
    name: str


def square(agent: Any) -> torch.Tensor:
    params = agent["params"] if isinstance(agent, dict) else agent.params
    return (params["w"] ** 2).sum()


@pytest.mark.parametrize("make", [State, Agent, lambda params, name: {"params": params, "name": name}])
async def test_an_agent_may_be_a_named_tuple_a_dataclass_or_a_mapping(make: Any) -> None:
    """Without an axis, no world is needed."""
    agent = make({"w": torch.tensor([1.0, 2.0])}, 7)
    descent = jax_table.Descent(0.25, 0.0)
    velocity = descent.init({"w": torch.zeros(2)})
    value, newer, _ = await ad.agent_gradient_update(square, descent)(velocity, agent)
    assert value.item() == 5.0 and type(newer) is type(agent)
    assert torch.equal((newer["params"] if isinstance(newer, dict) else newer.params)["w"], torch.tensor([0.5, 1.0]))


async def test_attach_and_detach_choose_what_is_trained() -> None:
    agent = {"actor": torch.tensor([3.0]), "critic": torch.tensor([2.0])}
    step = ad.agent_gradient_update(
        lambda agent: (agent["actor"] * agent["critic"]).sum(),
        jax_table.Descent(1.0, 0.0),
        attach_fn=lambda agent, actor: {**agent, "actor": actor},
        detach_fn=lambda agent: agent["actor"],
    )
    _, agent, _ = await step(torch.zeros(1), agent)
    assert (agent["actor"].item(), agent["critic"].item()) == (1.0, 2.0)
    with pytest.raises(
        TypeError, match=r"the agent's state must be .* unless attach_fn and detach_fn are passed, got a object"
    ):
        await ad.agent_gradient_update(square, jax_table.Descent(1.0, 0.0))(None, object())


async def test_a_parameter_that_the_loss_does_not_use_stays() -> None:
    params = {"used": torch.tensor(1.0), "idle": torch.tensor(5.0)}
    descent = jax_table.Descent(0.5, 0.0)
    _, params, _ = await ad.gradient_update(lambda p: p["used"] * 2, descent)(descent.init(params), params)
    assert (params["used"].item(), params["idle"].item()) == (0.0, 5.0)


def test_torchs_optimizer_gives_what_jax_answers() -> None:
    """One transport suffices, because the optimizer sends nothing itself.

    ``cases_population`` makes a step on each one.
    """

    async def main(world: ad.World) -> None:
        await jax_table.check_updates(world, in_place=True)

    ad.run_local(main, ranks=jax_table.RANKS, strict=True)


def test_torch_optimizer_trains_as_if_one_rank_saw_all_data() -> None:
    inputs = [
        torch.randn(5, 3, generator=torch.Generator().manual_seed(rank), dtype=torch.float64) for rank in range(3)
    ]

    def model() -> torch.nn.Linear:
        made = torch.nn.Linear(3, 1, dtype=torch.float64)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.fill_(0.5)
        return made

    async def main(world: ad.World) -> list[torch.Tensor]:
        module = model()
        params = dict(module.named_parameters())
        optimizer = torch.optim.Adam(params.values(), lr=0.1)
        step = ad.gradient_update(lambda _params, x: (module(x) ** 2).mean(), optimizer, "DP")
        with await ad.new_mesh({"DP": 3}):
            for _ in range(3):
                value, same, state = await step(None, params, inputs[world.rank])
                assert same is params and state is None and not value.requires_grad
        assert all(parameter.grad is None for parameter in params.values())
        return [parameter.detach() for parameter in params.values()]

    alone = model()
    optimizer = torch.optim.Adam(alone.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        torch.stack([(alone(x) ** 2).mean() for x in inputs]).mean().backward()
        optimizer.step()
    for found in ad.run_local(main, ranks=3, strict=True):
        for mine, theirs in zip(found, alone.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs.detach(), rtol=1e-12, atol=0)


async def test_torchs_optimizer_steps_on_these_gradients_alone() -> None:
    weight = torch.nn.Parameter(torch.tensor([2.0]))
    weight.grad = torch.tensor([100.0])
    step = ad.gradient_update(lambda p: p.sum(), torch.optim.SGD([weight], lr=1.0))
    await step(None, weight)
    assert weight.item() == 1.0 and weight.grad.item() == 100.0


async def test_a_loss_may_have_arguments_of_any_name() -> None:
    """Regression: the step's own parameters, such as ``optimizer``, were refused as keyword arguments of the loss."""
    names = ("loss_fn", "optimizer", "dp_axis_name", "has_aux", "opt_state", "params", "agent_state")
    weight, descent = torch.nn.Parameter(torch.tensor([2.0])), jax_table.Descent(1.0, 0.0)
    for name in names:
        given: dict[str, Any] = {name: 3.0}
        await ad.gradient_update(lambda p, **options: p.sum() * len(options), torch.optim.SGD([weight]))(
            None, weight, **given
        )
        await ad.gradient_update(lambda p, **options: p.sum() * len(options), descent)(
            descent.init(torch.ones(1)), torch.ones(1), **given
        )
        agent = {"params": torch.ones(1)}
        update = ad.agent_gradient_update(lambda agent, **options: agent["params"].sum() * len(options), descent)
        _, agent, _ = await update(descent.init(agent["params"]), agent, **given)
        assert agent["params"].item() == 0.0


async def test_a_mesh_may_be_left_in_another_context() -> None:
    """Regression: closing a coroutine inside ``with mesh`` in another context raised ValueError."""

    async def main(world: ad.World) -> None:
        mesh = await ad.new_mesh({"DP": world.size})

        async def fn(x: torch.Tensor) -> torch.Tensor:
            await asyncio.sleep(1)
            return x

        suspended = ad.shmap_map(fn, mesh, "DP", "DP")(torch.arange(4.0))
        contextvars.copy_context().run(suspended.send, None)
        suspended.close()

    ad.run_local(main, ranks=1)


async def test_training_steps_that_cannot_be() -> None:
    descent = jax_table.Descent(0.5, 0.0)
    weight, other = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(1))
    sgd = torch.optim.SGD([weight, other], lr=1.0)
    params = {"w": torch.ones(2)}
    for optimizer in (None, torch.optim.SGD, 0.1):
        with pytest.raises(TypeError, match="optimizer must be an object with init and update, or a"):
            ad.gradient_update(square, optimizer)  # type: ignore[arg-type]
    for loss, told in (
        (lambda p: p["w"], r"the loss must be a floating 0-d tensor, got float32 of shape \[2\]"),
        (lambda p: p["w"].sum().int(), r"got int32 of shape \[\]"),
        (lambda p: 3.0, "the loss must be a floating 0-d tensor, got 3.0"),
    ):
        with pytest.raises(TypeError, match=told):
            await ad.gradient_update(loss, descent)(None, params)
    for loss in (lambda p: torch.tensor(1.0), lambda p: weight.sum()):
        with pytest.raises(ValueError, match="the loss must depend on the parameters"):
            await ad.gradient_update(loss, descent)(None, params)
    with pytest.raises(TypeError, match="loss_fn must return"):
        await ad.gradient_update(lambda p: p["w"].sum(), descent, has_aux=True)(None, params)
    with pytest.raises(TypeError, match=r"params\['n'\] must be a floating or complex tensor, .*, got int64"):
        await ad.gradient_update(square, descent)(None, {"n": torch.ones(2).long()})
    with pytest.raises(TypeError, match=naming("params['n']", "float")):
        await ad.gradient_update(square, descent)(None, {"n": 1.0})
    with pytest.raises(ValueError, match="params must be all 2 parameters of the SGD, got 1"):
        await ad.gradient_update(lambda p: p.sum(), sgd)(None, weight)
    with pytest.raises(ValueError, match=r"params\[1\] must be a parameter of the SGD .*, but it is not"):
        await ad.gradient_update(lambda p: p[0].sum(), sgd)(None, [weight, torch.ones(1), other])


# -- places and random numbers ----------------------------------------------------------------------------------------


def test_generators_are_reproducible_and_independent() -> None:
    def draw(key: Any, count: int) -> list[list[float]]:
        return [torch.rand(4, generator=made).tolist() for made in ad.split_key_to_devices(key, ["cpu"] * count)]

    assert draw(7, 4) == draw(7, 4) and draw(7, 2) == draw(7, 4)[:2]
    numbers = [tuple(found) for key in (0, 1, 7, 2**70) for found in draw(key, 50)]
    assert len(set(numbers)) == 200
    key = torch.Generator().manual_seed(3)
    first, second = draw(key, 2), draw(key, 2)
    assert first != second and draw(torch.Generator().manual_seed(3), 2) == first
    joined = torch.tensor([draw(11, 300)]).reshape(300, 4)
    assert abs(torch.corrcoef(joined.T)[0, 1].item()) < 0.2
    assert ad.split_key_to_devices(1, []) == []


def test_keys_that_are_none() -> None:
    for key in ("7", 1.5, None, True):
        with pytest.raises(TypeError, match=r"key must be an integer >= 0 or a torch\.Generator, got"):
            ad.split_key_to_devices(key, ["cpu"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"key must be .* got -1"):
        ad.split_key_to_devices(-1, ["cpu"])


def test_a_tree_is_put_on_a_device() -> None:
    tree = {"a": [torch.ones(2)], "b": None}
    put = ad.tree_device_put(tree, "cpu")
    assert put["a"][0] is tree["a"][0] and put["b"] is None
    assert ad.tree_device_put(tree, torch.device("meta"))["a"][0].is_meta
    with pytest.raises(TypeError, match=r"tree\['a'\] must be a dense tensor, got a str"):
        ad.tree_device_put({"a": "text"}, "cpu")


def test_a_tree_is_sharded_over_an_axis() -> None:
    async def main(world: ad.World) -> tuple[list[int], int, int]:
        mesh = await ad.new_mesh({"POP": 2, "DP": 2})
        ranks = {"ranks": ad.get_global_ranks()}
        mine = ad.tree_device_put(ranks, ad.Sharding(mesh, "POP"))
        whole = ad.tree_device_put(ranks, ad.Sharding(mesh, None, "cpu"))
        assert torch.equal(whole["ranks"], torch.arange(4)) and ad.is_dist_initialized()
        with pytest.raises(
            ValueError, match=r"leading dimension of tree\[0\] must be a positive multiple of 2, .*, got 3"
        ):
            ad.tree_device_put([torch.ones(3)], ad.Sharding(mesh, "DP"))
        return mine["ranks"].tolist(), ad.get_process_id(), mesh.axis_index("POP")

    found = ad.run_local(main, ranks=4, strict=True)
    assert found == [([0, 1], 0, 0), ([0, 1], 1, 0), ([2, 3], 2, 1), ([2, 3], 3, 1)]


def test_outside_any_world() -> None:
    assert not ad.is_dist_initialized() and ad.get_process_id() == 0
    with pytest.raises(RuntimeError, match=r"asyncdist\.run"):
        ad.get_global_ranks()
    with pytest.raises(LocalProtocolError, match="axis 'POP' is unknown here, because no mesh is open"):
        ad.psum(torch.ones(1), "POP")
    assert (ad.POP_AXIS_NAME, ad.DP_AXIS_NAME) == ("POP", "DP")


@pytest.mark.parametrize("yield_count", [1, 3, 10])
def test_cancelled_operation_ends_with_its_ranks_main(yield_count: int) -> None:
    """A cancelled operation continues in the background until main returns; then its rank counts as having left."""

    async def main(world: ad.World) -> str:
        with await ad.new_mesh({"DP": 2}):
            if world.rank == 0:
                task = asyncio.ensure_future(ad.psum(torch.ones(3), "DP"))
                for _ in range(yield_count):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
                return "gone"
            await world.sleep(0.5)
            with pytest.raises(ad.ClosedError, match="rank 0 left"):
                await ad.psum(torch.ones(3), "DP")
            return "told"

    assert ad.simulate(main, ranks=2, seed=yield_count, strict=True).results == ("gone", "told")
