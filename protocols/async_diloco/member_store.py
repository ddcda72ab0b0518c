"""Keeps a member's newest anchor (common weights), unanswered contribution, and copy of the outer optimizer's state.

A complete block is never changed, so it can be offered to other ranks without a copy.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

from torch import Tensor

from asyncdist.protocols.async_diloco.blocks import Block, Layouts, copy_all
from asyncdist.protocols.async_diloco.messages import Applications, Applied, Arrived, MemberState

logger = logging.getLogger("protocols.async_diloco.member_store")


def renumbered(applied: Applications, sources: Mapping[int, int]) -> Applications:
    """Return ``applied``, the contributions in a saved anchor, with the ranks of this run.

    Args:
        sources: Rank of the saved run, by rank of this run.
    """
    saved = dict(applied)
    return tuple((rank, saved[source]) for rank, source in sorted(sources.items()) if source in saved)


def sources_of(state: Mapping[str, Any], rank: int, ranks: Sequence[int]) -> dict[int, int]:
    """Return the rank of the saved run that each of ``ranks`` continues.

    Args:
        state: Saved state of the policy on ``rank``, this rank.

    Raises:
        ValueError: Another rank saved the state, and ``load_population`` has not loaded it.
    """
    sources = state["sources"]
    if sources is None and state["rank"] != rank:
        raise ValueError(
            f"a state of AsyncDiLoCoPolicy must be loaded by the rank that saved it, {state['rank']}, or by "
            f"load_population(), got it on rank {rank}; the anchor counts the contributions of each rank"
        )
    return {**{each: each for each in ranks}, **dict(sources or ())}


def saved_outer(state: Mapping[str, Any]) -> tuple[int, Tensor] | None:
    """Return the version and bytes of the outer optimizer's state in a policy's saved state, or None."""
    served, copy = state["served"], state["outer"]
    return copy if served is None or "outer" not in served else (served["version"], served["outer"])


@dataclass(frozen=True, slots=True, eq=False)
class Outstanding:
    """Holds a contribution that the leader has not answered yet."""

    sequence: int
    block: Block
    report: Arrived

    def state(self) -> dict[str, Any]:
        """Return the contribution as a dict for checkpoints."""
        return {"sequence": self.sequence, "encoded": self.block[0].clone(), "report": astuple(self.report)}

    @classmethod
    def of(cls, state: Mapping[str, Any], layouts: Layouts) -> Outstanding:
        """Create a contribution from a result of :meth:`state`."""
        block = layouts.new_contribution()
        copy_all([state["encoded"]], [block[0]])
        return cls(state["sequence"], block, Arrived(*state["report"]))


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """Holds a received anchor (common weights) that contains this member's last contribution."""

    report: Applied
    block: Block

    def held(self) -> HeldAnchor:
        """Return the common weights without the leader's report on them."""
        return HeldAnchor(self.report.version, self.report.applied, self.block, self.report.merged)

    def state(self) -> dict[str, Any]:
        """Return the answer as a dict for checkpoints."""
        return {"values": [value.clone() for value in self.block[1]], "report": astuple(self.report)}

    @classmethod
    def of(cls, state: Mapping[str, Any], layouts: Layouts, sources: Mapping[int, int]) -> Answer:
        """Create an answer from a result of :meth:`state`. See :func:`renumbered` for ``sources``."""
        report = Applied(*state["report"])
        report = replace(report, applied=renumbered(report.applied, sources))
        return cls(report, layouts.loaded_anchor(state["values"]))


@dataclass(frozen=True, slots=True, eq=False)
class HeldAnchor:
    """Holds an anchor (common weights) that a member can offer to a new leader.

    Attributes:
        applied: Contributions that the anchor contains.
        merged: Number of the island's last contribution whose answer was merged into the anchor; 0 without islands.
    """

    version: int
    applied: Applications
    block: Block
    merged: int = 0

    def state(self) -> dict[str, Any]:
        """Return the common weights as a dict for checkpoints."""
        values = [value.clone() for value in self.block[1]]
        return {"version": self.version, "applied": self.applied, "values": values, "merged": self.merged}

    @classmethod
    def of(cls, state: Mapping[str, Any], layouts: Layouts, sources: Mapping[int, int] | None = None) -> HeldAnchor:
        """Create an anchor from a result of :meth:`state`. See :func:`renumbered` for ``sources``."""
        applied = tuple((rank, sequence) for rank, sequence in state["applied"])
        applied = applied if sources is None else renumbered(applied, sources)
        return cls(state["version"], applied, layouts.loaded_anchor(state["values"]), state["merged"])


@dataclass(slots=True, eq=False)
class MemberStore:
    """Keeps the state of one member that a new leader may need.

    Attributes:
        layouts: Layouts of anchors and contributions.
        base: Anchor from which the member trains.
        sequence: Sequence number of the member's last contribution.
        outstanding: The last contribution, until it is answered.
        answer: Answer to the last contribution, until it is applied.
        inherited: Anchor received from a leaving leader or from a saved state, or None.
        outer: Version and bytes of the newest copy of the outer optimizer's state, or None.
        registration: Answer to this rank's registration as an island's server, until it is used.
        on_answer: Function to call when the answer to a contribution has arrived.
    """

    layouts: Layouts
    base: HeldAnchor
    sequence: int = 0
    outstanding: Outstanding | None = None
    answer: Answer | None = None
    inherited: HeldAnchor | None = None
    outer: tuple[int, Tensor] | None = None
    registration: HeldAnchor | None = None
    on_answer: Callable[[], None] = lambda: None

    @property
    def newest(self) -> HeldAnchor:
        """The newest anchor (version of the workers' common weights) that this member has."""
        return max(self._anchors(), key=lambda held: held.version)

    def anchor_of(self, version: int) -> HeldAnchor | None:
        """Return this member's common weights with ``version``, or None."""
        return next((held for held in self._anchors() if held.version == version), None)

    def _anchors(self) -> list[HeldAnchor]:
        found = [self.base]
        if self.inherited is not None:
            found.append(self.inherited)
        if self.answer is not None:
            found.append(self.answer.held())
        return found

    def begin(self, state: Mapping[str, Any]) -> None:
        """Start with a saved anchor and, if there is one, the saved state of the outer optimizer."""
        self.base = HeldAnchor.of(state, self.layouts)
        if "outer" in state:
            self.outer = self.base.version, state["outer"].clone()

    def begin_joined(self, state: Mapping[str, Any], sequence: int) -> None:
        """Start this restarted rank with the anchor of the leader that has admitted it, and drop any loaded checkpoint.

        Args:
            sequence: Sequence number of this rank's last contribution that the leader knows.
        """
        self.begin(state)
        self.outstanding = self.answer = self.inherited = None
        self.sequence = sequence

    def load(self, state: Mapping[str, Any], sources: Mapping[int, int], rank: int) -> None:
        """Load the saved state of the rank that ``rank`` continues. See :func:`renumbered` for ``sources``."""
        layouts = self.layouts
        self.base, self.sequence = HeldAnchor.of(state["base"], layouts, sources), state["sequence"]
        if state["served"] is not None:
            self.inherited = HeldAnchor.of(state["served"], layouts, sources)
        if (outer := saved_outer(state)) is not None:
            self.outer = outer[0], outer[1].clone()
        if state["answer"] is not None:
            self.answer = Answer.of(state["answer"], layouts, sources)
        if state["outstanding"] is not None:
            self.outstanding = own = Outstanding.of(state["outstanding"], layouts)
            if any(sources[each] == sources[rank] for each in sources if each < rank):
                # A norm of NaN lets the leader answer the contribution without applying it.
                self.outstanding = replace(own, report=replace(own.report, norm=math.nan))

    def state(self, served: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return this member's state as a dict for checkpoints.

        Args:
            served: The newest anchor and the outer optimizer's state, if this member leads or is alone; otherwise None.
        """
        outer = None if served is not None or self.outer is None else (self.outer[0], self.outer[1].clone())
        if served is None and self.inherited is not None:  # as a successor whose election has not ended
            served = self.inherited.state()
        return {
            "base": self.base.state(),
            "answer": None if self.answer is None else self.answer.state(),
            "outstanding": None if self.outstanding is None else self.outstanding.state(),
            "served": served,
            "outer": outer,
            "sequence": self.sequence,
        }

    def member_state(self) -> MemberState:
        """Return this member's report to a new leader."""
        newest, own = self.newest, self.outstanding
        sequence, outstanding = (0, ()) if own is None else (own.sequence, (own.report,))
        outer = -1 if self.outer is None else self.outer[0]
        return MemberState(newest.version, newest.applied, outer, sequence, outstanding)

    def take_answer(self, answer: Answer, sender: int | None = None) -> None:
        """Record the leader's answer to the last contribution: an anchor that contains the contribution.

        The anchor contains later contributions if the ranks saved separately, and this rank saved earlier than the
        leader. The next contributions then get larger numbers.

        Args:
            sender: This rank, if the leader counts contributions by rank; otherwise None.
        """
        self.answer, self.outstanding = answer, None
        applied = 0 if sender is None else dict(answer.report.applied).get(sender, 0)
        if applied > self.sequence:
            logger.warning(
                "rank %d has resumed asynchronous DiLoCo from an older checkpoint than other ranks, and its first "
                "contribution was not applied, because the anchor has contributions of larger numbers; the next ones "
                "are applied",
                sender,
            )
            self.sequence = applied
        if self.inherited is not None and self.inherited.version <= answer.report.version:
            self.inherited = None
        self.on_answer()

    def apply_answer(self) -> Answer:
        """Let this member train from the received common weights. Return the answer that contained them."""
        answer, self.answer = self.answer, None
        assert answer is not None, "an answer has arrived before it is applied"
        self.base = answer.held()
        return answer
