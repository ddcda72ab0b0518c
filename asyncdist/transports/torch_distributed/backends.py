"""Knows the backends of torch.distributed and what each may carry here, and makes private groups on them.

- **gloo** carries everything. Its works cannot be polled, so threads wait for them
  (:mod:`asyncdist.transports.torch_distributed.gloo`).
- **NCCL** carries streams of tensors beside another transport, and no messages: it ignores tags and matches by the
  order of issue (pytorch#94819, #125079), a receive that waits holds a part of the GPU, and everything goes through the
  GPU's memory. NCCL itself was never run under this code: what is tested is tested with backends that behave like it.
- **Any other** that Python code has registered carries both, where its works pass the test of
  :mod:`asyncdist.transports.torch_distributed.backend_self_test` at the start.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final, Literal

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import _DistributedBackendOptions
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from asyncdist.errors import TransportError
from asyncdist.transports.torch_distributed.failures import reason
from asyncdist.transports.torch_distributed.keepalive import probed_connections
from asyncdist.transports.torch_distributed.meeting.sealed_store import SealedStore

GLOO: Final = "gloo"
_NCCL: Final = "nccl"
_POISON_TAG: Final = 0x7FFFFFFE
_PROOF_TAG: Final = 0x7FFFFFFC
_LOOPBACK: Final = "127.0.0.1"
#: For backends that end the process when a work lasts longer: a peer may compute for hours before it answers.
_FOREVER: Final = timedelta(days=365)
_SAFE_CHOICE: Final = "The backend of choice for messages is gloo: 'torch:gloo', or 'torch'"


def check_backend(name: str, *, what: Literal["transport", "bulk"] = "transport") -> None:
    """Refuse a backend that cannot carry what it is to carry. Whether its works can be polled shows at the start only.

    Args:
        name: as torch.distributed has registered it.
        what: ``"transport"``: messages and streams; ``"bulk"``: streams of tensors beside another transport.

    Raises:
        ValueError: there is no such backend, or it cannot be used; says why.
    """
    if name == GLOO:
        return
    problem = _problem(name, what)
    if problem is not None:
        raise ValueError(f"{what} is 'torch:{name}'{problem}. {_SAFE_CHOICE}")


def _problem(name: str, what: str) -> str | None:
    registered = [known for known in dist.Backend.backend_list if known != dist.Backend.UNDEFINED]
    if name not in registered:
        return f"; this torch has registered {', '.join(registered)}"
    if name == _NCCL and what == "transport":
        return (
            ", but NCCL ignores tags and matches messages by the order of issue, so it cannot carry channels; "
            "bulk='torch:nccl' gives it the streams of tensors alone"
        )
    if not dist.is_backend_available(name):
        return ", which this torch was built without"
    if name != _NCCL and name.upper() not in dist.Backend._plugins:
        return ", for which nothing here can make a group"
    kind = _device_type(name)
    if kind != "cpu" and not torch.get_device_module(kind).is_available():
        return f", which moves {kind} tensors alone, and torch sees no such device here"
    return None


def describe_use(name: str) -> str:
    """Say in a few words what an available backend is used for."""
    if name == GLOO:
        return "messages and streams, waited for by threads"
    for what, use in (("transport", "messages and streams, polled"), ("bulk", "streams alone, polled")):
        if _problem(name, what) is None:
            return f"{use}, if its works pass the test at the start"
    return "unused here"


def _device_type(name: str) -> str:
    """Return the type of device that a backend's tensors live on."""
    kinds = dist.Backend.backend_capability.get(name, ["cpu"])
    return "cpu" if "cpu" in kinds else str(kinds[0])


def device_of(name: str, local_rank: int | None) -> torch.device:
    """Return the device of this rank's tensors, for a backend that :func:`check_backend` has accepted.

    Args:
        name: of the backend.
        local_rank: this rank's number on its host, which says which device is its own; None takes the current one.
    """
    kind = _device_type(name)
    if kind == "cpu":
        return torch.device("cpu")
    module = torch.get_device_module(kind)
    return torch.device(kind, module.current_device() if local_rank is None else local_rank % module.device_count())


def make_group(name: str, key: str, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Make a private group of all ranks, beside torch's default one and those of the user.

    Args:
        name: of a backend that :func:`check_backend` has let pass.
        key: the group's own part of the store, the same on all ranks.
        store: of this world.
        rank: this one.
        size: how many there are.
        timeout: for meeting.

    Raises:
        TransportError: it cannot be made; says what torch said.
    """
    place = PrefixStore(key, store)
    try:
        if name == _NCCL:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = _FOREVER
            return dist.ProcessGroupNCCL(place, rank, size, options)
        plugin = dist.Backend._plugins[name.upper()]
        if not plugin.extended_api:
            return plugin.creator_fn(place, rank, size, timeout)
        extended = _DistributedBackendOptions()
        extended.store, extended.group_rank, extended.group_size = place, rank, size
        extended.timeout, extended.group_id = timeout, key
        extended.global_ranks_in_group = list(range(size))
        return plugin.creator_fn(extended, None)
    except RuntimeError as error:
        raise TransportError(f"torch's backend {name!r} made no group of {size} ranks: {reason(error)}") from error


def close_connections(group: Any) -> None:
    """Close every connection of the group, as a wait that times out does (pytorch wraps gloo's own behaviour)."""
    with contextlib.suppress(RuntimeError):
        group.recv_anysource([torch.zeros(1, dtype=torch.uint8, device="cpu")], _POISON_TAG).wait(
            timedelta(milliseconds=1)
        )


def prove_connections(groups: Sequence[Any], rank: int, size: int, timeout: timedelta, store: SealedStore) -> None:
    """Let each process of new gloo groups prove to each other one, over their connection, that it knows the secret.

    gloo takes whoever reaches its port, and names the number of a connection, for that rank. Where the processes
    connect is sealed in the store, so an outsider can only come before a rank to the port of another one: it has no
    proof, and the groups are given up.

    Args:
        groups: The groups.
        rank: This process's place in them.
        size: How many processes there are.
        timeout: For all proofs.
        store: The part of the store by which the processes have met: its name is that of their connections.

    Raises:
        TransportError: A process did not prove it; names it.
    """
    if store.secret.is_missing:
        return
    peers = [peer for peer in range(size) if peer != rank]
    for number, group in enumerate(groups):
        name = f"{store.prefix}{number}"
        own = [_as_tensor(store.secret.proof(name, rank, peer)) for peer in peers]
        theirs = [torch.zeros_like(tensor) for tensor in own]
        receives = [group.recv([tensor], peer, _PROOF_TAG) for tensor, peer in zip(theirs, peers, strict=True)]
        sends = [group.send([tensor], peer, _PROOF_TAG) for tensor, peer in zip(own, peers, strict=True)]
        for peer, receive, tensor in zip(peers, receives, theirs, strict=True):
            try:
                receive.wait(timeout)
            except RuntimeError as error:
                raise TransportError(
                    f"place {peer} of {size} did not prove that it knows the job's secret: {reason(error)}"
                ) from error
            if not torch.equal(tensor, _as_tensor(store.secret.proof(name, peer, rank))):
                raise TransportError(f"what is connected as place {peer} of {size} does not know the job's secret")
        for send in sends:
            send.wait(timeout)


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def make_gloo_groups(store: Any, rank: int, size: int, timeout: timedelta, *, is_loopback: bool = False) -> list[Any]:
    """Make the groups for frames and for tensors; ``rank`` is this process's place in them.

    Where all ranks are on this host, ``is_loopback``, gloo listens at the loopback interface alone.

    Raises:
        TransportError: as :func:`make_gloo_group`.
    """
    with probed_connections():
        return [
            make_gloo_group(store, name, rank, size, timeout, is_loopback=is_loopback) for name in ("control", "bulk")
        ]


def make_gloo_group(
    store: Any, name: str, rank: int, size: int, timeout: timedelta, *, is_loopback: bool = False
) -> Any:
    """Make a private gloo group.

    Raises:
        TransportError: this torch has no gloo, or the ranks do not reach each other.
    """
    if not (dist.is_available() and dist.is_gloo_available()):
        raise TransportError(f"torch {torch.__version__} was built without gloo, which the torch transport needs")
    try:
        if not is_loopback:
            return dist.ProcessGroupGloo(PrefixStore(name, store), rank, size, timeout)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
        options._timeout = timeout
        return dist.ProcessGroupGloo(PrefixStore(name, store), rank, size, options)
    except RuntimeError as error:
        raise TransportError(
            f"gloo found no way between the {size} ranks ({reason(error)}); it uses the interface of this host's name, "
            "or the one in GLOO_SOCKET_IFNAME"
        ) from error
