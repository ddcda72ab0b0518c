"""Implements gossip: each rank averages with a few partners, and waits only for them.

In a round, rank i takes a weighted mean of its partners' weights. The shares W are defined by a graph that depends on
the round (:mod:`protocols.simple.topologies`):

    theta_i = sum(W[i][j] * theta_j)

The ranks stay slightly different models around a common mean. The methods differ in the graph and the ranks' state:

- D-PSGD (Lian et al., 1705.09056): a fixed graph, such as a ring, in each step.
- GossipGraD (Daily et al., 1803.05880): a partner that changes in each round, so that values reach k ranks in log2 k
  rounds.
- SGP (Assran et al., 1811.10792), ``push_sum=True``: each rank also has a mass w, which is mixed like x = w * theta.
  Only the columns of W must add up to 1, so directed graphs keep the mean too.
- NoLoCo (Kolehmainen et al., 2506.10911): pairs, and on each rank an anchor phi and a momentum m:
  m = beta * m + gamma * (mean(theta) - phi); phi = phi + m. The paper's two terms, the mean drift and the distance to
  the partners' mean anchor, share the factor gamma here. Only theta is therefore sent.
- GASLoC (2606.11081), ``nesterov=True``: y = phi + gamma * (theta - phi) is sent, and
  phi = mean(y) + beta * (y - y of the last round). The mean of the ranks moves like DiLoCo's with Nesterov momentum.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Unpack

import torch
from torch import Tensor, nn

from asyncdist import validation
from asyncdist.protocols.declared import boolean, integer, number, option, with_options
from asyncdist.protocols.exchange.fragment import Fragment
from asyncdist.protocols.exchange.layout.copies import as_written, gather, norm_of
from asyncdist.protocols.exchange.layout.wire_layout import WireLayout
from asyncdist.protocols.exchange.options import ExchangeOptionNames
from asyncdist.protocols.options import CommonOptions
from asyncdist.protocols.simple.policy import RuleFragment, SimplePolicy
from asyncdist.protocols.simple.rule import Rule
from asyncdist.protocols.simple.topologies import Graph, Matrix, Shares, Topology, check_sums, checked_topology

_FOREIGN_OPTIONS: Final = {
    **dict.fromkeys(
        ("num_steps_per_communication", "communication_interval", "synch_freq", "sync_every", "gossip_period", "H"),
        "here average_every is the number of steps between rounds",
    ),
    **dict.fromkeys(
        ("graph", "graph_type", "peer_selection_mode", "communication_type", "neighbor_weights", "self_weight"),
        "here topology is a name ('ring', 'exponential', 'hypercube', 'rotating', 'random', 'hosts') or a matrix of "
        "shares",
    ),
    **dict.fromkeys(
        ("src_weights", "dst_weights", "mixing"), "here topology is a matrix: row i has the shares that rank i takes"
    ),
    **dict.fromkeys(("random_seed", "gossip_seed"), "here seed draws the partners of topology='random' and 'rotating'"),
    **dict.fromkeys(
        ("num_nodes", "num_modules", "local_process_group", "nprocs_per_node", "group_size", "target_group_size"),
        "here the world defines the ranks and hosts, and topology chooses the partners",
    ),
    **dict.fromkeys(("prefix", "averager", "target_batch_size"), "the ranks find each other through the world"),
    **dict.fromkeys(
        ("outer_optimizer", "slow_momentum"), "here outer_lr, outer_momentum and nesterov are the outer step"
    ),
    "momentum": "here outer_momentum is the momentum of the outer step",
    "beta": "here outer_momentum is the momentum of the outer step",
    **dict.fromkeys(("gamma", "outer_learning_rate"), "here outer_lr is the learning rate of the outer step"),
    "overlap": "a round's step waits for its partners; see OneSidedSelectiveAveragingPolicy for ranks that never wait",
}


logger = logging.getLogger("protocols.simple")

#: Largest outer momentum at which repeated mixing, without training, is stable on up to 32 ranks. Only for topologies
#: whose partners change.
_MOMENTUM_MAX: Final = {
    **dict.fromkeys(("exponential", "hypercube", "rotating", "hosts"), 0.5),
    "random": 0.7,
}


class GossipOptions(ExchangeOptionNames, total=False):
    """The options of :class:`protocols.GossipPolicy`."""

    average_every: int
    topology: Topology
    push_sum: bool
    outer_lr: float
    outer_momentum: float
    nesterov: bool
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gossip(Rule):
    """Options of gossip. The policy chooses the partners, because the graph depends on the ranks."""

    topology: Topology = option(
        'Graph of the partners: `"exponential"`, `"ring"`, `"hypercube"`, `"random"` (pairs), `"rotating"` (as '
        '`"exponential"`, with other partners in each cycle), `"hosts"` (mostly partners on the same host), or a '
        "matrix whose row i has the shares that rank i takes of all ranks' weights.",
        checked_topology,
        default="exponential",
        is_agreed=True,
    )
    push_sum: bool = option(
        "Whether each rank also mixes a mass, so that only the columns of a matrix must add up to 1 (SGP).",
        boolean,
        default=False,
        is_agreed=True,
    )
    outer_lr: float = option(
        "Learning rate of the outer step, above 0: the factor of the way from a rank's last weights after a round. "
        "NoLoCo uses 0.7.",
        number("a number above 0", validation.SMALLEST),
        default=1.0,
        is_agreed=True,
    )
    outer_momentum: float = option(
        "Momentum of the outer step, at least 0 and below 1. NoLoCo uses 0.5. Larger values are stable only if the "
        "partners do not change.",
        number("a number >= 0 and < 1", 0.0, 1.0 - 2.0**-53),
        default=0.0,
        is_agreed=True,
    )
    nesterov: bool = option(
        "Whether the outer momentum is Nesterov's: the mean of all ranks then moves like DiLoCo's (GASLoC).",
        boolean,
        default=False,
        is_agreed=True,
    )
    seed: int = option(
        'Seed of the partners with `topology="random"` and `"rotating"`, from 0; equal on all members.',
        integer(0),
        default=0,
        is_agreed=True,
    )

    def __post_init__(self) -> None:
        Rule.__post_init__(self)
        if self.nesterov and not self.outer_momentum:
            validation.refuse("outer_momentum", self.outer_momentum, "above 0 with nesterov=True")
        if self.push_sum and self.has_outer_step:
            raise ValueError(
                "outer_lr must be 1 and outer_momentum 0 with push_sum=True, got "
                f"{self.outer_lr} and {self.outer_momentum}"
            )
        if isinstance(self.topology, Matrix):
            check_sums("topology", self.topology, push_sum=self.push_sum)

    @property
    def has_outer_step(self) -> bool:
        """False if each rank continues with its partners' mean."""
        return self.outer_lr != 1.0 or self.outer_momentum > 0.0

    def agreed(self) -> dict[str, Any]:
        """Return the options that must be equal on all ranks, by name, as JSON values."""
        return {**Rule.agreed(self), "topology": str(self.topology)}

    def check_size(self, size: int) -> None:
        """Raise ValueError if the topology does not fit the number of ranks."""
        if isinstance(self.topology, Matrix) and len(self.topology.rows) != size:
            validation.refuse(
                "topology", self.topology, f"a {size} x {size} matrix, with a row for each of the {size} ranks"
            )
        if self.topology == "hypercube" and size.bit_count() != 1:
            allowed = (
                f"'exponential', 'rotating', 'random', 'ring' or 'hosts' on {size} ranks, because in a hypercube each "
                "rank has a partner only if their number is a power of two"
            )
            validation.refuse("topology", self.topology, allowed)


class GossipFragment(RuleFragment):
    """Keeps gossip's state for the whole model: a mass for push-sum, or the anchor and momentum of an outer step.

    Args:
        tensors: The model's tensors, from which the first anchor is copied.

    Attributes:
        mass: This rank's push-sum weight w; 1 without push-sum.
    """

    _rule: Gossip

    def __init__(self, layout: WireLayout, rule: Gossip, tensors: Sequence[Tensor]) -> None:
        super().__init__(layout, rule)
        self.mass = 1.0
        self._anchors: dict[int, Tensor] = {}  # by index of the vector: parameters after the last round
        self._momenta: dict[int, Tensor] = {}  # by index of the vector; with Nesterov, the last contribution
        for place, vector in enumerate(layout.vectors):
            if vector.role == "stepped":
                self._anchors[place] = vector.new_flat()
                gather(vector, tensors, self._anchors[place])
                if not rule.push_sum:
                    first = self._anchors[place] if rule.nesterov else vector.new_flat()
                    self._momenta[place] = first.clone()

    @torch.no_grad()
    def capture(self, tensors: Sequence[Tensor], encoded: Sequence[Tensor]) -> float:
        """Write this member's contribution into ``encoded``, and return its L2 norm."""
        norm = 0.0
        for place, (vector, into) in enumerate(zip(self.layout.vectors, encoded, strict=True)):
            self._gather(place, tensors, into)
            if vector.role == "stepped":
                norm = math.hypot(norm, norm_of(into))
        return norm

    def _gather(self, place: int, tensors: Sequence[Tensor], into: Tensor) -> None:
        """Write one vector of this rank's contribution: anchor + factor * (weights - anchor).

        The difference is measured from the anchor rounded to the weights' dtype, because training began there.

        With push-sum, the contribution is x / w, which counts with the weight w (the mass). The factor 1 / w makes
        training move x by as much as the weights.
        """
        vector, anchor = self.layout.vectors[place], self._anchors.get(place)
        gather(vector, tensors, into)
        if anchor is None:
            return
        start = as_written(vector, anchor, tensors)
        if start is not anchor:
            into.add_(anchor - start)
        if self.mass != 1.0:
            into.sub_(anchor).div_(self.mass).add_(anchor)
        elif self._rule.nesterov and self._rule.outer_lr != 1.0:
            into.sub_(anchor).mul_(self._rule.outer_lr).add_(anchor)

    @torch.no_grad()
    def apply(self, tensors: Sequence[Tensor], *, is_late: bool, is_whole: bool) -> None:
        """Move the anchors to or towards the partners' mean, and write the anchors into the model."""
        if self._values and self.mean is not None and self._rule.push_sum:
            self.mass = sum(self.mean.verdict.weights)
        for place, mean in self._values.items():
            if place in self._anchors:
                self._values[place] = self._moved(place, mean, tensors, is_whole)
        super().apply(tensors, is_late=is_late, is_whole=is_whole)

    def _moved(self, place: int, mean: Tensor, tensors: Sequence[Tensor], is_whole: bool) -> Tensor:
        anchor, momentum, rule = self._anchors[place], self._momenta.get(place), self._rule
        if momentum is None:  # push-sum
            anchor.copy_(mean)
        elif is_whole:
            anchor.copy_(mean)
            if rule.nesterov:
                momentum.copy_(mean)
            else:
                momentum.zero_()
        elif rule.nesterov:
            sent = torch.empty_like(mean)
            self._gather(place, tensors, sent)
            anchor.copy_(mean).add_((sent - momentum).mul_(rule.outer_momentum))
            momentum.copy_(sent)
        else:
            momentum.mul_(rule.outer_momentum).add_((mean - anchor).mul_(rule.outer_lr))
            anchor.add_(momentum)
        return anchor

    def forget_own(self) -> None:
        """Reset the mass to 1 after loading another rank's state."""
        self.mass = 1.0

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state, without an unapplied mean."""
        kept = {
            "names": self.layout.checksum_of_names(),
            "anchors": {place: each.clone() for place, each in self._anchors.items()},
            "momenta": {place: each.clone() for place, each in self._momenta.items()},
        }
        return {**super().state_dict(), "mass": self.mass, "nesterov": self._rule.nesterov, **kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a :meth:`state_dict` of the same layout and options.

        Raises:
            ValueError: The state belongs to a policy with another outer step, or to push-sum.
        """
        self.layout.check_names(state)
        super().load_state_dict(state)
        if state["nesterov"] != self._rule.nesterov:  # with Nesterov, the saved momenta are contributions
            raise ValueError(
                f"the state must have been saved by a policy with nesterov={self._rule.nesterov}, got the opposite"
            )
        for name, kept in (("anchors", self._anchors), ("momenta", self._momenta)):
            saved = state.get(name, {})
            if {place: each.shape for place, each in saved.items()} != {at: each.shape for at, each in kept.items()}:
                raise ValueError(
                    "the state must have been saved by a policy with the same outer_lr, outer_momentum and push_sum"
                )
            for place, each in saved.items():
                kept[place].copy_(each)
        self.mass = state["mass"]


@with_options(GossipOptions, CommonOptions, Gossip)
class GossipPolicy(SimplePolicy):
    """Trains with gossip: each rank averages with a few partners, which change from round to round.

    ::

        async with GossipPolicy(model, optimizer) as policy:
            for batch in data:
                train_step(model, optimizer, batch)
                await policy.step()

    In a due step, a rank waits only for its partners in this round. The ranks' weights stay different. Floating
    buffers, such as BatchNorm's statistics, are averaged with the partners. Integer and bool buffers are copied from
    the first partner. Each rank keeps its optimizer's state. If a partner is lost, new partners are chosen among the
    living ranks. A rank whose weights are not finite does not contribute, and takes its partners' mean.

    Args:
        model: Model that this rank trains; see :class:`SpawnPolicy`.
        optimizer: Optimizer for the model.
        options: The options below.

    Raises:
        TypeError, ValueError: An argument is invalid.
    """

    @validation.names_options(refused=_FOREIGN_OPTIONS)
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Unpack[GossipOptions]) -> None:
        self._gossip = Gossip.of(options)
        self._graph: Graph
        most = _MOMENTUM_MAX.get(str(self._gossip.topology), 1.0)
        if self._gossip.outer_momentum > most:
            logger.warning(
                "outer_momentum=%s is above %s with topology=%r: if partners change in each round, the differences "
                "between the ranks may grow without limit. Lower outer_momentum, or use a topology that never "
                "changes, such as 'ring'",
                self._gossip.outer_momentum,
                most,
                self._gossip.topology,
            )
        super().__init__(model, optimizer, self._gossip, options)

    def _prepare(self) -> None:
        ranks = self._group.ranks
        if len(ranks) > 1:
            self._gossip.check_size(len(ranks))
        self._graph = Graph(self._gossip.topology, self._gossip.seed, ranks, self._services.hosts)
        super()._prepare()

    def _new_fragment(self, layout: WireLayout) -> Fragment:
        if not (self._gossip.has_outer_step or self._gossip.push_sum):
            return super()._new_fragment(layout)
        return GossipFragment(layout, self._gossip, self._tensors())

    def partners(self, number: int, rank: int, members: Sequence[int]) -> Shares:
        """Return the share of each partner in a rank's new weights."""
        return self._graph.partners(number, rank, members)

    def _take_weight(self, fragment: int) -> float:
        """Return this rank's mass (push-sum weight), by which its contribution is weighted. 1.0 without push-sum."""
        own = self._fragments[fragment]
        return own.mass if isinstance(own, GossipFragment) else 1.0
