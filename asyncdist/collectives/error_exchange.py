"""Exchanges each rank's result or exception, so that an error on one rank is raised on all ranks.

All members first exchange a *header* of fixed size, so that no rank waits for data that another rank cannot send. The
header contains the rank's operation and root, and either a small value or the text of an exception. Values of more than
900 bytes follow in a second collective. If operations or roots differ, all members get a DisagreementError.

**Cancellation**: an exchange that has begun completes in the background even if its caller is cancelled, because the
other members depend on it.
"""

from __future__ import annotations

import asyncio
import inspect
import struct
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import torch

from asyncdist.collectives.collectives import Collectives
from asyncdist.collectives.groups import Group
from asyncdist.errors import AsyncdistError, DisagreementError, RemoteError, RemoteProtocolError, remote_error
from asyncdist.tensors import serialization
from asyncdist.tensors.byte_views import new_memory

T = TypeVar("T")

HEADER_NBYTES: Final = 1024
#: Format of the header: size of the payload, status, operation and root.
_FORMAT: Final = struct.Struct("<QB32si")
#: Largest payload that fits into a header, in bytes.
INLINE_NBYTES: Final = HEADER_NBYTES - _FORMAT.size
_NOTHING, _VALUE, _ERROR = range(3)
_NO_ROOT: Final = -1


@dataclass(frozen=True, slots=True)
class Call:
    """The operation that a rank has called, and its root rank.

    The operation is the name of the called function, of at most 32 characters. If the root is not a rank, all members
    raise an error.
    """

    operation: str
    root: Any = None

    def __str__(self) -> str:
        return f"{self.operation}()" if self.root is None else f"{self.operation}(root={self.root})"


@dataclass(frozen=True, slots=True)
class LocalResult:
    """Result of a computation on this rank: a value and its encoded form ``payload``, or an exception, or neither."""

    value: Any = None
    payload: bytes | None = None
    error: BaseException | None = None

    def raise_if_cancelled(self) -> None:
        """Raise the error if it is a CancelledError because the current task is being cancelled."""
        task = asyncio.current_task()
        if isinstance(self.error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise self.error


@dataclass(frozen=True, slots=True)
class ResultHeader:
    """Message that describes the result of a member's computation: a value, an exception or nothing.

    Attributes:
        status: 0 for no result, 1 for a value, 2 for an exception.
        inline: Encoded value or exception, if it fits into the header.
    """

    rank: int
    call: Call
    status: int
    nbytes: int
    inline: bytes = field(repr=False)

    @property
    def has_value(self) -> bool:
        """Whether the member's computation returned a value."""
        return self.status == _VALUE

    @property
    def has_error(self) -> bool:
        """Whether the member's computation raised an exception."""
        return self.status == _ERROR

    @property
    def later_nbytes(self) -> int:
        """Size in bytes of a value that follows in a second collective, or 0 if the header contains the value."""
        return self.nbytes if self.has_value and self.nbytes > INLINE_NBYTES else 0

    def remote_error(self) -> RemoteError:
        """Return the RemoteError that describes the member's exception to the other ranks."""
        words = serialization.decode(self.inline)
        if type(words) is not list or list(map(type, words)) != [str, str]:
            raise RemoteProtocolError(
                f"rank {self.rank} failed and sent an invalid description of its error: {words!r:.80}", rank=self.rank
            )
        return remote_error(self.rank, *words)


async def attempt(
    fn: Callable[[], Any] | None,
    to_payload: Callable[[Any], bytes] = serialization.encode,
    *,
    checks: Sequence[Callable[[], None]] = (),
) -> LocalResult:
    """Call ``fn``, await the result if it is awaitable, and encode it. Return an exception instead of raising it.

    Args:
        fn: Function to call, or None if this rank computes nothing.
        to_payload: Function that converts the value to bytes.
        checks: Functions that check the operation's arguments, called first. Their errors are handled like those of
            ``fn``.
    """
    try:
        for check in checks:
            check()
        if fn is None:
            return LocalResult()
        value = fn()
        if inspect.isawaitable(value):
            value = await value
        return LocalResult(value, to_payload(value))
    except BaseException as error:  # The caller raises the error after the exchange.
        return LocalResult(error=error)


async def run_and_raise(
    collectives: Collectives,
    group: Group,
    outcome: LocalResult,
    work: Callable[[Collectives], Coroutine[Any, Any, T]],
    *,
    on_end: Callable[[], None] | None = None,
    raises_at_once: bool = False,
) -> T:
    """Run the collectives that exchange this rank's result. Afterwards, raise the error of ``outcome``, if any.

    An error that is not an ``Exception``, such as a cancellation, is raised immediately, and sent in the background.
    With ``raises_at_once``, so is every error. ``on_end`` is called when the collectives have ended for any reason,
    even if they were not started.
    """
    error = outcome.error
    try:
        if isinstance(error, GeneratorExit):  # The caller's coroutine is being closed; its event loop may have ended.
            raise error
        task = collectives.start_sequence(group, work)
    except BaseException:
        if on_end is not None:
            on_end()
        raise
    if on_end is not None:
        task.add_done_callback(lambda _: on_end())
    if error is not None and (raises_at_once or not isinstance(error, Exception)):
        raise error
    try:
        result = await collectives.join(task, group)
    except AsyncdistError:
        if error is None:
            raise
        raise error from None  # This rank's own error occurred first.
    if error is not None:
        raise error
    return result


async def exchange_headers(
    collectives: Collectives, group: Group, outcome: LocalResult, call: Call
) -> list[ResultHeader]:
    """Exchange the headers that describe the members' results, and return them in the group's order.

    Raises:
        DisagreementError: The members have called different operations, or with different roots.
    """
    parts = await collectives.all_gather(_to_tensor(_pack_header(outcome, call)), group)
    headers = [_read_header(rank, part) for rank, part in zip(group.ranks, parts, strict=True)]
    _check_same_call(headers)
    return headers


def _check_same_call(headers: Sequence[ResultHeader]) -> None:
    """Raise DisagreementError unless all calls are equal. Roots are not compared if a member has failed."""
    first = headers[0]
    ignores_root = any(header.has_error for header in headers)
    for header in headers:
        if header.call == first.call or (ignores_root and header.call.operation == first.call.operation):
            continue
        raise DisagreementError(
            f"all members must make the same call, but rank {first.rank} calls {first.call} and rank {header.rank} "
            f"calls {header.call}",
            ranks=(first.rank, header.rank),
        )


async def collect(
    collectives: Collectives, group: Group, outcome: LocalResult, call: Call
) -> tuple[list[ResultHeader], list[bytes] | None]:
    """Return all members' headers and payloads.

    The payloads are None if a member failed, and on ranks other than the root.
    """
    headers = await exchange_headers(collectives, group, outcome, call)
    root = call.root
    sizes = [header.later_nbytes for header in headers]
    if any(header.has_error for header in headers):
        return headers, None
    later: torch.Tensor | None = new_memory(0)
    if any(sizes):
        own = outcome.payload if sizes[group.index] else b""
        later = await collectives.gather_bytes(_to_tensor(own or b""), sizes, group, root)
    if later is None or group.ranks[group.index] != root:
        return headers, None
    parts = torch.split(later, sizes)
    return headers, [
        bytes(part.numpy()) if size else header.inline for header, part, size in zip(headers, parts, sizes, strict=True)
    ]


async def share(collectives: Collectives, group: Group, outcome: LocalResult, root: int) -> tuple[ResultHeader, bytes]:
    """Send the root's result to all members. Return its header and payload. ``outcome`` is used only on the root."""
    packed = _to_tensor(_pack_header(outcome, Call("share", root)))
    header = _read_header(root, await collectives.broadcast(packed, group, root))
    return header, await share_payload(collectives, group, outcome, header)


async def share_payload(collectives: Collectives, group: Group, outcome: LocalResult, header: ResultHeader) -> bytes:
    """Send the payload of one member, whose ``header`` all members have, to all members, and return the payload."""
    root = header.rank
    if not header.later_nbytes:
        return header.inline
    is_root = group.ranks[group.index] == root
    buffer = _to_tensor(outcome.payload or b"") if is_root else new_memory(header.nbytes)
    return bytes((await collectives.broadcast(buffer, group, root)).numpy())


def raise_first_error(headers: Sequence[ResultHeader]) -> None:
    """Raise a RemoteError for the first member, in the group's order, that has raised an exception."""
    for header in headers:
        if header.has_error:
            raise header.remote_error()


def _pack_header(outcome: LocalResult, call: Call) -> bytes:
    if outcome.error is not None:
        status, payload = _ERROR, serialization.encode(list(serialization.name_and_message(outcome.error)))
    else:
        status, payload = (_NOTHING, b"") if outcome.payload is None else (_VALUE, outcome.payload)
    inline = payload if len(payload) <= INLINE_NBYTES else b""
    root = call.root if type(call.root) is int and 0 <= call.root < 1 << 31 else _NO_ROOT
    header = _FORMAT.pack(len(payload), status, call.operation.encode(), root)
    return (header + inline).ljust(HEADER_NBYTES, b"\0")


def _read_header(rank: int, tensor: torch.Tensor) -> ResultHeader:
    data = bytes(tensor.numpy())
    nbytes, status, name, root = _FORMAT.unpack_from(data)
    operation = name.rstrip(b"\0").decode(errors="replace")
    if status > _ERROR or not operation.isidentifier():
        what = f"status {status} and operation {operation!r}"
        raise RemoteProtocolError(f"rank {rank} sent a header with invalid {what}", rank=rank)
    inline = data[_FORMAT.size : _FORMAT.size + nbytes] if nbytes <= INLINE_NBYTES else b""
    return ResultHeader(rank, Call(operation, None if root == _NO_ROOT else root), status, nbytes, inline)


def _to_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else new_memory(0)
