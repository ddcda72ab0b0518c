"""Decides who replaces whom in selective averaging: the options that matter for it, and the decision on given metrics.

Pure functions on plain values: no asyncio, no transport, no clock, no torch, no randomness, so thousands of tests run
in milliseconds. `protocols.selective.rounds` decides when to judge and carries each round to its end;
`protocols.ranking` has the order of the ranks, ties and NaN included, and how many are replaced.
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

#: How the donors' snapshots come to the replacers.
Route: TypeAlias = Literal["auto", "direct", "sharded"]
_ROUNDS: Final = "stragglers and rounds"
#: `"auto"` takes the sharded route where the busiest rank would else move twice as many models, and so many bytes more:
#: below that the one step that it takes longer counts more (8 ranks on 2 cores, 4 MiB: 55 ms in place of 13).
_SHARDED_SAVING_NBYTES: Final = 64 << 20
_SHARDED_COUNT_MIN: Final = 4
#: Nor does it count where all ranks together have so many streams less.
_SHARDED_SAVING_STREAMS: Final = 128
#: A stream costs a rank about as much as so many bytes, whatever its length.
_STREAM_NBYTES: Final = 64 << 10
#: On the sharded route a rank fetches for the replacers of its host where they are spared so much together: it takes a
#: step longer.
SHARED_NBYTES_MIN: Final = 1 << 20
#: The most that a rank is to send, or to take in, where fewer ranks reduce than could.
_MODELS_MAX: Final = 2
_NO_GUESTS: Final[Mapping[int, float]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectiveRules(JudgingRules):
    """Holds the options of selective averaging that decide about rounds.

    Raises:
        ValueError: An option is of the wrong type or outside the allowed range; it names option, value and range.
    """

    threshold: float | None = option(
        "A round acts only if the worst metric is worse than this; None: each round acts.",
        or_none(number("None or a finite number", -validation.LARGEST)),
        default=None,
    )
    cooldown: int = option(
        "With a `threshold`: iterations by which the largest reported iteration must grow before the next round may "
        "act.",
        whole(0),
        default=200,
    )
    quorum: float = option(
        "0 to 1: part of the live members that must have reported before `grace_s` begins.",
        validation.fraction,
        default=0.5,
        group=_ROUNDS,
    )
    grace_s: float | None = option(
        "Seconds in which the other members may report; None: as long as that delays no later round.",
        or_none(number("None or a finite number of seconds, 0 or more", 0.0)),
        default=None,
        group=_ROUNDS,
    )
    max_report_age_s: float = option(
        "Seconds after which a report no longer counts; may be infinite.",
        number("a number of seconds above 0", validation.SMALLEST, math.inf),
        default=600.0,
        group=_ROUNDS,
    )
    round_timeout_s: float = option(
        "Seconds for a round's exchange, to which the safe points that it needs are added.",
        validation.seconds,
        default=30.0,
        group=_ROUNDS,
    )
    route: Route = option(
        'How snapshots travel. `"direct"`: each donor sends its weights to each replacer. `"sharded"`: the donors, or '
        "the replacers if these are more, each add up one part and send its mean to the replacers. "
        '`"auto"`: the one that costs less.',
        one_of(Route),
        default="auto",
        group=_ROUNDS,
    )
    #: Decisions from one emigrant to the next; 0 without islands.
    migrate_every: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """Says what one set of metrics leads to.

    Attributes:
        donors: Ascending; empty for `reset_weights`.
        replacers: Ascending, never empty, disjoint from `donors`.
        weights: One per donor, unnormalised, positive.
        best: The donor with the best metric, whose integer and bool entries are taken; -1 without donors.
        guests: Those of the donors that are in another island.
    """

    donors: tuple[int, ...]
    replacers: tuple[int, ...]
    weights: tuple[float, ...]
    best: int
    guests: tuple[int, ...] = ()

    @property
    def waited_for(self) -> tuple[int, ...]:
        """Ranks for whose steps the round waits until it is frozen: for a guest no longer than for the others."""
        own = tuple(rank for rank in self.donors if rank not in self.guests)
        return own or (self.replacers if self.donors else ())


def averaging_weights(
    metrics: Mapping[int, float], donors: Sequence[int], *, averaging_strategy: str, metric_mode: str = "max"
) -> tuple[float, ...]:
    """Return one unnormalised weight per donor, none negative, with a positive finite sum.

    Unnormalised, because the receiver divides by the sum of the weights that really arrived, and because weights of
    exactly 1 make the mean of 1, 2 and 3 exactly 2. For `weighted_mean` a donor weighs what it gains over the worst
    finite participant, the replaced ones included; when none gains anything all weigh 1. Only the ratios matter, so
    weights of a size that could overflow float32 (or float64, for metrics near its limits) are scaled by a power of
    two, which changes no ratio.

    Args:
        metrics: The metrics of all participants.
        donors: Ranks with finite metrics.
        averaging_strategy: One of `STRATEGIES`; all but `weighted_mean` weigh evenly.
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

    Donors whose weight is 0 are left out (they would send a whole model for nothing); the best donor never is. With
    `reset_weights` no rank gives, so a round acts even when no metric is finite: fresh weights are the cure then.

    Args:
        metrics: Rank to metric, of the participants.
        rules: The options. The cooldown is the coordinator's affair, it needs a memory.
        guests: Rank to metric, of ranks of other islands. None is replaced; those that are better than all that are
            replaced are donors beside the others.

    Returns:
        The decision; None when there is no rank to replace, no rank to give, or the threshold is not crossed.
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
    """Return the donors, worst first, with the guests that are better than `bar`, the best rank that is replaced."""
    all_metrics = {**metrics, **guests}
    order = order_worst_first({rank: all_metrics[rank] for rank in (bar, *candidates, *guests)}, metric_mode)
    better = [rank for rank in order[order.index(bar) + 1 :] if math.isfinite(all_metrics[rank])]
    return better, {**metrics, **{rank: guests[rank] for rank in better if rank in guests}}


def reducers_of(
    decision: Decision, route: str, model_nbytes: int, turn: int = 0, hosts: Mapping[int, int] | None = None
) -> tuple[int, ...]:
    """Return the ranks that each add up one part of the donors' snapshots; none for the direct route.

    On the direct route each of D donors sends its model to each of R replacers, and the busiest rank moves as many
    models as there are donors, or replacers. On the sharded one a donor sends each reducer a part, and the reducer
    sends the mean of that part to each replacer: (D + R - 1) models in all. Those of the donors and replacers that are
    more reduce, so that the busiest rank moves 1 + (min(D, R) - 1) / max(D, R) models: less than two. With donors and
    replacers together it would be more where few are replaced, since a replacer takes a whole mean in already. Guests
    only give. Where the hosts are known, those of one host alone reduce if that spares the busiest host's network and
    no rank moves more than two models.

    Parts that take less time than a stream's own messages save nothing, so `"auto"` has fewer reducers for a small
    model, with a single one D + R streams in place of D x R. They take turns.

    Args:
        decision: Who gives, and who takes.
        route: One of `Route`. `"auto"` takes the sharded one where that saves the busiest rank, or the busiest host's
            network, many bytes, or all ranks together many streams.
        model_nbytes: The bytes of one snapshot.
        turn: The round's number.
        hosts: Numbers of the hosts, by rank, where all are known.
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
    """Return, by replacer, from which rank it takes the mean of each part; none who takes all from the reducers.

    Replacers of one host share what comes from others: each part crosses the network once for each host in place of
    once for each replacer. They take turns in fetching, so that each has about the same to fetch and to give.

    Args:
        decision: Who gives, and who takes.
        reducers: The ranks that each make a part; none on the direct route.
        model_nbytes: The bytes of one snapshot.
        hosts: Numbers of the hosts, by rank; empty where they are not known.
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
    """Return how many models the network of the busiest host carries in one direction on the direct route."""
    donors, replacers = (Counter(hosts[rank] for rank in ranks) for ranks in (decision.donors, decision.replacers))
    return max(
        max(replacers[host] * (donors.total() - donors[host]), donors[host] * (replacers.total() - replacers[host]))
        for host in set(hosts.values())
    )


def _sharded_network_load(
    reducers: tuple[int, ...], decision: Decision, model_nbytes: int, hosts: Mapping[int, int]
) -> float:
    """Return the same for the sharded route: the donors' parts, and the means, which leave while these come in."""
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
    """Return those who load the busiest host's network least: all candidates, or those of one host."""
    by_host: dict[int, list[int]] = {}
    for rank in candidates:
        by_host.setdefault(hosts[rank], []).append(rank)
    like, unlike = len(decision.donors), len(decision.replacers)
    if candidates[0] in decision.replacers:
        like, unlike = unlike, like
    choices = [
        tuple(ranks)
        for ranks in by_host.values()  # what each exchanges with the others of its kind, and with those it serves
        if len(ranks) > 1 and max(like - 1, len(ranks) - 1 + unlike) <= _MODELS_MAX * len(ranks)
    ]
    return min([candidates, *choices], key=lambda ranks: _sharded_network_load(ranks, decision, model_nbytes, hosts))
