"""Tests MPI's matching rule for backends that only move bytes, and the call queue from the loop to their threads."""

from __future__ import annotations

import pytest
from support.matching import post

from asyncdist.errors import RankLostError, TruncationError
from asyncdist.transports.base import ANY_SOURCE
from asyncdist.transports.matching import BufferedMessage, CallbackQueue, Matcher, Send


@pytest.fixture
def matcher() -> Matcher:
    return Matcher(CallbackQueue())


def inline(source: int, tag: int, data: bytes) -> BufferedMessage:
    return BufferedMessage(source, tag, memoryview(data))


def test_the_first_receive_that_fits_takes_the_message(matcher: Matcher) -> None:
    other_tag, _ = post(matcher, 1, 1, 6)
    other_source, _ = post(matcher, 1, 2, 5)
    anybody, buffer = post(matcher, 1, ANY_SOURCE, 5)
    late, _ = post(matcher, 1, 1, 5)
    matcher.deliver(inline(1, 5, b"x"))
    assert [r.test() for r in (other_tag, other_source, anybody, late)] == [False, False, True, False]
    assert (anybody.source, anybody.nbytes, buffer) == (1, 1, b"x")


def test_the_first_message_that_fits_is_taken(matcher: Matcher) -> None:
    for source, data in ((1, b"a"), (2, b"b"), (1, b"c")):
        matcher.deliver(inline(source, 5, data))
    found = [post(matcher, 1, source, 5)[1] for source in (2, ANY_SOURCE, 1)]
    assert found == [b"b", b"a", b"c"]


def test_a_message_above_its_buffer_names_both_sizes(matcher: Matcher) -> None:
    receive, buffer = post(matcher, 3, ANY_SOURCE, 5)
    matcher.deliver(inline(7, 5, b"four"))
    with pytest.raises(TruncationError, match="4 bytes arrived for a buffer of 3 bytes"):
        receive.test()
    assert buffer == bytes(3)


def test_a_large_message_to_oneself_is_sent_when_it_is_received(matcher: Matcher) -> None:
    rung: list[None] = []
    matcher.callbacks.set_bell(lambda: rung.append(None))
    data = bytearray(b"y" * 100_000)
    send = Send(matcher.callbacks, len(data))
    matcher.deliver(BufferedMessage(0, 5, memoryview(data), send))
    assert not send.test() and not rung
    receive, buffer = post(matcher, 100_000, 0, 5)
    assert receive.test() and send.test() and rung and buffer == data


def test_lost_rank_fails_its_receives_and_keeps_whole_messages(matcher: Matcher) -> None:
    matcher.deliver(inline(1, 5, b"z"))
    mine, others, anybodys = (post(matcher, 1, source, 6)[0] for source in (1, 2, ANY_SOURCE))
    matcher.lose(1, RankLostError("rank 1 is gone", rank=1))
    with pytest.raises(RankLostError, match="rank 1 is gone"):
        mine.test()
    assert not others.test() and not anybodys.test()
    assert post(matcher, 1, 1, 5)[1] == b"z"
    with pytest.raises(RankLostError):
        post(matcher, 1, 1, 5)[0].test()


def test_a_matched_receive_cannot_be_withdrawn(matcher: Matcher) -> None:
    receive, _ = post(matcher, 1, 1, 5)
    receive.cancel()
    assert receive.test() and receive.cancelled
    matcher.deliver(inline(1, 5, b"k"))
    receive, buffer = post(matcher, 1, 1, 5)
    receive.cancel()
    assert receive.test() and not receive.cancelled and buffer == b"k"


def test_inbox_rings_once_per_batch_and_again_after_a_look() -> None:
    inbox, rung, seen = CallbackQueue(), list[None](), list[int]()
    inbox.put(seen.append, 1)  # before any task listens
    inbox.set_bell(lambda: rung.append(None))
    inbox.put(seen.append, 2)
    assert (len(rung), seen) == (1, [])
    inbox.empty()
    inbox.put(seen.append, 3)
    assert (len(rung), seen) == (2, [1, 2])


def test_calls_behind_one_that_raises_ring_the_bell() -> None:
    """Regression: they waited until other code looked, because the queue was not empty at the next call."""
    inbox, rung, seen = CallbackQueue(), list[None](), list[int]()

    def fail(_: int) -> None:
        raise ValueError("a call")

    inbox.set_bell(lambda: rung.append(None))
    inbox.put(fail, 1)
    inbox.put(seen.append, 2)
    with pytest.raises(ValueError, match="a call"):
        inbox.empty()
    assert len(rung) == 2
    inbox.empty()
    assert (len(rung), seen) == (2, [2])


def test_look_between_a_call_and_its_bell_keeps_the_next_bell() -> None:
    """Regression: a rank slept forever with a message in its inbox."""
    inbox, rung, seen = CallbackQueue(), list[None](), list[int]()

    def look_then_ring() -> None:
        inbox.empty()
        rung.append(None)

    inbox.set_bell(look_then_ring)
    for number in range(3):
        inbox.put(seen.append, number)
    assert (len(rung), seen) == (3, [0, 1, 2])
