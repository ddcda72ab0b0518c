"""Implements ``asyncdist plan``: prints what averaging costs for each method and codec, and a policy to start from."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from asyncdist.planning import outer_rules
from asyncdist.planning.arguments import DEFAULT_EVERIES
from asyncdist.planning.costs import (
    FLOAT32,
    TARGET,
    TOPK_SHARE,
    DataParallel,
    DiLoCo,
    Job,
    Link,
    RoundCost,
    Row,
    SelectiveAveraging,
    StreamingOptions,
    every_for_target,
    recommend,
    round_cost,
    rows,
)
from asyncdist.recording.command_output import print_to, refuse
from asyncdist.wording import aligned, plural, seconds_in_words, size_in_words


def run(options: argparse.Namespace) -> int:
    """Print the plan, and return the exit code."""
    link = Link(bandwidth_nbytes_per_s=options.link, latency_s=options.latency)
    job = Job(param_count=options.params, rank_count=options.ranks, step_s=options.step, link=link)
    streaming_options = StreamingOptions(fragments=options.fragments, overlap_steps=options.overlap)
    everies = options.every or DEFAULT_EVERIES
    problem = _problem(streaming_options, max(everies))
    if (options.slowest is None) != (options.shards is None):
        given, missing = ("--slowest", "--shards") if options.shards is None else ("--shards", "--slowest")
        problem = f"argument {given}: needs {missing} as well"
    if problem is not None:
        return refuse("plan", problem)
    speeds = None if options.slowest is None else (options.slowest, options.shards)
    return print_to("plan", lambda: print("\n".join(plan_lines(job, everies, streaming_options, speeds))))


def _problem(streaming_options: StreamingOptions, every: int) -> str | None:
    """Return why the options cannot be used even with ``every`` steps between rounds, or None."""
    if streaming_options.fragments is not None and streaming_options.fragments > every:
        return f"argument --fragments: must be <= {every} with --every {every}, got {streaming_options.fragments}"
    if streaming_options.overlap_steps is not None and streaming_options.overlap_steps >= every:
        return f"argument --overlap: must be < {every} with --every {every}, got {streaming_options.overlap_steps}"
    return None


def plan_lines(
    job: Job, everies: Sequence[int], streaming_options: StreamingOptions, speeds: tuple[float, str] | None = None
) -> Iterator[str]:
    """Yield the lines of the plan: the job, a table of utilisations, a table of costs, and the recommended policy.

    With ``speeds``, the pair (ratio of step times, kind of data), also yield a recommendation for ranks of different
    speeds.
    """
    yield f"{plural(job.param_count, 'parameter')} ({size_in_words(job.model_nbytes)} in float32)"
    yield f"{job.rank_count:,} ranks, one per host, with {seconds_in_words(job.step_s)} per step"
    bandwidth, latency = _describe_link(job.link.bandwidth_nbytes_per_s), seconds_in_words(job.link.latency_s)
    yield f"{bandwidth} and {latency} of latency between hosts"
    all_rows, chosen = rows(job, streaming_options), recommend(job, everies, streaming_options)
    if len(everies) > 1:
        yield from ("", "Utilisation: share of the time in which a rank computes, by steps between rounds")
        yield _utilisations(job, all_rows, everies)
    every = everies[0] if isinstance(chosen, DataParallel) else chosen.every
    when = "in each step" if every == 1 else f"every {every:,} steps; of DDP, in each step"
    yield from ("", f"Cost of a round {when}")
    yield _costs(job, all_rows, every)
    yield ""
    yield from _notes(job, every)
    yield ""
    if speeds is not None:
        yield "If all ranks were equally fast:"
    yield from _recommendation(job, streaming_options, chosen)
    if speeds is not None:
        yield ""
        yield from outer_rules.lines(*speeds, every=chosen.every if isinstance(chosen, DiLoCo) else min(everies))


def _utilisations(job: Job, all_rows: Sequence[Row], everies: Sequence[int]) -> str:
    columns = sorted({1, *everies})
    lines = [("method", "wire", *(f"{every:,}" for every in columns))]
    for row in all_rows:
        shown = (1,) if row.averages_each_step else everies
        methods = [row.method(every) if every in shown else None for every in columns]
        cells = ("" if method is None else _percent(round_cost(job, method).utilisation) for method in methods)
        lines.append((row.name, row.codec.name, *cells))
    return aligned(lines, right=range(2, 2 + len(columns)))


def _costs(job: Job, all_rows: Sequence[Row], every: int) -> str:
    lines = [("method", "wire", "sends", "transfer", "waits", "utilisation", "memory", "staleness")]
    for row in all_rows:
        method = row.method(every)
        if method is not None:
            lines.append((row.name, row.codec.name, *_cells(round_cost(job, method))))
    return aligned(lines, right=range(2, 8))


def _cells(cost: RoundCost) -> tuple[str, str, str, str, str, str]:
    return (
        size_in_words(cost.sent_nbytes),
        seconds_in_words(cost.transfer_s),
        seconds_in_words(cost.wait_s),
        _percent(cost.utilisation),
        size_in_words(cost.memory_nbytes),
        plural(cost.staleness_steps, "step") if cost.staleness_steps else "",
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share >= 0.01 else f"{100 * share:.2g} %"


def _notes(job: Job, every: int) -> Iterator[str]:
    yield "sends: bytes that a rank sends in a round. It receives as many; in selective averaging, a"
    yield "replaced rank receives one model."
    yield "memory: in addition to the model, its gradients and the state of its optimizer."
    yield "staleness: steps that a rank trains between the capture of values and the use of their mean."
    yield f"topk sends {100 * TOPK_SHARE:.0f} % of the values, and the mean has those of all ranks."
    yield "float16 takes 1 % more bytes than bfloat16."
    yield "selective averaging: no rank waits, but the steps of the replaced ranks are lost."
    step_count = round_cost(job, SelectiveAveraging(every=every)).staleness_steps
    if step_count > every:
        yield f"One of its rounds takes {step_count:,} steps here, so average_every should not be smaller."


def _recommendation(job: Job, streaming_options: StreamingOptions, chosen: DataParallel | DiLoCo) -> Iterator[str]:
    utilisation = round_cost(job, chosen).utilisation
    share, target = _percent(utilisation), f"{100 * TARGET:.0f} %"
    if utilisation >= TARGET:
        yield f"Start from this, with a utilisation of {share}:"
        yield from _python(chosen)
        return
    yield f"Neither DDP nor DiLoCo without topk reaches a utilisation of {target}. The best one has {share}:"
    yield from _python(chosen)
    every = every_for_target(job, streaming_options)
    if every is not None:
        yield f"Streaming DiLoCo in 4 bits would reach {target} with a round every {plural(every, 'step')}."


def _python(method: DataParallel | DiLoCo) -> Iterator[str]:
    if isinstance(method, DiLoCo):
        yield f"    async with DiLoCoPolicy(model, optimizer, {_options(method)}) as policy:"
    elif method.codec == FLOAT32:
        yield "    model = torch.nn.parallel.DistributedDataParallel(model)"
    else:
        yield "    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks"
        yield "    model = torch.nn.parallel.DistributedDataParallel(model)"
        yield "    model.register_comm_hook(None, default_hooks.bf16_compress_hook)"


def _options(method: DiLoCo) -> str:
    """Return the arguments for DiLoCoPolicy that differ from its defaults, as Python code."""
    options = [f"average_every={method.every}"]
    if method.fragments > 1:
        options.append(f"fragments={method.fragments}")
    if method.overlap_steps:
        options.append(f"overlap_steps={method.overlap_steps}")
    if method.codec != FLOAT32:
        options.append(f'wire="{method.codec.name}"')
    return ", ".join(options)


def _describe_link(nbytes_per_s: float) -> str:
    bits = nbytes_per_s * 8
    for unit, multiple in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits >= multiple:
            return f"{bits / multiple:.4g} {unit}"
    return f"{bits:.4g} bit/s"
