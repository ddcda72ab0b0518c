"""Base class of the rules of simple policies, which decide which ranks average which values, and how.

A rule is a frozen dataclass of options. Its methods are pure functions. They are called on all members with equal
arguments, so that all members make the same decision without a message. A method that needs random numbers calls
:func:`drawn` with the round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from asyncdist.protocols.declared import integer, option
from asyncdist.protocols.exchange.ledger import Chosen, Report, reported_weights
from asyncdist.protocols.exchange.options import ExchangeOptions

_INT64_MAX: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(ExchangeOptions):
    """Defines how the ranks of a simple policy average. By default, all ranks take the mean of all ranks.

    A round is one exchange. Rounds are numbered from 1, and are the same on all members.
    """

    average_every: int = option(
        "Number of steps between averages: step i, counted from 0, averages if (i + 1) % average_every == 0.",
        integer(1),
        default=1,
        is_agreed=True,
    )

    def partners(self, round: int, rank: int, members: Sequence[int]) -> Chosen:
        """Return the members whose values a rank combines in a round, or None if all members share one mean.

        In a due step, a rank waits only for its partners. With k ranks and S bytes of values, a rank receives S bytes
        from each partner, or 2 S (k - 1) / k bytes in all if the members share one mean. If a rank is lost, this method
        is called again for ranks that still wait for a mean.

        Args:
            members: Ranks that take part in the round, ascending, including ``rank``.

        Returns:
            Ranks among ``members``, usually including ``rank``. If this is a mapping, its values are the factors by
            which this rank multiplies the weights of the contributions.
        """
        del round, rank, members
        return None

    def chosen(self, round: int, count: int) -> Tensor | None:
        """Return the indices of the parameters' values that a round exchanges, or None for all values.

        Args:
            count: Number of all values of the parameters.

        Returns:
            Ascending int64 indices without repetition. Their number may depend only on ``count`` and the options.
        """
        del round, count
        return None

    def weights(self, reports: Mapping[int, Report]) -> Mapping[int, float]:
        """Return the weight of each donor, by rank, from the reports of all members. Other members are left out.

        A rank whose reported norm is not finite must be left out.
        """
        return reported_weights(reports)

    def merge(self, slices: Sequence[Tensor], weights: Sequence[float]) -> Tensor | None:
        """Return the combination of the donors' slices, or None for their weighted mean.

        The function must be elementwise, since each rank combines only a part of the values.

        Args:
            slices: Parts of the donors' flat vectors, in the order of ranks: 1-D float32 or float64 tensors on the CPU,
                which must not be changed.
            weights: Weights of the donors, above 0.
        """
        del slices, weights
        return None

    def permuted(self, round: int, count: int, donor_count: int) -> Tensor | None:
        """Return the permutations by which donors exchange values in a round, or None if values are combined.

        With permutations, :meth:`merge` is not called, and ranks that are not donors keep their values. :meth:`chosen`
        must then return indices.

        Args:
            count: Number of values that the round exchanges.
            donor_count: Number of donors.

        Returns:
            int64 tensor of shape (count, donor_count) whose rows are permutations. Entry ``[i, j]`` is the index, in
            the order of ranks, of the donor whose value i donor j takes.
        """
        del round, count, donor_count
        return None

    def apply(self, own: Tensor, mean: Tensor, round: int) -> Tensor:
        """Return the new values of one tensor, or of its exchanged part.

        Args:
            own: The rank's current values, which must not be changed: 1-D float32 or float64, on the model's device.
            mean: The round's combination of the donors' values, with the same shape, dtype and device.
        """
        del own, round
        return mean


def drawn(seed: int, round: int, count: int, *, first: int = 0) -> Tensor:
    """Return ``count`` random integers from 0 to 2 ** 63 - 1, which depend only on the arguments.

    They are the numbers of a sequence from index ``first`` on.

    The generator is SplitMix64 (Steele, Lea and Flood, 2014). Unlike torch's generators, it gives equal numbers on all
    machines and in all versions of torch.
    """
    (state,) = _mixed(torch.tensor([seed % (1 << 63)], device="cpu") * _GOLDEN + round).tolist()
    return _mixed(state + _GOLDEN * torch.arange(first + 1, first + count + 1, device="cpu")) & _INT64_MAX


def random_pair(seed: int, round: int, rank: int, members: Sequence[int]) -> tuple[int, ...]:
    """Return a rank and its random partner in a round, in ascending order.

    If the number of members is odd, the member without a partner is returned alone.
    """
    return next(pair for pair in random_pairs(seed, round, members) if rank in pair)


def random_pairs(seed: int, round: int, members: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the random pairs of members in a round, each ascending. A member without partner is alone in its tuple."""
    keys = drawn(seed, round, len(members)).tolist()
    order = [member for _, member in sorted(zip(keys, members, strict=True))]
    return [tuple(sorted(order[place : place + 2])) for place in range(0, len(order), 2)]


#: The constants of SplitMix64, as int64.
_GOLDEN: Final = 0x9E3779B97F4A7C15 - (1 << 64)
_FACTORS: Final = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


def _mixed(values: Tensor) -> Tensor:
    """Apply SplitMix64's output function to int64 values, modulo 2 ** 64."""
    values = (values ^ _shifted(values, 30)) * _FACTORS[0]
    values = (values ^ _shifted(values, 27)) * _FACTORS[1]
    return values ^ _shifted(values, 31)


def _shifted(values: Tensor, count: int) -> Tensor:
    """Shift int64 values to the right, as if they were unsigned."""
    return (values >> count) & ((1 << (64 - count)) - 1)
