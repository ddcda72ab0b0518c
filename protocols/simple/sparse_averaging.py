"""Implements SPARTA and WASH, which average or shuffle a small random share of the parameters in each step.

In round r, all ranks draw the same random indices M_r from the seed and r. They choose a share p = ``fraction`` of the
parameters' values, and only these values are averaged:

    theta_i[M_r] = mean(theta_1[M_r], ..., theta_k[M_r])

(SPARTA: Beton et al., "Improving the Efficiency of Distributed Training using Sparse Parameter Averaging", 2025, with
p = 0.005 in each step.) The indices are never sent. Each value is chosen with probability p, independently between
rounds, so that after n rounds a share 1 - (1 - p)^n has been averaged.

WASH (Fournier et al., 2405.17517) does not average the values. At each index, the ranks exchange their values by a
random permutation, which is also drawn from the seed and r.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, Unpack

import torch
from torch import Tensor, nn

from asyncdist import validation
from asyncdist.protocols.declared import integer, number, one_of, option, with_options
from asyncdist.protocols.exchange.options import ExchangeOptionNames
from asyncdist.protocols.options import CommonOptions
from asyncdist.protocols.simple.policy import SimplePolicy
from asyncdist.protocols.simple.rule import Rule, drawn

#: Operation on the values at the random indices.
Operation: TypeAlias = Literal["mean", "shuffle"]

#: Hints at this policy's corresponding option, by the name of another library's option.
_FOREIGN_OPTIONS: Final = {
    **dict.fromkeys(("shuffle", "shuffle_prob"), "here operation='shuffle' shuffles a share of the values, fraction"),
    **dict.fromkeys(("p", "p_sparta", "share", "sparsity"), "here fraction is the share of the values to average"),
    **dict.fromkeys(("sparta_interval", "H"), "here average_every is the number of steps between rounds"),
}


class SparseAveragingOptions(ExchangeOptionNames, total=False):
    """The options of :class:`protocols.SparseAveragingPolicy`."""

    average_every: int
    fraction: float
    operation: Operation
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomShare(Rule):
    """Averages or shuffles the values at random indices, which differ from round to round."""

    fraction: float = option(
        "Share of the parameters' values that a round averages or shuffles, above 0 and at most 1.",
        number("a number above 0 and at most 1", validation.SMALLEST, 1.0),
        default=0.005,
        is_agreed=True,
    )
    operation: Operation = option(
        'Operation on the chosen values. With `"mean"`, all ranks take the mean (SPARTA). With `"shuffle"`, the ranks '
        "exchange their values at each index by a random permutation (WASH).",
        one_of(Operation),
        default="mean",
        is_agreed=True,
    )
    seed: int = option(
        "Seed for drawing the indices and permutations, an integer >= 0; must be equal on all members.",
        integer(0),
        default=0,
        is_agreed=True,
    )

    def chosen(self, round: int, count: int) -> Tensor:
        """Return a share ``fraction`` of all indices: one random index in each of many ranges of about equal length."""
        share = min(count, max(1, int(count * self.fraction + 0.5)))
        bounds = bounds_of(torch.arange(share + 1, device="cpu"), count, max(share, 1))
        numbers = drawn(self.seed, round, share + 1)
        inside = bounds[:-1] + numbers[:-1] % (bounds[1:] - bounds[:-1])
        # The lengths of the ranges differ by up to one. A random rotation gives all indices the same probability.
        turned = inside + numbers[-1] % max(count, 1)
        cut = int(torch.searchsorted(turned, count))
        return torch.cat([turned[cut:] - count, turned[:cut]])

    def permuted(self, round: int, count: int, donor_count: int) -> Tensor | None:
        """Return a random permutation of the donors for each value, or None for ``operation="mean"``."""
        if self.operation == "mean":
            return None
        numbers = drawn(self.seed, -round, count * donor_count)
        return numbers.view(count, donor_count).argsort(dim=1, stable=True)


def bounds_of(places: Tensor, count: int, share: int) -> Tensor:
    """Return the first index of each range at ``places`` if ``count`` indices are divided into ``share`` ranges.

    This is ``places * count // share``, computed without that product, which 64 bits cannot hold for large models.
    """
    whole, rest = divmod(count, share)
    return places * whole + places * rest // share


@with_options(SparseAveragingOptions, CommonOptions, RandomShare)
class SparseAveragingPolicy(SimplePolicy):
    """Trains with SPARTA or WASH: in each step, all ranks average or shuffle a small random share of the parameters.

    ::

        async with SparseAveragingPolicy(model, optimizer) as policy:
            for batch in data:
                train_step(model, optimizer, batch)
                await policy.step()

    With ``operation="shuffle"`` (WASH), the ranks stay different models that can be averaged at the end.

    Floating buffers, such as BatchNorm's statistics, are averaged whole. Integer and bool buffers are copied from the
    first contributing rank. Each rank keeps its optimizer's state. A rank whose weights are not finite does not
    contribute. It logs a warning, because a share of the values cannot restore it.

    Args:
        model: Model that this rank trains; see :class:`SpawnPolicy`.
        optimizer: Optimizer for the model.
        options: The options below.

    Raises:
        TypeError, ValueError: An argument is invalid.
    """

    @validation.names_options(refused=_FOREIGN_OPTIONS)
    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Unpack[SparseAveragingOptions]
    ) -> None:
        super().__init__(model, optimizer, RandomShare.of(options), options)
