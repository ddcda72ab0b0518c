"""Describes a simulated network as plain data, checked when made, and says what latency and bandwidth a message gets.

A :class:`Link` has the latency and the bandwidth between two ranks, a :class:`Network` all links. Times are virtual
seconds, sizes bytes, rates bytes per second. Where a duration is asked for, a number is a constant, and a
:class:`Uniform`, :class:`Exponential` or :class:`LogNormal` is drawn afresh each time, from the simulation's seed
(:mod:`asyncdist.simulation.distributions` has the arithmetic).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncdist import validation
from asyncdist.simulation.distributions import Duration, LogNormal, Uniform, check_duration, check_number, sampler


def check_ranks(what: str, ranks: Sequence[int], size: int) -> None:
    """Refuse ranks that do not exist."""
    for rank in ranks:
        if type(rank) is not int or not 0 <= rank < size:
            raise ValueError(f"{what} names rank {rank!r}; ranks go from 0 to {size - 1}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Describes one direction between two ranks.

    Attributes:
        latency_s: time from the send to the arrival of the first byte.
        bandwidth_nbytes_per_s: messages of one link queue behind each other, small and large ones.
    """

    latency_s: Duration = LogNormal(2e-6, 1.0)
    bandwidth_nbytes_per_s: float = 10e9

    def __post_init__(self) -> None:
        check_duration("latency_s", self.latency_s)
        check_number("bandwidth_nbytes_per_s", self.bandwidth_nbytes_per_s, above_zero=True)

    def latency_sampler(self, rng: random.Random) -> Callable[[], float]:
        """Return a function that draws the latency of one message, in seconds."""
        return sampler(self.latency_s, rng)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Describes the links, and the freedoms that a transport has.

    Attributes:
        link: the link between ranks on one host.
        cross_link: the link between ranks on different hosts.
        ranks_per_host: how many consecutive ranks share a host; by default all of them do.
        host_bandwidth_nbytes_per_s: what a host's network interface carries, in each direction, of all that its ranks
            send to other hosts and receive from them. By default each link has its own bandwidth alone, so that a rank
            which receives from many is as quick as one that receives from one.
        links: exceptions, by (source, dest).
        eager_nbytes: up to this size a send completes at once. A larger one waits for its receive, for a moment in
            which the receiver does not compute (in half of the simulations, one in which the sender does not, either),
            and for the bytes to travel. None draws it anew for each simulation, from 256 bytes to 64 KiB.
        loss_detection_s: from a rank's death until its peers are told.
    """

    link: Link = Link()
    cross_link: Link = Link(latency_s=LogNormal(50e-6, 1.0), bandwidth_nbytes_per_s=1e9)
    ranks_per_host: int | None = None
    host_bandwidth_nbytes_per_s: float | None = None
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    eager_nbytes: int | None = None
    loss_detection_s: Duration = Uniform(0.0, 0.02)

    def __post_init__(self) -> None:
        if self.ranks_per_host is not None:
            validation.count("ranks_per_host", self.ranks_per_host, besides=", or None")
        if self.host_bandwidth_nbytes_per_s is not None:
            check_number("host_bandwidth_nbytes_per_s", self.host_bandwidth_nbytes_per_s, above_zero=True)
            if self.ranks_per_host is None:
                raise ValueError(
                    f"host_bandwidth_nbytes_per_s is {self.host_bandwidth_nbytes_per_s!r}, and all ranks are on one "
                    "host: say ranks_per_host"
                )
        if self.eager_nbytes is not None:
            validation.count("eager_nbytes", self.eager_nbytes, least=0, besides=", or None")
        links: Any = self.links
        if not isinstance(links, Mapping):
            validation.refuse("links", links, "a dict from (source, dest) to a Link", TypeError)
        for pair in links:
            if not isinstance(pair, tuple) or [type(rank) for rank in pair] != [int, int]:
                validation.refuse("a key of links", pair, "(source, dest), two ranks")
        check_duration("loss_detection_s", self.loss_detection_s)
        for name, link in (("link", self.link), ("cross_link", self.cross_link), *self.links.items()):
            if not isinstance(link, Link):
                raise TypeError(f"Network: {name} is {link!r}; allowed: a Link")

    def check_ranks(self, size: int) -> None:
        """Refuse links of ranks that do not exist."""
        for pair in self.links:
            check_ranks(f"the link {pair}", pair, size)

    def between(self, source: int, dest: int) -> Link:
        """Return the link from ``source`` to ``dest``."""
        exception = self.links.get((source, dest))
        if exception is not None:
            return exception
        return self.link if self.host_of(source) == self.host_of(dest) else self.cross_link

    def host_of(self, rank: int) -> int:
        """Return the number of the host that ``rank`` is on, counted from 0."""
        return 0 if self.ranks_per_host is None else rank // self.ranks_per_host

    def local_rank_of(self, rank: int) -> int:
        """Return the number of ``rank`` among the ranks of its host, counted from 0."""
        return rank if self.ranks_per_host is None else rank % self.ranks_per_host


class Interfaces:
    """Shares the bandwidth of each host's network interface among all that its ranks send and receive.

    An interface sends and receives at the same time, each at its full rate. What leaves a host leaves in the order in
    which it was sent, and what comes to one is taken in the order in which it arrives: ten ranks that send to one host
    take ten times as long as one.

    Args:
        network: of the simulation.
        size: the number of ranks.
    """

    def __init__(self, network: Network, size: int) -> None:
        self.bandwidth = network.host_bandwidth_nbytes_per_s or math.inf
        self._host_of = [network.host_of(rank) for rank in range(size)]
        self._out_free_at = [0.0] * (self._host_of[-1] + 1)
        self._in_free_at = [0.0] * (self._host_of[-1] + 1)

    def leave(self, rank: int, ready_at: float, nbytes: int) -> float:
        """Return when the first of ``nbytes`` bytes leaves the host of ``rank``, which may leave at ``ready_at``."""
        host = self._host_of[rank]
        begins_at = max(ready_at, self._out_free_at[host])
        self._out_free_at[host] = begins_at + nbytes / self.bandwidth
        return begins_at

    def enter(self, rank: int, now: float, nbytes: int) -> float:
        """Return when the last of ``nbytes`` bytes is in, the first of which has come to the host of ``rank``."""
        host = self._host_of[rank]
        begins_at = max(now, self._in_free_at[host])
        done_at = max(begins_at + nbytes / self.bandwidth, math.nextafter(self._in_free_at[host], math.inf))
        self._in_free_at[host] = done_at
        return done_at
