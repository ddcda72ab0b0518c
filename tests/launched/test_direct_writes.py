"""A direct write into the memory of another process."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest
import torch

from asyncdist.transports.cross_memory_attach import PeerProcess

CHILD = """
import ctypes, os, sys
from asyncdist.transports.cross_memory_attach import AttachToken
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
