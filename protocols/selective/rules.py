"""Decides which ranks replace which in selective averaging: the options of the decision, and the decision itself.

Pure functions on plain values: no asyncio, transport, clock, torch or randomness, so thousands of tests run in
milliseconds. `protocols.selective.rounds` decides when to judge and carries each round to its end. `protocols.ranking`
defines the order of the ranks, with ties and NaN, and the number of replaced ranks.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from asyncdist import validation
from asyncdist.protocols.declared import number, one_of, option, or_none, whole
from asyncdist.protocols.ranking import (
    WEIGHT_EXPONENT_LIMIT,
    JudgingRules,
    is_worse,
    order_worst_first,
    replacer_count,
)

#: The route of the donors' snapshots to the replacers.
Route: TypeAlias = Literal["auto", "direct", "sharded"]
_ROUNDS: Final = "stragglers and rounds"
#: `"auto"` takes the sharded route if the busiest rank then moves at most half as many models, and this many bytes
#: less. Below that, the additional step of the sharded route costs more (8 ranks on 2 cores, 4 MiB: 55 ms, not 13).
_SHARDED_SAVING_NBYTES: Final = 64 << 20
_SHARDED_COUNT_MIN: Final = 4
#: It also takes the sharded route if all ranks together then have this many streams less.
_SHARDED_SAVING_STREAMS: Final = 128
#: Fixed cost of a stream for a rank, in bytes.
_STREAM_NBYTES: Final = 64 << 10
#: Bytes that a host must save in all before one of its replacers fetches parts for the others on the sharded route,
#: which takes a step longer.
SHARED_NBYTES_MIN: Final = 1 << 20
#: Largest number of models that a rank may send, or receive, if only the ranks of one host reduce.
_MODELS_MAX: Final = 2
_NO_GUESTS: Final[Mapping[int, float]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectiveRules(JudgingRules):
    """Holds the options of selective averaging that the decisions depend on.

    Raises:
        ValueError: An option has the wrong type or is out of range; the error has its name, value and allowed range.
    """

    threshold: float | None = option(
        "A round replaces ranks only if the worst metric is worse than this; None: every round does.",
        or_none(number("a finite number or None", -validation.LARGEST)),
        default=None,
    )
    cooldown: int = option(
        "With a `threshold`: number of iterations by which the largest reported iteration must grow before another "
        "round may replace ranks.",
        whole(0),
        default=200,
    )
    quorum: float = option(
        "Share of the live members, 0 to 1, that must have reported before `grace_s` begins.",
        validation.fraction,
        default=0.5,
        group=_ROUNDS,
    )
    grace_s: float | None = option(
        "Seconds that a decision then waits for the other members; None: as long as that delays no later round.",
        or_none(number(">= 0 seconds and finite, or None", 0.0)),
        default=None,
        group=_ROUNDS,
    )
    max_report_age_s: float = option(
        "Seconds after which a report no longer counts; may be infinite.",
        number("> 0 seconds", validation.SMALLEST, math.inf),
        default=600.0,
        group=_ROUNDS,
    )
    round_timeout_s: float = option(
        "Seconds for a round's exchange, in addition to the time until the safe points that it needs.",
        validation.seconds,
        default=30.0,
        group=_ROUNDS,
    )
    route: Route = option(
        'How snapshots are sent. `"direct"`: each donor sends its weights to each replacer. `"sharded"`: each donor '
        "(or replacer, if there are more) sums one part of the weights and sends its mean to the replacers. "
        '`"auto"`: `"sharded"` if it relieves the busiest rank or host enough, otherwise `"direct"`.',
        one_of(Route),
        default="auto",
        group=_ROUNDS,
    )
    #: Number of decisions between emigrants; 0 without islands.
    migrate_every: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """Describes the decision on one set of metrics.

    Attributes:
        donors: Ranks that give, ascending; empty for `reset_weights`.
        replacers: Ranks that take, ascending, at least one, none of them a donor.
        weights: Unnormalised positive weight of each donor.
        best: Donor with the best metric, whose integer and bool entries are taken; -1 without donors.
        guests: Donors from other islands.
    """

    donors: tuple[int, ...]
    replacers: tuple[int, ...]
    weights: tuple[float, ...]
    best: int
    guests: tuple[int, ...] = ()

    @property
    def waited_for(self) -> tuple[int, ...]:
        """Ranks whose steps the round waits for until the freeze; a guest is not waited for longer than the others."""
        own = tuple(rank for rank in self.donors if rank not in self.guests)
        return own or (self.replacers if self.donors else ())


def averaging_weights(
    metrics: Mapping[int, float], donors: Sequence[int], *, averaging_strategy: str, metric_mode: str = "max"
) -> tuple[float, ...]:
    """Return one unnormalised weight per donor; all are >= 0, with a positive finite sum.

    They are unnormalised because the receiver divides by their sum, and because weights of exactly 1 make the mean of
    1, 2 and 3 exactly 2. For `weighted_mean`, a donor's weight is its gain over the worst finite participant, including
    the replaced ones; if no donor gains anything, all weigh 1. Only the ratios matter, so weights that could overflow
    float32 (or float64, for metrics near its limits) are scaled by a power of two, which changes no ratio.

    Args:
        metrics: Metric of each participant, by rank.
        donors: Ranks with finite metrics.
        averaging_strategy: One of `STRATEGIES`; all but `weighted_mean` weigh equally.
        metric_mode: `"max"` or `"min"`.
    """
    even = (1.0,) * len(donors)
    if averaging_strategy != "weighted_mean":
        return even
    sign = 1.0 if metric_mode == "max" else -1.0
    worst = min(sign * value for value in metrics.values() if math.isfinite(value))
    gains = [sign * metrics[rank] - worst for rank in donors]
    if not all(map(math.isfinite, gains)):
        gains = [0.5 * sign * metrics[rank] - 0.5 * worst for rank in donors]
    largest = max(gains)
    if largest == 0.0:
        return even
    exponent = math.frexp(largest)[1]
    if abs(exponent) > WEIGHT_EXPONENT_LIMIT:
        gains = [math.ldexp(gain, -exponent) for gain in gains]
    return tuple(gains)


def decide(
    metrics: Mapping[int, float], rules: SelectiveRules, guests: Mapping[int, float] = _NO_GUESTS
) -> Decision | None:
    """Judge one set of metrics.

    Donors with weight 0 are left out, since their models would be sent for nothing; the best donor always has a weight.
    With `reset_weights` no rank gives, so a round acts even if no metric is finite: fresh weights cure that.

    Args:
        metrics: Metric of each participant, by rank.
        rules: The options. The coordinator applies the cooldown, which needs a memory.
        guests: Metric of each rank of another island. None of these is replaced; those that are better than all
            replaced ranks become additional donors.

    Returns:
        The decision; None if there is no rank to replace, no rank to give, or the threshold is not crossed.
    """
    count = replacer_count(len(metrics), rules.replacement_ratio)
    if count == 0:
        return None
    order = order_worst_first(metrics, rules.metric_mode)
    if rules.threshold is not None and not is_worse(metrics[order[0]], rules.threshold, rules.metric_mode):
        return None
    replacers = tuple(sorted(order[:count]))
    if rules.averaging_strategy == "reset_weights":
        return Decision(donors=(), replacers=replacers, weights=(), best=-1)
    candidates = [rank for rank in order[count:] if math.isfinite(metrics[rank])]
    if guests:
        candidates, metrics = _with_guests(candidates, metrics, guests, order[count - 1], rules.metric_mode)
    if not candidates:
        return None
    best = candidates[-1]
    if rules.averaging_strategy == "best_only":
        candidates = [best]
    candidates.sort()
    weights = averaging_weights(
        metrics, candidates, averaging_strategy=rules.averaging_strategy, metric_mode=rules.metric_mode
    )
    chosen = {rank: weight for rank, weight in zip(candidates, weights, strict=True) if weight > 0.0}
    assert best in chosen, f"the best donor {best} got no weight: {metrics}, {rules}"
    from_elsewhere = tuple(rank for rank in chosen if rank in guests)
    return Decision(tuple(chosen), replacers, tuple(chosen.values()), best, from_elsewhere)


def _with_guests(
    candidates: Sequence[int], metrics: Mapping[int, float], guests: Mapping[int, float], bar: int, metric_mode: str
) -> tuple[list[int], Mapping[int, float]]:
    """Return the donors, worst first, with the guests that are better than `bar`, the best replaced rank."""
    all_metrics = {**metrics, **guests}
    order = order_worst_first({rank: all_metrics[rank] for rank in (bar, *candidates, *guests)}, metric_mode)
    better = [rank for rank in order[order.index(bar) + 1 :] if math.isfinite(all_metrics[rank])]
    return better, {**metrics, **{rank: guests[rank] for rank in better if rank in guests}}


def reducers_of(
    decision: Decision, route: str, model_nbytes: int, turn: int = 0, hosts: Mapping[int, int] | None = None
) -> tuple[int, ...]:
    """Return the ranks that each add up one part of the donors' snapshots; empty for the direct route.

    On the direct route, each of D donors sends its model to each of R replacers, and the busiest rank moves as many
    models as there are donors or replacers. On the sharded route, a donor sends a part to each reducer, and the reducer
    sends the mean of that part to each replacer: D + R - 1 models in all. The larger group of donors and replacers
    reduces, so that the busiest rank moves 1 + (min(D, R) - 1) / max(D, R) models, which is less than two. Both groups
    together would move more if few ranks are replaced, since a replacer receives a whole mean already. Guests only
    give. If the hosts are known, only the ranks of one host reduce if that relieves the busiest host's network and no
    rank moves more than two models.

    Parts that take less time than a stream's own messages save nothing, so `"auto"` uses fewer reducers for a small
    model, which take turns; a single reducer needs D + R streams instead of D x R.

    Args:
        decision: The donors and replacers.
        route: One of `Route`. `"auto"` takes the sharded route if that saves many bytes on the busiest rank or on the
            busiest host's network, or many streams in all.
        model_nbytes: Size of a snapshot in bytes.
        turn: Number of the round.
        hosts: Number of each rank's host; None or empty if a host is unknown.
    """
    donors, replacers = decision.donors, decision.replacers
    own = tuple(rank for rank in donors if rank not in decision.guests)
    candidates = own if len(own) >= len(replacers) else replacers
    if not donors or len(candidates) == 1 or route == "direct":
        return ()
    moved_count, are_apart = len(candidates), hosts is not None and len(set(hosts.values())) > 1
    if hosts and are_apart:
        candidates = _least_load(candidates, decision, model_nbytes, hosts)
    if route == "sharded":
        return candidates
    count = min(len(candidates), max(1, model_nbytes // _STREAM_NBYTES))
    saved_count = moved_count - 1 - len(candidates) / count if moved_count >= _SHARDED_COUNT_MIN else 0.0
    if hosts and are_apart:
        sharded_load = _sharded_network_load(candidates, decision, model_nbytes, hosts)
        saved_count = max(saved_count, _network_load(decision, hosts) - sharded_load)
    saved_streams = len(donors) * len(replacers) - count * (len(donors) + len(replacers))
    if saved_count * model_nbytes < _SHARDED_SAVING_NBYTES and saved_streams < _SHARDED_SAVING_STREAMS:
        return ()
    first = turn * count % len(candidates)
    return tuple(sorted((candidates + candidates)[first : first + count]))


def sources_of(
    decision: Decision, reducers: tuple[int, ...], model_nbytes: int, hosts: Mapping[int, int]
) -> dict[int, tuple[int, ...]]:
    """Return, for each replacer, the rank that it takes the mean of each part from.

    Replacers that take all parts from the reducers have no entry. Replacers on one host share the parts from other
    hosts: each part crosses the network once for each host, instead of once for each replacer. They take turns in
    fetching, so that each has about the same amount to fetch and to give.

    Args:
        decision: The donors and replacers.
        reducers: Ranks that each make a part; empty on the direct route.
        model_nbytes: Size of a snapshot in bytes.
        hosts: Number of each rank's host; empty if a host is unknown.
    """
    if not reducers or not hosts:
        return {}
    by_host: dict[int, list[int]] = {}
    for rank in decision.replacers:
        by_host.setdefault(hosts[rank], []).append(rank)
    found: dict[int, tuple[int, ...]] = {}
    for host, ranks in by_host.items():
        distant = [reducer for reducer in reducers if hosts[reducer] != host]
        spared_nbytes = (len(ranks) - 1) * model_nbytes * len(distant) // len(reducers)
        if len(ranks) > 1 and distant and spared_nbytes >= SHARED_NBYTES_MIN:
            fetchers = {reducer: ranks[place % len(ranks)] for place, reducer in enumerate(distant)}
            found |= dict.fromkeys(ranks, tuple(fetchers.get(reducer, reducer) for reducer in reducers))
    return found


def _network_load(decision: Decision, hosts: Mapping[int, int]) -> float:
    """Return the number of models in the busier direction of the busiest host's network on the direct route."""
    donors, replacers = (Counter(hosts[rank] for rank in ranks) for ranks in (decision.donors, decision.replacers))
    return max(
        max(replacers[host] * (donors.total() - donors[host]), donors[host] * (replacers.total() - replacers[host]))
        for host in set(hosts.values())
    )


def _sharded_network_load(
    reducers: tuple[int, ...], decision: Decision, model_nbytes: int, hosts: Mapping[int, int]
) -> float:
    """Return the same number for the sharded route: the donors' parts and the means travel at the same time."""
    are_shared = bool(sources_of(decision, reducers, model_nbytes, hosts))
    replacers_ = {hosts[rank]: rank for rank in decision.replacers}.values() if are_shared else decision.replacers
    groups = decision.donors, replacers_, reducers
    donors, replacers, of = (Counter(hosts[rank] for rank in ranks) for ranks in groups)
    load = 0.0
    for host in set(hosts.values()):
        share = of[host] / len(reducers)
        sent = (1 - share) * donors[host] + share * (replacers.total() - replacers[host])
        received = share * (donors.total() - donors[host]) + (1 - share) * replacers[host]
        load = max(load, sent, received)
    return load


def _least_load(
    candidates: tuple[int, ...], decision: Decision, model_nbytes: int, hosts: Mapping[int, int]
) -> tuple[int, ...]:
    """Return the candidates that load the busiest host's network least: all of them, or those of one host."""
    by_host: dict[int, list[int]] = {}
    for rank in candidates:
        by_host.setdefault(hosts[rank], []).append(rank)
    like, unlike = len(decision.donors), len(decision.replacers)
    if candidates[0] in decision.replacers:
        like, unlike = unlike, like
    choices = [
        tuple(ranks)
        for ranks in by_host.values()  # a rank's load from the other candidates, and from the ranks that it serves
        if len(ranks) > 1 and max(like - 1, len(ranks) - 1 + unlike) <= _MODELS_MAX * len(ranks)
    ]
    return min([candidates, *choices], key=lambda ranks: _sharded_network_load(ranks, decision, model_nbytes, hosts))
