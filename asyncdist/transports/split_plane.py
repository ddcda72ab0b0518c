"""Makes one transport of two: small messages on the control plane, streams of tensors on the bulk plane.

A message goes by its tag: those of the bulk range to one transport, all others to the other. Both promise the contract
of :mod:`asyncdist.transports.base`, ordering is per (source, tag), and no tag is on both, so what they make up together
promises it too. Which plane is slow, or blocked by 256 MiB, is thus nothing that the other one notices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncdist.errors import TransportError
from asyncdist.transports.base import (
    Buffer,
    Capabilities,
    GroupHandle,
    PersistentReceive,
    ReadWindow,
    Request,
    Transport,
)
from asyncdist.transports.persistent_send import PersistentSend


class TwoPlaneTransport(Transport):
    """A rank of ``control`` that sends and receives the tags ``bulk_tags`` on ``bulk``.

    Closing it closes both. A rank that either has lost is lost.

    Args:
        control: for everything else, groups and the end of the job included.
        bulk: the same ranks, numbered alike.
        bulk_tags: the tags that go there.

    Raises:
        TransportError: this process is not the same rank of as many in both, or ``bulk`` does not take such tags.
    """

    name = "planes"

    def __init__(self, control: Transport, bulk: Transport, bulk_tags: range) -> None:
        if (control.rank, control.size) != (bulk.rank, bulk.size):
            raise TransportError(
                f"this process is rank {control.rank} of {control.size} on {control.name} (control), but rank "
                f"{bulk.rank} of {bulk.size} on {bulk.name} (bulk); both must number the ranks alike"
            )
        if bulk_tags[-1] > bulk.capabilities.tag_max:
            raise TransportError(
                f"{bulk.name} takes tags up to {bulk.capabilities.tag_max}, bulk needs {bulk_tags[-1]}"
            )
        self._control = control
        self._bulk = bulk
        self._bulk_tags = bulk_tags
        self.rank = control.rank
        self.size = control.size
        self.job_nonce = control.job_nonce
        self.launch_nonce = control.launch_nonce
        self.trusts_network = control.trusts_network or bulk.trusts_network
        self.hosts = control.hosts
        ours, theirs = control.capabilities, bulk.capabilities
        self.capabilities = Capabilities(
            native_collectives=ours.native_collectives,
            survives_rank_loss=ours.survives_rank_loss and theirs.survives_rank_loss,
            wakes=ours.wakes and theirs.wakes,
            tag_max=ours.tag_max,
            misses_wakes=ours.misses_wakes or theirs.misses_wakes,
            rings_from_threads=ours.rings_from_threads or theirs.rings_from_threads,
            shares_process=ours.shares_process and theirs.shares_process,
            one_sided_reads=ours.one_sided_reads,
            shares_memory=ours.shares_memory,
            written_share=theirs.written_share,
        )
        self._reported: set[int] = set()

    def _plane(self, tag: int) -> Transport:
        return self._bulk if tag in self._bulk_tags else self._control

    def isend(self, buffer: Buffer, dest: int, tag: int) -> Request:
        return self._plane(tag).isend(buffer, dest, tag)

    def start_send(self, buffer: Buffer, dest: int, tag: int) -> Request | None:
        return self._plane(tag).start_send(buffer, dest, tag)

    def prepare_send(self, nbytes: int, dest: int, tag: int) -> PersistentSend | None:
        return self._plane(tag).prepare_send(nbytes, dest, tag)

    def irecv(self, buffer: Buffer, source: int, tag: int) -> Request:
        return self._plane(tag).irecv(buffer, source, tag)

    def persistent_receive(self, buffer: Buffer, tag: int) -> PersistentReceive:
        return self._plane(tag).persistent_receive(buffer, tag)

    @property
    def hostname(self) -> str:
        return self._control.hostname

    @property
    def world_group(self) -> GroupHandle | None:
        return self._control.world_group

    @property
    def end_group(self) -> GroupHandle | None:
        return self._control.end_group

    def new_group(self, ranks: Sequence[int], tag: int) -> GroupHandle | None:
        return self._control.new_group(ranks, tag)

    def new_window(self, group: GroupHandle, nbytes: int) -> ReadWindow | None:
        return self._control.new_window(group, nbytes)

    def lost_ranks(self) -> frozenset[int]:
        return self._control.lost_ranks() | self._bulk.lost_ranks()

    def abort(self, exit_code: int) -> None:
        self._control.abort(exit_code)

    def close(self) -> None:
        try:
            self._bulk.close()
        finally:
            self._control.close()

    def close_failed(self) -> None:
        try:
            self._bulk.close_failed()
        finally:
            self._control.close_failed()

    def on_finalize(self, leave: Callable[[], None]) -> None:
        self._control.on_finalize(leave)
        self._bulk.on_finalize(leave)

    def note_met(self) -> None:
        self._control.note_met()
        self._bulk.note_met()

    def set_doorbell(self, ring: Callable[[], None]) -> None:
        self._control.set_doorbell(ring)
        self._bulk.set_doorbell(ring)

    def set_loss_listener(self, listen: Callable[[int], None]) -> None:
        def listen_once(rank: int) -> None:
            if rank not in self._reported:
                self._reported.add(rank)
                listen(rank)

        self._control.set_loss_listener(listen_once)
        self._bulk.set_loss_listener(listen_once)

    def describe(self) -> str:
        return f"control on {self._control.describe()}; bulk on {self._bulk.describe()}"
