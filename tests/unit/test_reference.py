"""Tests that a page of the API reference describes each public name."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import asyncdist as ad
import protocols
from asyncdist import simulation

ROOT = Path(__file__).parents[2]
#: Modules of the integrations that only the other ones use.
INTERNAL = {"__init__", "joining", "metrics", "patching", "random_numbers", "replicas"}


def test_every_public_name_is_in_the_reference() -> None:
    pages = [*(ROOT / "docs" / "api").glob("*.md"), *(ROOT / "docs" / "simple").glob("*.md")]
    described = {name for page in pages for name in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE)}
    blocking = [name for name, value in vars(ad.blocking).items() if name[0] != "_" and type(value) is not ModuleType]
    wanted = {f"asyncdist.{name}" for name in ad.__all__}
    wanted |= {f"protocols.{name}" for name in protocols.__all__}
    wanted |= {f"asyncdist.simulation.{name}" for name in simulation.__all__ if name not in ad.__all__}
    wanted |= {f"asyncdist.blocking.{name}" for name in blocking}
    wanted |= {"asyncdist.recording.reader.read_recording", "asyncdist.pytest_plugin", "asyncdist.bench"}
    integrations = {path.stem for path in (ROOT / "asyncdist" / "integrations").glob("*.py")} - INTERNAL
    wanted |= {f"asyncdist.integrations.{name}" for name in integrations}
    assert len(blocking) > 30 and len(wanted) > 180
    assert sorted(wanted - described) == []
