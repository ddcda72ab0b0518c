"""Tests that messages are valid MessagePack: the msgpack package reads each message and packs the same bytes."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import msgpack
import pytest

from asyncdist.messaging import wire
from fuzzing.channel_sites import channel_sites
from fuzzing.frames import USERS, _drawn

SITES = [*channel_sites(), USERS]
#: No frame is longer, so no value in a frame is longer.
LIMITS: dict[str, Any] = dict.fromkeys(
    ("max_buffer_size", "max_str_len", "max_bin_len", "max_array_len", "max_map_len"), wire.FRAME_NBYTES_MAX
)


def as_msgpack(value: Any) -> Any:
    """Return a field's MessagePack form: a map for a dataclass, an array for a tuple."""
    if dataclasses.is_dataclass(value):
        return {field.name: as_msgpack(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return [as_msgpack(each) for each in value] if isinstance(value, tuple) else value


@pytest.mark.parametrize("site", SITES, ids=[site.where for site in SITES])
def test_every_message_of_every_channel(site: Any) -> None:
    rng, codec = random.Random(site.where), wire.Codec(site.message_types)
    for cls in site.classes:
        for _ in range(20):
            message = _drawn(cls, rng)
            _, payload = codec.encode(message)
            unpacker = msgpack.Unpacker(raw=False, strict_map_key=True, **LIMITS)
            unpacker.feed(payload)
            [read] = list(unpacker)
            assert repr(read) == repr(as_msgpack(message)), "the fields must be keyed by name, and nan must survive"
            assert msgpack.packb(read) == payload
