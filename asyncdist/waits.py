"""Defines identifiers and descriptions of everything for which a task can wait.

Recordings and replays find timers, deadlines and measured numbers by their :class:`WaitId`. The template of the id's
:class:`WaitKind` describes the wait. Templates may change, but a kind's value and the fields used with it must not,
because replays depend on them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final, NamedTuple, Self


@enum.unique
class WaitKind(enum.StrEnum):
    """The kinds of waits, each with its name in recordings and the format string of its description."""

    template: str

    def __new__(cls, value: str, template: str) -> Self:
        """Create a member from its value and its template."""
        kind = str.__new__(cls, value)
        kind._value_ = value
        kind.template = template
        return kind

    # -- asyncdist.messaging ----------------------------------------------------------------------------------------
    CONDITION = "condition", "a condition"
    WAKE_UP = "wake_up", "a wake-up"
    SEND = "send", "send to {peer}, tag {tag}"
    RECEIVE = "receive", "receive from {peer}, tag {tag}"
    DISOWNED = "disowned", "a request for which no task waits"
    TASK = "task", "{name}"
    COLLECTIVE = "collective", "a collective"
    MESSAGE = "message", "a message on {name}, tag {tag}"
    MESSAGE_SEND = "message_send", "{name}: send to {peer}"
    LAST_MESSAGES = "last_messages", "the last messages on {name}"
    CLOSED_TAG = "closed_tag", "the end of the receive on tag {tag}"
    STREAM_SEND = "stream_send", "stream to rank {peer}, tag {tag}"
    STREAM_RECEIVE = "stream_receive", "stream from rank {peer}, tag {tag}"
    STREAM_RECEIVER = "stream_receiver", "rank {peer} to receive a stream"
    USER_REQUEST = "user_request", "{name}"  # an mpi4py or torch request that the program has started
    # Only recordings and replays use the following kinds. The number counts a task's sends to one rank on one tag.
    MESSAGE_LEFT = "message_left", "send {number} to {peer}, tag {tag}"
    STREAM_LEFT = "stream_left", "stream {number} to {peer}, tag {tag}"
    WRITTEN_NBYTES = "written_nbytes", "written to {peer}, slot {number}"
    COLLECTIVE_END = "collective_end", "the end of a collective, tag {tag}"
    COLLECTIVE_FAILURE = "collective_failure", "the failure of a collective"

    # -- asyncdist.collectives --------------------------------------------------------------------------------------
    BARRIER = "barrier", "barrier"
    BROADCAST = "broadcast", "broadcast from rank {number}"
    BROADCAST_IN_PIECES = "broadcast_in_pieces", "broadcast of {number} bytes"
    GATHER = "gather", "gather to rank {number}"
    GATHER_IN_PIECES = "gather_in_pieces", "gather of parts of {number} bytes"
    GATHER_RAGGED = "gather_ragged", "gather of {number} bytes"
    ALL_GATHER = "all_gather", "all_gather"
    ALL_GATHER_IN_PIECES = "all_gather_in_pieces", "all_gather of parts of {number} bytes"
    ALL_REDUCE = "all_reduce", "all_reduce {name}"
    ALL_TO_ALL = "all_to_all", "all_to_all"
    ALL_TO_ALL_IN_PIECES = "all_to_all_in_pieces", "all_to_all of parts of {number} bytes"
    ORDERED_REDUCTION = "ordered_reduction", "reduction in rank order"
    OTHER_MEMBERS = "other_members", "{name}: the other ranks"
    VERDICT = "verdict", "{name}: the verdict of rank {peer}"
    VERDICT_WITHOUT_LEADER = "verdict_without_leader", "{name}: the reports of the other members on rank {number}"
    REMINDER = "reminder", "reminder of {name}"
    LOOK_AT_STARTS = "look_at_starts", "a check of the open starts"
    ROLL_CALL = "roll_call", "the end of the roll call for {name}"
    GATHERED_MEMBERS = "gathered_members", "the members that join {name}"
    TURN = "turn", "the turn of {name}"
    TURN_TIMEOUT = "turn_timeout", "the timeout of {name}"
    VERSION_ANSWERS = "version_answers", "the newest versions of other members"
    VERSION_IN_USE = "version_in_use", "the reads of the previous version, window {number}"
    LAST_READS = "last_reads", "the last reads of the exposed state of this rank"

    # -- asyncdist.runtime ------------------------------------------------------------------------------------------
    SLEEP = "sleep", "sleep {number}"
    COMPUTE = "compute", "compute"
    FILE_WORK = "file_work", "work on files"
    LOSSES = "losses", "reports of lost ranks"
    GROUP_COLLECTIVES = "group_collectives", "the collectives of the group {name} that this rank has started"
    DEPARTURES = "departures", "the departures of other ranks"
    DEPARTURES_AGAIN = "departures_again", "another report of departures"
    OWN_SERVICES = "own_services", "the services of this rank to end"
    OWN_MESSAGES = "own_messages", "the other ranks to receive this rank's messages"
    OWN_REQUESTS = "own_requests", "the requests under way"
    OTHERS_LEFT = "others_left", "the other ranks to leave"
    OTHERS_ENDED = "others_ended", "the other ranks to end"
    END_KNOWN = "end_known", "all ranks to know that every rank has ended"
    FINALIZE_MESSAGES = "finalize_messages", "the finalize messages of the other ranks"
    MAIN_END = "main_end", "the end of main"
    PEER_FAILURE = "peer_failure", "the failure of a peer"
    STOPPED_MAIN = "stopped_main", "{name}"  # in a report, if the simulation ended while ``main`` waited

    # -- asyncdist.functional, asyncdist.integrations ---------------------------------------------------------------
    EARLIER_WORK = "earlier_work", "the end of an earlier {name}"
    ANSWER = "answer", "an answer of rank {peer} on tag {tag}"
    BUFFER_ANSWER = "buffer_answer", "the answer of the replay buffer on rank {number}"
    BUFFER_USERS = "buffer_users", "training ranks that use the replay buffer"

    # -- protocols --------------------------------------------------------------------------------------------------
    SNAPSHOT = "snapshot", "a snapshot"
    ROUND_SNAPSHOT = "round_snapshot", "a snapshot for round {number}"
    DONOR_SNAPSHOT = "donor_snapshot", "rank {number}'s snapshot"
    COPY_OF_WEIGHTS = "copy_of_weights", "the copy of the weights"
    ROUND_MEAN = "round_mean", "the mean of round {number}"
    OWN_PART = "own_part", "the part of this rank in round {number}"
    OWN_READS = "own_reads", "the end of the reads of this rank"
    OWN_ROUND = "own_round", "the end of its part in a round"
    CONTRIBUTION_ANSWER = "contribution_answer", "the answer to contribution {number}"
    CONTRIBUTIONS = "contributions", "further contributions"
    SETTLING = "settling", "a call of settle, as by save_population, on all members"
    REPORTS = "reports", "reports and answers of members"
    POLICY_ADMISSION = "policy_admission", "admission to a policy"
    REPLAY_SERVER = "replay_server", "the replay buffer {name!r} on rank {peer}"
    REPLAY_ANSWERS = "replay_answers", "answers of the replay buffer {name!r} on rank {peer}"
    REPLAY_ROOM = "replay_room", "room for one more request to the replay buffer {name!r} on rank {peer}"
    REPLAY_END_REASON = "replay_end_reason", "the reason why the replay buffer {name!r} ended"
    REPLAY_CLIENTS = "replay_clients", "clients of the replay buffer {name!r}"


class WaitId(NamedTuple):
    """Identifies a wait, a timer or a measured number on one rank.

    A replay does not distinguish waits with equal fields. A recording stores the fields as an array.

    Attributes:
        kind: Member of :class:`WaitKind`, or an unknown string from another version's recording.
        tag: Tag of the awaited message, if any.
        peer: Only rank that can end the wait, if known.
        number: Number that distinguishes waits of the same kind: a round, a slot or a count.
        name: Name of a channel or a policy, or of an agreement between ranks. The user or a protocol chooses it.
    """

    kind: WaitKind | str
    tag: int | None = None
    peer: int | None = None
    number: int | None = None
    name: str = ""

    def __str__(self) -> str:
        template = _TEMPLATES.get(self.kind)
        if template is None:  # only another version of asyncdist knows this kind
            named = zip(self._fields, self, strict=True)
            facts = (f"{field} {value}" for field, value in named if value not in (None, ""))
            return ", ".join(facts)
        return template.format_map(self._asdict())


_TEMPLATES: Final[Mapping[str, str]] = {kind.value: kind.template for kind in WaitKind}
A_CONDITION: Final = WaitId(WaitKind.CONDITION)
A_WAKE_UP: Final = WaitId(WaitKind.WAKE_UP)
