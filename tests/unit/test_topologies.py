"""Tests the graphs of gossip: shares, partners after a loss, and errors for matrices that cannot mix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from unit.test_simple_rules import GOLDEN, MASK, split_mix

from asyncdist.protocols.simple import topologies
from asyncdist.protocols.simple.topologies import Graph, Matrix, check_sums

NAMES = ["ring", "exponential", "hypercube", "rotating", "random", "hosts"]


def matrix_of(topology: Any, number: int, count: int, seed: int) -> np.ndarray[Any, Any]:
    """Return W of a round on one host, written from the papers, not from the code."""
    if not isinstance(topology, str):
        return np.array(topology)
    found, bits = np.zeros((count, count)), max(1, int(np.ceil(np.log2(count))))
    for i in range(count):
        if topology == "ring":
            near = {(i - 1) % count, i, (i + 1) % count}
            for j in near:
                found[i, j] = 1 / len(near)
        elif topology in ("exponential", "hosts"):
            found[i, i] += 0.5
            found[i, (i - 2 ** ((number - 1) % bits)) % count] += 0.5
        elif topology == "hypercube":
            found[i, i] += 0.5
            found[i, i ^ 2 ** ((number - 1) % bits)] += 0.5
    if topology == "rotating":
        state = split_mix((seed * GOLDEN - 1 - (number - 1) // bits) & MASK)
        keys = [split_mix((state + GOLDEN * (place + 1)) & MASK) & (MASK >> 1) for place in range(count)]
        order = sorted(range(count), key=keys.__getitem__)
        for place, i in enumerate(order):
            found[i, i] += 0.5
            found[i, order[(place - 2 ** ((number - 1) % bits)) % count]] += 0.5
    if topology == "random":
        state = split_mix((seed * GOLDEN + number) & MASK)
        keys = [split_mix((state + GOLDEN * (place + 1)) & MASK) & (MASK >> 1) for place in range(count)]
        order = sorted(range(count), key=keys.__getitem__)
        if count % 2:
            found[order[-1], order[-1]] = 1.0
        for one, other in zip(order[::2], order[1::2], strict=False):
            found[[one, one, other, other], [one, other, one, other]] = 0.5
    return found


def checked(given: Any) -> Any:
    return topologies.checked_topology("topology", given)


def dense(graph: Graph, number: int, members: Sequence[int]) -> np.ndarray[Any, Any]:
    return np.array([[graph.partners(number, rank, members).get(other, 0.0) for other in members] for rank in members])


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 8, 16, 33])
@pytest.mark.parametrize("topology", NAMES)
def test_rows_and_columns_add_up_to_one(topology: Any, count: int) -> None:
    hosts = [rank - rank % 3 for rank in range(count)]
    graph = Graph(topology, 5, range(count), hosts)
    for number in range(1, 30):
        found = dense(graph, number, range(count))
        np.testing.assert_allclose(found.sum(0), 1.0, rtol=1e-15)
        np.testing.assert_allclose(found.sum(1), 1.0, rtol=1e-15)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 13])
@pytest.mark.parametrize("topology", NAMES)
def test_graphs_are_those_of_the_papers(topology: Any, count: int) -> None:
    if topology == "hypercube" and count.bit_count() != 1:
        return
    graph = Graph(topology, 7, range(count))
    for number in range(1, 20):
        np.testing.assert_array_equal(dense(graph, number, range(count)), matrix_of(topology, number, count, 7))


@pytest.mark.parametrize("topology", NAMES)
def test_rounds_connect_all_ranks_that_are_left(topology: Any) -> None:
    """This includes a hypercube without its eighth corner, and hosts of different sizes."""
    graph = Graph(topology, 1, range(8), [0, 0, 0, 0, 4, 4, 4, 7])
    for members in (range(8), (0, 1, 2, 4, 5, 6, 7), (1, 3, 4, 7), (2, 7)):
        product = np.eye(len(members))
        for number in range(1, 60):
            product = dense(graph, number, members) @ product
        assert product.min() > 0.5 / len(members)


def test_rotating_partners_meet_all_ranks_and_mix_in_each_cycle() -> None:
    """After log2 k rounds all ranks have the mean, and each cycle has other pairs."""
    graph, met = Graph("rotating", 3, range(8)), [set[int]() for _ in range(8)]
    for cycle in range(20):
        product = np.eye(8)
        for number in range(3 * cycle + 1, 3 * cycle + 4):
            product = dense(graph, number, range(8)) @ product
            for rank in range(8):
                met[rank].update(graph.partners(number, rank, range(8)))
        np.testing.assert_array_equal(product, np.full((8, 8), 0.125))
    assert met == [set(range(8))] * 8


def test_an_odd_rank_rests_in_a_round_of_pairs() -> None:
    graph = Graph("random", 0, range(5))
    for number in range(1, 50):
        resting = [rank for rank in range(5) if graph.partners(number, rank, range(5)) == {rank: 1.0}]
        assert len(resting) == 1


def test_most_rounds_of_hosts_stay_inside_them() -> None:
    """On two hosts of four ranks, every third round leaves the host."""
    hosts = [0, 0, 0, 0, 4, 4, 4, 4]
    graph = Graph("hosts", 0, range(8), hosts)
    leaving = [
        any(hosts[other] != hosts[0] for other in graph.partners(number, 0, range(8))) for number in range(1, 10)
    ]
    assert leaving == [False, False, True] * 3
    assert graph.partners(3, 1, range(8)) == {1: 0.5, 5: 0.5}


def test_a_lost_ranks_partners_mix_with_each_other() -> None:
    """A cycle of four becomes a cycle of three; rows and columns still add up to 1."""
    cycle = [[0.5, 0.0, 0.0, 0.5], [0.5, 0.5, 0.0, 0.0], [0.0, 0.5, 0.5, 0.0], [0.0, 0.0, 0.5, 0.5]]
    graph = Graph(checked(cycle), 0, range(4))
    assert graph.partners(1, 2, (0, 2, 3)) == {0: 0.5, 2: 0.5}
    assert graph.partners(1, 0, (0, 2, 3)) == {0: 0.5, 3: 0.5}
    assert graph.partners(9, 3, (3,)) == {3: 1.0}


def test_rows_follow_the_order_of_the_group() -> None:
    """Regression: after the loss of a rank, the row of another rank was removed."""
    matrix = [[0.9, 0.1, 0.0], [0.1, 0.8, 0.1], [0.0, 0.1, 0.9]]
    graph = Graph(checked(matrix), 0, (2, 0, 1))
    shares = [graph.partners(1, rank, (0, 1, 2)) for rank in (2, 0, 1)]
    assert shares == [{2: 0.9, 0: 0.1}, {2: 0.1, 0: 0.8, 1: 0.1}, {0: 0.1, 1: 0.9}]
    left = graph.partners(1, 2, (1, 2))
    assert left == pytest.approx({2: 0.95, 1: 0.05})


def test_a_smaller_matrix_keeps_its_sums() -> None:
    weights = np.random.default_rng(0).random((6, 6))
    for _ in range(200):  # Sinkhorn
        weights /= weights.sum(0, keepdims=True)
        weights /= weights.sum(1, keepdims=True)
    graph = Graph(checked(weights), 0, range(10, 16))
    left = dense(graph, 1, (10, 12, 15))
    np.testing.assert_allclose([*left.sum(0), *left.sum(1)], 1.0, rtol=1e-12)


def test_a_matrix_may_be_a_list_an_array_or_a_tensor() -> None:
    rows = [[0.75, 0.25], [0.25, 0.75]]
    found = {checked(given) for given in (rows, np.array(rows), torch.tensor(rows))}
    assert found == {Matrix(((0.75, 0.25), (0.25, 0.75)))}
    assert str(found.pop()).startswith("2 x 2 matrix ")


NAMED = (
    r"topology must be one of 'ring', 'exponential', 'hypercube', 'rotating', 'random', 'hosts', or a square matrix .*"
)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("star", ValueError, f"{NAMED}, got 'star'"),
        ("RingGraph", ValueError, rf"{NAMED} \(here 'ring' is the nearest\), got 'RingGraph'"),
        ("cube", ValueError, rf"{NAMED} \(here 'hypercube' is the nearest\), got 'cube'"),
        (None, TypeError, f"{NAMED}, got None"),
        (3, ValueError, f"{NAMED}, got an array of shape one number"),
        ([[0.5, 0.5]], ValueError, f"{NAMED}, got an array of shape 1 x 2"),
        ([0.5, 0.5], ValueError, f"{NAMED}, got an array of shape 2"),
        ([[0.5, 0.5], [1.0]], (TypeError, ValueError), NAMED),
        ([[1.5, -0.5], [-0.5, 1.5]], ValueError, r".* shares >= 0, got -0.5 at row 0, column 1"),
        ([[float("nan"), 0.5], [0.5, 0.5]], ValueError, r".* finite shares >= 0, got nan at row 0, column 0"),
        ([[1.0, 0.0], [0.0, 1.0]], ValueError, ".* a connected graph, got one in which no path leads from rank 1"),
        ([[0.0, 1.0], [1.0, 0.0]], ValueError, ".* powers have no zeros, got one in which values move in a cycle .*"),
    ],
)
def test_a_graph_that_cannot_mix_is_refused(given: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        checked(given)


def test_sums_that_differ_from_one_are_refused() -> None:
    columns = checked([[0.5, 0.25], [0.5, 0.75]])
    check_sums("topology", columns, push_sum=True)
    with pytest.raises(ValueError, match=r"got row 0 with the sum 0.75; use push_sum=True if only the columns"):
        check_sums("topology", columns, push_sum=False)
    with pytest.raises(ValueError, match=r"columns that add up to 1 with push_sum=True, got column 0 with the sum 1.1"):
        check_sums("topology", checked([[0.6, 0.5], [0.5, 0.5]]), push_sum=True)
