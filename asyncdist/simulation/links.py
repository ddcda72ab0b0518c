"""Describes a simulated network: the latency and the bandwidth of every link.

Times are virtual seconds. A duration is a constant number, or a distribution (:class:`Uniform`, :class:`Exponential`,
:class:`LogNormal`) that is sampled with the simulation's seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from asyncdist import validation
from asyncdist.simulation.distributions import (
    Duration,
    LogNormal,
    Uniform,
    check_duration,
    check_number,
    sampler,
    store,
)

_PACKET_NBYTES: Final = 1500  # Ethernet's largest payload


def check_ranks(what: str, ranks: Sequence[int], size: int) -> None:
    """Raise ValueError if a rank in ``ranks`` is not between 0 and ``size`` - 1."""
    for rank in ranks:
        if type(rank) is not int or not 0 <= rank < size:
            raise ValueError(f"{what} must name ranks from 0 to {size - 1}, got rank {rank!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Describes the connection from one rank to another, in one direction.

    Attributes:
        latency_s: Seconds from the send to the arrival of the first byte.
        bandwidth_nbytes_per_s: Bytes per second. A message waits until the link has sent all earlier messages.
    """

    latency_s: Duration = LogNormal(2e-6, 1.0)
    bandwidth_nbytes_per_s: float = 10e9

    def __post_init__(self) -> None:
        store(self, "latency_s", check_duration("latency_s", self.latency_s))
        bandwidth = check_number("bandwidth_nbytes_per_s", self.bandwidth_nbytes_per_s, above_zero=True)
        store(self, "bandwidth_nbytes_per_s", bandwidth)

    def latency_sampler(self, rng: random.Random) -> Callable[[], float]:
        """Return a function that samples the latency of one message, in seconds."""
        return sampler(self.latency_s, rng)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Describes all links of a simulated job, and the behaviour of its transport.

    Attributes:
        link: Link between ranks on one host.
        cross_link: Link between ranks on different hosts.
        ranks_per_host: Number of consecutive ranks that share a host. By default, all ranks share one host.
        host_bandwidth_nbytes_per_s: Bandwidth of a host's network interface, per direction, shared by all traffic
            between its ranks and other hosts. By default only the links limit the bandwidth, so a rank receives from
            many ranks as fast as from one.
        links: Links that differ from ``link`` and ``cross_link``, keyed by (source, dest).
        eager_nbytes: Maximum size in bytes of a send that completes immediately. A larger send waits for a matching
            receive, for an idle receiver (in half of the simulations also for an idle sender), and for the transfer. If
            None, each simulation chooses 256 bytes, 4 KiB or 64 KiB.
        loss_detection_s: Seconds from a rank's death until its peers detect it.
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
            validation.count("ranks_per_host", self.ranks_per_host, besides=" or None")
        if self.host_bandwidth_nbytes_per_s is not None:
            bandwidth = check_number("host_bandwidth_nbytes_per_s", self.host_bandwidth_nbytes_per_s, above_zero=True)
            store(self, "host_bandwidth_nbytes_per_s", bandwidth)
            if self.ranks_per_host is None:
                raise ValueError(
                    "ranks_per_host must be set with "
                    f"host_bandwidth_nbytes_per_s={self.host_bandwidth_nbytes_per_s!r}, because otherwise all ranks "
                    "are on one host"
                )
        if self.eager_nbytes is not None:
            validation.count("eager_nbytes", self.eager_nbytes, least=0, besides=" or None")
        links: Any = self.links
        if not isinstance(links, Mapping):
            validation.refuse("links", links, "a dict that maps (source, dest) to a Link", TypeError)
        for pair in links:
            if not isinstance(pair, tuple) or [type(rank) for rank in pair] != [int, int]:
                validation.refuse("a key of links", pair, "a pair of ranks (source, dest)")
        store(self, "loss_detection_s", check_duration("loss_detection_s", self.loss_detection_s))
        for name, link in (("link", self.link), ("cross_link", self.cross_link), *self.links.items()):
            if not isinstance(link, Link):
                raise TypeError(f"Network: {name} must be a Link, got {link!r}")

    def check_ranks(self, size: int) -> None:
        """Raise ValueError if ``links`` names a rank that does not exist."""
        for pair in self.links:
            check_ranks(f"the link {pair}", pair, size)

    def between(self, source: int, dest: int) -> Link:
        """Return the link from ``source`` to ``dest``."""
        exception = self.links.get((source, dest))
        if exception is not None:
            return exception
        return self.link if self.host_of(source) == self.host_of(dest) else self.cross_link

    def host_of(self, rank: int) -> int:
        """Return the index of the host of ``rank``, counted from 0."""
        return 0 if self.ranks_per_host is None else rank // self.ranks_per_host

    def local_rank_of(self, rank: int) -> int:
        """Return the index of ``rank`` among the ranks of its host, counted from 0."""
        return rank if self.ranks_per_host is None else rank % self.ranks_per_host


class Interfaces:
    """Shares the bandwidth of each host's network interface among the messages of the host's ranks.

    Messages leave a host in the order of their sends, and enter a host in the order of their arrival. Sending does not
    slow down receiving. A message of at most one packet waits only for messages of this size, because kernels serve
    sparse flows first (fair queueing: Hoeiland-Joergensen et al., RFC 8290).
    """

    def __init__(self, network: Network, size: int) -> None:
        self.bandwidth = network.host_bandwidth_nbytes_per_s or math.inf
        self._host_of = [network.host_of(rank) for rank in range(size)]
        count = self._host_of[-1] + 1
        self._out, self._in = [_Interface() for _ in range(count)], [_Interface() for _ in range(count)]

    def leave(self, rank: int, ready_at: float, nbytes: int) -> float:
        """Return the time, ``ready_at`` or later, when the first of ``nbytes`` bytes leaves the host of ``rank``."""
        return self._out[self._host_of[rank]].carry(ready_at, nbytes, self.bandwidth)[0]

    def enter(self, rank: int, now: float, nbytes: int) -> float:
        """Return the time at which all of ``nbytes`` bytes, arriving from ``now`` on, are in the host of ``rank``."""
        return self._in[self._host_of[rank]].carry(now, nbytes, self.bandwidth)[1]


@dataclass(slots=True)
class _Interface:
    """Stores the times from which one direction of a host's interface is free for large and for small messages."""

    free_at: float = 0.0
    free_of_small_at: float = 0.0

    def carry(self, ready_at: float, nbytes: int, bandwidth: float) -> tuple[float, float]:
        """Return the times at which the first and the last byte of a message pass through the interface."""
        is_small, transfer_s = nbytes <= _PACKET_NBYTES, nbytes / bandwidth
        begins_at = max(ready_at, self.free_of_small_at if is_small else self.free_at)
        if is_small:
            self.free_of_small_at = _after(begins_at + transfer_s, self.free_of_small_at)
            self.free_at = max(self.free_at, ready_at) + transfer_s
            return begins_at, self.free_of_small_at
        self.free_at = _after(begins_at + transfer_s, self.free_at)
        return begins_at, self.free_at


def _after(done_at: float, last: float) -> float:
    """Return ``done_at``, or the next float after ``last`` if ``done_at`` is not later."""
    return max(done_at, math.nextafter(last, math.inf))
