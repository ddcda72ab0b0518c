"""Tests flat state: its layout, refused tensors, in-place copies, and arithmetic that is reproducible to the bit."""

import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from support.facts import naming
from torch import Tensor, distributed as dist, nn

from asyncdist.tensors.flat_state import (
    Fingerprint,
    FlatBuffers,
    FlatState,
    SnapshotPool,
    accumulate_dtype,
    first_difference,
    is_finite,
)
from asyncdist.tensors.means import WeightedMean
from asyncdist.tensors.model_tensors import check_gradient
from asyncdist.tensors.optimizers.reset import reset_optimizer_state

LAWS = settings(deadline=None, derandomize=True, max_examples=100)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)


class Mixed(nn.Module):
    """A model with tied weights, two float widths, BatchNorm, a scalar, an empty and a non-persistent tensor."""

    def __init__(self, *, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(5)
        self.wide = nn.Parameter(torch.randn(3, 2, dtype=torch.float64))
        self.slim = nn.Parameter(torch.randn(4, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.randn(()))
        self.turned = nn.Parameter(torch.randn(6, 4).t())
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("cache", torch.randn(9), persistent=False)
        self.register_parameter("absent", None)


def bits(model: nn.Module) -> list[bytes]:
    return [tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in state_of(model)]


def state_of(model: nn.Module) -> list[Tensor]:
    return [tensor.reshape(1) if tensor.ndim == 0 else tensor for tensor in model.state_dict().values()]


def module_of(**tensors: Any) -> nn.Module:
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    return module


def average(states: list[FlatState], weights: list[float], *, chunk: int = 1 << 20) -> FlatBuffers:
    """Average as a replacer does: donors in order, each cut into chunks."""
    into, mean = states[0].new_buffers(accumulate=True), WeightedMean(len(states))
    for state, weight in zip(states, weights, strict=True):
        mean.begin(weight)
        sent = state.new_buffers()
        state.snapshot(sent)
        for dtype, accumulator in into.averaged().items():
            for start in range(0, accumulator.numel(), chunk):
                part = slice(start, start + chunk)
                mean.add(accumulator[part], sent.tensors[dtype][part])
        for dtype, exact in into.exact().items():
            exact.copy_(sent.tensors[dtype])
    return into


# ------------------------------------------------------------------------------------------------ layout


def test_entries_know_all_names_and_lie_side_by_side() -> None:
    state = FlatState(Mixed())
    by_name = {entry.names[0]: entry for entry in state.entries}
    assert by_name["embed.weight"].names == ("embed.weight", "head.weight")
    assert "head.weight" not in by_name
    assert "cache" not in by_name
    assert not by_name["norm.num_batches_tracked"].averaged
    assert not by_name["mask"].averaged
    assert by_name["norm.running_var"].averaged
    assert by_name["nothing"].shape == (0, 3)
    sizes: dict[torch.dtype, int] = {}
    for entry in state.entries:
        assert entry.offset == sizes.get(entry.dtype, 0)
        sizes[entry.dtype] = entry.offset + math.prod(entry.shape)
    buffers = state.new_buffers()
    assert {dtype: tensor.numel() for dtype, tensor in buffers.tensors.items()} == sizes
    assert list(buffers.by_name()) == ["bfloat16", "bool", "float32", "float64", "int64"]
    assert buffers.nbytes == state.nbytes == sum(tensor.nbytes for tensor in buffers.tensors.values())
    assert all(tensor.is_contiguous() and tensor.ndim == 1 for tensor in buffers.tensors.values())
    assert set(buffers.averaged()) | set(buffers.exact()) == set(buffers.tensors)
    assert set(buffers.exact()) == {torch.bool, torch.int64}


def test_accumulators_are_at_least_float32() -> None:
    wide = FlatState(Mixed()).new_buffers(accumulate=True)
    assert [tensor.dtype for tensor in wide.tensors.values()] == [
        torch.float32,
        torch.bool,
        torch.float32,
        torch.float64,
        torch.int64,
    ]
    assert accumulate_dtype(torch.complex32) == torch.complex64
    assert accumulate_dtype(torch.float8_e4m3fn) == torch.float32
    assert accumulate_dtype(torch.uint8) == torch.uint8


def test_tied_by_view_is_one_entry() -> None:
    base = torch.randn(4, 3)
    state = FlatState(module_of(one=base, two=base.view(4, 3), three=nn.Parameter(base)))
    assert [entry.names for entry in state.entries] == [("one", "two", "three")]


def test_a_shared_module_is_known_under_both_names() -> None:
    shared = nn.Linear(2, 2)
    state = FlatState(nn.Sequential(shared, nn.ReLU(), shared))
    assert [entry.names for entry in state.entries] == [("0.weight", "2.weight"), ("0.bias", "2.bias")]


def test_empty_tensors_are_shared_by_identity_only() -> None:
    empty = torch.empty(0)
    state = FlatState(module_of(one=empty, two=empty, three=torch.empty(0)))
    assert [entry.names for entry in state.entries] == [("one", "two"), ("three",)]
    state.snapshot(state.new_buffers())
    assert all(map(is_finite, state.new_buffers().tensors.values()))
    state.load(state.new_buffers(), momentum=0.5)


# ------------------------------------------------------------------------------------------------ what is refused


def columns() -> dict[str, Tensor]:
    base = torch.randn(5, 2)
    return {"left": base[:, 0], "right": base[:, 1]}


def quantised() -> Tensor:
    return torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8)


# torch warns about the invalid inputs of these tests
@pytest.mark.filterwarnings("ignore:.*(beta state|quantize_per_tensor).*:UserWarning")
@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (lambda: {"bad": torch.empty(3, device="meta")}, "'bad' is on the meta device"),
        (lambda: {"bad": torch.eye(3).to_sparse()}, "'bad' is sparse"),
        (lambda: {"bad": torch.eye(3).to_sparse_csr()}, "'bad' is sparse"),
        (lambda: {"bad": quantised()}, "'bad' is quantised"),
        (lambda: {"bad": torch.zeros(3, dtype=torch.uint4)}, "'bad' is uint4, a dtype that torch can neither"),
        (lambda: {"bad": torch.zeros(3, dtype=torch.float4_e2m1fn_x2)}, "'bad' is float4_e2m1fn_x2, a dtype that"),
        (lambda: {"bad": torch.zeros(1, 3).expand(4, 3)}, "'bad' overlaps itself"),
        (lambda: {"bad": torch.zeros(9).as_strided((3, 3), (1, 1))}, "'bad' overlaps itself"),
        (lambda: {"bad": nn.parameter.UninitializedBuffer()}, "'bad' is not initialised"),
        (lambda: (lambda base: {"all": base, "part": base[2:5]})(torch.zeros(9)), "'part' and 'all' overlap"),
        (lambda: (lambda base: {"a": base[:4], "b": base[3:]})(torch.zeros(9)), "'b' and 'a' overlap"),
        (lambda: (lambda base: {"a": base, "b": base.t()})(torch.zeros(3, 3)), "overlap"),
        (lambda: (lambda base: {"a": base, "b": base.view(torch.int32)})(torch.zeros(3)), "overlap"),
        (lambda: (lambda base: {"a": base[::2], "b": base[::3]})(torch.zeros(12)), "overlap"),
    ],
)
def test_what_cannot_be_averaged_is_refused_by_name(tensors: Callable[[], dict[str, Tensor]], said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        FlatState(module_of(**tensors()))
    assert "must be dense" in str(caught.value)


def test_lazy_parameters_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'0\.weight' is not initialised"):
        FlatState(nn.Sequential(nn.LazyLinear(3)))


def test_a_dtensor_is_refused_by_name_and_by_what_takes_it() -> None:
    """Regression: for a DTensor's gradients torch raised an error about mixed tensors in the middle of a reduction."""
    from torch.distributed.device_mesh import init_device_mesh  # this import takes a second
    from torch.distributed.tensor import Replicate, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        whole = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)), [Replicate()])
        model = nn.Module()
        model.weight = nn.Parameter(whole)
        with pytest.raises(ValueError, match=r"'weight' is a DTensor, .* only a policy with replica_size"):
            FlatState(model)
        with pytest.raises(ValueError, match=r"the gradient of 'weight' must be dense, but it is a DTensor"):
            check_gradient("weight", model.weight)
    finally:
        dist.destroy_process_group()


def test_interleaved_views_do_not_overlap() -> None:
    assert len(FlatState(module_of(**columns())).entries) == 2
    base = torch.randn(12)
    assert len(FlatState(module_of(even=base[::2], odd=base[1::2])).entries) == 2
    odd = torch.arange(8.0).as_strided((2, 3), (3, 2))  # 0 2 4 / 3 5 7: the strides cross, but elements do not overlap
    model = module_of(odd=odd)
    state = FlatState(model)
    buffers = state.new_buffers()
    state.snapshot(buffers)
    assert buffers.tensors[torch.float32].tolist() == [0, 2, 4, 3, 5, 7]


@pytest.mark.parametrize("model", [nn.ReLU(), nn.Sequential(), nn.Identity()])
def test_a_model_without_state_is_refused(model: nn.Module) -> None:
    said = f"{type(model).__name__} with neither parameters nor persistent buffers"
    for refused in (model, weakref.proxy(model)):  # average_models keeps such a reference
        with pytest.raises(ValueError, match=said):
            FlatState(refused)


def test_a_model_must_be_a_module() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got a dict"):
        FlatState({})  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ copies


def test_snapshot_then_load_restores_every_bit_in_place() -> None:
    model, other = Mixed(seed=1), Mixed(seed=2)
    state = FlatState(model)
    buffers = state.new_buffers()
    state.snapshot(buffers)
    kept = bits(model)
    objects = [id(tensor) for tensor in (*model.parameters(), *model.buffers())]
    places = [tensor.data_ptr() for tensor in model.parameters()]
    FlatState(other).load(buffers)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    state.load(buffers)
    assert bits(model) == bits(other) == kept
    assert [id(tensor) for tensor in (*model.parameters(), *model.buffers())] == objects
    assert [tensor.data_ptr() for tensor in model.parameters()] == places
    assert model.head.weight is model.embed.weight
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in model.parameters())


def test_snapshot_allocates_nothing_and_ignores_later_changes() -> None:
    model = nn.Linear(3, 3)
    state = FlatState(model)
    buffers = state.new_buffers()
    places = [tensor.data_ptr() for tensor in buffers.tensors.values()]
    state.snapshot(buffers)
    before = buffers.tensors[torch.float32].clone()
    with torch.no_grad():
        model.weight.add_(1.0)
    assert torch.equal(buffers.tensors[torch.float32], before)
    assert [tensor.data_ptr() for tensor in buffers.tensors.values()] == places


def test_replaced_data_buffers_and_modules_are_seen() -> None:
    model = Mixed()
    state = FlatState(model)
    model.norm.running_mean = torch.full((5,), 3.0)
    model.wide.data = torch.full((3, 2), 4.0, dtype=torch.float64)
    model.norm.weight = nn.Parameter(torch.full((5,), 5.0))
    buffers = state.new_buffers()
    state.snapshot(buffers)
    view = {entry.names[0]: view for entry, view in zip(state.entries, buffers.views, strict=True)}
    assert view["norm.running_mean"].tolist() == [3.0] * 5
    assert view["wide"].tolist() == [[4.0, 4.0]] * 3
    assert view["norm.weight"].tolist() == [5.0] * 5


def untie(model: Mixed) -> None:
    model.head.weight = nn.Parameter(torch.zeros(7, 5))


def drop(model: Mixed) -> None:
    model.slim = None  # type: ignore[assignment]


def grow(model: Mixed) -> None:
    model.extra = nn.Parameter(torch.zeros(1))


def reshape(model: Mixed) -> None:
    model.wide.data = torch.zeros(2, 2, dtype=torch.float64)


def narrow(model: Mixed) -> None:
    model.wide = nn.Parameter(torch.zeros(3, 2))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (untie, "'head.weight' and 'embed.weight' no longer share"),
        (drop, "'slim' is gone"),
        (grow, "'extra' is new"),
        (reshape, r"'wide' was float64 \(3, 2\) and is now float64 \(2, 2\)"),
        (narrow, r"'wide' was float64 \(3, 2\) and is now float32 \(3, 2\)"),
    ],
)
def test_model_with_a_changed_layout_is_refused_before_a_write(change: Callable[[Mixed], None], said: str) -> None:
    model = Mixed()
    state = FlatState(model)
    buffers = state.new_buffers()
    change(model)
    kept = bits(model)
    for act in (state.load, state.snapshot):
        with pytest.raises(ValueError, match=said):
            act(buffers)
    assert bits(model) == kept


def test_buffers_of_another_layout_are_refused() -> None:
    with pytest.raises(ValueError, match="another layout"):
        FlatState(nn.Linear(2, 2)).snapshot(FlatState(nn.Linear(2, 3)).new_buffers())


def test_exactness_four_ranks_of_constant_weights() -> None:
    """With weights equal to the rank, the average of 1, 2 and 3 is exactly 2.0; counters are the last donor's."""
    models = [Mixed() for _ in range(4)]
    for rank, model in enumerate(models):
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.fill_(rank)
    states = [FlatState(model) for model in models]
    states[0].load(average(states[1:], [1.0, 1.0, 1.0]))
    for name, tensor in models[0].state_dict().items():
        expected = 2.0 if tensor.is_floating_point() else 3  # 3 is True in a bool tensor
        assert torch.equal(tensor, torch.full_like(tensor, expected)), name
    for rank, model in enumerate(models[1:], start=1):
        assert all((tensor == tensor.new_tensor(rank)).all() for tensor in model.state_dict().values())


@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.5, 1.0])
def test_momentum_mixes_as_documented(momentum: float) -> None:
    model, source = Mixed(seed=1), Mixed(seed=2)
    source.norm.num_batches_tracked = torch.tensor(7)
    state = FlatState(model)
    into = average([FlatState(source)], [1.0])
    own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state.load(into, momentum=momentum)
    for name, tensor in model.state_dict().items():
        given_ = source.state_dict()[name]
        if not tensor.is_floating_point():
            expected = given_
        elif momentum in (0.0, 1.0):
            expected = own[name] if momentum else given_
        else:
            wide = accumulate_dtype(tensor.dtype)
            expected = (own[name].to(wide) * momentum + given_.to(wide) * (1.0 - momentum)).to(tensor.dtype)
        assert torch.equal(tensor, expected), name
    assert model.state_dict()["norm.num_batches_tracked"].item() == 7


def test_momentum_over_large_entries_is_done_in_pieces() -> None:
    for shape in ((1, 700_000), (3, 300_000), (70, 80, 90), (700_001,)):
        tensor = torch.randn(shape)
        turned = torch.randn(shape).permute(*reversed(range(len(shape))))
        model = module_of(plain=tensor.clone(), turned=turned.clone(memory_format=torch.preserve_format))
        state = FlatState(model)
        into = state.new_buffers()
        into.tensors[torch.float32].normal_()
        want = [own * 0.3 + view * (1.0 - 0.3) for own, view in zip((tensor, turned), into.views, strict=True)]
        state.load(into, momentum=0.3)
        assert torch.equal(model.state_dict()["plain"], want[0])
        assert torch.equal(model.state_dict()["turned"], want[1])


@pytest.mark.parametrize("momentum", [-0.1, 1.1, math.nan])
def test_momentum_out_of_range_is_refused(momentum: float) -> None:
    state = FlatState(nn.Linear(1, 1))
    with pytest.raises(ValueError, match="momentum must be"):
        state.load(state.new_buffers(), momentum=momentum)


# ------------------------------------------------------------------------------------------------ finiteness


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e5m2])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_value_is_found_wherever_it_is(dtype: torch.dtype, bad: float) -> None:
    count = 300_003 if dtype == torch.float8_e5m2 else 1003
    state = FlatState(module_of(value=torch.zeros(count, dtype=dtype), number=torch.ones(3, dtype=torch.int64)))
    buffers = state.new_buffers()
    assert is_finite(buffers.tensors[dtype])
    for index in (0, 1, 15, 501, count - 2, count - 1):
        buffers.tensors[dtype][index] = bad
        assert not is_finite(buffers.tensors[dtype]), index
        buffers.tensors[dtype][index] = 0
    assert is_finite(buffers.tensors[dtype])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_large_values_are_finite_though_their_sum_is_not(dtype: torch.dtype) -> None:
    state = FlatState(module_of(value=torch.full((999,), torch.finfo(dtype).max, dtype=dtype)))
    buffers = state.new_buffers()
    state.snapshot(buffers)
    assert is_finite(buffers.tensors[dtype])


# ------------------------------------------------------------------------------------------------ arithmetic


models = st.integers(0, 10_000).map(lambda seed: Mixed(seed=seed))


@pytest.mark.slow
@LAWS
@given(models, st.lists(st.one_of(st.just(1.0), st.floats(1e-2, 1e2)), min_size=1, max_size=8), st.integers(1, 40))
def test_law_equal_models_average_to_themselves_bit_for_bit(model: Mixed, weights: list[float], chunk: int) -> None:
    target = Mixed(seed=-1)
    FlatState(target).load(average([FlatState(model)] * len(weights), weights, chunk=chunk))
    assert bits(target) == bits(model)


# ------------------------------------------------------------------------------------------------ fingerprint


def test_fingerprints_travel_as_text() -> None:
    one, two = FlatState(Mixed(seed=1)).fingerprint, FlatState(Mixed(seed=2)).fingerprint
    assert one == two == Fingerprint.from_text(one.to_text())
    assert one.digest == two.digest
    assert len(one.digest) == 64
    assert first_difference(one, two) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}x",
        "[1]",
        "[[1,2]]",
        '[[["a"],["b"],"c"]]',
        "null",
        "[[[",
        '[[[],[1],"c"]]',
        '[["a",[1],"c"]]',
        '[[["a"],[1],"c"],[["a"],[1],"c"]]',
        "[" * 100_000,
    ],
)
def test_what_is_no_fingerprint_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be the JSON of a fingerprint"):
        Fingerprint.from_text(text)


def fingerprint(**tensors: Tensor) -> Fingerprint:
    return FlatState(module_of(**tensors)).fingerprint


def test_the_first_difference_is_named() -> None:
    a, b = torch.zeros(2), torch.zeros(3)
    mine = fingerprint(a=a, b=b)
    cases = {
        "'b' exists here and not there": fingerprint(a=a),
        "'c' exists there and not here": fingerprint(a=a, b=b, c=torch.zeros(1)),
        "'b' has shape (3,) here and (2,) there": fingerprint(a=a, b=torch.zeros(2)),
        "'b' has dtype float32 here and float64 there": fingerprint(a=a, b=b.double()),
        "'a' is here in the place of 'b' there, so the entries have another order": fingerprint(b=b, a=a),
    }
    for said, theirs in cases.items():
        assert first_difference(mine, theirs) == said
        assert mine.digest != theirs.digest
    tied, loose = fingerprint(a=a, b=a), fingerprint(a=a, b=a.clone())
    assert first_difference(tied, loose) == "'a' shares its memory as ('a', 'b') here and as ('a',) there"
    assert first_difference(loose, tied) == "'a' shares its memory as ('a',) here and as ('a', 'b') there"


# ------------------------------------------------------------------------------------------------ optimizers, pool


def test_optimizers_of_this_model_pass_and_others_are_named() -> None:
    model, other = nn.Linear(2, 3), nn.Linear(2, 3)
    state = FlatState(model)
    state.check_optimizer(torch.optim.SGD([model.bias], lr=0.1))
    mixed = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias, other.weight]}], lr=0.1)
    with pytest.raises(ValueError, match=naming("(3, 2)", "param_groups[1]['params'][1]")):
        state.check_optimizer(mixed)
    with pytest.raises(TypeError, match=r"optimizer must be .*, got a int"):
        state.check_optimizer(3)  # type: ignore[arg-type]


def test_optimizer_state_is_kept_by_load_and_cleared_on_request() -> None:
    model = nn.Linear(2, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = FlatState(model)
    kept = optimizer.state[model.weight]["exp_avg"].clone()
    state.load(state.new_buffers())
    assert torch.equal(optimizer.state[model.weight]["exp_avg"], kept)
    assert optimizer.param_groups[0]["params"][0] is model.weight
    held = optimizer.state
    reset_optimizer_state(optimizer)
    assert optimizer.state is held
    assert not held
    optimizer.step()


def test_the_pool_reuses_and_counts() -> None:
    pool = SnapshotPool(FlatState(nn.Linear(2, 2).bfloat16()), accumulate=True)
    one, two = pool.acquire(), pool.acquire()
    assert one.tensors[torch.bfloat16].dtype == torch.float32
    assert (pool.in_use, len(pool._free)) == (2, 0)
    pool.release(one)
    assert pool.acquire() is one
    pool.release(one)
    with pytest.raises(ValueError, match="must be released once"):
        pool.release(one)
    pool.release(two)
    assert (pool.in_use, len(pool._free)) == (0, 2)
