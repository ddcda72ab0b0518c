"""Provides a recording of one short run to the tests that read recordings."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.recorded_run import train

import asyncdist as ad
from asyncdist.recording.reader import Recording, read_recording


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    report = ad.simulate(train, ranks=4, seed=5, record=folder)
    assert sum(report.results) > 2, "too few rounds took place"
    return folder


@pytest.fixture
def recording(folder: Path) -> Recording:
    return read_recording(folder)
