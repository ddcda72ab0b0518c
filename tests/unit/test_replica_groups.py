"""Tests the process groups of replicas, with a backend that sends nothing."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from asyncdist import LocalProtocolError
from asyncdist.integrations import replicas
from asyncdist.integrations.replicas import new_process_group

#: Rank 3 of 4, the second rank of the second replica.
WORLD: Any = SimpleNamespace(rank=3, size=4, _caller=None)


@pytest.fixture
def started(request: pytest.FixtureRequest) -> Iterator[None]:
    """Start torch.distributed with the given rank and number of ranks."""
    rank, size = request.param
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("started", "ranks"), [((3, 4), [2, 3]), ((1, 2), [0, 1])], ids=["all ranks", "the replica"], indirect=["started"]
)
def test_each_call_returns_a_group_of_the_replica(started: None, ranks: list[int]) -> None:
    """Regression: the second network of a program was refused, after the first call had started torch.distributed."""
    groups = [new_process_group(WORLD, 2, None) for _ in range(2)]
    assert [dist.get_process_group_ranks(group) for group in groups] == [ranks] * 2
    assert groups[0] is not groups[1]


@pytest.mark.parametrize("started", [(2, 4), (0, 2), (1, 3)], ids=str, indirect=True)
def test_other_ranks_of_torch_are_refused(started: None) -> None:
    with pytest.raises(LocalProtocolError, match="must be started with the same ranks as the world"):
        new_process_group(WORLD, 2, None)


def test_the_store_of_a_replica_on_one_host_is_at_loopback() -> None:
    """Regression: the store, which knows no secret, listened at all addresses of the host."""
    store = replicas._served_store("127.0.0.1")
    with socket.create_server(("127.0.0.2", store.port)):  # fails if the store listens there, too
        store.set("key", "value")
        assert store.get("key") == b"value"
