"""Base class of policies that average the ranks' values by a rule (:mod:`protocols.simple.rule`)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from asyncdist.protocols.declared import among
from asyncdist.protocols.exchange.fragment import Fragment
from asyncdist.protocols.exchange.layout.copies import values_of, write
from asyncdist.protocols.exchange.layout.wire_layout import Slice, Vector, WireLayout
from asyncdist.protocols.exchange.ledger import Chosen, Report
from asyncdist.protocols.exchange.messages import Verdict
from asyncdist.protocols.exchange.policy import ExchangePolicy
from asyncdist.protocols.exchange.schedule import Schedule
from asyncdist.protocols.options import MemberOptions
from asyncdist.protocols.simple.rule import Rule
from asyncdist.tensors.codecs import find_codec
from asyncdist.tensors.flat_state import Entry
from asyncdist.tensors.optimizers.weights import STATE_PREFIX

logger = logging.getLogger("protocols.simple")


class SimplePolicy(ExchangePolicy):
    """Base class of policies that are defined by a :class:`~protocols.simple.rule.Rule`.

    The rule decides how the model's floating and complex entries are averaged. Integer and bool entries are copied from
    the first donor. In each due step, a rank waits for the slowest of its partners, by default of all ranks.

    Args:
        options: Keyword arguments of the policy, including the options of :class:`SpawnPolicy`.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, rule: Rule, options: Mapping[str, Any]
    ) -> None:
        schedule = Schedule(rule.average_every, 1, 0, 0)
        super().__init__(model, optimizer, schedule=schedule, shared=rule, **among(options, MemberOptions))
        self._rule = rule
        self._takes_all = True  # whether rounds exchange all values of the parameters
        self._has_warned = False

    def _options(self) -> Mapping[str, Any]:
        return self._rule.agreed()

    def _make_fragments(self) -> Sequence[Fragment]:
        entries, exact, count = self._flat.entries, find_codec("float32"), len(self._members)
        parameters = self._known_infinities.without(dict(self.model.named_parameters(remove_duplicate=False)))
        parameters |= {name for entry in entries for name in entry.names if name.startswith(STATE_PREFIX)}
        whole = WireLayout(entries, range(len(entries)), parameters, count, exact)
        if all(self._rule.chosen(1, vector.count) is None for vector in whole.stepped):
            return [self._new_fragment(whole)]
        self._takes_all = False
        share = Share(whole, entries, self._rule)
        layout_of = partial(WireLayout, share.entries, range(len(share.entries)), share.parameters, count, exact)
        if self._rule.permuted(1, 0, 1) is None:
            return [RuleFragment(layout_of(), self._rule, share)]
        return [_PermutedFragment(layout_of(width=count), self._rule, share, self._world.rank)]

    def _new_fragment(self, layout: WireLayout) -> Fragment:
        return RuleFragment(layout, self._rule)

    def weigh(self, reports: Mapping[int, Report]) -> Mapping[int, float]:
        """Return the weight of each rank whose contribution is averaged, according to the rule."""
        return self._rule.weights(reports)

    def partners(self, number: int, rank: int, members: Sequence[int]) -> Chosen:
        """Return the members whose contributions the rule averages for a rank."""
        return self._rule.partners(number, rank, members)

    def _describe_nonfinite(self) -> str:
        """Describe this rank's non-finite state, or return "".

        If rounds exchange only a share of the values, they cannot restore a non-finite state, so it is only logged.
        """
        nonfinite = super()._describe_nonfinite()
        if not nonfinite or self._takes_all:
            return nonfinite
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s. This rank does not contribute, and a mean of some of its values cannot restore it; restart the "
                "rank, or load a checkpoint",
                nonfinite,
            )
        return ""


class RuleFragment(Fragment):
    """Averages the whole model by a rule, or only a random share of its values that changes with each round."""

    def __init__(self, layout: WireLayout, rule: Rule, share: Share | None = None) -> None:
        super().__init__(layout)
        self._rule = rule
        self._share = share

    @property
    def measured_entries(self) -> frozenset[int]:
        """Indices of the entries that a contribution contains completely. Empty with a :class:`Share`."""
        return super().measured_entries if self._share is None else frozenset()

    def capture(self, tensors: Sequence[Tensor], encoded: Sequence[Tensor]) -> float:
        """Write this rank's exchanged values into ``encoded``. See :meth:`Fragment.capture`."""
        if self._share is not None:
            tensors = self._share.take(tensors, self.version + 1)
        return super().capture(tensors, encoded)

    def combine(
        self, each: Slice, number: int, parts: Sequence[Tensor], weights: Sequence[float], into: Tensor
    ) -> None:
        """Combine the donors' encoded slices into ``into``, as the policy's rule defines."""
        vector = self.layout.vectors[each.vector]
        found = None
        if vector.role != "copied":
            found = self._rule.merge([part.view(vector.dtype) for part in parts], weights)
        if found is None:
            super().combine(each, number, parts, weights, into)
        else:
            into.view(vector.dtype).copy_(found)

    @torch.no_grad()
    def apply(self, tensors: Sequence[Tensor], *, is_late: bool, is_whole: bool) -> None:
        """Write the rule's new values into the model's tensors."""
        number = self.version
        picked = list(tensors) if self._share is None else self._share.take(tensors, number)
        for place, mean in self._values.items():
            vector = self.layout.vectors[place]
            for index, first, end in vector.places:
                new = mean[first:end]
                if vector.role != "copied" and not is_whole:
                    own = values_of(vector, picked[index]).to(vector.dtype)
                    mean_here = new.to(own.device)
                    new = self.moved(own, mean_here, number)
                    if new is not mean_here:
                        # Equal infinities, as in a mask, are kept, because their difference is NaN.
                        new = torch.where(own == mean_here, own, new)
                write(vector, new, picked[index])
        if self._share is not None and self._values:
            self._share.put(picked, tensors, number)
        self._note_applied()

    def moved(self, own: Tensor, mean: Tensor, number: int) -> Tensor:
        """Return the new values of one tensor according to the rule. See :meth:`Rule.apply`."""
        return self._rule.apply(own, mean, number)


class _PermutedFragment(RuleFragment):
    """Exchanges a share of the model's values among the ranks by random permutations. See :meth:`Rule.permuted`.

    The "mean" of a round contains all donors' values: value i of donor j, in the order of ranks, is at the index
    i * (number of members) + j. Each rank then picks its values.
    """

    def __init__(self, layout: WireLayout, rule: Rule, share: Share, rank: int) -> None:
        super().__init__(layout, rule, share)
        self._rank = rank

    def combine(
        self, each: Slice, number: int, parts: Sequence[Tensor], weights: Sequence[float], into: Tensor
    ) -> None:
        vector = self.layout.vectors[each.vector]
        if vector.role != "stepped":
            super().combine(each, number, parts, weights, into)
            return
        table = into.view(vector.dtype).view(-1, vector.mean.width)
        for column, part in enumerate(parts):
            table[:, column] = part.view(vector.dtype)
        table[:, len(parts) :] = 0

    @torch.no_grad()
    def merge(self, verdict: Verdict, encoded: Sequence[Sequence[Tensor]]) -> None:
        super().merge(verdict, encoded)
        for place, vector in enumerate(self.layout.vectors):
            if vector.role != "stepped" or place not in self._values:
                continue
            values = self._values.pop(place).view(-1, vector.mean.width)
            if self._rank in verdict.donors:
                permuted = self._rule.permuted(self.version, vector.count, len(verdict.donors))
                assert permuted is not None, "a rule without permutations needs another fragment"
                column = permuted[:, verdict.donors.index(self._rank)]
                self._values[place] = values[torch.arange(vector.count, device="cpu"), column]


class Share:
    """Reads and writes a random share of a model's values, at the indices that a rule chooses for each round.

    The exchange handles a share like a model with one tensor of chosen values per dtype. Floating-point buffers are
    exchanged whole, and integer buffers are copied from the first donor.

    Args:
        whole, entries: Layout and entries of the whole model.
        rule: Rule that chooses the indices.

    Attributes:
        entries: Entries to exchange: the chosen values of each dtype, and all entries that are not parameters.
        parameters: Names of the entries that contain chosen values.
    """

    def __init__(self, whole: WireLayout, entries: Sequence[Entry], rule: Rule) -> None:
        self._rule = rule
        self._kept: dict[Vector, tuple[int, Tensor]] = {}  # by vector: number and indices of the last round
        self._vectors = whole.stepped
        self._others = [index for each in whole.vectors if each.role != "stepped" for index, *_ in each.places]
        self._bounds = [
            torch.tensor([*(first for _, first, _ in each.places), each.count], device="cpu") for each in whole.stepped
        ]
        names = [f"the chosen values of {each.dtype}" for each in whole.stepped]
        shapes = [(len(self._chosen(1, each)),) for each in whole.stepped]
        self.parameters = set(names)
        self.entries = [
            *(
                Entry((name,), shape, vector.dtype, averaged=True, offset=0)
                for name, shape, vector in zip(names, shapes, whole.stepped, strict=True)
            ),
            *(entries[index] for index in self._others),
        ]

    def _chosen(self, round: int, vector: Vector) -> Tensor:
        kept = self._kept.get(vector)
        if kept is not None and kept[0] == round:  # drawn when the contribution was made
            return kept[1]
        chosen = self._rule.chosen(round, vector.count)
        assert chosen is not None, "a rule that exchanges all values needs no share"
        self._kept[vector] = round, chosen
        return chosen

    def take(self, tensors: Sequence[Tensor], round: int) -> list[Tensor]:
        """Return the tensors to exchange: copies of the chosen values, and the model's buffers."""
        picked = []
        for vector, bounds in zip(self._vectors, self._bounds, strict=True):
            chosen = self._chosen(round, vector)
            values = torch.empty(len(chosen), dtype=vector.dtype, device="cpu")
            for (index, first, _), begin, end in _parts(vector, bounds, chosen):
                flat = _flat(tensors[index])
                values[begin:end] = flat[(chosen[begin:end] - first).to(flat.device)].to(values)
            picked.append(values)
        return [*picked, *(tensors[index] for index in self._others)]

    def put(self, picked: Sequence[Tensor], tensors: Sequence[Tensor], round: int) -> None:
        """Write exchanged values into the model's tensors, rounding each value once to the tensor's dtype."""
        for vector, bounds, values in zip(self._vectors, self._bounds, picked, strict=False):
            chosen = self._chosen(round, vector)
            for (index, first, _), begin, end in _parts(vector, bounds, chosen):
                flat = _flat(tensors[index])
                flat[(chosen[begin:end] - first).to(flat.device)] = values[begin:end].to(flat)
                if flat.untyped_storage().data_ptr() != tensors[index].untyped_storage().data_ptr():
                    tensors[index].copy_(_shaped(flat, tensors[index]))


def _parts(vector: Vector, bounds: Tensor, chosen: Tensor) -> list[tuple[tuple[int, int, int], int, int]]:
    """Return the place in ``vector`` of each tensor with chosen values, and the range of its values in ``chosen``."""
    cuts = torch.searchsorted(chosen, bounds).tolist()
    parts = zip(vector.places, pairwise(cuts), strict=True)
    return [(place, begin, end) for place, (begin, end) in parts if begin < end]


def _flat(tensor: Tensor) -> Tensor:
    """Return a tensor's real values in one dimension, as a view if the tensor is contiguous."""
    real = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    return real.reshape(-1)


def _shaped(flat: Tensor, tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return torch.view_as_complex(flat.view(*tensor.shape, 2))
    return flat.view(tensor.shape)
