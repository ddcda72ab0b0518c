"""Tests radial-directional means against numpy in float64, and layouts whose tensors are combined as a whole."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from asyncdist.protocols.diloco.radial import embeddings_of, radial_mean_into
from asyncdist.protocols.exchange.layout.wire_layout import Scratch, WireLayout
from asyncdist.tensors.codecs import Codec, TopK, find_codec
from asyncdist.tensors.flat_state import FlatState

CODECS = [find_codec(name) for name in ("float32", "bfloat16", "float16", "int8", "q4")] + [TopK(share=0.1, block=64)]


def expected(parts: list[Any], weights: list[float]) -> Any:
    """Return the formula of the paper, in float64."""
    parts = [part.astype(np.float64) for part in parts]
    total = sum(weights)
    norms = [np.linalg.norm(part) for part in parts]
    units = [part / norm if norm else part for part, norm in zip(parts, norms, strict=True)]
    direction = sum(weight * unit for weight, unit in zip(weights, units, strict=True)) / total
    if np.linalg.norm(direction) < 1e-5:
        return sum(weight * part for weight, part in zip(weights, parts, strict=True)) / total
    length = sum(weight * norm for weight, norm in zip(weights, norms, strict=True)) / total
    return length * direction / np.linalg.norm(direction)


def radial(parts: list[Tensor], weights: list[float]) -> Tensor:
    into = torch.full_like(parts[0], 7.0)
    radial_mean_into(into, parts, weights)
    return into


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("seed", range(20))
def test_the_mean_equals_numpy(seed: int, dtype: torch.dtype) -> None:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    count, size = rng.randint(1, 6), rng.choice((1, 2, 7, 1000))
    weights = [rng.choice((1.0, rng.uniform(0.1, 5.0), 1e6)) for _ in range(count)]
    parts = [torch.randn(size, generator=generator, dtype=dtype) * rng.choice((1e-6, 1.0, 30.0)) for _ in weights]
    right = expected([part.numpy() for part in parts], weights)
    error = np.abs(radial(parts, weights).numpy() - right).max()
    assert error <= 8 * torch.finfo(dtype).eps * np.linalg.norm(right)


def test_the_mean_of_one_is_that_one() -> None:
    part = torch.randn(1001)
    assert torch.equal(radial([part], [0.3]), part)


def test_orthogonal_parts_keep_their_norm() -> None:
    """The plain mean of the four parts has half of their norm."""
    parts = [torch.zeros(4) for _ in range(4)]
    for place, part in enumerate(parts):
        part[place] = 2.0
    assert radial(parts, [1.0] * 4).tolist() == [1.0] * 4


def test_parts_of_one_direction_take_the_mean_norm() -> None:
    assert radial([torch.tensor([3.0, 4.0]), torch.tensor([6.0, 8.0])], [1.0, 1.0]).tolist() == [4.5, 6.0]


@pytest.mark.parametrize(
    "parts",
    [[[2.0, 0.0], [-1.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]], [[1.0, 0.0], [-0.5, 0.75**0.5], [-0.5, -(0.75**0.5)]]],
)
def test_cancelled_directions_take_the_plain_mean(parts: list[list[float]]) -> None:
    """The rounding error of three directions that cancel each other is not a direction."""
    found = radial([torch.tensor(part) for part in parts], [1.0] * len(parts))
    assert torch.allclose(found, torch.tensor(parts).mean(0), atol=1e-7)


@pytest.mark.parametrize("tiny", [1e-40, 1e-45])
def test_a_norm_without_a_reciprocal_takes_the_plain_mean(tiny: float) -> None:
    """Regression: the mean was NaN on all ranks."""
    into, parts = torch.empty(2), [torch.full((2,), tiny), torch.tensor([1.0, 0.5])]
    radial_mean_into(into, parts, [1.0, 1.0])
    assert into.tolist() == [0.5, 0.25]


def test_a_zero_has_no_direction() -> None:
    assert radial([torch.tensor([3.0, 4.0]), torch.zeros(2)], [1.0, 1.0]).tolist() == [1.5, 2.0]


# -- layouts ----------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A model with an embedding that is tied to the head, tensors of many sizes, and a complex tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(700, 300)
        self.head = nn.Linear(300, 700, bias=False)
        self.head.weight = self.embed.weight
        self.layers = nn.ModuleList(nn.Linear(size, 17) for size in (1, 300, 5, 90))
        self.norm = nn.BatchNorm1d(3)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.turn = nn.Parameter(torch.ones(5, dtype=torch.complex64))
        self.wide = nn.Parameter(torch.ones(11, dtype=torch.float64))


def laid_out(codec: Codec, owner_count: int) -> tuple[FlatState, WireLayout, set[int]]:
    """Return a layout, and the indices of its embeddings."""
    model = Net()
    flat = FlatState(model)
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tables = embeddings_of(model)
    assert tables == {"embed.weight", "head.weight"}
    divided = {index for index, each in enumerate(flat.entries) if not tables.isdisjoint(each.names)}
    return flat, WireLayout(flat.entries, range(len(flat.entries)), names, owner_count, codec, tables), divided


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("owner_count", [1, 3, 7])
def test_each_tensor_is_one_piece_unless_it_is_an_embedding(codec: Codec, owner_count: int) -> None:
    _, layout, divided = laid_out(codec, owner_count)
    for place, vector in enumerate(layout.vectors):
        slices = [each for each in layout.slices if each.vector == place]
        assert [each.first for each in slices] + [vector.count] == [0] + [each.last for each in slices]
        if vector.role != "stepped":
            continue
        whole = {cuts for each in slices for number, cuts in enumerate(pairwise(each.cuts)) if number in each.whole}
        firsts = [first for _, first, _ in vector.places] + [vector.count]
        right = {(first, firsts[k + 1]) for k, (index, first, _) in enumerate(vector.places) if index not in divided}
        assert whole == right
        for each in slices:
            pieces = layout.pieces(each)
            assert len(pieces) == len(each.cuts) - 1
            assert all(one.end == two.first and one.mean_end == two.mean_first for one, two in pairwise(pieces))
            assert (pieces[0].first, pieces[-1].end) == (0, layout.nbytes_of(each))
            assert pieces[-1].mean_end == layout.nbytes_of(each, of_mean=True)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("owner_count", [1, 3])
def test_tensors_are_combined_as_a_whole(codec: Codec, owner_count: int) -> None:
    """Each tensor has its radial mean, of the decoded values, and an embedding the plain mean; gaps remain zero."""
    _, layout, divided = laid_out(codec, owner_count)
    weights, given = [1.0, 2.0, 1.0], []
    for rank in range(3):
        encoded = layout.new_encoded()
        for vector, into in zip(layout.vectors, encoded, strict=True):
            flat = vector.values_of(into, Scratch())
            generator = torch.Generator().manual_seed(rank)
            for _, first, end in vector.places:
                drawn = torch.randn(end - first, generator=generator, dtype=torch.float64) * (rank + 1)
                flat[first:end].copy_(drawn)
            if vector.codec is not None:
                vector.codec.encode(flat, into)
        given.append(encoded)
    mean = layout.new_encoded(of_mean=True)
    for each in layout.slices:
        for number, piece in enumerate(layout.pieces(each)):
            parts = [layout.part(own, each)[piece.first : piece.end] for own in given]
            into = layout.part(mean, each, of_mean=True)[piece.mean_first : piece.mean_end]
            kind = (radial_mean_into,) if number in each.whole else ()
            layout.average(each, number, parts, weights, into, *kind)
    for place, vector in enumerate(layout.vectors):
        if vector.role != "stepped":
            continue
        values = [vector.decoded(own[place]).numpy() for own in given]
        right = vector.new_flat()
        for index, first, end in vector.places:
            parts = [own[first:end] for own in values]
            plain = sum(weight * part.astype(np.float64) for weight, part in zip(weights, parts, strict=True)) / 4.0
            right[first:end] = torch.from_numpy(plain if index in divided else expected(parts, weights))
        found = vector.decoded(mean[place], of_mean=True)
        if vector.mean.codec is not None:
            encoded = torch.empty_like(mean[place])
            vector.mean.codec.encode(right, encoded)
            right = vector.decoded(encoded, of_mean=True)
        allowed = 1e-6 if vector.mean.codec is None else 0.5
        assert torch.allclose(found, right, rtol=allowed, atol=1e-5), (found - right).abs().max()
        covered = torch.zeros(vector.count, dtype=torch.bool)
        for _, first, end in vector.places:
            covered[first:end] = True
        assert not found[~covered].any()
