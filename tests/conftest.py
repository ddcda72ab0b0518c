"""Shared by all tests: the path of their helpers, and quiet threads."""

from __future__ import annotations

import signal
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

pytest_plugins = ["pytester"]

HERE = Path(__file__).resolve().parent
sys.path[:0] = [path for path in (str(HERE), str(HERE.parent)) if path not in sys.path]
pytest.register_assert_rewrite("support", "conformance", "helpers")
# A shell's background jobs ignore SIGINT, and so would every job that is started and interrupted here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")
# Several ranks and test processes share few cores.
torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Hide MPI from tests without the mark ``mpi``.

    ``./tools/test --mpi mpich -m mpi`` is to run everything that differs there, so that nothing may start ranks of MPI
    by accident: mpi4py, here or in what a test starts, is told of a library that does not exist.
    """
    with pytest.MonkeyPatch.context() as patch:
        if item.get_closest_marker("mpi") is None:
            patch.setenv("MPI4PY_LIBMPI", "none for tests without @pytest.mark.mpi")
        return (yield)
