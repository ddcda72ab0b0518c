"""Declares the options of :class:`protocols.DiLoCoPolicy`, and checks the numbers of tokens that a loop passes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import nn

from asyncdist import validation
from asyncdist.protocols.declared import boolean, integer, number, one_of, option, or_none
from asyncdist.protocols.diloco.fragments import FragmentPattern
from asyncdist.protocols.diloco.outer_optimizers import NESTEROV
from asyncdist.protocols.diloco.outer_step import OuterFactory, check_factory
from asyncdist.protocols.exchange.options import ExchangeOptionNames, ExchangeOptions
from asyncdist.tensors.codecs import Codec, find_codec

#: Weights of the ranks' contributions: equal, or the numbers of tokens passed to `step`.
Weighting: TypeAlias = Literal["equal", "tokens"]
#: Combination of the ranks' differences: their mean, or for each tensor the mean norm times the mean direction.
Merge: TypeAlias = Literal["mean", "radial"]
#: Whether a step whose mean is due but has not arrived waits for the mean, or continues without it.
Late: TypeAlias = Literal["wait", "skip"]
#: Smallest number of tokens in a step, and smallest weight of a contribution that is weighted by tokens.
LEAST_TOKENS: Final = 1e-9
LOSES_VALUES: Final = (
    "wire='topk' without error_feedback loses the values that it does not send; pass error_feedback=0.95 or 1.0"
)
_ADDRESS: Final = re.compile(r" at 0x[0-9a-fA-F]+")
_GROUP: Final = "fragments and bytes"
_STRAGGLERS: Final = "stragglers and rounds"


class DiLoCoOptionNames(ExchangeOptionNames, total=False):
    """The options of :class:`protocols.DiLoCoPolicy`, except ``average_every``."""

    outer_optimizer: OuterFactory | None
    fragments: int
    fragment_pattern: FragmentPattern
    overlap_steps: int
    mixing: float
    wire: str | Codec
    error_feedback: float | None
    weights: Weighting
    merge: Merge
    warmup_steps: int
    late: Late
    eager: bool
    quorum: int | None
    grace_s: float
    replica_size: int


def outer_factory(name: str, value: Any) -> Any:
    """Check and return the option that makes an outer optimizer."""
    del name
    check_factory(value)
    return value


def _codec(name: str, value: Any) -> Codec:
    del name
    return find_codec(value)


def _pattern(name: str, value: Any) -> FragmentPattern:
    if value == "strided" or value == "balanced":
        return "strided" if value == "strided" else "balanced"
    allowed = "'strided', 'balanced' or a list of lists of module names such as [['h.0', 'h.1'], ['h.2', 'h.3']]"
    if isinstance(value, str):
        validation.refuse(name, value, allowed)
    if not isinstance(value, Sequence) or not all(
        isinstance(names, Sequence) and not isinstance(names, str) and all(isinstance(each, str) for each in names)
        for names in value
    ):
        validation.refuse(name, value, allowed, TypeError)
    return tuple(tuple(names) for names in value)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiLoCoOptions(ExchangeOptions):
    """Options of DiLoCo, Streaming DiLoCo, local SGD and the other methods of :class:`protocols.DiLoCoPolicy`."""

    outer_optimizer: OuterFactory | None = option(
        "Function that makes the outer optimizer of a list of flat parameters; by default SGD with lr 0.7 and Nesterov "
        "momentum 0.9, as in the DiLoCo paper. None averages the weights themselves (local SGD).",
        or_none(outer_factory),
        default=NESTEROV,
        shown="functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)",
    )
    weights: Weighting = option(
        'Weights of the ranks\' contributions: `"equal"`, or `"tokens"`, the sum of `step(tokens=...)` since the '
        "previous contribution.",
        one_of(Weighting),
        default="equal",
        is_agreed=True,
    )
    merge: Merge = option(
        'Combination of the differences: `"mean"`, or `"radial"` for the mean of their norms times their mean '
        "direction, tensor by tensor (Decoupled DiLoCo). Embeddings always take the mean.",
        one_of(Merge),
        default="mean",
        is_agreed=True,
    )
    warmup_steps: int = option(
        "Number of first steps in which the ranks average in each step (post-local SGD).",
        integer(0),
        default=0,
        is_agreed=True,
    )
    fragments: int = option(
        "Number of parts of the model that are averaged in turn (Streaming DiLoCo), from 1 to "
        "`average_every`. Each part is averaged every `average_every` steps.",
        integer(1, "; fragment_pattern lists the modules of each fragment"),
        default=1,
        group=_GROUP,
        is_agreed=True,
    )
    fragment_pattern: FragmentPattern = option(
        'Division into fragments: `"strided"` (layer i belongs to fragment i modulo `fragments`), `"balanced"` (equal '
        "sizes), or a list with the module names of each fragment.",
        _pattern,
        default="strided",
        group=_GROUP,
        is_agreed=True,
    )
    overlap_steps: int = option(
        "Number of steps between the capture of a contribution and the step that applies the average, less than "
        "`average_every`. The exchange is hidden behind these steps.",
        integer(0),
        default=0,
        group=_GROUP,
        is_agreed=True,
    )
    mixing: float = option(
        "Share of the rank's own weights that it keeps when an average is applied, 0 to 1.",
        validation.fraction,
        default=0.0,
        group=_GROUP,
        is_agreed=True,
    )
    wire: Codec = option(
        'Encoding of the data: `"float32"`, or for differences `"bfloat16"`, `"float16"`, `"int8"`, `"q4"`, `"topk"` '
        "(see `asyncdist.tensors.codecs`). `DiLoCoPolicy` without an outer optimizer only allows encodings for states.",
        _codec,
        default="float32",
        group=_GROUP,
    )
    error_feedback: float | None = option(
        "Decay, 0 to 1, of the encoding error that is added to the rank's next contribution; None adds no error. 1 "
        "loses nothing; MuLoCo and SparseLoCo use 0.9 to 0.95.",
        or_none(validation.fraction),
        default=None,
        group=_GROUP,
        is_agreed=True,
    )
    late: Late = option(
        'Whether a step waits for a mean that has not arrived when it is due (`"wait"`). With `"skip"`, no step waits: '
        "the mean is applied in the first step after its arrival, the rank keeps its progress since the capture, and "
        "the fragment is captured again only then. Results then depend on timing.",
        one_of(Late),
        default="wait",
        group=_STRAGGLERS,
        is_agreed=True,
    )
    quorum: int | None = option(
        "Number of contributions that complete a round, from 1 to the number of members; fewer if members are lost "
        "or leave. The contribution of a late rank counts in the next round. None waits for all members. "
        "Results then depend on timing.",
        or_none(integer(1)),
        default=None,
        group=_STRAGGLERS,
        is_agreed=True,
    )
    grace_s: float = option(
        "Seconds to wait for further contributions once a quorum of ranks has contributed.",
        number(">= 0 seconds", 0.0),
        default=0.0,
        group=_STRAGGLERS,
        is_agreed=True,
    )
    eager: bool = option(
        "Whether steps are eager: each rank moves its anchor by its own share of this round and the other ranks' "
        "shares of the previous round. No rank then waits for the average of this round. The ranks' anchors then "
        "differ. They are averaged at the end and in checkpoints.",
        boolean,
        default=False,
        group=_STRAGGLERS,
        is_agreed=True,
    )
    replica_size: int = option(
        "Number of consecutive ranks that train one replica of the model together, under DDP or `fully_shard`. The "
        "replicas average with each other; a replica counts as one contributor. 1 means that each rank has its own "
        "model.",
        integer(1),
        default=1,
        group="members and timeouts",
        is_agreed=True,
    )

    def check_combination(self, average_every: int) -> None:
        """Raise ValueError if options contradict each other or ``average_every``."""
        if self.fragments > average_every:
            validation.refuse("fragments", self.fragments, f"at most average_every ({average_every})")
        if self.overlap_steps >= average_every:
            allowed = f"less than average_every ({average_every}), or a fragment would be due while it is in flight"
            validation.refuse("overlap_steps", self.overlap_steps, allowed)
        if self.outer_optimizer is None and not self.wire.for_states:
            allowed = "'float32' or 'bfloat16' without an outer optimizer, since whole weights are sent"
            validation.refuse("wire", self.wire.name, allowed)
        if self.error_feedback is not None and self.outer_optimizer is None:
            validation.refuse(
                "error_feedback", self.error_feedback, "None without an outer optimizer, which sends no differences"
            )
        if self.merge == "radial" and self.outer_optimizer is None:
            allowed = "'mean' without an outer optimizer, since whole weights are averaged"
            validation.refuse("merge", self.merge, allowed)
        if self.eager:
            self._check_eager_combination()
        self._check_quorum()

    def _check_quorum(self) -> None:
        if self.quorum is None:
            if self.grace_s:
                validation.refuse("grace_s", self.grace_s, "0 without a quorum, since a round then waits for all ranks")
            return
        if self.outer_optimizer is None:
            allowed = (
                "None without an outer optimizer, because the whole weights of a late rank would undo the rounds that "
                "it has missed. To average the weights, pass functools.partial(torch.optim.SGD, lr=1.0)"
            )
            validation.refuse("quorum", self.quorum, allowed)
        if self.replica_size > 1:
            validation.refuse("quorum", self.quorum, "None with replicas of several ranks")
        if self.eager:
            validation.refuse(
                "quorum", self.quorum, "None with eager=True, since all ranks make the same number of eager steps"
            )

    def _check_eager_combination(self) -> None:
        if self.outer_optimizer is None:
            raise ValueError(
                "outer_optimizer must be a factory with eager=True, got None: an eager step is a step of the outer "
                "optimizer. To average the weights, pass functools.partial(torch.optim.SGD, lr=1.0)"
            )
        for name, value, allowed in (
            ("overlap_steps", 0, "0 with eager=True, since a mean travels until its fragment is due again"),
            ("warmup_steps", 0, "0 with eager=True, since in a warm-up each step waits for its own mean"),
            (
                "late",
                "wait",
                "'wait' with eager=True, since ranks must average their anchors after the same round",
            ),
            (
                "weights",
                "equal",
                "'equal' with eager=True, since a rank does not know the others' tokens when it steps",
            ),
        ):
            given = getattr(self, name)
            if given != value:
                validation.refuse(name, given, allowed)

    def agreed(self) -> dict[str, Any]:
        """Return the options that must be equal on all ranks, by name, as JSON values."""
        outer = "None" if self.outer_optimizer is None else described(self.outer_optimizer)
        return {
            **ExchangeOptions.agreed(self),
            "wire": text_of(self.wire),
            "outer_optimizer": outer,
        }


def check_has_whole_tensors(merge: Merge, *, holds_shards: bool) -> None:
    """Raise ValueError if ``merge`` needs whole tensors, but each rank has only shards of them."""
    if merge == "radial" and holds_shards:
        allowed = "'mean' if replicas are sharded, since no rank has whole tensors; replicas under DDP have them"
        validation.refuse("merge", merge, allowed)


def described(factory: OuterFactory) -> str:
    """Return an outer optimizer's class and non-default options, by which the ranks' optimizers are compared.

    The factory is called, because functions with equal names may build different optimizers.
    """
    optimizer = factory([nn.Parameter(torch.ones(2, dtype=torch.float32, device="cpu"))])
    defaults = {name: text_of(each.default) for name, each in inspect.signature(type(optimizer)).parameters.items()}
    (first, *_) = optimizer.param_groups
    options = {name: text_of(value) for name, value in sorted(first.items()) if name != "params"}
    changed = [f"{name}={value}" for name, value in options.items() if value != defaults.get(name)]
    return f"{type(optimizer).__name__}({', '.join(changed)})"


def text_of(value: Any) -> str:
    """Return an option's value as a string that is equal on all ranks.

    Equal numbers of different types give equal strings. Memory addresses, as in a function's ``repr``, are left out.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return _ADDRESS.sub("", repr(float(value) if is_number else value))


class StepTokens:
    """Checks that the training loop passes the number of tokens in all steps or in none.

    Args:
        weights: Option ``weights`` of the policy. With ``"equal"``, no numbers of tokens are allowed.
    """

    def __init__(self, weights: str) -> None:
        self._weights = weights
        self._has_tokens: bool | None = None  # None before the first step

    def count(self, tokens: float | None, metric: object) -> float:
        """Return the number of tokens or examples of a step: ``tokens``, or 1 if it is None.

        Args:
            metric: First positional argument of ``step``, which must not be a number of tokens. None if the policy's
                first argument is a metric.

        Raises:
            TypeError: The weights are ``"tokens"``, and the number of tokens was passed by position.
            ValueError: ``tokens`` is not a finite number above 0, is passed although the weights do not use it, or is
                passed in some steps but not in others.
        """
        if tokens is None and metric is not None and self._weights != "equal":
            raise TypeError(
                "step() takes the number of tokens by name: step(tokens=n). A positional number is a metric, and has "
                "no effect on the weights"
            )
        count = 1.0
        if tokens is not None:
            count = validation.real(
                "tokens", tokens, "a finite number > 0 (of a tensor, tokens.item())", low=LEAST_TOKENS
            )
            if self._weights == "equal":
                raise ValueError(
                    f"tokens must be None with weights='equal', under which it has no effect, got {tokens!r:.80}; pass "
                    "weights='tokens' to the policy, or call step() without tokens"
                )
        if self._has_tokens not in (None, tokens is not None):
            given, other = ("None", "a number") if tokens is None else (repr(tokens), "None")
            raise ValueError(
                f"with weights={self._weights!r}, which adds up tokens, tokens must be passed in all steps or in no "
                f"step, got {given} after steps with {other}; a step without tokens would count as 1"
            )
        self._has_tokens = tokens is not None
        return count
