"""Tests reductions in which each rank sums one share, in one process. On MPI: `cases_population`, `cases_models`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch
from support.local import worlds

from asyncdist.collectives.algorithms import ordered_reduce
from asyncdist.collectives.algorithms.ordered_reduce import BufferPool, fold_in_shares
from asyncdist.tensors.bucket import Bucket
from asyncdist.tensors.means import mean_into


def mean(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = torch.empty_like(parts[0])
    mean_into(total, parts)
    return total


def numbers(rank: int, count: int) -> torch.Tensor:
    """Return numbers whose sum differs in its bits for each order of summation."""
    generator = torch.Generator().manual_seed(rank)
    scale = 10.0 ** torch.randint(-3, 9, (count,), generator=generator)
    return torch.randn(count, generator=generator) * scale


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordered_reduce, "PIECE_NBYTES", 96)
    monkeypatch.setattr(ordered_reduce, "_BLOCK_NBYTES", 12)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("count", [1, 2, 4, 23, 24, 25, 240, 1003])
async def test_every_rank_gets_the_fold_in_rank_order(size: int, count: int) -> None:
    """Pieces and shares of all lengths, empty ones included; in place and into another tensor of another dtype."""
    parts = [numbers(rank, count) for rank in range(size)]
    expected = mean(parts)
    async with worlds(size) as made:
        for _ in range(2):  # the second time in the rooms of the first
            flats = [part.clone() for part in parts]
            await asyncio.gather(
                *(
                    fold_in_shares(w.services.engine, w.collectives._buffers, w.group, flat, mean, flat)
                    for w, flat in zip(made, flats, strict=True)
                )
            )
            assert all(torch.equal(flat, expected) for flat in flats)
        results = [torch.empty(count, dtype=torch.float64) for _ in range(size)]
        await asyncio.gather(
            *(
                fold_in_shares(
                    w.services.engine,
                    BufferPool(),
                    w.group,
                    part.clone(),
                    lambda parts: mean(parts).double(),
                    result,
                )
                for w, part, result in zip(made, parts, results, strict=True)
            )
        )
        assert all(torch.equal(result, expected.double()) for result in results)
        assert all(world.services.leftovers() == [] for world in made)


@pytest.mark.parametrize("size", [2, 3])
async def test_a_spread_is_read_and_written_piece_by_piece(size: int) -> None:
    """The means are written into tensors of any layout or a narrower dtype; the flat tensors stay unchanged."""
    shapes = [(), (7,), (0, 3), (40, 9), (5, 5), (1,), (123,)]
    count = sum(torch.Size(shape).numel() for shape in shapes)
    lines = [numbers(rank, count).bfloat16() for rank in range(size)]
    expected = mean([line.float() for line in lines]).bfloat16()
    async with worlds(size) as made:
        spreads, tensors = [], []
        for line in lines:
            found = [part.view(shape) for part, shape in zip(split(line, shapes), shapes, strict=True)]
            found = [turned(part) if part.ndim == 2 else part.clone() for part in found]
            tensors.append(found)
            spreads.append(spread_over(found, count))
        await asyncio.gather(
            *(
                fold_in_shares(w.services.engine, BufferPool(), w.group, spread.flat, mean, spread)
                for w, spread in zip(made, spreads, strict=True)
            )
        )
    for spread, found, line in zip(spreads, tensors, lines, strict=True):
        assert torch.equal(torch.cat([tensor.reshape(-1) for tensor in found]), expected)
        assert torch.equal(spread.flat, line.float())


@pytest.mark.parametrize("stored_count", [0, 1, 8, 60, 91, 109])
def test_giving_up_puts_everything_back(stored_count: int) -> None:
    """A cancelled average, at any stage, reads its remaining inputs at once and writes nothing afterwards."""
    before = [numbers(0, 7), turned(numbers(1, 96).view(12, 8)), numbers(2, 6)]
    tensors = [tensor.clone() for tensor in before]
    spread = spread_over(tensors, 109)
    for start in range(0, stored_count, 5):
        spread.copy_in(start, min(start + 20, 109))
        spread.copy_out(start, torch.zeros(min(5, stored_count - start)))
    spread.rollback()
    assert all(torch.equal(tensor, was) for tensor, was in zip(tensors, before, strict=True))
    tensors[2].zero_()
    spread.copy_in(0, 109)
    spread.copy_out(stored_count, torch.zeros(109 - stored_count))
    assert all(torch.equal(tensor, was) for tensor, was in zip(tensors[:2], before[:2], strict=True))
    assert torch.equal(spread.flat, torch.cat([was.reshape(-1) for was in before]))


def split(line: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> Sequence[torch.Tensor]:
    return torch.split(line, [torch.Size(shape).numel() for shape in shapes])


def turned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, column by column in memory."""
    return tensor.t().contiguous().t()


def spread_over(tensors: Sequence[torch.Tensor], count: int) -> Bucket:
    flat = torch.full((count,), float("nan"))
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return Bucket(flat, [(tensor, part.view(tensor.shape)) for tensor, part in zip(tensors, parts, strict=True)])
