"""Runs a case with its event, and checks what must hold for every combination."""

from __future__ import annotations

import functools
import random
import re
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from support.odd_tensors import same

import asyncdist as ad
from asyncdist.errors import is_consequence
from asyncdist.simulation import Fault, Join, Kill, Partition, Restart, SlowRank, Stall
from simulation.grid.axes import COMMON, DEFAULT, Case, axes_of
from simulation.grid.models import MODELS, can_train
from simulation.grid.training import (
    END,
    LOSING,
    Job,
    Outcome,
    Trace,
    Trainee,
    differing,
    heard_warnings,
    is_finite,
    run,
)

EXACT_STARTS: Final = frozenset(("anew", "resumed", "resumed twice"))
SPOILING: Final = frozenset(("weights not finite", "moments not finite"))
#: Events that must not change the weights of a policy whose results do not depend on timing.
NEUTRAL: Final = frozenset(
    (
        *("nothing", "resumed in memory", "stalled", "parted", "one is slow"),
        *("wrong call", "settled", "anchors shown", "policies side by side"),
    )
)
#: Patterns of expected warnings, each with the condition under which it is expected.
EXPECTED: Final[tuple[tuple[str, Any], ...]] = (
    (
        "this rank is now the coordinator",
        lambda job: job.faults or job.event in ("one ends early", "error between steps"),
    ),
    ("are one replica, so nothing is averaged", lambda job: job.case.replica_size > 1),
    ("ranks? begins? as cop(y|ies) of", lambda job: job.case["start"] == "resumed on more"),
    ("wire='topk' without error_feedback", lambda job: job.case["wire"] in ("topk", "TopK")),
    ("begin with different weights", lambda job: job.case["first"] == "different"),
    (r"rank \d+ was restarted, and its state is not saved", lambda job: job.event in ("restarted", "joined")),
    ("no finite metrics by which the best ranks", lambda job: is_loaded_by_fewer(job)),
    ("progress of the schedule-free optimizer's z", lambda job: job.case["optimizer"] == "schedule-free"),
    ("was not finite. Its scores do not count", lambda job: job.case["model"] in ("float16", "mixed")),
    ("has left this policy; the others continue", lambda job: job.event == "one ends early"),
    ("replaces the last leader", lambda job: job.event in LOSING or job.case["start"] == "resumed on fewer"),
    ("not finite|NaN or infinite", lambda job: job.event in SPOILING),
    ("is rounded away; train float32 weights", lambda job: job.case["model"] in ("bfloat16", "float16", "mixed")),
)


def is_loaded_by_fewer(job: Job) -> bool:
    """Return whether fewer ranks load a checkpoint than saved it."""
    is_smaller = job.case["start"] == "resumed on fewer" or job.event in ("of a group", *LOSING)
    return job.is_loaded and is_smaller


class Refused(Exception):
    """Raised if one clear error, which is this error's cause, refuses the combination."""


# -- what the docs promise --------------------------------------------------------------------------------------------


def is_deterministic(case: Case) -> bool:
    """Return whether the results do not depend on timing."""
    if case.policy == "AsyncDiLoCoPolicy":
        waits = case["late"] == "wait" and case["quorum"] == str(case.ranks // case.replica_size)
        return waits and case["dynamic_steps"] == case["islands"] == case["island_size"] == DEFAULT
    if case.policy in ("DiLoCoPolicy", "SelectiveDiLoCoPolicy"):
        return case["quorum"] == DEFAULT and case["late"] != "skip"
    return case.policy in (
        "AverageAllPolicy",
        "GossipPolicy",
        "PopulationAveragingPolicy",
        "SparseAveragingPolicy",
        "EvolutionStrategyPolicy",
    )


def has_common_anchor(case: Case) -> bool:
    """Return whether all ranks have the same anchor after ``settle``."""
    return case.has_anchor and case.policy != "AsyncDiLoCoPolicy" and case["quorum"] == DEFAULT


def survives(case: Case) -> bool:
    """Return whether the other ranks continue after a rank is lost."""
    return case.policy != "AverageAllPolicy"


def takes_means_only(case: Case) -> bool:
    """Return whether each average is a mean of the ranks' weights, and therefore never leaves their hull."""
    if case.policy == "DiLoCoPolicy":
        return case["outer_optimizer"] == "None"
    if case.policy == "GossipPolicy":
        return case["outer_lr"] == case["outer_momentum"] == DEFAULT
    return case.policy not in ("SelectiveDiLoCoPolicy", "AsyncDiLoCoPolicy", "EvolutionStrategyPolicy")


def changes_nothing(case: Case) -> bool:
    """Return whether the weights never change: the learning rate is 0, and all ranks begin with equal weights."""
    if case["lr"] != "zero" or case["first"] != "equal" or case["optimizer"] == "Rprop":
        return False
    return case["hyperparameters"] == case["initial"] == DEFAULT  # a population draws learning rates


def loses_digits(case: Case) -> bool:
    """Return whether a checkpoint lacks digits of weights that the optimizer keeps outside its ``state_dict``."""
    return case["optimizer"] == "flat master" and case["model"] in ("bfloat16", "float16")


def keeps_sums(case: Case) -> bool:
    """Return whether an average leaves the sum of the ranks' weights unchanged."""
    if not takes_means_only(case) or case["model"] in ("bfloat16", "float16", "mixed"):
        return False
    plain = case.policy == "DiLoCoPolicy" and case["mixing"] == case["overlap_steps"] == DEFAULT
    plain = plain and case["weights"] == case["wire"] == DEFAULT and is_deterministic(case)
    gossip = case.policy == "GossipPolicy" and case["push_sum"] == DEFAULT
    pulled = case.policy in ("PopulationAveragingPolicy", "SparseAveragingPolicy") and case["center"] == DEFAULT
    return plain or gossip or pulled or case.policy == "AverageAllPolicy"


# -- jobs -------------------------------------------------------------------------------------------------------------


def _faults(case: Case, chance: random.Random) -> tuple[Fault, ...]:
    size = case.replica_size
    count = case.ranks - size * (case["start"] == "resumed on fewer")
    at_s = chance.uniform(0.005, 0.13)
    last = range(count - size, count)
    some = chance.randrange(count)
    mates = range(some // size * size, some // size * size + size)
    back_s = at_s + chance.uniform(0.005, 0.05)
    found: dict[str, Sequence[Fault]] = {
        "killed last": [Kill(last[-1], at_s=at_s)],
        "killed first": [Kill(0, at_s=at_s)],
        "restarted": [f for rank in mates for f in (Kill(rank, at_s=at_s), Restart(rank, at_s=back_s))],
        "joined": [Join(rank, at_s=at_s) for rank in last],
        "stalled": [Stall(some, at_s, 0.1)],
        "parted": [Partition((some,), at_s, at_s + 0.06)],
        "one is slow": [SlowRank(some, at_s, 20.0)],
    }
    return tuple(found.get(case["event"], ()))


def job_of(case: Case, folder: Path | None = None) -> Job:
    """Return the last job of a case. It is the only job unless the case loads a checkpoint."""
    chance = random.Random(str(case))
    size, is_anew = case.replica_size, case["start"] == "anew"
    more = {"resumed on fewer": -size, "resumed on more": size}.get(case["start"], 0)
    end = END * 2 if case["event"] in ("restarted", "joined") else END
    moment = chance.randint(1 if is_anew else 7, END - 2)
    last_save = moment if case["event"] == "one ends early" else end
    return Job(
        case=case,
        ranks=case.ranks + more,
        event=case["event"],
        way=case["way"],
        network=case["network"],
        moment=moment,
        faults=_faults(case, chance),
        end=end,
        seed=case.seed + chance.randrange(1000),
        folder=folder,
        is_loaded=not is_anew,
        saves_at=() if case["saving"] == "never" else tuple(range(3, last_save + 1, 3)),
        is_beside=case["saving"] == "beside",
    )


def moments_of_saves(case: Case) -> list[int]:
    """Return the iterations at which the earlier jobs of a case save a checkpoint and end."""
    moment = random.Random(f"saved {case}").randint(2, 6)
    return {"anew": [], "resumed twice": [max(1, moment // 2), moment]}.get(case["start"], [moment])


def _run(case: Case, folder: Path) -> Outcome:
    """Run the jobs of a case, and return the outcome of the last job."""
    job = job_of(case, folder)
    first = replace(job, faults=(), event="", ranks=case.ranks, is_beside=False)
    for place, moment in enumerate(moments_of_saves(case)):
        checked(run(replace(first, is_loaded=place > 0, end=moment, saves_at=(moment,), seed=job.seed + place)))
    if case["start"] == "resumed otherwise":
        job = replace(job, case=_changed(case))
    return checked(run(replace(job, seed=job.seed + 9)))


def _changed(case: Case) -> Case:
    """Return the case with a different value for one of its options."""
    chance = random.Random(f"changed {case}")
    own = [axis for axis in axes_of(case.policy) if axis not in COMMON and axis not in ("replica_size", "parameters")]
    for _ in range(20):
        axis = chance.choice(own)
        value = chance.choice(axes_of(case.policy)[axis])
        other = Case(case.policy, tuple((a, value if a == axis else v) for a, v in case.values), case.seed)
        if other != case and other.ranks == case.ranks and not refusal_of(other):
            return other
    return case


def checked(outcome: Outcome) -> Outcome:
    """Check how each rank ended and which states it recorded. Raise :class:`Refused` if one clear error ended it."""
    job, case = outcome.job, outcome.job.case
    errors = {rank: each for rank, each in enumerate(outcome.report.results) if isinstance(each, BaseException)}
    refusals = {rank: error for rank, error in errors.items() if is_refusal(error, case)}
    living = set(range(job.ranks)) - outcome.report.killed_ranks
    if refusals:
        ended = {rank for rank, error in errors.items() if rank in refusals or is_consequence(error)}
        outside = range(job.ranks - case.replica_size, job.ranks) if job.event == "of a group" else ()
        assert ended | set(outside) >= living or job.faults, f"only some ranks refuse: {errors}"
        raise Refused(str(next(iter(refusals.values())))) from next(iter(refusals.values()))
    unexplained = [error for error in errors.values() if not is_explained(error, outcome)]
    causes = [error for error in unexplained if not is_consequence(error)]
    if causes or len(unexplained) == len(errors) > 0:
        raise (causes or unexplained)[0]
    for text in outcome.warnings:
        assert is_expected(text, outcome), f"unexpected warning: {text}"
    traces = [trace for trace in outcome.traces if trace.end]
    for trace in traces:
        check_hull(trace, outcome)
    check_equal(traces, case, job)
    return outcome


def is_refusal(error: BaseException, case: Case) -> bool:
    """Return whether an error refuses the combination clearly, naming an option or the first weights."""
    if isinstance(error, ad.DisagreementError):
        return case["first"] == "different"
    if type(error) not in (ValueError, TypeError):
        return False
    names = (*axes_of(case.policy), "optimizer", "model", "parameter", "weights")
    return " must be " in str(error) or any(re.search(rf"\b{name}", str(error)) for name in names)


def is_explained(error: BaseException, outcome: Outcome) -> bool:
    """Return whether a rank may end with this error."""
    case, event = outcome.job.case, outcome.job.event
    if event in LOSING and isinstance(error, ad.RankLostError):
        return not survives(case) or case.replica_size > 1
    if event in ("restarted", "joined") and isinstance(error, ad.LateError):
        return True
    if event in ("restarted", "joined") and isinstance(error, ad.LocalProtocolError):
        return not survives(case) or "2" in (case["islands"], case["island_size"])
    if event == "cancelled step" and isinstance(error, ad.ClosedError):
        return case.replica_size > 1  # a replica's ranks may then differ
    if isinstance(error, ad.RemoteError) and event == "cancelled step":
        return case.policy == "AverageAllPolicy"
    if isinstance(error, ad.ClosedError) and case.policy == "AverageAllPolicy":
        return event == "one ends early"
    return False


def is_expected(text: str, outcome: Outcome) -> bool:
    """Return whether a warning is documented for this case."""
    return any(re.search(pattern, text) and condition(outcome.job) for pattern, condition in EXPECTED)


# -- weights ----------------------------------------------------------------------------------------------------------


def check_hull(trace: Trace, outcome: Outcome) -> None:
    """Check that no weight leaves the hull of the ranks' first weights if the learning rate is 0."""
    case = outcome.job.case
    if case["lr"] != "zero" or case["optimizer"] == "Rprop" or case["hyperparameters"] != DEFAULT:
        return
    if case["initial"] != DEFAULT:
        return
    if outcome.job.event in SPOILING:
        return
    if changes_nothing(case):
        changed = differing(trace.start, trace.end)
        assert not changed, f"with a learning rate of 0 and equal first weights, {changed} changed"
    elif takes_means_only(case):
        starts = [each.start for each in outcome.traces if each.start]
        for name, tensor in trace.end.items():
            if not tensor.is_complex() and tensor.numel() and name != "mask":
                values = torch.stack([each[name].double() for each in starts])
                slack = 8 * torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0
                slack = slack * float(values.abs().max()) if slack else slack
                slack = 0.05 * float(values.abs().max()) if case["wire"] != DEFAULT else slack
                assert (tensor.double() >= values.amin(0) - slack).all(), f"{name} left the hull of the first weights"
                assert (tensor.double() <= values.amax(0) + slack).all(), f"{name} left the hull of the first weights"


def check_equal(ended: Sequence[Trace], case: Case, job: Job) -> None:
    """Check that weights and anchors are equal, bit for bit, on all ranks for which the docs promise this."""
    together = [trace for trace in ended if job.event != "one ends early" or trace.anchors is not None]
    if has_common_anchor(case) and (case["late"] != "skip" or job.event in NEUTRAL):
        shown = [trace.anchors for trace in together if trace.anchors is not None]
        buffers = [name for name, _ in MODELS[case["model"]](0).named_buffers()]
        for each in shown[1:]:
            wrong = [name for name in differing(shown[0], each) if name not in buffers]
            assert not wrong, f"the anchors of {wrong} differ after settle()"
    if case.replica_size > 1:
        by_replica: dict[tuple[int, int], Trace] = {}
        for trace in ended:
            first = by_replica.setdefault((trace.rank // 2, trace.incarnation), trace)
            wrong = differing(first.end, trace.end)
            assert not wrong or job.event in LOSING, f"{wrong} differ in a replica"
    every = int(case["average_every"]) if case["average_every"] != DEFAULT else 0
    if case.policy == "AverageAllPolicy" and job.event in NEUTRAL and every and job.end % every == 0:
        for trace in together:
            wrong = differing(together[0].end, trace.end)
            assert not [name for name in wrong if name not in ("own", "flags")], f"{wrong} differ after an average"


def check_finite(outcome: Outcome) -> None:
    """Check that the weights of other ranks stay finite if the weights or moments of one rank are not."""
    case, job = outcome.job.case, outcome.job
    if job.event not in SPOILING or case.policy == "AverageAllPolicy":
        return
    spoiled = max(trace.rank for trace in outcome.traces) // case.replica_size
    for trace in outcome.traces:
        if trace.end and trace.rank // case.replica_size != spoiled:
            bad = [name for name, each in trace.end.items() if name != "mask" and not is_finite([each])]
            assert not bad, f"{bad} of rank {trace.rank} are not finite"


def check_sums(outcome: Outcome) -> None:
    """Check that methods that leave the sum of the ranks' weights unchanged do so if the learning rate is 0."""
    case = outcome.job.case
    ended = [trace for trace in outcome.traces if trace.end]
    if case["lr"] != "zero" or case["optimizer"] in ("Rprop", "masters") or not keeps_sums(case):
        return
    if len(ended) < outcome.job.ranks or outcome.job.event not in NEUTRAL:
        return
    for name, parameter in MODELS[case["model"]](0).named_parameters():
        sums = [sum(getattr(trace, when)[name].to(torch.complex128) for trace in ended) for when in ("start", "end")]
        assert torch.allclose(sums[0], sums[1], rtol=1e-4, atol=1e-4), f"the sum of {name} changed"
        del parameter


def check_same(one: Outcome, two: Outcome, why: str) -> None:
    """Check that all ranks of two jobs end with the same bits in weights and optimizers."""
    ends = [{trace.rank: trace for trace in each.traces if trace.end} for each in (one, two)]
    for rank, trace in ends[0].items():
        other = ends[1].get(rank)
        if other is not None:
            wrong = [name for name in differing(trace.end, other.end) if name != "own"]
            assert not wrong, f"{why}: {wrong} of rank {rank} end with other bits"
            assert len(trace.moments) == len(other.moments), f"{why}: the optimizers have other tensors"
            assert all(map(same, trace.moments, other.moments)), f"{why}: a moment ends with other bits"


# -- one case ---------------------------------------------------------------------------------------------------------


#: Axes whose values must not change the weights.
_SCENES: Final = ("event", "way", "start", "saving", "network")


@functools.lru_cache(maxsize=64)
def baseline(case: Case, saves_at: tuple[int, ...]) -> Outcome:
    """Return the outcome of the same case in a coroutine, without an event."""
    plain = Case(case.policy, tuple((a, COMMON[a][0] if a in _SCENES else v) for a, v in case.values), case.seed)
    job = job_of(plain)
    with tempfile.TemporaryDirectory() as place:
        return run(replace(job, folder=Path(place), saves_at=saves_at, seed=job.seed + 77))


def refusal_of(case: Case) -> str:
    """Return the error that the policy's constructor raises, or "". Raise AssertionError if the error is unclear."""
    try:
        with heard_warnings():
            Trainee(case, 0, way=case["way"])
    except (ValueError, TypeError) as error:
        assert is_refusal(error, case), f"unclear: {type(error).__name__}: {error}"
        return str(error)
    return ""


def check(case: Case) -> str:
    """Run a case and check its outcome. Return the reason if the case is refused, or else ""."""
    if not can_train(case["model"], case["optimizer"]):
        return "torch"
    said = refusal_of(case)
    if said:
        return said
    with tempfile.TemporaryDirectory() as place:
        try:
            outcome = _run(case, Path(place))
        except Refused as refused:
            return str(refused)
        check_sums(outcome)
        check_finite(outcome)
        if is_deterministic(case) and case["event"] in NEUTRAL and case["start"] in EXACT_STARTS:
            is_eager = case["eager"] == "True"  # settle() then averages the anchors
            saves = (*moments_of_saves(case), *outcome.job.saves_at) if is_eager else ()
            settles = is_eager and case["event"] in ("resumed in memory", "settled", "anchors shown")
            if not settles and (case["start"] == "anew" or not loses_digits(case)):
                check_same(baseline(case, saves), outcome, "the weights depend on what must not change them")
        elif case["start"] == "anew" and case["event"] == "nothing" and case["saving"] == "never":
            again = run(outcome.job)
            assert again.report.trace_digest == outcome.report.trace_digest, "equal seeds give different runs"
            check_same(outcome, again, "equal seeds")
    return ""
