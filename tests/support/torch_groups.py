"""Lets tests in one process use process groups of torch."""

from __future__ import annotations

import gc

import pytest
import torch


def pretend_initialized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let policies search for DDP and FSDP wrappers, among the objects of this test file.

    The search makes frozen objects visible again: here two million objects of pytest and of all libraries, whose
    collection takes 1.5 s.
    """
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(gc, "unfreeze", lambda: None)
