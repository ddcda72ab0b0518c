"""Makes private gloo groups, checks that connected processes know the job's secret, and closes connections.

asyncdist sends its messages only over gloo. NCCL is unsuitable, because it ignores tags and matches messages in the
order of the calls (pytorch#94819, #125079).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import torch
from torch import distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from asyncdist.errors import TransportError
from asyncdist.transports.torch_distributed.failures import reason
from asyncdist.transports.torch_distributed.meeting.sealed_store import SealedStore
from asyncdist.transports.torch_distributed.sockets import configured_sockets

_POISON_TAG: Final = 0x7FFFFFFE
_PROOF_TAG: Final = 0x7FFFFFFC
_LOOPBACK: Final = "127.0.0.1"


def close_connections(group: Any) -> None:
    """Close every connection of the group by letting a wait time out, after which gloo closes them."""
    with contextlib.suppress(RuntimeError):
        group.recv_anysource([torch.zeros(1, dtype=torch.uint8, device="cpu")], _POISON_TAG).wait(
            timedelta(milliseconds=1)
        )


def prove_connections(groups: Sequence[Any], rank: int, size: int, timeout: timedelta, store: SealedStore) -> None:
    """Check, over each connection of new gloo groups, that the process at the other end knows the job's secret.

    gloo accepts any process that reaches its port and sends a connection's number. A process without the secret cannot
    send the proof, so the groups are abandoned.

    Args:
        timeout: Timeout for all proofs together.
        store: Part of the store through which the processes connected. Its prefix identifies their connections.

    Raises:
        TransportError: A process, named in the message, did not send a valid proof.
    """
    if store.secret.is_missing:
        return
    deadline = time.monotonic() + timeout.total_seconds()
    peers = [peer for peer in range(size) if peer != rank]
    for number, group in enumerate(groups):
        name = f"{store.prefix}{number}"
        own = [_as_tensor(store.secret.proof(name, rank, peer)) for peer in peers]
        theirs = [torch.zeros_like(tensor) for tensor in own]
        receives = [group.recv([tensor], peer, _PROOF_TAG) for tensor, peer in zip(theirs, peers, strict=True)]
        sends = [group.send([tensor], peer, _PROOF_TAG) for tensor, peer in zip(own, peers, strict=True)]
        for peer, receive, tensor in zip(peers, receives, theirs, strict=True):
            try:
                receive.wait(_until(deadline))
            except RuntimeError as error:
                raise TransportError(
                    f"the process at place {peer} of {size} did not prove that it knows the job's secret: "
                    f"{reason(error)}"
                ) from error
            if not torch.equal(tensor, _as_tensor(store.secret.proof(name, peer, rank))):
                raise TransportError(
                    f"the process at place {peer} of {size} does not know the job's secret; give all ranks the same "
                    "ASYNCDIST_JOB_SECRET_FILE"
                )
        for send in sends:
            send.wait(_until(deadline))


def _until(deadline: float) -> timedelta:
    """Return the time until ``deadline``, but at least 1 ms, because gloo takes 0 for its own timeout."""
    return timedelta(seconds=max(0.001, deadline - time.monotonic()))


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def make_gloo_groups(store: Any, rank: int, size: int, timeout: timedelta, *, is_loopback: bool = False) -> list[Any]:
    """Make the gloo groups for frames and large messages, on the loopback interface if ``is_loopback`` is true."""
    with configured_sockets():
        return [
            make_gloo_group(store, name, rank, size, timeout, is_loopback=is_loopback) for name in ("control", "bulk")
        ]


def make_gloo_group(
    store: Any, name: str, rank: int, size: int, timeout: timedelta, *, is_loopback: bool = False
) -> Any:
    """Make one private gloo group. Raise TransportError if torch has no gloo, or the ranks cannot connect."""
    if not (dist.is_available() and dist.is_gloo_available()):
        raise TransportError(
            f"the torch transport needs gloo, but torch {torch.__version__} was built without it; install another "
            "build of torch"
        )
    try:
        if not is_loopback:
            return dist.ProcessGroupGloo(PrefixStore(name, store), rank, size, timeout)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
        options._timeout = timeout
        return dist.ProcessGroupGloo(PrefixStore(name, store), rank, size, options)
    except RuntimeError as error:
        raise TransportError(
            f"gloo could not connect the {size} ranks ({reason(error)}). It uses the network interface of this host's "
            "name; to choose another, set GLOO_SOCKET_IFNAME"
        ) from error
