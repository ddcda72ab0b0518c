"""Opens channels on two local ranks, and defines messages for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from asyncdist import World
from asyncdist.messaging.channels import Channel

TAG = 77


@dataclass(frozen=True, slots=True)
class Number:
    value: int


@dataclass(frozen=True, slots=True)
class Word:
    text: str


@dataclass(frozen=True, slots=True)
class Blob:
    data: bytes


def dropped(world: World) -> dict[str, int]:
    return world.statistics().dropped


def both(pair: list[World], **options: Any) -> list[Channel[Number]]:
    return [world.channel(Number, tag=TAG, **options) for world in pair]
