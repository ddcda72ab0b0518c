"""Reads what a rank has done so far as plain numbers, which tables and exporters show.

It only reads, so that another thread than the rank's may ask while the rank computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import msgspec

from asyncdist.validation import printable

if TYPE_CHECKING:  # which imports torch, and asyncdist top needs none
    from asyncdist.messaging.services import Services

#: How often it is read anew where the rank opens a channel meanwhile, which is rare.
_ATTEMPT_COUNT_MAX: Final = 100


@dataclass(frozen=True, slots=True)
class PolicyCounters:
    """Says what a policy has done so far on one rank.

    Attributes:
        policy: its name, if it has one; of several open ones of one name the second is ``"name #2"``.
        step: how many steps it has done.
        metric: the last number that it was given; None before.
        role: what this rank does in the round: a state of ``protocols.selective.member``, in small letters; empty
            before the first round, and where a policy has no roles.
        round: the newest round in which this rank had a role; None before the first.
        replacement_count: how often it has changed the weights.
        abandoned_count: how often it was to change them, and the round came to nothing.
        staleness_steps: the age of the oldest snapshot in the last of these changes, in steps; None before.
        coordinator: the rank that coordinates, where another one than the first does.
        latest: the last of the changes, in words.
    """

    policy: str
    step: int
    metric: float | None
    role: str = ""
    round: int | None = None
    replacement_count: int = 0
    abandoned_count: int = 0
    staleness_steps: int | None = None
    coordinator: int | None = None
    latest: str = ""


@dataclass(frozen=True, slots=True)
class RankCounters:
    """Says what one rank has done since its world was opened.

    Attributes:
        rank, size, incarnation: of the world.
        job: eight hexadecimal digits, the same on all ranks of a job.
        time_s: when this was read, in seconds on the rank's clock.
        policies: those that are open, or else the one that was closed last.
        sent_count, received_count: messages on channels.
        sent_nbytes: bytes of tensors that were sent: streams of policies and of the program.
        received_nbytes: bytes of tensors that have come, or that were read in the memory of other ranks.
        waited_s: seconds that main and the tasks that it has spawned have waited for other ranks, all together, in
            waits that are over, since somebody asked for the first time.
        lost: ranks that are lost.
    """

    rank: int
    size: int
    incarnation: int
    job: str
    time_s: float
    policies: tuple[PolicyCounters, ...] = ()
    sent_count: int = 0
    received_count: int = 0
    sent_nbytes: int = 0
    received_nbytes: int = 0
    waited_s: float = 0.0
    lost: tuple[int, ...] = ()

    @property
    def step(self) -> int:
        """Steps of the policy that has done most."""
        return max((each.step for each in self.policies), default=0)


def counters_of(services: Services) -> RankCounters:
    """Return the counters of a rank, as of now; any thread may ask."""
    for _ in range(_ATTEMPT_COUNT_MAX - 1):
        try:
            return _counters_of(services)
        except RuntimeError:  # a dictionary has grown while it was read
            continue
    return _counters_of(services)


def _counters_of(services: Services) -> RankCounters:
    last = services.last_progress
    policies = _told_apart(probe() for probe in tuple(services.progress_probes)) or (() if last is None else (last,))
    of_channels = services.channel_statistics()
    return RankCounters(
        rank=services.rank,
        size=services.size,
        incarnation=services.incarnation,
        job=f"{services.nonce & 0xFFFFFFFF:08x}",
        time_s=services.events.now(),  # which no recording notes
        policies=policies,
        sent_count=of_channels.sent_count,
        received_count=of_channels.received_count,
        sent_nbytes=services.slots.sent_nbytes,
        received_nbytes=services.slots.received_nbytes + services.read_nbytes,
        waited_s=services.waited_s,
        lost=tuple(sorted(services.lost_ranks() - services.engine.transport.vacant_ranks())),
    )


def _told_apart(policies: Iterable[PolicyCounters]) -> tuple[PolicyCounters, ...]:
    """Number those that have one name, or none: what is exported, and rates, go by the name."""
    counts: Counter[str] = Counter()
    found = []
    for policy in policies:
        name = policy.policy
        counts[name] += 1
        found.append(policy if counts[name] == 1 else replace(policy, policy=f"{name} #{counts[name]}".lstrip()))
    return tuple(found)


def per_second(now: float, before: float, seconds: float) -> float | None:
    """Return how fast a count grows; None where that is not known: no time has passed, or it was started anew."""
    return (now - before) / seconds if seconds > 0 and now >= before else None


def to_bytes(counters: RankCounters) -> bytes:
    """Return the counters as MessagePack, which has NaN, as JSON has not."""
    return msgspec.msgpack.encode(counters)


_decoder: Final = msgspec.msgpack.Decoder(RankCounters)


def from_bytes(data: bytes) -> RankCounters:
    """Return the counters that are in these bytes. Raises ValueError where they are none."""
    return _decoder.decode(data)


# -- for exporters ----------------------------------------------------------------------------------------------------

Kind: TypeAlias = Literal["counter", "gauge"]

#: What is exported: names without their prefix, with the kind and what each means. Units are the last word of a name.
EXPORTED: Final[Mapping[str, tuple[Kind, str]]] = {
    "steps": ("counter", "Steps that the policy has done."),
    "steps_per_second": ("gauge", "Steps per second, since it was written before; only where it is written."),
    "metric": ("gauge", "The last metric that the policy was given."),
    "round": ("gauge", "The newest round in which this rank had a role."),
    "role": ("gauge", "1 for the role that this rank has."),
    "replacements": ("counter", "How often the policy has changed the weights."),
    "abandoned_rounds": ("counter", "Rounds that were to change the weights, and came to nothing."),
    "staleness_steps": ("gauge", "Age of the oldest snapshot in the last change of the weights."),
    "sent_messages": ("counter", "Messages sent on channels."),
    "received_messages": ("counter", "Messages received from channels."),
    "sent_bytes": ("counter", "Bytes of tensors sent."),
    "received_bytes": ("counter", "Bytes of tensors received, or read in other ranks' memory."),
    "waited_seconds": ("counter", "Seconds that tasks have waited for other ranks."),
    "lost_ranks": ("gauge", "Ranks that are lost."),
}


@dataclass(frozen=True, slots=True)
class Sample:
    """One number of :data:`EXPORTED`.

    Attributes:
        name: the key there.
        value: the number.
        labels: what tells it from others of that name on this rank.
    """

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


def samples(counters: RankCounters, before: RankCounters | None = None) -> Iterator[Sample]:
    """Return the counters as single numbers.

    Args:
        counters: those of a rank.
        before: the same, earlier, for rates; None for none.
    """
    for policy in counters.policies:
        labels = {"policy": printable(policy.policy)}
        yield Sample("steps", policy.step, labels)
        if before is not None:
            earlier = next((each.step for each in before.policies if each.policy == policy.policy), 0)
            rate = per_second(policy.step, earlier, counters.time_s - before.time_s)
            if rate is not None:
                yield Sample("steps_per_second", rate, labels)
        if policy.metric is not None:
            yield Sample("metric", policy.metric, labels)
        if policy.round is not None:
            yield Sample("round", policy.round, labels)
        if policy.role:
            yield Sample("role", 1, {**labels, "role": policy.role})
        yield Sample("replacements", policy.replacement_count, labels)
        yield Sample("abandoned_rounds", policy.abandoned_count, labels)
        if policy.staleness_steps is not None:
            yield Sample("staleness_steps", policy.staleness_steps, labels)
    yield Sample("sent_messages", counters.sent_count)
    yield Sample("received_messages", counters.received_count)
    yield Sample("sent_bytes", counters.sent_nbytes)
    yield Sample("received_bytes", counters.received_nbytes)
    yield Sample("waited_seconds", counters.waited_s)
    yield Sample("lost_ranks", len(counters.lost))
