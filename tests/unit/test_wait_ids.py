"""Tests the identities of waits: they are equal if their fields are, and one table of templates describes them."""

from __future__ import annotations

import string

import msgspec
import pytest

from asyncdist.recording.schema import EventSchema
from asyncdist.waits import WaitId, WaitKind


@pytest.mark.parametrize("kind", WaitKind)
def test_each_kind_of_wait_has_a_text_that_its_fields_complete(kind: WaitKind) -> None:
    named = {name for _, name, _, _ in string.Formatter().parse(kind.template) if name}
    assert named <= {"tag", "peer", "number", "name"}
    text = str(WaitId(kind, tag=41, peer=5, number=7, name="words"))
    shown = {"tag": "41", "peer": "5", "number": "7", "name": "words"}
    assert text and all(shown[name] in text for name in named)


@pytest.mark.parametrize("kind", WaitKind)
def test_a_wait_is_recorded_as_an_array_that_the_schema_takes(kind: WaitKind) -> None:
    wait = WaitId(kind, tag=41, peer=1, number=7, name="words")
    kinds = {"timer": ("what", "turn", "woken", "begun")}
    content = msgspec.msgpack.encode((0, 0, wait, 0, 1, 2))
    schema = EventSchema(kinds, 2)
    schema.check(content)
    (event,) = schema.reader()(content, 0.0)
    assert event.wait == wait
    assert len({event.wait, wait}) == 1
    assert wait not in {wait._replace(number=8), wait._replace(name="other"), wait._replace(tag=None)}


def test_the_text_of_a_kind_of_another_version_names_its_fields() -> None:
    assert str(WaitId("kind_of_tomorrow", tag=40, number=3)) == "kind kind_of_tomorrow, tag 40, number 3"


def test_a_text_of_a_user_is_never_a_template() -> None:
    wait = WaitId(WaitKind.MESSAGE, tag=40, name="{peer} {0.__class__}")
    assert str(wait) == "a message on {peer} {0.__class__}, tag 40"
