"""Topologies of gossip: graphs that define each rank's partners in a round, and the partners' shares.

A mixing matrix W describes a round: rank i takes ``sum(W[i][j] * theta[j])`` over its partners j. The shares in each
row add up to 1. In all named topologies, the shares in each column add up to 1 as well, so the mean of the ranks does
not change. All members compute W from the round's number, the seed and the living members, without a message. If a rank
is lost, the others use the graph for the smaller group.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

import torch

from asyncdist import validation
from asyncdist.protocols.simple.rule import drawn, random_pairs

#: Named graphs.
TopologyName: TypeAlias = Literal["ring", "exponential", "hypercube", "rotating", "random", "hosts"]
#: Share of each partner in one rank's new values, by rank.
Shares: TypeAlias = Mapping[int, float]
NAMES: Final[tuple[str, ...]] = get_args(TopologyName)
#: Names of these graphs in other libraries.
_FOREIGN_NAMES: Final = {
    "ExponentialTwoGraph": "exponential",
    "ExponentialGraph": "exponential",
    "GetDynamicOnePeerSendRecvRanks": "exponential",
    "RingGraph": "ring",
    "dissemination": "exponential",
    "cube": "hypercube",
    "rotation": "rotating",
    "shift_one": "random",
    "pairs": "random",
}
_SUM_ERROR_MAX: Final = 1e-6  # largest deviation from 1 of the sum of a row or column


@dataclass(frozen=True)
class Matrix:
    """Holds a user's mixing matrix, checked to be square, finite and nonnegative, and to mix the values of all ranks.

    Attributes:
        rows: For each rank, the shares of all ranks in its new values.
    """

    rows: tuple[tuple[float, ...], ...]

    def __repr__(self) -> str:
        """Return the size and a checksum, by which the ranks' matrices are compared."""
        size = len(self.rows)
        return f"{size} x {size} matrix {zlib.crc32(repr(self.rows).encode()):08x}"


#: Graph of the partners: a name, or a mixing matrix.
Topology: TypeAlias = TopologyName | Matrix | Sequence[Sequence[float]] | torch.Tensor


def checked_topology(name: str, value: Any) -> str | Matrix:
    """Return the name of a topology, or convert a nested sequence, an array or a tensor to a :class:`Matrix`.

    Raises:
        TypeError, ValueError: The name is unknown, or the matrix cannot mix the ranks.
    """
    allowed = f"{validation.one_of(NAMES)}, or a square matrix of the ranks' shares"
    if isinstance(value, Matrix):
        return value
    if isinstance(value, str):
        if value not in NAMES:
            meant = {each.lower(): ours for each, ours in _FOREIGN_NAMES.items()}.get(value.lower())
            validation.refuse(name, value, allowed + (f" (here {meant!r} is the nearest)" if meant else ""))
        return value
    try:
        given = torch.as_tensor(value, dtype=torch.float64, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        hint = "; for a graph of networkx, pass networkx.to_numpy_array(graph)" if hasattr(value, "nodes") else ""
        validation.refuse(name, value, allowed + hint, TypeError)
    if given.ndim != 2 or given.shape[0] != given.shape[1] or not len(given):
        shape = " x ".join(map(str, given.shape)) or "one number"
        raise ValueError(f"{name} must be {allowed}, got an array of shape {shape}")
    _check_mixes(name, given)
    return Matrix(tuple(map(tuple, given.tolist())))


def _check_mixes(name: str, given: torch.Tensor) -> None:
    """Raise ValueError if a share is negative or not finite, or if repeated mixing leaves zeros in the matrix."""
    wrong = (~torch.isfinite(given) | (given < 0)).nonzero()
    if len(wrong):
        row, column = wrong[0].tolist()
        raise ValueError(
            f"{name} must be a matrix of finite shares >= 0, got {given[row, column].item()} at row {row}, column "
            f"{column}"
        )
    size = len(given)
    reached = (given > 0).double() + torch.eye(size, dtype=torch.float64, device="cpu")
    for _ in range(size.bit_length()):
        reached = (reached @ reached > 0).double()
    missing = (reached == 0).nonzero()
    if len(missing):
        row, column = missing[0].tolist()
        raise ValueError(
            f"{name} must be a matrix of a connected graph, got one in which no path leads from rank {column} to rank "
            f"{row}"
        )
    powers = (given > 0).double()
    for _ in range(2 * size.bit_length()):  # the (size - 1)^2 + 1-th power of a primitive matrix has no zeros
        powers = (powers @ powers > 0).double()
    if not bool(powers.all()):
        raise ValueError(
            f"{name} must be a matrix whose powers have no zeros, got one in which values move in a cycle and never "
            "mix; give each rank a share of its own values (the diagonal)"
        )


def check_sums(name: str, matrix: Matrix, *, push_sum: bool) -> None:
    """Raise ValueError if a column, or without push-sum also a row, does not add up to 1."""
    columns = tuple(zip(*matrix.rows, strict=True))
    wanted = "columns that add up to 1 with push_sum=True" if push_sum else "rows and columns that add up to 1"
    for kind, vectors in (("column", columns), ("row", matrix.rows)):
        for place, vector in enumerate(vectors):
            if abs(sum(vector) - 1.0) > _SUM_ERROR_MAX and not (push_sum and kind == "row"):
                hint = ""
                if kind == "row" and all(abs(sum(each) - 1.0) <= _SUM_ERROR_MAX for each in columns):
                    hint = "; use push_sum=True if only the columns add up to 1"
                raise ValueError(
                    f"{name} must be a matrix with {wanted}, got {kind} {place} with the sum {sum(vector):.6g}{hint}"
                )


class Graph:
    """Computes each rank's partners in each round.

    Args:
        ranks: All ranks of the policy, ascending, one for each row of a matrix. Includes lost ranks.
        hosts: For each rank, the lowest rank on its host; None if all ranks share one host.
    """

    def __init__(self, topology: Topology, seed: int, ranks: Sequence[int], hosts: Sequence[int] | None = None) -> None:
        self._topology, self._seed, self._ranks, self._hosts = topology, seed, tuple(ranks), hosts
        self._table = functools.lru_cache(maxsize=16)(self._new_table)

    def partners(self, round: int, rank: int, members: Sequence[int]) -> Shares:
        """Return the share of each partner in a rank's new values."""
        return self._table(round, tuple(members))[rank]

    def _new_table(self, round: int, members: tuple[int, ...]) -> Mapping[int, Shares]:
        phase = round - 1
        match self._topology:
            case Matrix(rows):
                return self._of_matrix(rows, members)
            case "ring":
                return _ring(members)
            case "exponential":
                return _exponential(members, phase)
            case "hypercube":
                return _paired(_cube(members, phase), members)
            case "rotating":
                cycle, place = divmod(phase, max(1, _period(len(members))))
                return _exponential(self._rotated(members, cycle), place)
            case "random":
                return _paired(random_pairs(self._seed, round, members), members)
            case _:
                return self._of_hosts(members, phase)

    def _of_matrix(self, rows: tuple[tuple[float, ...], ...], members: tuple[int, ...]) -> Mapping[int, Shares]:
        """Return the shares of the living members. A lost rank's partners exchange their values directly.

        The smaller matrix is the stochastic complement of the lost ranks (Meyer, 1989). Rows and columns that add up
        to 1 still do, and a connected graph stays connected.
        """
        left = torch.tensor(rows, dtype=torch.float64, device="cpu")
        for place in reversed([place for place, rank in enumerate(self._ranks) if rank not in members]):
            kept = [each for each in range(len(left)) if each != place]
            passed = left[kept, place].outer(left[place, kept]) / (1.0 - left[place, place])
            left = left[kept][:, kept] + passed
        living = [rank for rank in self._ranks if rank in members]  # rows and columns are in the group's order
        return {
            rank: {other: share for other, share in zip(living, row, strict=True) if share > 0.0}
            for rank, row in zip(living, left.tolist(), strict=True)
        }

    def _rotated(self, members: tuple[int, ...], cycle: int) -> list[int]:
        """Return the members in the random order of a cycle of rounds (GossipGraD: 1803.05880)."""
        keys = drawn(self._seed, -1 - cycle, len(members)).tolist()
        return [member for _, member in sorted(zip(keys, members, strict=True))]

    def _of_hosts(self, members: tuple[int, ...], phase: int) -> Mapping[int, Shares]:
        """Return shares within hosts or, after each full cycle of such rounds, between hosts.

        Inside a host, and between ranks with the same position on their hosts, the graph is exponential.
        """
        hosts: dict[int, list[int]] = {}
        for rank in members:
            hosts.setdefault(0 if self._hosts is None else self._hosts[rank], []).append(rank)
        widest = max(map(len, hosts.values()))
        inside = _period(widest)
        cycle, place = divmod(phase, max(1, inside + (len(hosts) > 1)))
        if place < inside:
            groups = list(hosts.values())
            return {rank: shares for each in groups for rank, shares in _exponential(each, place).items()}
        lanes = [[group[lane] for group in hosts.values() if lane < len(group)] for lane in range(widest)]
        return {rank: shares for lane in lanes for rank, shares in _exponential(lane, cycle).items()}


def _period(count: int) -> int:
    """Return the number of rounds in one cycle of an exponential graph or hypercube: log2 of ``count``, rounded up."""
    return (count - 1).bit_length()


def _ring(members: Sequence[int]) -> dict[int, Shares]:
    """Let each rank take equal shares of itself and its neighbours (D-PSGD: Lian et al., 1705.09056)."""
    count = len(members)
    found: dict[int, Shares] = {}
    for place, rank in enumerate(members):
        near = {members[(place + step) % count] for step in (-1, 0, 1)}
        found[rank] = dict.fromkeys(sorted(near), 1.0 / len(near))
    return found


def _exponential(members: Sequence[int], phase: int) -> dict[int, Shares]:
    """Let each rank average with the rank 2^phase positions before it (Assran et al., 1811.10792).

    For k = 2^n ranks, n rounds without training give all ranks the exact mean.
    """
    count = len(members)
    step = 1 << phase % max(1, _period(count))
    return {rank: _halves(rank, members[(place - step) % count]) for place, rank in enumerate(members)}


def _cube(members: Sequence[int], phase: int) -> list[tuple[int, int]]:
    """Return pairs of ranks whose places in ``members`` differ in one bit. A rank whose partner is lost has no pair."""
    count = len(members)
    bit = 1 << phase % max(1, _period(count))
    return [(members[place], members[place | bit]) for place in range(count) if not place & bit and place | bit < count]


def _paired(groups: Sequence[Sequence[int]], members: Sequence[int]) -> dict[int, Shares]:
    """Return the shares by which both ranks of each pair take their mean. All other members keep their own values."""
    found: dict[int, Shares] = {rank: {rank: 1.0} for rank in members}
    for group in groups:
        found |= dict.fromkeys(group, _halves(group[0], group[-1]))
    return found


def _halves(one: int, other: int) -> Shares:
    return {one: 0.5, other: 0.5} if one != other else {one: 1.0}
