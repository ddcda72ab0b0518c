"""Ranks of one process whose messages go over a stand-in for a polled backend of torch.distributed."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from support.stand_in import Group
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from asyncdist.tags import TAG_MAX
from asyncdist.transports.base import Transport
from asyncdist.transports.local import LocalHub
from asyncdist.transports.split_plane import TwoPlaneTransport
from asyncdist.transports.torch_distributed.pollable_backends import PolledBulk, PolledTransport
from asyncdist.transports.torch_distributed.pollable_pairs import Pairs

#: For what the bulk plane says on control; no case uses it, nor do two planes that split the tags.
ENTRIES_TAG = TAG_MAX - 1


def make_pairs(kind: str, size: int, names: tuple[str, ...]) -> list[tuple[Pairs, ...]]:
    """Of each rank, one for each name."""
    store = HashStore()

    def make_group(name: str, key: str, *, rank: int) -> Group:
        return Group(PrefixStore(f"{name} {key}", store), rank, size, kind=kind)

    cpu = torch.device("cpu")
    return [
        tuple(Pairs(functools.partial(make_group, name, rank=rank), rank, cpu) for name in names)
        for rank in range(size)
    ]


def whole(kind: str, size: int) -> list[Transport]:
    """Everything on the backend."""
    return [
        PolledTransport(rank, size, kind, (frames, large))
        for rank, (frames, large) in enumerate(make_pairs(kind, size, ("frames", "large")))
    ]


def bulk(kind: str, size: int) -> list[Transport]:
    """Odd tags on the backend, even ones and what must be said on a local hub."""
    hub = LocalHub(size)
    made: list[Transport] = []
    for rank, (pairs,) in enumerate(make_pairs(kind, size, ("large",))):
        control = hub.transport(rank)
        plane = PolledBulk(control, ENTRIES_TAG, kind, pairs)
        made.append(TwoPlaneTransport(control, plane, range(1, TAG_MAX + 1, 2)))
    return made


MAKERS: dict[str, Callable[[str, int], list[Transport]]] = {"whole": whole, "bulk": bulk}
