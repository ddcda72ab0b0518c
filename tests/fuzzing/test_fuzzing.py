"""Runs a short form of the fuzz tests of ./tools/soak, and regressions that these have found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fuzzing import decoders, frames, memory, recordings, sequences
from fuzzing.channel_sites import channel_sites

CORPUS = json.loads((Path(__file__).resolve().parents[1] / "data" / "fuzzed.json").read_text())
DECODERS = {decoder.name: decoder for decoder in decoders.decoders()}


@pytest.mark.slow
async def test_damaged_frames_are_received_or_counted() -> None:
    fed = await frames.fuzz(0, 15_000)
    assert fed.received_count > 1_000 and len(fed.reasons) > 8, fed.reasons


@pytest.mark.slow
async def test_frames_that_announce_much_take_little_memory() -> None:
    with memory.bounded_peak():
        await frames.fuzz(1, 400)


def test_every_channel_of_the_code_is_fuzzed() -> None:
    sites = channel_sites()
    assert len(sites) >= 12
    assert len({cls for site in sites for cls in site.classes}) >= 45


@pytest.mark.slow
def test_damaged_texts_are_refused_as_documented() -> None:
    found = decoders.fuzz(0, 4_000)
    assert found.keys() == DECODERS.keys()
    assert all(counts[0] > 0 for counts in found.values()), found


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds", [range(40), pytest.param(range(40, 600), marks=pytest.mark.long)], ids=["40", "560 more"]
)
def test_damaged_recordings_are_read_or_refused_in_a_line(seeds: range) -> None:
    assert recordings.draw_one_page() > 1_000_000
    fates = recordings.fuzz(seeds)
    for command in ("report", "trace", "export", "parquet", "query", "story", "replay"):
        assert fates[f"{command}: refused"] and (fates[f"{command}: read"] or command == "report"), fates


@pytest.mark.parametrize("found", CORPUS["found"], ids=lambda found: f"{found['decoder']}: {found['story']}")
def test_what_was_refused_wrongly_once(found: dict[str, str]) -> None:
    decoders.check(DECODERS[found["decoder"]], bytes.fromhex(found["hex"]))


@pytest.mark.parametrize("name", CORPUS["reached"])
def test_what_has_reached_other_lines_of_a_decoder(name: str) -> None:
    """These inputs were found by ten minutes of atheris, which looks for inputs that run new lines of code."""
    for text in CORPUS["reached"][name]:
        decoders.check(DECODERS[name], bytes.fromhex(text))


@pytest.mark.slow
def test_state_machines_keep_their_promises() -> None:
    told = sequences.fuzz(range(600))
    assert set(told) == {machine.__name__ for machine in sequences.MACHINES}
