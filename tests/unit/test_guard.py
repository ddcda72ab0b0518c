"""Tests that ``tests/conftest.py`` refuses to start processes for tests outside ``tests/launched``."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

STARTS: dict[str, Callable[[], Any]] = {
    "subprocess": lambda: subprocess.run(["true"], check=True),
    "system": lambda: os.system("true"),
    "fork": os.fork,
    "forked": lambda: multiprocessing.get_context("fork").Process(target=int).start(),
    "spawned": lambda: multiprocessing.get_context("spawn").Process(target=int).start(),
}


@pytest.mark.parametrize("how", STARTS)
def test_guard_refuses_a_process_and_names_the_right_folder(how: str) -> None:
    with pytest.raises(RuntimeError, match="belong to tests/launched"):
        STARTS[how]()
