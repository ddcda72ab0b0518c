"""Encodes contributions of a model on a stand-in for a GPU, and checks where values are computed and what is copied.

The stand-in is a device of torch whose tensors have their data in host memory. Operations on them are made there, and
copies between the device and the host are counted. A process cannot remove the device again, so this is a program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import asyncdist as ad
from asyncdist.tensors import flat_state
from asyncdist.tensors.codecs import codec, find_codec
from asyncdist.tensors.flat_state import FlatState
from protocols import DiLoCoPolicy
from protocols.exchange.layout import copies
from protocols.exchange.layout.copies import Encoder
from protocols.exchange.layout.wire_layout import WireLayout

NAME = "standin"


class OnDevice(Tensor):
    """A tensor on the stand-in, with its data in the host tensor ``on_host``."""

    on_host: Tensor

    @staticmethod
    def __new__(cls, on_host: Tensor) -> OnDevice:
        made = Tensor._make_wrapper_subclass(
            cls,
            on_host.shape,
            strides=on_host.stride(),
            storage_offset=on_host.storage_offset(),
            dtype=on_host.dtype,
            device=torch.device(NAME, 0),
        )
        made.on_host = on_host
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError(f"{func} was called outside a block of Device")


class Device(TorchDispatchMode):
    """Makes operations on the stand-in's tensors, and counts the bytes that are copied to and from the host."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.to_host = self.from_host = 0
        self.largest = 0  # size in bytes of the largest tensor that was made on the device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        is_on_device = any(isinstance(each, OnDevice) for each in pytree.tree_leaves((args, named)))
        if named.get("device") is not None:
            was, is_on_device = is_on_device, torch.device(named["device"]).type == NAME
            named["device"] = "cpu"
            self._note(was, is_on_device, args[0] if args and isinstance(args[0], Tensor) else None)
        if func is torch.ops.aten.copy_.default:
            self._note(isinstance(args[1], OnDevice), isinstance(args[0], OnDevice), args[0])
        made = func(*pytree.tree_map(_inner, args), **pytree.tree_map(_inner, named))
        if args and made is _inner(args[0]):  # an operation in place
            return args[0]
        return pytree.tree_map(self._wrapped, made) if is_on_device else made

    def _note(self, is_from_device: bool, is_to_device: bool, moved: Tensor | None) -> None:
        if moved is not None and is_from_device != is_to_device:
            self.to_host += moved.nbytes if is_from_device else 0
            self.from_host += moved.nbytes if is_to_device else 0

    def _wrapped(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        self.largest = max(self.largest, value.nbytes)
        return OnDevice(value)


def _inner(value: Any) -> Any:
    return value.on_host if isinstance(value, OnDevice) else value


def contributions(name: str, decay: float | None, on_device: bool) -> tuple[list[list[Tensor]], list[Tensor], Device]:
    """Return the encoded contributions of two rounds, the last residuals and the device with its counts."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 90), nn.Linear(90, 31).bfloat16(), nn.BatchNorm1d(31))
    entries, names = FlatState(model).entries, set(dict(model.named_parameters()))
    layout = WireLayout(entries, range(len(entries)), names, 3, find_codec(name))
    own = [torch.randn(entry.shape).to(entry.dtype) for entry in entries]
    anchors = [torch.randn(vector.count) for vector in layout.stepped]
    tested, device, sent = Encoder(layout, decay), Device(), []
    with device:
        for number in range(2):
            tensors = [OnDevice(each) if on_device else each for each in own]
            encoded = layout.new_encoded()
            norm = tested.encode(tensors, encoded, anchors if number != 1 else ())
            assert 0 < norm < float("inf")
            sent.append(encoded)
            for each in own:
                each.add_(1)
    return sent, tested.residuals, device


def check(name: str, decay: float | None) -> None:
    """Compare the contributions of a model on the stand-in with those of a model on the host, and count the copies."""
    here, kept_here, _ = contributions(name, decay, on_device=False)
    there, kept_there, device = contributions(name, decay, on_device=True)
    for each, other in zip(here, there, strict=True):
        assert all(torch.equal(one, two) for one, two in zip(each, other, strict=True)), name
    assert all(torch.equal(one, two) for one, two in zip(kept_here, kept_there, strict=True)), name
    sent = sum(each.nbytes for each in there[0]) * len(there)
    residuals = sum(each.nbytes for each in kept_there) * len(there)
    assert sent + residuals - 64 < device.to_host <= sent + residuals, (name, device.to_host, sent, residuals)  # gaps
    assert device.largest <= 4 * PIECE * 8, (name, device.largest)


def check_not_finite() -> None:
    """A contribution that is not finite leaves the residuals unchanged."""
    layout_of = nn.Linear(40, 300)
    entries, names = FlatState(layout_of).entries, set(dict(layout_of.named_parameters()))
    layout = WireLayout(entries, range(len(entries)), names, 2, find_codec("int8"))
    tested = Encoder(layout, 1.0)
    with Device():
        tensors: list[Tensor] = [OnDevice(torch.randn(entry.shape)) for entry in entries]
        assert tested.encode(tensors, layout.new_encoded()) > 0
        before = [each.clone() for each in tested.residuals]
        assert any(each.any() for each in before)
        tensors[-1] = OnDevice(torch.full(entries[-1].shape, float("inf")))
        assert not tested.encode(tensors, layout.new_encoded()) < float("inf")
        assert all(torch.equal(one, two) for one, two in zip(before, tested.residuals, strict=True))


def trained(options: Mapping[str, Any], on_device: bool) -> tuple[list[Tensor], Device]:
    """Return the weights of both ranks after two rounds of DiLoCo, and the device with its counts."""
    device, ended = Device(), list[Tensor]()

    async def main(world: ad.World) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 90), nn.Linear(90, 31), nn.BatchNorm1d(31))
        if on_device:
            for module in model.modules():
                for name, own in list(module.named_parameters(recurse=False)):
                    setattr(module, name, nn.Parameter(OnDevice(own.detach())))
                for name, buffer in list(module.named_buffers(recurse=False)):
                    setattr(module, name, OnDevice(buffer))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        async with DiLoCoPolicy(model, optimizer, average_every=2, **options) as policy:
            for step in range(4):
                with torch.no_grad():
                    for place, each in enumerate(model.parameters()):
                        each.add_(0.01 * (world.rank + 1) * (step + 1) * (place - 2))
                await policy.step()
        ended.extend(_inner(each.detach()).clone() for each in model.parameters())

    with device:
        ad.run_local(main, ranks=2, strict=True)
    return ended, device


def check_training(**options: Any) -> Device:
    """Train on the stand-in and on the host, and compare the weights bit for bit."""
    here, _ = trained(options, on_device=False)
    there, device = trained(options, on_device=True)
    assert len(here) == len(there) == 12
    assert all(torch.equal(one, two) for one, two in zip(here, there, strict=True)), options
    return device


def accept_stand_in() -> None:
    """Register the stand-in, encode contributions on it, and let policies take its tensors, which have no address."""
    _setup_privateuseone_for_python_backend(NAME)
    vars(copies).update(_DEVICE_TYPES=(NAME,))
    vars(codec).update(_DEVICE_PIECE_COUNT=PIECE)
    check_supported = vars(flat_state)["check_supported"]

    def check_others(name: str, tensor: Tensor) -> None:
        if tensor.device.type != NAME:
            check_supported(name, tensor)

    vars(flat_state).update(
        check_supported=check_others, identity_of=lambda tensor: (id(tensor),), check_overlap=lambda named: None
    )


PIECE = 2048
if __name__ == "__main__":
    accept_stand_in()
    for name in ("bfloat16", "float16", "int8", "q4", "topk"):
        for decay in (None, 0.9):
            check(name, decay)
    check_not_finite()
    plain, short = check_training(), check_training(wire="int8")
    # Two ranks contribute 6,573 values twice, each as 1.016 bytes in place of 4.
    assert plain.to_host - short.to_host > 4 * 6_573 * 2.9, (plain.to_host, short.to_host)
    check_training(wire="int8", error_feedback=0.9, fragments=2, fragment_pattern="balanced")
    print("equal")
