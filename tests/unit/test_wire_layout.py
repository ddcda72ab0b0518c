"""Tests the layout of an exchange: slices cover each element once, and the mean of slices is the mean of the whole."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from asyncdist.protocols.exchange.layout.copies import as_written, gather, norm_of, scatter, subtract
from asyncdist.protocols.exchange.layout.wire_layout import Scratch, Vector, WireLayout
from asyncdist.tensors.codecs import Codec, TopK, find_codec
from asyncdist.tensors.flat_state import FlatState
from asyncdist.tensors.means import weighted_mean_into
from asyncdist.tensors.optimizers.weights import STATE_PREFIX

CODECS = [find_codec(name) for name in ("float32", "bfloat16", "float16", "int8", "q4")] + [TopK(share=0.1, block=64)]
SEEDS = range(12)


class Everything(nn.Module):
    """A model with parameters and buffers of all roles and dtypes: 0-d, empty, tied, complex, integer and bool ones."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)

        def drawn(dtype: torch.dtype) -> Tensor:
            shape = rng.choice(((), (0,), (1,), (3, 5), (2, 0), (7, 11, 3), (257,), (300, 3)))
            if dtype.is_floating_point or dtype.is_complex:
                return torch.randn(shape, generator=generator, dtype=dtype if dtype.itemsize > 2 else None).to(dtype)
            return torch.randint(0, 2, shape, generator=generator).to(dtype)

        floating = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64)
        for number in range(rng.randint(1, 8)):
            self.register_parameter(f"p{number}", nn.Parameter(drawn(rng.choice(floating))))
        for number in range(rng.randint(0, 8)):
            self.register_buffer(f"b{number}", drawn(rng.choice((*floating, torch.int64, torch.int32, torch.bool))))
        self.tied = self.p0


def laid_out(
    seed: int, codec: Codec, owner_count: int | None = None
) -> tuple[FlatState, list[Tensor], list[WireLayout]]:
    """Return a model's entries, in one to three fragments."""
    model = Everything(seed)
    flat = FlatState(model)
    rng = random.Random(-seed)
    count = min(len(flat.entries), rng.randint(1, 3))
    owners = rng.randint(1, 5)
    of = [*range(count), *(rng.randrange(count) for _ in flat.entries)][: len(flat.entries)]
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    layouts = [
        WireLayout(
            flat.entries, [i for i, each in enumerate(of) if each == fragment], parameters, owner_count or owners, codec
        )
        for fragment in range(count)
    ]
    return flat, list(flat.tensors(flat.new_buffers())), layouts


def same(one: Tensor, two: Tensor) -> bool:
    return one.dtype == two.dtype and one.shape == two.shape and bool(torch.equal(one, two))


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("seed", SEEDS)
def test_slices_cover_each_byte_of_each_entry_once(seed: int, codec: Codec) -> None:
    flat, tensors, layouts = laid_out(seed, codec)
    places = sorted(place for layout in layouts for vector in layout.vectors for place, *_ in vector.places)
    assert places == list(range(len(flat.entries))), "each entry must be in one vector of one fragment"
    for layout in layouts:
        encoded = layout.new_encoded()
        covered = [torch.zeros_like(each.view(torch.uint8)) for each in encoded]
        elements = [np.zeros(vector.count, int) for vector in layout.vectors]
        for number, each in enumerate(layout.slices):
            assert each.number == number and each.first < each.last
            elements[each.vector][each.first : each.last] += 1
            part = layout.part([own.view(each.dtype) for own, each in zip(covered, encoded, strict=True)], each)
            assert part.numel() == layout.nbytes_of(each)
            places = np.zeros(layout.nbytes_of(each, of_mean=True), int)
            for first, end, mean_first, mean_end in layout.pieces(each):
                assert first < end
                part[first:end] += 1
                places[mean_first:mean_end] += 1
            assert (places == 1).all()
        assert all((each == 1).all() for each in (*covered, *elements))
        assert layout.nbytes == sum(map(layout.nbytes_of, layout.slices))
        assert layout.mean_nbytes == sum(layout.nbytes_of(each, of_mean=True) for each in layout.slices)
        for vector in layout.vectors:
            check_places(vector, tensors)


def check_places(vector: Vector, tensors: list[Tensor]) -> None:
    end = 0
    for index, first, last in vector.places:
        tensor = tensors[index]
        size = tensor.numel() * (tensor.element_size() if vector.role == "copied" else 1 + tensor.is_complex())
        assert first >= end and last - first == size, f"entry {index} overlaps the previous one or has the wrong size"
        assert first == end or vector.role == "copied"
        end = last


@pytest.mark.parametrize("seed", SEEDS)
def test_float32_values_return_bit_for_bit(seed: int) -> None:
    _, tensors, layouts = laid_out(seed, find_codec("float32"))
    found = [torch.zeros_like(tensor) for tensor in tensors]
    for layout in layouts:
        for vector, encoded in zip(layout.vectors, layout.new_encoded(), strict=True):
            gather(vector, tensors, encoded)
            scatter(vector, vector.decoded(encoded), found)
    assert all(map(same, tensors, found))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("of_mean", [False, True])
def test_the_gaps_in_reused_memory_are_zero(seed: int, of_mean: bool) -> None:
    """Regression: gaps were sent with the old contents of the memory, on which the digests of simulations depended."""
    for layout in laid_out(seed, CODECS[seed % len(CODECS)])[2]:
        memory = torch.full((layout.memory_nbytes(of_mean=of_mean),), 255, dtype=torch.uint8)
        views = layout.encoded_in(memory, of_mean=of_mean)
        for vector, view in zip(layout.vectors, views, strict=True):
            if vector.role == "copied":
                for _, first, end in vector.places:
                    view[first:end] = 0
            else:
                view.zero_()
        assert not memory.any()


@pytest.mark.parametrize("seed", SEEDS)
def test_differences_are_measured_from_the_written_anchor(seed: int) -> None:
    """Regression: the differences of narrow dtypes contained the rounding of the anchor."""
    _, tensors, layouts = laid_out(seed, find_codec("float32"))
    for layout in layouts:
        for vector in layout.stepped:
            anchor, start, flat, difference = (vector.new_flat() for _ in range(4))
            anchor.copy_(torch.linspace(-1.0, 1.0, vector.count, dtype=vector.dtype))
            gather(vector, tensors, flat)
            subtract(vector, anchor, tensors, difference)
            written = [torch.empty_like(tensor) for tensor in tensors]
            scatter(vector, anchor, written)
            gather(vector, written, start)
            assert same(difference, torch.from_numpy(start.numpy() - flat.numpy()))
            assert same(as_written(vector, anchor, tensors), start)


def contributions(layout: WireLayout, tensors: list[Tensor], ranks: int, seed: int) -> list[list[Tensor]]:
    """Return encoded vectors of several ranks, which differ in all values."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for rank in range(ranks):
        given = []
        for vector, encoded in zip(layout.vectors, layout.new_encoded(), strict=True):
            flat = vector.new_flat()
            if vector.role == "copied":
                flat.random_(generator=generator)
            else:
                gather(vector, tensors, flat)
                flat.add_(torch.randn(vector.count, generator=generator, dtype=vector.dtype) * (rank + 1))
            if vector.codec is None:
                encoded.copy_(flat)
            else:
                vector.codec.encode(flat, encoded)
            given.append(encoded)
        found.append(given)
    return found


def averaged(layout: WireLayout, given: list[list[Tensor]], weights: list[float]) -> list[Tensor]:
    """Average all pieces of all slices, in an arbitrary order."""
    mean = layout.new_encoded(of_mean=True)
    work = [(each, number, piece) for each in layout.slices for number, piece in enumerate(layout.pieces(each))]
    random.Random(0).shuffle(work)
    for each, number, piece in work:
        parts = [layout.part(own, each)[piece.first : piece.end] for own in given]
        into = layout.part(mean, each, of_mean=True)[piece.mean_first : piece.mean_end]
        layout.average(each, number, parts, weights, into)
    return mean


@pytest.mark.parametrize("weights", [[1.0] * 3, [1.0, 3.0, 2.0], [5.0]], ids=str)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_mean_of_slices_is_the_mean_in_rank_order(seed: int, weights: list[float]) -> None:
    _, tensors, layouts = laid_out(seed, find_codec("float32"))
    for layout in layouts:
        given = contributions(layout, tensors, len(weights), seed)
        mean = averaged(layout, given, weights)
        for place, vector in enumerate(layout.vectors):
            arrays = [own[place].numpy() for own in given]
            right: Any = arrays[0]
            if vector.role != "copied" and len(weights) > 1:
                scalar = arrays[0].dtype.type
                right = scalar(0)
                for weight, array in zip(weights, arrays, strict=True):
                    right = right + scalar(weight) * array
                right = right / scalar(sum(weights))
            assert np.array_equal(mean[place].numpy(), right), (vector.role, vector.dtype)


@pytest.mark.parametrize("codec", CODECS[1:-1], ids=lambda codec: codec.name)
@pytest.mark.parametrize("owner_count", [2, 3, 5])
def test_the_mean_of_encoded_slices_is_that_of_the_whole(codec: Codec, owner_count: int) -> None:
    """Slices end at the blocks of a codec, so the number of owners changes no bit."""
    for seed in SEEDS:
        _, tensors, divided = laid_out(seed, codec, owner_count)
        _, _, whole = laid_out(seed, codec, 1)
        for one, two in zip(divided, whole, strict=True):
            given = contributions(one, tensors, 3, seed)
            assert all(map(same, averaged(one, given, [1.0, 2.0, 1.0]), averaged(two, given, [1.0, 2.0, 1.0])))


@pytest.mark.parametrize("share", [1e-6, 0.03, 0.1, 0.3, 1.0])
@pytest.mark.parametrize("ranks", [1, 4, *(pytest.param(count, marks=pytest.mark.long) for count in (2, 5))])
def test_the_mean_of_top_k_vectors_is_exact(share: float, ranks: int) -> None:
    """Regression: the mean was encoded like a contribution, which lost 0.67 of its norm with four ranks."""
    weights = [1.0, 2.0, 0.5, 3.0, 1.0][:ranks]
    for seed in SEEDS:
        for block in (1, 7, 64, 4096):
            _, tensors, layouts = laid_out(seed, TopK(share=share, block=block), ranks)
            for layout in layouts:
                given = contributions(layout, tensors, ranks, seed)
                mean = averaged(layout, given, weights)
                assert layout.mean_nbytes <= max(layout.nbytes, layout.unencoded_nbytes)
                for place, vector in enumerate(layout.vectors):
                    if vector.codec is None:
                        continue
                    decoded = [torch.zeros(vector.count) for _ in given]
                    for own, into in zip(given, decoded, strict=True):
                        vector.codec.decode(own[place], into)
                    exact = torch.zeros(vector.count)
                    weighted_mean_into(exact, decoded, weights)
                    assert torch.equal(vector.decoded(mean[place], of_mean=True), exact)


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_a_top_k_mean_has_the_values_of_all_contributions(ranks: int) -> None:
    """The mean needs at most the bytes of all contributions, and at most the bytes of a float32 mean."""
    entries = FlatState(nn.Linear(4096, 10, bias=False)).entries
    layout = WireLayout(entries, [0], {"weight"}, ranks, TopK(share=0.03))
    assert layout.nbytes == 10 * 123 * 6
    assert layout.mean_nbytes == min(ranks * layout.nbytes, 4 * 40960)


def test_pieces_of_large_slices_change_no_bit() -> None:
    """The vector has more than one piece per slice, and its last piece is short."""
    entries = FlatState(nn.Linear(1000, 301, bias=False)).entries
    for codec in CODECS:
        layout = WireLayout(entries, [0], {"weight"}, 2, codec)
        assert min(len(layout.pieces(each)) for each in layout.slices) > 1
        given = contributions(layout, [torch.zeros(301, 1000)], 2, 0)
        (vector,), (mean,) = layout.vectors, averaged(layout, given, [1.0, 1.0])
        decoded = [vector.new_flat() for _ in given]
        for own, into in zip(given, decoded, strict=True):
            vector.sent.decode(own[0], into)
        right = (decoded[0] + decoded[1]) / 2
        if vector.mean.codec is not None:
            (encoded,) = layout.new_encoded(of_mean=True)
            vector.mean.codec.encode(right, encoded)
            right = encoded
        assert same(mean, right), codec.name


def test_bfloat16_rounds_once_when_it_is_written() -> None:
    tensor = torch.tensor([1.0, -3.0], dtype=torch.bfloat16)
    model = nn.ParameterDict({"w": nn.Parameter(tensor)})
    layout = WireLayout(FlatState(model).entries, [0], {"w"}, 1, find_codec("float32"))
    (vector,) = layout.vectors
    assert vector.dtype == torch.float32
    scatter(vector, torch.tensor([1.0 + 2**-9, 1.0 + 3 * 2**-9]), [tensor])
    assert tensor.tolist() == [1.0, 1.0078125]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_norm_of_finite_values_is_finite(dtype: torch.dtype) -> None:
    """Regression: the squares of a mask of finfo.min overflow, so the rank counted as not finite."""
    values = torch.linspace(-3.0, 4.0, 70_001, dtype=dtype)
    assert norm_of(values) == pytest.approx(np.linalg.norm(values.double().numpy()), rel=1e-5)
    mask = torch.full((70_001,), torch.finfo(torch.float32).min, dtype=dtype)
    assert norm_of(mask) == pytest.approx(70_001**0.5 * torch.finfo(torch.float32).max, rel=1e-5)
    assert norm_of(mask * 1e200) == (np.inf if dtype == torch.float32 else 2.0**400)
    assert norm_of(torch.zeros(0, dtype=dtype)) == 0.0
    for odd in (torch.inf, torch.nan):
        mask[0] = odd
        assert not np.isfinite(norm_of(mask))


@pytest.mark.parametrize("codec", [find_codec("int8"), find_codec("bfloat16")], ids=lambda codec: codec.name)
def test_decoded_values_reuse_the_memory_of_earlier_values(codec: Codec) -> None:
    model = nn.Linear(100, 3)
    flat, scratch = FlatState(model), Scratch()
    names = {name for name, _ in model.named_parameters()}
    first, second = (
        WireLayout(flat.entries, range(len(flat.entries)), names, 2, codec, divisible).stepped[0]
        for divisible in (None, {"weight"})  # whole tensors start at blocks of the codec, with gaps before them
    )
    encoded = [torch.zeros(vector.sent.nbytes(0, vector.count), dtype=torch.uint8) for vector in (first, second)]
    values = second.values_of(encoded[1], scratch).fill_(1.0)
    (decoded,) = first.decoded_parts([encoded[0]], scratch)
    assert decoded.data_ptr() == values.data_ptr() and not decoded.any()
    values.fill_(1.0)
    own, places = second.values_of(encoded[1], scratch), [range(begin, end) for _, begin, end in second.places]
    assert own.data_ptr() == values.data_ptr()
    assert not any(own[place] for place in range(second.count) if not any(place in each for each in places))


def test_names_are_compared_without_wrappers_of_compile() -> None:
    """Regression: the state of a schedule-free optimizer of a compiled model did not fit to the plain model."""

    def checksum_of(prefix: str) -> int:
        names = (f"{prefix}0.weight", f"{STATE_PREFIX}{prefix}0.weight")
        entries = [replace(entry, names=(name,)) for entry, name in zip(plain.entries, names, strict=True)]
        return WireLayout(entries, range(2), set(names), 2, find_codec("float32")).checksum_of_names()

    plain = FlatState(nn.Linear(2, 3))
    assert checksum_of("_orig_mod.") == checksum_of("") != checksum_of("other.")
