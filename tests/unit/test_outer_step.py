"""Tests outer steps against update rules written a second time with numpy, in float32 and in the same order."""

from __future__ import annotations

import functools
import io
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
import torch
from support.facts import naming
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop

from asyncdist.protocols.async_diloco.delayed_nesterov import DelayedNesterov
from asyncdist.protocols.diloco.options import described
from asyncdist.protocols.diloco.outer_optimizers import FedAdagrad, FedAdam, FedYogi
from asyncdist.protocols.diloco.outer_step import OuterFactory, OuterStep, check_factory

Array: TypeAlias = npt.NDArray[np.float32]
#: Function that moves an anchor by a difference, and updates the named state.
Rule: TypeAlias = Callable[[Array, Array, dict[str, Any]], Array]

ROUNDS = 50
SIZE = 997  # not a multiple of a vector's width
EPS = float(np.finfo(np.float32).eps)
F = np.float32


# -- the rules, a second time -----------------------------------------------------------------------------------------


def sgd(lr: float, momentum: float = 0.0, *, nesterov: bool = False) -> Rule:
    def move(a: Array, d: Array, state: dict[str, Any]) -> Array:
        if momentum:
            d_before, m = d, state["m"] * F(momentum) + d if "m" in state else d.copy()
            state["m"] = m
            d = d_before + F(momentum) * m if nesterov else m
        return a - F(lr) * d

    return move


def delayed_nesterov(lr: float, momentum: float, delay: int, activation: float = 0.0) -> Rule:
    """Algorithm 3 of Liu et al., with the momentum after its update, as in the code of HALoS."""

    def move(a: Array, d: Array, state: dict[str, Any]) -> Array:
        state["sum"] = state.get("sum", np.zeros_like(a)) + d
        m, count = state.get("m", np.zeros_like(a)), state.get("count", 0) + 1
        share = activation
        if count == delay:
            m = m * F(momentum) + state["sum"] / F(delay)
            share, count = 1 - activation * delay + activation, 0
            state["sum"] = np.zeros_like(a)
        state["m"], state["count"] = m, count
        return a - F(lr) * (d / F(delay) + F(share * momentum) * m)

    return move


def slow_momentum(slow_lr: float, momentum: float, inner_lr: float) -> Rule:
    """Return SlowMo's rule, in which the buffer is divided and multiplied by the inner learning rate."""

    def move(a: Array, d: Array, state: dict[str, Any]) -> Array:
        state["u"] = state.get("u", np.zeros_like(a)) * F(momentum) + d / F(inner_lr)
        return a - F(slow_lr * inner_lr) * state["u"]

    return move


def muloco(lr_of: Callable[[int], float], momentum: float) -> Rule:
    """Return the rule of MuLoCo's code for one rank: the outer learning rate is inside the buffer."""

    def move(a: Array, d: Array, state: dict[str, Any]) -> Array:
        lr, state["round"] = F(lr_of(state.get("round", 0))), state.get("round", 0) + 1
        state["u"] = state.get("u", np.zeros_like(a)) * F(momentum) + lr * d
        return a - F(momentum) * state["u"] - lr * d

    return move


def adam(lr: float, betas: tuple[float, float], eps: float) -> Rule:
    def move(a: Array, d: Array, state: dict[str, Any]) -> Array:
        step = state["step"] = state.get("step", 0) + 1
        one, two = betas
        state["m"] = state.get("m", np.zeros_like(a)) * F(one) + F(1 - one) * d
        state["v"] = state.get("v", np.zeros_like(a)) * F(two) + F(1 - two) * d * d
        denominator = np.sqrt(state["v"]) / F((1 - two**step) ** 0.5) + F(eps)
        return a - (F(lr / (1 - one**step)) * state["m"]) / denominator

    return move


def adagrad(lr: float, eps: float) -> Rule:
    def move(a: Array, d: Array, state: dict[str, Any]) -> Array:
        state["v"] = state.get("v", np.zeros_like(a)) + d * d
        return a - (F(lr) * d) / (np.sqrt(state["v"]) + F(eps))

    return move


def rmsprop(lr: float, alpha: float, eps: float) -> Rule:
    def move(a: Array, d: Array, state: dict[str, Any]) -> Array:
        state["v"] = state.get("v", np.zeros_like(a)) * F(alpha) + F(1 - alpha) * d * d
        return a - (F(lr) * d) / (np.sqrt(state["v"]) + F(eps))

    return move


def federated(kind: str, lr: float, betas: tuple[float, float] = (0.9, 0.99), tau: float = 1e-3) -> Rule:
    """Return algorithm 2 of Reddi et al., with the sign of D = anchor - mean."""

    def move(a: Array, d: Array, state: dict[str, Any]) -> Array:
        one, two = betas
        v, squares = state.get("v", np.full_like(a, tau**2)), d * d
        if kind == "adagrad":
            state["m"], state["v"] = d, v + squares
        else:
            state["m"] = state.get("m", np.zeros_like(a)) * F(one) + d * F(1 - one)
            adapted = {
                "adam": lambda: v * F(two) + squares * F(1 - two),
                "yogi": lambda: v - (squares * F(1 - two)) * np.sign(v - squares),
            }
            state["v"] = adapted[kind]()
        return a - (state["m"] / (np.sqrt(state["v"]) + F(tau))) * F(lr)

    return move


# -- data -------------------------------------------------------------------------------------------------------------


def on_grid(seed: int) -> tuple[Array, list[Array]]:
    """Return an anchor and a difference for each round, whose values are integers times 2 ** -12."""
    numbers = np.random.default_rng(seed)
    draw = functools.partial(numbers.integers, -4096, 4097, SIZE)
    return draw().astype(F) / F(4096), [draw().astype(F) / F(4096) for _ in range(ROUNDS)]


def anywhere(seed: int) -> tuple[Array, list[Array]]:
    """Return an anchor and differences as in training: the differences are small and of many magnitudes."""
    numbers = np.random.default_rng(seed)
    draws = numbers.standard_normal((ROUNDS + 1, SIZE)).astype(F)
    return draws[0], [draw * F(0.01) * F(0.97) ** F(age) for age, draw in enumerate(draws[1:])]


def stepped(factory: OuterFactory, anchor: Array, differences: Sequence[Array]) -> list[Array]:
    """Return the anchor at the start and after each round."""
    outer = OuterStep(factory, [torch.tensor(anchor)])
    found = [anchor]
    for difference in differences:
        outer.step([torch.tensor(difference)])
        found.append(outer.anchors[0].numpy().copy())
    return found


def expected(rule: Rule, anchor: Array, differences: Sequence[Array]) -> list[Array]:
    """Return the anchors that the rule predicts for :func:`stepped`."""
    state: dict[str, Any] = {}
    found = [anchor]
    for difference in differences:
        found.append(rule(found[-1], difference, state))
        assert found[-1].dtype == F
    return found


def same(ones: Sequence[Array], others: Sequence[Array]) -> bool:
    return [one.tobytes() for one in ones] == [other.tobytes() for other in others]


def distance(one: Array, other: Array) -> float:
    """Return the largest distance of an element, in eps * max|a|."""
    return float(np.abs(one.astype(float) - other).max() / (EPS * np.abs(one).max()))


EXACT: dict[str, tuple[OuterFactory, Rule]] = {
    "sgd": (functools.partial(SGD, lr=0.5), sgd(0.5)),
    "heavy ball": (functools.partial(SGD, lr=0.5, momentum=0.25), sgd(0.5, 0.25)),
    "nesterov": (functools.partial(SGD, lr=0.5, momentum=0.5, nesterov=True), sgd(0.5, 0.5, nesterov=True)),
    "delayed nesterov": (
        functools.partial(DelayedNesterov, lr=0.5, momentum=0.5, delay=4),
        delayed_nesterov(0.5, 0.5, 4),
    ),
    "activated nesterov": (
        functools.partial(DelayedNesterov, lr=0.5, momentum=0.5, delay=2, activation=0.5),
        delayed_nesterov(0.5, 0.5, 2, 0.5),
    ),
    "FedAdam": (functools.partial(FedAdam, lr=0.1), federated("adam", 0.1)),
    "FedYogi": (functools.partial(FedYogi, lr=0.1, betas=(0.8, 0.95)), federated("yogi", 0.1, (0.8, 0.95))),
    "FedAdagrad": (functools.partial(FedAdagrad, lr=0.03, tau=0.01), federated("adagrad", 0.03, tau=0.01)),
}
CLOSE: dict[str, tuple[OuterFactory, Rule]] = {
    "diloco": (functools.partial(SGD, lr=0.7, momentum=0.9, nesterov=True), sgd(0.7, 0.9, nesterov=True)),
    "heavy ball": (functools.partial(SGD, lr=0.7, momentum=0.6), sgd(0.7, 0.6)),
    "delayed nesterov": (
        functools.partial(DelayedNesterov, lr=0.7, momentum=0.9, delay=3, activation=0.2),
        delayed_nesterov(0.7, 0.9, 3, 0.2),
    ),
    "adam": (functools.partial(Adam, lr=0.01), adam(0.01, (0.9, 0.999), 1e-8)),
    "adamw": (functools.partial(AdamW, lr=0.01, weight_decay=0), adam(0.01, (0.9, 0.999), 1e-8)),
    "adagrad": (functools.partial(Adagrad, lr=0.01), adagrad(0.01, 1e-10)),
    "rmsprop": (functools.partial(RMSprop, lr=0.01), rmsprop(0.01, 0.99, 1e-8)),
}
FACTORIES = {**{f"{name}, exact": each[0] for name, each in EXACT.items()}, **{n: each[0] for n, each in CLOSE.items()}}


# -- update rules -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [on_grid, anywhere])
@pytest.mark.parametrize("name", EXACT)
def test_rules_equal_numpy_to_the_bit(name: str, data: Callable[[int], tuple[Array, list[Array]]]) -> None:
    """Any values are possible, because scaling by a power of two is exact and Fed optimizers round each operation."""
    factory, rule = EXACT[name]
    for seed in range(3):
        assert same(stepped(factory, *data(seed)), expected(rule, *data(seed)))


@pytest.mark.parametrize("data", [on_grid, anywhere])
@pytest.mark.parametrize("name", CLOSE)
def test_rules_equal_numpy_but_for_rounding(name: str, data: Callable[[int], tuple[Array, list[Array]]]) -> None:
    """Torch may round a - lr * d once, and roots wrongly. Each round starts from torch's anchor."""
    factory, rule = CLOSE[name]
    for seed in range(3):
        anchor, differences = data(seed)
        anchors, state = stepped(factory, anchor, differences), dict[str, Any]()
        for before, after, difference in zip(anchors, anchors[1:], differences, strict=False):
            assert distance(after, rule(before, difference, state)) <= 1.0
        assert distance(anchors[-1], anchor) > 1000, "the anchor must have moved"


def test_sgd_with_lr_1_is_averaging_only_on_a_grid() -> None:
    outcomes = []
    for draw in (on_grid, anywhere):
        anchor, others = draw(5)
        ranks = [anchor + other for other in others[:4]]  # a power of two, so that the mean is exact
        mean = (ranks[0] + ranks[1] + ranks[2] + ranks[3]) * F(0.25)
        difference = sum((anchor - rank for rank in ranks[1:]), anchor - ranks[0]) * F(0.25)
        moved = stepped(functools.partial(SGD, lr=1.0), anchor, [difference])[-1]
        assert distance(moved, mean) <= 1.0
        outcomes.append(same([moved], [mean]))
    assert outcomes == [True, False]


def test_slow_momentum_is_a_heavy_ball() -> None:
    anchor, differences = anywhere(6)
    for inner_lr, bound in ((2.0**-7, 0.0), (0.01, 4.0)):  # dividing by a power of two is exact
        anchors = stepped(functools.partial(SGD, lr=1.0, momentum=0.5), anchor, differences)
        others = expected(slow_momentum(1.0, 0.5, inner_lr), anchor, differences)
        assert max(map(distance, anchors, others)) <= bound


def test_lookahead_interpolates_between_anchor_and_weights() -> None:
    anchor, drifts = on_grid(7)
    outer = OuterStep(functools.partial(SGD, lr=0.5), [torch.tensor(anchor)])
    slow = anchor
    for drift in drifts[:10]:  # each halves the grid, which has 12 bits, and float32 has 24
        fast = slow + drift
        outer.step([torch.tensor(slow - fast)])
        slow = slow * F(0.5) + fast * F(0.5)
        assert same([outer.anchors[0].numpy()], [slow])


def test_lr_in_the_buffer_differs_only_under_a_schedule() -> None:
    anchor, differences = anywhere(8)
    for lr_of, is_equal in ((lambda _: 0.7, True), (lambda number: 0.7 * 0.9**number, False)):
        made: list[torch.optim.Optimizer] = []
        outer = OuterStep(recorded(functools.partial(SGD, lr=0.7, momentum=0.6, nesterov=True), made), [tensor(anchor)])
        others = expected(muloco(lr_of, 0.6), anchor, differences)
        for number, difference in enumerate(differences):
            made[0].param_groups[0]["lr"] = lr_of(number)
            outer.step([tensor(difference)])
        found = distance(outer.anchors[0].numpy(), others[-1])
        assert found <= ROUNDS / 2 if is_equal else found > 1000, (
            "the error must be at most half a rounding error per round"
        )


# -- the mechanics ----------------------------------------------------------------------------------------------------


def tensor(values: Array) -> Tensor:
    return torch.tensor(values)


def recorded(factory: OuterFactory, made: list[torch.optim.Optimizer]) -> OuterFactory:
    """Return a factory that also appends its optimizers to ``made``."""

    def build(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        made.append(factory(parameters))
        return made[-1]

    return build


@pytest.mark.parametrize("name", FACTORIES)
def test_a_resumed_run_equals_an_uninterrupted_one(name: str) -> None:
    anchor, differences = anywhere(9)
    outer = OuterStep(FACTORIES[name], [tensor(anchor)])
    for difference in differences[:20]:
        outer.step([tensor(difference)])
    state, at_save = outer.state_dict(), outer.anchors[0].clone()
    for difference in differences[20:]:  # the saved state is a copy
        outer.step([tensor(difference)])
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    for saved in (state, torch.load(file, weights_only=True), state):  # loading copies it as well
        again = OuterStep(FACTORIES[name], [at_save.clone()])
        again.load_state_dict(saved)
        for difference in differences[20:]:
            again.step([tensor(difference)])
        assert same([again.anchors[0].numpy()], [outer.anchors[0].numpy()])


@pytest.mark.parametrize(
    ("factory", "share"),
    [
        (functools.partial(SGD, lr=0.5, momentum=0.5), 1.0),
        (functools.partial(DelayedNesterov, lr=0.5, momentum=0.5, delay=1), 1.0),
        (functools.partial(Adam, lr=0.5, betas=(0.5, 0.5)), 0.5),
        (functools.partial(FedAdam, lr=0.5, betas=(0.5, 0.5)), 0.5),
    ],
)
def test_momenta_are_those_of_the_whole_anchors(factory: OuterFactory, share: float) -> None:
    """The second anchor consists of two pieces."""
    counts = (3, (1 << 18) + 5)
    outer = OuterStep(factory, [torch.zeros(count) for count in counts])
    assert outer.momenta() is None
    expected = [torch.zeros(count) for count in counts]
    for _ in range(3):
        differences = [torch.randn(count) for count in counts]
        expected = [each * 0.5 + share * own for each, own in zip(expected, differences, strict=True)]
        outer.step(differences)
        found = outer.momenta()
        assert found is not None
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
        found[0].fill_(torch.nan)  # it is a copy


def test_an_optimizer_without_momentum_has_no_momenta() -> None:
    outer = OuterStep(functools.partial(SGD, lr=0.5), [torch.zeros(2)])
    outer.step([torch.ones(2)])
    assert outer.momenta() is None


def test_a_state_before_the_first_step_clears_later_state() -> None:
    anchor, differences = anywhere(10)
    outer = OuterStep(FACTORIES["diloco"], [tensor(anchor)])
    fresh = outer.state_dict()
    outer.step([tensor(differences[0])])
    outer.anchors[0].copy_(tensor(anchor))
    outer.load_state_dict(fresh)
    outer.step([tensor(differences[1])])
    assert same([outer.anchors[0].numpy()], stepped(FACTORIES["diloco"], anchor, differences[1:2])[-1:])


def test_loading_warns_once_of_numbers_that_it_replaces() -> None:
    """Regression: a changed learning rate was silently replaced by the saved one."""
    saved = OuterStep(functools.partial(SGD, lr=0.7, momentum=0.9, nesterov=True), [torch.zeros(3)]).state_dict()
    outer = OuterStep(functools.partial(SGD, lr=0.1, momentum=0.5), [torch.zeros(3)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outer.load_state_dict(saved)
        outer.load_state_dict(saved)  # now the options are equal
    assert [str(each.message) for each in caught] == [
        "outer_optimizer: the saved lr=0.7 replaces lr=0.1, the saved momentum=0.9 replaces momentum=0.5"
    ]


def test_the_state_of_another_outer_step_is_refused() -> None:
    outer = OuterStep(FACTORIES["diloco"], [torch.zeros(3), torch.zeros(4)])
    for other, facts in (
        (OuterStep(FACTORIES["adam"], [torch.zeros(3), torch.zeros(4)]), ("SGD", "Adam")),
        (OuterStep(FACTORIES["diloco"], [torch.zeros(4), torch.zeros(3)]), ("[3, 4]", "[4, 3]")),
    ):
        with pytest.raises(ValueError, match=naming(*facts)):
            outer.load_state_dict(other.state_dict())


@pytest.mark.parametrize("name", FACTORIES)
def test_anchors_move_in_place_and_differences_stay(name: str) -> None:
    anchor, differences = anywhere(11)
    flat = torch.zeros(SIZE + 20)
    slices = [flat[5 : 5 + 400], flat[5 + 400 : 5 + SIZE]]
    flat[5 : 5 + SIZE] = tensor(anchor)
    outer = OuterStep(FACTORIES[name], slices)
    for difference in differences[:5]:
        given = tensor(difference)
        outer.step([given[:400], given[400:]])
        assert same([given.numpy()], [difference])
        given.fill_(torch.nan)  # no object refers to this tensor any longer
    assert all(one is other for one, other in zip(outer.anchors, slices, strict=True))
    assert same([flat[5 : 5 + SIZE].numpy()], stepped(FACTORIES[name], anchor, differences[:5])[-1:])
    assert not flat[:5].any()
    assert not flat[5 + SIZE :].any()


@pytest.mark.parametrize("cuts", [(0, 3), (1, 2, 3, 700_000, 1_000_001), (524_288, 524_289)])
def test_differences_may_come_in_parts(cuts: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    anchors = [torch.randn(1_000_001, generator=generator), torch.randn(5, generator=generator)]
    differences = [torch.randn(len(anchor), generator=generator) for anchor in anchors]
    parts = [*torch.tensor_split(differences[0], cuts), differences[1]]
    whole, divided = ([anchor.clone() for anchor in anchors] for _ in range(2))
    for stepped_anchors, given in ((whole, differences), (divided, parts)):
        outer = OuterStep(functools.partial(SGD, lr=0.7, momentum=0.9, nesterov=True), stepped_anchors)
        for _ in range(2):
            outer.step(given)
    assert all(map(torch.equal, whole, divided)) and not torch.equal(whole[0], anchors[0])


def test_differences_are_gradients_only_during_the_step() -> None:
    seen: list[bool] = []

    class Failing(SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            seen.extend(each.grad is not None for each in self.param_groups[0]["params"])
            seen.append(torch.is_grad_enabled())
            raise ArithmeticError

    made: list[torch.optim.Optimizer] = []
    outer = OuterStep(recorded(Failing, made), [torch.zeros(2), torch.zeros(3)])
    with pytest.raises(ArithmeticError):
        outer.step([torch.ones(2), torch.ones(3)])
    assert seen == [True, True, False]
    assert [each.grad for each in made[0].param_groups[0]["params"]] == [None, None]
    with pytest.raises(AssertionError, match="elements"):
        outer.step([torch.ones(2)])


@pytest.mark.parametrize("name", FACTORIES)
def test_steps_work_under_the_callers_inference_mode(name: str) -> None:
    """Adagrad creates its state in its constructor, the other optimizers in their first step."""
    anchor, differences = anywhere(12)
    mine = tensor(anchor)
    with torch.inference_mode():
        outer = OuterStep(FACTORIES[name], [mine])
    outer.step([tensor(differences[0])])
    with torch.inference_mode():
        outer.step([tensor(differences[1])])
        outer.load_state_dict(outer.state_dict())
    outer.step([tensor(differences[2])])
    assert same([mine.numpy()], stepped(FACTORIES[name], anchor, differences[:3])[-1:])


@pytest.mark.parametrize("name", FACTORIES)
def test_anchors_may_be_empty_or_wide(name: str) -> None:
    for anchors in ([], [torch.empty(0)], [torch.empty(0), torch.ones(3), torch.ones(2, dtype=torch.float64)]):
        check_factory(FACTORIES[name])
        outer = OuterStep(FACTORIES[name], anchors)
        for _ in range(2):
            outer.step([torch.full_like(anchor, 0.125) for anchor in anchors])
            outer.load_state_dict(outer.state_dict())
        assert all((anchor < 1).all() and anchor.isfinite().all() for anchor in anchors), (
            "the anchors must move towards the ranks' weights"
        )


def test_all_anchors_are_stepped_without_foreach() -> None:
    made: list[torch.optim.Optimizer] = []
    outer = OuterStep(recorded(functools.partial(SGD, lr=0.5, foreach=True), made), [torch.zeros(2)])
    assert made[0].param_groups[0]["foreach"] is False
    saved = OuterStep(functools.partial(SGD, lr=0.25), [torch.zeros(2)]).state_dict()
    with pytest.warns(UserWarning, match=naming("lr=0.25", "lr=0.5")):
        outer.load_state_dict(saved)
    assert (made[0].param_groups[0]["foreach"], made[0].param_groups[0]["lr"]) == (False, 0.25)


@pytest.mark.parametrize(
    ("factory", "is_fused"),
    [
        (functools.partial(SGD, lr=0.5, momentum=0.5), True),
        (functools.partial(torch.optim.Adam, lr=0.5), True),
        (functools.partial(torch.optim.Adam, lr=0.5, fused=False), False),
    ],
)
def test_outer_optimizers_use_torchs_fused_kernels(factory: OuterFactory, is_fused: bool) -> None:
    made: list[torch.optim.Optimizer] = []
    outer = OuterStep(recorded(factory, made), [torch.ones(5)])
    outer.step([torch.full((5,), 0.5)])
    assert (made[0].param_groups[0]["fused"], made[0].param_groups[0]["foreach"]) == (is_fused, False)
    assert (outer.anchors[0] < 1).all()


def test_numpys_optimizers_ignore_the_default_dtype() -> None:
    """Regression: FedAdam was refused if torch's default dtype was bfloat16, which numpy does not have."""
    factory = functools.partial(FedAdam, lr=0.5)
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        check_factory(factory)
        assert described(factory).startswith("FedAdam")
        OuterStep(factory, []).step([])
    finally:
        torch.set_default_dtype(dtype)
