"""Cases for operations on trees along named axes; ``data/jax_table.py`` records JAX's results for the same calls."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support import jax_table
from support.facts import naming

import asyncdist as ad
from asyncdist.spmd.tree_collectives import WHOLE_NBYTES
from conformance.endpoint import Endpoint

#: Sizes of the axes POP and DP, by the size of the world.
GRIDS = {4: (2, 2), 3: (1, 3), 2: (2, 1), 1: (1, 1)}


class Point(NamedTuple):
    x: torch.Tensor
    y: Any


async def case_the_table_of_jax(end: Endpoint) -> None:
    await jax_table.check_reductions(end.world)
    await jax_table.check_gathers(end.world)
    if end.size == jax_table.RANKS:
        await jax_table.check_grid(end.world)
        await jax_table.check_updates(end.world, in_place=False)
        await jax_table.check_shards(end.world)


async def case_large_tensors_are_reduced_in_rank_order(end: Endpoint) -> None:
    """The order of the sum shows in the last bits; no length is a multiple of the number of ranks."""
    count = WHOLE_NBYTES // 2 + 1
    mesh = await ad.new_mesh({"POP": end.size})
    for dtype in (torch.float32, torch.float64, torch.int32, torch.bool):
        parts = []
        for rank in range(end.size):
            generator = np.random.default_rng(rank)
            numbers = generator.normal(size=count) * 10.0 ** generator.integers(-3, 9, count)
            parts.append([torch.from_numpy(numbers).to(dtype)])
        for name, operation in jax_table.OPERATIONS.items():
            found = await operation(parts[end.rank], "POP", mesh=mesh)
            jax_table.assert_equal(found, jax_table.model(name, parts))


async def case_half_precision_is_rounded_where_jax_rounds_it(end: Endpoint) -> None:
    """float16 is rounded after each addition, bfloat16 once; the table has three ranks' results, which differ most."""
    mesh = await ad.new_mesh({"POP": end.size})
    for dtype in (torch.float16, torch.bfloat16):
        parts = [(torch.tensor([1.0, 3.0, 4096.0]) / (7 + rank)).to(dtype) for rank in range(end.size)]
        for name in ("psum", "pmean"):
            found = await jax_table.OPERATIONS[name](parts[end.rank], "POP", mesh=mesh)
            jax_table.assert_equal(found, jax_table.model(name, parts))


async def case_every_kind_of_tree(end: Endpoint) -> None:
    """The result has the same structure with each leaf in its place, and the input is unchanged."""
    one = torch.ones(2, 2, requires_grad=True)
    tree: dict[str, Any] = {
        "list": [one, (one.detach().int(), None)],
        "point": Point(torch.tensor(2.0), {"k": torch.tensor([True])}),
        "ordered": OrderedDict(z=torch.tensor(1 + 1j), a=torch.zeros(0)),
        "turned": torch.arange(6.0).reshape(2, 3).t(),
    }
    with await ad.new_mesh({"POP": end.size}):
        found = await ad.psum(tree, "POP")
    assert list(found) == list(tree) and list(found["ordered"]) == ["z", "a"]
    assert torch.equal(found["list"][0], torch.full((2, 2), float(end.size))) and not found["list"][0].requires_grad
    assert torch.equal(found["list"][1][0], torch.full((2, 2), end.size, dtype=torch.int32))
    assert found["list"][1][1] is None and type(found["point"]) is Point
    assert found["point"].x.shape == () and found["point"].x.item() == 2 * end.size
    assert found["point"].y["k"].item() == end.size
    assert found["ordered"]["z"].item() == end.size * (1 + 1j) and found["ordered"]["a"].shape == (0,)
    assert torch.equal(found["turned"], end.size * torch.arange(6.0).reshape(2, 3).t())
    assert torch.equal(one, torch.ones(2, 2)) and one.requires_grad


async def case_one_exchange_per_dtype(end: Endpoint) -> None:
    tree = [torch.full((3,), float(number)) for number in range(40)]
    tree += [torch.full((2,), number) for number in range(40)]
    mesh = await ad.new_mesh({"POP": end.size})
    count = 0
    gather = end.world.collectives.all_gather

    async def counted(*args: Any) -> Any:
        nonlocal count
        count += 1
        return await gather(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(end.world.collectives, "all_gather", counted)
        found = await ad.psum(tree, "POP", mesh=mesh)
    assert count == (2 if end.size > 1 else 0)
    assert all(torch.equal(mine, leaf * end.size) for mine, leaf in zip(found, tree, strict=True))


async def case_no_axis_returns_the_input(end: Endpoint) -> None:
    tree = {"anything": object()}
    for operation in jax_table.OPERATIONS.values():
        assert await operation(tree) is tree
        assert await operation(tree, None) is tree
    assert await ad.all_gather(tree, None) is tree
    found = await ad.all_gather(torch.tensor(end.rank))
    assert [part.item() for part in found] == list(range(end.size)), (
        "without an axis, the result must be a list over all ranks"
    )


async def case_a_grid_of_ranks(end: Endpoint) -> None:
    shape = GRIDS[end.size]
    ranks = np.arange(end.size).reshape(shape)
    mesh = await ad.new_mesh({"POP": shape[0], "DP": shape[1]})
    row, column = np.argwhere(ranks == end.rank)[0]
    assert (mesh.axis_index("POP"), mesh.axis_index("DP")) == (row, column)
    assert (mesh.axis_size("POP"), mesh.axis_size("DP")) == shape
    mine = torch.tensor([end.rank])
    with mesh:
        assert (await ad.all_gather(mine, "POP", tiled=True)).tolist() == ranks[:, column].tolist()
        assert (await ad.all_gather(mine, "DP", tiled=True)).tolist() == ranks[row].tolist()
        both = await ad.psum(await ad.psum(mine, "POP"), "DP")
        assert both.item() == ranks.sum()
    inner = await ad.new_mesh({"X": end.size})
    with mesh, inner:  # the innermost open mesh is used
        assert (await ad.psum(mine, "X")).item() == ranks.sum()
        with pytest.raises(ad.LocalProtocolError, match=naming("'POP'", "'X'")):
            ad.psum(mine, "POP")  # type: ignore[unused-coroutine]
    with mesh:
        task = asyncio.ensure_future(ad.psum(mine, "DP"))
    assert (await task).item() == ranks[row].sum()


def line_of(rank: int, ranks: Any, name: str) -> list[int]:
    """Return the ranks of a grid of POP by DP that share an axis with this rank, in the axis's order."""
    row, column = np.argwhere(ranks == rank)[0]
    return list(map(int, ranks[:, column] if name == "POP" else ranks[row]))


async def check_means(rank: int, ranks: Any, mesh: ad.Mesh) -> None:
    def part(of: int) -> dict[str, torch.Tensor]:
        numbers = np.random.default_rng(of).normal(size=7)
        return {"x": torch.from_numpy(numbers), "n": torch.tensor([of, 2 * of + 1], dtype=torch.int32)}

    for name in ("POP", "DP"):
        found = await ad.pmean(part(rank), name, mesh=mesh)
        jax_table.assert_equal(found, jax_table.model("pmean", [part(of) for of in line_of(rank, ranks, name)]))


async def check_steps(rank: int, line: list[int], name: str, *, in_place: bool) -> None:
    """Train on half the squared distance to each rank's point: weights approach the mean of the axis's points."""
    rate, momentum = 0.25, 0.5
    points = {of: np.array([of, of**2, -1.5]) for of in line}
    weight = torch.full((3,), 4.0, dtype=torch.float64, requires_grad=in_place)
    optimizer: Any = jax_table.Descent(rate, momentum)
    state = None if in_place else optimizer.init(weight)
    if in_place:
        optimizer = torch.optim.SGD([weight], lr=rate, momentum=momentum)
    step = ad.gradient_update(lambda w, point: ((w - point) ** 2).sum() / 2, optimizer, name)
    expected, velocity = np.full(3, 4.0), np.zeros(3)
    for _ in range(3):
        value, weight, state = await step(state, weight, torch.from_numpy(points[rank]))
        np.testing.assert_allclose(value.item(), ((expected - points[rank]) ** 2).sum() / 2, rtol=1e-12)
        velocity = momentum * velocity + expected - np.mean(list(points.values()), axis=0)
        expected = expected - rate * velocity
        np.testing.assert_allclose(weight.detach().numpy(), expected, rtol=1e-12)


async def check_shards_of_a_line(rank: int, ranks: Any, mesh: ad.Mesh, name: str) -> None:
    """Each line along an axis has its own population; its elements may be combined along the other axis."""
    other = "DP" if name == "POP" else "POP"
    line, across = line_of(rank, ranks, name), line_of(rank, ranks, other)
    count = 2 * len(line)
    numbers = np.arange(3.0 * count).reshape(count, 3)
    mine = slice(2 * line.index(rank), 2 * line.index(rank) + 2)
    own = 12.0 * across.index(rank)
    population = torch.from_numpy(numbers + own)

    def plain(member: torch.Tensor) -> Any:
        return member.sum(), member * 2

    async def across_lines(member: torch.Tensor) -> torch.Tensor:
        return await ad.pmean(member, other)

    for run in (ad.shmap_map, ad.shmap_vmap):
        sums, doubled = await run(plain, mesh, name, (name, None))(population)
        assert np.array_equal(sums.numpy(), (numbers + own).sum(1))
        assert np.array_equal(doubled.numpy(), 2 * (numbers + own)[mine])
    means = await ad.shmap_map(across_lines, mesh, name, name)(population)
    assert np.array_equal(means.numpy(), numbers + 12.0 * (len(across) - 1) / 2)


async def check_lines(rank: int, ranks: Any, mesh: ad.Mesh) -> None:
    await check_means(rank, ranks, mesh)
    for name in ("POP", "DP"):
        with mesh:
            await check_steps(rank, line_of(rank, ranks, name), name, in_place=False)
        await check_shards_of_a_line(rank, ranks, mesh, name)


async def case_an_axis_is_smaller_than_the_world(end: Endpoint) -> None:
    """Means, steps and shards along an axis depend only on the ranks of this axis, not on other lines of the grid."""
    shape = GRIDS[end.size]
    mesh = await ad.new_mesh({"POP": shape[0], "DP": shape[1]})
    await check_lines(end.rank, np.arange(end.size).reshape(shape), mesh)


async def case_a_mesh_of_a_part_of_the_world(end: Endpoint) -> None:
    """All ranks except the last form a mesh in reverse order; the last has its own mesh and exchanges with rank 0."""
    if end.size == 1:
        return
    last, words = end.size - 1, [bytes([number]) * 100 for number in range(20)]

    async def answers() -> None:
        for _ in words:
            word, _ = await end.receive(100, last)
            await end.send(word, last)

    async def asks() -> None:
        for word in words:
            await end.send(word, 0)
            assert await end.receive(100, 0) == (word, 0)

    members = [last] if end.rank == last else list(range(last))[::-1]
    mesh = await ad.new_mesh({"POP": 1, "DP": len(members)}, group=await ad.new_group(members))
    async with asyncio.TaskGroup() as tasks:
        if end.rank in (0, last):
            tasks.create_task(asks() if end.rank == last else answers())
        tasks.create_task(check_lines(end.rank, np.array([members]), mesh))


async def case_torchs_optimizer_steps_along_an_axis(end: Endpoint) -> None:
    """Left out in four processes, since each import of torch's optimizers takes more than a second of a core."""
    if end.size == 4 and end.world.transport_name in ("mpi", "torch"):
        return
    shape = GRIDS[end.size]
    ranks = np.arange(end.size).reshape(shape)
    with await ad.new_mesh({"POP": shape[0], "DP": shape[1]}):
        for name in ("POP", "DP"):
            await check_steps(end.rank, line_of(end.rank, ranks, name), name, in_place=True)


async def case_places_shards_and_generators_of_ranks(end: Endpoint) -> None:
    """These functions send nothing, yet each rank finds its own part, and the parts of all ranks fit together."""
    assert ad.is_dist_initialized() and ad.get_process_id() == end.rank
    jax_table.assert_equal(ad.get_global_ranks(), torch.from_numpy(np.arange(end.size)))
    mesh = await ad.new_mesh({"POP": end.size})
    numbers = np.arange(6.0 * end.size).reshape(2 * end.size, 3)
    tree = {"ranks": ad.get_global_ranks(), "rows": [torch.from_numpy(numbers), None]}
    put = ad.tree_device_put(tree, ad.Sharding(mesh, "POP", "cpu"))
    jax_table.assert_equal(
        put,
        {
            "ranks": torch.tensor([end.rank]),
            "rows": [torch.from_numpy(np.split(numbers, end.size)[end.rank]), None],
        },
    )
    jax_table.assert_equal(await ad.all_gather(put, "POP", tiled=True, mesh=mesh), tree)
    for sharding in (ad.Sharding(mesh, None), "cpu"):
        jax_table.assert_equal(ad.tree_device_put(tree, sharding), tree)

    key = torch.Generator().manual_seed(3)
    drawn = int(torch.randint(2**63 - 1, (), generator=torch.Generator().manual_seed(3)))
    for given, seed in ((7, 7), (key, drawn)):
        mine = ad.split_key_to_devices(given, ["cpu"] * end.size)[end.rank]
        found = await ad.all_gather(torch.rand(4, generator=mine), "POP", mesh=mesh)
        children = [
            int(child.generate_state(1, np.uint64)[0]) for child in np.random.SeedSequence(seed).spawn(end.size)
        ]
        expected = [torch.rand(4, generator=torch.Generator().manual_seed(child)) for child in children]
        assert torch.equal(found, torch.stack(expected)) and len({tuple(row) for row in found.tolist()}) == end.size


async def case_tasks_share_an_axis(end: Endpoint) -> None:
    with await ad.new_mesh({"POP": end.size}):
        results = await asyncio.gather(*(ad.psum({"n": torch.tensor([number])}, "POP") for number in range(6)))
    assert [result["n"].item() for result in results] == [number * end.size for number in range(6)]


async def case_a_cancelled_operation_ends_in_the_background(end: Endpoint) -> None:
    mesh = await ad.new_mesh({"POP": end.size})
    task = asyncio.ensure_future(ad.psum(torch.ones(9000), "POP", mesh=mesh))
    await end.yields(2)
    if end.rank == end.size - 1:
        task.cancel()
    await asyncio.wait([task])
    assert (await ad.psum(torch.tensor([1]), "POP", mesh=mesh)).item() == end.size


def variants(one: torch.Tensor) -> dict[str, tuple[Any, Any, str]]:
    """Return the arguments of most ranks and of the last rank, with the expected error, by path."""
    usual = "float32 of shape [3] on rank 0"
    return {
        "a key less": ({"a": one, "b": one}, {"a": one}, "tree['b'] exists on rank 0 and not on LAST"),
        "a key more": ({"a": one}, {"a": one, "b": one}, "tree['b'] exists on LAST and not on rank 0"),
        "another key": ({"a": one, "b": one}, {"a": one, "c": one}, "tree['c'] exists on LAST and not on rank 0"),
        "shorter": ([one, [one, one]], [one, [one]], "tree[1][1] exists on rank 0 and not on LAST"),
        "a shape": ([[one]], [[one[:2]]], f"tree[0][0] is {usual} and float32 of shape [2] on LAST"),
        "a dtype": (Point(one, one), Point(one, one.int()), f"tree.y is {usual} and int32 of shape [3] on LAST"),
        "a tuple": ({"a": [one]}, {"a": (one,)}, "tree['a'] is a list on rank 0 and a tuple on LAST"),
        "a leaf": ({"a": [one]}, {"a": one}, "tree['a'] is a list on rank 0 and float32 of shape [3] on LAST"),
        "nothing": ([one, one], [None, one], f"tree[0] is {usual} and None on LAST"),
        "no tensor": ([one, one], [one, 3.0], f"tree[1] is {usual} and a float on LAST"),
    }


async def case_trees_that_differ(end: Endpoint) -> None:
    """All ranks get the same error in the same operation, and the next operation works."""
    mesh = await ad.new_mesh({"POP": end.size})
    is_last = end.rank == end.size - 1
    for name, (usual, other, told) in variants(torch.ones(3)).items():
        if end.size == 1:
            continue
        if is_last and name == "no tensor":
            with pytest.raises(TypeError, match=r"tree\[1\] .*psum.*float"):
                await ad.psum(other, "POP", mesh=mesh)
        else:
            with pytest.raises(ad.DisagreementError) as caught:
                await ad.psum(other if is_last else usual, "POP", mesh=mesh)
            assert told.replace("LAST", f"rank {end.size - 1}") in str(caught.value), name
            assert "psum along 'POP'" in str(caught.value)
        assert (await ad.psum(torch.tensor([1]), "POP", mesh=mesh)).item() == end.size


async def case_operations_that_differ(end: Endpoint) -> None:
    mesh = await ad.new_mesh({"POP": end.size})
    if end.size > 1:
        operation = ad.pmean if end.rank == end.size - 1 else ad.psum
        with pytest.raises(ad.DisagreementError, match=naming("psum", "rank 0", "pmean", f"rank {end.size - 1}")):
            await operation(torch.ones(2), "POP", mesh=mesh)
        with pytest.raises(ad.DisagreementError, match=naming("all_gather", "axis 0", "rank 0")):
            await ad.all_gather(torch.ones(2), "POP", axis=1 if end.rank == end.size - 1 else 0, mesh=mesh)
    assert (await ad.psum(torch.tensor([1]), "POP", mesh=mesh)).item() == end.size


async def case_what_is_refused_on_every_rank(end: Endpoint) -> None:
    mesh = await ad.new_mesh({"POP": end.size})
    one = torch.ones(2)
    for tree, told in (
        ({"a": [one, "text"]}, r"tree\['a'\]\[1\] must be a dense tensor .*, got a str"),
        ([one, torch.ones(2, device="meta")], r"tree\[1\] .*got a meta tensor"),
        (torch.eye(2).to_sparse(), "tree .*got a sparse tensor"),
        (3, "tree .*got an int"),
    ):
        for operation in (ad.psum, ad.pmax, ad.all_gather):
            with pytest.raises(TypeError, match=told):
                await operation(tree, "POP", mesh=mesh)
    with pytest.raises(
        TypeError, match=r"tree\['z'\] must be a dense tensor of bool, .*float64 for pmin, got complex64 of shape \[2\]"
    ):
        await ad.pmin({"z": one.to(torch.complex64)}, "POP", mesh=mesh)
    with pytest.raises(TypeError, match=naming("psum", "bool", "complex128", "tree", "float8_e5m2")):
        await ad.psum(one.to(torch.float8_e5m2), "POP", mesh=mesh)
    with pytest.raises(ValueError, match=r"axis must be from -2 to 1 for tree of shape \[2\], got axis=2"):
        await ad.all_gather(one, "POP", axis=2, mesh=mesh)
    with pytest.raises(ValueError, match=naming("tiled must be False", "tree")):
        await ad.all_gather(one[0], "POP", tiled=True, mesh=mesh)
    with pytest.raises(ad.LocalProtocolError, match=r"axis of the mesh, which has 'POP': \d+, got 'DP'"):
        ad.psum(one, "DP", mesh=mesh)  # type: ignore[unused-coroutine]
    with pytest.raises(ad.LocalProtocolError, match=naming("'POP'", f"rank {end.rank}")):
        ad.psum(one, "POP")  # type: ignore[unused-coroutine]
    with pytest.raises(TypeError, match="axis, tiled and mesh need an axis name"):
        ad.all_gather(one, tiled=True)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="group and world cannot be used with an axis name"):
        ad.all_gather(one, "POP", group=end.world.group)  # type: ignore[call-overload]
    assert (await ad.psum(torch.tensor([1]), "POP", mesh=mesh)).item() == end.size


async def case_meshes_that_cannot_be(end: Endpoint) -> None:
    for axes, told in (
        ({}, "axes must have at least one name"),
        ({"POP": end.size, "DP": 2}, f"must multiply to {end.size}, .* got {2 * end.size}"),
        ({"POP": 0}, "a size >= 1, got 'POP': 0"),
        ({"": end.size}, "a non-empty name .* got '': "),
    ):
        with pytest.raises(ValueError, match=told):
            await ad.new_mesh(axes)
    wrong: tuple[Any, ...] = ({"POP": 1.5}, {3: end.size}, [("POP", end.size)])
    for axes in wrong:
        with pytest.raises(TypeError, match=r"must (be|have) a"):
            await ad.new_mesh(axes)
    if end.size == 1:
        return
    last = end.size - 1
    with pytest.raises(
        ad.DisagreementError, match=naming("axes", f"'POP': {end.size}", "rank 0", f"'DP': {end.size}", f"rank {last}")
    ):
        await ad.new_mesh({"DP" if end.rank == last else "POP": end.size})
    if end.rank < last:
        group = await ad.new_group(range(last))
        mesh = await ad.new_mesh({"POP": last}, group=group)
        assert (await ad.psum(torch.tensor([1]), "POP", mesh=mesh)).item() == last
    else:  # for a rank outside the mesh
        with pytest.raises(ad.LocalProtocolError, match=naming("'POP'", f"rank {last}")):
            ad.psum(torch.tensor([1]), "POP")  # type: ignore[unused-coroutine]
        with pytest.raises(ad.LocalProtocolError, match=f"must include this rank, {last}, got"):
            await ad.new_group(range(last))


async def case_training_steps(end: Endpoint) -> None:
    """An agent's weights change as if one rank had seen all data; the given state is unchanged."""
    inputs = [
        torch.randn(5, 3, generator=torch.Generator().manual_seed(rank), dtype=torch.float64) for rank in range(4)
    ]
    module = torch.nn.Linear(3, 1, dtype=torch.float64)
    start = {name: torch.full_like(leaf, 0.5).detach() for name, leaf in module.named_parameters()}

    def loss(agent: Any, *batches: torch.Tensor) -> Any:
        each = [(torch.func.functional_call(module, agent["params"], (x,)) ** 2).mean() for x in batches]
        return torch.stack(each).mean(), {"age": agent["age"]}

    descent = jax_table.Descent(0.1, 0.5)
    agent: dict[str, Any] = {"params": start, "age": 3}
    velocity = descent.init(start)
    alone, velocity_alone = agent, velocity
    step = ad.agent_gradient_update(loss, descent, "DP", has_aux=True)
    step_alone = ad.agent_gradient_update(loss, descent, has_aux=True)
    with await ad.new_mesh({"DP": end.size}):
        for _ in range(3):
            before = agent["params"]["weight"].clone()
            (value, aux), newer, velocity = await step(velocity, agent, inputs[end.rank])
            assert aux == {"age": 3} and not value.requires_grad
            assert torch.equal(agent["params"]["weight"], before) and newer["age"] == 3
            assert not torch.equal(newer["params"]["weight"], before)
            agent = newer
            _, alone, velocity_alone = await step_alone(velocity_alone, alone, *inputs[: end.size])
        for name, leaf in agent["params"].items():
            np.testing.assert_allclose(leaf.numpy(), alone["params"][name].numpy(), rtol=1e-12)
        gathered = await ad.all_gather(agent["params"], "DP")
        assert all(bool((leaf == leaf[0]).all()) for leaf in gathered.values()), "all ranks must have the same bits"


async def case_populations_split_over_ranks(end: Endpoint) -> None:
    members = {"x": torch.arange(2.0 * end.size * 3).reshape(2 * end.size, 3), "n": torch.arange(2 * end.size)}
    offset = [torch.tensor([1.0, 2.0, 3.0])]
    mesh = await ad.new_mesh({"POP": end.size})

    def one(member: Any, offset: Any) -> Any:
        return (member["x"] + offset[0]).sum(), {"n": member["n"] + 1}

    async def beside_others(member: Any, offset: Any) -> Any:
        fitness = (member["x"] + offset[0]).sum()
        return fitness, {"n": member["n"] + 1}, await ad.pmax(fitness, "POP")

    fitness = (members["x"] + offset[0]).sum(1)
    for run in (ad.shmap_map, ad.shmap_vmap):
        found = await run(one, mesh, ("POP", None), ("POP", "POP"))(members, offset)
        assert type(found) is tuple and torch.equal(found[0], fitness)
        assert torch.equal(found[1]["n"], members["n"] + 1)
        mine = await run(one, mesh, ("POP", None), (None, "POP"))(members, offset)
        assert torch.equal(mine[0], fitness[2 * end.rank : 2 * end.rank + 2])
        assert torch.equal(mine[1]["n"], members["n"] + 1)
    found = await ad.shmap_map(beside_others, mesh, ("POP", None), ("POP", "POP", None))(members, offset)
    assert torch.equal(found[0], fitness) and torch.equal(found[2], fitness[-2:]), (
        "the last rank's values must be the largest"
    )
    chunked = ad.shmap_vmap(one, mesh, ("POP", None), "POP", chunk_size=1)
    assert torch.equal((await chunked(members, offset))[0], fitness)


async def case_populations_that_cannot_be_split(end: Endpoint) -> None:
    mesh = await ad.new_mesh({"POP": end.size})
    rows = torch.ones(2 * end.size, 3)
    for run in (ad.shmap_map, ad.shmap_vmap):
        odd = run(lambda x: x, mesh, "POP", "POP")
        if end.size > 1:
            with pytest.raises(ValueError, match=naming("argument 0['x']", 2 * end.size + 1)):
                await odd({"x": torch.ones(2 * end.size + 1)})
        for wrong, told in (
            (torch.tensor(1.0), "leading dimension of argument 0 must be a positive multiple of .* without dimensions"),
            (rows[:0], "argument 0 .* 0"),
            ({}, "at least one, got none on this rank"),
        ):
            with pytest.raises(ValueError, match=told):
                await odd(wrong)
        with pytest.raises(TypeError, match=naming("argument 0[1]", "int")):
            await odd([rows, 3])
        with pytest.raises(ValueError, match=r"in_specs must have .* or one for each of 1, got 2"):
            await run(lambda x: x, mesh, ("POP", None), "POP")(rows)
        with pytest.raises(ValueError, match="must have the same number of elements"):
            await run(lambda x, y: x, mesh, "POP", "POP")(rows, rows[: end.size])
        with pytest.raises(ValueError, match="at least one axis"):
            run(lambda x: x, mesh, None, "POP")
        with pytest.raises(TypeError, match=naming("out_specs", 3)):
            run(lambda x: x, mesh, "POP", (3,))  # type: ignore[arg-type]
        with pytest.raises(ad.LocalProtocolError, match="'DP'"):
            run(lambda x: x, mesh, "POP", "DP")
        with pytest.raises(TypeError, match="output must be a dense tensor, got a str"):
            await run(lambda x: "text", mesh, "POP", "POP")(rows)

    async def awaits(x: torch.Tensor) -> torch.Tensor:
        return await ad.psum(x, "POP")

    async def nested(x: torch.Tensor) -> torch.Tensor:
        return x

    with pytest.raises(ad.LocalProtocolError, match="vmap"):
        ad.shmap_vmap(awaits, mesh, "POP", "POP")
    for function, name in (
        (lambda x: ad.psum(x, "POP"), "the collective psum cannot run inside shmap_vmap of"),
        (lambda x: ad.pmean(x, None) * 2, "pmean "),  # type: ignore[operator]
        (lambda x: ad.all_gather(x, "POP"), "all_gather "),
        (lambda x: nested(x), "other coroutine cannot run inside vmap"),
        (lambda x: {"y": ad.all_reduce(x)}, "coroutine"),
    ):
        with pytest.raises(ad.LocalProtocolError, match=name):
            await ad.shmap_vmap(function, mesh, "POP", "POP")(rows)
    assert (await ad.psum(torch.tensor([1]), "POP", mesh=mesh)).item() == end.size
