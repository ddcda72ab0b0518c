"""Checks the arguments that decide a simulation: its ranks, its seed, its models and its faults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncdist import validation
from asyncdist.simulation.faults import Fault, check_plan
from asyncdist.simulation.models import Compute, Network


@dataclass(frozen=True, slots=True)
class Arguments:
    """Holds the arguments of one run, checked, with their defaults.

    Attributes:
        size: the number of ranks.
        seed: the seed of everything that is drawn.
        network: the links.
        compute: how long user code computes.
        faults: what goes wrong.
    """

    size: int
    seed: int
    network: Network
    compute: Compute
    faults: tuple[Fault, ...]

    @classmethod
    def checked(
        cls, ranks: int, seed: int, network: Network | None, compute: Compute | None, faults: Sequence[Fault]
    ) -> Arguments:
        """Check the arguments of :func:`asyncdist.simulate`.

        Raises:
            TypeError, ValueError: an argument is of the wrong kind or out of range.
        """
        ranks = validation.count("ranks", ranks)
        seed = validation.whole("seed", seed)
        for name, value, kind in (("network", network, Network), ("compute", compute, Compute)):
            if value is not None and not isinstance(value, kind):
                raise TypeError(f"{name} is {value!r}; a {kind.__name__} is needed")
        check_plan(faults, ranks)
        network, compute = network or Network(), compute or Compute()
        network.check_ranks(ranks)
        compute.check_ranks(ranks)
        return cls(ranks, seed, network, compute, tuple(faults))
