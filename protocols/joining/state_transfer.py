"""Sends a member's optimizer and policy state to a restarted rank, in addition to the weights.

In the step that copies the weights, the sender copies the state into one uint8 tensor. The tensor contains a
description of the state, without executable code, and then the contents of all tensors. The restarted rank receives two
streams: the size, and then the state.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol, TypeAlias

import torch
from torch import nn

from asyncdist import BusyError, ClosedError, Envelope, Group, RankLostError, RemoteProtocolError, World, tags
from asyncdist.messaging import wire
from asyncdist.messaging.channels import Channel
from asyncdist.messaging.outbound_streams import OutboundStream
from asyncdist.messaging.services import Services
from asyncdist.messaging.streams import CHUNK_NBYTES, Cancel, Grant
from asyncdist.protocols.step_info import StepInfo
from asyncdist.tensors import serialization
from asyncdist.tensors.byte_views import byte_view, new_memory, split
from asyncdist.tensors.optimizers.loading import named_state

logger = logging.getLogger("protocols.joining.state_transfer")

_ALIGNMENT_NBYTES: Final = 16
#: First item of a tuple that describes a tensor. The other items are the dtype, the shape, and the offset in bytes.
_TENSOR: Final = "asyncdist tensor"
_LENGTH_NBYTES: Final = 8
#: Maximum size of a state that a rank accepts: this number of bytes plus this multiple of its model's size.
_STATE_NBYTES_MAX: Final = 64 << 20
_STATE_MODEL_COUNT_MAX: Final = 32


StateMessage: TypeAlias = Grant | Cancel


class StateSizeError(RemoteProtocolError):
    """Raised if the size of an offered state is not allowed. A later attempt would fail in the same way."""


def packed(value: Any) -> torch.Tensor:
    """Copy a tree of dicts, lists, tuples, numbers, strings and tensors into one uint8 tensor on the CPU."""
    tensors: list[tuple[int, torch.Tensor]] = []
    end = 0

    def place(node: Any) -> Any:
        nonlocal end
        if isinstance(node, torch.Tensor):
            tensor, begin = node.detach(), end
            tensors.append((begin, tensor))
            nbytes = tensor.numel() * tensor.element_size()
            end += -(-nbytes // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES
            return (_TENSOR, str(tensor.dtype), tuple(tensor.shape), begin)
        return _mapped(place, node)

    description = serialization.encode(place(value))
    head = -(-(_LENGTH_NBYTES + len(description)) // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES
    data = new_memory(head + end).zero_()
    bytes_of = byte_view(data)
    bytes_of[:_LENGTH_NBYTES] = len(description).to_bytes(_LENGTH_NBYTES, "little")
    bytes_of[_LENGTH_NBYTES : _LENGTH_NBYTES + len(description)] = description
    for begin, tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes:
            into = data[head + begin : head + begin + nbytes].view(tensor.dtype)
            into.view(tensor.shape).copy_(tensor)
    return data


def state_nbytes_max(model_nbytes: int) -> int:
    """Return the size in bytes of the largest state that a rank accepts for a model of this size."""
    return _STATE_NBYTES_MAX + _STATE_MODEL_COUNT_MAX * model_nbytes


@torch.inference_mode(False)  # views of another dtype would otherwise belong to the caller's inference mode
def unpacked(data: torch.Tensor) -> Any:
    """Restore a tree that :func:`packed` has packed. Its tensors are views of ``data``.

    Raises:
        RemoteProtocolError: The bytes are not a packed tree.
    """
    try:
        return _unpacked(data)
    except Exception as error:  # torch raises many types of exceptions for malformed data
        raise RemoteProtocolError(f"{data.numel()} bytes are not a valid state: {error}") from error


def _unpacked(data: torch.Tensor) -> Any:
    length = int.from_bytes(bytes(byte_view(data[:_LENGTH_NBYTES])), "little")
    if not 0 <= length <= data.numel() - _LENGTH_NBYTES:
        raise ValueError(f"the description must fit into the state of {data.numel()} bytes, got {length} bytes")
    head = -(-(_LENGTH_NBYTES + length) // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES

    def restore(node: Any) -> Any:
        if isinstance(node, tuple) and len(node) == 4 and node[0] == _TENSOR:
            _, name, shape, begin = node
            dtype = getattr(torch, str(name).removeprefix("torch."), None)
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"the dtype of a tensor must be the name of a torch dtype, got {name!r:.80}")
            count = 1
            for extent in shape:
                count *= extent
            nbytes = count * dtype.itemsize
            if min((begin, *shape)) < 0 or head + begin + nbytes > data.numel():
                raise ValueError(
                    f"a tensor must lie inside the state of {data.numel()} bytes, got {nbytes} bytes at offset {begin}"
                )
            if not nbytes:
                return torch.empty(shape, dtype=dtype, device="cpu")
            return data[head + begin : head + begin + nbytes].view(dtype).view(shape)
        return _mapped(restore, node)

    return restore(serialization.decode(byte_view(data[_LENGTH_NBYTES : _LENGTH_NBYTES + length])))


@torch.inference_mode(False)  # the copy is used after the caller's inference mode has ended
def cloned(node: Any) -> Any:
    """Return a copy of a tree. The copy's tensors do not share the memory of a received state."""
    return node.clone() if isinstance(node, torch.Tensor) else _mapped(cloned, node)


def _mapped(change: Any, node: Any) -> Any:
    if isinstance(node, Mapping):
        return {key: change(value) for key, value in node.items()}
    if isinstance(node, tuple):
        return tuple(change(value) for value in node)
    return [change(value) for value in node] if isinstance(node, list) else node


def _chunks(state: torch.Tensor | None, nbytes: int) -> list[memoryview] | None:
    """Return the chunks of the state or of its encoded size, whichever has ``nbytes`` bytes, or None."""
    if state is not None and nbytes == _LENGTH_NBYTES:
        return [memoryview(bytearray(state.numel().to_bytes(_LENGTH_NBYTES, "little")))]
    return split(byte_view(state), CHUNK_NBYTES) if state is not None and nbytes == state.numel() else None


class WholeState(Protocol):
    """Interface to save a member's optimizer and policy state."""

    def whole_state(self) -> Mapping[str, Any]:
        """Return the state as a tree of dicts, lists, tuples, numbers, strings and tensors."""


class StateAdopter(Protocol):
    """Interface to adopt another rank's optimizer and policy state when this rank copies that rank's weights."""

    def obstacle(self, parts: Mapping[str, Any]) -> str:
        """Return why this rank cannot adopt the state now, or "" if it can."""

    def prepare(self, parts: Mapping[str, Any], donor: int, round: int) -> Any:
        """Return the value that :meth:`adopt` needs. Leave this rank unchanged.

        If this method raises an exception, the round is postponed by a step.

        Args:
            parts: Result of :meth:`WholeState.whole_state` on the donor.
        """

    def adopt(self, prepared: Any, info: StepInfo) -> StepInfo:
        """Adopt the state after the weights were loaded, and complete ``info``, the result of the step."""


def copied(state: Callable[[], Mapping[str, Any]]) -> torch.Tensor | None:
    """Copy a member's ``state()`` to bytes. If it cannot be copied, log a warning and return None."""
    try:
        return packed(state())
    except (TypeError, ValueError, RuntimeError) as error:  # torch raises RuntimeError for tensors without a dense copy
        _warn_not_copied(str(error))
        return None


@functools.cache  # one warning per process, because each round repeats the attempt
def _warn_not_copied(why: str) -> None:
    logger.warning("other ranks cannot get this rank's state, since it cannot be copied: %s", why)


def check_sendable(model: nn.Module, optimizer: Any) -> None:
    """Raise TypeError or ValueError if an optimizer's state has a value that no rank could send to a restarted rank."""
    packed({"optimizer": named_state(model, optimizer)})


async def broadcast_bytes(world: World, own: torch.Tensor, group: Group, root: int) -> torch.Tensor:
    """Copy a uint8 tensor of ``root`` to all ranks of a group, and return it. Other ranks pass an empty tensor."""
    broadcast, size = world.collectives.broadcast, torch.tensor([own.numel()], device="cpu")
    await broadcast(size, group, root)
    data = own if root == world.rank else new_memory(int(size))
    await broadcast(data, group, root)
    return data


class StateTransfer:
    """Sends this rank's optimizer and policy state to restarted ranks, or receives a member's state.

    Args:
        policy: Number of the policy (:attr:`PolicyScopes.policy`).
    """

    def __init__(self, services: Services, policy: int) -> None:
        scope = wire.scope_of((), f"states of policy {policy}", 0)
        self._services = services
        self._offered: tuple[int, torch.Tensor] | None = None
        self._under_way: dict[tuple[int, int], OutboundStream] = {}
        self._channel: Channel[StateMessage] = services.open_channel(
            StateMessage, tag=tags.PARAM, scope=scope, name="states for newcomers", handler=self._on_message
        )

    def offer(self, round: int, state: torch.Tensor) -> None:
        """Let other ranks request ``state`` in ``round``, until :meth:`withdraw` is called."""
        self._offered = round, state

    def admit(self, rank: int) -> None:
        """Allow messages to and from the new process of a restarted rank."""
        self._channel.admit(rank)

    def withdraw(self) -> None:
        """Stop sending the offered state, and free its memory."""
        self._offered = None
        for stream in self._under_way.values():
            stream.stop()

    def withdraw_up_to(self, round: int) -> None:
        """Withdraw the offered state if it was offered in ``round`` or earlier."""
        if self._offered is not None and self._offered[0] <= round:
            self.withdraw()

    def close(self) -> None:
        """Stop sending and receiving states. Later requests are answered with an abort."""
        self.withdraw()
        self._channel.close(afterwards=self._on_message)

    async def take(self, donor: int, round: int, *, nbytes_max: int, deadline: Callable[[], float]) -> torch.Tensor:
        """Receive the state that ``donor`` offers in ``round``, as bytes for :func:`unpacked`.

        Args:
            deadline: Function that returns the deadline of the next chunk, a time on the loop's clock in seconds.

        Raises:
            RankLostError: The donor is lost or has left.
            TimeoutError: A chunk's deadline has passed.
            RemoteProtocolError: The donor offers no state, or has aborted.
            StateSizeError: The state is larger than ``nbytes_max``.
        """
        size = new_memory(_LENGTH_NBYTES)
        await self._receive(size, donor, round, deadline)
        nbytes = int.from_bytes(bytes(byte_view(size)), "little")
        if not _LENGTH_NBYTES < nbytes <= nbytes_max:
            raise StateSizeError(
                f"the state of rank {donor} must have more than {_LENGTH_NBYTES} and at most {nbytes_max} bytes, got "
                f"{nbytes}",
                rank=donor,
            )
        state = new_memory(nbytes)
        await self._receive(state, donor, round, deadline)
        return state

    async def _receive(self, into: torch.Tensor, donor: int, round: int, deadline: Callable[[], float]) -> None:
        services = self._services

        def cancel(slot: int) -> None:
            if donor not in services.gone:
                # A lost Cancel is harmless: a restarted donor ends the stream. The channel may already be closed.
                with contextlib.suppress(BusyError, ClosedError):
                    self._channel.send_nowait(Cancel(slot), donor)

        chunks = split(byte_view(into), CHUNK_NBYTES)
        with services.slots.inbound(donor, chunks, cancel) as stream:
            self._channel.send_nowait(Grant(stream.slot, into.numel(), CHUNK_NBYTES), donor, round=round)
            stream.flow()
            for index in range(len(chunks)):
                await stream.arrival(index, deadline=deadline())

    def _on_message(self, envelope: Envelope[StateMessage]) -> None:
        source, message = envelope.source, envelope.message
        if isinstance(message, Cancel):
            if (source, message.slot) in self._under_way:
                self._under_way[source, message.slot].stop()
            return
        offered, state = self._offered or (0, None)
        chunks = _chunks(state if offered == envelope.round else None, message.nbytes)
        stream = OutboundStream(self._services.slots, chunks or [], source, message.slot)
        self._under_way[source, message.slot] = stream
        self._services.spawn_service(self._answer(stream, is_given=chunks is not None), name=f"state to rank {source}")

    async def _answer(self, stream: OutboundStream, *, is_given: bool) -> None:
        key = stream.dest, stream.slot
        try:
            await (stream.run() if is_given else stream.abort())
        except RankLostError as error:
            logger.info("a newcomer is lost: %s", error)
        finally:
            if self._under_way.get(key) is stream:
                del self._under_way[key]
