"""Runs pytest with the plugin on small test files, and reads its reports on simulations."""

from __future__ import annotations

import re
import shlex
import sys
import textwrap
from unittest import mock

import pytest

import asyncdist.simulation  # noqa: F401 before any inner session, which removes the modules that it has imported

HEAD = """
import asyncio
import dataclasses
import pytest
import torch
import asyncdist as ad
from asyncdist.simulation import Compute, Interrupt, Kill, Link, Network, Stall

"""


def run_tests(pytester: pytest.Pytester, source: str, *options: str, ini: str = "") -> pytest.RunResult:
    """Run test code with the plugin; the module begins with the imports in HEAD."""
    pytester.makeini(f"[pytest]\naddopts = --strict-markers\nasyncio_default_fixture_loop_scope = function\n{ini}")
    pytester.makepyfile(test_it=HEAD + textwrap.dedent(source))
    # Python takes bytecode for up to date if a source has the same second and size, as the next test's source may have.
    with mock.patch.object(sys, "dont_write_bytecode", True):
        return pytester.runpytest_inprocess(*options)


def sections(result: pytest.RunResult) -> list[str]:
    """Return the sections ``simulation`` of the output, one for each failed test."""
    return re.findall(r"^-+ simulation -+\n(.*?^repeat: [^\n]*)$", result.stdout.str(), re.MULTILINE | re.DOTALL)


def section(result: pytest.RunResult) -> list[str]:
    """Return the lines of the only section."""
    found = sections(result)
    assert len(found) == 1, result.stdout.str()
    return found[0].splitlines()


def repeat_options(result: pytest.RunResult) -> list[str]:
    """Return the arguments on the line that repeats a failure."""
    line = section(result)[-1]
    assert line.startswith("repeat: pytest ")
    return shlex.split(line)[2:]
