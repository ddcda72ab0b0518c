"""Cases for averages of models and gradients, and for gathering of ragged tensors, against numpy."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from support.odd_tensors import ODD, same
from torch import nn

import asyncdist as ad
from asyncdist.errors import DisagreementError, LocalProtocolError, RemoteError
from helpers.cases_everyday import all_but_one, refused

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
DTYPES = (*FLOATS, torch.int64, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128)


class Mixed(nn.Module):
    """A model with every kind of entry: several dtypes, tied weights, buffers, empty, transposed and scalar tensors."""

    def __init__(self, rank: int, width: int = 3) -> None:
        super().__init__()
        draw = np.random.default_rng(rank)

        def numbers(*shape: int) -> torch.Tensor:
            return torch.from_numpy(draw.standard_normal(shape))

        self.first = nn.Parameter(numbers(width, 5).float())
        self.tied = self.first
        self.wide = nn.Parameter(numbers(4))
        self.brain = nn.Parameter(numbers(7).bfloat16())
        self.narrow = nn.Parameter(numbers(2, 2).half(), requires_grad=False)
        self.wave = nn.Parameter(torch.view_as_complex(numbers(3, 2).float()))
        self.turned = nn.Parameter(numbers(4, 6).float().t())
        self.scalar = nn.Parameter(numbers(1)[0].float())
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("running", numbers(3).float())
        self.register_buffer("count", torch.tensor(100 + rank))
        self.register_buffer("mask", torch.tensor([rank % 2 == 0, True]))
        self.own: torch.Tensor
        self.register_buffer("own", torch.tensor(float(rank)), persistent=False)


def to_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    tensor = tensor.detach()
    return (tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).numpy().copy()


def is_filled(tensor: torch.Tensor, value: float) -> bool:
    return bool((tensor == value).all())


def close(tensor: torch.Tensor, expected: np.ndarray[Any, Any]) -> bool:
    """Check that values are equal up to one rounding to the tensor's dtype."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return bool((tensor.numpy() == expected).all())
    tolerance = 2 * torch.finfo(tensor.dtype).eps
    return bool(np.allclose(to_numpy(tensor), expected, rtol=tolerance, atol=tolerance))


async def case_models_become_the_mean(world: ad.World) -> None:
    model = Mixed(world.rank)
    states = [Mixed(rank).state_dict() for rank in range(world.size)]
    objects = {name: (tensor, tensor.data_ptr()) for name, tensor in model.state_dict(keep_vars=True).items()}
    for _ in range(2):  # the second call reuses the memory of the first
        await ad.average_models(model)
        for name, tensor in model.state_dict(keep_vars=True).items():
            if tensor.is_floating_point() or tensor.is_complex():
                expected = np.mean([to_numpy(state[name]) for state in states], axis=0)
            else:
                expected = to_numpy(states[0][name])
            assert close(tensor, expected), name
            assert tensor is objects[name][0] and tensor.data_ptr() == objects[name][1]
        states = [model.state_dict()] * world.size
    assert model.tied is model.first and model.own.item() == world.rank
    assert not model.narrow.requires_grad and model.first.requires_grad


async def case_whole_numbers_are_averaged_exactly(world: ad.World) -> None:
    """The tensors are large enough to be reduced in pieces, and the number of pieces is odd."""
    for dtype in FLOATS:
        model = nn.ParameterDict({"w": nn.Parameter(torch.full((700_001,), world.rank * 2, dtype=dtype))})
        model["w"].data[::1000] = 8 * (world.rank + 1)
        await ad.average_models(model)
        expected = np.full(700_001, np.mean([2.0 * rank for rank in range(world.size)]))
        expected[::1000] = np.mean([8.0 * (rank + 1) for rank in range(world.size)])
        assert torch.equal(model["w"].data, torch.from_numpy(expected).to(dtype)), dtype


async def case_large_models_are_summed_in_rank_order(world: ad.World) -> None:
    """The order of the sum shows in the last bits. Tensors begin and end anywhere in the pieces; one is transposed."""

    def made(rank: int) -> nn.Module:
        generator = torch.Generator().manual_seed(rank)
        shapes = [(3,), (700, 900), (1_100, 1_300), (1,), (500_001,), (0,), (12, 7)]
        tensors = [torch.randn(shape, generator=generator) * 10.0 ** (5 * rank % 7) for shape in shapes]
        tensors[2] = tensors[2].t().contiguous().t()
        return nn.ParameterList(tensors)

    model, others = made(world.rank), [made(rank) for rank in range(world.size)]
    for tensor in model.parameters():
        tensor.grad = tensor.detach().clone()
    await ad.average_models(model)
    await ad.average_gradients(model)
    for tensor, *parts in zip(model.parameters(), *(other.parameters() for other in others), strict=True):
        total = parts[0].detach().numpy().copy()
        for part in parts[1:]:
            total += part.detach().numpy()
        assert np.array_equal(to_numpy(tensor), total / np.float32(world.size)), tensor.shape
        assert tensor.grad is not None and np.array_equal(to_numpy(tensor.grad), to_numpy(tensor)), tensor.shape


async def case_low_precision_is_summed_wide(world: ad.World) -> None:
    """In bfloat16 256 + 1 is 256, and 60,000 + 60,000 does not fit into float16."""
    model = nn.ParameterList(
        [torch.tensor([256.0 if world.rank == 0 else 3.0]).bfloat16(), torch.tensor([60_000.0]).half()]
    )
    await ad.average_models(model)
    mean = (256.0 + 3.0 * (world.size - 1)) / world.size
    assert torch.equal(model[0], torch.tensor([mean]).bfloat16())
    assert torch.equal(model[1], torch.tensor([60_000.0]).half())


async def case_gradients_become_the_mean(world: ad.World) -> None:
    def gradient(rank: int, index: int, shape: torch.Size) -> torch.Tensor:
        return torch.from_numpy(np.asarray(np.random.default_rng(100 * rank + index).standard_normal(shape)))

    model = Mixed(world.rank)
    parameters = list(model.parameters())
    for repetition in range(2):
        for index, parameter in enumerate(parameters):
            if parameter.requires_grad:
                parameter.grad = gradient(world.rank, index + repetition, parameter.shape).to(parameter.dtype)
        objects = [parameter.grad for parameter in parameters]
        values = [parameter.detach().clone() for parameter in parameters]
        await ad.average_gradients(model)
        for index, parameter in enumerate(parameters):
            assert parameter.grad is objects[index] and torch.equal(parameter, values[index])
            if parameter.grad is not None:
                parts = [
                    to_numpy(gradient(rank, index + repetition, parameter.shape).to(parameter.dtype))
                    for rank in range(world.size)
                ]
                assert close(parameter.grad, np.mean(parts, axis=0))
    assert model.narrow.grad is None


async def case_a_gradient_that_is_missing_somewhere_counts_as_zero(world: ad.World) -> None:
    first, second, third = layers = [nn.Linear(2, 2, bias=False) for _ in range(3)]
    if world.rank == world.size - 1:
        first.weight.grad = torch.full((2, 2), 6.0)
    second.weight.grad = torch.full((2, 2), float(world.rank))
    await ad.average_gradients(nn.ModuleList(layers))
    assert first.weight.grad is not None and second.weight.grad is not None
    assert torch.equal(first.weight.grad, torch.full((2, 2), 6.0 / world.size))
    assert torch.allclose(second.weight.grad, torch.full((2, 2), float(np.mean(range(world.size)))))
    assert third.weight.grad is None
    await ad.average_gradients(nn.Linear(3, 3))  # without any gradients


async def case_equal_values_stay_and_finite_ones_stay_finite(world: ad.World) -> None:
    """Two masks of ``finfo.min`` add up to -inf; 3 * x / 3 often differs from x in float32."""
    for count in (33, 30_000):  # in messages, and from 64 KiB on in shared memory if it is available
        draw = np.random.default_rng(count)
        model = nn.Module()
        model.frozen = nn.Parameter(torch.from_numpy(draw.standard_normal(count)).float())
        model.exact = nn.Parameter(torch.from_numpy(draw.standard_normal(count)))
        model.register_buffer("mask", torch.full((count,), torch.finfo(torch.float32).min))
        model.register_buffer("half_mask", torch.full((count,), torch.finfo(torch.bfloat16).min, dtype=torch.bfloat16))
        model.register_buffer("huge", torch.full((count,), 3e38 * (1 - 2 * (world.rank % 2))))
        frozen = {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "huge"}
        gradients = [p.detach() * torch.finfo(p.dtype).max / 8 for p in model.parameters()]
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        await ad.average_models(model)
        await ad.average_gradients(model)
        for name, tensor in frozen.items():
            assert torch.equal(model.state_dict()[name], tensor), name
        assert close(model.get_buffer("huge"), np.full(count, (world.size % 2) * np.float32(3e38) / world.size))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            assert parameter.grad is not None and torch.equal(parameter.grad, gradient)


async def case_equal_values_of_every_exponent_stay(world: ad.World) -> None:
    """The values are random bits, so subnormal and very large values are among them."""
    draw = np.random.default_rng(5)
    model, values = nn.ParameterList(), []
    for dtype in (*FLOATS, torch.complex64):
        drawn = torch.from_numpy(draw.integers(0, 256, 20_000 * dtype.itemsize, dtype=np.uint8)).view(dtype)
        values.append(drawn[drawn.isfinite()])
        model.append(nn.Parameter(values[-1].clone()))
        model[-1].grad = values[-1].flip(0)
    await ad.average_models(model)
    await ad.average_gradients(model)
    for parameter, value in zip(model, values, strict=True):
        assert torch.equal(parameter.detach().view(torch.uint8), value.view(torch.uint8)), value.dtype
        assert torch.equal(parameter.grad.view(torch.uint8), value.flip(0).view(torch.uint8)), value.dtype


async def case_groups_divide_by_their_own_size(world: ad.World) -> None:
    parity = world.rank % 2
    ranks = list(range(parity, world.size, 2))
    group = await ad.new_group(ranks)
    model = nn.Linear(4, 4)
    for _ in range(1 + 2 * parity):  # the groups do not affect each other
        model.weight.data.fill_(world.rank)
        model.weight.grad = torch.full((4, 4), 10.0 * world.rank)
        await ad.average_models(model, group)
        await ad.average_gradients(model, group=group)
        assert torch.allclose(model.weight.data, torch.tensor(float(np.mean(ranks))))
        assert torch.allclose(model.weight.grad, torch.tensor(10.0 * float(np.mean(ranks))))
    outside = ad.Group.seen_from_outside([0])
    for call in (
        ad.average_models(model, outside),
        ad.average_gradients(model, outside),
        ad.gather_distributed_data(torch.ones(1), training_group=outside),
    ):
        await refused(call, LocalProtocolError, f"rank {world.rank}", [0])
    await ad.barrier()


async def case_models_that_differ_are_named_everywhere(world: ad.World) -> None:
    last = world.size - 1
    model = nn.Linear(3, 2 if world.rank == last else 1)
    before = model.weight.detach().clone()
    for call in (ad.average_models, ad.average_gradients):
        if last == 0:
            await call(model)
        else:
            facts = ("rank 0", f"rank {last}", "'weight'", (2, 3), (1, 3))
            await refused(call(model), DisagreementError, *facts)
    assert torch.equal(model.weight, before)
    await ad.average_models(nn.Linear(2, 2))


async def case_gradients_that_autograd_leaves_conjugated(world: ad.World) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    model.bias = nn.Parameter(torch.zeros(2))
    torch.autograd.backward((model.weight.conj() @ torch.full((3,), 1 + world.rank * 1j)).real)
    model.bias.grad = torch.full((2,), 1 + 1j * world.rank).conj().imag
    assert model.weight.grad.is_conj() and model.bias.grad.is_neg()  # type: ignore[union-attr]
    own = model.weight.grad.resolve_conj().clone()  # type: ignore[union-attr]
    every = await ad.all_gather(own)
    await ad.average_gradients(model)
    assert torch.allclose(model.weight.grad, torch.stack(every).mean(0))  # type: ignore[arg-type]
    assert torch.allclose(model.bias.grad, torch.full((2,), -(world.size - 1) / 2))


async def case_what_cannot_be_averaged_is_told_to_all(world: ad.World) -> None:
    last = world.size - 1
    sparse = nn.Embedding(5, 2, sparse=True)
    if world.rank == last:
        sparse(torch.tensor([1])).sum().backward()
    await failure(world, last, lambda: ad.average_gradients(sparse), "'weight' must be dense, but it is sparse")
    lazy, meta = nn.LazyLinear(2), nn.Linear(2, 2, device="meta")
    meta(torch.ones(2, device="meta")).sum().backward()
    for unlike, words in ((lazy, "initialised"), (meta, "meta")):
        given = unlike if world.rank == last else nn.Linear(2, 2)
        await failure(world, last, functools.partial(ad.average_gradients, given), words)
    expanded = nn.Linear(2, 2)
    expanded.bias.grad = torch.ones(1).expand(2) if world.rank == last else torch.ones(2)
    await failure(
        world,
        last,
        lambda: ad.average_gradients(expanded),
        "'bias' must not have several elements in one place in memory",
    )
    odd = nn.Linear(2, 2) if world.rank != last else nn.Sequential()
    await failure(world, last, lambda: ad.average_models(odd), "parameters")
    await failure(world, last, lambda: ad.average_gradients(odd), "without parameters")
    text = "model" if world.rank == last else nn.Linear(2, 2)
    await failure(world, last, lambda: ad.average_models(text), "got a str")  # type: ignore[arg-type]
    await failure(world, last, lambda: ad.average_gradients(text), "got a str")  # type: ignore[arg-type]
    await ad.average_models(nn.Linear(2, 2))


async def failure(world: ad.World, failing: int, call: Callable[[], Any], words: str) -> None:
    try:
        await call()
    except (TypeError, ValueError) as error:
        assert world.rank == failing and words in str(error), error
    except RemoteError as error:
        assert world.rank != failing and error.rank == failing and words in error.text, error
    else:
        raise AssertionError(f"{words}: nothing was raised")


async def case_giving_up_leaves_the_weights_alone(world: ad.World) -> None:
    model = nn.Linear(500, 500)
    model.weight.data.fill_(world.rank)
    if world.rank == 0:
        await asyncio.sleep(0.01)
    task = asyncio.ensure_future(ad.average_models(model))
    await asyncio.sleep(0)
    if world.rank == world.size - 1 and world.rank > 0:
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        await ad.barrier()
        assert is_filled(model.weight, world.rank)
    else:
        await task
        await ad.barrier()
        assert torch.allclose(model.weight, torch.tensor(float(np.mean(range(world.size)))))
    await ad.average_models(model)


async def case_giving_up_in_the_middle_puts_the_weights_back(world: ad.World) -> None:
    """A cancelled rank's weights are restored, whatever the other ranks are doing, and these get their mean."""
    expected = float(np.mean(range(world.size)))
    for yields in range(1, 60, 12):
        model = nn.Linear(1500, 1500)
        model.weight.data.fill_(world.rank)
        task = asyncio.ensure_future(ad.average_models(model))
        if world.rank == world.size - 1 and world.rank > 0:
            for _ in range(yields):
                await asyncio.sleep(0)
            was_done = task.done()
            task.cancel()
            await asyncio.wait([task])
            assert is_filled(model.weight, expected if was_done else world.rank)
            model.weight.data.fill_(1000.0)  # this rank continues to train while the others wait for its old weights
        else:
            await task
            assert is_filled(model.weight, expected)
        await ad.barrier()
        assert is_filled(model.weight, 1000.0 if world.rank == world.size - 1 > 0 else expected)


# -- gathering --------------------------------------------------------------------------------------------------------


async def case_ragged_tensors_are_concatenated(world: ad.World) -> None:
    for dtype in DTYPES:
        for trailing in ((), (2, 0), (2, 3, 1)):
            for lengths in ([2, 0, 5, 1], [0, 3, 0, 0]):
                shapes = [(lengths[rank % 4], *trailing) for rank in range(world.size)]
                parts = [np.random.default_rng(rank).integers(0, 2, shape) for rank, shape in enumerate(shapes)]
                own = torch.from_numpy(parts[world.rank]).to(dtype)
                found = await ad.gather_distributed_data(own, world.size, world.rank)
                assert (found is None) == (world.rank != 0)
                if found is not None:
                    assert isinstance(found, torch.Tensor)
                    assert torch.equal(found, torch.from_numpy(np.concatenate(parts)).to(dtype))


async def case_large_ragged_tensors_in_any_memory_layout(world: ad.World) -> None:
    draw = np.random.default_rng(7)
    parts = [draw.standard_normal((50_000 * (rank + 1), 3)) for rank in range(world.size)]
    own = torch.from_numpy(np.asfortranarray(parts[world.rank])).requires_grad_()
    found = await ad.gather_distributed_data(own)
    if found is not None:
        assert isinstance(found, torch.Tensor)
        assert np.array_equal(found.numpy(), np.concatenate(parts))


async def case_ragged_tensors_of_any_layout(world: ad.World) -> None:
    """Only the last rank's tensor has rows, in each of several memory layouts."""
    for name, full in ODD.items():
        own = full if world.rank == world.size - 1 else full[:0]
        found = await ad.gather_distributed_data(own)
        if found is not None:
            assert isinstance(found, torch.Tensor)
            assert same(found, full), name


async def case_lists_are_concatenated(world: ad.World) -> None:
    def items(rank: int) -> list[Any]:
        return [(rank, "text"), {"k": rank}, 2**70][: rank % 4] + [list(range(1000))] * (rank == 1)

    found = await ad.gather_distributed_data(items(world.rank))
    expected = [item for rank in range(world.size) for item in items(rank)]
    assert found == (expected if world.rank == 0 else None)


async def case_a_group_s_data_is_concatenated_in_its_order(world: ad.World) -> None:
    """The data arrives at the group's root, in messages and as streams; the rank outside the group is not involved."""
    members = all_but_one(world)
    over = world.channel(Over, tag=77)
    if world.rank in members:
        group = await ad.new_group(members)
        is_root = world.rank == members[0]
        for scale in (1, 50_000):
            parts = {
                rank: np.random.default_rng(rank).standard_normal((rank % 3 * scale, 2)) for rank in range(world.size)
            }
            found = await ad.gather_distributed_data(
                torch.from_numpy(parts[world.rank]), len(members), world.rank, group
            )
            assert (found is None) != is_root
            if found is not None:
                assert isinstance(found, torch.Tensor)
                assert np.array_equal(found.numpy(), np.concatenate([parts[rank] for rank in members]))
        items = await ad.gather_distributed_data([world.rank] * world.rank, training_group=group)
        assert items == ([rank for rank in members for _ in range(rank)] if is_root else None)
        if is_root:
            for rank in set(range(world.size)) - set(members):
                over.send_nowait(Over(), rank)
    else:
        before = world.statistics().stream_sent_nbytes
        await refused(
            ad.gather_distributed_data(torch.ones(1), training_group=ad.Group.seen_from_outside(members)),
            LocalProtocolError,
            f"rank {world.rank}",
        )
        await over.receive()
        assert world.statistics().stream_sent_nbytes == before
    over.close()
    await ad.barrier()


@dataclass(frozen=True, slots=True)
class Over:
    """Message from the group's root to the rank outside: all data has been gathered."""


async def case_data_that_does_not_fit_together(world: ad.World) -> None:
    last = world.size - 1
    if last > 0:
        for ours, theirs, facts in (
            (torch.ones(2, 3), torch.ones(2, 4), ((2, 3), (2, 4))),
            (torch.ones(2, 3), torch.ones(6), ((2, 3), (6,))),
            (torch.ones(0, 3), torch.ones(0, 4), ((0, 3), (0, 4))),
            (torch.ones(2), torch.ones(2).double(), ("float32", "float64")),
            (torch.ones(2), [1], ("tensor", "list")),
        ):
            data = theirs if world.rank == last else ours
            await refused(ad.gather_distributed_data(data), DisagreementError, "rank 0", f"rank {last}", *facts)
    good = torch.ones(1)
    for bad, words in (
        (torch.tensor(3.0), "without dimensions"),
        ("text", "got a str"),
        (torch.ones(2, 2).to_sparse(), "sparse"),
    ):
        data = bad if world.rank == last else good  # type: ignore[assignment]
        await failure(world, last, lambda data=data: ad.gather_distributed_data(data), words)  # type: ignore[misc]
    await failure(
        world, last, lambda: ad.gather_distributed_data([object()] if world.rank == last else [1]), "object at [0]"
    )
    await refused(ad.gather_distributed_data(good, world.size + 1), ValueError, "world_size", world.size + 1)
    await refused(ad.gather_distributed_data(good, rank=world.rank + 1), ValueError, "rank", world.rank + 1)
    await ad.barrier()
