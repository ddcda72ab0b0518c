"""Moves bytes between pairs of ranks, on a backend of torch.distributed whose works can be polled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from asyncdist.errors import TransportError
from asyncdist.transports.torch_distributed.failures import reason

#: Of everything; a backend may ignore it.
_GROUP_TAG: Final = 1


class Transit:
    """Bytes on their way, at either end, that the backend has.

    Args:
        work: the backend's.
        tensor: what it reads or writes.
        host: where a receive is to land, if that is not the tensor itself.
    """

    __slots__ = ("_host", "_tensor", "_work")

    def __init__(self, work: Any, tensor: torch.Tensor, host: torch.Tensor | None = None) -> None:
        self._work = work
        self._tensor = tensor
        self._host = host

    def is_completed(self) -> bool:
        """Return what the backend says, which may be wrong."""
        return bool(self._work.is_completed())

    def land(self) -> None:
        """Copy what has been received from the device to the host."""
        if self._host is not None:
            self._host.copy_(self._tensor)

    def test(self) -> bool:
        """Whether it is complete. Raises RuntimeError if it has failed."""
        if not self._work.is_completed():
            return False
        self._work.wait()  # returns at once, or raises what went wrong
        self.land()
        return True


class Pairs:
    """Moves bytes between pairs of ranks: per pair and direction in one order, which both ends keep.

    Args:
        make_group: makes a group of all ranks, given a name that is the same on all of them.
        rank: this one.
        device: where the backend wants tensors to be.
    """

    def __init__(self, make_group: Callable[[str], Any], rank: int, device: torch.device) -> None:
        self._rank = rank
        self._device = device
        self._up, self._down = make_group("up"), make_group("down")

    def send(self, view: memoryview, dest: int) -> Transit:
        """Start sending at least one byte."""
        tensor = _bytes_tensor(bytearray(view) if view.readonly else view).to(self._device)
        group = self._up if dest > self._rank else self._down
        return Transit(group.send([tensor], dest, _GROUP_TAG), tensor)

    def receive(self, view: memoryview, source: int) -> Transit:
        """Start receiving exactly as many bytes."""
        host = _bytes_tensor(view)
        group = self._up if source < self._rank else self._down
        if self._device.type == "cpu":
            return Transit(group.recv([host], source, _GROUP_TAG), host)
        tensor = torch.empty_like(host, device=self._device)
        return Transit(group.recv([tensor], source, _GROUP_TAG), tensor, host)

    def close(self) -> None:
        """Shut the groups down.

        Raises:
            TransportError: the backend does not want to.
        """
        try:
            for group in (self._up, self._down):
                group.shutdown()
        except RuntimeError as error:
            raise TransportError(f"torch's backend did not shut down: {reason(error)}") from error


def _bytes_tensor(buffer: Any) -> torch.Tensor:
    """Make a tensor over the buffer's own memory."""
    return torch.frombuffer(buffer, dtype=torch.uint8)
