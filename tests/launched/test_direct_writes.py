"""Tests a direct write into the memory of another process."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest
import torch
from support import torchrun
from support.mpi import run_source

from asyncdist.host_memory.cross_memory_attach import PeerProcess, obstacle

CHILD = """
import ctypes, os, sys
from asyncdist.host_memory.cross_memory_attach import AttachToken
licence, room = AttachToken(), ctypes.create_string_buffer(8)
print(licence.pid, licence.address, licence.token.hex(), ctypes.addressof(room), flush=True)
sys.stdin.readline()
print(room.raw.decode(), flush=True)
"""


def test_another_process_is_written_to_and_not_after_its_end() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        pid, address, token, room = child.stdout.readline().split()
        neighbour = PeerProcess(int(pid), int(address), bytes.fromhex(token))
        source = torch.tensor(list(b"written!"), dtype=torch.uint8)
        neighbour.write(source.data_ptr(), int(room), 8)
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "written!\n"
    with pytest.raises(OSError, match=os.strerror(errno.ESRCH)):
        neighbour.write(source.data_ptr(), int(room), 8)


@pytest.mark.skipif(obstacle() is not None, reason="the kernel lets no process write to another's memory")
@pytest.mark.parametrize(
    ("transport", "share"), [pytest.param("mpi", 0.5, marks=[pytest.mark.mpi, pytest.mark.long]), ("torch", 1.0)]
)
def test_large_tensors_are_written_directly_on_one_host(transport: str, share: float) -> None:
    result = (run_source if transport == "mpi" else torchrun.run_source)(
        2,
        """
        import torch
        from support.mpi import report

        import asyncdist as ad
        from asyncdist.messaging.user_streams import UserStreams

        granted, original = [0], UserStreams._written_nbytes

        def noted(self, nbytes, source):
            granted.append(original(self, nbytes, source))
            return granted[-1]

        UserStreams._written_nbytes = noted

        async def main(world):
            tensor = torch.zeros(1 << 20)
            for number in range(1, 1000):
                if world.rank == 0:
                    await world.send_stream(tensor.fill_(number), 1)
                else:
                    await world.receive_stream(tensor, 0)
                    assert (tensor == number).all()
                if int(await ad.all_reduce(torch.tensor(granted[-1]))):
                    break
            report(world.rank, granted[-1])

        ad.run(main, strict=True)
        """,
    ).check()
    assert result.reports == {0: 0, 1: int(share * (4 << 20))}
