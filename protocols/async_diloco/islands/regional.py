"""Connects an island's server, the *regional* server, with the global server (HALoS, 2506.04531).

The regional server applies its members' contributions. After every K versions it contributes the change of the island's
anchor to the global server. It then merges the global anchor, which it receives as the answer
(:mod:`~protocols.async_diloco.islands.merging`). To the global server, each island is one worker. The number of an
island's contribution is the version of the island's anchor from which it was computed.

If the regional server is lost, the next member of the island registers with the global server before it serves:

- The global server drops the island's unapplied contributions. It answers with its anchor and the number of the
  island's last applied contribution.
- If the answer to this contribution has not been merged into the island's anchor yet, it is merged now.
- A contribution is sent only after another member of the island has received the regional server's state. The next
  server therefore has the anchor from which the contribution was computed, unless several members are lost at once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from asyncdist.protocols.async_diloco.anchor import Anchor
from asyncdist.protocols.async_diloco.blocks import Block
from asyncdist.protocols.async_diloco.islands.merging import (
    add_errors,
    encode_difference,
    merge_into,
    rebase,
)
from asyncdist.protocols.async_diloco.member_store import HeldAnchor, MemberStore
from asyncdist.protocols.async_diloco.messages import Arrived
from asyncdist.protocols.joining.membership import Membership

logger = logging.getLogger("protocols.async_diloco.islands")


class GlobalClient(Protocol):
    """Interface through which this rank contributes to the global server."""

    async def registered(self) -> HeldAnchor:
        """Register this rank as its island's server, and return the global anchor."""

    def contribute(self, block: Block, report: Arrived, sequence: int) -> None:
        """Offer a contribution to the global server. The caller must not change ``block`` afterwards."""

    async def is_answered(self, deadline: float) -> bool:
        """Wait until the global server has answered the contribution. Return False if the deadline passes first."""


class Regional:
    """Contributes the progress of an island (group of ranks) to the global server, and merges the global anchor.

    Args:
        global_client: Interface through which this rank contributes to the global server.
        store: This rank's global anchor and its island's contribution.
        every: Number K of versions between two contributions.
        weight: Weight alpha of the global anchor.
        decay: Decay of the error feedback of contributions; None for no error feedback.
        is_divided_anew: Whether the loaded checkpoint was saved with other islands, in which case no uncontributed
            progress is known.

    Attributes:
        merged: Number of the island's last contribution whose answer was merged; 0 before the first.
        lost_count: Number of times that this rank began to serve without the state after the island's last merge, so
            the progress since then was not contributed.
    """

    def __init__(
        self,
        global_client: GlobalClient,
        store: MemberStore,
        *,
        island: int,
        every: int,
        weight: float,
        decay: float | None,
        membership: Membership,
        is_divided_anew: bool,
    ) -> None:
        self._global_client = global_client
        self._store = store
        self._layouts = store.layouts
        self._island = island
        self._every = every
        self._weight = weight
        self._decay = decay
        self._membership = membership
        self._is_divided_anew = is_divided_anew
        self._reference: Block | None = None  # weights from which progress is measured; None before this rank serves
        self._measured_from = 0  # version of the island's anchor that equals the reference
        self._captured: tuple[int, Block] | None = None  # version and anchor of the unmerged contribution
        self._errors: list[Tensor] = []  # encoding errors of the unmerged contribution, for error feedback
        self._unsent: tuple[Block, Arrived] | None = None  # a contribution that is ready but not sent yet
        self._first = store.base
        self._is_mirrored = True  # whether another member has a copy of this server's state
        # Offers of this server's state: the receiving rank, and the version of the anchor that was offered with the
        # state.
        self._mirrors: set[tuple[int, int]] = set()
        self.merged = 0
        self.merge_count = self.lost_count = 0

    # -- the beginning ----------------------------------------------------------------------------------------------

    async def resumed(self, held: HeldAnchor, state: Mapping[str, Any] | None, sent: Mapping[int, int]) -> HeldAnchor:
        """Register this rank as its island's server, and return the island's anchor with which it begins.

        Args:
            held: The newest anchor of the island's living members.
            state: Result of :meth:`state` of an earlier server, or None.
            sent: Sequence numbers of the members' unanswered contributions, by rank.
        """
        given = await self._global_client.registered()
        applied = dict(given.applied).get(self._island, 0)
        if applied < held.merged:
            logger.warning(
                "the global server was lost together with all ranks that had its newest versions; the global anchor "
                "lacks the contributions of island %d after version %d of the island's anchor, up to version %d",
                self._island,
                applied,
                held.merged,
            )
        if applied > held.merged and applied > held.version:
            logger.warning(
                "the server of island %d was lost together with all members that had version %d of its anchor; the "
                "island continues from the global anchor, which contains this version, and drops %d contributions",
                self._island,
                applied,
                len(sent),
            )
            self.lost_count += 1
            last = {**dict(held.applied), **sent}
            return self._restarted(HeldAnchor(applied, tuple(sorted(last.items())), given.block, merged=applied))
        is_known = state is not None and state["merged"] == held.merged
        if applied > held.merged:
            return self._merged_now(held, state if is_known else None, given.block, applied)
        if state is not None and is_known:
            self.merged, self._measured_from = held.merged, state["measured_from"]
            self._reference = self._layouts.loaded_anchor(state["reference"])
            self._is_mirrored = False
            return held
        if not held.merged and not self._first.version and not self._is_divided_anew:
            return self._restarted(held, self._first)
        if held.version and (held.merged or not self._is_divided_anew):
            self._note_lost_progress()
        return self._restarted(held)

    def _merged_now(self, held: HeldAnchor, state: Mapping[str, Any] | None, given: Block, applied: int) -> HeldAnchor:
        """Merge the global anchor that contains the last contribution of the island's former server."""
        block = self._layouts.loaded_anchor(held.block[1])
        if state is None or state["captured_at"] != applied:
            if held.version > applied:
                self._note_lost_progress()
            merge_into(self._layouts, block[1], given[1], self._weight)
            return self._restarted(HeldAnchor(held.version + 1, held.applied, block, merged=applied))
        captured = self._layouts.loaded_anchor(state["captured"])
        reference = self._layouts.loaded_anchor(captured[1])
        merge_into(self._layouts, reference[1], given[1], self._weight)
        if held.version > applied:
            rebase(self._layouts, block[1], captured[1], reference[1])
        else:
            block = reference
        version = held.version + 1
        measured_from = add_errors(self._layouts, reference, state.get("errors", ()))
        found = HeldAnchor(version - (held.version - applied), (), measured_from)
        return self._restarted(HeldAnchor(version, held.applied, block, merged=applied), found)

    def _note_lost_progress(self) -> None:
        self.lost_count += 1
        logger.warning(
            "the server of island %d was lost before another member had received its state; the island's progress "
            "since its last contribution to the global server is lost",
            self._island,
        )

    def _restarted(self, held: HeldAnchor, reference: HeldAnchor | None = None) -> HeldAnchor:
        """Measure the next contribution from ``reference`` (by default from ``held``), and return ``held``."""
        found = reference or held
        self._reference, self._measured_from, self.merged = found.block, found.version, held.merged
        self._is_mirrored = not found.version
        return held

    def state(self) -> dict[str, Any]:
        """Return the state that the island's next server needs in addition to the anchor."""
        assert self._reference is not None, "the island's server has not begun"
        captured_at, captured = (0, []) if self._captured is None else (self._captured[0], self._captured[1][1])
        return {
            "reference": self._reference[1],
            "measured_from": self._measured_from,
            "merged": self.merged,
            "captured_at": captured_at,
            "captured": captured,
            "errors": self._errors,
        }

    # -- contributions ----------------------------------------------------------------------------------------------

    def contribute_if_due(self, anchor: Anchor) -> None:
        """Make the next contribution if it is due and the answer to the previous contribution has been merged."""
        if self._captured is None and anchor.version - self._measured_from >= self._every:
            self.capture(anchor)

    def capture(self, anchor: Anchor) -> None:
        """Make a contribution of the island's progress, and send it when another member has this server's state."""
        assert self._reference is not None, "the island's server has not begun"
        block, own = self._layouts.new_contribution(), anchor.copy_into(self._layouts.new_block())
        norm, self._errors = encode_difference(self._layouts, self._reference, own, block[1], self._decay)
        report = Arrived(self._store.base.version, anchor.version - self._measured_from, 1.0, norm, 0.0)
        self._captured, self._unsent = (anchor.version, own), (block, report)
        self._forget_mirrors()
        self.release()

    def _forget_mirrors(self) -> None:
        """Record that no other member has this server's state, because it has changed."""
        self._is_mirrored = False
        self._mirrors.clear()

    def needs_mirror(self, rank: int, version: int) -> bool:
        """Return whether a member must receive this server's state together with a version of the anchor.

        The state is offered with each anchor until one member has received it.
        """
        if not self._is_mirrored:
            self._mirrors.add((rank, version))
        return not self._is_mirrored

    def on_held(self, rank: int, version: int) -> None:
        """Record that another member has received a version of the island's anchor (common weights)."""
        self._is_mirrored = self._is_mirrored or (rank, version) in self._mirrors
        self.release()

    def release(self) -> None:
        """Send the waiting contribution if another member has this server's state, or this member is alone."""
        if (
            self._unsent is None
            or self._captured is None
            or (not self._is_mirrored and len(self._membership.living) > 1)
        ):
            return
        (block, report), self._unsent = self._unsent, None
        self._global_client.contribute(block, report, self._captured[0])

    # -- merges -----------------------------------------------------------------------------------------------------

    @property
    def has_answer(self) -> bool:
        """True if the global anchor has arrived but has not been merged yet."""
        return self._store.answer is not None

    def merge(self, anchor: Anchor) -> None:
        """Merge the global anchor that contains this island's last contribution into ``anchor``."""
        assert self._captured is not None, "an answer belongs to a captured contribution"
        (captured_at, captured), self._captured = self._captured, None
        answer, since = self._store.apply_answer(), anchor.version - captured_at
        reference = self._layouts.loaded_anchor(captured[1])
        merge_into(self._layouts, reference[1], answer.block[1], self._weight)
        anchor.merge(reference, captured if since else None)
        self._reference, self._errors = add_errors(self._layouts, reference, self._errors), []
        self.merged, self._measured_from = captured_at, anchor.version - since
        self.merge_count += 1
        self._forget_mirrors()

    # -- the end ----------------------------------------------------------------------------------------------------

    def prepare_leaving(self, anchor: Anchor) -> None:
        """Turn the rest of the island's progress into a contribution, to be sent by :meth:`merge_last`.

        Between this call and that one, the caller must send this server's state to the next server.
        """
        if self._captured is None and anchor.version > self._measured_from:
            self.capture(anchor)

    async def merge_last(self, anchor: Anchor, deadline: float) -> bool:
        """Send the last contribution of the island to the global server, and merge the answer.

        Returns:
            False if there is nothing to contribute, or the deadline passed first.
        """
        if self._captured is None:
            return False
        self._is_mirrored = True
        self.release()
        if not await self._global_client.is_answered(deadline):
            return False
        self.merge(anchor)
        return True
