"""Fixtures shared by the tests of this folder."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from support.local import worlds
from support.scripted import ScriptedTransport

from asyncdist import World
from asyncdist.messaging.engine import Engine
from protocols.selective import waiting


@pytest.fixture(autouse=True)
def patient_coordinators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let decisions wait for ranks that a busy machine does not run for a while: tests say which one is the worst."""
    monkeypatch.setattr(waiting, "NOISE_S", 1.0)


@pytest.fixture
async def pair() -> AsyncIterator[list[World]]:
    async with worlds(2) as made:
        yield made


@pytest.fixture
async def transport() -> ScriptedTransport:
    return ScriptedTransport()


@pytest.fixture
async def engine(transport: ScriptedTransport) -> AsyncIterator[Engine]:
    """A stopped engine, which moves only when the test calls it."""
    made = Engine(transport, asyncio.get_running_loop())  # type: ignore[arg-type]
    yield made
    made.stop()
