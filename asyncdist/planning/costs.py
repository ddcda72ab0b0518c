"""Computes in closed form the bytes, seconds and memory of one round of averaging, and recommends a method.

Each rank has its own host, whose link carries the same number of bytes per second in both directions at once. A message
takes the link's latency, plus its bytes divided by the bandwidth. Encoding, sums and outer steps take no time, and all
ranks take steps at the same pace.

A sharded mean is computed in two phases. First each rank sends to each other rank the slice that this other rank
averages. Then each rank sends the mean of its own slice to all others. A rank sends, and receives, 2 S (k - 1) / k
bytes, where S is the encoded size of the values and k the number of ranks. A top-k mean contains the values of all
ranks, so it has k times as many bytes, but at most as many as in float32. In DiLoCo, a report to the leader, its
decision, and the requests for the slices precede the first phase. A slice is sent in chunks, and at the end of a phase
a rank still receives the last chunk of each other rank. While the ranks train, each message also waits for the end of a
step, because a rank sends and receives data only while a step awaits.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeAlias

#: Number of values in a block that shares one float32 scale.
_BLOCK_COUNT: Final = 256
_SCALE_NBYTES: Final = 4
_FLOAT32_NBYTES: Final = 4
#: Fraction of a step's time spent in the backward pass, which hides DDP's transfer. A forward pass takes about half as
#: long as a backward pass.
_BACKWARD_SHARE: Final = 2 / 3
#: Number of messages that precede the data of a DiLoCo exchange: a report, a decision and a request.
_CONTROL_COUNT: Final = 3
#: Number of consecutive messages in a DiLoCo exchange: control messages, slices and means.
_MESSAGE_COUNT: Final = _CONTROL_COUNT + 2
#: Number of chunks per slice. The limits on chunk size below take precedence.
_CHUNK_COUNT: Final = 32
_CHUNK_NBYTES_MIN: Final = 128 << 10
_CHUNK_NBYTES_MAX: Final = 4 << 20
#: Transfer time while ranks train, divided by the time on links that are never idle, as measured in the simulator.
_TRAINING_FACTOR: Final = 1.2
#: Default of the option ``replacement_ratio`` of selective averaging.
_REPLACEMENT_RATIO: Final = 0.2
#: Utilisation that a recommended method should reach.
TARGET: Final = 0.9
#: Fraction of the values that the top-k codec sends by default.
TOPK_SHARE: Final = 0.03
#: Maximum number of fragments of the model if ``--fragments`` is not given.
_FRAGMENT_COUNT_MAX: Final = 4
#: Maximum number of steps between averaging rounds that is suggested.
_EVERY_MAX: Final = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Describes the network link of a host.

    Attributes:
        bandwidth_nbytes_per_s: Bytes per second in each direction.
        latency_s: Seconds from the send of the first byte to its arrival on another host.
    """

    bandwidth_nbytes_per_s: float
    latency_s: float = 1e-3

    def seconds(self, nbytes: float) -> float:
        """Return the seconds from the send of a message until all of its bytes have arrived."""
        return self.latency_s + nbytes / self.bandwidth_nbytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Describes the ranks of a job, each on its own host.

    Attributes:
        param_count: Number of the model's parameters, which are stored in float32.
        step_s: Seconds per step of a rank.
    """

    param_count: int
    rank_count: int
    step_s: float
    link: Link

    @property
    def model_nbytes(self) -> int:
        """Size of the model in bytes."""
        return self.param_count * _FLOAT32_NBYTES


@dataclass(frozen=True, slots=True)
class Codec:
    """Describes the encoding of values on the wire.

    Attributes:
        name: Value of a policy's option ``wire``.
        nbytes_per_value: Mean number of bytes that encode one value.
        keeps_residual: Whether a rank adds the encoding error of a message to its next message.
        unites_values: Whether the mean contains exactly the values that at least one rank has sent.
    """

    name: str
    nbytes_per_value: float
    keeps_residual: bool = False
    unites_values: bool = False

    def mean_nbytes_per_value(self, rank_count: int) -> float:
        """Return the mean number of bytes that encode one value of the mean of ``rank_count`` ranks."""
        return min(self.nbytes_per_value * rank_count, _FLOAT32_NBYTES) if self.unites_values else self.nbytes_per_value


FLOAT32: Final = Codec("float32", _FLOAT32_NBYTES)
BFLOAT16: Final = Codec("bfloat16", 2)
INT8: Final = Codec("int8", 1 + _SCALE_NBYTES / _BLOCK_COUNT)
Q4: Final = Codec("q4", 0.5 + _SCALE_NBYTES / _BLOCK_COUNT)


def topk(share: float) -> Codec:
    """Return the codec that sends the fraction ``share`` of the values, each as 4 bytes with an index of 2 bytes."""
    return Codec("topk", 6 * share, keeps_residual=True, unites_values=True)


@dataclass(frozen=True, slots=True)
class DataParallel:
    """Averages gradients in each step, as DDP does. A round is one step.

    The estimate is the best case: recursive halving and doubling (Thakur et al., 2005), hidden by the backward pass.
    """

    codec: Codec = FLOAT32


@dataclass(frozen=True, slots=True)
class AverageAll:
    """Averages the weights of all ranks every ``every`` steps, as AverageAllPolicy or local SGD does.

    Each rank averages one slice.
    """

    every: int


@dataclass(frozen=True, slots=True)
class DiLoCo:
    """Averages the ranks' differences from common weights, for an outer optimizer (Douillard et al., 2023).

    With ``fragments`` or ``overlap_steps`` it is Streaming DiLoCo (Douillard et al., 2025). A round is the exchange of
    all fragments.

    Attributes:
        every: Steps between two exchanges of the same fragment.
        codec: Encoding of the differences.
        fragments: Number of equal parts of the model that are exchanged in turn, at most ``every``.
        overlap_steps: Steps that a rank trains while a fragment is exchanged, fewer than ``every``.
    """

    every: int
    codec: Codec = FLOAT32
    fragments: int = 1
    overlap_steps: int = 0

    @property
    def spacing_steps(self) -> float:
        """Steps from the start of one fragment's exchange to the start of the next."""
        return self.every / self.fragments


@dataclass(frozen=True, slots=True)
class SelectiveAveraging:
    """Replaces the worst ranks' weights with the others' mean, as AsyncSelectiveAveragingPolicy does. No rank waits.

    The estimate is for sharded means and the default fraction of replaced ranks.
    """

    every: int


Method: TypeAlias = DataParallel | AverageAll | DiLoCo | SelectiveAveraging


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundCost:
    """Describes the cost of one averaging round for the busiest rank.

    Attributes:
        sent_nbytes: Bytes that the rank sends.
        transfer_s: Seconds that the transfers of the round take.
        wait_s: Seconds in which the rank waits instead of computing.
        compute_s: Seconds in which the rank computes the steps of the round.
        memory_nbytes: Memory in addition to the model, its gradients and the state of its optimizer.
        staleness_steps: Steps from the capture of the values to the use of their mean.
    """

    sent_nbytes: float
    transfer_s: float
    wait_s: float
    compute_s: float
    memory_nbytes: float
    staleness_steps: int

    @property
    def utilisation(self) -> float:
        """Fraction of the time in which the rank computes."""
        return self.compute_s / (self.compute_s + self.wait_s)


def round_cost(job: Job, method: Method) -> RoundCost:
    """Return the cost of one averaging round of ``method``."""
    match method:
        case DataParallel():
            return _data_parallel(job, method)
        case AverageAll():
            return _average_all(job, method)
        case DiLoCo():
            return _diloco(job, method)
        case SelectiveAveraging():
            return _selective(job, method)


def _sharded_nbytes(job: Job, nbytes: float) -> float:
    """Return the bytes that a rank sends, and receives, if each rank averages one slice of ``nbytes`` bytes."""
    return 2 * nbytes * (job.rank_count - 1) / job.rank_count


def _data_parallel(job: Job, method: DataParallel) -> RoundCost:
    moved = _sharded_nbytes(job, job.param_count * method.codec.nbytes_per_value)
    message_count = 2 * math.ceil(math.log2(job.rank_count))
    transfer_s = moved / job.link.bandwidth_nbytes_per_s + message_count * job.link.latency_s
    return RoundCost(
        sent_nbytes=moved,
        transfer_s=transfer_s,
        wait_s=max(0.0, transfer_s - _BACKWARD_SHARE * job.step_s),
        compute_s=job.step_s,
        memory_nbytes=job.model_nbytes,  # size of DDP's buckets
        staleness_steps=0,
    )


def _average_all(job: Job, method: AverageAll) -> RoundCost:
    moved = _sharded_nbytes(job, job.model_nbytes)
    transfer_s = 2 * job.link.seconds(moved / 2)
    return RoundCost(
        sent_nbytes=moved,
        transfer_s=transfer_s,
        wait_s=transfer_s,
        compute_s=method.every * job.step_s,
        memory_nbytes=job.model_nbytes,  # a flat copy of the weights
        staleness_steps=0,
    )


def overlapped_s(job: Job, method: DiLoCo) -> float:
    """Return the seconds from a fragment's capture until all ranks have its mean, if the ranks train meanwhile."""
    return _MESSAGE_COUNT * job.step_s + _TRAINING_FACTOR * _fragment_s(job, method)


def _fragment_s(job: Job, method: DiLoCo) -> float:
    """Return the seconds from a fragment's capture until all ranks have its mean, if the ranks wait for it."""
    count = job.param_count / job.rank_count / method.fragments  # number of values in a slice
    seconds = _CONTROL_COUNT * job.link.latency_s
    for per_value in (method.codec.nbytes_per_value, method.codec.mean_nbytes_per_value(job.rank_count)):
        nbytes = count * per_value
        # At the end of a phase, a rank still receives the last chunk of each other rank's slice.
        seconds += job.link.seconds((job.rank_count - 1) * (nbytes + chunk_nbytes(nbytes)))
    return seconds


def chunk_nbytes(slice_nbytes: float) -> float:
    """Return the size in bytes of the chunks in which a slice of the values is sent, if the ranks wait for it."""
    size = min(max(slice_nbytes / _CHUNK_COUNT, _CHUNK_NBYTES_MIN), _CHUNK_NBYTES_MAX)
    return min(size, slice_nbytes)


def _diloco(job: Job, method: DiLoCo) -> RoundCost:
    codec = method.codec
    # A rank sends slices of its values, and means of its own slice.
    of_both = codec.nbytes_per_value + codec.mean_nbytes_per_value(job.rank_count)
    fragment_s = _fragment_s(job, method)
    late_s = overlapped_s(job, method) - method.overlap_steps * job.step_s
    # A fragment that takes longer than the spacing still occupies the link when the next fragment begins.
    busy_s = fragment_s - method.spacing_steps * job.step_s if method.overlap_steps else 0.0
    wait_s = min(fragment_s, max(0.0, late_s, busy_s))
    in_flight_count = max(1, math.ceil(method.overlap_steps / method.spacing_steps))
    # Memory is used for the contribution, the mean and a decoded copy. The common weights and the momentum are always
    # kept.
    in_flight = in_flight_count / method.fragments * (of_both / _FLOAT32_NBYTES + (codec != FLOAT32))
    copies = 2 + codec.keeps_residual + in_flight
    return RoundCost(
        sent_nbytes=_sharded_nbytes(job, job.param_count * of_both / 2),
        transfer_s=method.fragments * fragment_s,
        wait_s=method.fragments * wait_s,
        compute_s=method.every * job.step_s,
        memory_nbytes=copies * job.model_nbytes,
        staleness_steps=method.overlap_steps,
    )


def _selective(job: Job, method: SelectiveAveraging) -> RoundCost:
    """Return the cost of a round in which the donors (the ranks whose weights are averaged) compute the mean.

    Donors outnumber the replaced ranks. First each donor receives its slice of the other donors' weights. Then it sends
    the mean to each replaced rank.
    """
    replaced_count = max(1, math.floor(job.rank_count * _REPLACEMENT_RATIO + 0.5))
    donor_count = job.rank_count - replaced_count
    slices_s = job.link.seconds(job.model_nbytes * (donor_count - 1) / donor_count)
    transfer_s = slices_s + job.link.seconds(job.model_nbytes)
    return RoundCost(
        sent_nbytes=job.model_nbytes * (1 + (replaced_count - 1) / donor_count),
        transfer_s=transfer_s,
        wait_s=0.0,
        compute_s=method.every * job.step_s,
        memory_nbytes=job.model_nbytes,  # a donor's snapshot, or a replaced rank's accumulator
        staleness_steps=math.ceil(transfer_s / job.step_s),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamingOptions:
    """Stores the user's options for Streaming DiLoCo. None means a value that depends on the steps between rounds."""

    fragments: int | None = None
    overlap_steps: int | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """Describes a row of the plan's tables: an averaging method with a codec.

    Attributes:
        method: Function that returns the method with a given number of steps between rounds, or None if it cannot be
            used.
        averages_each_step: Whether a round is always one step.
    """

    name: str
    codec: Codec
    method: Callable[[int], Method | None]
    averages_each_step: bool = False


_CODECS: Final = (FLOAT32, BFLOAT16, INT8, Q4, topk(TOPK_SHARE))


def rows(job: Job, streaming_options: StreamingOptions) -> list[Row]:
    """Return the rows of the plan's tables: each averaging method with each codec."""
    return [
        Row("DDP", FLOAT32, lambda _: DataParallel(FLOAT32), averages_each_step=True),
        Row("DDP", BFLOAT16, lambda _: DataParallel(BFLOAT16), averages_each_step=True),
        Row("AverageAllPolicy", FLOAT32, AverageAll),
        *(Row("DiLoCo", codec, partial(DiLoCo, codec=codec)) for codec in _CODECS),
        *(
            Row("Streaming DiLoCo", codec, partial(streaming, job, codec, streaming_options=streaming_options))
            for codec in _CODECS
        ),
        Row("selective averaging", FLOAT32, SelectiveAveraging),
    ]


def streaming(job: Job, codec: Codec, every: int, streaming_options: StreamingOptions) -> DiLoCo | None:
    """Return Streaming DiLoCo with a round every ``every`` steps, or None if that is too few for the user's options.

    Without options, the number of fragments divides ``every``. The overlap is just long enough to hide the transfer of
    a fragment, but ends before the next fragment begins.
    """
    fragments, overlap_steps = streaming_options.fragments, streaming_options.overlap_steps
    if fragments is None:
        fragments = max(count for count in range(1, _FRAGMENT_COUNT_MAX + 1) if every % count == 0)
    if fragments > every:
        return None
    if overlap_steps is None:
        needed_s = overlapped_s(job, DiLoCo(every=every, codec=codec, fragments=fragments))
        overlap_steps = min(math.ceil(needed_s / job.step_s), math.ceil(every / fragments) - 1)
    if overlap_steps >= every or (overlap_steps == 0 and fragments == 1):
        return None
    return DiLoCo(every=every, codec=codec, fragments=fragments, overlap_steps=overlap_steps)


def recommend(job: Job, everies: Sequence[int], streaming_options: StreamingOptions) -> DataParallel | DiLoCo:
    """Return the mildest averaging method that reaches the target utilisation, or else the method that comes closest.

    ``everies`` are the allowed numbers of steps between rounds, in increasing order.

    Averaging in each step is milder than averaging every ``n`` steps, and a small ``n`` is milder than a large one. For
    each ``n``, DiLoCo is tried before Streaming DiLoCo, which adds staleness. Streaming DiLoCo uses only the smallest
    codec, because fewer bytes mean less staleness. 4-bit codecs are tried after all others. Top-k is never tried,
    because it needs error feedback.
    """
    tried = []
    for method in _from_mildest(job, everies, streaming_options):
        if round_cost(job, method).utilisation >= TARGET:
            return method
        tried.append(method)
    return max(tried, key=lambda each: round_cost(job, each).utilisation)


def _from_mildest(
    job: Job, everies: Sequence[int], streaming_options: StreamingOptions
) -> Iterator[DataParallel | DiLoCo]:
    yield DataParallel(codec=FLOAT32)
    yield DataParallel(codec=BFLOAT16)
    for codecs in ((FLOAT32, BFLOAT16, INT8), (Q4,)):
        for every in everies:
            if every > 1:  # DiLoCo in each step sends as much as DDP with the same codec, but is less exact
                yield from (DiLoCo(every=every, codec=codec) for codec in codecs)
                streamed = streaming(job, codecs[-1], every, streaming_options)
                if streamed is not None:
                    yield streamed


def every_for_target(job: Job, streaming_options: StreamingOptions) -> int | None:
    """Return the fewest steps between rounds with which 4-bit Streaming DiLoCo reaches the target utilisation.

    Return None if a billion steps are too few.
    """
    fragments = streaming_options.fragments or _FRAGMENT_COUNT_MAX
    fixed = replace(streaming_options, fragments=fragments)

    def reaches_target(every: int) -> bool:
        method = streaming(job, Q4, every, fixed) or DiLoCo(every=every, codec=Q4)
        return round_cost(job, method).utilisation >= TARGET

    candidates = range(fragments, _EVERY_MAX, fragments)
    place = bisect.bisect_left(candidates, True, key=reaches_target)
    return candidates[place] if place < len(candidates) else None
