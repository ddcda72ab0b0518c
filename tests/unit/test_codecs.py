"""Tests the wire codecs against a second implementation with numpy, and against their stated errors."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray
from support import numpy_codecs
from torch import Tensor

from asyncdist.tensors.codecs import Codec, ErrorFeedback, TopK, find_codec

LAWS = settings(deadline=None, derandomize=True, max_examples=60)
NAMES = ("float32", "bfloat16", "float16", "int8", "q4", "topk")
SCALED = ("float16", "int8", "q4")
FINFO = torch.finfo(torch.float32)
Doubles = NDArray[np.float64]
Kind = Callable[[np.random.Generator, int], Doubles]
NON_FINITE = (math.nan, math.inf, -math.inf)


def normal(generator: np.random.Generator, count: int) -> Doubles:
    return generator.standard_normal(count)


def spread(generator: np.random.Generator, count: int) -> Doubles:
    """Return values of all magnitudes of float32, including denormal and the largest ones."""
    return (generator.uniform(-1, 1, count) * 2.0 ** generator.integers(-150, 129, count)).clip(FINFO.min, FINFO.max)


def ties(generator: np.random.Generator, count: int) -> Doubles:
    """Return few distinct values, among them halves of int8's scale."""
    return generator.integers(-254, 255, count) / 2.0


def grid(generator: np.random.Generator, count: int) -> Doubles:
    """Return multiples of 2^-6 up to 128, with more digits than a codec keeps."""
    return generator.integers(-(2**13), 2**13, count) / 64.0


def tiny(generator: np.random.Generator, count: int) -> Doubles:
    return generator.uniform(-1, 1, count) * 2.0**-126


def extreme(generator: np.random.Generator, count: int) -> Doubles:
    """Return the largest values of float32 among ordinary values."""
    steps = generator.integers(0, 3, count) * 2.0**104
    return np.where(generator.random(count) < 0.1, generator.choice([-1, 1], count) * (FINFO.max - steps), 1e30)


def sparse(generator: np.random.Generator, count: int) -> Doubles:
    """Return mostly zeros of both signs, with whole blocks of zeros."""
    return np.where(generator.random(count) < 2e-3, generator.standard_normal(count), generator.choice([0.0, -0.0]))


KINDS: tuple[Kind, ...] = (normal, spread, ties, tiny, extreme, sparse)
KIND = st.sampled_from(KINDS)
SEED = st.integers(0, 2**32 - 1)
COUNT = st.one_of(st.sampled_from([0, 1, 255, 256, 257, 512, 4095, 4096, 4097]), st.integers(0, 10_000))


def draw(kind: Kind, seed: int, count: int) -> Tensor:
    return torch.from_numpy(kind(np.random.default_rng(seed), count).astype(np.float32))


def encode(codec: Codec, values: Tensor) -> Tensor:
    encoded = torch.full((codec.nbytes(len(values)),), 0xA5, dtype=torch.uint8)
    codec.encode(values, encoded)
    return encoded


def decode(codec: Codec, encoded: Tensor, count: int) -> Tensor:
    values = torch.full((count,), 12.5)
    codec.decode(encoded, values)
    return values


def rows(values: Tensor, block: int = 256) -> Tensor:
    """Return the values as rows of one block each, in float64; the last row is filled up with zeros."""
    return torch.nn.functional.pad(values.double(), (0, -len(values) % block)).view(-1, block)


def largest(values: Tensor) -> Tensor:
    """Return the largest magnitude of each block, as a column."""
    return rows(values).abs().amax(dim=1, keepdim=True)


@pytest.mark.parametrize("name", NAMES)
@LAWS
@given(kind=KIND, seed=SEED, count=COUNT)
def test_bits_are_those_of_a_second_implementation(name: str, kind: Kind, seed: int, count: int) -> None:
    values, codec = draw(kind, seed, count), find_codec(name)
    encoded = encode(codec, values)
    expected = numpy_codecs.encode(name, values.numpy())
    assert encoded.numpy().tobytes() == b"".join(expected)
    decoded = decode(codec, encoded, count)
    assert decoded.numpy().tobytes() == numpy_codecs.decode(name, expected, count).tobytes()


def test_float32_keeps_each_bit_and_needs_four_bytes() -> None:
    patterns = torch.tensor([0x7FC00001, -0x400000, 0x7F800000, 1, -(2**31), 0x3F800000], dtype=torch.int32)
    codec = find_codec("float32")
    decoded = decode(codec, encode(codec, patterns.view(torch.float32)), len(patterns))
    assert torch.equal(decoded.view(torch.int32), patterns)
    assert codec.nbytes(3) == 12


@LAWS
@given(kind=KIND, seed=SEED, count=COUNT)
def test_bfloat16_errs_by_at_most_2_to_the_minus_8(kind: Kind, seed: int, count: int) -> None:
    values, codec = draw(kind, seed, count), find_codec("bfloat16")
    error = (decode(codec, encode(codec, values), count).double() - values.double()).abs()
    assert bool((error <= values.double().abs() * 2.0**-8 + 2.0**-134).all())


def test_bfloat16_keeps_infinities_and_finite_values_apart() -> None:
    values = torch.tensor([FINFO.max, FINFO.min, math.inf, -math.inf, math.nan, 3.39e38])
    codec = find_codec("bfloat16")
    decoded = decode(codec, encode(codec, values), len(values))
    assert torch.equal(decoded.isfinite(), values.isfinite())
    assert decoded[2:4].tolist() == [math.inf, -math.inf]
    assert decoded[:2].tolist() == [torch.finfo(torch.bfloat16).max, torch.finfo(torch.bfloat16).min]


@LAWS
@given(kind=KIND, seed=SEED, count=COUNT)
def test_int8_errs_by_at_most_half_of_the_scale(kind: Kind, seed: int, count: int) -> None:
    values, codec = draw(kind, seed, count), find_codec("int8")
    decoded = decode(codec, encode(codec, values), count)
    scale = (largest(values) / 127).clamp(min=2.0**-126)
    error = (rows(decoded) - rows(values)).abs()
    assert bool((error <= scale * (0.5 + 2.0**-16)).all())
    assert bool(decoded.isfinite().all())


@LAWS
@given(kind=KIND, seed=SEED, count=COUNT)
def test_float16_errs_by_at_most_2_to_the_minus_11(kind: Kind, seed: int, count: int) -> None:
    values, codec = draw(kind, seed, count), find_codec("float16")
    decoded = decode(codec, encode(codec, values), count)
    error = (rows(decoded) - rows(values)).abs()
    bound = (rows(values).abs() * 2.0**-11).maximum(largest(values).clamp(min=2.0**-112) * 2.0**-39)
    assert bool((error <= bound).all())
    assert bool(decoded.isfinite().all())


@LAWS
@given(kind=KIND, seed=SEED, count=COUNT)
def test_q4_errs_by_at_most_a_factor_of_root_2(kind: Kind, seed: int, count: int) -> None:
    values, codec = draw(kind, seed, count), find_codec("q4")
    decoded = rows(decode(codec, encode(codec, values), count))
    exact, scale = rows(values), largest(values).clamp(min=2.0**-120)
    is_kept = exact.abs() > scale * 2.0**-6.5 * (1 + 2.0**-22)
    is_dropped = exact.abs() < scale * 2.0**-6.5 * (1 - 2.0**-22)
    assert bool((decoded[is_dropped] == 0).all())
    logarithms = (decoded[is_kept] / exact[is_kept]).log2()  # NaN if the signs differ
    assert bool((logarithms.abs() <= 0.5 + 2.0**-22).all())


def test_q4_has_the_levels_of_its_definition() -> None:
    codec, count = find_codec("q4"), 16
    values = torch.tensor([1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125]) * 3.0
    values = torch.cat([values, -values])
    decoded = decode(codec, encode(codec, values), count)
    assert decoded[:7].tolist() == values[:7].tolist()
    assert decoded[8:15].tolist() == values[8:15].tolist()
    assert decoded[[7, 15]].tolist() == [0.0, 0.0]


SHARES = st.one_of(st.sampled_from([0.01, 0.03, 0.1, 0.5, 1.0]), st.floats(1e-6, 1.0))


@LAWS
@given(kind=KIND, seed=SEED, count=COUNT, share=SHARES, block=st.sampled_from([1, 2, 100, 4096, 65536]))
def test_topk_contracts_and_keeps_the_largest_values(
    kind: Kind, seed: int, count: int, share: float, block: int
) -> None:
    values, codec = draw(kind, seed, count), TopK(share=share, block=block)
    decoded = rows(decode(codec, encode(codec, values), count), block)
    exact = rows(values, block)
    assert bool(((decoded == exact) | (decoded == 0)).all())
    left = (exact - decoded).square().sum(dim=1)
    assert bool((left <= (1 - share) * exact.square().sum(dim=1) * (1 + 1e-12)).all())
    largest_left = (exact - decoded).abs().amax(dim=1, keepdim=True)
    assert bool((exact.abs() >= largest_left)[decoded != 0].all())


@pytest.mark.parametrize("block", [5, 65536])
def test_topk_keeps_the_first_among_equal_magnitudes(block: int) -> None:
    values = torch.tensor([0.0, -2.0, 1.0, 2.0, -1.0] * (block // 5))[:block]
    values = torch.nn.functional.pad(values, (0, block - len(values)))
    codec, count = TopK(share=0.6, block=block), len(values)
    decoded = decode(codec, encode(codec, values), count)
    assert int((decoded != 0).sum()) == math.ceil(0.6 * block)
    ones = (decoded.abs() == 1).nonzero().view(-1)
    assert torch.equal(ones, (values.abs() == 1).nonzero().view(-1)[: len(ones)])


@pytest.mark.parametrize("bad", NON_FINITE)
def test_topk_sends_non_finite_values_first(bad: float) -> None:
    values, codec = draw(spread, 1, 5000), find_codec("topk")
    values[[17, 4999]] = bad
    decoded = decode(codec, encode(codec, values), 5000)
    assert decoded.isfinite().logical_not().nonzero().view(-1).tolist() == [17, 4999]
    values[:200] = bad  # more values than the codec can send
    assert not decode(codec, encode(codec, values), 5000)[:123].isfinite().any()


@pytest.mark.parametrize("name", NAMES)
def test_damaged_bytes_are_decoded_without_an_error(name: str) -> None:
    codec = find_codec(name)
    generator = np.random.default_rng(1)
    for count in (1, 300, 5000):
        encoded = torch.from_numpy(generator.integers(0, 256, codec.nbytes(count), dtype=np.uint8))
        decode(codec, encoded, count)


def test_topk_with_wrong_options_is_refused() -> None:
    for share in (0.0, -0.1, 1.01, math.nan, True, "1"):
        with pytest.raises(ValueError, match="share must be a number above 0 and at most 1"):
            TopK(share=share)  # type: ignore[arg-type]
    assert repr(TopK(share=np.float64(0.5), block=np.int64(8))) == "TopK(share=0.5, block=8)"  # type: ignore[arg-type]
    for block in (0, 65537, 2.5):
        with pytest.raises(ValueError, match="block must be"):
            TopK(block=block)  # type: ignore[arg-type]


def test_encoded_vectors_have_the_stated_sizes() -> None:
    sizes = {name: find_codec(name).nbytes(1 << 20) / (1 << 20) for name in NAMES}
    expected = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.016, "int8": 1.016, "q4": 0.516, "topk": 0.18}
    assert {name: round(size, 3) for name, size in sizes.items()} == expected
    assert [find_codec(name).nbytes(0) for name in NAMES] == [0] * 6
    assert [find_codec(name).nbytes(257) for name in NAMES] == [1028, 514, 522, 265, 137, 48]


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("bad", NON_FINITE)
def test_a_non_finite_value_makes_exactly_its_block_nan(name: str, bad: float) -> None:
    values, codec = draw(normal, 1, 1000), find_codec(name)
    clean = decode(codec, encode(codec, values), 1000)
    for place in (0, 300, 999):
        damaged = values.clone()
        damaged[place] = bad
        decoded = decode(codec, encode(codec, damaged), 1000)
        expected = torch.arange(1000) // 256 == place // 256
        assert torch.equal(decoded.isnan(), expected)
        assert torch.equal(decoded[~expected], clean[~expected])


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("bad", NON_FINITE)
def test_a_non_finite_value_is_found_at_every_place(name: str, bad: float) -> None:
    codec = find_codec(name)
    values = draw(normal, 2, 256 * 256).view(256, 256)
    values.fill_diagonal_(bad)
    assert bool(decode(codec, encode(codec, values.view(-1)), 256 * 256).isnan().all())


@pytest.mark.parametrize("name", NAMES)
@LAWS
@given(seed=SEED, count=COUNT, data=st.data())
def test_slices_of_whole_blocks_are_encoded_like_the_whole(
    name: str, seed: int, count: int, data: st.DataObject
) -> None:
    values, codec = draw(normal, seed, count), find_codec(name)
    whole = encode(codec, values)
    start = codec.block * data.draw(st.integers(0, count // codec.block))
    stop = min(count, start + codec.block * data.draw(st.integers(0, 8)))
    its_bytes = whole[codec.nbytes(start) : codec.nbytes(stop)]
    assert torch.equal(encode(codec, values[start:stop]), its_bytes)
    assert torch.equal(decode(codec, its_bytes, stop - start), decode(codec, whole, count)[start:stop])


@pytest.mark.parametrize("name", NAMES)
def test_pieces_of_a_large_vector_are_encoded_like_the_whole(name: str) -> None:
    """The vector needs several passes of the codec, the last of which ends within a block."""
    count = 3 * (1 << 16) + 77
    values, codec = draw(normal, 7, count), find_codec(name)
    parts = [encode(codec, part) for part in torch.split(values, 1 << 14)]
    whole = encode(codec, values)
    assert torch.equal(torch.cat(parts), whole)
    decoded = [decode(codec, part, min(1 << 14, count - (place << 14))) for place, part in enumerate(parts)]
    assert torch.equal(torch.cat(decoded), decode(codec, whole, count))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("offset", range(5))
def test_tensors_may_begin_at_any_address(name: str, offset: int) -> None:
    count = 70_000 + 13
    memory, codec = draw(normal, 3, count + offset), find_codec(name)
    values = memory[offset:]
    expected = encode(codec, values.clone())
    room = torch.zeros(offset + codec.nbytes(count) + 9, dtype=torch.uint8)
    codec.encode(values, room[offset : offset + codec.nbytes(count)])
    assert torch.equal(room[offset : offset + codec.nbytes(count)], expected)
    assert not room[:offset].any()
    assert not room[offset + codec.nbytes(count) :].any()
    decoded = torch.zeros(count + offset)
    codec.decode(room[offset : offset + codec.nbytes(count)], decoded[offset:])
    assert torch.equal(decoded[offset:], decode(codec, expected, count))


@pytest.mark.parametrize("name", NAMES)
def test_vectors_may_require_gradients_and_have_one_value(name: str) -> None:
    codec, values = find_codec(name), draw(normal, 4, 1000)
    expected = encode(codec, values)
    assert torch.equal(encode(codec, values.clone().requires_grad_()), expected)
    parameter = torch.nn.Parameter(torch.zeros(1000))
    codec.decode(expected, parameter)
    assert torch.equal(parameter.detach(), decode(codec, expected, 1000))
    single = values[::700][1:]  # its stride is 700
    assert torch.equal(encode(codec, single), encode(codec, single.clone()))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_no_step_reads_a_value_on_the_host(name: str) -> None:
    """Tensors on the meta device have no values, so that a wait for a device would be an error here."""
    codec, count = find_codec(name), 70_000
    values = torch.empty(count, device="meta")
    encoded = torch.empty(codec.nbytes(count), dtype=torch.uint8, device="meta")
    codec.encode(values, encoded)
    codec.decode(encoded, values)
    ErrorFeedback(count, decay=0.9, device="meta").encode(codec, values, encoded)


@pytest.mark.cuda
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_cuda_device_gives_the_same_bits_without_a_wait(name: str, kind: Kind) -> None:
    count = 70_000 + 13
    values, codec = draw(kind, 5, count), find_codec(name)
    expected = encode(codec, values)
    on_device = values.cuda()
    encoded = torch.empty(codec.nbytes(count), dtype=torch.uint8, device="cuda")
    decoded = torch.empty(count, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        codec.encode(on_device, encoded)
        codec.decode(encoded, decoded)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(encoded.cpu(), expected)
    assert torch.equal(decoded.cpu(), decode(codec, expected, count))


@pytest.mark.parametrize("name", NAMES)
@LAWS
@given(seed=SEED, count=st.integers(1, 3000), rounds=st.integers(1, 8))
def test_sent_differences_and_residual_sum_to_all_differences(name: str, seed: int, count: int, rounds: int) -> None:
    codec, feedback = find_codec(name), ErrorFeedback(count)
    total, sent, bound = torch.zeros(2, count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64), 0.0
    for place in range(rounds):
        difference = draw(normal, seed + place, count)
        out = torch.empty(codec.nbytes(count), dtype=torch.uint8)
        feedback.encode(codec, difference, out)
        total[0] += difference
        sent += decode(codec, out, count)
        bound += float(difference.abs().max())
    error = (sent + feedback.residual - total[0]).abs().max()
    assert float(error) <= rounds * bound * 2.0**-22


@pytest.mark.parametrize("name", NAMES)
def test_the_sum_is_exact_on_a_dyadic_grid(name: str) -> None:
    """The largest magnitude of each block is 127 times a power of two, so that int8 has a dyadic scale."""
    codec, count = find_codec(name), 1024
    feedback, total, sent = ErrorFeedback(count), torch.zeros(count), torch.zeros(count)
    for place in range(20):
        difference = draw(grid, place, count)
        difference[::256] = 127.0 * 4 - feedback.residual[::256]
        out = torch.empty(codec.nbytes(count), dtype=torch.uint8)
        feedback.encode(codec, difference, out)
        total += difference
        sent += decode(codec, out, count)
    assert torch.equal(sent + feedback.residual, total)
    assert bool(feedback.residual.any()) == (name != "float32")


@pytest.mark.parametrize("name", NAMES)
def test_the_residual_decays_and_can_be_restored(name: str) -> None:
    codec, count = find_codec(name), 70_000
    feedback, expected = ErrorFeedback(count, decay=0.5), torch.zeros(count)
    out = torch.empty(codec.nbytes(count), dtype=torch.uint8)
    for place in range(3):
        difference = draw(normal, place, count)
        saved = feedback.residual.clone()
        feedback.encode(codec, difference, out)
        assert torch.equal(out, encode(codec, expected + difference))
        feedback.residual.copy_(saved)
        again = torch.empty_like(out)
        feedback.encode(codec, difference, again)
        assert torch.equal(again, out)
        expected = 0.5 * (expected + difference - decode(codec, out, count))
        assert torch.equal(feedback.residual, expected)


def test_codecs_are_found_by_name_or_are_given() -> None:
    for name in NAMES:
        codec = find_codec(name)
        assert isinstance(codec, Codec)
        assert codec.name == name
        assert find_codec(codec) is codec
    assert {name for name in NAMES if find_codec(name).for_states} == {"float32", "bfloat16"}


@pytest.mark.parametrize("wire", ["int4", "", None, 8, True, ["int8"], TopK])
def test_unknown_codecs_are_refused(wire: object) -> None:
    with pytest.raises(ValueError, match=r"wire must be one of 'float32'.*, got ") as caught:
        find_codec(wire)  # type: ignore[arg-type]
    assert repr(wire) in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_tensors_that_do_not_fit_are_refused(name: str) -> None:
    codec = find_codec(name)
    values, encoded = torch.zeros(300), torch.zeros(codec.nbytes(300), dtype=torch.uint8)
    wrong = [
        (values.double(), encoded),
        (values.view(2, 150), encoded),
        (values, encoded.view(torch.int8)),
        (values, encoded[1:]),
        (values[:-100], encoded),
        (values, encoded.to("meta")),
        (torch.zeros(600)[::2], encoded),
    ]
    for its_values, its_encoded in wrong:
        with pytest.raises(ValueError, match="must be"):
            codec.encode(its_values, its_encoded)
        with pytest.raises(ValueError, match="must be"):
            codec.decode(its_encoded, its_values)
        feedback = ErrorFeedback(300)
        with pytest.raises(ValueError, match="must be"):
            feedback.encode(codec, its_values, its_encoded)
        assert not feedback.residual.any()
    with pytest.raises(ValueError, match="decay must be a number from 0 to 1"):
        ErrorFeedback(300, decay=1.5)
