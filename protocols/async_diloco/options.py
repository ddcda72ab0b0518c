"""Declares the options of :class:`protocols.AsyncDiLoCoPolicy`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from asyncdist import validation
from asyncdist.protocols.async_diloco.arrivals import ArrivalWeighting
from asyncdist.protocols.async_diloco.corrections import Correction, StalenessWeight
from asyncdist.protocols.async_diloco.delayed_nesterov import DelayedNesterov
from asyncdist.protocols.declared import boolean, function, integer, like, number, one_of, option, or_none
from asyncdist.protocols.diloco.foreign_options import FOREIGN_OPTIONS as DILOCO_FOREIGN_OPTIONS
from asyncdist.protocols.diloco.options import DiLoCoOptions, Late, Merge, described, outer_factory, text_of
from asyncdist.protocols.diloco.outer_step import OuterFactory
from asyncdist.protocols.exchange.options import ExchangeOptions
from asyncdist.protocols.options import MemberOptions, OptimizerState
from asyncdist.protocols.selective.islands.layout import IslandOptions
from asyncdist.protocols.step_info import PolicyEvent
from asyncdist.tensors.codecs import Codec

#: By default, the anchor moves by each difference divided by 1 + its staleness. One contribution from each of k equally
#: fast ranks then moves the anchor by about their mean difference, for any k.
DEFAULT_OUTER: Final = functools.partial(torch.optim.SGD, lr=1.0)
DEFAULT_CORRECTION: Final = StalenessWeight(power=1.0, first_round=True)
_ANCHOR_IS_WHOLE: Final = "DiLoCoPolicy has this option; here the anchor and each contribution are whole"
#: Names of options of other policies and libraries, each with a hint for the error that is raised if it is passed.
FOREIGN_OPTIONS: Final = {
    **{
        name: text
        for name, text in DILOCO_FOREIGN_OPTIONS.items()
        if name not in ("matchmaking_time", "averaging_timeout")
    },
    **dict.fromkeys(("fragments", "fragment_pattern", "model_fragments", "num_fragments"), _ANCHOR_IS_WHOLE),
    **dict.fromkeys(("overlap_steps", "fragment_sync_delay", "tau", "warmup_steps"), _ANCHOR_IS_WHOLE),
    **dict.fromkeys(("mixing", "fragment_update_alpha", "alpha"), _ANCHOR_IS_WHOLE),
    **dict.fromkeys(
        ("delay", "buffer_size", "num_updates", "N"),
        "outer_optimizer=functools.partial(protocols.DelayedNesterov, lr=0.7, delay=N) updates the momentum at every "
        "N-th contribution",
    ),
    **dict.fromkeys(("staleness", "staleness_weight", "max_staleness"), "use correct=protocols.StalenessWeight()"),
    **dict.fromkeys(("averaging_timeout", "matchmaking_time"), "use grace_s, in seconds"),
    **dict.fromkeys(("grace", "grace_period", "grace_share"), "use grace_s, in seconds, or grace_steps, in steps"),
    **dict.fromkeys(("min_replica_size", "min_replicas", "target_group_size"), "use quorum, a number of ranks"),
    **dict.fromkeys(("dylu", "dynamic_local_updates"), "use dynamic_steps=True"),
    **dict.fromkeys(("global_lr", "outer_lr", "server_lr"), "here outer_optimizer has the outer learning rate"),
    **dict.fromkeys(("num_lps", "num_regions"), "use islands or island_size"),
    **dict.fromkeys(("lps_opt_config", "regional_optimizer"), "use outer_optimizer"),
    "gps_opt_config": "use global_optimizer",
    "local_updates_accumulation": "use global_every",
    "model_merge_weight": "use merge_weight",
    **dict.fromkeys(
        ("delay_state_averaging", "delay_grad_averaging", "delay_optimizer_step"),
        "here ranks wait for each other only with late='wait'",
    ),
}
#: Default outer optimizer of the global server of islands, from HALoS. HALoS's learning rate of 0.15 is for one
#: arrival, but ``lr`` is for a window of two arrivals.
GLOBAL_NESTEROV: Final = functools.partial(DelayedNesterov, lr=0.3, momentum=0.5, delay=2)
_STRAGGLERS: Final = "stragglers and rounds"
_MEMBERS: Final = "members and timeouts"
_ISLANDS: Final = "islands"
_SMALLEST: Final = validation.SMALLEST


class AsyncDiLoCoOptionNames(MemberOptions, total=False):
    """The options of :class:`protocols.AsyncDiLoCoPolicy`, except ``average_every``."""

    outer_optimizer: OuterFactory | None
    correct: Correction | None
    dynamic_steps: bool
    quorum: int
    grace_s: float
    grace_steps: float
    late: Late
    weights: ArrivalWeighting
    merge: Merge
    wire: str | Codec
    error_feedback: float | None
    optimizer_state: OptimizerState
    mirror_every: int | None
    replica_size: int
    islands: int | None
    island_size: int | None
    global_optimizer: OuterFactory | None
    global_every: int | None
    merge_weight: float | None
    on_event: Callable[[PolicyEvent], None] | None
    drain_timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncDiLoCoOptions(ExchangeOptions):
    """Options of asynchronous DiLoCo."""

    outer_optimizer: OuterFactory | None = option(
        "Function that makes the outer optimizer of a list of flat parameters. It makes a step for each version of the "
        "anchor, so use smaller learning rates than in synchronous DiLoCo. By default, each difference is divided by 1 "
        "+ its staleness and subtracted from the anchor: `functools.partial(torch.optim.SGD, lr=1.0)`, with "
        "`correct=protocols.StalenessWeight(power=1.0, first_round=True)`.",
        or_none(outer_factory),
        default=None,
    )
    correct: Correction | None = option(
        "Function of a tensor's difference, the outer momentum (None before the first step) and the staleness in "
        "versions, which returns the difference to apply; it may change the difference in place. Only with an "
        "`outer_optimizer`.",
        function("None or a callable of a difference, the momentum and the staleness"),
        default=None,
    )
    weights: ArrivalWeighting = option(
        'Weights of the contributions to one version: `"equal"`, `"tokens"`, the sum of `step(tokens=...)` since the '
        'rank\'s previous contribution, or `"rate"`, the tokens times the tokens per step (Decoupled DiLoCo).',
        one_of(ArrivalWeighting),
        default="equal",
        is_agreed=True,
    )
    merge: Merge = like(DiLoCoOptions, "merge")
    wire: Codec = like(DiLoCoOptions, "wire")
    error_feedback: float | None = like(DiLoCoOptions, "error_feedback")
    dynamic_steps: bool = option(
        "Whether slower ranks make fewer steps per contribution, in proportion to their speed, and at least one. The "
        "fastest rank makes `average_every` steps. The numbers of steps then depend on the measured times.",
        boolean,
        default=False,
        group=_STRAGGLERS,
        is_agreed=True,
    )
    quorum: int = option(
        "Number of ranks whose contributions make a version of the anchor, from 1 to the number of members; fewer if "
        "members are lost or leave. 1 applies each contribution when it arrives.",
        integer(1),
        default=1,
        group=_STRAGGLERS,
        is_agreed=True,
    )
    grace_s: float = like(DiLoCoOptions, "grace_s")
    grace_steps: float = option(
        "Grace period in training steps instead of `grace_s`, at most `average_every`: a rank should have the new "
        "anchor within this number of steps after its contribution, and the leader waits 0.9 of the time that is left. "
        'Only with `late="skip"`, so that no rank waits.',
        number("a number of steps >= 0", 0.0),
        default=0.0,
        group=_STRAGGLERS,
        is_agreed=True,
    )
    late: Late = option(
        'Whether a step waits for the anchor with its contribution (`"wait"`). With `"skip"`, no step waits: the '
        "anchor is applied in the first step after its arrival, and the rank keeps its progress since the capture.",
        one_of(Late),
        default="skip",
        group=_STRAGGLERS,
        is_agreed=True,
    )
    mirror_every: int | None = option(
        "Number of versions after which a rank receives a copy of the outer optimizer's state, from which training "
        "continues if the leader is lost. By default the number of members; 0 for no copies.",
        or_none(integer(0)),
        default=None,
        group=_MEMBERS,
        is_agreed=True,
    )
    replica_size: int = like(DiLoCoOptions, "replica_size")
    islands: int | None = option(
        "Number of islands of equal size, each with a regional server, into which the ranks are divided.",
        or_none(integer(1, " or None")),
        default=None,
        group=_ISLANDS,
        is_agreed=True,
    )
    island_size: int | None = option(
        "Number of ranks in each island, at least 2, instead of `islands`.",
        or_none(integer(2, " or None")),
        default=None,
        group=_ISLANDS,
        is_agreed=True,
    )
    global_optimizer: OuterFactory | None = option(
        "Outer optimizer of the global server of islands; by default "
        "`functools.partial(protocols.DelayedNesterov, lr=0.3, momentum=0.5, delay=2)`.",
        or_none(outer_factory),
        default=None,
        group=_ISLANDS,
    )
    global_every: int | None = option(
        "Number of versions of an island's anchor between two contributions to the global server; 32 by default.",
        or_none(integer(1, " or None")),
        default=None,
        group=_ISLANDS,
        is_agreed=True,
    )
    merge_weight: float | None = option(
        "Weight, above 0 and up to 1, with which the global anchor is merged into an island's; 0.25 by default.",
        or_none(number("a number > 0 and <= 1, or None", _SMALLEST, 1.0)),
        default=None,
        group=_ISLANDS,
        is_agreed=True,
    )
    drain_timeout_s: float = option(
        "Seconds to wait, when leaving, for the answer to the last contribution and, as the leader, for the successor.",
        validation.seconds,
        default=60.0,
        group=_MEMBERS,
    )

    def __post_init__(self) -> None:
        """Check each value, and set the defaults of the outer step and of islands."""
        ExchangeOptions.__post_init__(self)
        if self.outer_optimizer is None:
            if self.correct is not None:
                validation.refuse("correct", self.correct, "None unless outer_optimizer is set")
            object.__setattr__(self, "outer_optimizer", DEFAULT_OUTER)
            object.__setattr__(self, "correct", DEFAULT_CORRECTION)
        defaults = (("global_optimizer", GLOBAL_NESTEROV), ("global_every", 32), ("merge_weight", 0.25))
        for name, default in defaults:
            value = getattr(self, name)
            if value is not None and not self.layout.are_on:
                validation.refuse(name, value, "None unless islands or island_size is set")
            object.__setattr__(self, name, default if value is None and self.layout.are_on else value)
        if self.replica_size > 1 and self.layout.are_on:
            validation.refuse("replica_size", self.replica_size, "1 with islands")

    @property
    def layout(self) -> IslandOptions:
        """Division into islands. Raises ValueError if both ``islands`` and ``island_size`` are given."""
        return IslandOptions(islands=self.islands, island_size=self.island_size)

    def of_global_server(self) -> AsyncDiLoCoOptions:
        """Return the options with which the global server applies the contributions of islands."""
        assert self.global_optimizer is not None, "there are islands"
        return replace(
            self,
            outer_optimizer=self.global_optimizer,
            quorum=1,
            grace_s=0.0,
            grace_steps=0.0,
            correct=None,
            weights="equal",
            dynamic_steps=False,
        )

    def check_grace(self, average_every: int) -> None:
        """Raise ValueError if ``grace_steps`` is too large, or contradicts ``grace_s`` or ``late``."""
        if not self.grace_steps:
            return
        if self.grace_s:
            raise ValueError(
                f"only one of grace_s and grace_steps may be set, got grace_s={self.grace_s} and "
                f"grace_steps={self.grace_steps}"
            )
        if self.late == "wait":
            validation.refuse(
                "grace_steps", self.grace_steps, "0 with late='wait', under which each step waits; use grace_s"
            )
        if self.grace_steps > average_every:
            validation.refuse("grace_steps", self.grace_steps, f"at most average_every ({average_every})")

    def check_saved(self, outer: Mapping[str, Any]) -> None:
        """Raise ValueError if the default outer optimizer would load another optimizer's saved options.

        The default correction does not fit another optimizer's options, such as its learning rate.
        """
        if self.outer_optimizer is not DEFAULT_OUTER:
            return
        parameter = torch.nn.Parameter(torch.empty(0, dtype=torch.float32, device="cpu"))
        default = self.outer_optimizer([parameter]).param_groups[0]
        for group in outer["param_groups"]:
            names = [name for name in ("lr", "momentum", "nesterov") if group.get(name) != default[name]]
            if names:
                saved = ", ".join(f"{name}={group.get(name)}" for name in names)
                raise ValueError(
                    f"outer_optimizer must be that of the run that saved the state, got None, and the state is of "
                    f"{outer['optimizer']} with {saved}. If that run used the former default, pass "
                    "outer_optimizer=functools.partial(torch.optim.SGD, lr=0.07, momentum=0.9, nesterov=True)"
                )

    def check_members(self, count: int) -> None:
        """Raise ValueError if the quorum is larger than ``count``, the number of members or replicas."""
        if self.quorum > count:
            counted = "members" if self.replica_size == 1 else "replicas"
            validation.refuse("quorum", self.quorum, f"from 1 to the number of {counted} ({count})")

    def agreed(self) -> dict[str, Any]:
        """Return the options that must be equal on all ranks, by name, as JSON values."""
        return {
            **ExchangeOptions.agreed(self),
            "wire": text_of(self.wire),
            "outer_optimizer": "None" if self.outer_optimizer is None else described(self.outer_optimizer),
            "global_optimizer": "None" if self.global_optimizer is None else described(self.global_optimizer),
            "correct": text_of(self.correct),
        }


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options of the leader's server, which applies contributions to the anchor (common weights).

    Attributes:
        average_every: Number of steps until the fastest worker's next contribution.
        mirror_every: Number of versions between two copies of the outer optimizer's state; 0 for no copies.
        islands: On the global server, the number of each rank's island; None if the workers are ranks.
    """

    own: AsyncDiLoCoOptions
    average_every: int
    mirror_every: int
    islands: Mapping[int, int] | None = None

    def worker_of(self, rank: int) -> int:
        """Return the number of the worker that ``rank`` represents: its island on the global server, else itself."""
        return rank if self.islands is None else self.islands[rank]

    def sender_of(self, rank: int) -> int | None:
        """Return ``rank``, or None on the global server, where contributions are numbered by islands' versions."""
        return rank if self.islands is None else None
