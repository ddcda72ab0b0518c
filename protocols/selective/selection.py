"""Decides which ranks are donors and replacers in selective averaging, and on which route the snapshots are sent.

The functions are pure. `protocols.selective.rounds` decides when to judge the members. `protocols.ranking` defines the
order of the ranks and the number of replaced ranks.

Sub-populations that change at different intervals (MF-PBT) follow the rules of Doulazmi et al. (2506.03225). In a
decision in which a sub-population evolves:

- The ranks of its worst quantile copy the ranks of its best quantile, both in the order of the metric.
- Its second-worst quantile is compared with all ranks of the other sub-populations. In turn, each rank of that quantile
  copies the best of those ranks that is not copied yet, a *migrant*, if the migrant is better.

A rank has at most one role in a round. Unlike in the paper, a replaced rank is therefore not copied, and a copied rank
is not replaced.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from asyncdist import validation
from asyncdist.protocols.declared import integer, number, one_of, option, or_none
from asyncdist.protocols.ranking import (
    WEIGHT_EXPONENT_LIMIT,
    JudgingRules,
    is_worse,
    order_worst_first,
    replacer_count,
)


def parents_of(
    metrics: Mapping[int, float],
    sub_populations: Sequence[Sequence[int]],
    periods: Sequence[int],
    numbers: range,
    *,
    quantile: float,
    metric_mode: str,
) -> dict[int, int]:
    """Map each replaced rank to the rank that it copies.

    Args:
        periods: Number of rounds after which each sub-population evolves.
        numbers: Numbers of the rounds since the previous decision, one for each report of the fastest rank. A
            sub-population evolves if one of them is a multiple of its period.
        quantile: Fraction of a sub-population's participants that copies its best ranks, and fraction that may copy
            migrants. At most 0.5.
    """
    best_first = list(reversed(order_worst_first(metrics, metric_mode)))
    before, last = numbers.start - 1, numbers.stop - 1
    evolving = [place for place, period in enumerate(periods) if last // period > before // period]
    ranked = {place: [rank for rank in best_first if rank in set(sub_populations[place])] for place in evolving}
    shares = {place: min(replacer_count(len(ranks), quantile), len(ranks) // 2) for place, ranks in ranked.items()}
    parents: dict[int, int] = {}
    for place, ranks in ranked.items():
        share = shares[place]
        pairs = zip(ranks[len(ranks) - share :], ranks[:share], strict=True)
        parents |= {rank: donor for rank, donor in pairs if math.isfinite(metrics[donor])}
    for place, ranks in ranked.items():
        share, own = shares[place], set(sub_populations[place])
        migrants = [rank for rank in best_first if rank not in own and rank not in parents]
        migrants = [rank for rank in migrants if math.isfinite(metrics[rank])]
        for rank in ranks[max(share, len(ranks) - 2 * share) : len(ranks) - share]:
            if migrants and rank not in parents.values() and is_worse(metrics[rank], metrics[migrants[0]], metric_mode):
                parents[rank] = migrants.pop(0)
    return parents


#: Route on which the donors' snapshots are sent to the replacers. `reducers_of` explains the routes.
Route: TypeAlias = Literal["auto", "direct", "sharded"]
_ROUNDS: Final = "stragglers and rounds"
#: `"auto"` chooses the sharded route, which takes an additional step, if the busiest rank saves at least this many
#: bytes.
_SHARDED_SAVING_NBYTES: Final = 64 << 20
_SHARDED_COUNT_MIN: Final = 4
#: `"auto"` also chooses the sharded route if this reduces the total number of streams by at least this number.
_SHARDED_SAVING_STREAMS: Final = 128
#: Fixed cost of one stream, expressed as a number of bytes.
_STREAM_NBYTES: Final = 64 << 10
#: Replacers on a host share parts, which takes an additional step, if the host saves at least this many bytes.
SHARED_NBYTES_MIN: Final = 1 << 20
#: Maximum number of models that a rank may send or receive if all reducers are on one host.
_MODELS_MAX: Final = 2
_NO_GUESTS: Final[Mapping[int, float]] = {}
_NO_NUMBERS: Final = range(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectiveRules(JudgingRules):
    """Options of selective averaging that determine the coordinator's decisions.

    Raises:
        ValueError: An option has the wrong type or is out of range.
    """

    threshold: float | None = option(
        "Ranks are replaced only if the worst metric is worse than this. None: always.",
        or_none(number("a finite number or None", -validation.LARGEST)),
        default=None,
    )
    cooldown: int = option(
        "Number of iterations by which the largest reported iteration must grow before another round may replace "
        "ranks; applies only with a `threshold`.",
        integer(0),
        default=200,
    )
    quorum: float = option(
        "Share of the live members, 0 to 1, that must have reported before `grace_s` begins.",
        validation.fraction,
        default=0.5,
        group=_ROUNDS,
    )
    grace_s: float | None = option(
        "Seconds to wait for the other members after the quorum is met. None: until a later round would be delayed.",
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
        "Seconds for a round's exchange, in addition to the time until its ranks reach the safe points that it needs.",
        validation.seconds,
        default=30.0,
        group=_ROUNDS,
    )
    route: Route = option(
        'How weights are sent. `"direct"`: each donor sends its weights to each replacer. `"sharded"`: each donor (or '
        "each replacer, if there are more of them) adds up one part of the weights and sends the part's mean to the "
        'replacers. `"auto"`: `"sharded"` if it reduces the load of the busiest rank or host enough, otherwise '
        '`"direct"`.',
        one_of(Route),
        default="auto",
        group=_ROUNDS,
    )
    #: Number of decisions after which an island sends its next emigrant (a donor for another island), or 0 without
    #: islands.
    migrate_every: int = 0
    #: Whether there are as many donors as replacers, and each replacer copies one donor instead of taking a common
    #: average. If so, `averaging_strategy` is "best_only", and at most half of the participants are replaced.
    copies_one: bool = False
    #: Number of rounds after which each sub-population evolves, and the ranks of each. Empty without sub-populations.
    periods: tuple[int, ...] = ()
    sub_populations: tuple[tuple[int, ...], ...] = ()
    #: Number of iterations that count as one round of `periods`.
    round_iterations: int = 1
    #: Number of iterations between two reports of a member.
    average_every: int = 1


@dataclass(frozen=True, slots=True)
class Decision:
    """The ranks to average (donors) and the ranks that adopt the average (replacers), chosen from one set of metrics.

    Attributes:
        donors: Ranks whose weights are averaged, in ascending order. Empty for `reset_weights`.
        replacers: One or more ranks that receive new weights, in ascending order. None of them is a donor.
        weights: Unnormalised positive weight of each donor.
        best: Donor with the best metric, whose integer and bool entries are copied, or -1 without donors.
        guests: Donors from other islands.
        parents: Donor that each replacer copies, in the order of the replacers. Empty if all replacers take a common
            average.
    """

    donors: tuple[int, ...]
    replacers: tuple[int, ...]
    weights: tuple[float, ...]
    best: int
    guests: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    @property
    def waited_for(self) -> tuple[int, ...]:
        """Ranks whose steps delay the round: this island's donors or, if there are none, the replacers."""
        own = tuple(rank for rank in self.donors if rank not in self.guests)
        return own or (self.replacers if self.donors else ())


def averaging_weights(
    metrics: Mapping[int, float], donors: Sequence[int], *, averaging_strategy: str, metric_mode: str = "max"
) -> tuple[float, ...]:
    """Return one unnormalised weight per donor. All are >= 0, with a positive finite sum.

    Ranks that compute the average divide by their sum. With `weighted_mean`, a donor's weight is the difference between
    its metric and the worst finite metric of all participants, including the replaced ranks. If all differences are 0,
    each weight is 1. Weights that could overflow float32 are scaled by a power of two, which keeps their ratios.

    Args:
        averaging_strategy: One of `STRATEGIES`. All strategies except `weighted_mean` give all donors the same weight.
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
    metrics: Mapping[int, float],
    rules: SelectiveRules,
    guests: Mapping[int, float] = _NO_GUESTS,
    *,
    numbers: range = _NO_NUMBERS,
) -> Decision | None:
    """Choose the ranks to average and the ranks that adopt the average, or return None if there are none.

    Donors with weight 0 are omitted. The best donor's weight is never 0. With `reset_weights`, ranks are replaced even
    if no metric is finite, because no donor is needed.

    Args:
        rules: Options of the policy. The caller must apply the cooldown.
        guests: Metric of each available rank of another island. These ranks are never replaced. A guest that is better
            than all replaced ranks becomes an additional donor.
        numbers: Numbers of the rounds since the previous decision, if there are sub-populations.
    """
    if rules.periods:
        return _decide_in_sub_populations(metrics, rules, numbers)
    count = replacer_count(len(metrics), rules.replacement_ratio)
    if rules.copies_one:
        count = min(count, len(metrics) // 2)
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
    if rules.copies_one:
        candidates = candidates[-count:]
    elif rules.averaging_strategy == "best_only":
        candidates = [best]
    candidates.sort()
    weights = averaging_weights(
        metrics, candidates, averaging_strategy=rules.averaging_strategy, metric_mode=rules.metric_mode
    )
    chosen = {rank: weight for rank, weight in zip(candidates, weights, strict=True) if weight > 0.0}
    assert best in chosen, f"the best donor {best} got no weight: {metrics}, {rules}"
    from_elsewhere = tuple(rank for rank in chosen if rank in guests)
    return Decision(tuple(chosen), replacers, tuple(chosen.values()), best, from_elsewhere)


def _decide_in_sub_populations(metrics: Mapping[int, float], rules: SelectiveRules, numbers: range) -> Decision | None:
    """Return the donors and replacers of the sub-populations that evolve now, or None if none evolves."""
    parents = parents_of(
        metrics,
        rules.sub_populations,
        rules.periods,
        numbers,
        quantile=rules.replacement_ratio,
        metric_mode=rules.metric_mode,
    )
    if not parents:
        return None
    donors, replacers = tuple(sorted(set(parents.values()))), tuple(sorted(parents))
    best = order_worst_first({rank: metrics[rank] for rank in donors}, rules.metric_mode)[-1]
    copied = tuple(parents[rank] for rank in replacers)
    return Decision(donors, replacers, (1.0,) * len(donors), best, parents=copied)


def _with_guests(
    candidates: Sequence[int], metrics: Mapping[int, float], guests: Mapping[int, float], bar: int, metric_mode: str
) -> tuple[list[int], Mapping[int, float]]:
    """Return the ranks, of this and other islands, that are better than rank `bar`, and the metrics.

    The ranks are sorted from worst to best. The metrics include those of all members. `bar` is the best of the replaced
    ranks.
    """
    all_metrics = {**metrics, **guests}
    order = order_worst_first({rank: all_metrics[rank] for rank in (bar, *candidates, *guests)}, metric_mode)
    better = [rank for rank in order[order.index(bar) + 1 :] if math.isfinite(all_metrics[rank])]
    return better, {**metrics, **{rank: guests[rank] for rank in better if rank in guests}}


def reducers_of(
    decision: Decision, route: str, model_nbytes: int, turn: int = 0, hosts: Mapping[int, int] | None = None
) -> tuple[int, ...]:
    """Return the reducers: the ranks that each add up one part of the donors' snapshots. Empty for the direct route.

    On the direct route, each of D donors sends its model to each of R replacers, so the busiest rank transfers max(D,
    R) models. On the sharded route, a donor sends one part to each reducer, and each reducer sends the mean of its part
    to each replacer: D + R - 1 models in total. The larger of the two groups adds up the parts. The busiest rank then
    transfers 1 + (min(D, R) - 1) / max(D, R) models, less than two. Donors from other islands are never reducers. If
    the hosts are known, all reducers may be on one host. This is done if it lowers the load of the busiest host's
    network, and no rank then transfers more than two models.

    For a small model, `"auto"` uses fewer reducers, which alternate from round to round, because very small parts cost
    more messages than they save. A single reducer needs D + R streams instead of D x R.

    Args:
        route: One of `Route`. `"auto"` chooses the sharded route if it saves many bytes on the busiest rank or on the
            busiest host's network, or many streams in total.
        hosts: Number of each rank's host. None or empty if a host is unknown.
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
    """Return, for each replacer, the rank from which it requests the mean of each part.

    A replacer that requests all parts from the reducers has no entry. Several replacers on one host share the parts
    from other hosts. One of them fetches a part for all, so the part is sent between hosts only once. The parts are
    divided evenly among these replacers.

    Args:
        reducers: Ranks that each add up one part. Empty on the direct route.
        hosts: Number of each rank's host. Empty if a host is unknown.
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
    """Return how many models the busiest host sends or receives if the donors send whole models to each replacer."""
    donors, replacers = (Counter(hosts[rank] for rank in ranks) for ranks in (decision.donors, decision.replacers))
    return max(
        max(replacers[host] * (donors.total() - donors[host]), donors[host] * (replacers.total() - replacers[host]))
        for host in set(hosts.values())
    )


def _sharded_network_load(
    reducers: tuple[int, ...], decision: Decision, model_nbytes: int, hosts: Mapping[int, int]
) -> float:
    """Return how many models the busiest host sends or receives if ``reducers`` each average one part."""
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
    """Choose the reducers, either all candidates or those on one host, that load the busiest host's network least."""
    by_host: dict[int, list[int]] = {}
    for rank in candidates:
        by_host.setdefault(hosts[rank], []).append(rank)
    like, unlike = len(decision.donors), len(decision.replacers)
    if candidates[0] in decision.replacers:
        like, unlike = unlike, like
    choices = [
        tuple(ranks)
        for ranks in by_host.values()  # only hosts whose ranks would each transfer at most `_MODELS_MAX` models
        if len(ranks) > 1 and max(like - 1, len(ranks) - 1 + unlike) <= _MODELS_MAX * len(ranks)
    ]
    return min([candidates, *choices], key=lambda ranks: _sharded_network_load(ranks, decision, model_nbytes, hosts))
