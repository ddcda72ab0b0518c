"""Summarises the recording of a job for a report, in bounded memory."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncdist.recording.events import Event
from asyncdist.recording.reader import MessageCounts, Recording, RecordingError
from asyncdist.report.averages import Averages
from asyncdist.report.clock_alignment import Clocks
from asyncdist.report.series import Interned, LogHistogram, Thinned, TimeBins

#: Maximum number of metric values that are stored, divided among the ranks.
_METRIC_COUNT: Final = 20_000
#: Maximum number of changes of hyperparameters that are stored.
_HYPERPARAMETER_COUNT: Final = 100_000
#: Maximum number of ranks. At this number, each table of all pairs of ranks takes 32 MB.
SIZE_MAX: Final = 2048
#: Maximum number of policies that a rank can have open at once. Each belongs to a different population.
POPULATION_COUNT_MAX: Final = 8
_WITHOUT_END: Final = (
    "its recording ends before main: the rank was killed or stopped, its disk was full, or it is still running"
)


#: Identity of a round: the rank that decided it, the policy's number on that rank, and the round's number.
RoundNumber: TypeAlias = tuple[int, int, int]


class Applied(NamedTuple):
    """Describes the replacement of a rank's weights with an average."""

    time_s: float
    rank: int
    population: int
    policy: int
    round: int
    donors: tuple[int, ...]
    weights: tuple[float, ...]
    coordinator: int


class Begun(NamedTuple):
    """The start of a policy in a restarted process with the weights of ``donor``, or new ones if that is ``rank``."""

    time_s: float
    rank: int
    population: int
    donor: int


@dataclass(slots=True)
class Round:
    """Describes an averaging round, with the times at which its phases ended, in seconds since the job began.

    Attributes:
        number: Identity of the round. Policies on different groups of ranks number their rounds independently.
        began_s: Time of the decision. This and the following times are NaN for phases that were not reached.
        frozen_s: Time at which the ranks whose weights are averaged were chosen.
        applied_s: Time at which the last rank replaced its weights by the average.
        ended_s: Time at which the coordinator ended the round.
    """

    number: RoundNumber
    began_s: float
    donors: tuple[int, ...]
    replacers: tuple[int, ...]
    route: str
    frozen_s: float = np.nan
    applied_s: float = np.nan
    ended_s: float = np.nan
    reason: str = ""
    applied_count: int = 0


@dataclass(slots=True)
class RankSummary:
    """Stores the step times of one rank: seconds between the ends of consecutive steps, and seconds in ``policy.step``.

    ``lag_bins`` has, over time, this rank's delay in seconds after the first rank that contributed to a round, or that
    reported an iteration's metric.
    """

    intervals: LogHistogram = field(default_factory=LogHistogram)
    interval_bins: TimeBins = field(default_factory=TimeBins)
    step_seconds: LogHistogram = field(default_factory=LogHistogram)
    lag_bins: TimeBins = field(default_factory=TimeBins)


@dataclass(slots=True)
class Population:
    """Describes a group of policies that exchange weights, one on each rank, and their successors.

    ``metrics`` has the times and values of the metric, keyed by rank. ``shares``, of shape (size, size), has the
    fractions of each rank's final weights (row) that descend from each rank's initial weights (column).
    """

    name: str
    metrics: list[Thinned]
    shares: NDArray[np.float32]


@dataclass(slots=True)
class Summary:
    """Stores the contents of a job's report.

    Attributes:
        began_at_s: Time of the first event, in seconds since 1970.
        applied: Replacements of weights, oldest first.
        begun: Starts of policies in restarted processes, oldest first.
        hyperparameters: New hyperparameters, each with time, rank and values keyed by name.
        nbytes: Size in bytes of all messages from one rank (row) to another (column), with shape (size, size).
        news: Losses, failovers, errors of ``main`` and incomplete files, each with time, reporting rank and text.
        first_step_s: Time at which the first step of any rank ended, in seconds since the job began, or infinity.
        ends: Error that ended ``main`` on each recorded rank: an empty string if ``main`` returned, None if the end is
            not recorded. For a restarted rank, it is the error in the last process.
        message_count: Number of messages, including messages of policies and of the runtime.
        messages: Numbers of messages of the program's own channels.
        donor_lists, weight_lists: Donors and their weights in ``applied``. All ranks record the same ones.
        told: Summaries of the reports that the job was making no progress, without duplicates. They are also in
            ``news``.
    """

    size: int
    ranks: list[RankSummary]
    nbytes: NDArray[np.float64]
    populations: list[Population] = field(default_factory=list)
    began_at_s: float = 0.0
    duration_s: float = 0.0
    applied: list[Applied] = field(default_factory=list)
    begun: list[Begun] = field(default_factory=list)
    hyperparameters: list[tuple[float, int, dict[str, Any]]] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    averages: Averages = field(default_factory=Averages)
    news: list[tuple[float, int, str]] = field(default_factory=list)
    told: set[str] = field(default_factory=set)
    first_step_s: float = np.inf
    ends: dict[int, str | None] = field(default_factory=dict)
    message_count: int = 0
    messages: MessageCounts = field(default_factory=MessageCounts)
    donor_lists: Interned = field(default_factory=Interned)
    weight_lists: Interned = field(default_factory=Interned)

    @property
    def replacement_count(self) -> int:
        """Number of times that a policy has replaced a rank's weights, not counting averages of contributions."""
        return len(self.applied) - sum(each.applied_count for each in self.averages.rounds())


def summarise(recording: Recording) -> Summary:
    """Summarise a recording, reading it twice. Raise RecordingError if it has more than SIZE_MAX ranks."""
    size = recording.size
    if size > SIZE_MAX:
        raise RecordingError(
            f"a report can have at most {SIZE_MAX} ranks, but job {recording.job} has {size}; use asyncdist query"
        )
    summary = Summary(size=size, ranks=[RankSummary() for _ in range(size)], nbytes=np.zeros((size, size)))
    clocks = Clocks(recording)
    summary.began_at_s = clocks.began_at_s
    rounds: dict[RoundNumber, Round] = {}
    first_at: dict[tuple[int, int, int], float] = {}
    populations = _Populations()
    policies_of: dict[Path, _Policies] = {}
    newest: dict[int, _Policies] = {}  # policies of each rank's newest process
    for each in recording.ranks:
        offset = clocks.offset(each)
        policies = _Policies(populations, newest.get(each.rank), is_restarted=each.incarnation > 0)
        newest[each.rank] = policies_of[each.path] = policies
        last_step_s = dict[int, float]()
        time_s, tells_end, over = each.header.clock_s + offset, False, None
        for event in each.events():
            time_s = event.time_s + offset
            summary.duration_s = max(summary.duration_s, time_s)
            _add(summary, rounds, policies, last_step_s, each.rank, time_s, event)
            tells_end = tells_end or event.kind in ("over", "cut")
            if event.kind == "over":
                over = str(event.get("error"))
            if event.kind == "metric":
                place = *policies.place(int(event.get("policy"))), int(event.get("iteration"))
                first_at[place] = min(time_s, first_at.get(place, time_s))
        policies.end_all(time_s)
        summary.ends[each.rank] = over
        if not tells_end:
            summary.news.append((time_s, each.rank, _WITHOUT_END))
    averaging = summary.averages.populations
    for each in recording.ranks:
        offset = clocks.offset(each)
        lags, policies = summary.ranks[each.rank].lag_bins, policies_of[each.path]
        for event in each.events():
            time_s = event.time_s + offset
            if event.kind == "contributed":
                of_policy = policies.place(int(event.get("policy")))
                lags.add(time_s, time_s - summary.averages.first_s(each.rank, of_policy, event))
            elif event.kind == "metric" and policies.population(int(event.get("policy"))) not in averaging:
                place = *policies.place(int(event.get("policy"))), int(event.get("iteration"))
                lags.add(time_s, time_s - first_at.get(place, time_s))
    summary.averages.count_late()
    summary.applied.sort()
    summary.begun.sort(key=lambda each: each.time_s)
    summary.news.sort()
    summary.rounds = sorted(rounds.values(), key=lambda each: each.began_s)
    _follow(summary)
    return summary


class _Populations:
    """Assigns the policies of all processes to populations.

    Policies that a process opens one after another belong to one population, as do policies of different processes with
    the same name or class. Policies with different names that are open at the same time belong to different
    populations.
    """

    def __init__(self) -> None:
        self._spans: list[dict[str, _Span]] = []  # each population's policies, keyed by name

    def begin(self, taken: Collection[int], name: str, time_s: float) -> tuple[int, _Span]:
        """Choose a population, not in ``taken``, for a process's new policy.

        Return its index, and the count of open policies.
        """
        free = [place for place in range(len(self._spans) + 1) if place not in taken]
        named = next((place for place in free[:-1] if name in self._spans[place]), None)
        place = next(place for place in free if not self._has_other(place, name, time_s)) if named is None else named
        if place == len(self._spans):
            self._spans.append({})
        span = self._spans[place].setdefault(name, _Span())
        span.open_count += 1
        return place, span

    def _has_other(self, place: int, name: str, time_s: float) -> bool:
        spans = self._spans[place] if place < len(self._spans) else {}
        return any(span.open_count or time_s < span.ended_s for other, span in spans.items() if other != name)


@dataclass(slots=True)
class _Span:
    """Counts the open policies with one name on all ranks. ``ended_s`` is the time at which the last of them ended."""

    open_count: int = 0
    ended_s: float = -np.inf

    def end(self, time_s: float) -> None:
        self.open_count -= 1
        self.ended_s = max(self.ended_s, time_s)


class _Policies:
    """Assigns the policies of one process to populations, and numbers this rank's policies in each population.

    A restarted process continues with the first policy that its predecessor has not closed.
    """

    def __init__(self, populations: _Populations, predecessor: _Policies | None, *, is_restarted: bool) -> None:
        self._populations = populations
        self._open: dict[int, tuple[int, _Span]] = {}
        self._places: dict[int, tuple[int, int]] = {}
        self._is_restarted = is_restarted
        self._first_numbers: Counter[int] = Counter() if predecessor is None else predecessor._closed_counts
        self._counts = self._first_numbers.copy()
        self._closed_counts: Counter[int] = self._first_numbers.copy()

    def begin(self, policy: int, name: str, time_s: float) -> int:
        taken = {place for place, _ in self._open.values()}
        place, span = self._populations.begin(taken, name, time_s)
        self._open[policy] = place, span
        self._places[policy] = place, self._counts[place]
        self._counts[place] += 1
        return place

    def close(self, policy: int, time_s: float) -> None:
        if policy in self._open:
            place, span = self._open.pop(policy)
            self._closed_counts[place] += 1
            span.end(time_s)

    def end_all(self, time_s: float) -> None:
        for _, span in self._open.values():
            span.end(time_s)
        self._open.clear()

    def restarts(self, policy: int) -> bool:
        """Return whether a policy is the first policy of a restarted process in its population."""
        place, number = self.place(policy)
        return self._is_restarted and number == self._first_numbers[place]

    def population(self, policy: int) -> int:
        return self.place(policy)[0]

    def place(self, policy: int) -> tuple[int, int]:
        """Return the index of a policy's population, and the policy's index among the rank's policies there."""
        return self._places.get(policy, (0, 0))


def _population(summary: Summary, place: int, name: str = "") -> Population | None:
    """Return a population, created if necessary, or None if there would be more than POPULATION_COUNT_MAX."""
    capacity = max(_METRIC_COUNT // summary.size, 100)
    while place >= len(summary.populations) and place < POPULATION_COUNT_MAX:
        metrics = [Thinned(capacity) for _ in range(summary.size)]
        summary.populations.append(Population(name, metrics, np.eye(summary.size, dtype=np.float32)))
    return summary.populations[place] if place < POPULATION_COUNT_MAX else None


def _round_of(applied: Applied, decided: Sequence[Round]) -> Round | None:
    """Return the averaging round of a replacement, from the coordinator's rounds with the same number.

    These rounds may belong to several policies. A round with the replacement's policy number is preferred, otherwise
    the latest round, because a policy may have different numbers on different ranks.
    """
    its = [each for each in decided if applied.rank in each.replacers]
    return max(its, key=lambda each: (each.number[1] == applied.policy, each.began_s), default=None)


def _add(
    summary: Summary,
    rounds: dict[RoundNumber, Round],
    policies: _Policies,
    last_step_s: dict[int, float],
    rank: int,
    time_s: float,
    event: Event,
) -> None:
    match event.kind:
        case "policy" | "joined" | "closed":
            _add_life_of_policy(summary, policies, rank, time_s, event)
        case "step":
            _add_step(summary, last_step_s, rank, time_s, event)
        case "metric":
            population = _population(summary, policies.population(int(event.get("policy"))))
            if population is not None:
                population.metrics[rank].add(time_s, float(event.get("value")))
        case "sent" | "received":
            _add_message(summary, rank, event)
        case "safe_point" | "clock" | "heard" | "timer" | "deadline" | "waited":
            pass
        case "applied":
            policy, number = int(event.get("policy")), int(event.get("round"))
            donors, weights = summary.donor_lists(event.get("donors")), summary.weight_lists(event.get("weights"))
            of, by = policies.population(policy), event.get("coordinator")
            if event.get("fragment") is not None:
                summary.averages.add(rank, policies.place(policy), time_s, event)
            coordinator = -1 if by is None else int(by)
            summary.applied.append(Applied(time_s, rank, of, policy, number, donors, weights, coordinator))
        case "contributed":
            summary.averages.add(rank, policies.place(int(event.get("policy"))), time_s, event)
        case "hyperparameters":
            values = _parsed(event.get("chosen"))
            if len(summary.hyperparameters) < _HYPERPARAMETER_COUNT:
                summary.hyperparameters.append((time_s, rank, values))
        case "decided" | "frozen" | "ended":
            _add_to_round(rounds, rank, time_s, event)
        case _:
            text = _news_of(event)
            if text and not (event.kind == "told" and text in summary.told):  # several ranks record the same report
                summary.news.append((time_s, rank, text))
            if event.kind == "told":
                summary.told.add(text)


def _parsed(text: Any) -> dict[str, Any]:
    """Return the hyperparameters in a field of an event, or {} if a damaged recording has other content."""
    try:
        found = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _add_life_of_policy(summary: Summary, policies: _Policies, rank: int, time_s: float, event: Event) -> None:
    policy = int(event.get("policy"))
    if event.kind == "closed":
        policies.close(policy, time_s)
    elif event.kind == "joined":
        summary.begun.append(Begun(time_s, rank, policies.population(policy), int(event.get("donor"))))
    else:
        name = str(event.get("name") or event.get("class_name"))
        place = policies.begin(policy, name, time_s)
        _population(summary, place, name)
        if policies.restarts(policy):
            summary.begun.append(Begun(time_s, rank, place, rank))


def _add_step(summary: Summary, last_step_s: dict[int, float], rank: int, time_s: float, event: Event) -> None:
    policy, of_rank = int(event.get("policy")), summary.ranks[rank]
    if policy in last_step_s:
        interval_s = time_s - last_step_s[policy]
        of_rank.intervals.add(interval_s)
        of_rank.interval_bins.add(time_s, interval_s)
    last_step_s[policy] = time_s
    summary.first_step_s = min(summary.first_step_s, time_s)
    of_rank.step_seconds.add(float(event.get("seconds")))


def _add_message(summary: Summary, rank: int, event: Event) -> None:
    summary.messages.add(rank, event)
    if event.kind == "sent":
        summary.nbytes[rank, int(event.get("dest"))] += int(event.get("nbytes"))
        summary.message_count += 1


def _add_to_round(rounds: dict[RoundNumber, Round], rank: int, time_s: float, event: Event) -> None:
    number = rank, int(event.get("policy")), int(event.get("round"))
    if event.kind == "decided":
        donors, replacers = tuple(event.get("donors")), tuple(event.get("replacers"))
        rounds.setdefault(number, Round(number, time_s, donors, replacers, str(event.get("route"))))
        return
    found = rounds.get(number)
    if found is not None and event.kind == "frozen":
        found.frozen_s = time_s
    elif found is not None:
        found.ended_s, found.reason = time_s, str(event.get("reason"))


def _news_of(event: Event) -> str:
    """Return the text of an event for the list of news, or an empty string if the event does not belong in the list."""
    match event.kind:
        case "lost":
            return f"rank {event.get('rank')} is lost"
        case "returned":
            # Incarnation 0 means that this rank is the new process.
            new = ", as a new process" if event.get("incarnation") else ""
            return f"rank {event.get('rank')} is there{new}"
        case "coordinator":
            return f"rank {event.get('rank')} coordinates (epoch {event.get('epoch')})"
        case "over" if event.get("error"):
            return f"main ended with {str(event.get('error')).rstrip(': ')}"
        case "cut":
            return f"its recording {event.get('why')}"
        case "told":
            return f"{str(event.get('story')).partition('; job ')[0]}; asyncdist story shows the full story"
        case _:
            return ""


def _follow(summary: Summary) -> None:
    """Compute from which initial weights each rank's final weights descend, and when each average was last applied.

    Training leaves this origin unchanged, but a replacement of the weights changes it. Ranks that apply the same
    average get the same origin. Otherwise, an average of all ranks would favour the rank that applies it last.
    """
    mixtures: dict[RoundNumber, _Mixture] = {}
    decided: dict[tuple[int, int], list[Round]] = {}
    for each in summary.rounds:
        decided.setdefault((each.number[0], each.number[2]), []).append(each)
    begun = deque(summary.begun)
    for applied in summary.applied:
        while begun and begun[0].time_s <= applied.time_s:
            _begin(summary, begun.popleft())
        found = _round_of(applied, decided.get((applied.coordinator, applied.round), ()))
        if found is not None:
            found.applied_s = np.fmax(found.applied_s, applied.time_s)
            found.applied_count += 1
        population = _population(summary, applied.population)
        if population is None:
            continue
        if applied.donors:
            number = applied.population, applied.coordinator, applied.round
            mixture = mixtures.get(number)
            if mixture is None or mixture.donors != applied.donors or applied.rank in mixture.ranks:
                mixture = mixtures[number] = _Mixture(applied.donors, _mixed(population, applied))
            mixture.ranks.add(applied.rank)
            population.shares[applied.rank] = mixture.shares
    for last in begun:
        _begin(summary, last)


@dataclass(slots=True)
class _Mixture:
    """Stores the ranks from whose initial weights an average descends, and the ranks that have applied it."""

    donors: tuple[int, ...]
    shares: NDArray[np.float32]
    ranks: set[int] = field(default_factory=set)


def _mixed(population: Population, applied: Applied) -> NDArray[np.float32]:
    are_usable = len(applied.weights) == len(applied.donors) and sum(applied.weights) > 0
    weights = applied.weights if are_usable else (1.0,) * len(applied.donors)
    mixed: NDArray[np.float32] = np.average(population.shares[list(applied.donors)], axis=0, weights=weights)
    return mixed


def _begin(summary: Summary, begun: Begun) -> None:
    """Record that a restarted process begins with its donor's weights, or with new weights if it is its own donor."""
    population = _population(summary, begun.population)
    if population is not None and 0 <= begun.donor < summary.size:
        own = np.eye(summary.size, dtype=np.float32)[begun.rank]
        population.shares[begun.rank] = own if begun.donor == begun.rank else population.shares[begun.donor]
