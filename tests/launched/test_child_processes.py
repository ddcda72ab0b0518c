"""Tests that child processes of a rank do not keep its connections open after the rank has ended."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore

import asyncdist as ad
from asyncdist.runtime.run import LoopName
from asyncdist.transports.torch_distributed.gloo_groups import make_gloo_groups
from asyncdist.transports.torch_distributed.sockets import configured_sockets, open_descriptors

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no procfs")


def connected(*, is_of_gloo: bool) -> tuple[socket.socket, socket.socket]:
    """Return a rank's and its peer's end of a connection, of which the rank's end is inheritable like gloo's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        with configured_sockets():
            own = socket.create_connection(server.getsockname())
            own.set_inheritable(is_of_gloo)
        return own, server.accept()[0]


def test_a_forked_child_does_not_keep_a_connection_open() -> None:
    own, peer = connected(is_of_gloo=True)
    others, other_peer = connected(is_of_gloo=False)
    ready, go_on = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os.write(ready[1], b"1")
        os.read(go_on[0], 1)
        os.write(others.fileno(), b"the child may use connections of the program")
        os._exit(0 if os.get_blocking(own.fileno()) else 1)  # the descriptor is still taken
    os.read(ready[0], 1)
    with own, peer, others, other_peer:
        own.close()  # as when the rank is killed
        peer.settimeout(20)
        assert peer.recv(1) == b""
        os.write(go_on[1], b"1")
        assert other_peer.recv(9) == b"the child"
    assert os.waitpid(child, 0)[1] == 0
    for descriptor in (*ready, *go_on):
        os.close(descriptor)


def test_a_started_program_does_not_inherit_a_connection() -> None:
    own, peer = connected(is_of_gloo=True)
    with own, peer:
        listed = subprocess.run(["/bin/ls", "-l", "/proc/self/fd"], close_fds=False, capture_output=True, check=True)
        assert f"socket:[{os.fstat(own.fileno()).st_ino}]" not in listed.stdout.decode()


def test_a_descriptor_used_again_stays_open_in_a_child() -> None:
    own, peer = connected(is_of_gloo=True)
    number = own.detach()
    read, write = os.pipe()
    os.dup2(write, number)
    child = os.fork()
    if child == 0:
        os.write(number, b"1")
        os._exit(0)
    with peer:
        assert os.read(read, 1) == b"1"
    os.waitpid(child, 0)
    for descriptor in (read, write, number):
        os.close(descriptor)


def test_the_groups_of_a_rank_have_no_inheritable_descriptors() -> None:
    earlier, store = set(open_descriptors()), HashStore()
    with ThreadPoolExecutor(2) as threads:
        ranks = [
            threads.submit(make_gloo_groups, store, rank, 2, timedelta(seconds=60), is_loopback=True)
            for rank in range(2)
        ]
        groups = [rank.result() for rank in ranks]
    sockets = [each for each in open_descriptors() if each not in earlier and is_socket(each)]
    assert len(groups) == 2 and len(sockets) >= 4, "each rank must have a connection in each of its two groups"
    assert not any(map(os.get_inheritable, sockets))


def is_socket(descriptor: int) -> bool:
    return os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_child_in_the_loop_of_a_rank_takes_no_wakeup(loop: LoopName, capfd: pytest.CaptureFixture[str]) -> None:
    """Regression: it read the byte that was to wake the rank, which then slept forever."""

    async def main(world: ad.World) -> bytes:
        seen, rung = os.pipe2(os.O_NONBLOCK)
        turning = asyncio.get_running_loop()
        turning.add_reader(seen, os.read, seen, 1)
        await asyncio.sleep(0.01)
        os.write(rung, b"1")
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            await asyncio.sleep(0)
            os._exit(7)
        status = os.waitpid(child, 0)[1]  # noqa: ASYNC222 - the rank's loop must not run meanwhile
        turning.remove_reader(seen)
        unread = os.read(seen, 1)
        os.close(seen), os.close(rung)
        assert os.waitstatus_to_exitcode(status) == 1
        return unread

    assert ad.run_local(main, ranks=1, loop=loop) == [b"1"]
    assert "has awaited in the rank's event loop" in capfd.readouterr().err
