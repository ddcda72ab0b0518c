"""Sends messages to one peer over gloo's blocking point-to-point calls. Separate threads wait for these calls.

gloo's requests cannot be polled, because a ``Work`` completes only inside ``wait()`` (pytorch#30723). Threads therefore
wait, in C++ and without the GIL, and queue the received data for the loop. There are two private gloo groups, so that
small messages do not wait behind large ones. *Control* carries frames of at most ``SLOT_NBYTES`` bytes, and *bulk*
carries larger messages.

- **Small messages** are sent inside control frames, which arrive in a ring of posted receives. At most ``WINDOW_COUNT``
  frames are unacknowledged at a time, and messages sent in the meantime share the next frame.
- **Large messages** are announced in a frame and passed to gloo immediately. gloo transfers the bytes when the receiver
  has found the matching receive and has posted its buffer. Nothing is copied. No message can be larger than its receive
  buffer, which would make gloo end the process.
- **Streams** need no announcement, because their receives are posted first
  (:mod:`asyncdist.transports.torch_distributed.gloo_transfers`).
- **Acknowledgements** in every frame report which sends have completed. Only then does the loop call ``wait()`` on
  these sends, which returns immediately. If a handle were dropped without ``wait()``, the connection would be blocked
  forever.
- **Loss**: on each of the two groups, a receive from the peer is always posted, and fails when the peer dies. A thread
  waits for each of the two receives, and the second thread to end notifies the loop. By then, all data from the peer
  has arrived.
- **Close**: waiting threads wake up only if their connections are closed, and gloo closes these when another wait times
  out. A thread that still waits when the interpreter exits would abort the process.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from asyncdist.errors import RankLostError
from asyncdist.transports.base import Buffer
from asyncdist.transports.matching import BufferedMessage, Matcher, Receive, Send, end_process
from asyncdist.transports.torch_distributed.gloo_transfers import (
    FOREVER,
    TRAILER_NBYTES,
    StreamTransfers,
    Transfer,
    bytes_tensor,
    readable,
)
from asyncdist.transports.torch_distributed.meeting.stores import reason

SLOT_NBYTES: Final = 16384
#: Format of a frame's header: number of acknowledged frames, and size of the frame in bytes. The entries follow.
_FRAME: Final = struct.Struct("<QQ")
#: Format of an entry's header: kind, tag, number of the transfer, and size of the message in bytes. If the message is
#: small, its bytes follow.
_ENTRY: Final = struct.Struct("<B3xIQQ")
INLINE_NBYTES_MAX: Final = SLOT_NBYTES - _FRAME.size - _ENTRY.size
WINDOW_COUNT: Final = 8
#: Number of posted receives. It is larger than ``WINDOW_COUNT``, because some frames are sent in spite of that limit.
_RING_COUNT: Final = 2 * WINDOW_COUNT
_ACK_AFTER_COUNT: Final = WINDOW_COUNT // 2
#: Number of frames per batch. For each batch, receives are posted again and sends are waited for. Each posted receive
#: wakes the peer's gloo. The first wait of a batch takes 5 us, because the caches are cold, and the next three take 0.5
#: us each.
_BATCH_COUNT: Final = 4

#: Size in bytes to which shorter frames are padded, so that their memory can be reused.
_SHORT_NBYTES: Final = 256

_MESSAGE: Final = 1
_ANNOUNCE: Final = 2
_LANDED: Final = 3
_GOODBYE: Final = 4
_ABORT: Final = 5
_ACKNOWLEDGED: Final = 6
_UNWANTED: Final = 7

_CONTROL_TAG: Final = 1
_WATCH_TAG: Final = 0x7FFFFFFD
_ANNOUNCED_TAG_COUNT: Final = 0x40000000

#: Maximum seconds between the ends of the two connections of a dead peer.
_LINGER_S: Final = 0.1


class _Upload(Transfer):
    """Sender's side of an announced large message. ``number`` counts the large messages to the same receiver."""

    def __init__(self, number: int, view: memoryview, send: Send) -> None:
        super().__init__(number % _ANNOUNCED_TAG_COUNT, readable(view))
        self.number = number
        self.send = send


class _Download(Transfer):
    """Receiver's side of an announced large message."""

    def __init__(self, number: int, view: memoryview, receive: Receive | None) -> None:
        super().__init__(number % _ANNOUNCED_TAG_COUNT, bytes_tensor(view))
        self.number = number
        self.receive = receive


class _Frame:
    """Memory of a frame, and a tensor that views it. Both are reused, because creating a tensor takes 6 us."""

    __slots__ = ("data", "tensors")

    def __init__(self, nbytes: int) -> None:
        self.data = bytearray(nbytes)
        self.tensors = [bytes_tensor(self.data)]


class _Announced:
    """Large message that has been announced, but whose bytes are still in the sender's memory."""

    __slots__ = ("_link", "_number", "nbytes", "source", "tag")

    has_left_sender: Final = False

    def __init__(self, link: Link, tag: int, number: int, nbytes: int) -> None:
        self._link = link
        self._number = number
        self.source = link.peer
        self.tag = tag
        self.nbytes = nbytes

    def fill(self, receive: Receive) -> None:
        self._link.fetch(_Download(self._number, receive.view[: self.nbytes], receive))

    def discard(self) -> None:
        self._link.fetch(_Download(self._number, memoryview(bytearray(self.nbytes)), None))

    def fail(self, error: RankLostError) -> None:
        """Do nothing, because the send fails in the sender's process."""


class Link:
    """This rank's end of the connections to one peer. Methods named ``_run_*`` run on threads, all others on the loop.

    Args:
        place: Rank of the peer in the two gloo groups.
        on_lost: Function called once when the peer is lost, on the loop, with the peer and the error.

    Attributes:
        error: Error that reports the loss of the peer, or None while the peer is connected.
        has_sent_goodbye: Whether the peer has announced that it is closing.
        drops_messages: Whether late messages from the peer are dropped, because a restarted process has replaced the
            peer or this rank has closed the connections.
    """

    def __init__(
        self,
        peer: int,
        place: int,
        control: Any,
        bulk: Any,
        matcher: Matcher,
        on_lost: Callable[[int, RankLostError], None],
    ) -> None:
        self.peer = peer
        self._place = place
        self.error: RankLostError | None = None
        self.has_sent_goodbye = False
        self.drops_messages = False
        self._control = control
        self._bulk = bulk
        self._matcher = matcher
        self._callbacks = matcher.callbacks
        self._on_lost = on_lost
        self._sent: deque[tuple[Any, _Frame]] = deque()
        self._spare: list[_Frame] = []
        self._posted_count = 0
        self._acknowledged_count = 0
        self._waited_count = 0
        self._received_count = 0
        self._reported_count = 0
        self._queued: deque[tuple[bytes, Send | None]] = deque()
        self._transfer_count = 0
        self._uploads: dict[int, _Upload] = {}
        self._downloads: dict[int, _Download] = {}
        self._stream_transfers: dict[int, StreamTransfers] = {}
        self._posting = threading.Lock()
        self._to_post: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._to_land: queue.SimpleQueue[_Download | None] = queue.SimpleQueue()
        self._ended = {name: threading.Event() for name in ("control", "watch")}
        self._threads: dict[str, threading.Thread] = {}
        self._start("control", self._run_control)
        self._start("watch", self._run_watch)

    # -- sending ----------------------------------------------------------------------------------------------------

    def send(self, view: memoryview, tag: int) -> Send:
        """Start sending a message. A small message is sent immediately unless too many frames are unacknowledged."""
        send = Send(self._callbacks, view.nbytes)
        send.error = self.error
        if send.error is not None:
            return send
        if view.nbytes <= INLINE_NBYTES_MAX:
            entry = _ENTRY.pack(_MESSAGE, tag, 0, view.nbytes) + view
            send.done = not self._queued and self._has_room and self._post(entry)
            if not send.done:
                self._queue(entry, send)
            return send
        self._transfer_count += 1
        number = self._transfer_count
        upload = self._uploads[number] = _Upload(number, view, send)
        self._queue(_ENTRY.pack(_ANNOUNCE, tag, number, view.nbytes))
        self._start("post", self._run_post)
        self._to_post.put(upload)
        return send

    def send_granted(self, view: memoryview, tag: int) -> Send:
        """Start sending a message on a stream's tag, for which the peer posts a receive (see ``gloo_transfers``)."""
        if self.error is None:
            return self._transfers_of(tag).send(view)
        send = Send(self._callbacks, view.nbytes)
        send.error = self.error
        return send

    def _queue(self, entry: bytes, send: Send | None = None) -> None:
        self._queued.append((entry, send))
        self._post_queued()

    @property
    def _has_room(self) -> bool:
        return self._posted_count - self._acknowledged_count < WINDOW_COUNT

    def _post_queued(self) -> None:
        queued = self._queued
        while queued and self._has_room:
            entries = bytearray()
            count = 0
            for entry, _ in queued:
                if _FRAME.size + len(entries) + len(entry) > SLOT_NBYTES:
                    break
                entries += entry
                count += 1
            if not self._post(entries):
                return
            for _ in range(count):
                _, send = queued.popleft()
                if send is not None:
                    send.done = True

    def _post(self, entries: bytes | bytearray = b"") -> bool:
        """Send a frame with these entries, even beyond ``WINDOW_COUNT``. Return False if the connection is closed."""
        with self._posting:  # Frames must be recorded in the order in which they are sent.
            received_count = self._received_count
            nbytes = _FRAME.size + len(entries)
            is_short = nbytes <= _SHORT_NBYTES
            frame = self._spare.pop() if is_short and self._spare else _Frame(max(nbytes, _SHORT_NBYTES))
            _FRAME.pack_into(frame.data, 0, received_count, nbytes)
            frame.data[_FRAME.size : nbytes] = entries
            try:
                work = self._control.send(frame.tensors, self._place, _CONTROL_TAG)
            except RuntimeError:
                return False
            self._sent.append((work, frame))
            self._posted_count += 1
            self._reported_count = received_count
            return True

    # -- receiving --------------------------------------------------------------------------------------------------

    def receive_granted(self, buffer: Buffer, tag: int) -> Receive:
        """Post a receive on a stream's tag. The message must not be larger than ``buffer``."""
        if self.error is None:
            return self._transfers_of(tag).receive(buffer)
        receive = Receive(self._matcher, buffer, self.peer, tag)
        receive.error = self.error
        return receive

    def _transfers_of(self, tag: int) -> StreamTransfers:
        if tag not in self._stream_transfers:
            self._stream_transfers[tag] = StreamTransfers(
                tag,
                self.peer,
                self._place,
                self._bulk,
                self._matcher,
                start=self._start,
                acknowledge=lambda: self._post(_ENTRY.pack(_ACKNOWLEDGED, tag, 0, 0)),
                ask_for_empty_message=lambda number: self._queue(_ENTRY.pack(_UNWANTED, tag, number, 0)),
            )
        return self._stream_transfers[tag]

    def fetch(self, download: _Download) -> None:
        """Start the transfer of an announced message to this rank."""
        self._downloads[download.number] = download
        self._start("post", self._run_post)
        self._start("land", self._run_land)
        self._to_post.put(download)

    def _on_frame(self, frame: memoryview) -> None:
        if self.drops_messages:
            return
        self._acknowledged_count, _ = _FRAME.unpack_from(frame)
        self._received_count += 1
        position = _FRAME.size
        while position < len(frame):
            kind, tag, number, nbytes = _ENTRY.unpack_from(frame, position)
            position += _ENTRY.size
            if kind == _MESSAGE:
                self._matcher.deliver(BufferedMessage(self.peer, tag, frame[position : position + nbytes]))
                position += nbytes
            elif kind == _ANNOUNCE:
                self._matcher.deliver(_Announced(self, tag, number, nbytes))
            elif kind == _LANDED:
                self._on_landed(self._uploads.pop(number))
            elif kind == _ACKNOWLEDGED:
                self._stream_transfers[tag].on_acknowledged()
            elif kind == _UNWANTED:
                self._transfers_of(tag).on_receive_cancelled(number)
            elif kind == _GOODBYE:
                self.has_sent_goodbye = True
        if self._queued:
            self._post_queued()
        if self._received_count - self._reported_count >= _ACK_AFTER_COUNT:
            self._post()
        if self._acknowledged_count - self._waited_count >= _BATCH_COUNT:
            self._drop_acknowledged()

    def _drop_acknowledged(self) -> None:
        """Release the acknowledged frames. gloo requires a wait for each, which returns immediately."""
        while self._waited_count < self._acknowledged_count:
            self._waited_count += 1
            with self._posting:  # A thread may have sent the frame without having recorded it yet.
                work, frame = self._sent.popleft()
            with contextlib.suppress(RuntimeError):  # Raised if the peer has died since it received the frame.
                work.wait(FOREVER)
            if len(frame.data) == _SHORT_NBYTES:
                self._spare.append(frame)

    def _on_landed(self, upload: _Upload) -> None:
        """Complete the send, because the peer has received the whole message."""
        with contextlib.suppress(RuntimeError):
            upload.wait()
        upload.send.done = True

    def _on_downloaded(self, download: _Download) -> None:
        """Complete the receive of a large message that has arrived, and notify the message's sender."""
        if self.error is not None:
            return
        del self._downloads[download.number]
        if download.receive is not None:
            download.receive.done = True
        self._queue(_ENTRY.pack(_LANDED, 0, download.number, 0))

    # -- the end ----------------------------------------------------------------------------------------------------

    def send_goodbye(self) -> None:
        """Notify the peer that this rank will close the connections."""
        self._post(_ENTRY.pack(_GOODBYE, 0, 0, 0))

    def abort(self, exit_code: int) -> None:
        """End the peer's process."""
        self._post(_ENTRY.pack(_ABORT, exit_code, 0, 0))

    def _on_ended(self, why: str) -> None:
        """Fail all requests that involve the lost peer. Handles and buffers are kept until the groups are closed."""
        if self.error is not None:
            return
        how = "it has closed its connections" if self.has_sent_goodbye else f"its connection was closed ({why})"
        self.error = RankLostError(f"rank {self.peer} is gone: {how}", rank=self.peer)
        for _, send in self._queued:
            if send is not None:
                send.error = self.error
        self._queued.clear()
        for upload in self._uploads.values():
            upload.send.error = self.error
        for download in self._downloads.values():
            if download.receive is not None:
                download.receive.error = self.error
        for transfers in self._stream_transfers.values():
            transfers.lose(self.error)
        self._matcher.lose(self.peer, self.error)
        self._on_lost(self.peer, self.error)

    def join(self, deadline: float) -> list[str]:
        """Wait for the threads to end after the connections were closed. Return the names of threads still running."""
        self.stop()
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        return [thread.name for thread in self._threads.values() if thread.is_alive()]

    def stop(self) -> None:
        """End the threads that are not waiting in gloo. The others end when the connections are closed."""
        self._to_post.put(None)
        self._to_land.put(None)
        for transfers in self._stream_transfers.values():
            transfers.stop()

    @property
    def has_ended(self) -> bool:
        """Whether all threads of the link have ended, so that none still writes to a buffer."""
        return not any(thread.is_alive() for thread in self._threads.values())

    def release(self) -> None:
        """Drop gloo's groups and all handles of an ended link, to which requests in reference cycles may still refer.

        Otherwise, gloo would keep its ports, connections and threads until the next full garbage collection. A process
        with many worlds, or whose peers are often replaced, would exhaust its file descriptors.
        """
        self.drops_messages = True
        for transfers in self._stream_transfers.values():
            transfers.release()
        self._stream_transfers.clear()
        self._uploads.clear()
        self._downloads.clear()
        self._sent.clear()
        self._control = self._bulk = None

    # -- threads ----------------------------------------------------------------------------------------------------

    def _start(self, name: str, run: Callable[[], None]) -> None:
        if name not in self._threads:
            thread = threading.Thread(target=run, name=f"asyncdist-gloo-{name}-{self.peer}", daemon=True)
            self._threads[name] = thread
            thread.start()

    @contextlib.contextmanager
    def _until_closed(self, name: str, other: str) -> Iterator[None]:
        why = "the thread ended"
        try:
            yield
        except RuntimeError as error:
            why = reason(error)
        finally:
            self._ended[name].set()
            self._ended[other].wait(_LINGER_S)
            self._callbacks.put(self._on_ended, why)

    def _run_control(self) -> None:
        """Wait for frames in the ring of posted receives, and queue them for the loop."""
        buffers = [bytearray(SLOT_NBYTES) for _ in range(_RING_COUNT)]
        tensors = [[bytes_tensor(buffer)] for buffer in buffers]
        with self._until_closed("control", "watch"):
            works = deque(self._control.recv(tensor, self._place, _CONTROL_TAG) for tensor in tensors)
            closed = ""  # reason why the connection is closed; the error itself would form a cycle with this frame
            for slot in itertools.cycle(range(_RING_COUNT)):
                if closed and not works:
                    raise RuntimeError(closed)
                works.popleft().wait(FOREVER)
                buffer = buffers[slot]
                _, nbytes = _FRAME.unpack_from(buffer)
                frame = memoryview(buffer[:nbytes])
                if nbytes == _FRAME.size + _ENTRY.size:
                    kind, exit_code, _, _ = _ENTRY.unpack_from(frame, _FRAME.size)
                    if kind == _ABORT:
                        end_process(self.peer, exit_code)
                self._callbacks.put(self._on_frame, frame)
                if slot % _BATCH_COUNT == _BATCH_COUNT - 1 and not closed:
                    try:
                        for tensor in tensors[slot + 1 - _BATCH_COUNT : slot + 1]:
                            works.append(self._control.recv(tensor, self._place, _CONTROL_TAG))
                    except RuntimeError as error:  # The peer is lost, but its last frames are still in the ring.
                        closed = str(error) or "closed"

    def _run_watch(self) -> None:
        """Wait for a message that is never sent. The wait fails when the bulk connection ends."""
        with self._until_closed("watch", "control"):
            nothing = torch.zeros(TRAILER_NBYTES, dtype=torch.uint8, device="cpu")
            self._bulk.recv([nothing], self._place, _WATCH_TAG).wait(FOREVER)

    def _run_post(self) -> None:
        """Pass transfers to gloo. This needs a thread, because each call may block until another transfer has ended."""
        with contextlib.suppress(RuntimeError):  # Raised if the connection is closed, which the other threads report.
            while (transfer := self._to_post.get()) is not None:
                if isinstance(transfer, _Download):
                    transfer.post(self._bulk.recv, self._place)
                    self._to_land.put(transfer)
                else:
                    transfer.post(self._bulk.send, self._place)
                del transfer  # Free the memory of a message that may have arrived.

    def _run_land(self) -> None:
        """Wait for announced messages in the order in which their receives were posted."""
        with contextlib.suppress(RuntimeError):
            while (download := self._to_land.get()) is not None:
                download.wait()
                self._callbacks.put(self._on_downloaded, download)
                del download
