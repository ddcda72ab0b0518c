"""Reads the counters of a rank, for tables and exporters. Any thread may read them while the rank computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import msgspec

from asyncdist.validation import printable

if TYPE_CHECKING:  # avoids importing torch, which asyncdist top does not need
    from asyncdist.messaging.services import Services

#: Maximum number of attempts to read. Rarely, an attempt fails because the rank opens a channel meanwhile.
_ATTEMPT_COUNT_MAX: Final = 100


@dataclass(frozen=True, slots=True)
class PolicyCounters:
    """Stores the counters of one policy on one rank.

    Attributes:
        policy: Name of the policy, or "". If several open policies have the same name, the second is called ``"name
            #2"``.
        role: This rank's role in the round: a state of ``protocols.selective.member``, in lower case, or "" before the
            first round and for policies without roles.
        round: Newest round in which this rank had a role, or None.
        abandoned_count: Number of abandoned rounds that should have replaced the weights.
        staleness_steps: Age, in steps, of the oldest snapshot in the last replacement, or None before the first
            replacement.
        coordinator: Rank of the current coordinator, or None while it is the initial coordinator.
        fragment: Index of the part of the model that the last average covers. For policies without contributions, this
            and all following attributes are None.
        staleness_versions: Age, in averages, of the weights from which the oldest contribution to the last average was
            computed; None if averages are not counted.
        wire_nbytes: Encoded size in bytes of all contributions of this rank.
        unencoded_nbytes: Size of the same contributions with ``wire="float32"``.
        outer_norm: L2 norm of the mean weight change in the last average.
        cosine: Mean cosine between the weight changes of two ranks in the last average.
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
    fragment: int | None = None
    staleness_versions: int | None = None
    wire_nbytes: int | None = None
    unencoded_nbytes: int | None = None
    outer_norm: float | None = None
    cosine: float | None = None
    waited_for_averages_s: float | None = None


@dataclass(frozen=True, slots=True)
class RankCounters:
    """Stores the counters of one rank since its world was opened.

    Attributes:
        job: Name of the job, eight hexadecimal digits.
        time_s: Time at which the counters were read, in seconds on the rank's clock.
        policies: Open policies, or the most recently closed policy if none is open.
        sent_count, received_count: Numbers of messages sent and received on channels.
        sent_nbytes: Number of bytes of tensors sent in streams, by policies and the program.
        received_nbytes: Number of bytes of tensors received, or read from other ranks' memory.
        waited_s: Seconds that ``main`` and its tasks have waited for other ranks since the counters were first read.
            Waits in progress are excluded.
        waiting_s: Seconds that ``main`` has been waiting for other ranks so far, or 0 if it is not waiting.
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
    waiting_s: float = 0.0
    lost: tuple[int, ...] = ()

    @property
    def first_policy(self) -> PolicyCounters | None:
        """The policy with the most steps, or None."""
        return max(self.policies, key=lambda each: each.step, default=None)

    @property
    def step(self) -> int:
        """Number of steps of the policy with the most steps."""
        policy = self.first_policy
        return 0 if policy is None else policy.step


def counters_of(services: Services) -> RankCounters:
    """Return the current counters of a rank. Any thread may call this function."""
    for _ in range(_ATTEMPT_COUNT_MAX - 1):
        try:
            return _counters_of(services)
        except RuntimeError:  # a dictionary grew while it was read
            continue
    return _counters_of(services)


def _counters_of(services: Services) -> RankCounters:
    last = services.last_progress
    policies = _with_unique_names(probe() for probe in tuple(services.progress_probes)) or (
        () if last is None else (last,)
    )
    of_channels = services.channel_totals()
    return RankCounters(
        rank=services.rank,
        size=services.size,
        incarnation=services.incarnation,
        job=services.job,
        time_s=services.events.now(),  # this read of the clock is not recorded
        policies=policies,
        sent_count=of_channels.sent_count,
        received_count=of_channels.received_count,
        sent_nbytes=services.slots.sent_nbytes,
        received_nbytes=services.slots.received_nbytes + services.read_nbytes,
        waited_s=services.waited_s,
        lost=tuple(sorted(services.lost_ranks() - services.engine.transport.vacant_ranks())),
    )


def _with_unique_names(policies: Iterable[PolicyCounters]) -> tuple[PolicyCounters, ...]:
    """Add numbers to duplicate policy names, because exporters and rates identify policies by name."""
    counts: Counter[str] = Counter()
    found = []
    for policy in policies:
        name = policy.policy
        counts[name] += 1
        found.append(policy if counts[name] == 1 else replace(policy, policy=f"{name} #{counts[name]}".lstrip()))
    return tuple(found)


def per_second(now: float, before: float, seconds: float) -> float | None:
    """Return the rate of a count, or None if no time has passed or the count has restarted."""
    return (now - before) / seconds if seconds > 0 and now >= before else None


def policy_step(counters: RankCounters, policy: str) -> int:
    """Return the number of steps of the policy with this name, or 0 if the rank does not have it."""
    return next((each.step for each in counters.policies if each.policy == policy), 0)


def steps_per_second(policy: PolicyCounters, before: RankCounters, seconds: float) -> float | None:
    """Return a policy's steps per second since ``before``, or None if they are unknown.

    A policy that has begun since then may have resumed at any step.
    """
    earlier = policy_step(before, policy.policy)
    return per_second(policy.step, earlier, seconds) if earlier or not policy.step else None


_decoder: Final = msgspec.msgpack.Decoder(RankCounters)


def from_bytes(data: bytes) -> RankCounters:
    """Decode counters. Raise ValueError if the bytes are not valid counters."""
    return _decoder.decode(data)


Kind: TypeAlias = Literal["counter", "gauge"]

#: Kind and meaning of each exported number, keyed by its name without prefix. The last word of a name may be a unit.
EXPORTED: Final[Mapping[str, tuple[Kind, str]]] = {
    "steps": ("counter", "Number of steps of the policy."),
    "steps_per_second": ("gauge", "Steps per second since the previous export; not in Prometheus."),
    "metric": ("gauge", "Last metric of the policy."),
    "round": ("gauge", "Newest round in which this rank had a role."),
    "role": ("gauge", "1 for the current role of this rank."),
    "replacements": ("counter", "Number of times that the policy has replaced the weights."),
    "abandoned_rounds": ("counter", "Abandoned rounds that should have replaced the weights."),
    "staleness_steps": ("gauge", "Age of the oldest snapshot in the last replacement."),
    "fragment": ("gauge", "Fragment of the last average."),
    "staleness_versions": ("gauge", "Averages since the base of the oldest contribution to the last average."),
    "outer_norm": ("gauge", "L2 norm of the last mean difference."),
    "cosine": ("gauge", "Mean cosine between the differences of two ranks in the last average."),
    "contributed_bytes": ("counter", "Encoded size of this rank's contributions to averages."),
    "contributed_unencoded_bytes": ("counter", "Size of the same contributions as float32."),
    "waited_for_averages_seconds": ("counter", "Seconds for which steps have waited for averages."),
    "sent_messages": ("counter", "Messages sent on channels."),
    "received_messages": ("counter", "Messages received from channels."),
    "sent_bytes": ("counter", "Bytes of tensors sent."),
    "received_bytes": ("counter", "Bytes of tensors received, or read from other ranks' memory."),
    "waited_seconds": ("counter", "Seconds for which tasks have waited for other ranks."),
    "lost_ranks": ("gauge", "Ranks that are lost."),
}


@dataclass(frozen=True, slots=True)
class Sample:
    """Describes one exported number: its key in :data:`EXPORTED`, its value and its labels."""

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


def samples(counters: RankCounters, before: RankCounters | None = None) -> Iterator[Sample]:
    """Yield the counters as individual numbers. Rates are included if ``before``, the earlier counters, is given."""
    for policy in counters.policies:
        labels = {"policy": printable(policy.policy)}
        yield Sample("steps", policy.step, labels)
        if before is not None:
            rate = steps_per_second(policy, before, counters.time_s - before.time_s)
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
        for name, value in (
            ("staleness_steps", policy.staleness_steps),
            ("fragment", policy.fragment),
            ("staleness_versions", policy.staleness_versions),
            ("outer_norm", policy.outer_norm),
            ("cosine", policy.cosine),
            ("contributed_bytes", policy.wire_nbytes),
            ("contributed_unencoded_bytes", policy.unencoded_nbytes),
            ("waited_for_averages_seconds", policy.waited_for_averages_s),
        ):
            if value is not None:
                yield Sample(name, value, labels)
    yield Sample("sent_messages", counters.sent_count)
    yield Sample("received_messages", counters.received_count)
    yield Sample("sent_bytes", counters.sent_nbytes)
    yield Sample("received_bytes", counters.received_nbytes)
    yield Sample("waited_seconds", counters.waited_s)
    yield Sample("lost_ranks", len(counters.lost))
