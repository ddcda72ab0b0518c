"""Keeps the anchor (common weights) on the leader, and updates it with the ranks' contributions.

Each update makes a new version. The outer optimizer moves the parameters. Floating buffers, such as BatchNorm's
statistics, move towards the mean of the contributions, by the fraction of members that have contributed. If all have
contributed, they become the mean. Integer and bool buffers are copied from the first contribution.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from asyncdist.messaging.engine import yield_to_loop
from asyncdist.protocols.async_diloco.blocks import Block, Layouts
from asyncdist.protocols.async_diloco.corrections import StalenessWeight, correct_tensors
from asyncdist.protocols.async_diloco.islands.merging import rebase
from asyncdist.protocols.async_diloco.options import AsyncDiLoCoOptions
from asyncdist.protocols.diloco.outer_step import OuterStep
from asyncdist.protocols.diloco.radial import radial_mean_into
from asyncdist.protocols.exchange.fragment import mean_cosine
from asyncdist.protocols.exchange.layout.copies import norm_of
from asyncdist.protocols.exchange.layout.wire_layout import average_into
from asyncdist.protocols.exchange.messages import Verdict

_YIELD_NBYTES: Final = 4 << 20  # number of bytes of a mean that are computed before other tasks run


class Contribution(NamedTuple):
    """Holds a worker's contribution, whose values the leader has received.

    Attributes:
        encoded: Encoded vectors, which may be overwritten.
    """

    rank: int
    weight: float
    norm: float
    staleness: int
    encoded: Sequence[Tensor]


class Outcome(NamedTuple):
    """Describes the contributions that made a version of the anchor (common weights).

    Attributes:
        donors, weights: Ranks with finite contributions, and their weights.
        norm: L2 norm of the mean difference; NaN if no contribution was finite.
        cosine: Mean cosine between pairs of contributions' differences; NaN if unknown.
    """

    donors: tuple[int, ...]
    weights: tuple[float, ...]
    norm: float
    cosine: float


class Anchor:
    """Keeps the anchor, i.e. the workers' common weights, and the outer optimizer that moves its parameters.

    Args:
        block: Initial values, which are copied.

    Attributes:
        version: Number of changes of the anchor since training began.
    """

    @torch.inference_mode(False)  # a leader may begin during a step in inference mode
    def __init__(self, layouts: Layouts, options: AsyncDiLoCoOptions, block: Block, version: int) -> None:
        self._layouts = layouts
        self._correct = options.correct
        # Error feedback, "topk" and most corrections change the differences after their norms were measured.
        is_difference = options.error_feedback is None and layouts.wire.codec.name != "topk"
        is_scaled = options.correct is None or isinstance(options.correct, StalenessWeight)
        self._knows_norms = is_difference and is_scaled and options.merge == "mean"
        self.version = version
        self._values = [value.clone() for value in block[1]]
        assert options.outer_optimizer is not None, "the options have filled in the default"
        self._outer = OuterStep(options.outer_optimizer, layouts.stepped(self._values))

    async def step(self, contributions: Sequence[Contribution], member_count: int) -> Outcome:
        """Move the anchor by one outer step with the mean of the contributions, which are sorted by rank.

        The values and the version change at the same moment, after the mean is computed.
        """
        usable = [each for each in contributions if math.isfinite(each.norm)]
        if not usable:
            self.version += 1
            return Outcome((), (), math.nan, math.nan)
        ages = [self._age(each, member_count / len(usable)) for each in usable]
        mean = await self._mean(usable, ages)
        differences = self._layouts.stepped(mean)
        norm = math.hypot(*(norm_of(flat) for flat in differences))
        donors, weights = zip(*((each.rank, each.weight) for each in usable), strict=True)
        norms = tuple(self._norm(each, age) for each, age in zip(usable, ages, strict=True))
        cosine = mean_cosine(Verdict(1, donors, weights, norms), norm) if self._knows_norms else None
        self._outer.step(differences)
        self._move_buffers(mean, min(1.0, len(usable) / max(1, member_count)))
        self.version += 1
        return Outcome(donors, weights, norm, math.nan if cosine is None else cosine)

    def _age(self, given: Contribution, round_versions: float) -> float:
        """Return the staleness, in versions, by which a contribution is weighted. See ``StalenessWeight.first_round``.

        All ranks begin from the first anchor. Without a minimum, the first contributions of k ranks would move it by
        their mean times 1 + 1/2 + ... + 1/k.

        Args:
            round_versions: Number of versions that one contribution of each member makes.
        """
        is_first = given.staleness == self.version
        if is_first and isinstance(self._correct, StalenessWeight) and self._correct.first_round:
            return max(given.staleness, round_versions - 1.0)
        return given.staleness

    def _norm(self, given: Contribution, age: float) -> float:
        """Return the norm of a contribution's difference after a correction that only scales it."""
        return given.norm * self._correct.weight(age) if isinstance(self._correct, StalenessWeight) else given.norm

    @torch.no_grad()
    async def _mean(self, usable: Sequence[Contribution], ages: Sequence[float]) -> list[Tensor]:
        exact, weights = self._layouts.exact, [each.weight for each in usable]
        momenta = None if self._correct is None else self._outer.momenta()
        given = [self._decoded(each, momenta, age) for each, age in zip(usable, ages, strict=True)]
        _, mean = self._layouts.new_block()
        unread_nbytes = 0
        for each in exact.slices:
            into, own = exact.part(mean, each), [exact.part(values, each) for values in given]
            for number, (first, end, *_) in enumerate(exact.pieces(each)):
                combine = radial_mean_into if number in each.whole else average_into
                exact.average(each, number, [part[first:end] for part in own], weights, into[first:end], combine)
                unread_nbytes += end - first
                if unread_nbytes >= _YIELD_NBYTES:
                    unread_nbytes = 0
                    await yield_to_loop()
        return mean

    def _decoded(self, given: Contribution, momenta: Sequence[Tensor] | None, age: float) -> list[Tensor]:
        values = [vector.decoded(each) for vector, each in zip(self._layouts.wire.vectors, given.encoded, strict=True)]
        if isinstance(self._correct, StalenessWeight):
            for flat in self._layouts.stepped(values):
                flat.mul_(self._correct.weight(age))
        elif self._correct is not None:
            stepped = zip(self._layouts.exact.stepped, self._layouts.stepped(values), strict=True)
            for place, (vector, flat) in enumerate(stepped):
                bounds = [(first, end) for _, first, end in vector.places]
                momentum = None if momenta is None else momenta[place]
                correct_tensors(self._correct, flat, momentum, bounds, given.staleness)
        return values

    @torch.no_grad()
    def _move_buffers(self, mean: Sequence[Tensor], share: float) -> None:
        for vector, own, new in zip(self._layouts.exact.vectors, self._values, mean, strict=True):
            if vector.role == "averaged" and share < 1.0:
                own.copy_(torch.where(own == new, own, own.lerp(new, share)))  # lerp makes equal infinities NaN
            elif vector.role != "stepped":
                own.copy_(new)

    @torch.no_grad()
    def merge(self, reference: Block, captured: Block | None) -> None:
        """Merge the global anchor into the anchor of this island (group of ranks). Keep the outer optimizer's state.

        Args:
            reference: This island's contributed anchor, merged with the global anchor.
            captured: This island's anchor when it was contributed; None if it has not changed since.
        """
        self.version += 1
        if captured is not None:
            rebase(self._layouts, self._values, captured[1], reference[1])
        else:
            for own, new in zip(self._values, reference[1], strict=True):
                own.copy_(new)

    @torch.no_grad()
    def copy_into(self, block: Block) -> Block:
        """Copy the workers' common weights into ``block``, and return ``block``."""
        for own, into in zip(self._values, block[1], strict=True):
            into.copy_(own)
        return block

    def outer_state(self) -> dict[str, Any]:
        """Return a copy of the outer optimizer's state."""
        return self._outer.state_dict()

    def load_outer_state(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`outer_state`."""
        self._outer.load_state_dict(state)
