"""A host that is unplugged says nothing, and is found."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from scripts import unplugged
from support import torchrun

ADDRESSES = ("10.213.77.1", "10.213.77.2")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a cable between them: their names, which are those of their ends of it, too."""
    names = f"ad{os.getpid()}a", f"ad{os.getpid()}b"
    if shutil.which("ip") is None:
        pytest.skip("iproute2 is not installed")
    with ExitStack() as stack:
        for name in names:
            try:
                ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespace can be made here: {error.stderr.decode().strip()}")
            stack.callback(ip, "netns", "del", name)
        ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1], "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", name)
            ip("-n", name, "link", "set", name, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names


def test_an_unplugged_host_is_lost_to_the_others_and_the_others_to_it(hosts: tuple[str, str]) -> None:
    port = torchrun.free_port()
    jobs = []
    for rank in range(3):
        host = hosts[rank == unplugged.VICTIM]
        command = ["ip", "netns", "exec", host, sys.executable, unplugged.__file__, host]
        environ = torchrun.rank_environment(rank, 3, port)
        jobs.append((command, {**environ, "MASTER_ADDR": ADDRESSES[0], "GLOO_SOCKET_IFNAME": host}))
    reports = torchrun.run_jobs(jobs, timeout_s=100).check().reports
    assert [reports[rank]["lost"] for rank in (0, 1)] == [unplugged.VICTIM] * 2
    assert reports[unplugged.VICTIM]["lost"] in (0, 1)
    assert [reports[rank]["left"] for rank in range(3)] == [2, 2, 1]
    assert all(report["steps"] > 20 for report in reports.values()), "they trained on until it was known"
