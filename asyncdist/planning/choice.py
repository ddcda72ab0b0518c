"""Lists the methods to compare for a job, and recommends one that keeps the ranks busy."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from asyncdist.planning.costs import (
    BFLOAT16,
    FLOAT32,
    INT8,
    Q4,
    AverageAll,
    Codec,
    DataParallel,
    DiLoCo,
    Job,
    Method,
    SelectiveAveraging,
    overlapped_s,
    round_cost,
    topk,
)

#: Utilisation that a recommended method should reach.
TARGET: Final = 0.9
#: Fraction of the values that the top-k codec sends by default.
TOPK_SHARE: Final = 0.03
#: Maximum number of fragments of the model if ``--fragments`` is not given.
_FRAGMENT_COUNT_MAX: Final = 4
#: Maximum number of steps between averaging rounds that is suggested.
_EVERY_MAX: Final = 10**9
_CODECS: Final = (FLOAT32, BFLOAT16, INT8, Q4, topk(TOPK_SHARE))


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamingOptions:
    """The user's options for Streaming DiLoCo. None means a value that depends on the steps between rounds."""

    fragments: int | None = None
    overlap_steps: int | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the plan's tables: an averaging method with a codec.

    Attributes:
        method: Function that returns the method with a given number of steps between rounds, or None if it cannot be
            used.
        averages_each_step: Whether a round is always one step.
    """

    name: str
    codec: Codec
    method: Callable[[int], Method | None]
    averages_each_step: bool = False


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
    """Return the mildest averaging method with the target utilisation, or the method with the highest utilisation.

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
    """Return the smallest number of steps between rounds with which 4-bit Streaming DiLoCo has the target utilisation.

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
