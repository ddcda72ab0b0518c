"""Backends of torch.distributed in plain Python, over TCP, that stand in for those that are not here.

    stand_in.register()
    ad.run(main, transport="torch:truthful")

| name | a work is said to be complete |
|---|---|
| truthful | when it is |
| orderly | when it is; as NCCL it ignores tags, and does one thing after the other with a peer, both ways together |
| hasty | always |
| mute | never, as on gloo |
| broken | a send raises |

All but one match by tag. All of them make progress inside ``is_completed`` and ``wait`` alone; a send is complete when
its receive has its bytes, and not before; sizes that differ are an error; a peer that dies fails what is under way with
it.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

NAMES = ("truthful", "orderly", "hasty", "mute", "broken")
#: Of a message: tag, number, bytes.
_HEADER = struct.Struct("<qQQ")
_NUMBER = struct.Struct("<Q")
_READ_NBYTES = 1 << 20


class Work(dist.Work):
    """One send or receive."""

    def __init__(self, group: Group, peer: int, tensor: torch.Tensor, tag: int, number: int, is_send: bool) -> None:
        super().__init__()
        self.group = group
        self.peer = peer
        self.view = tensor.numpy().data.cast("B")
        self.tag = tag
        self.number = number
        self.is_send = is_send
        self.is_started = False
        self.is_done = False
        self.error: RuntimeError | None = None

    def is_completed(self) -> bool:
        self.group.progress(self.peer)
        if self.group.kind == "hasty":
            return True
        return self.group.kind != "mute" and (self.is_done or self.error is not None)

    def wait(self, timeout: timedelta | None = None) -> bool:
        del timeout
        while not self.is_done and self.error is None and self.group.kind != "hasty":
            self.group.progress(self.peer)
            time.sleep(0.0001)
        if self.error is not None:
            raise self.error
        return True


@dataclass
class Link:
    """One peer: a connection that it sends on, and one that this rank sends on."""

    inward: socket.socket | None = None
    outward: socket.socket | None = None
    works: deque[Work] = field(default_factory=deque)
    read: bytearray = field(default_factory=bytearray)
    acknowledged: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    arrived: list[tuple[int, int, bytes]] = field(default_factory=list)
    error: RuntimeError | None = None


class Group(dist.ProcessGroup):
    """A process group that supports point-to-point operations only."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta | None = None, *, kind: str) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        del timeout
        self.kind = kind
        self._store = store
        self._own_rank = rank
        self._links = {peer: Link() for peer in range(size) if peer != rank}
        self._numbers = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        store.set(f"port of {rank}", str(self._listener.getsockname()[1]))

    def send(self, tensors: list[torch.Tensor], dest: int, tag: int = 0) -> Work:
        if self.kind == "broken":
            raise RuntimeError("this backend is a ruin")
        link = self._links[dest]
        if link.outward is None:
            port = int(self._store.get(f"port of {dest}"))
            link.outward = socket.create_connection(("127.0.0.1", port))
            link.outward.sendall(_NUMBER.pack(self._own_rank))
            link.outward.setblocking(False)
        return self._add(dest, tensors[0], tag, is_send=True)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> Work:
        return self._add(source, tensors[0], tag, is_send=False)

    def shutdown(self) -> None:
        for link in self._links.values():
            for connection in (link.inward, link.outward):
                if connection is not None:
                    connection.close()
        self._listener.close()

    def _add(self, peer: int, tensor: torch.Tensor, tag: int, *, is_send: bool) -> Work:
        link = self._links[peer]
        if link.error is not None:
            raise link.error
        self._numbers += 1
        work = Work(self, peer, tensor, 0 if self.kind == "orderly" else tag, self._numbers, is_send)
        link.works.append(work)
        self.progress(peer)
        return work

    def progress(self, peer: int) -> None:
        """Do what can be done with one peer."""
        self._accept()
        link = self._links[peer]
        if link.error is not None:
            return
        try:
            self._advance(link)
        except OSError as error:
            link.error = RuntimeError(f"[stand_in.cc:1] Connection closed by peer: {error}")
            for work in link.works:
                work.error = link.error
            link.works.clear()

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            connection, _ = self._listener.accept()
            connection.setblocking(True)
            (peer,) = _NUMBER.unpack(connection.recv(_NUMBER.size, socket.MSG_WAITALL))
            connection.setblocking(False)
            self._links[peer].inward = connection

    def _advance(self, link: Link) -> None:
        is_closed = not self._read(link)
        for work in list(link.works):
            if work.is_send and not work.is_started:
                work.is_started = True
                link.unsent += _HEADER.pack(work.tag, work.number, len(work.view))
                link.unsent += work.view
            elif not work.is_send:
                self._receive(link, work)
            if self.kind == "orderly" and not work.is_done:
                break  # the others wait for it
        link.works = deque(work for work in link.works if not work.is_done)
        if link.outward is not None and link.unsent:
            with contextlib.suppress(BlockingIOError):
                del link.unsent[: link.outward.send(link.unsent)]
        if is_closed and not link.arrived:
            raise ConnectionError("end of file")

    def _read(self, link: Link) -> bool:
        """Take in what has come; False when a connection has ended."""
        is_open = _fill(link.inward, link.read) and _fill(link.outward, link.acknowledged)
        while len(link.read) >= _HEADER.size:
            tag, number, nbytes = _HEADER.unpack_from(link.read)
            if len(link.read) < _HEADER.size + nbytes:
                break
            link.arrived.append((tag, number, bytes(memoryview(link.read)[_HEADER.size : _HEADER.size + nbytes])))
            del link.read[: _HEADER.size + nbytes]
        while len(link.acknowledged) >= _NUMBER.size:
            (number,) = _NUMBER.unpack_from(link.acknowledged)
            del link.acknowledged[: _NUMBER.size]
            for work in link.works:
                if work.is_send and work.number == number:
                    work.is_done = True
        return is_open

    def _receive(self, link: Link, work: Work) -> None:
        message = next((message for message in link.arrived if message[0] == work.tag), None)
        if message is None:
            return
        link.arrived.remove(message)
        _, number, data = message
        assert len(data) == len(work.view), f"{len(data)} bytes came for a receive of {len(work.view)}"
        assert link.inward is not None
        work.view[:] = data
        work.is_done = True
        with contextlib.suppress(OSError):  # the process that sent it has died since
            link.inward.send(_NUMBER.pack(number))


def _fill(connection: socket.socket | None, buffer: bytearray) -> bool:
    while connection is not None:
        try:
            data = connection.recv(_READ_NBYTES)
        except BlockingIOError:
            break
        except OSError:
            return False
        if not data:
            return False
        buffer += data
    return True


def register() -> None:
    """Tell torch of all of them."""
    for name in NAMES:
        dist.Backend.register_backend(name, partial(Group, kind=name), devices=["cpu"])
