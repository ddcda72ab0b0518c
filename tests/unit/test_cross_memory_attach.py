"""Tests writes to another process's memory, and the token without which it is not written to."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from asyncdist.host_memory import cross_memory_attach
from asyncdist.host_memory.cross_memory_attach import AttachToken, PeerProcess


def test_a_licence_is_found_and_used() -> None:
    licence = AttachToken()
    neighbour = PeerProcess(licence.pid, licence.address, licence.token)
    source, target = (torch.arange(10_000) % 251).to(torch.uint8), torch.zeros(10_000, dtype=torch.uint8)
    neighbour.write(source.data_ptr() + 5, target.data_ptr() + 7, 9000)
    assert torch.equal(target[7:9007], source[5:9005])
    assert not target[:7].any()
    assert not target[9007:].any()


def test_nothing_is_written_after_the_licence_is_taken_back() -> None:
    licence = AttachToken()
    neighbour = PeerProcess(licence.pid, licence.address, licence.token)
    licence.revoke()
    target = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(OSError, match="has revoked its token"):
        neighbour.write(torch.ones(8, dtype=torch.uint8).data_ptr(), target.data_ptr(), 8)
    assert not target.any()


@pytest.mark.parametrize(
    "forge",
    [
        lambda licence: (licence.pid, licence.address, bytes(16)),
        lambda licence: (licence.pid, licence.address, b""),
        lambda licence: (licence.pid, licence.address + 1, licence.token),
        lambda licence: (licence.pid, 1, licence.token),
        lambda licence: (licence.pid, -1, licence.token),
        lambda licence: (-1, licence.address, licence.token),
        lambda licence: (0, licence.address, licence.token),
    ],
    ids=["token", "no token", "beside it", "address", "negative address", "negative pid", "pid"],
)
def test_who_has_not_the_token_is_no_neighbour(forge: Callable[[AttachToken], tuple[int, int, bytes]]) -> None:
    licence = AttachToken()
    with pytest.raises(OSError, match=r"token|No such process|Bad address"):
        PeerProcess(*forge(licence))


def test_a_system_without_the_calls_has_no_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_memory_attach.ctypes, "PyDLL", lambda *_args, **_options: object())
    licence = AttachToken()
    with pytest.raises(OSError, match="no process_vm_readv"):
        PeerProcess(licence.pid, licence.address, licence.token)


def test_what_stands_in_the_way_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    yama = tmp_path / "ptrace_scope"
    monkeypatch.setattr(cross_memory_attach, "_YAMA", yama)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert cross_memory_attach.obstacle() is None, "without Yama, the kernel must allow it"
    yama.write_text("0\n")
    assert cross_memory_attach.obstacle() is None
    yama.write_text("1\n")
    assert cross_memory_attach.obstacle() == "kernel.yama.ptrace_scope is 1"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert cross_memory_attach.obstacle() is None, "root must be allowed to"
    monkeypatch.setattr(cross_memory_attach.ctypes, "PyDLL", lambda *_args, **_options: object())
    assert cross_memory_attach.obstacle() == "this system has no process_vm_readv"
