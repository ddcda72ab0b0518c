"""Exchanges each rank's result or exception, so that an error on one rank is raised on all.

All members send a *header* of fixed size before any data: so an exception reaches every rank and leaves none waiting
for data that will never come. A header says whether its rank has a value, an exception or nothing, and holds values up
to 1,000 bytes and the words of an exception themselves; larger values follow in a second collective, whose sizes all
members then know. It also says which operation its rank has called, and with which root: where these differ, all
members get a DisagreementError that names both.

**Cancellation**: an exchange that has been started ends in the background and keeps its turn in the group, since the
others count on it.
"""

from __future__ import annotations

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

T = TypeVar("T")

HEADER_NBYTES: Final = 1024
#: Bytes of the payload; status, operation and root.
_FORMAT: Final = struct.Struct("<QBBi")
#: What a header can hold itself.
INLINE_NBYTES: Final = HEADER_NBYTES - _FORMAT.size
_NOTHING, _VALUE, _ERROR = range(3)
#: Operations that begin with headers; a header names one by its place here.
_OPERATIONS: Final = (
    "barrier",
    "compute_and_broadcast",
    "gather_from_all_ranks",
    "gather_scalar_from_all_ranks",
    "reduce_and_broadcast",
    "zero_first",
    "zero_only",
    "average_models",
    "average_gradients",
    "gather_distributed_data",
    "save_population",
    "load_population",
)
_NO_ROOT: Final = -1


@dataclass(frozen=True, slots=True)
class Call:
    """Names the operation that a rank has called.

    Attributes:
        operation: one of those that begin with headers.
        root: its root, where it has one; another value than a rank is refused in the result.
    """

    operation: str
    root: Any = None

    def __str__(self) -> str:
        return f"{self.operation}()" if self.root is None else f"{self.operation}(root={self.root})"


@dataclass(frozen=True, slots=True)
class LocalResult:
    """Holds the result of a computation on this rank.

    Attributes:
        value: what it returned.
        payload: the same as bytes; None where there is an error, or nothing was computed.
        error: what it raised, an unsupported type of its value included.
    """

    value: Any = None
    payload: bytes | None = None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class ResultHeader:
    """Holds what a member says of its result.

    Attributes:
        rank: the member.
        call: what it has called.
        status: nothing, value or error.
        nbytes: size of the payload.
        inline: the payload, where the header can hold it.
    """

    rank: int
    call: Call
    status: int
    nbytes: int
    inline: bytes = field(repr=False)

    @property
    def has_value(self) -> bool:
        """Whether the member computed something, and it succeeded."""
        return self.status == _VALUE

    @property
    def has_error(self) -> bool:
        """Whether the member's computation raised."""
        return self.status == _ERROR

    @property
    def later_nbytes(self) -> int:
        """Size of the payload if it does not fit, and follows in a collective of its own; 0 otherwise."""
        return self.nbytes if self.has_value and self.nbytes > INLINE_NBYTES else 0

    def remote_error(self) -> RemoteError:
        """Make the member's exception, as the other ranks raise it. Raises RemoteProtocolError."""
        words = serialization.decode(self.inline)
        if type(words) is not list or list(map(type, words)) != [str, str]:
            raise RemoteProtocolError(f"rank {self.rank} failed, and says {words!r:.80} of it", rank=self.rank)
        return remote_error(self.rank, *words)


async def attempt(
    fn: Callable[[], Any] | None,
    to_payload: Callable[[Any], bytes] = serialization.encode,
    *,
    checks: Sequence[Callable[[], None]] = (),
) -> LocalResult:
    """Call ``fn``, await what it returns if it is awaitable, and write the value down. Never raises.

    Args:
        fn: None where this rank computes nothing.
        to_payload: writes the value down.
        checks: of what was passed to the operation, called first. A mistake on one rank is told like any exception.
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
    except BaseException as error:  # the caller raises it, once the others have been told
        return LocalResult(error=error)


async def run_and_raise(
    collectives: Collectives,
    group: Group,
    outcome: LocalResult,
    work: Callable[[Collectives], Coroutine[Any, Any, T]],
    *,
    on_end: Callable[[], None] | None = None,
) -> T:
    """Run the collectives that make a result known, then raise its error, if any.

    An error that is no ``Exception`` (a cancellation, an interrupt, an exit) is raised at once, and sent in the
    background. ``on_end`` is called when the collectives have ended, well or not, or are not begun.
    """
    error = outcome.error
    if isinstance(error, GeneratorExit):  # the caller is being thrown away, perhaps with its loop
        if on_end is not None:
            on_end()
        raise error
    task = collectives.start_sequence(group, work)
    if on_end is not None:
        task.add_done_callback(lambda _: on_end())
    if error is not None and not isinstance(error, Exception):
        raise error
    try:
        result = await collectives.join(task, group)
    except AsyncdistError:
        if error is None:
            raise
        raise error from None  # it came first
    if error is not None:
        raise error
    return result


async def exchange_headers(
    collectives: Collectives, group: Group, outcome: LocalResult, call: Call
) -> list[ResultHeader]:
    """Return every member's header, in the group's order, on every member.

    Raises:
        DisagreementError: members have called different operations, or with different roots; on every member.
    """
    parts = await collectives.all_gather(_to_tensor(_pack_header(outcome, call)), group)
    headers = [_read_header(rank, part) for rank, part in zip(group.ranks, parts, strict=True)]
    _check_same_call(headers)
    return headers


def _check_same_call(headers: Sequence[ResultHeader]) -> None:
    """Raise unless all members call the same. Where one has failed its root may be the reason, and is not compared."""
    first = headers[0]
    ignores_root = any(header.has_error for header in headers)
    for header in headers:
        if header.call == first.call or (ignores_root and header.call.operation == first.call.operation):
            continue
        raise DisagreementError(
            f"rank {first.rank} calls {first.call}, rank {header.rank} {header.call}; allowed: the same on all members",
            ranks=(first.rank, header.rank),
        )


async def collect(
    collectives: Collectives, group: Group, outcome: LocalResult, call: Call
) -> tuple[list[ResultHeader], list[bytes] | None]:
    """Bring every member's payload to the call's root.

    Returns:
        Every member's header; and the payloads on the root if no member failed, else None.
    """
    headers = await exchange_headers(collectives, group, outcome, call)
    root = call.root
    sizes = [header.later_nbytes for header in headers]
    if any(header.has_error for header in headers):
        return headers, None
    later: torch.Tensor | None = torch.empty(0, dtype=torch.uint8, device="cpu")
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
    """Bring ``root``'s header and payload to every member. ``outcome`` counts on ``root`` only."""
    packed = _to_tensor(_pack_header(outcome, Call(_OPERATIONS[0], root)))
    header = _read_header(root, await collectives.broadcast(packed, group, root))
    return header, await share_payload(collectives, group, outcome, header)


async def share_payload(collectives: Collectives, group: Group, outcome: LocalResult, header: ResultHeader) -> bytes:
    """Bring the payload that belongs to ``header``, which all members have, to all of them."""
    root = header.rank
    if not header.later_nbytes:
        return header.inline
    is_root = group.ranks[group.index] == root
    buffer = (
        _to_tensor(outcome.payload or b"") if is_root else torch.empty(header.nbytes, dtype=torch.uint8, device="cpu")
    )
    return bytes((await collectives.broadcast(buffer, group, root)).numpy())


def raise_first_error(headers: Sequence[ResultHeader]) -> None:
    """Raise the first member's exception, in the group's order, as a RemoteError."""
    for header in headers:
        if header.has_error:
            raise header.remote_error()


def _pack_header(outcome: LocalResult, call: Call) -> bytes:
    if outcome.error is not None:
        status, payload = _ERROR, serialization.encode(list(serialization.words_of(outcome.error)))
    else:
        status, payload = (_NOTHING, b"") if outcome.payload is None else (_VALUE, outcome.payload)
    inline = payload if len(payload) <= INLINE_NBYTES else b""
    root = call.root if type(call.root) is int and 0 <= call.root < 1 << 31 else _NO_ROOT
    header = _FORMAT.pack(len(payload), status, _OPERATIONS.index(call.operation), root)
    return (header + inline).ljust(HEADER_NBYTES, b"\0")


def _read_header(rank: int, tensor: torch.Tensor) -> ResultHeader:
    data = bytes(tensor.numpy())
    nbytes, status, operation, root = _FORMAT.unpack_from(data)
    if status > _ERROR or operation >= len(_OPERATIONS):
        what = f"status {status} of operation {operation}"
        raise RemoteProtocolError(f"rank {rank} sent a header with {what}, which do not exist", rank=rank)
    inline = data[_FORMAT.size : _FORMAT.size + nbytes] if nbytes <= INLINE_NBYTES else b""
    return ResultHeader(rank, Call(_OPERATIONS[operation], None if root == _NO_ROOT else root), status, nbytes, inline)


def _to_tensor(data: bytes) -> torch.Tensor:
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
